/*
 * cuda_reserve: addresses of a GPU that stay while memory behind them comes and goes, in chunks of
 * offload.chunk_bytes (cuda_chunk.h).
 */
#ifndef RFT_CUDA_RESERVE_H
#define RFT_CUDA_RESERVE_H

#include "device/cuda_device.h"

/* Inside a context guard. `*out` stays NULL, and it is no failure, where the GPU or its driver has
 * no virtual memory management: reserve then answers REFIT_ERR_UNSUPPORTED. */
refit_status rft_cuda_ranges_open(rft_cuda_device *cuda, rft_cuda_ranges **out, refit_error *error);

/* NULL is allowed. Gives back the ranges that are left. Enters the context by itself. */
void rft_cuda_ranges_close(rft_cuda_device *cuda, rft_cuda_ranges *ranges);

/* What caps.chunk_bytes says: 0 for NULL. */
uint64_t rft_cuda_ranges_chunk(const rft_cuda_ranges *ranges);

/* The slots of device.h. The first three are called inside a context guard, unreserve enters the
 * context by itself: our side is freed whatever has happened to the GPU. */
refit_status rft_cuda_reserve(rft_cuda_device *cuda, uint64_t bytes, void **out, uint64_t *granule,
                              refit_error *error);
refit_status rft_cuda_commit(rft_cuda_device *cuda, void *base, uint64_t bytes, refit_error *error);
refit_status rft_cuda_decommit(rft_cuda_device *cuda, void *base, uint64_t bytes, uint64_t *freed,
                               refit_error *error);
void rft_cuda_unreserve(rft_cuda_device *cuda, void *base);

#endif
