#!/bin/bash
# Everything from a bare machine to tested: installs what is missing (said first), configures, builds
# to build/, and runs all tests, those of the Python package in .venv. Ends with one count for each.
#
#   tests/run.sh                          all
#   tests/run.sh --quick                  without what is slow, or runs again on the fake CUDA driver
#   tests/run.sh -LE slow -R offload      C only, with arguments for ctest
#   tests/run.sh --c [ARGUMENT…]          C only
#   tests/run.sh --python [ARGUMENT…]     Python only, with arguments for pytest: -k config -m 'not slow'
set -uo pipefail
# shellcheck source=.ci/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/setup.sh"

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# pytest's options to run as many tests at a time as there are processors.
in_parallel=(-n "$(nproc)" --dist worksteal)

# count WORD: the number before it in the last line of the log that has one.
count() {
    grep -oE "[0-9]+ ($1)" "$log" | tail -1 | grep -oE '^[0-9]+' || echo 0
}

# closing NAME PASSED FAILED SKIPPED: the one line that says how it was.
closing() {
    printf '%s: %d passed, %d failed' "$1" "$2" "$3"
    [ "$4" -eq 0 ] || printf ', %d skipped' "$4"
    echo
}

c_tests() {
    local status failed skipped
    install_missing "${build_needs[@]}" || return
    configure -DREFIT_BUILD_TESTS=ON || return
    cmake --build "$build" || return
    (cd "$build" && ctest --output-on-failure -j "$(nproc)" "$@") | tee "$log"
    status=$?
    failed=$(count 'tests failed')
    skipped=$(grep -c '\*\*\*Skipped' "$log")
    c_line=$(closing C $(($(sed -n 's/.* tests failed out of //p' "$log" | tail -1) - failed - skipped)) \
        "$failed" "$skipped")
    return "$status"
}

python_tests() {
    local status argument where=(tests/python)
    python_ready test,lint || return
    for argument in "$@"; do
        [[ $argument != tests/* ]] || where=()
    done
    (cd "$root" && OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q -rs --durations=10 \
        "${where[@]}" "$@") | tee "$log"
    status=$?
    tail -1 "$log" >"$log.last" && mv "$log.last" "$log"
    python_line=$(closing Python "$(count passed)" $(($(count failed) + $(count 'errors?'))) "$(count skipped)")
    return "$status"
}

c_line='' python_line='' failures=0
case ${1:-} in
--c) shift && { c_tests "$@" || failures=1; } ;;
--python) shift && { python_tests "$@" || failures=1; } ;;
--quick)
    c_tests -LE 'slow|again' || failures=1
    python_tests "${in_parallel[@]}" -m 'not slow' || failures=1
    ;;
?*) c_tests "$@" || failures=1 ;;
*)
    c_tests || failures=1
    python_tests "${in_parallel[@]}" || failures=1
    ;;
esac
echo
[ -z "$c_line" ] || echo "$c_line"
[ -z "$python_line" ] || echo "$python_line"
exit "$failures"
