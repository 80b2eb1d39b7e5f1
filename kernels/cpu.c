/*
 * The vector level, asked of the CPU once per call site that matters.
 *
 * __builtin_cpu_supports also checks that the operating system saves the wide registers. The only
 * state is the limit that tests set; it never raises the level above what the machine has. On
 * architectures but x86-64 and little-endian 64-bit ARM the level is the base one, and the scalar
 * twins do the work. F16C is not asked for: clang 14 does not
 * know its name, and every CPU with AVX2 and FMA has it.
 */
#include "kernels/cpu.h"

#include <stdatomic.h>

static atomic_int limit = RFT_CPU_AVX512;

static rft_cpu_level machine_level(void)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") ||
        !__builtin_cpu_supports("bmi2") || !__builtin_cpu_supports("popcnt") ||
        !__builtin_cpu_supports("fma")) {
        return RFT_CPU_BASE;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return RFT_CPU_AVX512;
    }
    return RFT_CPU_AVX2;
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return RFT_CPU_NEON;
#else
    return RFT_CPU_BASE;
#endif
}

rft_cpu_level rft_cpu_get_level(void)
{
    rft_cpu_level most = (rft_cpu_level)atomic_load_explicit(&limit, memory_order_relaxed);
    rft_cpu_level level = machine_level();
    return level < most ? level : most;
}

void rft_cpu_limit(rft_cpu_level most)
{
    atomic_store_explicit(&limit, (int)most, memory_order_relaxed);
}
