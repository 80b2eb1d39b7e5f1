/*
 * Leases: readers of the host image. A count under the lock is all there is: while it is not zero,
 * nothing that would change or free the image begins. Copies no bytes.
 */
#include "base/alloc.h"
#include "offload/offloader.h"

struct refit_lease {
    refit_offloader *offloader;
};

/* Does the image hold every byte that is kept? Not so during a restore after a failure, when some
 * regions never left or have been used since. Lock held. */
static bool image_is_whole(const refit_offloader *offloader)
{
    if (offloader->state != REFIT_OFFLOADED && offloader->state != REFIT_RESTORING) return false;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (region->policy == REFIT_KEEP && region->place != REFIT_ON_HOST) return false;
    }
    return true;
}

refit_status refit_lease_acquire(refit_offloader *offloader, refit_lease **out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_lease_acquire needs an offloader and a place for the lease");
    refit_lease *lease = rft_calloc(1, sizeof *lease);
    RFT_REFUSE_IF(lease == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a lease");
    lease->offloader = offloader;

    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    bool whole = image_is_whole(offloader);
    if (whole) offloader->leases++;
    refit_offloader_state state = offloader->state;
    rft_unlock(&offloader->lock);
    if (!whole) {
        rft_free(lease);
        return rft_fail(error, REFIT_ERR_STATE,
                        "the host image is not whole in %s: a lease begins in OFFLOADED or "
                        "RESTORING",
                        refit_offloader_state_name(state));
    }
    *out = lease;
    return REFIT_OK;
}

refit_status refit_lease_read(const refit_lease *lease, refit_region_id region, const void **bytes,
                              uint64_t *count, refit_error *error)
{
    RFT_REFUSE_IF(lease == NULL || bytes == NULL || count == NULL, error, REFIT_ERR_INVALID,
                  "refit_lease_read needs a lease and places for the bytes and their count");
    const rft_region_table *regions = &lease->offloader->regions;
    RFT_REFUSE_IF(region >= regions->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no region %u: there are %u", region, regions->count);
    const rft_region *item = &regions->items[region];
    RFT_REFUSE_IF(item->policy != REFIT_KEEP, error, REFIT_ERR_NOT_FOUND,
                  "region %s is not kept, so the image has no bytes of it", item->name);
    *bytes = rft_image_of(lease->offloader, item);
    *count = item->bytes;
    return REFIT_OK;
}

void refit_lease_release(refit_lease *lease)
{
    if (lease == NULL) return;
    refit_offloader *offloader = lease->offloader;
    rft_lock(&offloader->lock);
    offloader->leases--;
    rft_pageable_trim(offloader);
    rft_unlock(&offloader->lock);
    rft_free(lease);
}
