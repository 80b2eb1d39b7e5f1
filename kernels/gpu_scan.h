/* gpu_scan: sums over the threads of a block, which may be any number of whole warps. */
#ifndef RFT_KERNEL_GPU_SCAN_H
#define RFT_KERNEL_GPU_SCAN_H

#include "kernels/gpu.h"

/* The sum of what the threads before this one have; `total`: of all. `of_warps`: shared by the
 * block, RFT_GPU_THREADS / RFT_GPU_WARP of them. */
RFT_GPU_PART uint64_t gpu_scan(uint64_t *of_warps, uint64_t value, uint64_t *total)
{
    unsigned lane = threadIdx.x % RFT_GPU_WARP, warp = threadIdx.x / RFT_GPU_WARP;
    uint64_t sum = value, before = 0;
    for (unsigned apart = 1; apart < RFT_GPU_WARP; apart *= 2) {
        uint64_t below = __shfl_up_sync(0xFFFFFFFFu, sum, apart);
        if (lane >= apart) sum += below;
    }
    __syncthreads(); /* all have read what the scan before this one left */
    if (lane == RFT_GPU_WARP - 1) of_warps[warp] = sum;
    __syncthreads();
    *total = 0;
    RFT_GPU_ROLLED
    for (unsigned i = 0; i < blockDim.x / RFT_GPU_WARP; i++) {
        if (i < warp) before += of_warps[i];
        *total += of_warps[i];
    }
    return before + sum - value;
}

#endif
