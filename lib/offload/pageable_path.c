/*
 * use_pinned_optimizer_offload: false. What trainers do without a library: for each tensor a fresh
 * malloc and one plain copy, one after the other, freed after the restore. It is kept because some
 * machines may lock no memory, and because it is what the pinned path is measured against, so it is
 * neither better nor worse than that.
 *
 * Both directions end before they return. A failure during an offload frees what was taken; on the
 * restore the copies stay, and nothing counts as returned.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "offload/offloader.h"

static refit_status copy_plainly(refit_offloader *offloader, void *to, const void *from,
                                 uint64_t bytes, refit_error *error)
{
    if (offloader->caps.host_addressable) {
        memcpy(to, from, bytes);
        return REFIT_OK;
    }
    return refit_stream_copy(offloader->device, REFIT_STREAM_NONE, to, from, bytes, error);
}

static refit_status wait_for_caller(refit_offloader *offloader, refit_stream_ref after,
                                    refit_error *error)
{
    if (after.native == NULL) return REFIT_OK;
    return refit_stream_wait(offloader->device, after, offloader->config.offload_timeout_ms, error);
}

static refit_status copy_out(refit_offloader *offloader, rft_region *region, refit_error *error)
{
    region->pageable = malloc(region->bytes);
    RFT_REFUSE_IF(region->pageable == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the %" PRIu64 " bytes of region %s: free some, or discard it",
                  region->bytes, region->name);
    return copy_plainly(offloader, region->pageable, region->memory, region->bytes, error);
}

static refit_status copy_all_out(refit_offloader *offloader, rft_operation *operation,
                                 refit_error *error)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if (region->policy != REFIT_KEEP || region->place != REFIT_ON_DEVICE) continue;
        RFT_TRY(copy_out(offloader, region, error));
        operation->bytes += region->bytes;
        operation->copies++;
    }
    return REFIT_OK;
}

refit_status rft_pageable_offload(refit_offloader *offloader, refit_stream_ref after,
                                  rft_operation *operation, refit_error *error)
{
    RFT_TRY(wait_for_caller(offloader, after, error));
    refit_status status = copy_all_out(offloader, operation, error);
    if (status != REFIT_OK) {
        rft_lock(&offloader->lock);
        rft_pageable_trim(offloader);
        rft_unlock(&offloader->lock);
    }
    return status;
}

static refit_status bring_back(refit_offloader *offloader, rft_region *region,
                               rft_operation *operation, refit_error *error)
{
    if (region->policy == REFIT_DISCARD) return REFIT_OK;
    if (region->policy == REFIT_ZERO) {
        return rft_device_zero(offloader->device, REFIT_STREAM_NONE, region->memory, region->bytes,
                               error);
    }
    operation->bytes += region->bytes;
    operation->copies++;
    return copy_plainly(offloader, region->memory, region->pageable, region->bytes, error);
}

refit_status rft_pageable_restore(refit_offloader *offloader, refit_stream_ref after,
                                  rft_operation *operation, refit_error *error)
{
    RFT_TRY(wait_for_caller(offloader, after, error));
    for (uint32_t at = 0; at < offloader->schedule.count; at++) {
        rft_region *region = &offloader->regions.items[offloader->schedule.order[at]];
        if (region->place != REFIT_ON_HOST) continue;
        RFT_TRY(bring_back(offloader, region, operation, error));
    }
    return REFIT_OK;
}

void rft_pageable_trim(refit_offloader *offloader)
{
    if (offloader->config.use_pinned_optimizer_offload || offloader->leases != 0) return;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if (region->place != REFIT_ON_DEVICE) continue;
        free(region->pageable);
        region->pageable = NULL;
    }
}

uint64_t rft_pageable_bytes(const refit_offloader *offloader)
{
    uint64_t bytes = 0;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (region->pageable != NULL) bytes += region->bytes;
    }
    return bytes;
}
