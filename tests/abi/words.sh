#!/bin/bash
# words.sh: names and sentences use the field's words, and a cell of a table has at most 40 of them. Each
# line below is a pattern and what to say instead. tests/abi/words_allowed lists what is right all the
# same: a pattern of files, and words of the line.
# shellcheck disable=SC2016 # an awk program
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

read_words() {
    cat <<'END'
\bbehind\b  ->  after; during; overlaps
(is|are) no matter  ->  does not matter, do not matter
unknown here  ->  independent of
[Mm]ust not know  ->  independent of
glance  ->  query
\blease  ->  read lock
\bstretch(es)?\b  ->  range; chunk; batch
verdict  ->  result
\bpatience\b  ->  timeout
\btrips?\b  ->  transfer
unuse\b  ->  remove_stream
unhold  ->  unpin
unkeep  ->  release
PART_BORN  ->  PART_NEW
REFIT_HOME_  ->  REFIT_PLACEMENT_
settle_in  ->  place_states
look_again  ->  invalidate
astray  ->  needs_move
put_away  ->  mark_offloaded
come_in_early  ->  prefetch
carry_out_orders  ->  run_commands
unbook  ->  release
any_optimizer  ->  allow_unverified
host_pick  ->  params
cpu_fraction  ->  CpuStep(fraction)
rft_adam  ->  rft_optim
_exposed  ->  _blocked
locksmith  ->  key_fixture
\bcrew\b  ->  rollouts
END
}

failed=0
while IFS= read -r row; do
    pattern=${row%%  ->  *} instead=${row##*  ->  }
    found=$(git grep -nIiE -e "$pattern" -- . ':!tests/fuzz' ':!tests/gpu/results' ':!CHANGELOG.md' ':!*.svg' \
        ':!tests/abi/words.sh' ':!tests/abi/words_allowed' || true)
    while IFS= read -r line; do
        [ -n "$line" ] || continue
        while read -r file words; do
            # shellcheck disable=SC2053 # file is a pattern
            [[ "${line%%:*}" == $file && "$line" == *"$words"* ]] && continue 2
        done <"$here/words_allowed"
        echo "$line"
        echo "    say: $instead"
        failed=1
    done <<<"$found"
done < <(read_words)
while IFS= read -r line; do
    [ -n "$line" ] || continue
    echo "$line"
    echo "    say it in prose, or in several rows"
    failed=1
done < <(git ls-files '*.md' ':!CHANGELOG.md' | xargs awk -F'|' '/^\|/ {
    for (i = 2; i < NF; i++)
        if ((words = split($i, all, " ")) > 40) print FILENAME ":" FNR ": a cell of " words " words"
}')
exit $failed
