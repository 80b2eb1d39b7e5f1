/*
 * gpu_verify: whether the bytes of an image in a GPU's memory are the version that SEAL describes
 * (broadcast.verify: always), part by part, digested by the device.
 *
 * A call waits a few milliseconds at most: what is not done by then is asked for in the next one.
 */
#ifndef RFT_GPU_VERIFY_H
#define RFT_GPU_VERIFY_H

#include "store/copy_queue.h"
#include "subscriber/images.h"

/* {0} is not open. */
typedef struct rft_gpu_verify {
    refit_device *device;       /* borrowed; NULL: not open */
    const refit_config *config; /* borrowed */
    rft_copy_queue *copy_queue;
    rft_image *image;         /* to verify; NULL: none */
    rft_gpu_mapping *mapping; /* in use while its bytes may be read; NULL: none is */
    uint64_t *sums;           /* per tensor */
    uint32_t tensor;          /* reached */
    uint64_t offset;          /* in it */
    uint64_t asked;           /* bytes whose digest is under way */
    bool started;             /* nothing else is under way any more */
    bool done;                /* all of the image is what the publisher wrote */
} rft_gpu_verify;

/* Begins with an image of the device. */
void rft_gpu_verify_begin(rft_gpu_verify *verify, refit_device *device, const refit_config *config,
                          rft_image *image);
/* Goes on by `most` bytes (8 or more) at most. REFIT_ERR_CORRUPT, as rft_seal_check;
 * REFIT_ERR_HOST_MEMORY, and what the device says. */
refit_status rft_gpu_verify_part(rft_gpu_verify *verify, const rft_message *seal, uint64_t most,
                                 refit_error *error);
/* The image is wanted no longer. What the device still reads stays mapped until it has ended. */
void rft_gpu_verify_end(rft_gpu_verify *verify);
/* Waits for that, at most `timeout_ms`: after that it stays mapped for ever. */
void rft_gpu_verify_close(rft_gpu_verify *verify, uint32_t timeout_ms);

#endif
