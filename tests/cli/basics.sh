#!/bin/bash
# The command line: help fits on a screen, each mistake is one line with a status of its own, and only
# text goes into a pipe.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# fits: the last run's output fits on a terminal of 24 lines of 80 columns.
fits() {
    [ -s "$scratch/out" ] || complain "$1 shows nothing"
    [ "$(wc -l <"$scratch/out")" -le 24 ] || complain "$1 has more than 24 lines"
    [ "$(wc -L <"$scratch/out")" -lt 80 ] || complain "$1 is wider than 79 columns"
    ! grep -q "$(printf '\033')" "$scratch/out" || complain "$1 is coloured"
}

run 0 --help
fits "refit --help"
commands=$(sed -n 's/^  \([a-z]*\)  *[a-z].*/\1/p' "$scratch/out")
[ -n "$commands" ] || complain "refit --help lists no command"
for status in 0 1 2 3 4 5 6; do
    grep -qE "(: |; |^)$status " "$scratch/out" || complain "--help does not say what $status means"
done
for command in $commands; do
    run 0 "$command" --help
    fits "refit $command --help"
    refuses 2 "--nonsense is not known here" "$command" --nonsense
done
run 0 -h
run 0 help

run 0 version
grep -qE '^refit [0-9]+\.[0-9]+\.[0-9]+$' "$scratch/out" || complain "refit version: $(cat "$scratch/out")"
run 0 --version

refuses 2 "which command?"
refuses 2 "there is no command publsh" publsh
refuses 2 "takes no argument" version please
refuses 2 "needs a value" config --file
refuses 2 "takes no value" config --defaults=yes
refuses 2 "what is this?" config -- this
refuses 2 "there is no command a?b" "$(printf 'a\nb')"
# Terminals take U+009B, in UTF-8 or as the byte 9B, for the escape and bracket of a sequence.
refuses 2 "there is no command a??31mb?1mä:" "$(printf 'a\302\23331mb\2331m\303\244')"

refuses 2 "there is no benchmark ofload" bench ofload
refuses 2 "--device is host or cuda:N, not auto" bench offload --device auto
# An option that a benchmark does not take is refused.
refuses 2 "--density is for broadcast and link: bench delta takes all densities" bench delta --density 0.01
refuses 2 "--density is for broadcast and link: bench offload does not take it" bench offload --density 0.01
refuses 2 "--from is for delta: bench pin does not take it" bench pin --from x --mib 1
refuses 2 "--workers is for broadcast: bench delta does not take it" bench --workers 3 delta
refuses 2 "--device is for offload, remap, handover, pin and tensors: bench broadcast does not take it" \
    bench broadcast --device cuda:0
refuses 2 "--rounds is for offload, remap, handover, pin, broadcast, link and delta: bench tensors" \
    bench tensors --rounds 1
refuses 1 "neither a known list of tensors nor a file" bench tensors --tensors gpt5
printf 'a 4096\nb\n' >"$scratch/list"
refuses 1 "line 2 is not a tensor's name and its bytes" bench tensors --tensors "$scratch/list"
printf 'a 4096\nb 512\n' >"$scratch/list"
run 0 bench tensors --tensors "$scratch/list"
cmp -s "$scratch/list" "$scratch/out" || complain "bench tensors does not show the list it was given"
for list in qwen3-0.6b qwen2.5-1.5b qwen2.5-3b small; do
    run 0 bench tensors --tensors $list --mib 8
    sort "$scratch/out" | uniq -d | grep -q . && complain "$list names a tensor twice"
done
# A size that memory does not allow is cut to what the baselines leave room for, and that is said.
run 0 bench tensors --tensors qwen3-0.6b --mib 16777216
room=$(sed -nE 's/^refit: 16\.0 TiB are taken 6 times, and there is room for ([0-9.]+) ([KMGT])iB: .* are measured$/\1\2i/p' "$scratch/err" |
    numfmt --from=auto)
awk -v room="${room:-0}" '{ sum += $2 } END { exit !(sum > 0 && 6 * sum <= 1.05 * room) }' "$scratch/out" ||
    complain "the list does not fit six times into the room that is told: $(cat "$scratch/err")"
printf 'a 17592186044416\n' >"$scratch/large"
refuses 1 "16.0 TiB of tensors are taken 6 times, and there is room for" bench offload --tensors "$scratch/large"
run 0 bench offload --json --rounds 1 --tensors "$scratch/list"
[ "$(grep -c '"bench":"offload"' "$scratch/out")" -eq 2 ] || complain "bench offload has not two rows"
run 0 bench offload --rounds 1 --tensors "$scratch/list"
grep -q ' 0\.000$' "$scratch/out" && complain "a small figure reads as nothing: $(cat "$scratch/out")"
grep -qE '^  cycle_seconds_median  .*[1-9]' "$scratch/out" || complain "no seconds: $(cat "$scratch/out")"
run 0 bench remap --json --rounds 1 --tensors "$scratch/list"

if [ -c /dev/full ]; then
    "${refit[@]}" config >/dev/full 2>"$scratch/err"
    [ $? -eq 6 ] || complain "a full standard output is not status 6"
    grep -q "cannot write to standard output" "$scratch/err" || complain "no word about the full output"
fi
finish
