/*
 * Device memory of regions that are away: given back, and taken again, by the arena that holds a
 * region or else by the caller's hooks. A region with neither is left to its caller (unbind, bind).
 * Each step is remembered in the region, so that a walk that failed half-way goes on where it was.
 *
 * Regions that lie side by side in one arena come and go in one call. One that failed to give back
 * may have lost some of its memory: it is called again all the same, and the restore takes memory
 * for every region of an arena, whether it has some or not; both are idempotent.
 */
#include <inttypes.h>

#include "offload/offloader.h"

static bool has_provider(const refit_offloader *offloader, const rft_region *region)
{
    return region->arena != NULL || offloader->hooks.release != NULL;
}

static void count_reclaimed(refit_offloader *offloader, uint64_t bytes)
{
    rft_lock(&offloader->lock);
    offloader->figures.reclaimed_last += bytes;
    rft_unlock(&offloader->lock);
}

/* ---- Arenas ------------------------------------------------------------------------------ */

/* Regions side by side in one arena. */
typedef struct run {
    refit_arena *arena; /* NULL: none yet */
    char *from;
    uint64_t bytes; /* whole pages */
    uint32_t first; /* in schedule.by_address */
    uint32_t last;
} run;

typedef refit_status (*run_verb)(refit_offloader *offloader, const run *on, refit_error *error);

static rft_region *region_at(refit_offloader *offloader, uint32_t at)
{
    return &offloader->regions.items[offloader->schedule.by_address[at]];
}

static bool moves(const rft_region *region)
{
    return region->arena != NULL && region->place == REFIT_ON_HOST;
}

static bool extends(const run *on, const rft_region *region)
{
    return on->arena == region->arena && on->from + on->bytes == region->memory;
}

/* Calls `verb` for each run of regions that are away. */
static refit_status for_runs(refit_offloader *offloader, run_verb verb, refit_error *error)
{
    run on = {0};
    for (uint32_t at = 0; at < offloader->schedule.count; at++) {
        const rft_region *region = region_at(offloader, at);
        if (!moves(region)) continue;
        uint64_t bytes = rft_arena_round(region->arena, region->bytes);
        if (extends(&on, region)) {
            on.bytes += bytes;
            on.last = at;
            continue;
        }
        if (on.arena != NULL) RFT_TRY(verb(offloader, &on, error));
        on = (run){region->arena, region->memory, bytes, at, at};
    }
    return on.arena == NULL ? REFIT_OK : verb(offloader, &on, error);
}

static void set_bound(refit_offloader *offloader, const run *on, bool bound)
{
    for (uint32_t at = on->first; at <= on->last; at++) {
        if (moves(region_at(offloader, at))) region_at(offloader, at)->bound = bound;
    }
}

static refit_status decommit_run(refit_offloader *offloader, const run *on, refit_error *error)
{
    uint64_t freed;
    refit_status status = rft_arena_decommit(on->arena, on->from, on->bytes, &freed, error);
    count_reclaimed(offloader, freed);
    if (status == REFIT_OK) set_bound(offloader, on, false);
    return status;
}

static refit_status commit_run(refit_offloader *offloader, const run *on, refit_error *error)
{
    RFT_TRY(rft_arena_commit(on->arena, on->from, on->bytes, error));
    set_bound(offloader, on, true);
    return REFIT_OK;
}

/* ---- Hooks ------------------------------------------------------------------------------- */

static refit_status give_by_hook(refit_offloader *offloader, refit_region_id id, refit_error *error)
{
    const rft_region *region = &offloader->regions.items[id];
    const refit_memory_hooks *hooks = &offloader->hooks;
    int code = hooks->release(hooks->user, id, region->memory, region->bytes);
    if (code != 0) {
        return rft_fail_sub(error, REFIT_ERR_CALLBACK, code,
                            "the release hook answered %d for region %s: call "
                            "refit_offloader_finish again",
                            code, region->name);
    }
    rft_region_detach(&offloader->regions, id);
    count_reclaimed(offloader, region->bytes);
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

/* ---- Device memory ------------------------------------------------------------------------
 */

refit_status rft_regions_give_back(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(for_runs(offloader, decommit_run, error));
    if (offloader->hooks.release == NULL) return REFIT_OK;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        bool away = region->place == REFIT_ON_HOST && region->bound;
        if (away && region->arena == NULL) RFT_TRY(give_by_hook(offloader, id, error));
    }
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
    RFT_TRY(for_runs(offloader, commit_run, error));
    for (uint32_t at = 0; at < schedule->count; at++) {
        refit_region_id id = schedule->order[at];
        if (!offloader->regions.items[id].bound) RFT_TRY(take_by_hook(offloader, id, error));
    }
    return REFIT_OK;
}
