#!/bin/bash
# refit bench host-step: a row for each way and each format, with its figures; the kernel has the
# bits of its scalar form, and the host step those of the kernel on plain arrays.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

run 0 bench host-step --json --rounds 2 --mib 8 --set offload.host_step_threads=3
[ "$(wc -l <"$scratch/out")" -eq 8 ] || complain "not eight rows"
for name in step_s_median step_s_p95 parameters_per_s share_of_limit; do
    [ "$(grep -c "\"$name\":[0-9.e+-]*[1-9]" "$scratch/out")" -eq 8 ] || complain "no $name in each row"
done
for name in "memory limit" kernel "host step" "host step with norm"; do
    [ "$(grep -c "\"way\":\"$name\"" "$scratch/out")" -eq 2 ] || complain "not two rows of $name"
done
[ "$(grep -c '"threads":3' "$scratch/out")" -eq 8 ] || complain "not the threads that were set"
[ "$(grep -c '"bit_equal":true' "$scratch/out")" -eq 6 ] || complain "other bits"
run 0 bench host-step --rounds 1 --mib 1
grep -qE '^  step_s_median  .*[1-9]' "$scratch/out" || complain "no seconds: $(cat "$scratch/out")"

refuses 2 "--tensors is for offload, remap, handover, window and tensors: bench host-step" \
    bench host-step --tensors small
refuses 1 "use_pinned_optimizer_offload: true" bench host-step --mib 1 --set use_pinned_optimizer_offload=false
refuses 1 "the device is full" bench host-step --mib 64 --device host:capacity=1MiB
finish
