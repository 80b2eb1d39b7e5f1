#!/bin/bash
# refit bench window: a row for each way and each division of the bytes, with its figures; the device
# memory is that of the windows, all bytes come and go, and every way leaves the same bits.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# way ROW NAME
way() {
    sed -n "$1p" "$scratch/out" | grep -q "\"way\":\"$2\"" || complain "row $1 is not $2"
}

# ways: the rows of the ways, in order, and those of the divisions after them.
ways() {
    local name row=0
    for name in resident window "window, two" "no overlap" "two slots"; do
        row=$((row + 1))
        way $row "$name"
    done
    [ "$(wc -l <"$scratch/out")" -eq 8 ] || complain "not eight rows"
    rows 3 'bench":"window growth"'
    for name in step_s_median step_s_p95 cold_step_s overlap; do
        rows 8 "$name\":[0-9.e+-]*[1-9]"
    done
    rows 5 exposed_s speedup_over_no_overlap arithmetic_s copies_in_s copies_out_s copies_both_s all_at_once_s \
        ratio_to_copies_both ratio_to_all_at_once
}

# fits_windows ROW: the device's memory is the windows, in whole pages.
fits_windows() {
    local peak windows
    peak=$(number peak_device_bytes "$1")
    windows=$(number window_bytes "$1")
    if [ "$peak" -lt "$windows" ] || [ $((peak - windows)) -ge 4096 ]; then
        complain "row $1: $peak bytes on the device, in windows of $windows"
    fi
}

# A list with more than one state a weight, with a size that is no multiple of an element, and with one
# weight that is larger than a window.
{
    echo "wide.exp_avg 3000000"
    echo "wide.exp_avg_sq 3000000"
    echo "wide.master 3000000"
    echo "odd.exp_avg 70001"
    echo "odd.exp_avg_sq 70001"
    echo "alone 4096"
} >"$scratch/list"
bytes=$((3 * 3000000 + 2 * 70001 + 4096))
run 0 bench window --json --rounds 2 --tensors "$scratch/list" --set offload.window_bytes=1MiB \
    --set offload.windows=4
ways
for row in 2 3 4 5; do
    is in_bytes $row $bytes
    is out_bytes $row $bytes
    is allocations_per_step $row 0
    fits_windows $row
done
is in_bytes 1 0
is window_bytes 1 0
is window_bytes 2 $((4 << 20))
is window_bytes 3 $((2 << 20))
# Ways that take whole parameters need room for the largest of them.
is window_bytes 4 $((3 * 3000320))
is window_bytes 5 $((2 * 3 * 3000320))
is speedup_over_no_overlap 4 1.0

# Of a model, with windows that suit its size; ten and a hundred times the tensors, at the same bytes.
run 0 bench window --json --rounds 1 --mib 24
ways
is window_bytes 3 $((2 * (1536 + 64) * 1024))
few=$(number tensors 6)
is tensors 7 $((10 * few))
is tensors 8 $((100 * few))
for row in 6 7 8; do
    is allocations_per_step $row 0
done
run 0 bench window --rounds 1 --tensors "$scratch/list"
grep -qE '^  step_s_median  .*[1-9]' "$scratch/out" || complain "no seconds: $(cat "$scratch/out")"

refuses 2 "--workers is for broadcast: bench window does not take it" bench window --workers 3
refuses 1 "need use_pinned_optimizer_offload: true" bench window --tensors "$scratch/list" \
    --set use_pinned_optimizer_offload=false
# A device that is full before the first step, and one that is full before the last way's first step.
for capacity in 1MiB 44MiB; do
    refuses 1 "the device is full" bench window --device host:capacity=$capacity --tensors "$scratch/list" \
        --set offload.window_bytes=1MiB
done
finish
