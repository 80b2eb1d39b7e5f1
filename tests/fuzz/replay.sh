#!/bin/bash
# replay.sh REPLAYER: what replay.c says of archives, good and bad (REPLAYER has replay_stub.c as its
# target), and that pack.sh makes each archive of corpus/ again from its inputs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
replayer=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# tells STATUS SENTENCE ARCHIVE: the replayer ends so and says so.
tells() {
    local status=0
    "$replayer" "$3" >said 2>&1 || status=$?
    [ $status = "$1" ] && grep -qF "$2" said && return
    echo "$3: wanted status $1 and \"$2\", got status $status and:"
    cat said
    exit 1
}

mkdir good refused crash
echo taken >good/first
echo refused >good/second
: >good/void
cp good/second refused
cp good/first crash/a
echo crash >crash/that-one
echo never >crash/z
for folder in good refused crash; do
    "$here/pack.sh" $folder $folder.tar
done
tells 0 '3 inputs of good.tar replayed, 1 taken' good.tar

tells 2 'missing.tar cannot be opened: No such file or directory' missing.tar
: >empty.tar
tells 1 'empty.tar is cut off' empty.tar
head -c 1024 /dev/zero >none.tar
tells 1 'none.tar has no inputs' none.tar
printf '%2048s' text >text.tar
tells 1 'text.tar is not a tar archive' text.tar
head -c 514 good.tar >input.tar
tells 1 'input.tar is cut off in an input' input.tar
head -c 1024 good.tar >end.tar
tells 1 'end.tar is cut off' end.tar
sed '1s/^first/worst/' good.tar >name.tar
tells 1 'name.tar has a damaged header' name.tar
tar --format=ustar -cf folder.tar good
tells 1 'folder.tar has an entry that is not a file' folder.tar
tells 1 'refused.tar has no input that the target takes' refused.tar

if "$replayer" crash.tar >said 2>&1 || [ "$(grep replaying said | tail -1)" != 'replaying that-one' ]; then
    echo "a crash is not told:"
    cat said
    exit 1
fi

for archive in "$here"/corpus/*.tar; do
    rm -rf again && mkdir again
    tar -xf "$archive" -C again
    "$here/pack.sh" again again.tar
    cmp "$archive" again.tar
done
