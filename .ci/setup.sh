# shellcheck shell=bash
# Sourced by examples/demo.sh, tests/run.sh and .ci/run: finds out what a machine lacks, says so,
# installs it with apt-get, and builds; likewise with pip, into .venv. Touches no network when nothing
# is missing.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
venv=$root/.venv

# What building and testing needs: a probe (a command, a pkg-config module or a header), and the
# Debian packages that bring it. Where releases disagree on a name, the names are parted by "|".
build_needs=(
    command:cc             gcc
    header:stdio.h         libc6-dev
    command:c++            g++
    command:cmake          cmake
    command:ninja          ninja-build
    command:pkg-config     pkg-config
    module:libzmq          libzmq3-dev
    module:msgpack-c,msgpack "libmsgpack-c-dev|libmsgpack-dev"
    module:yaml-0.1        libyaml-dev
    module:libxxhash       libxxhash-dev
    module:libzstd         libzstd-dev
    module:jansson         libjansson-dev
    module:cmocka          libcmocka-dev
)

# What the Python package needs besides: Python 3.11 or later, with venv and pip.
python_needs=(
    python:3.11            "python3.11-venv|python3-venv"
)

# The PyTorch that the tests run with. Where pip finds several builds of it, such as one without CUDA,
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS say which.
torch_version=2.13.0

# What the rest of CI needs besides. What clang-format makes differs between its versions, so one
# is meant.
ci_needs=(
    command:git            git
    command:ccache         ccache
    command:clang          clang
    command:clang-format-14 clang-format-14
    command:clang-tidy     clang-tidy
    command:shellcheck     shellcheck
    command:valgrind       valgrind
)

# What building for 64-bit ARM and running that elsewhere needs: a compiler, an emulator, and of the
# libraries above those of the foreign architecture.
aarch64_needs=(
    command:aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    aarch64-header:stdio.h libc6-dev-arm64-cross
    command:qemu-aarch64   qemu-user
    aarch64-module:libzmq  libzmq3-dev:arm64
    aarch64-module:msgpack-c,msgpack "libmsgpack-c-dev:arm64|libmsgpack-dev:arm64"
    aarch64-module:yaml-0.1 libyaml-dev:arm64
    aarch64-module:libxxhash libxxhash-dev:arm64
    aarch64-module:libzstd libzstd-dev:arm64
    aarch64-module:jansson libjansson-dev:arm64
    aarch64-module:cmocka  libcmocka-dev:arm64
)

say() {
    printf '%s\n' "$*" >&2
}

# is_there PROBE: whether the machine has it.
is_there() {
    local what=${1#*:} module
    case $1 in
    command:*) command -v "$what" >/dev/null ;;
    header:*) echo "#include <$what>" | cc -E - >/dev/null 2>&1 ;;
    module:*)
        for module in ${what//,/ }; do
            pkg-config --exists "$module" 2>/dev/null && return
        done
        return 1
        ;;
    aarch64-header:*) echo "#include <$what>" | aarch64-linux-gnu-gcc -E - >/dev/null 2>&1 ;;
    aarch64-module:*)
        PKG_CONFIG_LIBDIR=/usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig is_there "module:$what"
        ;;
    python:*) python_command >/dev/null ;;
    esac
}

# python_command: prints the first Python that is new enough and can make environments.
python_command() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
            echo "$name" && return
    done
    return 1
}

# missing_packages PROBE PACKAGE…: prints the packages whose probe fails, one a line.
missing_packages() {
    while [ $# -gt 0 ]; do
        is_there "$1" || printf '%s\n' "$2"
        shift 2
    done
}

# known_packages "A|B"…: prints of each the first name that this release's package lists have, or the
# last one.
known_packages() {
    local names name
    for names in "$@"; do
        for name in ${names//|/ }; do
            apt-cache show "$name" 2>/dev/null | grep -q '^Filename:' && break
        done
        printf '%s ' "$name"
    done
    echo # without the end of a line, read fails
}

# install_missing PROBE PACKAGE…: installs what is missing, or says why it cannot and returns 1.
install_missing() {
    local missing as_root=()
    mapfile -t missing < <(missing_packages "$@")
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        say "refit needs these Debian packages, or what your system calls them: ${missing[*]}"
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            say "refit needs these packages; install them as root, then run this again:"
            say "    apt-get install $(known_packages "${missing[@]}")"
            return 1
        fi
        as_root=(sudo)
    fi
    say "Missing here, to be installed with ${as_root[*]:+sudo }apt-get: ${missing[*]//|/ or }"
    "${as_root[@]}" apt-get -q update >&2 || say "apt-get update failed: trying with the package lists there are"
    read -ra missing < <(known_packages "${missing[@]}")
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y --no-install-recommends install "${missing[@]}" >&2 </dev/null
}

# install_aarch64: what the preset aarch64 needs; Debian has to be told of the architecture first.
install_aarch64() {
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    if command -v dpkg >/dev/null && ! dpkg --print-foreign-architectures | grep -qx arm64; then
        "${as_root[@]}" dpkg --add-architecture arm64 || return
    fi
    install_missing "${aarch64_needs[@]}"
}

# configure: sets build/ up, with ccache where there is one; keeps a generator that was chosen before.
configure() {
    local options=(-S "$root" -B "$build")
    [ -f "$build/CMakeCache.txt" ] || options+=(-G Ninja)
    if command -v ccache >/dev/null; then
        options+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache)
    fi
    if [ -n "${CI:-}" ]; then
        options+=(-DREFIT_WARNINGS_AS_ERRORS=ON)
    fi
    cmake "${options[@]}" "$@" >&2
}

# python_ready EXTRA,…: makes .venv with PyTorch, refit as these sources have it, and what its extras
# name. pip looks into the network only if it is new or pyproject.toml has changed.
python_ready() {
    local pip=("$venv/bin/python" -m pip -q --disable-pip-version-check) project=$root/bindings/python stamp
    local package=("$project[$1]" "torch==$torch_version") # never another one for the sake of an extra
    stamp=$venv/.refit-${1//,/-}
    install_missing "${build_needs[@]}" "${python_needs[@]}" || return
    if ! "${pip[@]}" --version >/dev/null 2>&1; then # none, or one that was not finished
        say "Making .venv, with PyTorch $torch_version"
        "$(python_command)" -m venv --clear "$venv" || return
    fi
    if cmp -s "$stamp" "$project/pyproject.toml"; then
        package=(--no-deps --no-index "$project")
    else
        say "Installing into .venv: refit[$1]"
        "${pip[@]}" install "torch==$torch_version" "scikit-build-core>=0.11" >&2 || return
    fi
    if command -v ccache >/dev/null; then
        local -x CMAKE_C_COMPILER_LAUNCHER=ccache
    fi
    "${pip[@]}" install --no-build-isolation "${package[@]}" >&2 || return
    cp "$project/pyproject.toml" "$stamp"
}
