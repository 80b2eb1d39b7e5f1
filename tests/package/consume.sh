#!/bin/bash
# consume.sh WAY: builds and runs consumer.c, which gets refit the WAY that another project would. Everything is
# installed and built in a folder of its own below $BUILD; the test environment names the rest. The way "tarball" takes
# what release.sh made, $TARBALL, in place of an installation; where it is for another machine, $CC compiles for that
# and $EMULATOR starts programs of it: with VERSION=0.1.0 BUILD=$PWD/build CMAKE=cmake LAUNCHER= for instance
# CC=aarch64-linux-gnu-gcc EMULATOR="qemu-aarch64-static -L /usr/aarch64-linux-gnu".
set -euo pipefail
way=$1
here=$(dirname "${BASH_SOURCE[0]}")
work=$BUILD/tests/package/$way
prefix=$work/prefix
rm -rf "$work"
mkdir -p "$work"
read -ra emulator <<<"${EMULATOR:-}"

# install COMPONENT…: what a distribution would put into separate packages.
install() {
    local component
    for component in "$@"; do
        "$CMAKE" --install "$BUILD" --prefix "$prefix" --component "$component" >/dev/null
    done
}

# by_cmake OPTION…: configures, builds and runs the consumer project.
by_cmake() {
    "$CMAKE" -S "$here/consumer" -B "$work/build" -G Ninja -DCMAKE_C_COMPILER="$CC" \
        -DCMAKE_C_COMPILER_LAUNCHER="$LAUNCHER" "$@"
    "$CMAKE" --build "$work/build"
    [ "$("${emulator[@]}" "$work/build/consumer")" = "$VERSION" ]
}

# by_pkg_config OPTION…: compiles the consumer with what pkg-config says.
by_pkg_config() {
    local flags
    export PKG_CONFIG_PATH=$prefix/$LIBDIR/pkgconfig
    [ "$(pkg-config --modversion refit)" = "$VERSION" ]
    read -ra flags <<<"$(pkg-config --cflags --libs "$@" refit)"
    "$CC" -std=c11 -Werror "$here/consumer/consumer.c" -o "$work/consumer" "${flags[@]}"
    [ "$(LD_LIBRARY_PATH=$(pkg-config --variable=libdir refit) "${emulator[@]}" "$work/consumer")" = "$VERSION" ]
}

# shared_libraries PROGRAM: those of refit that it asks the loader for.
shared_libraries() {
    readelf -d "$1" | grep -o 'librefit\.so[.0-9]*' || true
}

case $way in
find_package_shared)
    install development shared static
    by_cmake -DCMAKE_PREFIX_PATH="$prefix"
    [ "$(shared_libraries "$work/build/consumer")" = librefit.so.0 ]
    ;;
find_package_static)
    install development shared static
    by_cmake -DCMAKE_PREFIX_PATH="$prefix" -DKIND=static
    [ -z "$(shared_libraries "$work/build/consumer")" ]
    ;;
pkg_config_shared)
    install development shared
    by_pkg_config
    [ "$(shared_libraries "$work/consumer")" = librefit.so.0 ]
    ;;
pkg_config_static)
    install development static
    by_pkg_config --static
    [ -z "$(shared_libraries "$work/consumer")" ]
    ;;
add_subdirectory)
    by_cmake -DSOURCES="$SOURCE"
    [ "$(shared_libraries "$work/build/consumer")" = librefit.so.0 ]
    ;;
tarball)
    tar -C "$work" -xf "$TARBALL"
    mv "$work"/refit-*-linux-* "$prefix"
    by_cmake -DCMAKE_PREFIX_PATH="$prefix"
    [ "$(shared_libraries "$work/build/consumer")" = librefit.so.0 ]
    LIBDIR=lib by_pkg_config
    [ "$(shared_libraries "$work/consumer")" = librefit.so.0 ]
    ;;
*)
    echo "no such way: $way" >&2
    exit 2
    ;;
esac
