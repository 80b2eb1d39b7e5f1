#!/bin/bash
# Tests refit with the real frameworks, each in an environment of its own, without a GPU.
#
#   tests/frameworks/run.sh                       all
#   tests/frameworks/run.sh --list                what there is, with disk and time; makes nothing
#   tests/frameworks/run.sh vllm verl-0.9.1       these; a name without a version means all its versions
#   tests/frameworks/run.sh --quick               of each the newest version, without the tests that are marked slow
#   tests/frameworks/run.sh --quick vllm          the same of these; a version that is named stays
#   tests/frameworks/run.sh vllm -- -k transfer   what follows -- goes to pytest
#
# NAME/environment.sh describes an environment; it is sourced and sets
#   versions    the versions of the framework that are tested, pinned
#   megabytes   the disk that an environment takes
#   minutes     how long it takes to make one, and then to run its tests: "3 5"
#   tests       what pytest runs, below tests/ (default: frameworks/NAME)
#   install()   the function that installs VERSION; $pip and $python are the environment's
# An environment is made once, and again when its environment.sh has changed.
#
#   FRAMEWORKS_DIR     where the environments are kept (default: build-frameworks/ of the repository)
#   FRAMEWORKS_PYTHON  the Python that they are made with (default: python3.11)
#
# Ends with the sum of all tests, "frameworks: N passed, N failed"; 0 if none failed.
# shellcheck disable=SC2128,SC2178 # pip is an array in one function of setup.sh alone
set -uo pipefail
# shellcheck source=.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../.ci/setup.sh"

here=$root/tests/frameworks
folder=$(realpath -m "${FRAMEWORKS_DIR:-$root/build-frameworks}")
interpreter=${FRAMEWORKS_PYTHON:-python3.11}
unset REFIT_LIBRARY PYTHONPATH
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
passed=0 failed=0
summary=()

die() {
    say "tests/frameworks/run.sh: $*"
    exit 2
}

# environments NAME: prints NAME-VERSION of each version, one a line; with --quick of the newest alone.
environments() (
    versions=
    # shellcheck disable=SC1090
    source "$here/$1/environment.sh"
    # shellcheck disable=SC2086 # several words
    printf "$1-%s\n" $versions | if [ "$quick" = yes ]; then sort -V | tail -n 1; else cat; fi
)

# known NAME|NAME-VERSION: prints the environments that it means; 1 if there is none.
known() {
    local name
    if [ -f "$here/$1/environment.sh" ]; then
        environments "$1"
        return
    fi
    for name in "$here"/*/environment.sh; do
        quick=no environments "$(basename "$(dirname "$name")")" | grep -Fx -- "$1" && return
    done
    return 1
}

# describe NAME-VERSION: sources its environment.sh into the shell that calls it.
describe() {
    framework=${1%%-*}
    version=${1#*-}
    environment=$folder/$1
    python=$environment/bin/python
    pip=$environment/bin/pip
    tests=frameworks/$framework
    # shellcheck disable=SC1090
    source "$here/$framework/environment.sh"
}

# list NAME-VERSION: one row of --list.
list() (
    describe "$1"
    state=
    [ ! -f "$environment/made" ] || state=made
    # shellcheck disable=SC2086,SC2154 # two numbers, of environment.sh
    printf '%-24s %6d MB  %3d min to make  %3d min to test  %s\n' "$1" "$megabytes" $minutes "$state"
)

# made: whether the environment is there as environment.sh describes it.
made() {
    cmp -s "$environment/made" "$here/$framework/environment.sh"
}

# make_environment: the venv with the framework, and what the tests need besides.
make_environment() {
    local there
    mkdir -p "$folder" || return
    there=$(df --output=avail -m "$folder" | tail -1)
    if [ "$there" -lt $((megabytes + 500)) ]; then
        say "$framework-$version takes $megabytes MB in $folder; there are $there MB"
        return 1
    fi
    say "Making $environment: about ${minutes% *} minutes, $megabytes MB"
    "$interpreter" -m venv --clear "$environment" || return
    "$pip" -q install --upgrade pip && install "$version" && "$pip" -q install pytest pytest-timeout || return
    cp "$here/$framework/environment.sh" "$environment/made"
}

# install_refit FOLDER: builds refit's wheel of these sources and installs it there, for PYTHONPATH.
# One for all environments: refit's wheel depends on no version of Python or of a framework.
install_refit() {
    local tools=$folder/wheel
    install_missing "${build_needs[@]}" || return
    if ! "$tools/bin/python" -c 'import scikit_build_core' 2>/dev/null; then
        "$interpreter" -m venv --clear "$tools" && "$tools/bin/pip" -q install 'scikit-build-core>=0.11' || return
    fi
    if command -v ccache >/dev/null; then
        local -x CMAKE_C_COMPILER_LAUNCHER=ccache
    fi
    "$tools/bin/pip" -q wheel --no-deps --no-build-isolation -w "$1" "$root/bindings/python" &&
        "$tools/bin/pip" -q install --no-deps --no-index --target "$1" "$1"/refit-*.whl
}

# pytest_of FILE ARGUMENT…: pytest in the environment; FILE gets its JUnit report.
pytest_of() {
    local report=$1
    shift
    (cd "$root" && FRAMEWORK_VERSION=$version PYTHONPATH=$scratch/refit PATH=$environment/bin:$PATH \
        "$python" -m pytest -q -rs -p no:cacheprovider --junitxml "$report" "$@")
}

# total WORD FILE…: the sum of an attribute of the reports.
total() {
    local word=$1
    shift
    cat "$@" | grep -oE "<testsuite [^>]*" | grep -oE " $word=\"[0-9]+\"" | grep -oE '[0-9]+' |
        awk '{ all += $1 } END { print all + 0 }'
}

# test_framework NAME-VERSION: makes what is missing and tests.
test_framework() {
    local started=$SECONDS report=$scratch/$1 ours=() theirs=() path tests_run=0 bad=0 skipped=0
    describe "$1"
    printf '\n== %s' "$1"
    if [ "$quick" = yes ]; then echo; else echo ": about ${minutes#* } minutes"; fi
    if ! { made || make_environment; }; then
        say "The environment $1 could not be made"
        bad=1
    else
        for path in $tests; do # each folder has a pytest.ini of its own
            case $path in
            frameworks/*) ours+=("tests/$path") ;;
            *) theirs+=("tests/$path") ;;
            esac
        done
        [ ${#ours[@]} -eq 0 ] || pytest_of "$report-1.xml" "${ours[@]}" "${arguments[@]}" || bad=1
        [ ${#theirs[@]} -eq 0 ] || pytest_of "$report-2.xml" "${theirs[@]}" "${arguments[@]}" || bad=1
        skipped=$(total skipped "$report"-*.xml)
        tests_run=$(($(total tests "$report"-*.xml) - skipped))
        path=$(($(total failures "$report"-*.xml) + $(total errors "$report"-*.xml)))
        [ "$path" -eq 0 ] || bad=$path
        tests_run=$((tests_run - path))
    fi
    passed=$((passed + tests_run))
    failed=$((failed + bad))
    summary+=("$(printf '%-24s %6d passed %4d failed %4d skipped %6d s' "$1" "$tests_run" "$bad" \
        "$skipped" $((SECONDS - started)))")
}

names=() chosen=() arguments=() listing=no quick=no
while [ $# -gt 0 ]; do
    case $1 in
    --list) listing=yes ;;
    --quick) quick=yes ;;
    --)
        shift
        arguments=("$@")
        break
        ;;
    -*) die "there is no option $1" ;;
    *) names+=("$1") ;;
    esac
    shift
done
[ "$quick" = no ] || arguments=(-m "not slow" "${arguments[@]}")
for each in "${names[@]}"; do
    mapfile -t found < <(known "$each")
    [ ${#found[@]} -gt 0 ] || die "there is no environment $each: --list shows them"
    chosen+=("${found[@]}")
done
if [ ${#chosen[@]} -eq 0 ]; then
    for path in "$here"/*/environment.sh; do
        mapfile -t -O ${#chosen[@]} chosen < <(environments "$(basename "$(dirname "$path")")")
    done
fi

if [ "$listing" = yes ]; then
    for each in "${chosen[@]}"; do list "$each"; done
    exit
fi

command -v "$interpreter" >/dev/null || die "there is no $interpreter: FRAMEWORKS_PYTHON names another one"
mkdir -p "$folder" || die "$folder cannot be made"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
install_refit "$scratch/refit" || die "refit's wheel could not be built"
for each in "${chosen[@]}"; do test_framework "$each"; done

printf '\n'
printf '%s\n' "${summary[@]}"
echo "frameworks: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
