#!/bin/bash
# run.sh OUT_DIR: everything that wants a GPU, on a machine that has one, a CUDA driver, a compiler
# and no network: builds, tests on the real driver, measures. Leaves in OUT_DIR results.json (every
# test and every figure), results.md (the same for people) and run.log. Nothing is written elsewhere
# but a build folder under /tmp.
#
#   REFIT_DEPS         libraries packed by pack-deps.sh (default: tests/gpu/deps, if it is there)
#   REFIT_GPU_SECONDS  how long it may take in all (530)
#   REFIT_BUILD        the build folder (a new one under /tmp)
#   REFIT_COMMIT       what was built, where git cannot tell
#
# The order: the build, then the tests, since figures of a device that is wrong are worth nothing, the
# short ones first; then the benchmarks, the longest one last; at the end the sanitizer, which can be
# asked again.
# Each step has a limit, is cut to the time that is left, and does not stop the others by failing.
#
# --rehearse FOLDER  on the fake driver, whose libcuda.so.1 lies in FOLDER: small sizes, and results
#                    that say that no figure in them means anything
# --built            REFIT_BUILD is built already, by tests/run.sh: a short rehearsal
#
# Ends with 0: all that ran passed; 1: something failed; 2: it could not begin.
set -uo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
started=$SECONDS
budget=${REFIT_GPU_SECONDS:-530}
build=${REFIT_BUILD:-}
deps=${REFIT_DEPS:-$here/deps}
commit=${REFIT_COMMIT:-}
seed=${TEST_SEED:-$RANDOM$RANDOM} # other random data in every run; the log says which
[ -z "${REFIT_DEPS:-}" ] || [ -f "$deps/env.sh" ] || missing_deps=$deps
unset REFIT_GPU_SECONDS REFIT_BUILD REFIT_DEPS REFIT_COMMIT # no options of refit's
out='' fake='' built=no
failures=0

die() {
    printf 'tests/gpu/run.sh: %s\n' "$*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --rehearse)
        fake=$(realpath -e "${2:-}") || die "--rehearse needs the folder of the fake libcuda.so.1"
        shift
        ;;
    --built) built=yes ;;
    -*) die "there is no option $1" ;;
    *) out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || die "usage: tests/gpu/run.sh OUT_DIR"
out=$(realpath -m "$out")
[ -z "$fake" ] || [[ $out/ != "$here"/results/* ]] || die "a rehearsal is not a result: choose another OUT_DIR"
build=${build:-$(mktemp -d /tmp/refit-gpu-build.XXXXXX)}
rm -rf "$out/rows"
mkdir -p "$out/rows" || die "$out cannot be made"
rm -f "$out"/results.json "$out"/results.md "$out"/run.log
: >"$out/rows/steps" && : >"$out/rows/tests" && : >"$out/rows/benches" && : >"$out/run.log"

[ -z "${missing_deps:-}" ] || die "$missing_deps was not made by pack-deps.sh: it has no env.sh"
if [ -f "$deps/env.sh" ]; then
    # shellcheck source=/dev/null
    . "$deps/env.sh"
fi
if [ -n "$fake" ]; then
    [ -e "$fake/libcuda.so.1" ] || die "there is no libcuda.so.1 in $fake"
    export LD_LIBRARY_PATH=$fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export FAKE_CUDA_MEMORY=17179869184
fi

left() {
    echo $((budget - (SECONDS - started)))
}

# text VALUE: as a JSON string.
text() {
    local value=${1//\\/\\\\}
    value=${value//\"/\\\"}
    printf '"%s"' "${value//[[:cntrl:]]/ }"
}

# note NAME STATUS SECONDS [WORDS]: one step is over.
note() {
    [ "$2" != fail ] || failures=$((failures + 1))
    printf '{"step":%s,"status":"%s","seconds":%s,"note":%s}\n' \
        "$(text "$1")" "$2" "$3" "$(text "${4:-}")" >>"$out/rows/steps"
    printf '%-28s %-5s %7s s  %s\n' "$1" "$2" "$3" "${4:-}"
}

# step NAME LIMIT COMMAND…: runs it for at most LIMIT seconds. What it prints goes to the log, and
# stamped to rows/last. Its status is in $status; false, if it did not end well.
step() {
    local name=$1 limit=$2 begun=$EPOCHREALTIME word=pass why='' seconds
    shift 2
    status=-1
    [ "$limit" -le "$(left)" ] || limit=$(left)
    if [ "$limit" -lt 3 ]; then
        note "$name" skip 0 "no time was left"
        return 1
    fi
    printf '\n===== %s, at most %d s: %s\n' "$name" "$limit" "$*" >>"$out/run.log"
    timeout -k 5 "$limit" "$@" </dev/null 2>&1 |
        timeout $((limit + 10)) bash "$here/stamp.sh" >"$out/rows/last"
    status=${PIPESTATUS[0]}
    seconds=$(awk -v a="$begun" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')
    cat "$out/rows/last" >>"$out/run.log"
    case $status in
    0) ;;
    77) word=skip why="nothing to run on here" ;;
    124 | 137) word=fail why="did not end within $limit s" ;;
    *) word=fail why="status $status" ;;
    esac
    [ -z "${excuse:-}" ] || ! why=$("$excuse" "$why") || word=skip
    note "$name" "$word" "$seconds" "$why"
    [ "$word" = pass ]
}

# suite NAME LIMIT: a cmocka program of the build.
suite() {
    if [ ! -x "$build/bin/test_$1" ]; then
        note "$1" skip 0 "was not built"
        return
    fi
    step "$1" "$2" "${as_test[@]}" "$build/bin/test_$1"
    [ "$status" -lt 0 ] ||
        awk -v suite="$1" -v status="$status" -f "$here/tests.awk" "$out/rows/last" >>"$out/rows/tests"
}

# torch_step NAME LIMIT COMMAND…: a step that PyTorch plays on the GPU.
torch_step() {
    if [ $torch = yes ]; then
        step "$@"
    else
        note "$1" skip 0 "no PyTorch that sees a GPU"
    fi
}

# python_suite LIMIT: tests/python from the sources, those of tensors on the GPU, in some processes
# where pytest-xdist is there.
python_suite() {
    local processes=()
    local there='import hypothesis, numpy, pytest, torch; assert torch.cuda.is_available()'
    if [ -n "$fake" ] || ! timeout 60 python3 -c "$there" 2>/dev/null; then
        note python skip 0 "no PyTorch that sees a GPU, with pytest and hypothesis"
        return
    fi
    timeout 60 python3 -c 'import xdist' 2>/dev/null && processes=(-n "$(nproc)")
    step python "$1" "${as_package[@]}" REFIT_TEST_CUDA=real "TEST_SEED=$seed" OMP_NUM_THREADS=1 \
        python3 -m pytest "${processes[@]}" -v -rs --tb=short -m "not slow" -p no:cacheprovider \
        "$root/tests/python"
    [ "$status" -lt 0 ] ||
        awk -v on=$device -v status="$status" -f "$here/pytest.awk" "$out/rows/last" >>"$out/rows/tests"
}

# refusal WHY: the compute-sanitizer in rows/last has not run the test, since it does not work on this
# machine: says so. Else false, and WHY again. (Some of its releases end with 0 all the same.)
refusal() {
    local last=$out/rows/last
    if grep -Eqi 'invalid __|out of bounds|misaligned|hazard|race reported' "$last"; then
        printf '%s' "$1"
        return 1
    fi
    if grep -q '\[==========\].*Running' "$last" &&
        ! grep -Eqi 'device not supported|internal sanitizer error|not permitted|permission' "$last"; then
        printf '%s' "$1"
        return 1
    fi
    printf 'it refuses this machine: %s' "$(grep -Ei '========= .*(error|support|permi)' "$last" | head -1 | sed 's/^[0-9.]* //' | cut -c1-200)"
}

# bench NAME LIMIT COMMAND…: what it prints as JSON is kept, also if it does not end well.
bench() {
    step "$@"
    [ "$status" -lt 0 ] || sed -n 's/^[0-9.]* \({"bench":.*}\)$/\1/p' "$out/rows/last" >>"$out/rows/benches"
}

# What the machine is, as the members of a JSON object.
facts() {
    local gpu driver
    gpu=$(timeout 20 nvidia-smi --query-gpu=name,memory.total,pcie.link.gen.max,pcie.link.width.max \
        --format=csv,noheader -i 0 2>/dev/null)
    driver=$(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0 2>/dev/null)
    if [ -z "$commit" ] && commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        [ -z "$(git -C "$root" status --porcelain 2>/dev/null)" ] || commit+=" and changes"
    fi
    [ -z "$fake" ] || gpu="fake driver, no figure means anything" driver=none
    printf '"date":%s,"commit":%s,' "$(text "$(date -u +%Y-%m-%dT%H:%MZ)")" \
        "$(text "${commit:-unknown}")"
    printf '"gpu":%s,"driver":%s,' "$(text "${gpu:-unknown}")" "$(text "${driver:-unknown}")"
    printf '"cuda":%s,' "$(text "$(nvcc --version 2>/dev/null | sed -n 's/.*release \([^,]*\),.*/\1/p')")"
    printf '"cpu":%s,' "$(text "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)")"
    printf '"cores":%s,"memory_gib":%s,' "$(nproc)" "$(awk '/^MemTotal/ { print int($2 / 1048576) }' /proc/meminfo)"
    printf '"kernel":%s,"memlock":%s,"rehearsal":%s' "$(text "$(uname -sr)")" "$(text "$(ulimit -l)")" \
        "$([ -n "$fake" ] && echo true || echo false)"
}

# ---- what is run

device=cuda:0
sizes=() whole=(--mib 8192) few=(--rounds 5) many=(--rounds 9)
if [ -n "$fake" ]; then
    sizes=(--mib 4 --tensors "$out/rows/few")
    whole=("${sizes[@]}") few=(--rounds 1) many=(--rounds 2)
fi
as_test=(env "REFIT_TEST_CUDA=$([ -n "$fake" ] && echo fake || echo real)" "TEST_SEED=$seed")
as_package=(env "REFIT_LIBRARY=$build/lib/librefit.so" "PYTHONPATH=$root/bindings/python/src"
    PYTHONDONTWRITEBYTECODE=1) # the Python package from its sources
echo "refit on a GPU: at most $budget s; results in $out"
if [ "$built" = no ]; then
    generator=()
    command -v ninja >/dev/null && generator=(-G Ninja)
    step configure 60 cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_C_FLAGS=-g -DREFIT_BUILD_EXAMPLES=OFF || die "see $out/run.log"
fi
mapfile -t conformance < <(grep -E '^(device_|gpu_)' "$build/tests/on_cuda")
mapfile -t suites < <(grep -vE '^(device_|gpu_)' "$build/tests/on_cuda")
[ ${#conformance[@]} -gt 4 ] || die "$build/tests/on_cuda does not say which tests there are"
if [ "$built" = no ]; then
    programs=("${conformance[@]}" "${suites[@]}" workers_lost)
    step build 180 cmake --build "$build" --parallel "$(nproc)" --target refit refit_shared \
        "${programs[@]/#/test_}" || die "see $out/run.log"
else
    suites=(cycle mover) # the others are tests of their own
fi
refit=$build/bin/refit

for name in "${conformance[@]}" "${suites[@]}"; do
    suite "$name" 30
done
torch=no
! timeout 60 python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || torch=yes
torch_step "torch lending" 150 "${as_package[@]}" python3 "$here/lending.py" --device $device
torch_step "gpu_cycle" 60 "${as_package[@]}" python3 "$root/examples/gpu_cycle.py" --cycles 4
torch_step "torch activations" 60 "${as_package[@]}" python3 "$here/activations.py" --device $device
pool=(env -u PYTORCH_ALLOC_CONF -u PYTORCH_CUDA_ALLOC_CONF "${as_package[@]:1}")
torch_step "torch pool" 60 "${pool[@]}" python3 "$here/torch_pool.py"
torch_step "torch pool, expandable" 60 "${pool[@]}" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    python3 "$here/torch_pool.py"
python_suite 190
[ "$built" = yes ] || suite workers_lost 75 # whose scenes wait for hearts that beat no more

[ -z "$fake" ] || "$refit" bench tensors --mib 4 | head -50 >"$out/rows/few"
if [ $torch = yes ]; then
    bench "bench offload, torch" 80 "${as_package[@]}" python3 -m refit.bench offload --json - \
        --lines --device $device --rounds 5 --parameters 0.25e9
    bench "torch window" 80 "${as_package[@]}" python3 "$here/host_steps.py" --device $device
    bench "bench weights" 80 "${as_package[@]}" python3 -m refit.bench weights --json - --lines \
        --device $device --rounds 7
    bench "bench activations" 80 "${as_package[@]}" python3 -m refit.bench activations --json - \
        --lines --rounds 2 --lengths 1024,4096
else
    note "bench offload, torch" skip 0 "no PyTorch that sees a GPU"
    note "torch window" skip 0 "no PyTorch that sees a GPU"
fi

bench "bench remap" 40 "$refit" bench remap --json --device $device "${sizes[@]}" "${many[@]}"
bench "bench pin" 60 "$refit" bench pin --json --device $device "${sizes[@]:0:2}" "${few[@]}"
bench "bench handover" 60 "$refit" bench handover --json --device $device "${sizes[@]}" "${few[@]}"
bench "bench offload" 150 "$refit" bench offload --json --device $device "${whole[@]}" "${few[@]}"
bench "bench offload, small" 60 "$refit" bench offload --json --device $device "${sizes[@]}" \
    --tensors small "${few[@]}"

sanitizer=compute-sanitizer
[ -z "$fake" ] || sanitizer=$here/refusing-sanitizer.sh # where it would find no driver of NVIDIA's
if command -v "$sanitizer" >/dev/null; then
    for tool in memcheck racecheck; do
        excuse=refusal step "compute-sanitizer $tool" 60 "${as_test[@]}" "$sanitizer" --tool $tool \
            --error-exitcode 9 "$build/bin/test_gpu_kernels"
    done
else
    note compute-sanitizer skip 0 "not there"
fi

# ---- the results

# rows NAME: the lines of a JSON list.
rows() {
    sed '$!s/$/,/' "$out/rows/$1"
}
{
    printf '{"machine":\n{%s},\n' "$(facts)"
    printf '"steps":[\n%s\n],\n' "$(rows steps)"
    printf '"tests":[\n%s\n],\n' "$(rows tests)"
    printf '"benches":[\n%s\n]}\n' "$(rows benches)"
} >"$out/results.json"
if command -v python3 >/dev/null && ! python3 -m json.tool "$out/results.json" >/dev/null; then
    note results.json fail 0 "is not JSON"
fi
awk -f "$here/report.awk" "$out/results.json" >"$out/results.md"
rm -rf "$out/rows"
echo "$((SECONDS - started)) s, $failures failed; see $out/results.md"
[ "$failures" -eq 0 ]
