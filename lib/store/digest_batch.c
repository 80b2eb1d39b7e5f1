/* The device's part, then the host's. */
#include "store/digest_batch.h"

#include "base/alloc.h"

#define BYTES (RFT_DIGEST_BATCH_MOST * sizeof(uint64_t))

static refit_status twins_open(rft_digest_batch *batch, refit_device *device, refit_error *error)
{
    RFT_TRY(rft_segment_create_private(&batch->segment, BYTES, error));
    batch->twins = (uint64_t *)(void *)batch->segment.memory;
    if (!rft_device_get_caps(device).needs_pinned) return REFIT_OK;
    refit_status status =
        rft_pinning_open(&batch->pinning, device, batch->segment.memory, BYTES, BYTES, error);
    if (status != REFIT_OK) rft_segment_close(&batch->segment);
    return status;
}

/* The memory on the device, as something that can be left to it. */
struct rft_digest_batch_sums {
    rft_deferred_free left; /* first, so that it is the address of all */
    void *memory;
};

static bool sums_free(rft_deferred_free *left, refit_device *device)
{
    struct rft_digest_batch_sums *sums = (struct rft_digest_batch_sums *)left;
    if (refit_memory_free(device, sums->memory, NULL) != REFIT_OK) return false;
    rft_free(sums);
    return true;
}

/* A device that does not take it back now is asked again when it is closed. */
static void sums_close(struct rft_digest_batch_sums *sums, refit_device *device)
{
    sums->left.give_back = sums_free;
    if (!sums_free(&sums->left, device)) rft_device_defer_free(device, &sums->left);
}

static refit_status sums_open(struct rft_digest_batch_sums **out, refit_device *device,
                              refit_error *error)
{
    struct rft_digest_batch_sums *sums = rft_calloc(1, sizeof *sums);
    RFT_REFUSE_IF(sums == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a version's digests");
    refit_status status = refit_memory_alloc(device, BYTES, &sums->memory, error);
    if (status == REFIT_OK) {
        *out = sums;
    } else {
        rft_free(sums);
    }
    return status;
}

refit_status rft_digest_batch_open(rft_digest_batch *batch, refit_device *device,
                                   refit_error *error)
{
    struct rft_digest_batch_sums *room = NULL;
    *batch = (rft_digest_batch){.segment.fd = -1};
    RFT_TRY(sums_open(&room, device, error));
    refit_status status = twins_open(batch, device, error);
    if (status == REFIT_OK) {
        batch->room = room;
        batch->sums = room->memory;
    } else {
        sums_close(room, device);
    }
    return status;
}

void rft_digest_batch_close(rft_digest_batch *batch, refit_device *device)
{
    if (batch->sums == NULL) return;
    rft_pinning_close(&batch->pinning);
    rft_segment_close(&batch->segment);
    sums_close(batch->room, device);
    *batch = (rft_digest_batch){0};
}
