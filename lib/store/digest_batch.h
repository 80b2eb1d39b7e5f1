/*
 * tally: room for the digests of many pieces of a device's memory, added up there and brought to
 * the host at once. The sums lie on the device, their twins in host memory, page-locked where the
 * device wants that, so that a copy to them waits for nothing.
 */
#ifndef RFT_DIGEST_BATCH_H
#define RFT_DIGEST_BATCH_H

#include "store/pinning.h"
#include "store/segment.h"

#define RFT_DIGEST_BATCH_MOST 1024u /* digests at a time */

/* {0} is not open: closing it is harmless. */
typedef struct rft_digest_batch {
    unsigned char *sums;                /* of the device; NULL: not open */
    struct rft_digest_batch_sums *room; /* that holds them */
    uint64_t *twins;
    rft_segment segment; /* that holds them */
    rft_pinning pinning;
} rft_digest_batch;

/* All of it or nothing. REFIT_ERR_DEVICE_MEMORY, and what the page-lock meets with. */
refit_status rft_digest_batch_open(rft_digest_batch *batch, refit_device *device,
                                   refit_error *error);
/* With nothing under way that uses it. */
void rft_digest_batch_close(rft_digest_batch *batch, refit_device *device);

static inline void *rft_digest_batch_sum(const rft_digest_batch *batch, uint32_t index)
{
    return batch->sums + index * sizeof(uint64_t);
}

#endif
