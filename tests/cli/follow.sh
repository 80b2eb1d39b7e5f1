#!/bin/bash
# An archive that another process writes is followed by its folder: the newest version first, byte for
# byte, then each newer one; a folder that is not there is waited for.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
for n in 1 2 3 4 5; do
    safetensors all "$n" "$scratch/$n.in"
done
export REFIT_BROADCAST_HEARTBEAT_MS=50ms

# publish_to FOLDER FILE…: a trainer, and a worker near it that keeps what it publishes.
publish_to() {
    local folder=$1
    shift
    begin_publish "$@" --bind "user://*" --timeout 50
    run 0 subscribe "$endpoint" --archive "$scratch/$folder" --count $# --timeout 50
    cat <&3 >/dev/null
    exec 3<&-
    ends publish 0
}

# same_as FILE NUMBER…: files of the follower are what was published.
same_as() {
    local out=$1 n
    shift
    for n in "$@"; do
        cmp "$out/$n.safetensors" "$scratch/$n.in" || complain "version $n in $out"
    done
}

publish_to kept "$scratch"/[1-3].in
run 0 subscribe "$scratch/kept" --out "$scratch/late" --count 1 --timeout 50
prints "version 3: $scratch/late/3.safetensors, 23 tensors, "
same_as "$scratch/late" 3
[ ! -e "$scratch/late/1.safetensors" ] || complain "an old version came"
run 0 subscribe "archive://$scratch/kept" --out "$scratch/late" --count 1 --timeout 50
(cd "$scratch" && run 0 subscribe kept/ --out relative --count 1 --timeout 50) || complain "relative"
same_as "$scratch/relative" 3
run 0 inspect "archive://$scratch/kept"
prints "3 versions, "

# Two of them wait for a folder that is not there yet; one keeps an archive of its own.
begin subscribe "$scratch/new" --out "$scratch/first" --timeout 50
first=$subscribe
begin subscribe "$scratch/new" --out "$scratch/second" --archive "$scratch/copied" --timeout 50
second=$subscribe
cat <"$scratch/subscribe.said" >/dev/null &
publish_to new "$scratch/1.in"
eventually test -e "$scratch/first/1.safetensors" -a -e "$scratch/second/1.safetensors"
# A trainer that starts again counts from 1: its second version is the fifth file here.
publish_to new "$scratch/4.in" "$scratch/2.in"
eventually cmp -s "$scratch/first/2.safetensors" "$scratch/2.in"
eventually cmp -s "$scratch/second/2.safetensors" "$scratch/2.in"
kill -INT "$first" "$second"
wait "$first" "$second"
same_as "$scratch/first" 2
run 0 materialize "$scratch/copied" 2 --out "$scratch/again"
cmp "$scratch/again" "$scratch/2.in" || complain "the second archive"

# An endpoint without its scheme is waited for as a folder.
begin subscribe localhost:5555 --out "$scratch/x"
cat <"$scratch/subscribe.said" >/dev/null &
eventually grep -qF "no version is in the folder localhost:5555 yet: waiting (--timeout S ends that); an endpoint has ://" \
    "$scratch/subscribe.err"
kill -INT "$subscribe"
wait "$subscribe"

# What cannot be followed.
run 4 subscribe "$scratch/absent" --out "$scratch/x" --timeout 1
[ "$(grep -c "cannot open the folder $scratch/absent" "$scratch/err")" -eq 2 ] || complain "not waited for"
refuses 2 "subscribe at one endpoint" subscribe "$scratch/kept" "$scratch/new" --out "$scratch/x"
refuses 3 "broadcast.shm is require" subscribe "$scratch/kept" --out "$scratch/x" \
    --set broadcast.shm=require
finish
