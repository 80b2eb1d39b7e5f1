#!/bin/bash
# Versions that were archived come out byte for byte as --out wrote them; what is damaged, missing or
# ambiguous is refused with a sentence; inspect tells files, archives and versions apart.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"
for n in 1 2 3 4 5; do
    safetensors all "$n" "$scratch/$n.in"
done
# publish FILE…: publishes them to one worker; its endpoint is in $endpoint.
publish() {
    begin_publish "$@" --bind "user://*" --timeout 50
}

# keep COUNT ARGUMENT…: a worker that archives so many versions of the publisher.
keep() {
    local count=$1
    shift
    keep_in kept "$count" "$@"
}

# keep_in FOLDER COUNT ARGUMENT…: as keep, in an archive of that name.
keep_in() {
    local folder=$1 count=$2
    shift 2
    run 0 subscribe "$endpoint" --archive "$scratch/$folder" --count "$count" --timeout 50 "$@"
    cat <&3 >/dev/null
    exec 3<&-
    ends publish 0
}

# file VERSION: the path of its file in the archive, of whichever trainer.
file() {
    find "$scratch/kept" -name "*-$(printf %08d "$1")-*.refit"
}

publish "$scratch"/[1-5].in
# declares PART: inspect shows it. Before there is a version, and before a worker.
# shellcheck disable=SC2317 # eventually calls it.
declares() {
    run 0 inspect "$endpoint"
    prints "version   none yet, of epoch "
    grep -qF "$1" "$scratch/out"
}
eventually declares "     15 B  -                 bool  BOOL [3, 5]"
run 0 inspect "$endpoint" --json
prints '"kind":"publisher"'
refuses 4 "no trainer has answered" inspect "ipc://$scratch/absent" --timeout 1
keep 5 --out "$scratch/out_" --set archive.anchor_every=3
prints "version 5: $scratch/out_/5.safetensors, "
prints "version 5: $scratch/kept/0001-00000005-"
for n in 1 2 3 4 5; do
    run 0 materialize "$scratch/kept" "$n" --out "$scratch/$n.again"
    prints "version $n: $scratch/$n.again, 23 tensors, 560.4 KiB"
    cmp "$scratch/$n.again" "$scratch/out_/$n.safetensors" || complain "version $n"
done
(cd "$scratch" && run 0 materialize kept 1 --out 1.here && cmp 1.here 1.in) || complain "no folder named"
[ "$(find "$scratch" -maxdepth 1 -name '.*.again*' | wc -l)" -eq 0 ] || complain "files are left"

run 0 inspect "$scratch/kept"
prints "5 versions, 2.7 MiB as "
[ "$(grep -c ' anchor ' "$scratch/out")" -eq 2 ] || complain "not two anchors: $(cat "$scratch/out")"
grep -qE '^ +2 +[0-9.]+ % .* 0001-00000002-' "$scratch/out" || complain "no delta 2: $(cat "$scratch/out")"
grep -qE '^ +4 +anchor .* 0001-00000004-' "$scratch/out" || complain "no anchor 4: $(cat "$scratch/out")"
prints "; deltas: "
grep -qE '^ *[0-9.]+ % .* model.layers.0.weight$' "$scratch/out" || complain "no tensor: $(cat "$scratch/out")"
run 0 inspect "$scratch/kept" --json
prints '"kind":"archive"'
prints '"base":4'
prints '"deltas_with_these_tensors":3'
run 0 inspect "$(file 5)"
prints ", delta of 4"
prints "weights   560.4 KiB in 23 tensors"
prints " same, "
prints ", 0 compressed"
grep -qE '^ *[0-9.]+ % +0 +0 +[1-9] +[0-9a-f]{16}  model.layers.0.weight$' "$scratch/out" ||
    complain "no tensor with its blocks: $(cat "$scratch/out")"
digest=$(sed -n 's/^digest *//p' "$scratch/out")
run 0 inspect "$(file 5)" --json
prints "\"digest\":\"$digest\""
prints '"density":'
prints '"blocks":{"same":0,"sparse":0,"dense":'
run 0 inspect "$scratch/5.again"
prints ", safetensors"
prints "digest    $digest" # the file is the version
run 0 inspect "$scratch/5.in" --json
prints "\"digest\":\"$digest\""
prints '"kind":"safetensors"'

# A restarted worker is sent the current version again; another trainer counts from 1.
publish "$scratch/2.in" "$scratch/3.in"
keep 2
run 0 inspect "$scratch/kept"
prints "7 versions, "
refuses 2 "several trainers have written version 2" materialize "$scratch/kept" 2 --out "$scratch/x"
epoch=$(find "$scratch/kept" -name '0002-00000002-*' | sed 's/.*-\(.*\)\.refit/\1/')
run 0 materialize "$scratch/kept" 2 --out "$scratch/x" --epoch "$epoch"
cmp "$scratch/x" "$scratch/3.in" || complain "version 2 of the second trainer"

# A folder of something else is not an archive; one that waits for its first version is.
mkdir "$scratch/else" "$scratch/new" && touch "$scratch/else/notes" "$scratch/new/.lock"
refuses 5 "$scratch/else holds no file of an archive (refit subscribe --archive writes them)" \
    inspect "$scratch/else"
refuses 6 "$scratch/else holds no file of an archive" materialize "$scratch/else" 1 --out "$scratch/y"
run 0 inspect "$scratch/new"
prints "0 versions"
refuses 6 "it is empty" materialize "$scratch/new" 1 --out "$scratch/y"
refuses 5 "it is a file of an archive: refit materialize makes a safetensors file of it" \
    publish "$(file 5)" --bind "ipc://$scratch/socket"

refuses 6 "the archive has no version 9" materialize "$scratch/kept" 9 --out "$scratch/y"
refuses 6 "cannot open the folder" materialize "$scratch/nowhere" 1 --out "$scratch/y"
refuses 6 "cannot open the folder" materialize "$scratch/kept" 5 --out "$scratch/nowhere/y"
refuses 2 "not a version: write a whole number" materialize --out "$scratch/y" "$scratch/kept" -- -1
refuses 2 "not a version: write a whole number" materialize "$scratch/kept" 0 --out "$scratch/y"
refuses 2 "--epoch cannot be xyz" materialize "$scratch/kept" 5 --epoch xyz --out "$scratch/y"
refuses 2 "--out FILE is missing" materialize "$scratch/kept" 5
refuses 2 "which archive" materialize --out "$scratch/y"
refuses 2 "what is 6" materialize "$scratch/kept" 5 6 --out "$scratch/y"
refuses 5 "is not a name for a file" materialize "$scratch/kept" 5 --out "$scratch/"
refuses 2 "inspect what?" inspect
refuses 2 "inspect one thing" inspect a b
refuses 6 "cannot open" inspect "$scratch/nowhere"
head -c 100 /dev/zero >"$scratch/zeros"
refuses 5 "neither a file of an archive nor a safetensors file" inspect "$scratch/zeros"
refuses 2 "--archive DIR is missing" subscribe --timeout 1
refuses 2 "--archive DIR is missing" subscribe --keep 2 --out "$scratch/y" --timeout 1
refuses 2 "--keep cannot be 0" subscribe --keep 0 --archive "$scratch/y" --timeout 1

# Only the last anchors, compressed.
publish "$scratch"/[1-5].in
keep_in few 5 --keep 1 --set archive.anchor_every=2 --set broadcast.compress=zstd
prints ", anchor; 2 old files removed"
run 0 inspect "$scratch/few" --json
prints '"version":5'
[ "$(find "$scratch/few" -name '*.refit' | wc -l)" -eq 1 ] || complain "old versions are left"
run 0 materialize "$scratch/few" 5 --out "$scratch/5.again"
cmp "$scratch/5.again" "$scratch/5.in" || complain "version 5 of the archive that stays small"

# Two writers; a folder that cannot be.
publish "$scratch/1.in"
(
    exec 9<>"$scratch/kept/.lock"
    flock 9
    refuses 6 "another process writes to this archive" subscribe "$endpoint" \
        --archive "$scratch/kept" --timeout 1
    exit $((failures > 0))
) || failures=$((failures + 1))
refuses 6 "cannot " subscribe "$endpoint" --archive "$scratch/zeros" --timeout 1
keep 1

# Damage, and a link of the chain that is gone.
printf X | dd of="$(file 4)" bs=1 seek=3000 conv=notrunc 2>/dev/null
refuses 5 "is damaged" materialize "$scratch/kept" 5 --out "$scratch/y"
refuses 5 "is damaged" inspect "$(file 4)"
truncate -s 1000 "$(file 5)"
run 5 inspect "$scratch/kept"
grep -q "it has 1000 bytes and should have" "$scratch/err" || complain "$(cat "$scratch/err")"
grep -qE '^ +4 +anchor ' "$scratch/out" || complain "version 4 is not shown"
rm "$(file 4)" "$(file 5)"
run 0 materialize "$scratch/kept" 3 --out "$scratch/y"
[ -e "$scratch/y" ] || complain "version 3 needs neither 4 nor 5"

# A disk that is full: the version is refused, and the archive is as it was.
before=$(find "$scratch/kept" -type f | sort | xargs md5sum)
publish "$scratch/1.in"
(
    ulimit -f 100 # KiB
    refuses 6 "it cannot be written" subscribe "$endpoint" --archive "$scratch/kept" --timeout 50
    exit $((failures > 0))
) || failures=$((failures + 1))
cat <&3 >/dev/null
exec 3<&-
wait "$publish" && complain "publish did not hear of the refusal"
[ "$before" = "$(find "$scratch/kept" -type f | sort | xargs md5sum)" ] ||
    complain "a failed version changed the archive"
finish
