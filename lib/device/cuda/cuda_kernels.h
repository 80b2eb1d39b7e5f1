/*
 * cuda_kernels: the image of kernels/ (kernels/cuda_image.h), loaded into the driver, and a launch
 * for each kernel in it. All launches queue on a stream and return.
 *
 *     rft_pack_kernel(const rft_pack_entry *entries, uint32_t count)
 *     rft_cast_kernel(uint16_t *to, const float *from, uint64_t count)
 *     rft_digest_kernel(const void *data, uint64_t bytes, uint64_t offset, uint64_t *sum)
 *         adds to *sum, which the caller has zeroed
 *     rft_digest_list_kernel(rft_digest_job *jobs, uint32_t count)
 *     rft_master_split_kernel(const void *master, const void *weights, void *coded,
 *                             uint64_t elements, uint32_t room)
 *     rft_master_list_kernel(…, rft_master_result *result)
 *     rft_master_join_kernel(void *master, const void *weights, const void *coded,
 *                            uint64_t elements, uint32_t room, rft_master_result *result,
 *                            uint32_t compares)
 *     rft_delta_exchange_kernel(rft_delta_job *jobs, uint32_t count, unsigned char *memory,
 *                               uint64_t room, uint64_t *used)
 *     rft_delta_apply_kernel(rft_delta_job *jobs, uint32_t count)
 *
 * All pointers are addresses that the device can reach, at any alignment but for the entries, the
 * jobs, the sum and what a digest is copied to (8 bytes), and those of masters (kernels/master.h).
 */
#ifndef RFT_CUDA_KERNELS_H
#define RFT_CUDA_KERNELS_H

#include "device/cuda/cuda_device.h"

/* Loads the image onto the GPU. Where that cannot be (the driver takes no libraries, or refuses
 * both images) *out is NULL, cuda->kernels_missing says why, it is logged, and REFIT_OK is
 * returned: copies then go through the copy engines and digests through the host. REFIT_ERR_DEVICE:
 * the GPU is lost; REFIT_ERR_HOST_MEMORY. Inside a context guard. */
refit_status rft_cuda_kernels_open(rft_cuda_device *cuda, rft_cuda_kernels **out,
                                   refit_error *error);
/* NULL is allowed; it enters the context by itself. No launch may be under way, unless cuda->stuck
 * says so: then the image stays with the driver. */
void rft_cuda_kernels_close(rft_cuda_device *cuda, rft_cuda_kernels *kernels);

/* The launches answer REFIT_ERR_UNSUPPORTED, with the sentence of kernels_missing, where there are
 * no kernels. All inside a context guard, on a stream that takes work. */

/* Entries that are much longer than most are better cut: at most four blocks share the work of one,
 * unless there are few. `bytes`: of all entries together, from which the grid is chosen. */
refit_status rft_cuda_launch_pack(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr entries,
                                  uint32_t count, uint64_t bytes, refit_error *error);
refit_status rft_cuda_launch_cast(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                                  rft_cu_ptr from, uint64_t count, refit_error *error);
refit_status rft_cuda_launch_digest(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr data,
                                    uint64_t bytes, uint64_t offset, rft_cu_ptr sum,
                                    refit_error *error);
/* kernels/digest_job.h. */
refit_status rft_cuda_launch_digest_list(rft_cuda_device *cuda, rft_cu_stream stream,
                                         rft_cu_ptr jobs, uint32_t count, refit_error *error);

/* kernels/master.h: encoding is two launches. */
refit_status rft_cuda_launch_master_encode(rft_cuda_device *cuda, rft_cu_stream stream,
                                           const rft_master_job *job, refit_error *error);
refit_status rft_cuda_launch_master_decode(rft_cuda_device *cuda, rft_cu_stream stream,
                                           const rft_master_job *job, refit_error *error);

/* kernels/delta_job.h. */
refit_status rft_cuda_launch_delta_exchange(rft_cuda_device *cuda, rft_cu_stream stream,
                                            rft_cu_ptr jobs, uint32_t count, rft_cu_ptr memory,
                                            uint64_t room, rft_cu_ptr used, refit_error *error);
refit_status rft_cuda_launch_delta_apply(rft_cuda_device *cuda, rft_cu_stream stream,
                                         rft_cu_ptr jobs, uint32_t count, refit_error *error);

/* ---- Digests, casts and masters: their slots of device.h ------------------------------------- */

refit_status rft_cuda_compute_open(rft_cuda_device *cuda, rft_cuda_compute **out,
                                   refit_error *error);
/* NULL is allowed; it enters the context by itself. Waits for digests that are still under way,
 * since their callers gave up, at most offload.timeout_ms; the memory of those that do not end
 * stays with the driver, and cuda->stuck says so. */
void rft_cuda_compute_close(rft_cuda_device *cuda, rft_cuda_compute *compute);

/* Fills the slots that this file has. */
void rft_cuda_compute_slots(rft_device_ops *ops);

#endif
