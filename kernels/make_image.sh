#!/bin/bash
# Compiles the GPU's kernels into kernels/ (or FOLDER): cuda_image.fatbin, cuda_image.ptx, and in
# cuda_image.made what they were made from. The same sources and the same nvcc make the same bytes,
# in any folder. cuda_image.c includes the first two.
#
# The machine code is made from PTX that is marked as PTX ISA 7.0, which has all that the kernels
# use: so drivers as old as refit takes (CUDA 12.0) can compile it for their GPU, which they refuse
# to do with what nvcc marks as its own.
#
#     kernels/make_image.sh [FOLDER]   writes; needs nvcc
#     kernels/make_image.sh --sources  prints the hash of all that goes into the image
#     kernels/make_image.sh --compiler prints which nvcc is installed; nothing if none is
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sources=(kernels/cuda_image.cu kernels/cast.cu kernels/delta_apply.cu
    kernels/delta_exchange.cu kernels/digest.cu kernels/master.cu kernels/pack.cu kernels/delta.h kernels/delta_job.h
    kernels/delta_rules.h kernels/delta_threads.h kernels/digest_job.h kernels/digest_word.h kernels/gpu.h
    kernels/gpu_scan.h kernels/master.h kernels/master_rules.h kernels/pack.h)
ptx_flags=(-std=c++17 -arch=compute_80 -ptx -I.)
ptx_version=7.0
image_flags=(-fatbin --compress-mode=size
    "-gencode=arch=compute_80,code=[sm_80,sm_90,sm_100,compute_80]")

# Flags count as sources: this script is hashed too.
hash_sources() {
    cat "${sources[@]}" kernels/make_image.sh | sha256sum | cut -d ' ' -f 1
}

find_compiler() {
    local nvcc
    nvcc=$(command -v nvcc || true)
    [ -n "$nvcc" ] || nvcc=/usr/local/cuda/bin/nvcc
    [ -x "$nvcc" ] && echo "$nvcc"
}

name_compiler() {
    "$1" --version | sed -n 's/^Cuda compilation tools, release.*, V/nvcc /p'
}

# build NVCC: leaves image.fatbin and image.ptx in $work.
build() {
    "$1" "${ptx_flags[@]}" -o "$work/made.ptx" kernels/cuda_image.cu
    sed -e '/^[[:space:]]*\/\//d' -e "s/^\.version .*/.version $ptx_version/" "$work/made.ptx" \
        >"$work/image.ptx"
    (cd "$work" && "$1" "${image_flags[@]}" -o image.fatbin image.ptx)
}

case ${1:-} in
--sources)
    hash_sources
    exit
    ;;
--compiler)
    nvcc=$(find_compiler) && name_compiler "$nvcc"
    exit 0
    ;;
esac
nvcc=$(find_compiler) || {
    echo "nvcc is not installed: it comes with the CUDA toolkit" >&2
    exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build "$nvcc"
folder=${1:-kernels}
printf 'sources %s\ncompiler %s\n' "$(hash_sources)" "$(name_compiler "$nvcc")" >"$folder/cuda_image.made"
mv "$work/image.fatbin" "$folder/cuda_image.fatbin"
mv "$work/image.ptx" "$folder/cuda_image.ptx"
