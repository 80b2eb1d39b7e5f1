#!/bin/bash
# When the reader of standard output goes away, a command ends in order, with status 6; warnings of
# the library go to stderr.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
safetensors all 1 "$scratch/small"
safetensors big 2 3000000 "$scratch/large"
socket=ipc://$scratch/socket

# says NAME LINE…: all that it has said on stderr.
says() {
    local name=$1
    shift
    printf '%s' "${1+$1$'\n'}" | cmp -s - "$scratch/$name.err" || complain "$name: said $(cat "$scratch/$name.err")"
}
broken="refit: cannot write to standard output: Broken pipe"

# The trainer's reader leaves after the first line, as head -1 does: the version under way is
# committed, the worker stays in order, and no shared memory can be left.
begin publish "$scratch/small" "$scratch/large" --bind "$socket" --timeout 50
read -r line <"$scratch/publish.said"
[ "$line" = "endpoint $socket" ] || complain "publish said $line"
# Before the worker comes, after which the trainer may have ended.
eventually grep -q '/memfd:refit ' "/proc/$publish/maps"
! grep -q '/dev/shm/refit-' "/proc/$publish/maps" || complain "the publisher's memory has a file that could be left"
begin subscribe "$socket" --out "$scratch/kept" --timeout 50
exec 4<"$scratch/subscribe.said"
ends publish 6
says publish "$broken"
read -r line <&4
[ "$line" = "version 1: $scratch/kept/1.safetensors, 23 tensors, 560.4 KiB" ] || complain "subscribe said $line"
kill -TERM "$subscribe"
ends subscribe 143
says subscribe
exec 4<&-

# A worker's reader leaves before the first line: the version is kept all the same.
begin publish "$scratch/small" --bind "$socket" --timeout 50
exec 3<"$scratch/publish.said"
begin subscribe "$socket" --out "$scratch/unread" --timeout 50
: <"$scratch/subscribe.said"
ends subscribe 6
says subscribe "$broken"
ends publish 0
says publish
exec 3<&-
cmp "$scratch/unread/1.safetensors" "$scratch/small" || complain "the version that was kept"

# Commands that only print: the reader is gone before they start.
for command in "config" "inspect $scratch/small" "bench tensors" "version" "--help" "config --help"; do
    read -ra words <<<"$command"
    # shellcheck disable=SC2094 # A FIFO that is open at both ends can be written to; then the reading end is closed.
    (
        exec 3<>"$scratch/subscribe.said" 4>"$scratch/subscribe.said" 3<&-
        exec "${refit[@]}" "${words[@]}" >&4 2>"$scratch/unread.err" </dev/null
    ) &
    # shellcheck disable=SC2034 # ends finds it by its name.
    unread=$!
    ends unread 6
    says unread "$broken"
done

# A trainer whose weights find no shared memory says by which way they go.
# shellcheck disable=SC2317 # Run in a shell of its own.
with_small_files() {
    ulimit -f 1024
    exec "$@"
}
(with_small_files "${refit[@]}" publish "$scratch/large" --bind "$socket" --timeout 50) \
    >"$scratch/publish.said" 2>"$scratch/publish.err" </dev/null &
publish=$!
exec 3<"$scratch/publish.said"
read -r _ <&3
run 0 subscribe "$socket" --out "$scratch/kept" --count 1 --timeout 50
wait "$publish" || complain "publish through sockets: $(cat "$scratch/publish.err")"
exec 3<&-
grep -q '^refit: weights travel through sockets only' "$scratch/publish.err" ||
    complain "not a word about sockets: $(cat "$scratch/publish.err")"
finish
