#!/bin/bash
# Whether tests fail by chance: runs the quick tests of C and Python COUNT times, while other work keeps
# every core busy.
#
#   tests/soak.sh COUNT [SEED]
#
# Each round has a seed (SEED, SEED + 1, …; by default the time) for the tests that draw samples. The output
# of a round that fails is kept in build/soak/ until the next soak; the last line is "N passed, N failed"
# of the rounds.
set -uo pipefail
# shellcheck source=.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

if ! [[ ${1:-} =~ ^[1-9][0-9]*$ && ${2:-1} =~ ^[1-9][0-9]*$ ]]; then
    say "usage: tests/soak.sh COUNT [SEED]"
    exit 2
fi
seed=${2:-$(date +%s)}
folder=$build/soak
passed=0 failed=0
rm -rf "$folder" && mkdir -p "$folder" || exit

# other_work PARENT: computes and writes to memory until it is killed, or its parent is.
other_work() {
    while kill -0 "$1"; do head -c 64M /dev/urandom | gzip -1 >/dev/null; done
}

workers=()
for ((at = 0; at < $(nproc); at++)); do
    setsid bash -c "$(declare -f other_work); other_work $$" &
    workers+=($!)
done
end_work() {
    for at in "${workers[@]}"; do kill -- -"$at" 2>/dev/null; done
}
trap end_work EXIT

for ((at = 0; at < $1; at++)); do
    started=$SECONDS
    if TEST_SEED=$((seed + at)) "$root/tests/run.sh" --quick >"$folder/log" 2>&1; then
        passed=$((passed + 1)) word=passed
    else
        failed=$((failed + 1)) word=failed
        mv "$folder/log" "$folder/$((seed + at)).log"
    fi
    echo "seed $((seed + at)): $word, $((SECONDS - started)) s"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
