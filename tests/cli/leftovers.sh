#!/bin/bash
# The files of a killed writer are removed at the next start; a file that is being written is not.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
command -v flock >/dev/null || exit 77
safetensors all 1 "$scratch/small"
safetensors big 2 60000000 "$scratch/large"
socket=ipc://$scratch/socket
out=$scratch/weights

# is_left NAME…: the folder has these names and no others.
is_left() {
    [ "$(ls -A "$out")" = "$(printf '%s\n' "$@" | sort)" ] || complain "in the folder: $(ls -A "$out")"
}
export LC_ALL=C # for ls and sort

# Process 1 lives, and its file is not locked all the same; the one of process 2 is locked, so it stays,
# and so does whatever has another name.
mkdir "$out"
touch "$out"/{.7.safetensors.1,.8.safetensors.2,.8.safetensors.2x,.8.safetensors.,.x.safetensors.1,8.safetensors.1}
ln -s nowhere "$out/.latest.1"
exec 5<"$out/.8.safetensors.2"
flock 5 || complain "flock"
run 4 subscribe "$socket" --out "$out" --timeout 1
is_left .8.safetensors.2 .8.safetensors.2x .8.safetensors. .x.safetensors.1 8.safetensors.1
flock -u 5
exec 5<&-
run 4 subscribe "$socket" --out "$out" --timeout 1
is_left .8.safetensors.2x .8.safetensors. .x.safetensors.1 8.safetensors.1
rm -r "$out"

# wait_for_file: until the subscriber has a file under way; false if it has ended before.
wait_for_file() {
    until compgen -G "$out/.1.safetensors.*" >/dev/null; do
        kill -0 "$subscribe" 2>/dev/null || return 1
    done
}

# killed_in_the_middle: a subscriber that is killed while it writes; true if it has left a file.
killed_in_the_middle() {
    "${refit[@]}" publish "$scratch/large" --bind "$socket" --timeout 50 >/dev/null 2>&1 &
    publish=$!
    "${refit[@]}" subscribe "$socket" --out "$out" --count 1 >/dev/null 2>&1 &
    subscribe=$!
    wait_for_file
    kill -KILL "$subscribe" 2>/dev/null
    wait "$subscribe" 2>/dev/null
    kill -TERM "$publish" 2>/dev/null
    wait "$publish"
    compgen -G "$out/.1.safetensors.*" >/dev/null
}
for ((tries = 1; tries <= 50; tries++)); do
    killed_in_the_middle && break
done
[ "$tries" -le 50 ] || complain "no subscriber was killed while it wrote"
rm -f "$out/1.safetensors" "$out/latest"
run 4 subscribe "$socket" --out "$out" --timeout 1
[ -z "$(ls -A "$out")" ] || complain "left behind: $(ls -A "$out")"

# materialize removes what is left of the file that it writes.
"${refit[@]}" publish "$scratch/small" --bind "$socket" --timeout 50 >/dev/null 2>"$scratch/publish.err" &
publish=$!
run 0 subscribe "$socket" --archive "$scratch/kept" --count 1
wait "$publish" || complain "publish: $(cat "$scratch/publish.err")"
touch "$out"/{.model.1,.other.1,.1.safetensors.1}
run 0 materialize "$scratch/kept" 1 --out "$out/model"
is_left .1.safetensors.1 .other.1 model
cmp "$out/model" "$scratch/small" || complain "the file that was written"

# A process of another namespace may have the same number: its file is not touched.
(
    taken=$out/.model.$BASHPID
    exec 5>"$taken"
    flock 5 || complain "flock"
    echo "$taken" >"$scratch/taken"
    exec "${refit[@]}" materialize "$scratch/kept" 1 --out "$out/model"
) || complain "materialize beside a file of the same name"
[ -e "$(cat "$scratch/taken")" ] || complain "the other process's file was removed"
is_left .1.safetensors.1 .other.1 "$(basename "$(cat "$scratch/taken")")" model
finish
