/*
 * gpu_verify: whether the bytes of an image in a GPU's memory are the version that SEAL describes
 * (broadcast.verify: always), part by part, digested by the device.
 *
 * A call waits a few milliseconds at most: what is not done by then is asked for in the next one.
 */
#ifndef RFT_GPU_VERIFY_H
#define RFT_GPU_VERIFY_H

#include "broadcast/carrier.h"
#include "broadcast/staging.h"

/* {0} is not open. */
typedef struct rft_gpu_verify {
    rft_carrier *carrier;
    uint64_t *sums;   /* per tensor */
    rft_image *image; /* NULL: nothing is being verified */
    uint32_t tensor;  /* reached */
    uint64_t offset;  /* in it */
    uint64_t asked;   /* bytes whose digest is under way */
    bool done;        /* all of the image is what the publisher wrote */
} rft_gpu_verify;

/* Begins with an image of the device. REFIT_ERR_HOST_MEMORY, and what the device says. */
refit_status rft_gpu_verify_begin(rft_gpu_verify *verify, refit_device *device,
                                  const refit_config *config, rft_image *image, refit_error *error);
/* Goes on by `most` bytes (8 or more) at most. REFIT_ERR_CORRUPT, as rft_seal_check, and what the
 * device says. */
refit_status rft_gpu_verify_part(rft_gpu_verify *verify, const rft_message *seal, uint64_t most,
                                 refit_error *error);
/* Ends it, done or not; afterwards the image may be unmapped. Waits for what is under way, at most
 * `timeout_ms`; after that the image stays mapped for ever. */
void rft_gpu_verify_end(rft_gpu_verify *verify, uint32_t timeout_ms);
void rft_gpu_verify_close(rft_gpu_verify *verify, uint32_t timeout_ms);

#endif
