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

# finish: the script's status.
finish() {
    [ "$failures" -eq 0 ] || exit 1
    exit 0
}
