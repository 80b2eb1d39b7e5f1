#!/bin/bash
# image_fresh.sh: kernels/cuda_image.c was made from the kernels as they are now. The hash of their
# sources tells anywhere; where the nvcc that made the file is installed, it makes the same bytes.
set -euo pipefail
image=kernels/cuda_image.c
made_from=$(sed -n 's/^ \* sources //p' "$image")
made_by=$(sed -n 's/^ \* compiler \(.*\) \*\/$/\1/p' "$image")
if [ "$made_from" != "$(kernels/make_image.sh --sources)" ]; then
    echo "$image is older than the kernels' sources: run kernels/make_image.sh"
    exit 1
fi
installed=$(kernels/make_image.sh --compiler)
if [ "$installed" != "$made_by" ]; then
    echo "only the sources were compared: $image was made by $made_by, here is ${installed:-none}"
    exit 0
fi
again=$(mktemp)
trap 'rm -f "$again"' EXIT
kernels/make_image.sh "$again"
cmp "$image" "$again" || {
    echo "$made_by makes other bytes than those in $image: run kernels/make_image.sh"
    exit 1
}
