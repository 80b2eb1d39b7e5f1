#!/bin/bash
# Files published over each transport arrive byte for byte, version after version, at every worker.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
make=${TOOLS:?}/make_safetensors
"$make" all 1 "$scratch/1.in" || complain "make_safetensors"
"$make" all 2 "$scratch/2.in" || complain "make_safetensors"
"$make" big 3 3000001 "$scratch/3.in" || complain "make_safetensors"
mkfifo "$scratch/said"

# publish ENDPOINT WORKERS FILE…: starts a publisher and finds its endpoint; its lines come from 3.
publish() {
    local bind=$1 workers=$2
    shift 2
    "${refit[@]}" publish "$@" --bind "$bind" --workers "$workers" --timeout 50 \
        >"$scratch/said" 2>"$scratch/publish.err" </dev/null &
    publisher=$!
    exec 3<"$scratch/said"
    read -r word endpoint <&3
    [ "$word" = endpoint ] || complain "publish --bind $bind said '$word $endpoint'"
}

# subscribe NAME COUNT ARGUMENT…: starts a worker whose files go to $scratch/NAME.
subscribe() {
    local name=$1 count=$2
    shift 2
    "${refit[@]}" subscribe "$endpoint" --out "$scratch/$name" --count "$count" --timeout 50 \
        --name "$name" "$@" >"$scratch/$name.out" 2>"$scratch/$name.err" </dev/null &
    workers+=($!)
}

# join: waits for all of them to end well, and reads what the publisher said.
join() {
    local worker
    said=$(cat <&3)
    exec 3<&-
    wait "$publisher" || complain "publish failed: $(cat "$scratch/publish.err")"
    for worker in "${workers[@]}"; do
        wait "$worker" || complain "a worker failed: $(cat "$scratch"/*.err)"
    done
    workers=()
    cat "$scratch"/*.err >"$scratch/errors"
    [ ! -s "$scratch/errors" ] || complain "something was printed to stderr: $(cat "$scratch/errors")"
}

# same NAME VERSION FILE: the worker's file of that version is this one, byte for byte.
same() {
    cmp "$scratch/$1/$2.safetensors" "$scratch/$3" || complain "worker $1, version $2"
}

workers=()
for bind in tcp://127.0.0.1:0 "ipc://$scratch/socket"; do
    publish "$bind" 2 "$scratch/1.in" "$scratch/2.in" "$scratch/3.in"
    case $endpoint in *:0) complain "$endpoint is no port" ;; esac
    subscribe shared 3
    subscribe sent 3 --set broadcast.shm=off
    join
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

finish
