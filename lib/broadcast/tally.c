/* The device's part, then the host's. */
#include "broadcast/tally.h"

#include "base/alloc.h"

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

/* The memory on the device, as something that can be left to it. */
struct rft_tally_sums {
    rft_deferred_free left; /* first, so that it is the address of all */
    void *memory;
};

static bool sums_free(rft_deferred_free *left, refit_device *device)
{
    struct rft_tally_sums *sums = (struct rft_tally_sums *)left;
    if (refit_memory_free(device, sums->memory, NULL) != REFIT_OK) return false;
    rft_free(sums);
    return true;
}

/* A device that does not take it back now is asked again when it is closed. */
static void sums_close(struct rft_tally_sums *sums, refit_device *device)
{
    sums->left.give_back = sums_free;
    if (!sums_free(&sums->left, device)) rft_device_defer_free(device, &sums->left);
}

static refit_status sums_open(struct rft_tally_sums **out, refit_device *device, refit_error *error)
{
    struct rft_tally_sums *sums = rft_calloc(1, sizeof *sums);
    RFT_REFUSE_IF(sums == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a version's digests");
    refit_status status = refit_memory_alloc(device, BYTES, &sums->memory, error);
    if (status == REFIT_OK) {
        *out = sums;
    } else {
        rft_free(sums);
    }
    return status;
}

refit_status rft_tally_open(rft_tally *tally, refit_device *device, refit_error *error)
{
    struct rft_tally_sums *room = NULL;
    *tally = (rft_tally){.segment.fd = -1};
    RFT_TRY(sums_open(&room, device, error));
    refit_status status = twins_open(tally, device, error);
    if (status == REFIT_OK) {
        tally->room = room;
        tally->sums = room->memory;
    } else {
        sums_close(room, device);
    }
    return status;
}

void rft_tally_close(rft_tally *tally, refit_device *device)
{
    if (tally->sums == NULL) return;
    rft_pinning_close(&tally->pinning);
    rft_segment_close(&tally->segment);
    sums_close(tally->room, device);
    *tally = (rft_tally){0};
}
