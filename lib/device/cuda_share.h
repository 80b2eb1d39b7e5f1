/*
 * cuda_share: device memory shown to other processes on the same GPU, by CUDA's inter-process
 * handles: those of memory that cuMemAlloc gave. A handle stands for a whole allocation; where in
 * it the memory lies travels beside it.
 *
 * The importer opens a handle once, however often it is asked for, and closes it when the last user
 * has let go. The process that made a handle cannot open it: it is known by the allocation that the
 * share names, whose handle is the same, and that memory is given as it is. Export and map are
 * called inside a context guard.
 */
#ifndef RFT_CUDA_SHARE_H
#define RFT_CUDA_SHARE_H

#include "device/cuda_device.h"

refit_status rft_cuda_shares_open(rft_cuda_device *cuda, rft_cuda_shares **out, refit_error *error);
/* Closes what is still mapped. NULL is allowed. */
void rft_cuda_shares_close(rft_cuda_device *cuda, rft_cuda_shares *shares);

/* Whether the driver has what sharing needs: caps.shares. */
bool rft_cuda_can_share(const rft_cuda_device *cuda);

/* REFIT_ERR_UNSUPPORTED: memory of another kind than cuMemAlloc's (expandable_segments, a
 * cudaMallocAsync pool, a stable arena), or a driver that shares none. REFIT_ERR_INVALID: not
 * memory of this device, or not all of it in one allocation. */
refit_status rft_cuda_share_export(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                   rft_share *out, refit_error *error);

/* `share` may come from anybody. REFIT_ERR_INVALID: it is of another GPU, or names more bytes than
 * its allocation has; REFIT_ERR_UNSUPPORTED; and what the driver says of the handle. */
refit_status rft_cuda_share_map(rft_cuda_device *cuda, const rft_share *share, void **out,
                                refit_error *error);
void rft_cuda_share_unmap(rft_cuda_device *cuda, void *memory);

#endif
