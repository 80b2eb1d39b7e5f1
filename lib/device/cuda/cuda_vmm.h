/*
 * cuda_vmm: addresses of a GPU that stay while memory behind them comes and goes, in chunks of
 * offload.chunk_bytes.
 */
#ifndef RFT_CUDA_VMM_H
#define RFT_CUDA_VMM_H

#include "device/cuda/cuda_device.h"

/* Inside a context guard. `*out` stays NULL, and it is no failure, where the GPU or its driver has
 * no virtual memory management: reserve then answers REFIT_ERR_UNSUPPORTED. */
refit_status rft_cuda_ranges_open(rft_cuda_device *cuda, rft_cuda_ranges **out, refit_error *error);

/* NULL is allowed. Gives back the ranges that are left. Enters the context by itself. */
void rft_cuda_ranges_close(rft_cuda_device *cuda, rft_cuda_ranges *ranges);

/* What caps.chunk_bytes says: 0 for NULL. */
uint64_t rft_cuda_ranges_chunk(const rft_cuda_ranges *ranges);

/* Fills the slots that this file has. */
void rft_cuda_vmm_slots(rft_device_ops *ops);

#endif
