/*
 * Where offloaded bytes lie: in one page-locked arena, or, on the pageable path, in a malloc a
 * region. With offload.background the arena's memory is taken while its owner goes on; how that
 * ends is told to the first who needs it. Moves no bytes.
 */
#include <stdlib.h>

#include "offload/offloader.h"

static bool needs_arena(const refit_offloader *offloader)
{
    return offloader->config.use_pinned_optimizer_offload &&
           offloader->schedule.layout.image_bytes != 0;
}

refit_status rft_image_end(refit_offloader *offloader, refit_error *error)
{
    if (offloader->image == NULL) return REFIT_OK;
    return rft_host_arena_end(offloader->image, offloader->config.offload_timeout_ms, error);
}

static refit_status drop_arena(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(rft_image_end(offloader, error));
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
    } else {
        rft_host_arena_close(arena);
    }
    return status;
}

/* Is there an arena that holds the plan, or will? */
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
        /* It may have, just behind a wait that was too short: then this is who is told. */
        status = rft_host_arena_wait(offloader->image, 0, error);
        rft_host_arena_close(offloader->image);
        offloader->image = NULL;
    }
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
