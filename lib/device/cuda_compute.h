/*
 * cuda_compute: arithmetic of kernels/ on a GPU in stream order: the digest and cast slots of
 * device.h.
 */
#ifndef RFT_CUDA_COMPUTE_H
#define RFT_CUDA_COMPUTE_H

#include "device/cuda_device.h"

refit_status rft_cuda_compute_open(rft_cuda_device *cuda, rft_cuda_compute **out,
                                   refit_error *error);
/* NULL is allowed; it enters the context by itself. Waits for digests that are still under way,
 * since their callers gave up, at most offload.timeout_ms; the memory of those that do not end
 * stays with the driver, and cuda->stuck says so. */
void rft_cuda_compute_close(rft_cuda_device *cuda, rft_cuda_compute *compute);

/* Inside a context guard. REFIT_ERR_UNSUPPORTED without kernels; REFIT_ERR_LIMIT: very many digests
 * are under way. A digest that failed, or was not done in time, writes nothing to *sum later. */
refit_status rft_cuda_digest(rft_cuda_device *cuda, refit_stream_ref stream, const void *memory,
                             uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error);
/* `to` may be NULL. */
refit_status rft_cuda_digest_copy(rft_cuda_device *cuda, refit_stream_ref stream, void *to,
                                  const void *from, uint64_t bytes, uint64_t offset, void *sum,
                                  refit_error *error);
refit_status rft_cuda_cast_bf16(rft_cuda_device *cuda, refit_stream_ref stream, uint16_t *to,
                                const float *from, uint64_t count, refit_error *error);

#endif
