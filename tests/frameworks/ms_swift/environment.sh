# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
# ms-swift chooses its own versions of transformers, TRL and PEFT.
versions="4.6.0"
megabytes=2100
minutes="2 4"
install() {
    "$pip" -q install torch==2.13.0 && "$pip" -q install torch==2.13.0 "ms-swift==$1" "transformers==5.19.0" "accelerate==1.15.0"
}
