# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
versions="0.19.8"
megabytes=5100
minutes="3 12"
install() {
    "$pip" -q install torch==2.13.0 setuptools wheel ninja &&
        "$pip" -q install "deepspeed==$1" --no-build-isolation &&
        "$pip" -q install transformers==5.23.0 accelerate==1.15.0 peft==0.21.2
}
