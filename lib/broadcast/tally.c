/* The device's part, then the host's. */
#include "broadcast/tally.h"

#define BYTES (RFT_TALLY_MOST * sizeof(uint64_t))

static refit_status twins_open(rft_tally *tally, refit_device *device, refit_error *error)
{
    RFT_TRY(rft_segment_create_private(&tally->segment, BYTES, error));
    tally->twins = (uint64_t *)(void *)tally->segment.memory;
    if (!rft_device_get_caps(device).needs_pinned) return REFIT_OK;
    refit_status status =
        rft_pinning_open(&tally->pinning, device, tally->segment.memory, BYTES, BYTES, error);
    if (status != REFIT_OK) rft_segment_close(&tally->segment);
    return status;
}

refit_status rft_tally_open(rft_tally *tally, refit_device *device, refit_error *error)
{
    void *sums = NULL;
    *tally = (rft_tally){.segment.fd = -1};
    RFT_TRY(refit_memory_alloc(device, BYTES, &sums, error));
    refit_status status = twins_open(tally, device, error);
    if (status == REFIT_OK) {
        tally->sums = sums;
    } else {
        (void)!refit_memory_free(device, sums, NULL);
    }
    return status;
}

void rft_tally_close(rft_tally *tally, refit_device *device)
{
    if (tally->sums == NULL) return;
    rft_pinning_close(&tally->pinning);
    rft_segment_close(&tally->segment);
    (void)!refit_memory_free(device, tally->sums, NULL);
    *tally = (rft_tally){0};
}
