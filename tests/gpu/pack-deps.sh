#!/bin/bash
# pack-deps.sh FOLDER [PACKAGE…]: unpacks the Debian packages that the build needs into one folder,
# so that refit can be built on an x86-64 Linux machine without a network: copy the folder there and
# name it in REFIT_DEPS (tests/gpu/run.sh), or source its env.sh. Run it where there is a network, on
# Debian or Ubuntu, after apt-get update. The folder works wherever it is put.
set -euo pipefail

out=$(realpath -m "${1:?usage: pack-deps.sh FOLDER [PACKAGE...]}")
shift
packages=(
    libzmq3-dev libzmq5 libsodium23 libpgm-5.3-0 libnorm1 libbsd0 libmd0
    libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1
    libmsgpack-dev libmsgpackc2 libyaml-dev libyaml-0-2 libxxhash-dev libxxhash0
    libzstd-dev libzstd1
    libjansson-dev libjansson4 libcmocka-dev libcmocka0 pkgconf-bin libpkgconf3 "$@"
)
if [ -e "$out" ] && [ ! -f "$out/env.sh" ]; then
    echo "pack-deps: $out is there and was not made by this script" >&2
    exit 1
fi

debs=$(mktemp -d)
trap 'rm -rf "$debs"' EXIT
chmod 755 "$debs" # apt reads it as a user of its own
if ! (cd "$debs" && apt-get -q download "${packages[@]}" >log 2>&1); then
    cat "$debs/log" >&2
    echo "pack-deps: the packages could not be fetched: is there a network, and was apt-get update run?" >&2
    exit 1
fi
rm -rf "$out"
mkdir -p "$out"
for deb in "$debs"/*.deb; do
    dpkg -x "$deb" "$out"
done
(cd "$debs" && printf '%s\n' *.deb) >"$out/packages.txt"
rm -rf "${out:?}"/{usr/share,etc,usr/include/msgpack.hpp} "$out"/usr/include/msgpack/v[0-9]

# Debian's .pc files name /usr: they are to name this folder, wherever it lies. What a static link
# would need besides is not packed, and pkg-config would ask for it all the same.
find "$out" -name '*.pc' -exec sed -i -e "s|/usr|\${pcfiledir}/../../..|g" -e '/^Requires.private:/d' {} +
if [ -d "$out/lib" ]; then
    mkdir -p "$out/usr/lib"
    cp -a "$out/lib/." "$out/usr/lib/"
    rm -rf "${out:?}/lib"
fi
ln -sf pkgconf "$out/usr/bin/pkg-config"

cat >"$out/env.sh" <<'ENV'
# shellcheck shell=bash
# Sourced: the build finds the libraries in this folder.
DEPS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CMAKE_PREFIX_PATH="$DEPS/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}"
export PKG_CONFIG_PATH="$DEPS/usr/lib/x86_64-linux-gnu/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}"
export CPATH="$DEPS/usr/include${CPATH:+:$CPATH}"
export LIBRARY_PATH="$DEPS/usr/lib/x86_64-linux-gnu${LIBRARY_PATH:+:$LIBRARY_PATH}"
export LD_LIBRARY_PATH="$DEPS/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH="$PATH:$DEPS/usr/bin" # pkg-config, where there is none
ENV
du -sh "$out" | cut -f1
