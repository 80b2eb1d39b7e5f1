/* cuda_context: which GPU, what it can do, and its primary context. The context guard is declared
 * in cuda_device.h, since every file here uses it. */
#ifndef RFT_CUDA_CONTEXT_H
#define RFT_CUDA_CONTEXT_H

#include "device/cuda/cuda_device.h"

/* Fills ordinal, pid, handle, facts and context; the driver is open. REFIT_ERR_NOT_FOUND: no such
 * GPU; REFIT_ERR_BUSY: another process holds it in exclusive mode; REFIT_ERR_DEVICE. */
refit_status rft_cuda_context_open(rft_cuda_device *cuda, int ordinal, refit_error *error);
/* Where cuda->stuck says so the context stays, for the work that is still in it. */
void rft_cuda_context_close(rft_cuda_device *cuda);

#endif
