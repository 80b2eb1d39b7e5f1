#!/bin/bash
# On a terminal, and only there, progress is shown: one line, without colours, cleared at the end.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
command -v script >/dev/null || exit 77
safetensors all 1 "$scratch/file"

publish="$REFIT publish $scratch/file --bind ipc://$scratch/socket --timeout 1"
script -qec "$publish" /dev/null >"$scratch/seen" </dev/null
[ $? -eq 4 ] || complain "status: $(cat "$scratch/seen")"
grep -qF "version 1: waiting for 1 worker" "$scratch/seen" || complain "nothing: $(cat "$scratch/seen")"
! grep -qE "$(printf '\033')"'\[[0-9;]*m' "$scratch/seen" || complain "coloured"
# The final screen: of each line the text after its last carriage return.
tr -d '\r' <"$scratch/seen" | sed "s/.*$(printf '\033')\[K//" >"$scratch/screen"
! grep -q "waiting" "$scratch/screen" || complain "the progress line is left: $(cat "$scratch/screen")"

run 4 publish "$scratch/file" --bind "ipc://$scratch/socket" --timeout 1
[ "$(wc -l <"$scratch/err")" -eq 1 ] || complain "progress in a pipe: $(cat "$scratch/err")"
! grep -q "$(printf '\r\|\033')" "$scratch/err" || complain "terminal sequences in a pipe"
finish
