#!/bin/bash
# Files published over each transport arrive byte for byte, version after version, at every worker; both
# ends meet without an endpoint; a warning names tcp without keys.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
safetensors all 1 "$scratch/1.in"
safetensors all 2 "$scratch/2.in"
safetensors big 3 3000001 "$scratch/3.in"
# subscribe NAME COUNT ARGUMENT…: starts a worker whose files go to $scratch/NAME.
subscribe() {
    local name=$1 count=$2
    shift 2
    "${refit[@]}" subscribe "$endpoint" --out "$scratch/$name" --count "$count" --timeout 50 \
        --name "$name" "$@" >"$scratch/$name.out" 2>"$scratch/$name.err" </dev/null &
    workers+=($!)
}

warning="has no keys: every user of this machine can read and replace the weights"

# join COUNT: waits for all of them to end well, and reads what the publisher said. So many of them
# warn that the endpoint has no keys; nothing else is on stderr.
join() {
    local worker
    said=$(cat <&3)
    exec 3<&-
    ends publish 0
    for worker in "${workers[@]}"; do
        wait "$worker" || complain "a worker failed: $(cat "$scratch"/*.err)"
    done
    workers=()
    cat "$scratch"/*.err >"$scratch/errors"
    grep -v "$warning" "$scratch/errors" && complain "that was printed to stderr"
    [ "$(grep -c "$warning" "$scratch/errors")" -eq "$1" ] ||
        complain "not $1 warnings of an endpoint without keys: $(cat "$scratch/errors")"
}

# same NAME VERSION FILE: the worker's file of that version is this one, byte for byte.
same() {
    cmp "$scratch/$1/$2.safetensors" "$scratch/$3" || complain "worker $1, version $2"
}

workers=()
for bind in tcp://127.0.0.1:0 "ipc://$scratch/socket" "user://*"; do
    begin_publish "$scratch"/[123].in --bind "$bind" --workers 2 --timeout 50
    case $endpoint in *:0) complain "$endpoint is not a port" ;; esac
    subscribe shared 3
    subscribe sent 3 --set broadcast.shm=off
    case $bind in tcp*) join 3 ;; *) join 0 ;; esac
    for version in 1 2 3; do
        same shared "$version" "$version.in"
        same sent "$version" "$version.in"
    done
    [ "$(readlink "$scratch/sent/latest")" = 3.safetensors ] || complain "latest points elsewhere"
    [ "$(find "$scratch/sent" -mindepth 1 | wc -l)" -eq 4 ] || complain "more is left than files"
    grep -qF "version 2: $scratch/2.in, 23 tensors, 560.4 KiB, 2 workers" <<<"$said" ||
        complain "publish said: $said"
    grep -qE "^version 2: .* s, [0-9.]+ (B|KiB) of changes$" <<<"$said" ||
        complain "publish did not say what changed: $said"
    grep -qF "version 3: $scratch/sent/3.safetensors, 3 tensors, 2.9 MiB" "$scratch/sent.out" ||
        complain "subscribe said: $(cat "$scratch/sent.out")"
    rm -r "$scratch/shared" "$scratch/sent"
done

# Neither end names an endpoint: the configuration does.
"${refit[@]}" subscribe --out "$scratch/own" --count 1 --timeout 50 >"$scratch/own.out" 2>&1 </dev/null &
worker=$!
run 0 publish "$scratch/1.in" --workers 1 --timeout 50
prints "endpoint ipc://$scratch/refit/test-$$.sock"
wait "$worker" || complain "the worker failed: $(cat "$scratch/own.out")"
same own 1 1.in
[ -z "$(ls -A "$scratch/refit")" ] || complain "something is left: $(ls -A "$scratch/refit")"
[ "$(stat -c %a "$scratch/refit")" = 700 ] || complain "others may enter the folder"
finish
