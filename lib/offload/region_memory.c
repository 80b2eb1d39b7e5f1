/*
 * Device memory of regions that are away: given back, and taken again, by the arena that holds a
 * region or else by the caller's hooks. A region with neither is left to its caller (unbind, bind).
 * Each step is remembered in the region, so that a walk that failed half-way goes on where it was.
 */
#include <inttypes.h>

#include "offload/offloader.h"

static bool has_provider(const refit_offloader *offloader, const rft_region *region)
{
    return region->arena != NULL || offloader->hooks.release != NULL;
}

static refit_status give_back(refit_offloader *offloader, refit_region_id id, refit_error *error)
{
    rft_region *region = &offloader->regions.items[id];
    if (region->arena != NULL) {
        RFT_TRY(rft_arena_decommit(region->arena, region->memory, region->bytes, error));
        region->bound = false;
    } else {
        const refit_memory_hooks *hooks = &offloader->hooks;
        int code = hooks->release(hooks->user, id, region->memory, region->bytes);
        if (code != 0) {
            return rft_fail_sub(error, REFIT_ERR_CALLBACK, code,
                                "the release hook answered %d for region %s: call "
                                "refit_offloader_finish again",
                                code, region->name);
        }
        rft_region_detach(&offloader->regions, id);
    }
    rft_lock(&offloader->lock);
    offloader->figures.reclaimed_last += region->bytes;
    rft_unlock(&offloader->lock);
    return REFIT_OK;
}

refit_status rft_regions_give_back(refit_offloader *offloader, refit_error *error)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        bool away = region->place == REFIT_ON_HOST && region->bound;
        if (away && has_provider(offloader, region)) RFT_TRY(give_back(offloader, id, error));
    }
    return REFIT_OK;
}

static refit_status take_by_hook(refit_offloader *offloader, refit_region_id id, refit_error *error)
{
    const rft_region *region = &offloader->regions.items[id];
    const refit_memory_hooks *hooks = &offloader->hooks;
    void *memory = NULL;
    int code = hooks->acquire(hooks->user, id, region->bytes, &memory);
    if (code != 0 || memory == NULL) {
        return rft_fail_sub(error, REFIT_ERR_CALLBACK, code,
                            "the acquire hook gave no memory (%d) for the %" PRIu64 " bytes of "
                            "region %s: free some and restore again",
                            code, region->bytes, region->name);
    }
    return rft_region_attach(&offloader->regions, id, memory, error);
}

static refit_status take(refit_offloader *offloader, refit_region_id id, refit_error *error)
{
    rft_region *region = &offloader->regions.items[id];
    if (region->arena == NULL) return take_by_hook(offloader, id, error);
    RFT_TRY(rft_arena_commit(region->arena, region->memory, region->bytes, error));
    region->bound = true;
    return REFIT_OK;
}

refit_status rft_regions_take(refit_offloader *offloader, refit_error *error)
{
    const rft_schedule *schedule = &offloader->schedule;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        RFT_REFUSE_IF(!region->bound && !has_provider(offloader, region), error, REFIT_ERR_STATE,
                      "region %s has no memory to come back to: allocate it and call "
                      "refit_offloader_bind first",
                      region->name);
    }
    for (uint32_t at = 0; at < schedule->count; at++) {
        refit_region_id id = schedule->order[at];
        if (!offloader->regions.items[id].bound) RFT_TRY(take(offloader, id, error));
    }
    return REFIT_OK;
}
