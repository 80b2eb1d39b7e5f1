#!/bin/bash
# refit bench host-step: a row for each way and each format, with its figures; the kernel has the
# bits of its scalar form, and the host step those of the kernel on plain arrays.
# shellcheck source=tests/cli/support.sh
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

run 0 bench host-step --json --rounds 2 --mib 8 --set offload.host_step_threads=3
[ "$(wc -l <"$scratch/out")" -eq 8 ] || complain "not eight rows"
for name in step_s_median step_s_p95 parameters_per_s share_of_limit; do
    rows 8 "$name\":[0-9.e+-]*[1-9]"
done
for name in "memory limit" kernel "host step" "host step with norm"; do
    rows 2 "way\":\"$name\""
done
rows 8 'threads":3'
rows 6 'bit_equal":true'
run 0 bench host-step --rounds 1 --mib 1
grep -qE '^  step_s_median  .*[1-9]' "$scratch/out" || complain "no seconds: $(cat "$scratch/out")"

refuses 2 "--tensors is for offload, remap, handover, window and tensors: bench host-step" \
    bench host-step --tensors small
refuses 1 "--roots: $scratch/none.so: cannot open" bench host-step --mib 1 --roots "$scratch/none.so"
refuses 1 "--roots: libc.so.6 has no MKL" bench host-step --mib 1 --roots libc.so.6
refuses 2 "--roots is for host-step: bench window does not take it" bench window --roots libc.so.6
refuses 1 "use_pinned_optimizer_offload: true" bench host-step --mib 1 --set use_pinned_optimizer_offload=false
refuses 1 "the device is full" bench host-step --mib 64 --device host:capacity=1MiB

# Roots of a library are called, each time with one thread of its own, and are what is used.
cat >"$scratch/roots.c" <<'END'
#include <stdatomic.h>
#include <stdio.h>
void vmsSqrt(int count, const float *from, float *to, long long mode);
int MKL_Set_Num_Threads_Local(int count);
static _Thread_local int threads;
static atomic_int right, wrong;
int MKL_Set_Num_Threads_Local(int count)
{
    const int before = threads;
    threads = count;
    return before;
}
void vmsSqrt(int count, const float *from, float *to, long long mode)
{
    atomic_fetch_add(threads == 1 && mode == 0x140102 ? &right : &wrong, 1);
    for (int i = 0; i < count; i++)
        to[i] = from[i] + 0.5f;
}
__attribute__((destructor)) static void tell(void)
{
    fprintf(stderr, "wrong calls: %d, right ones: %s\n", wrong, right > 0 ? "some" : "none");
}
END
if "${CC:-cc}" -shared -fPIC -o "$scratch/roots.so" "$scratch/roots.c"; then
    run 0 bench host-step --json --rounds 1 --mib 1 --roots "$scratch/roots.so"
    rows 6 "roots\":\"$scratch/roots.so\".*\"bit_equal\":true"
    grep -qx "wrong calls: 0, right ones: some" "$scratch/err" || complain "roots: $(cat "$scratch/err")"
fi
finish
