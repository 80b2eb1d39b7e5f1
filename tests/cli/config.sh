#!/bin/bash
# refit config: the file of defaults is made from the table, and a later source overrides an earlier one.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

run 0 config --defaults
cmp "$scratch/out" configs/refit.yaml ||
    complain "configs/refit.yaml is not the option table: refit config --defaults > configs/refit.yaml"
REFIT_OFFLOAD_BATCH=7 run 0 config --defaults --set device=host
cmp "$scratch/out" configs/refit.yaml || complain "--defaults shows more than defaults"

for file in configs/*.yaml; do
    run 0 config --file "$file"
done

# shows KEY VALUE ORIGIN
shows() {
    grep -A1 -F -- "$1: $2" "$scratch/out" | grep -qE "from: $3(;|$)" ||
        complain "not '$1: $2' from $3: $(grep -A1 -F "$1:" "$scratch/out")"
}
printf 'include: base.yaml\noffload:\n  batch: 3\n  pin: "off"\n' >"$scratch/top.yaml"
printf 'offload: {batch: 2, numa: 1, copy_threads: 2}\n' >"$scratch/base.yaml"
export REFIT_OFFLOAD_NUMA=interleave REFIT_BROADCAST_WORKER="say \"hi\"\\"
run 0 config --file "$scratch/top.yaml" --set offload.batch=4 --set=broadcast.window=16
unset REFIT_OFFLOAD_NUMA REFIT_BROADCAST_WORKER
shows offload.batch 4 set
shows broadcast.window 16 set
shows offload.numa interleave environment
shows broadcast.worker '"say \"hi\"\\"' environment
shows offload.pin off file
shows offload.copy_threads 2 file
shows offload.verify false default
prints "default: 16384; takes: copies, 1 to 65536"

refuses 3 "$scratch/top.yaml:2:3: there is no option offload.bach: the nearest is offload.batch" \
    config --file "$scratch/base.yaml" --config "$(printf 'offload:\n  bach: 3\n' >"$scratch/top.yaml" && echo "$scratch/top.yaml")"
refuses 6 "cannot open $scratch/missing.yaml" config --file "$scratch/missing.yaml"

# A file that is not regular is refused at once: a FIFO may never have a writer.
mkfifo "$scratch/fifo"
refuses 3 "$scratch/fifo is not a regular file: write the configuration into one" config --file "$scratch/fifo"
refuses 3 "is not a regular file" config --file <(echo "offload: {batch: 2}")
refuses 3 "$scratch is not a regular file" config --file "$scratch"
refuses 3 "/dev/null is not a regular file" config --file /dev/null
printf 'include: fifo\n' >"$scratch/top.yaml"
refuses 3 "$scratch/top.yaml:1:10: $scratch/fifo is not a regular file" config --file "$scratch/top.yaml"
refuses 5 "$scratch/fifo: it is empty or not a regular file" publish "$scratch/fifo"
refuses 5 "not a regular file" inspect "$scratch/fifo"
refuses 5 "not a regular file" bench delta --from "$scratch/fifo" --to "$scratch/fifo"
refuses 1 "$scratch/fifo: it is empty or not a regular file" bench tensors --tensors "$scratch/fifo"
refuses 1 "$scratch/fifo is not a regular file" subscribe "ipc://$scratch/socket" --out "$scratch/kept" --set security.key="$scratch/fifo" \
    --set security.server_key="$scratch/fifo"
refuses 3 "the nearest is broadcast.window" config --set broadcast.windows=1
refuses 3 "broadcast.window cannot be 0: it must be 1 to 4096" config --set broadcast.window=0
refuses 3 "broadcast.commit is all" config --set broadcast.quorum=2
refuses 2 "write KEY=VALUE" config --set broadcast.window
REFIT_OFFLOAD_BACH=1 refuses 3 "the nearest is REFIT_OFFLOAD_BATCH" config
finish
