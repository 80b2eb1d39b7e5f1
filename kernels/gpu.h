/*
 * gpu: what the GPU's kernels and those who launch them agree on, and the few words with which
 * device code is written.
 *
 * The kernels use one-dimensional blocks of whole warps; any number of blocks gives the same
 * result. Their files are C as well as CUDA: tests/kernels/ runs the same text on the CPU.
 */
#ifndef RFT_KERNEL_GPU_H
#define RFT_KERNEL_GPU_H

#include <stdint.h>

#define RFT_GPU_THREADS 256u /* of a block, at most */
#define RFT_GPU_WARP    32u
#define RFT_GPU_BLOCKS  4u /* of one multiprocessor, at least */

/* What one warp copies in one go; longer entries of a pack are cut into so many bytes. */
#define RFT_GPU_CHUNK 8192u

/* What one block casts in one go: for a smaller share a block is not worth its start. */
#define RFT_GPU_SHARE 16384u

#ifdef __CUDACC__
#define RFT_GPU_KERNEL extern "C" __global__ __launch_bounds__(RFT_GPU_THREADS, RFT_GPU_BLOCKS)
#define RFT_GPU_PART   static __device__ __forceinline__

/* Before a loop that is long enough as it is. */
#define RFT_GPU_ROLLED _Pragma("unroll 1")
#endif

#endif
