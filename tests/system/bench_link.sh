#!/bin/bash
# refit bench link over a link that the kernel holds to a rate: its worker is in a network namespace of
# its own, and tc's token buckets are on both ends of the cable to it. Needs root, ip and tc; all that it
# makes is gone when it ends.
#
#   tests/system/bench_link.sh --json              1 Gbit/s
#   tests/system/bench_link.sh --rate 300mbit …    a rate as tc writes it
#
# Other arguments are those of refit bench link. REFIT: the command, if it is not build/bin/refit.
# Status 77: the machine does not allow it.
set -uo pipefail
root=$(dirname "${BASH_SOURCE[0]}")/../..
refit=${REFIT:-$root/build/bin/refit}
rate=1gbit arguments=()
while [ $# -gt 0 ]; do
    if [ "$1" = --rate ] && [ $# -gt 1 ]; then
        rate=$2 && shift 2
    else
        arguments+=("$1") && shift
    fi
done

# cannot WORD…
cannot() {
    echo "bench_link.sh: $*" >&2
    exit 77
}

[ "$(id -u)" -eq 0 ] || cannot "a network namespace needs root: run it with sudo"
for tool in ip tc; do
    [ -n "$(command -v "$tool")" ] || cannot "$tool is missing: it comes with iproute2"
done
[ -x "$refit" ] || cannot "$refit is not there: build it first, or say where it is in REFIT"

# Names have at most 15 letters; process ids differ, and so do these addresses.
space=rftl$(printf %x $$)
net=10.$((128 + ($$ >> 14 & 63))).$(($$ >> 6 & 255))
here=$net.$((($$ & 63) * 4 + 1)) there=$net.$((($$ & 63) * 4 + 2))

bench=''
remove() {
    [ -z "$bench" ] || { kill "$bench" 2>"$errors.more" && wait "$bench"; }
    ip link del "$space" 2>"$errors.more"
    ip netns del "$space" 2>"$errors.more"
    rm -f "$errors" "$errors.more"
}
errors=$(mktemp) || exit 1
trap remove EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# make COMMAND…: one step; what it had to say is in the complaint.
make() {
    "$@" 2>"$errors" || cannot "$* is refused here: $(head -1 "$errors")"
}

bucket=(root tbf rate "$rate" burst 64k latency 100ms)
make ip netns add "$space"
make ip link add "$space" type veth peer name eth0 netns "$space"
make ip addr add "$here/30" dev "$space"
make ip link set "$space" up
make ip -n "$space" addr add "$there/30" dev eth0
make ip -n "$space" link set eth0 up
make ip -n "$space" link set lo up
make tc qdisc add dev "$space" "${bucket[@]}"
make tc -n "$space" qdisc add dev eth0 "${bucket[@]}"
# In the background, so that a signal is heard meanwhile.
"$refit" bench link --bind "tcp://$here:0" --netns "$space" "${arguments[@]}" &
bench=$!
wait "$bench"
status=$?
bench=''
(exit "$status")
