/*
 * Where offloaded bytes lie: in one page-locked arena, or, on the pageable path, in a malloc a
 * region. With offload.background the arena's memory is taken while its owner goes on; how that
 * ends is reported to the first call that needs it.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "offload/offloader.h"

/* ---- The pageable path -----------------------------------------------------------------------
 * use_pinned_optimizer_offload: false. What trainers do without a library: for each tensor a fresh
 * malloc and one plain copy, one after the other, freed after the restore. It is kept because some
 * machines may lock no memory, and because it is what the pinned path is measured against, so it is
 * neither better nor worse than that.
 *
 * Both directions end before they return. A failure during an offload frees what was taken; on the
 * restore the copies stay, and nothing counts as returned.
 */

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
    if (offloader->config.use_pinned_optimizer_offload || offloader->read_locks != 0) return;
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

/* ---- The image ---------------------------------------------------------------------------- */

static bool needs_arena(const refit_offloader *offloader)
{
    return offloader->config.use_pinned_optimizer_offload &&
           offloader->schedule.layout.image_bytes != 0;
}

static void set_ready(refit_offloader *offloader, bool ready)
{
    rft_lock(&offloader->lock);
    offloader->image_ready = ready;
    rft_unlock(&offloader->lock);
}

bool rft_image_is_ready(const refit_offloader *offloader)
{
    return offloader->image_ready || !needs_arena(offloader);
}

refit_status rft_image_end(refit_offloader *offloader, refit_error *error)
{
    if (offloader->image == NULL) return REFIT_OK;
    return rft_host_arena_end(offloader->image, offloader->config.offload_timeout_ms, error);
}

static refit_status drop_arena(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(rft_image_end(offloader, error));
    set_ready(offloader, false);
    rft_host_arena_close(offloader->image);
    offloader->image = NULL;
    return REFIT_OK;
}

static refit_status open_arena(refit_offloader *offloader, refit_error *error)
{
    const refit_config *config = &offloader->config;
    rft_host_arena *arena;
    RFT_TRY(
        rft_host_arena_open(offloader->device, &offloader->schedule.layout, config, &arena, error));
    refit_status status = config->offload_background ? rft_host_arena_begin(arena, error)
                                                     : rft_host_arena_take(arena, error);
    if (status == REFIT_OK) {
        offloader->image = arena;
        offloader->image_used = false;
        for (uint32_t id = 0; id < offloader->regions.count; id++)
            offloader->regions.items[id].imaged = false;
        set_ready(offloader, !config->offload_background);
    } else {
        rft_host_arena_close(arena);
    }
    return status;
}

/* Is there an arena that holds the plan, or will hold it? */
static bool has_arena(const refit_offloader *offloader)
{
    return offloader->image != NULL &&
           rft_host_arena_fits(offloader->image, &offloader->schedule.layout);
}

static refit_status renew_arena(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(drop_arena(offloader, error));
    return open_arena(offloader, error);
}

refit_status rft_image_begin(refit_offloader *offloader, refit_error *error)
{
    if (!needs_arena(offloader)) return REFIT_OK;
    bool usable = has_arena(offloader) && !rft_host_arena_has_failed(offloader->image);
    return usable ? REFIT_OK : renew_arena(offloader, error);
}

refit_status rft_image_await(refit_offloader *offloader, uint32_t timeout_ms, refit_error *error)
{
    if (!needs_arena(offloader)) return REFIT_OK;
    if (!has_arena(offloader)) RFT_TRY(renew_arena(offloader, error));
    refit_status status = rft_host_arena_wait(offloader->image, timeout_ms, error);
    if (rft_host_arena_has_failed(offloader->image)) {
        /* It may have failed just after a wait that was too short: then this caller is told. */
        status = rft_host_arena_wait(offloader->image, 0, error);
        rft_host_arena_close(offloader->image);
        offloader->image = NULL;
    }
    if (status == REFIT_OK) set_ready(offloader, true);
    return status;
}

refit_status rft_image_drop(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(drop_arena(offloader, error));
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        free(region->pageable);
        region->pageable = NULL;
    }
    return REFIT_OK;
}

/* Memory that the system has just given is zeros. */
void rft_image_zero(refit_offloader *offloader)
{
    if (offloader->image == NULL || !offloader->image_used) return;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        memset(rft_image_of(offloader, region), 0, region->host_bytes);
    }
}

uint64_t rft_image_held(refit_offloader *offloader)
{
    if (offloader->image != NULL) return rft_host_arena_describe(offloader->image).taken_bytes;
    rft_lock(&offloader->lock);
    uint64_t bytes = rft_pageable_bytes(offloader);
    rft_unlock(&offloader->lock);
    return bytes;
}

void *rft_image_of(const refit_offloader *offloader, const rft_region *region)
{
    if (offloader->image == NULL) return region->pageable;
    return rft_host_arena_base(offloader->image) + region->host_offset;
}
