#!/bin/bash
# refit bench activations: a row for each way, with its figures; all that may leave does, and returns
# with its bits; the peak is what the settings allow, and a warm step allocates nothing.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# ways: the rows, in order.
ways() {
    local name row=0
    for name in none leave pageable; do
        row=$((row + 1))
        sed -n "${row}p" "$scratch/out" | grep -q "\"way\":\"$name\"" || complain "row $row is not $name"
    done
    [ "$(wc -l <"$scratch/out")" -eq 3 ] || complain "not three rows"
    for name in step_s_median step_s_p95 cold_step_s times_as_long cold_times_as_long layer_copies_s \
        layer_compute_s; do
        rows 3 "$name\":[0-9.e+-]*[1-9]"
    done
    rows 3 'exposed_s":'
}

# 28 layers of 9 tensors; a token has 17,408 elements of bf16 in each. 5 MiB are 5 tokens, whose tensors
# begin at multiples of 512 bytes.
run 0 bench activations --json --rounds 2 --mib 5
ways
layer=$((17408 * 2 * 5))
block=$layer
is saved_bytes 1 $((28 * layer))
is peak_bytes 1 $((28 * block))
is out_bytes 1 0
is back_bytes 1 0
is out_bytes 2 $((27 * layer)) # all but activations.keep_last
is back_bytes 2 $((27 * layer))
is out_bytes 3 $((28 * layer))
is back_bytes 3 $((28 * layer))
is peak_bytes 2 $((2 * block)) # activations.in_flight, and the one that computes
is peak_bytes 3 $block
for row in 1 2 3; do
    is allocations_per_step $row 0
done

run 0 bench activations --json --rounds 1 --mib 5 --set activations.in_flight=3 --set activations.prefetch=5 \
    --set activations.keep_last=4
ways
is out_bytes 2 $((24 * layer))
is peak_bytes 2 $((6 * block)) # the one whose turn it is, and five after it
run 0 bench activations --json --rounds 1 --mib 5 --set activations.keep_last=100
is out_bytes 2 0
is peak_bytes 2 $((28 * block))

run 0 bench activations --rounds 1 --mib 1
grep -qE '^  step_s_median  .*[1-9]' "$scratch/out" || complain "no seconds: $(cat "$scratch/out")"

refuses 2 "--tensors is for offload, remap, handover, window and tensors: bench activations" \
    bench activations --tensors small
refuses 1 "activations.host_bytes is too little" bench activations --mib 5 --set activations.host_bytes=1MiB
refuses 1 "need" bench activations --mib 5 --set use_pinned_optimizer_offload=false
refuses 1 "the device is full" bench activations --mib 64 --device host:capacity=1MiB
refuses 1 "the device is full" bench activations --mib 64 --device host:capacity=20MiB
finish
