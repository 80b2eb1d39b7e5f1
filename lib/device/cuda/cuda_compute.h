/*
 * cuda_compute: arithmetic of kernels/ on a GPU in stream order: the digest and cast slots of
 * device.h.
 */
#ifndef RFT_CUDA_COMPUTE_H
#define RFT_CUDA_COMPUTE_H

#include "device/cuda/cuda_device.h"

refit_status rft_cuda_compute_open(rft_cuda_device *cuda, rft_cuda_compute **out,
                                   refit_error *error);
/* NULL is allowed; it enters the context by itself. Waits for digests that are still under way,
 * since their callers gave up, at most offload.timeout_ms; the memory of those that do not end
 * stays with the driver, and cuda->stuck says so. */
void rft_cuda_compute_close(rft_cuda_device *cuda, rft_cuda_compute *compute);

/* Fills the slots that this file has. */
void rft_cuda_compute_slots(rft_device_ops *ops);

#endif
