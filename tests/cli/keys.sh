#!/bin/bash
# Keys: made once, never overwritten by accident; with them weights leave this host's loopback, and
# without the right ones they reach no worker.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
safetensors all 1 "$scratch/1.in"
keys=$scratch/keys

refuses 2 "which keys?" keygen
refuses 2 "which keys?" keygen "$keys"
refuses 2 "what is more?" keygen "$keys" trainer more
refuses 2 "is not a name for keys" keygen "$keys" ../trainer
refuses 6 "cannot be opened" keygen "$scratch/no/such" trainer

for name in trainer w0 stranger; do
    (umask 000 && run 0 keygen "$keys" "$name" && [ "$failures" -eq 0 ]) || complain "keygen $name"
    [ "$(stat -c %a "$keys/$name.secret")" = 600 ] || complain "$name.secret can be read by others"
    [ "$(stat -c %a "$keys/$name.public")" = 644 ] || complain "$name.public has another mode"
done
before=$(cat "$keys/trainer.secret")
refuses 1 "is there already" keygen "$keys" trainer
[ "$(cat "$keys/trainer.secret")" = "$before" ] || complain "a secret was written over"
run 0 keygen "$keys" trainer --force
prints "$keys/trainer.secret"
[ "$(cat "$keys/trainer.secret")" != "$before" ] || complain "--force did nothing"
grep -q "$(tail -1 "$keys/trainer.secret")" "$scratch/out" && complain "keygen shows the secret"

mkdir -m 700 "$scratch/allow" && cp "$keys/w0.public" "$scratch/allow"
trainer=(--set "security.key=$keys/trainer.secret" --set "security.allow=$scratch/allow")

refuses 1 "security.key" publish "$scratch/1.in" --bind tcp://0.0.0.0:0 --workers 1
refuses 3 "security.allow" publish "$scratch/1.in" --set "security.key=$keys/trainer.secret"
refuses 1 "$keys/trainer.public holds a public key: the secret one is wanted here (.secret)" \
    publish "$scratch/1.in" "${trainer[@]}" --set "security.key=$keys/trainer.public"
chmod 644 "$keys/trainer.secret"
refuses 1 "chmod 600" publish "$scratch/1.in" "${trainer[@]}"
chmod 600 "$keys/trainer.secret"

# worker NAME: what such a worker says on its command line.
worker() {
    subscribe=(subscribe "tcp://127.0.0.1:$port" --count 1 --timeout 50 --out "$scratch/$1.out"
        --set "security.key=$keys/$1.secret" --set "security.server_key=$keys/trainer.public")
}

begin_publish "$scratch/1.in" --bind tcp://0.0.0.0:0 --workers 1 --timeout 50 "${trainer[@]}"
port=${endpoint##*:}
worker stranger
# The reason is there at once, and again as what ended the command.
run 1 "${subscribe[@]}" --set broadcast.heartbeat_ms=100ms --set broadcast.heartbeat_timeout_ms=500ms
[ "$(grep -c "does not allow this worker's key" "$scratch/err")" -eq 2 ] ||
    complain "the stranger read: $(cat "$scratch/err")"
worker w0
run 0 "${subscribe[@]}"
cat <&3 >/dev/null
ends publish 0
cmp "$scratch/w0.out/1.safetensors" "$scratch/1.in" || complain "other weights arrived"
[ "$(stat -c %a "$scratch/w0.out")" = 700 ] || complain "others may look into a folder that subscribe made"
[ ! -e "$scratch/stranger.out/1.safetensors" ] || complain "a stranger got weights"

# says PART ARGUMENT…: a subscriber that waits without end says PART on its first line, or on the one
# after the warning about an endpoint without keys.
mkfifo "$scratch/heard"
says() {
    local part=$1 line subscriber
    shift
    "${refit[@]}" subscribe --out "$scratch/none" "$@" 2>"$scratch/heard" </dev/null &
    subscriber=$!
    exec 4<"$scratch/heard"
    read -r -t 50 line <&4
    case $line in *"has no keys: every user of this machine"*) read -r -t 50 line <&4 ;; esac
    kill -TERM "$subscriber"
    wait "$subscriber"
    [ $? -eq 143 ] || complain "$*: it did not go on waiting"
    exec 4<&-
    case $line in
        "refit: "*"$part"*) ;;
        *) complain "$*: no '$part' in: $line" ;;
    esac
}

# A worker that is refused, perhaps because of its keys, waits and says so.
begin_publish "$scratch/1.in" --bind tcp://127.0.0.1:0 --timeout 50 "${trainer[@]}"
says "is security.server_key the trainer's public key?" "$endpoint" \
    --set "security.key=$keys/w0.secret" --set "security.server_key=$keys/stranger.public"
# suspects PATTERN ARGUMENT…: inspect says so within the time that the trainer needs to answer.
suspects() {
    local pattern=$1 seconds
    shift
    for seconds in 1 4 16 50; do
        run 4 inspect "$endpoint" --timeout $seconds "$@"
        ! grep -qE "$pattern" "$scratch/err" || return 0
    done
    complain "inspect $* says no '$pattern': $(cat "$scratch/err")"
}
suspects "is security.server_key the trainer's public key\?" \
    --set "security.key=$keys/w0.secret" --set "security.server_key=$keys/stranger.public"
# On a busy machine the connection may be reset, each time, before the trainer's greeting was read:
# then inspect only knows that keys may be missing.
suspects "(the|if the) trainer asks for keys[;,] set security.key and security.server_key"
kill -TERM "$publish"
ends publish 143
exec 3<&-
says "no trainer has answered at $endpoint yet: waiting (--timeout S ends that)" "$endpoint"
finish
