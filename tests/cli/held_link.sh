#!/bin/bash
# tests/system/bench_link.sh: six rows over a link of the requested rate, and nothing of the link is left
# after; skipped where the machine allows no link.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
link=$(dirname "${BASH_SOURCE[0]}")/../system/bench_link.sh

"$link" --rate 400mbit --json --mib 4 --rounds 1 >"$scratch/out" 2>"$scratch/err" &
held=$!
wait $held
status=$?
if [ $status -eq 77 ]; then
    cat "$scratch/err"
    exit 77
fi
[ $status -eq 0 ] || complain "status $status: $(cat "$scratch/err")"
[ "$(grep -c '"bench":"link"' "$scratch/out")" -eq 6 ] || complain "not six rows"
awk -F'"link_gbit":' '{ split($2, gbit, ","); exit !(gbit[1] > 0 && gbit[1] <= 0.4) }' "$scratch/out" ||
    complain "the link carries more than it was told to: $(head -1 "$scratch/out")"
[ ! -e "/run/netns/$(printf 'rftl%x' $held)" ] || complain "the namespace is left"
[ ! -e "/sys/class/net/$(printf 'rftl%x' $held)" ] || complain "the cable is left"

# Whatever ends it.
"$link" --json --mib 64 --rounds 60 >"$scratch/out" 2>"$scratch/err" &
held=$!
space=$(printf 'rftl%x' $held)
for _ in $(seq 1200); do
    [ ! -e "/run/netns/$space" ] || break
    sleep 0.05
done
[ -e "/run/netns/$space" ] || complain "no namespace within a minute"
kill -TERM $held
wait $held
[ ! -e "/run/netns/$space" ] || complain "the namespace is left after SIGTERM"
[ ! -e "/sys/class/net/$space" ] || complain "the cable is left after SIGTERM"
finish
