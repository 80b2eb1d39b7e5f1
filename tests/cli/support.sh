# shellcheck shell=bash
# Shared by the scripts of this folder: a scratch folder, and functions that run the command and check.
# Source it: . "$(dirname "${BASH_SOURCE[0]}")/support.sh"
set -uo pipefail
: "${REFIT:?the path of the refit command}"
read -ra refit <<<"${LAUNCHER-}" # such as valgrind
refit+=("$REFIT")
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
export XDG_RUNTIME_DIR=$scratch # for user://NAME
# A name of the user is one on the whole machine: this script has its own, whatever else runs.
export REFIT_BROADCAST_ENDPOINT=user://test-$$
# And no end that the machine holds up for ten seconds is taken for dead, or leaves without a word.
export REFIT_BROADCAST_HEARTBEAT_TIMEOUT_MS=20s REFIT_BROADCAST_LINGER_MS=15s
failures=0

# complain WORD…: notes a failure; the script goes on, so that one run shows all of them.
complain() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# run STATUS ARGUMENT…: runs the command; its output goes to $scratch/out and $scratch/err.
run() {
    local want=$1 got
    shift
    "${refit[@]}" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || complain "refit $*: status $got, not $want: $(cat "$scratch/err")"
}

# refuses STATUS PART ARGUMENT…: the command fails with one line on stderr that has PART.
refuses() {
    local want=$1 part=$2
    shift 2
    run "$want" "$@"
    [ ! -s "$scratch/out" ] || complain "refit $*: printed to stdout: $(head -1 "$scratch/out")"
    [ "$(wc -l <"$scratch/err")" -eq 1 ] || complain "refit $*: not one line: $(cat "$scratch/err")"
    grep -q '^refit: ' "$scratch/err" || complain "refit $*: no 'refit: ' in $(cat "$scratch/err")"
    grep -qF -- "$part" "$scratch/err" || complain "refit $*: no '$part' in $(cat "$scratch/err")"
}

# prints PART: the last run printed it to stdout.
prints() {
    grep -qF -- "$1" "$scratch/out" || complain "no '$1' in: $(head -20 "$scratch/out")"
}

# eventually WORD…: calls it until it succeeds, for 20 s: a command does some things a moment after it has
# said where it is.
eventually() {
    local tries
    for ((tries = 0; tries < 400; tries++)); do
        "$@" && return
        sleep 0.05
    done
    complain "$* did not hold"
}

# number NAME ROW: a number of a row of JSON.
number() {
    sed -n "$2p" "$scratch/out" | grep -o "\"$1\":[0-9.e+-]*" | cut -d: -f2
}

# is NAME ROW VALUE
is() {
    [ "$(number "$1" "$2")" = "$3" ] || complain "row $2: $1 is $(number "$1" "$2"), not $3"
}

# rows COUNT PATTERN…: so many rows have each of these figures.
rows() {
    local want=$1 pattern
    shift
    for pattern in "$@"; do
        [ "$(grep -c "\"$pattern" "$scratch/out")" -eq "$want" ] || complain "no $pattern in $want rows"
    done
}

# safetensors KIND SEED [BYTES] FILE: see make_safetensors.c.
safetensors() {
    "${TOOLS:?}/make_safetensors" "$@" || complain "make_safetensors $*"
}

# shellcheck disable=SC2034 # Process ids, set by begin.
publish='' subscribe=''

# begin NAME ARGUMENT…: starts the command NAME; $NAME is its process. Its output is read from the FIFO
# $scratch/NAME.said.
begin() {
    local name=$1
    [ -p "$scratch/$name.said" ] || mkfifo "$scratch/$name.said"
    "${refit[@]}" "$@" >"$scratch/$name.said" 2>"$scratch/$name.err" </dev/null &
    eval "$name=$!"
}

# begin_publish ARGUMENT…: starts publish, whose lines come from descriptor 3, and finds its $endpoint.
begin_publish() {
    begin publish "$@"
    exec 3<"$scratch/publish.said"
    read -r word endpoint <&3
    [ "$word" = endpoint ] || complain "publish $* said '$word $endpoint'"
}

# ends NAME STATUS [PART]: the command that was begun ends so, with PART on stderr.
ends() {
    local got
    wait "${!1}"
    got=$?
    [ "$got" -eq "$2" ] || complain "$1: status $got, not $2: $(cat "$scratch/$1.err")"
    grep -qF -- "${3-}" "$scratch/$1.err" || [ -z "${3-}" ] ||
        complain "$1: no '$3' in: $(cat "$scratch/$1.err")"
}

# finish: the script's status.
finish() {
    [ "$failures" -eq 0 ] || exit 1
    exit 0
}
