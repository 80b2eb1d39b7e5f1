#!/bin/bash
# release.sh [x86_64|aarch64]…: makes for each machine, or for both, the Python wheel and the C library's tarball
# into dist/, or $DIST: self-contained, for every Linux with glibc 2.28 or later. Compiles for either machine on
# either machine; needs cmake, ninja, Python 3.11 and what parts/fetch.sh needs. What compiles (ziglang) and what
# checks (auditwheel) comes from PyPI into build-release/. Takes about five minutes a machine the first time.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dist=$(realpath -m "${DIST:-$root/dist}")
tools=$root/build-release/tools
[ $# -gt 0 ] || set -- x86_64 aarch64

pins=(ziglang==0.17.1 auditwheel==6.8.2 scikit-build-core==1.1.2)
if [ "$(cat "$tools/.pins" 2>/dev/null)" != "${pins[*]}" ]; then
    python3 -m venv --clear "$tools"
    "$tools/bin/pip" -q --disable-pip-version-check install "${pins[@]}"
    echo "${pins[*]}" >"$tools/.pins"
fi
export PATH=$tools/bin:$PATH
ZIG=$(python3 -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
export ZIG
# The date of every file in what is made: that of the commit.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 946684800)}
export SOURCE_DATE_EPOCH
mkdir -p "$dist"

for machine in "$@"; do
    if [[ ! $machine =~ ^(x86_64|aarch64)$ ]]; then
        echo "usage: release.sh [x86_64|aarch64]..." >&2
        exit 2
    fi
    work=$root/build-release/$machine
    rm -rf "$work/wheel"
    REFIT_WHEEL=$machine pip -q --disable-pip-version-check wheel --no-deps --no-build-isolation \
        --wheel-dir "$work/wheel" "$root/bindings/python"
    wheel=$(echo "$work"/wheel/*"manylinux_2_28_$machine.whl")
    # What auditwheel says the wheel can be tagged as, from what its library asks the loader for.
    auditwheel show "$wheel" >"$work/auditwheel.txt"
    grep -q "manylinux_2_28_$machine\|manylinux_2_1[0-9]_$machine\|manylinux_2_2[0-7]_$machine" "$work/auditwheel.txt" || {
        cat "$work/auditwheel.txt" >&2
        exit 1
    }
    cp "$wheel" "$dist"

    # In the wheel's build folder, where most is compiled already.
    build=$root/build-wheel-$machine
    cmake -S "$root" -B "$build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$here/zig-$machine.cmake" -DREFIT_BUNDLE=ON \
        -DREFIT_BUILD_TESTS=OFF -DREFIT_BUILD_EXAMPLES=OFF -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_LIBDIR=lib \
        -DREFIT_BUILD_CLI=ON -DREFIT_INSTALL=ON -DREFIT_BUILD_PYTHON=OFF >"$work/cmake.log" || {
        cat "$work/cmake.log" >&2
        exit 1
    }
    cmake --build "$build" >"$work/build.log" || {
        tail -n 40 "$work/build.log" >&2
        exit 1
    }
    version=$(sed -n 's/^project(refit VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")
    name=refit-$version-linux-$machine
    rm -rf "${work:?}/$name"
    for component in shared development command; do
        cmake --install "$build" --prefix "$work/$name" --component "$component" >/dev/null
    done
    tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - "$name" |
        gzip -9n >"$dist/$name.tar.gz"
done
(cd "$dist" && ls -l -- *.whl *.tar.gz)
