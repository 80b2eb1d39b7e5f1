#!/bin/bash
# bare_roots.sh FOLDER [SUITE…]: what lib/package/release.sh made in dist/ runs where none of the libraries is
# installed. In a bare Debian root for each SUITE (bullseye, bookworm, trixie, bookworm-arm64; default: all), made by
# debootstrap in FOLDER and kept there, it runs the command of the tarball, installs the wheel with NumPy and PyTorch
# from PyPI, and trains a policy whose weights go to other processes. Bullseye's own Python is 3.9 and refit takes 3.11:
# bookworm's source of it is compiled for bullseye in a second root. FOLDER takes 5 GB a suite (PyTorch's build for
# CUDA), 2 GB for arm64. Needs root, debootstrap, dpkg-dev, a network, for arm64 qemu-user-static and binfmt-support.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=$(realpath -m "${1:?usage: bare_roots.sh FOLDER [SUITE...]}")
shift
[ $# -gt 0 ] || set -- bullseye bookworm trixie bookworm-arm64
mkdir -p "$folder"
mirror=${REFIT_DEBIAN_MIRROR:-$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)}
passed=0
failed=0
lock=
undo=()
trap leave EXIT

# leave: takes back what emulated did.
leave() {
    local step
    for step in "${undo[@]}"; do
        $step
    done
}

# within ROOT COMMAND: runs it there, with nothing of this shell's environment.
within() {
    # shellcheck disable=SC2016 # expanded by the shell inside
    unshare --mount --pid --fork bash -c '
        mount --bind /dev "$0/dev" && mount -t tmpfs tmpfs "$0/tmp" && mount -t proc proc "$0/proc" &&
        mkdir -p "$0/run/dist" && mount --bind "$1" "$0/run/dist" && mkdir -p "$0/run/source" && mount --bind "$2" "$0/run/source" &&
        shift 2 && exec chroot "$0" "$@"' "$1" "${DIST:-$root/dist}" "$root" /usr/bin/env -i HOME=/srv LANG=C.UTF-8 \
        PATH=/usr/sbin:/usr/bin:/sbin:/bin PIP_CONFIG_FILE=/srv/pip.conf OMP_NUM_THREADS=1 /bin/bash -euc "$2"
}

# emulated: makes the kernel start programs for arm64 by QEMU, until this script ends. Another one on this machine waits
# for that.
emulated() {
    local at=/proc/sys/fs/binfmt_misc
    [ "$(uname -m)" != aarch64 ] || return 0
    if [ -z "$lock" ]; then
        exec {lock}>/run/lock/refit-bare-roots
        flock "$lock"
    fi
    if [ ! -e "$at/status" ]; then
        mount -t binfmt_misc binfmt_misc "$at"
        undo=("umount $at")
    fi
    if [ ! -e "$at/qemu-aarch64" ]; then
        update-binfmts --enable qemu-aarch64
        undo=("update-binfmts --disable qemu-aarch64" "${undo[@]}")
    fi
}

# made SUITE: its root, which is kept in FOLDER.
made() {
    local at=$folder/$1 options=(--variant=minbase) suite=${1%-arm64} extra=ca-certificates
    if [ "$suite" = bullseye ]; then
        extra+=,libexpat1,libffi7,libssl1.1 # of python_311
    else
        extra+=,python3-venv
    fi
    [ ! -f "$at/.made" ] || return 0
    rm -rf "$at"
    [[ $1 != *-arm64 ]] || options+=(--arch=arm64)
    debootstrap "${options[@]}" --include="$extra" "$suite" "$at" "$mirror"
    touch "$at/.made"
}

# python_311: compiles Python 3.11 for bullseye's glibc, into /opt/python there.
python_311() {
    local at=$folder/bullseye build=$folder/bullseye-build apt=$folder/bullseye-build/srv/apt
    [ ! -x "$at/opt/python/bin/python3" ] || return 0
    rm -rf "$build"
    debootstrap --variant=minbase --include=gcc,libc6-dev,make,libssl-dev,zlib1g-dev,libexpat1-dev,libffi-dev,libbz2-dev,liblzma-dev \
        bullseye "$build" "$mirror"
    mkdir -p "$apt"/{lists,cache/archives}/partial
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$apt/sources.list"
    (
        cd "$apt"
        set -- apt-get -q -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=- \
            -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root
        "$@" update && "$@" source --download-only python3.11 && dpkg-source --no-check --extract python3.11_*.dsc ../python
    )
    within "$build" "cd /srv/python
        sed -i '1i #define Py_BUILD_CORE_MODULE' Modules/pyexpat.c # which it lacks where expat is the system's
        ./configure --prefix=/opt/python --without-ensurepip --with-system-expat --with-system-ffi \\
            --disable-test-modules # Debian's source has neither pip nor expat
        make -j2
        make install"
    python3 -m pip -q download --no-deps --dest "$at/srv" pip
    mv "$build/opt/python" "$at/opt/"
    rm -rf "$build"
}

# check NAME COMMAND…: counts, and says how long.
check() {
    local started=$SECONDS name=$1
    shift
    (set -e && "$@") >"$folder/log" 2>&1 & # not in the condition, where bash goes on after a failure
    if wait $!; then
        passed=$((passed + 1))
        echo "passed $name ($((SECONDS - started)) s)"
    else
        failed=$((failed + 1))
        tail -n 30 "$folder/log"
        echo "FAILED $name ($((SECONDS - started)) s)"
    fi
}

for suite in "$@"; do
    machine=x86_64
    if [[ $suite == *-arm64 ]]; then
        machine=aarch64
        emulated
    fi
    check "$suite: the root" made "$suite"
    at=$folder/$suite
    cp /etc/resolv.conf /etc/hosts "$at/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$at/srv/ca.crt"
    sed 's|^cert *=.*|cert = /srv/ca.crt|' /etc/pip.conf >"$at/srv/pip.conf" 2>/dev/null || : >"$at/srv/pip.conf"
    # Of what a bundle has inside, minbase has xxHash, zstd and libstdc++, for apt.
    check "$suite: none of the libraries is there" within "$at" \
        "! ls /usr/lib/*/ | grep -E 'libzmq|libmsgpack|libyaml|libsodium|libjansson'"
    check "$suite: the command of the tarball" within "$at" "
        tar -C /tmp -xf /run/dist/refit-*-linux-$machine.tar.gz
        cd /tmp/refit-*
        bin/refit version
        bin/refit config --file share/refit/grpo.yaml >/dev/null
        bin/refit keygen /tmp/keys trainer # by libsodium"
    python=python3 pip='' torch=2.13.0 options=()
    if [ "$suite" = bullseye ]; then
        python=/opt/python/bin/python3 pip=--without-pip
        check "$suite: Python 3.11" python_311
    elif [ "$machine" = aarch64 ]; then
        torch=2.6.0             # whose wheel for aarch64 is the one for CPUs
        options=(--cycles 2 --workers 1) # it is emulated
    fi
    check "$suite: pip install of the wheel" within "$at" "
        [ -d /opt/venv ] || $python -m venv $pip /opt/venv
        [ -x /opt/venv/bin/pip ] || for wheel in /srv/pip-*.whl; do
            /opt/venv/bin/python \$wheel/pip install -q --no-index \$wheel
        done
        /opt/venv/bin/pip install -q numpy torch==$torch
        /opt/venv/bin/pip install -q --no-deps --force-reinstall /run/dist/refit-*manylinux_2_28_$machine.whl
        /opt/venv/bin/python -c 'import refit; print(refit.__version__)'"
    check "$suite: a policy trains, and its workers follow" within "$at" \
        "cd /tmp && /opt/venv/bin/python /run/source/examples/grpo_torch.py ${options[*]}"
done
echo "bare roots: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
