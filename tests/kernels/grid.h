/*
 * grid: the words of CUDA C that kernels/ uses, done on the CPU, so that the text of its kernels
 * can be compiled as C and run.
 *
 * The blocks of a launch run one after the other; the threads of a block are threads, so that
 * ThreadSanitizer sees a missing barrier. Include it before a kernel's file.
 */
#ifndef GRID_H
#define GRID_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct grid_index {
    unsigned x, y, z;
} grid_index;

extern _Thread_local grid_index threadIdx, blockIdx;
extern grid_index blockDim, gridDim;

typedef struct __attribute__((aligned(16))) uint4 {
    unsigned x, y, z, w;
} uint4;

typedef struct __attribute__((aligned(16))) ulonglong2 {
    unsigned long long x, y;
} ulonglong2;

/* Runs `kernel` as x * y blocks of `threads` (whole warps, at most 256) and returns when all are
 * done. */
void grid_launch(unsigned x, unsigned y, unsigned threads, void (*kernel)(void *user), void *user);

void grid_wait_block(void);

/* Every lane of the warp gives a value and gets that of lane `from`; if it is none, its own. */
uint64_t grid_exchange(uint64_t value, unsigned from);

#define RFT_GPU_KERNEL static
#define RFT_GPU_PART   static inline
#define RFT_GPU_ROLLED
#define __shared__    static
#define __ldcs(from)  (*(from))
#define __stcs(to, v) ((void)(*(to) = (v)))

#define __syncthreads() grid_wait_block()
#define __shfl_up_sync(mask, value, apart)                                                         \
    ((void)(mask), grid_exchange((value), threadIdx.x % 32 - (apart)))
#define __shfl_down_sync(mask, value, apart)                                                       \
    ((void)(mask), grid_exchange((value), threadIdx.x % 32 + (apart)))

static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> shift % 32);
}

static inline int __popc(unsigned bits)
{
    return __builtin_popcount(bits);
}

static inline int __ffs(int bits)
{
    return __builtin_ffs(bits);
}

static inline void atomicOr(unsigned *word, unsigned bits)
{
    (void)__atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
}

static inline void atomicMax(unsigned *word, unsigned value)
{
    unsigned seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
    }
}

static inline unsigned long long atomicAdd(unsigned long long *sum, unsigned long long part)
{
    return __atomic_fetch_add(sum, part, __ATOMIC_RELAXED);
}

#endif
