#!/bin/bash
# refit bench delta: a row for each density or for two files, each format's result is exact;
# the bytes of a changed element, which do not depend on the load of the machine, are as expected.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
export REFIT_BROADCAST_LINGER_MS=0s # both ends are in one process, where ZeroMQ waits for all of it

# own NAME ROW: a number of refit's own part of a row of JSON.
own() {
    sed -n "$2s/^[^{]*{\([^{]*\).*/\1/p" "$scratch/out" | grep -o "\"$1\":[0-9.e+-]*" | cut -d: -f2
}

# costs ROW MOST: no more bytes than that for each changed element.
costs() {
    local bytes
    bytes=$(own bytes_per_changed "$1")
    awk -v bytes="${bytes:-9}" -v most="$2" 'BEGIN { exit !(bytes > 0 && bytes <= most) }' ||
        complain "row $1: $bytes bytes for a changed element, more than $2"
}

run 0 bench delta --json --mib 4 --rounds 1
rows 10 'bench":"delta"'
rows 10 encode_gbps encode_with_digests_gbps decode_gbps decode_with_digests_gbps apply_gbps apply_with_digests_gbps \
    apply_seconds_p95 apply_in_place_gbps apply_in_place_seconds_p95 mode_mix int32_value 'xor_zstd1"' gap16_xor_zstd1
costs 4 1.55 # 0.6 %
costs 5 1.46 # 1 %
costs 6 1.23 # 3.7 %
costs 7 1.15 # 6.3 %
costs 10 2   # all
sed -n 5p "$scratch/out" | grep -q '"mode_mix":{"same":0,"sparse":32,"dense":0}' ||
    complain "32 blocks of which 1 % changed are not sparse: $(sed -n 5p "$scratch/out")"

# Every type and odd shapes, all of it other bytes.
safetensors all 1 "$scratch/a"
safetensors all 2 "$scratch/b"
run 0 bench delta --json --rounds 1 --from "$scratch/a" --to "$scratch/b"
rows 1 'bench":"delta"'
prints '"xor_zstd1":'

# One byte of one tensor, the last.
size=$(wc -c <"$scratch/a")
{ head -c $((size - 1)) "$scratch/a" && tail -c 1 "$scratch/a" | tr '\000-\377' '\001-\377\000'; } >"$scratch/c"
run 0 bench delta --json --rounds 1 --from "$scratch/a" --to "$scratch/c"
prints '"changed":1,'
run 0 bench delta --rounds 1 --from "$scratch/a" --to "$scratch/c"
prints 'mode_mix.same'
prints 'int32_value.size_ratio'

safetensors big 1 4096 "$scratch/big"
refuses 2 "give both or neither" bench delta --from "$scratch/a"
refuses 2 "give both or neither" bench delta --to "$scratch/a"
refuses 5 "the two versions are the same" bench delta --from "$scratch/a" --to "$scratch/a"
refuses 5 "have not the same tensors" bench delta --from "$scratch/a" --to "$scratch/big"
refuses 6 "$scratch/none: cannot open it" bench delta --from "$scratch/a" --to "$scratch/none"
head -c 100 "$scratch/a" >"$scratch/short"
refuses 5 "$scratch/short: " bench delta --from "$scratch/short" --to "$scratch/a"
finish
