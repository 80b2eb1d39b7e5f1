#!/bin/bash
# Short runs of grpo: both trainings are identical, the offload makes room, and without it there is none.
set -u
grpo=${1:?usage: test_grpo.sh GRPO}
fail() {
    echo "test_grpo: $1" >&2
    exit 1
}

"$grpo" --check --cycles 4 || fail "--check found a difference"

lines=$("$grpo" --cycles 3 --target 0) || fail "a short run failed"
[ "$(grep -c '^ *[0-9]' <<<"$lines")" -ge 3 ] || fail "there are not three lines for three cycles: $lines"

message=$("$grpo" --no-offload --cycles 1 2>&1 >/dev/null) && fail "--no-offload did not run out of memory"
grep -q 'does not fit beside' <<<"$message" || fail "--no-offload did not say why: $message"
[ "$(wc -l <<<"$message")" -eq 1 ] || fail "--no-offload said more than one line: $message"
