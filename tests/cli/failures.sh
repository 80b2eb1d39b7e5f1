#!/bin/bash
# When publish and subscribe cannot do their work: one sentence, its own status, nothing half-written.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
safetensors all 1 "$scratch/small"
safetensors big 2 3000000 "$scratch/large"
socket=ipc://$scratch/socket

run 4 publish "$scratch/small" --bind "$socket" --timeout 1
grep -qE '^refit: .*0 .*worker' "$scratch/err" || complain "no worker came: $(cat "$scratch/err")"
grep -q ': see whether they run, and what they say$' "$scratch/err" || complain "no advice: $(cat "$scratch/err")"
refuses 2 "where to?" subscribe "$socket"
refuses 2 "subscribe at one endpoint" subscribe "$socket" "$socket" --out "$scratch/kept"
refuses 3 "broadcast.worker has 70 bytes" subscribe "$socket" --out "$scratch/kept" --name "$(printf 'x%.0s' {1..70})"
refuses 6 "cannot make the folder" subscribe "$socket" --out "$scratch/missing/kept"
refuses 6 "Not a directory" subscribe "$socket" --out "$scratch/small"
refuses 4 "no trainer has answered at $socket" subscribe "$socket" --out "$scratch/kept" --timeout 1
refuses 4 "no trainer was heard for 200 ms" subscribe "$socket" --out "$scratch/kept" \
    --set broadcast.heartbeat_ms=20ms --set broadcast.heartbeat_timeout_ms=100ms \
    --set broadcast.idle_timeout_ms=200ms
refuses 1 "" publish "$scratch/small" --bind nonsense://x
refuses 1 "a publisher binds a numeric address (127.0.0.1) or an interface's name, no host name" \
    publish "$scratch/small" --bind tcp://localhost:0
refuses 1 "" subscribe nonsense://x --out "$scratch/kept"
refuses 1 "insecure" publish "$scratch/small" --bind tcp://0.0.0.0:0
refuses 1 "insecure" subscribe tcp://192.0.2.1:7711 --out "$scratch/kept"
refuses 1 "insecure" inspect tcp://192.0.2.1:7711

# An endpoint that another publisher has.
begin_publish "$scratch/small" --bind "$socket" --timeout 50
refuses 1 "" publish "$scratch/small" --bind "$socket"

# A signal ends a publisher that waits, with the status of the signal.
kill -INT "$publish"
ends publish 130
exec 3<&-

# A signal ends a subscriber that waits for the next version.
begin publish "$scratch/small" --bind "$socket" --timeout 50
begin subscribe "$socket" --out "$scratch/kept"
exec 3<"$scratch/publish.said" 4<"$scratch/subscribe.said"
read -r line <&4
[ "$line" = "version 1: $scratch/kept/1.safetensors, 23 tensors, 560.4 KiB" ] || complain "said: $line"
kill -TERM "$subscribe"
ends subscribe 143
ends publish 0
exec 3<&- 4<&-
cmp "$scratch/kept/1.safetensors" "$scratch/small" || complain "the file before the signal"

# A worker that leaves after the first version is missed at the second. The time has to do for the first.
begin_publish "$scratch/small" "$scratch/large" --bind "$socket" --timeout 12
run 0 subscribe "$socket" --out "$scratch/kept" --count 1 --timeout 50
ends publish 4
grep -q '^version 1: ' <&3 || complain "the first version was not announced"
exec 3<&-

# cut BYTES SENTENCE: a file that is cut short after its header was checked is a failed read, and no version.
cut() {
    cp "$scratch/large" "$scratch/cut" || complain "cp"
    begin_publish "$scratch/small" "$scratch/cut" --bind "$socket" --timeout 50
    truncate -s "$1" "$scratch/cut"
    begin subscribe "$socket" --out "$scratch/uncut"
    exec 4<"$scratch/subscribe.said"
    ends publish 6 "$scratch/cut: $2"
    kill -TERM "$subscribe"
    ends subscribe 143
    exec 3<&- 4<&-
    [ "$(wc -l <"$scratch/publish.err")" -eq 1 ] || complain "said: $(cat "$scratch/publish.err")"
    cmp "$scratch/uncut/1.safetensors" "$scratch/small" || complain "the file before the cut one"
    [ ! -e "$scratch/uncut/2.safetensors" ] || complain "half a version was written"
}
cut 1000000 "2000214 bytes are missing at byte 1000000: "
cut 0 "6 bytes are missing at byte 208: "

# occupied NAME SENTENCE: a folder stands where a file is to be named, so the version is refused, and
# the publisher knows.
occupied() {
    local out=$scratch/occupied.$1
    mkdir -p "$out/$1"
    begin_publish "$scratch/small" --bind "$socket" --timeout 50
    refuses 6 "$2: Is a directory" subscribe "$socket" --out "$out" --name displaced --timeout 50
    ends publish 4 "worker displaced did not commit: $2: Is a directory"
    exec 3<&-
    [ "$(ls -A "$out")" = "$1" ] || complain "left in the folder: $(ls -A "$out")"
}
occupied 1.safetensors "cannot name 1.safetensors"
occupied latest "cannot link latest"

# full COMMAND…: a subscriber, run by COMMAND, whose disk fills: it says so and leaves nothing, and
# the publisher names it.
full() {
    local out=$1
    shift
    begin_publish "$scratch/large" --bind "$socket" --timeout 50
    "$@" "${refit[@]}" subscribe "$socket" --out "$out" --name thrifty --timeout 50 \
        >"$scratch/out.said" 2>"$scratch/subscribe.err" </dev/null &
    subscribe=$!
    ends subscribe 6 "cannot write 1.safetensors: "
    ends publish 4 "worker thrifty did not commit: cannot write 1.safetensors: "
    exec 3<&-
    [ ! -s "$scratch/out.said" ] || complain "a version was announced that was not written"
    [ -z "$(ls -A "$out")" ] || complain "left behind: $(ls -A "$out")"
}

# with_small_files COMMAND…: no file may grow beyond a MiB.
# shellcheck disable=SC2317 # Run by full.
with_small_files() {
    ulimit -f 1024
    exec "$@"
}
mkdir "$scratch/limited"
full "$scratch/limited" with_small_files

# in_small_disk COMMAND…: with a disk of a MiB on the folder "small", which is seen empty afterwards.
# shellcheck disable=SC2016,SC2317 # Run by full; the inner shell expands.
in_small_disk() {
    exec unshare -rm bash -c 'mount -t tmpfs -o size=1m small "$0" && "$@"; status=$?
        [ -z "$(ls -A "$0")" ] || exit 99
        exit $status' "$scratch/small.disk" "$@"
}
mkdir "$scratch/small.disk"
if unshare -rm mount -t tmpfs -o size=1m small "$scratch/small.disk" 2>/dev/null; then
    full "$scratch/small.disk" in_small_disk
fi
finish
