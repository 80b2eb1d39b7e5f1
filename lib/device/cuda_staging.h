/*
 * cuda_staging: the bounce buffers of a device, whose turn it is on each, and from which size on a
 * copy is left to the copy engines.
 */
#ifndef RFT_CUDA_STAGING_H
#define RFT_CUDA_STAGING_H

#include "device/cuda_bounce.h"

typedef struct rft_cuda_staging rft_cuda_staging;

/* Takes nothing of the device. Close takes NULL and enters the context by itself; nobody uses a
 * bounce buffer any more.
 */
refit_status rft_cuda_staging_open(rft_cuda_device *cuda, rft_cuda_staging **out,
                                   refit_error *error);
void rft_cuda_staging_close(rft_cuda_device *cuda, rft_cuda_staging *staging);

/* Copies of so many bytes or more are never small. 0: none is, there are no kernels. Any thread. */
uint64_t rft_cuda_staging_bound(const rft_cuda_device *cuda);

/* A bounce buffer for this thread and stream until it is given back, and in `*small` the size below
 * which copies are for it. NULL: the copy engines do all the work this time, because the device has
 * no memory left (tried again later), or because all bounce buffers are at work for other streams.
 * The first call finds out the size (cuda_cutoff.h), unless offload.small_bytes says it, and takes
 * some milliseconds for that. Inside a context guard. */
rft_cuda_bounce *rft_cuda_staging_take(rft_cuda_device *cuda, rft_cuda_staging *staging,
                                       rft_cu_stream stream, uint64_t *small);
void rft_cuda_staging_give(rft_cuda_staging *staging, rft_cuda_bounce *bounce);

/* The size, once it is known; 0 before. Any thread. */
uint64_t rft_cuda_staging_small_bytes(rft_cuda_staging *staging);

#endif
