#!/bin/bash
# The mutants of a seed: always the same, each one line of the sources, changed in one place.
set -euo pipefail
command -v python3 > /dev/null || exit 77
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# expect WHAT CONDITION…: the condition holds.
expect() {
    local what=$1
    shift
    "$@" || { echo "FAILED: $what"; exit 1; }
}

tests/mutate.sh --list --seed 5 --count 300 > "$scratch/first"
tests/mutate.sh --list --seed 5 --count 300 > "$scratch/again"
tests/mutate.sh --list --seed 6 --count 300 > "$scratch/other"
tests/mutate.sh --list --seed 5 --count 50 kernels > "$scratch/kernels"
expect "a seed has its mutants" cmp "$scratch/first" "$scratch/again"
expect "another seed has others" bash -c "! cmp -s '$scratch/first' '$scratch/other'"
expect "as many as asked for" test "$(wc -l < "$scratch/first")" -eq 900
expect "in the folder alone" test "$(grep -c '^kernels/' "$scratch/kernels")" -eq 50
expect "in both folders" grep -q '^kernels/' "$scratch/first"
expect "in both folders" grep -q '^lib/' "$scratch/first"

while IFS= read -r place && IFS= read -r old && IFS= read -r new; do
    [ "$(sed -n "${place##*:}p" "${place%:*}")" = "${old#-}" ] || expect "$place is $old" false
    [ "${old#-}" != "${new#+}" ] || expect "$place is changed" false
done < "$scratch/first"

status=0
tests/mutate.sh --list lib/none > "$scratch/none" 2>&1 || status=$?
expect "a folder without sources is refused" test "$status" -eq 2
echo "300 mutants are what the list says"
