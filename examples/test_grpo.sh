#!/bin/bash
# Short runs of grpo: trainings with the refit cycle, with states on the host and without either are
# identical; the offload makes room, and so do windows; without them there is none.
set -u
grpo=${1:?usage: test_grpo.sh GRPO}
fail() {
    echo "test_grpo: $1" >&2
    exit 1
}

"$grpo" --check --cycles 4 || fail "--check found a difference"

for size in 64KiB 1MiB; do
    "$grpo" --check --cycles 4 --window $size || fail "--check --window $size found a difference"
done

# A device that has room for the engine's cache but not for the states: with windows it is enough.
json=$(mktemp) || exit 1
trap 'rm -f "$json"' EXIT
tight=(--device host:capacity=4800KiB --cycles 3 --target 0)
"$grpo" "${tight[@]}" >/dev/null 2>&1 && fail "the states fit into the tight device: it shows nothing"
"$grpo" "${tight[@]}" --window 64KiB --json "$json" >/dev/null || fail "a short run with windows failed"
for figure in '"step_count":6,' '"step_in_bytes_last":3548280,' '"step_out_bytes_last":3548280,'; do
    tail -1 "$json" | grep -q "$figure" || fail "the last cycle has no $figure: $(tail -1 "$json")"
done

for mistake in "--window 1" "--window much" "--window 64KiB --no-offload"; do
    read -ra words <<<"$mistake"
    message=$("$grpo" "${words[@]}" --cycles 1 2>&1 >/dev/null) && fail "$mistake was taken"
    [ "$(wc -l <<<"$message")" -eq 1 ] || fail "$mistake: said more than one line: $message"
done

lines=$("$grpo" --cycles 3 --target 0) || fail "a short run failed"
[ "$(grep -c '^ *[0-9]' <<<"$lines")" -ge 3 ] || fail "there are not three lines for three cycles: $lines"

message=$("$grpo" --no-offload --cycles 1 2>&1 >/dev/null) && fail "--no-offload did not run out of memory"
grep -q 'does not fit beside' <<<"$message" || fail "--no-offload did not say why: $message"
[ "$(wc -l <<<"$message")" -eq 1 ] || fail "--no-offload said more than one line: $message"
