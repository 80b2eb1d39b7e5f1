# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
# Megatron-Core in the parts that exist without a GPU: the suites of tests/python that run them.
versions="0.16.1"
megabytes=5000
minutes="2 3"
tests="python/test_megatron_core.py python/test_activation_megatron.py python/test_host_masters.py"
install() {
    "$pip" -q install torch==2.13.0 numpy packaging psutil && "$pip" -q install --no-deps "megatron-core==$1"
}
