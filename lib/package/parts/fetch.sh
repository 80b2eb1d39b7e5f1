#!/bin/bash
# fetch.sh FOLDER [--pin]: brings the sources that list.txt names into FOLDER, one folder each, with Debian's
# patches applied. apt-get fetches them, of the mirror that this machine's apt is set up with; every file
# must have the digest that sha256.txt pins. Changes nothing outside FOLDER. With --pin, files that have no
# digest yet get theirs appended to sha256.txt.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(realpath -m "${1:?usage: fetch.sh FOLDER [--pin]}")
release=bookworm

for tool in apt-get dpkg-source sha256sum flock; do
    command -v "$tool" >/dev/null || {
        echo "fetch.sh: $tool is missing: the sources are Debian's, and need a Debian or Ubuntu with dpkg-dev" >&2
        exit 1
    }
done
# One run at a time: a second one waits, and finds the sources there.
mkdir -p "$(dirname "$out")"
exec 9<"$(dirname "$out")"
flock 9
# stamp: what FOLDER was made from.
stamp() {
    cat "$here/list.txt" "$here/sha256.txt" "$here/fetch.sh" | sha256sum
}
if [ "$(cat "$out/.fetched" 2>/dev/null)" = "$(stamp)" ]; then
    exit 0
fi

# The whole of it is made beside FOLDER and moved there, so that a run that was cut short leaves nothing half done.
new=$out.new
rm -rf "$new"
mkdir -p "$new"/.apt/{lists,cache/archives}/partial "$new/.apt/files"
trap 'rm -rf "$new"' EXIT

mirror=${REFIT_DEBIAN_MIRROR:-}
if [ -z "$mirror" ]; then
    mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
fi
if [ -z "$mirror" ]; then
    echo "fetch.sh: this machine's apt knows no mirror of Debian (was apt-get update run?): name one in REFIT_DEBIAN_MIRROR" >&2
    exit 1
fi
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
if [ ! -f "$keyring" ]; then
    echo "fetch.sh: $keyring is missing: install debian-archive-keyring" >&2
    exit 1
fi
echo "deb-src [signed-by=$keyring] $mirror $release main" >"$new/.apt/sources.list"
apt=(apt-get -q -o Dir::Etc::SourceList="$new/.apt/sources.list" -o Dir::Etc::SourceParts=-
    -o Dir::State::Lists="$new/.apt/lists" -o Dir::Cache="$new/.apt/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update >"$new/.apt/log" 2>&1 || {
    cat "$new/.apt/log" >&2
    exit 1
}
mapfile -t wanted < <(awk '!/^#/ { print $1 "=" $2 }' "$here/list.txt")
(cd "$new/.apt/files" && "${apt[@]}" source --download-only "${wanted[@]}") >"$new/.apt/log" 2>&1 || {
    cat "$new/.apt/log" >&2
    echo "fetch.sh: a version that list.txt names is gone from $release: see there how to take the newer one" >&2
    exit 1
}

cd "$new/.apt/files"
for file in *; do
    if ! grep -qF "  $file" "$here/sha256.txt"; then
        if [ "${2:-}" != --pin ]; then
            echo "fetch.sh: sha256.txt has no digest of $file" >&2
            exit 1
        fi
        sha256sum "$file" >>"$here/sha256.txt"
    fi
done
sha256sum --check --strict --quiet "$here/sha256.txt"
for source in *.dsc; do
    dpkg-source --no-check --no-copy --extract "$source" "$new/${source%%_*}" >"$new/.apt/log" 2>&1 || {
        cat "$new/.apt/log" >&2
        exit 1
    }
done
cd "$here"
rm -rf "$new/.apt"
stamp >"$new/.fetched" # anew: --pin has appended to sha256.txt
rm -rf "$out"
mv "$new" "$out"
trap - EXIT
