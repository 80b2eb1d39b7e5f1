/*
 * cuda_cutoff: from which size on the copy engines are as fast by themselves as with copies
 * gathered for them, on this GPU and driver. Published figures differ by a factor of eight.
 */
#ifndef RFT_CUDA_CUTOFF_H
#define RFT_CUDA_CUTOFF_H

#include "device/cuda_bounce.h"

/* Sizes that are tried: 4, 8, … 128 KiB. */
#define RFT_CUDA_CUTOFF_SIZES 6u
#define RFT_CUDA_CUTOFF_LEAST (UINT64_C(4) << 10)
#define RFT_CUDA_CUTOFF_MOST  (RFT_CUDA_CUTOFF_LEAST << (RFT_CUDA_CUTOFF_SIZES - 1))

/* Milliseconds for the same bytes, out and back, in copies of each size. */
typedef struct rft_cuda_cutoff_times {
    float engines[RFT_CUDA_CUTOFF_SIZES];
    float gathered[RFT_CUDA_CUTOFF_SIZES];
    uint32_t count; /* of sizes that were measured, from the smallest on */
} rft_cuda_cutoff_times;

/* Have the engines won twice in a row? Then larger sizes need not be measured. */
bool rft_cuda_cutoff_is_clear(const rft_cuda_cutoff_times *times);

/* The size from which on the engines win, a single lucky one aside; the largest if they never do;
 * 0: they win throughout, which only a GPU that is busy lets them. */
uint64_t rft_cuda_cutoff_choose(const rft_cuda_cutoff_times *times);

/* Measures on a bounce buffer that nobody uses, by the GPU's own clock. Takes some milliseconds,
 * and no more than 50: REFIT_ERR_TIMEOUT, and some of it may still be under way. REFIT_ERR_BUSY:
 * see above. Inside a context guard. */
refit_status rft_cuda_cutoff_find(rft_cuda_device *cuda, rft_cuda_bounce *bounce, uint64_t *bytes,
                                  refit_error *error);

#endif
