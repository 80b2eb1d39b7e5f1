#!/bin/bash
# image_fresh.sh: kernels/cuda_image.* were made from the kernels as they are now. The hash of their
# sources tells anywhere; where the nvcc that made them is installed, it makes the same bytes.
set -euo pipefail
image=kernels/cuda_image
made_from=$(sed -n 's/^sources //p' "$image.made")
made_by=$(sed -n 's/^compiler //p' "$image.made")
if [ "$made_from" != "$(kernels/make_image.sh --sources)" ]; then
    echo "$image is older than the kernels' sources: run kernels/make_image.sh"
    exit 1
fi
installed=$(kernels/make_image.sh --compiler)
if [ "$installed" != "$made_by" ]; then
    echo "only the sources were compared: $image was made by $made_by, here is ${installed:-none}"
    exit 0
fi
again=$(mktemp -d)
trap 'rm -rf "$again"' EXIT
kernels/make_image.sh "$again"
for kind in fatbin ptx made; do
    cmp "$image.$kind" "$again/cuda_image.$kind" || {
        echo "$made_by makes other bytes than those in $image.$kind: run kernels/make_image.sh"
        exit 1
    }
done
