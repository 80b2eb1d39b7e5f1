/* device_memory: memory of a device, which a device that does not take it back at once is asked
 * about again when it is closed. */
#ifndef RFT_DEVICE_MEMORY_H
#define RFT_DEVICE_MEMORY_H

#include "device/device.h"

typedef struct rft_device_memory {
    rft_deferred_free left; /* first, so that it is the address of all */
    unsigned char *memory;
    uint64_t bytes;
} rft_device_memory;

/* REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_HOST_MEMORY. */
refit_status rft_device_memory_open(refit_device *device, uint64_t bytes, rft_device_memory **out,
                                    refit_error *error);
/* With nothing under way that uses it. NULL is allowed. */
void rft_device_memory_close(rft_device_memory *memory, refit_device *device);

#endif
