#!/bin/bash
# refit bench broadcast and bench link: the requested rows, each with its figures; dense versions
# travel whole and updates travel as changes, for every worker.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

bytes=$((4 << 20))
export TMPDIR=$scratch/temporary
mkdir "$TMPDIR"

# below NAME ROW MOST: more than nothing, and less than that.
below() {
    awk -v it="$(number "$1" "$2")" -v most="$3" 'BEGIN { exit !(it > 0 && it < most) }' ||
        complain "row $2: $1 is $(number "$1" "$2"), not below $3"
}

run 0 bench broadcast --json --mib 4 --rounds 1 --workers 1,3
[ "$(wc -l <"$scratch/out")" -eq 5 ] || complain "two numbers of workers are not five rows"
rows 4 version_seconds_median version_seconds_p95 gbps ratio_to_limit speedup_over_copy_per_worker 'sent_bytes":'
rows 2 growth_per_added_worker
is sent_bytes 2 0
is sent_bytes 3 $bytes
is sent_bytes 4 $((3 * bytes))
is workers 4 3
is density 4 1.0

run 0 bench broadcast --json --mib 4 --rounds 1 --workers 3 --density 0.01
is sent_bytes 1 0
below sent_bytes 2 $((3 * bytes / 50))
below density 2 0.011

# The workers' configuration is the trainer's: raw sockets agree about their window.
run 0 bench broadcast --json --mib 1 --rounds 1 --workers 1 --set broadcast.window=3

run 0 bench link --json --mib 4 --rounds 2
rows 6 seconds_median seconds_p95 staged_seconds_median cold_seconds speedup_over_dense times_without_keys \
    link_gbit density
for row in 1 4; do
    is sent_bytes $row $bytes
    is sparse_blocks $row 0
done
for row in 2 3 5 6; do
    below sent_bytes $row $((bytes / 50))
    is cold_sent_bytes $row $bytes
    is sparse_blocks $row 32
done
below sent_bytes 3 "$(number sent_bytes 2)"
is sent_bytes 5 "$(number sent_bytes 2)"
rows 3 'curve":true'
run 0 bench link --json --mib 4 --rounds 1 --density 1
is dense_blocks 2 32
run 0 bench link --json --mib 4 --rounds 1 --density 1 --set broadcast.delta=always
is dense_blocks 2 0

refuses 2 "write a share" bench broadcast --density 0
refuses 2 "write a share" bench broadcast --density 1.01
refuses 2 "write a share" bench broadcast --density 1%
for workers in 0 17 1,,2 ,1 1x 1,1,1,1,1,1,1,1,1; do
    refuses 2 "--workers cannot be $workers" bench broadcast --workers $workers
done
refuses 2 "there is no network namespace nothing" bench link --netns nothing
refuses 1 "can be bound to nothing" bench link --bind nothing --mib 1
[ -z "$(ls "$TMPDIR")" ] || complain "keys are left: $(find "$TMPDIR")"
finish
