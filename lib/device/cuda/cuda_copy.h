/* cuda_copy: batches of copies on a GPU: the large ones by the copy engines, the small ones
 * gathered for them by a kernel. */
#ifndef RFT_CUDA_COPY_H
#define RFT_CUDA_COPY_H

#include "device/cuda/cuda_device.h"

/* Of one batch: it goes to the driver in calls of its own size. Large ones keep the kernel that
 * gathers small copies ahead of the copy engines. */
#define RFT_CUDA_BATCH_MOST 65536u

/* NULL is allowed for close; it enters the context by itself. */
refit_status rft_cuda_copier_open(rft_cuda_device *cuda, rft_cuda_copier **out, refit_error *error);
void rft_cuda_copier_close(rft_cuda_device *cuda, rft_cuda_copier *copier);

/* Below so many bytes copies are small; 0: not known yet, or nothing is. Any thread. */
uint64_t rft_cuda_copier_small_bytes(const rft_cuda_device *cuda);

/* Fills the slots that this file has. */
void rft_cuda_copy_slots(rft_device_ops *ops);

#endif
