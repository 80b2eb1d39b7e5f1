# shellcheck shell=bash disable=SC2034,SC2154 # sourced by run.sh
versions="0.3.0"
megabytes=1700
minutes="2 2"

# SkyRL's own list of requirements is for GPUs: here is what its FSDP strategy imports on a CPU. It wants
# Python 3.12 for one name of typing (strategy.py), and imports two names of flash_attn (stubs).
install() {
    "$pip" -q install --no-deps "skyrl==$1" skyrl-gym==0.4.0 &&
        "$pip" -q install torch==2.13.0 transformers==5.10.4 accelerate==1.15.0 peft==0.21.2 numpy pandas ray==2.60.0 \
            jaxtyping loguru omegaconf packaging tensordict typing_extensions
}
