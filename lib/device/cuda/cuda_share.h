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

#include "device/cuda/cuda_device.h"

refit_status rft_cuda_shares_open(rft_cuda_device *cuda, rft_cuda_shares **out, refit_error *error);
/* Closes what is still mapped. NULL is allowed. */
void rft_cuda_shares_close(rft_cuda_device *cuda, rft_cuda_shares *shares);

/* Whether the driver has what sharing needs: caps.shares. */
bool rft_cuda_can_share(const rft_cuda_device *cuda);

/* Fills the slots that this file has. */
void rft_cuda_share_slots(rft_device_ops *ops);

#endif
