/*
 * cuda_kernels: the image of kernels/ (kernels/cuda_image.h), loaded into the driver, and a launch
 * for each kernel in it. All launches queue on a stream and return.
 *
 *     rft_pack_kernel(const rft_pack_entry *entries, uint32_t count)
 *     rft_cast_kernel(uint16_t *to, const float *from, uint64_t count)
 *     rft_digest_kernel(const void *data, uint64_t bytes, uint64_t offset, uint64_t *sum)
 *         adds to *sum, which the caller has zeroed
 *
 * All pointers are addresses that the device can reach.
 */
#ifndef RFT_CUDA_KERNELS_H
#define RFT_CUDA_KERNELS_H

#include "device/cuda_device.h"

/* REFIT_ERR_UNSUPPORTED: the driver takes no library, or no image in it fits this GPU and driver;
 * then copies go through the copy engines and digests through the host. */
refit_status rft_cuda_kernels_open(rft_cuda_device *cuda, rft_cuda_kernels **out,
                                   refit_error *error);
void rft_cuda_kernels_close(rft_cuda_device *cuda, rft_cuda_kernels *kernels);

/* `bytes`: of all entries together, from which the grid is chosen. */
refit_status rft_cuda_launch_pack(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr entries,
                                  uint32_t count, uint64_t bytes, refit_error *error);
refit_status rft_cuda_launch_cast(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                                  rft_cu_ptr from, uint64_t count, refit_error *error);
refit_status rft_cuda_launch_digest(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr data,
                                    uint64_t bytes, uint64_t offset, rft_cu_ptr sum,
                                    refit_error *error);

#endif
