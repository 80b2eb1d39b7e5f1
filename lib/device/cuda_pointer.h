/* cuda_pointer: what an address is, by what the driver says of it. */
#ifndef RFT_CUDA_POINTER_H
#define RFT_CUDA_POINTER_H

#include "device/cuda_device.h"

/* The slot memory_check of device.h, inside a context guard. */
refit_status rft_cuda_pointer_check(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                    const void **whole, refit_error *error);

#endif
