# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
# TRL, transformers, accelerate and PEFT: the suites of tests/python that run them.
versions="1.16.0"
megabytes=5400
minutes="3 6"
tests="python/test_trl.py python/test_trl_ranks.py python/test_transformers.py python/test_lora.py"
install() {
    "$pip" -q install torch==2.13.0 "trl==$1" transformers==5.23.0 accelerate==1.15.0 peft==0.21.2
}
