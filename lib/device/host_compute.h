/* host_compute: the arithmetic of kernels/ on the host device's memory, on the calling thread. */
#ifndef RFT_HOST_COMPUTE_H
#define RFT_HOST_COMPUTE_H

#include "device/host_memory.h"

/* As the slots of device.h. REFIT_ERR_COPY, and nothing is written, if the memory is of an arena
 * and not committed. */
refit_status rft_host_digest_now(rft_host_memory *memory, const void *from, uint64_t bytes,
                                 uint64_t offset, uint64_t *sum, refit_error *error);
/* Adds to *sum; `to` may be NULL. */
refit_status rft_host_digest_copy_now(rft_host_memory *memory, void *to, const void *from,
                                      uint64_t bytes, uint64_t offset, uint64_t *sum,
                                      refit_error *error);
refit_status rft_host_cast_now(rft_host_memory *memory, uint16_t *to, const float *from,
                               uint64_t count, refit_error *error);

#endif
