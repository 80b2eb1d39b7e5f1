#!/bin/bash
# parts.sh: the lists of what a bundle is made of agree: each package of list.txt has digests of its version in
# sha256.txt, which has none of anything else, and a licence file.
set -euo pipefail
export LC_ALL=C
here=$(dirname "${BASH_SOURCE[0]}")
parts=${PARTS:-$here/../../lib/package/parts}
failed=0

# wrong SENTENCE
wrong() {
    echo "$1"
    failed=1
}

mapfile -t listed < <(awk '!/^#/ { print $1, $2, NF }' "$parts/list.txt")
[ "${#listed[@]}" -gt 0 ] || wrong "list.txt names no package"
known=()
for line in "${listed[@]}"; do
    read -r package version words <<<"$line"
    [ "$words" -ge 5 ] || wrong "list.txt: $package has no licence file"
    known+=("${package}_$version.dsc" "${package}_$version.debian.tar.xz" "${package}_${version%-*}.orig.tar.")
    grep -q "^[0-9a-f]\{64\}  ${package}_$version\.dsc$" "$parts/sha256.txt" ||
        wrong "sha256.txt has no digest of ${package}_$version.dsc: see list.txt how to take another version"
done
while read -r digest file; do
    [[ $digest =~ ^[0-9a-f]{64}$ ]] || wrong "sha256.txt: $file has no SHA-256 digest"
    found=0
    for name in "${known[@]}"; do
        [[ $file != "$name"* ]] || found=1
    done
    [ "$found" -eq 1 ] || wrong "sha256.txt: $file is of no package and version that list.txt names"
done <"$parts/sha256.txt"
exit $failed
