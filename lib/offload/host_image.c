/*
 * Where offloaded bytes lie: in one page-locked arena, or, on the pageable path, in a malloc a
 * region. Moves no bytes.
 */
#include <stdlib.h>

#include "offload/offloader.h"

refit_status rft_image_take(refit_offloader *offloader, refit_error *error)
{
    const rft_layout *layout = &offloader->schedule.layout;
    bool pinned = offloader->config.use_pinned_optimizer_offload;
    if (!pinned || layout->image_bytes == 0) return REFIT_OK;
    if (offloader->image != NULL && rft_host_arena_fits(offloader->image, layout)) return REFIT_OK;
    rft_image_drop(offloader);
    return rft_host_arena_open(offloader->device, layout, &offloader->config, &offloader->image,
                               error);
}

void rft_image_drop(refit_offloader *offloader)
{
    if (offloader->image != NULL) rft_host_arena_close(offloader->image);
    offloader->image = NULL;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        free(region->pageable);
        region->pageable = NULL;
    }
}

uint64_t rft_image_held(refit_offloader *offloader)
{
    if (offloader->image != NULL) return rft_host_arena_describe(offloader->image).bytes;
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
