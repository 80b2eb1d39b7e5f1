/*
 * The verbs of regions: add, describe, bind and unbind; and device memory, given back and taken
 * again. Changes addresses only; the copies are started in offload_restore.c (pinned) and made in
 * host_image.c (pageable).
 */
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "offload/offloader.h"

/* ---- Add, describe, bind, unbind ---------------------------------------------------------- */

static refit_status find_region(const refit_offloader *offloader, refit_region_id id,
                                refit_error *error)
{
    RFT_REFUSE_IF(id >= offloader->regions.count, error, REFIT_ERR_NOT_FOUND,
                  "there is no region %u: there are %u", id, offloader->regions.count);
    return REFIT_OK;
}

static refit_status refuse_sealed(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(refit_offloader_get_state(offloader) != REFIT_OPEN, error, REFIT_ERR_STATE,
                  "no region can be added once sealed: call refit_offloader_unseal first");
    return REFIT_OK;
}

refit_status refit_offloader_add(refit_offloader *offloader, const refit_region_desc *region,
                                 refit_region_id *out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || region == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_add needs an offloader, a region and a place for its number");
    RFT_TRY(refuse_sealed(offloader, error));
    return rft_region_table_add(&offloader->regions, region, out, error);
}

/* A caller's struct may be shorter or longer: the list is walked by the size that the caller gave.
 */
refit_status refit_offloader_add_each(refit_offloader *offloader, const refit_region_desc *regions,
                                      uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || (regions == NULL && count > 0), error, REFIT_ERR_INVALID,
                  "refit_offloader_add_each needs an offloader and the regions");
    RFT_TRY(refuse_sealed(offloader, error));
    const refit_region_desc *region = regions;
    for (uint32_t at = 0; at < count; at++) {
        refit_region_id id;
        size_t size = regions->size;
        RFT_REFUSE_IF(region->size != size || size % _Alignof(refit_region_desc) != 0, error,
                      REFIT_ERR_INVALID,
                      "refit_region_desc.size is %zu in region %u of the list and %zu in the "
                      "first: set each to sizeof(refit_region_desc)",
                      region->size, at, size);
        RFT_TRY(rft_region_table_add(&offloader->regions, region, &id, error));
        region = (const void *)((const char *)region + size);
    }
    return REFIT_OK;
}

uint32_t refit_offloader_count(const refit_offloader *offloader)
{
    return offloader == NULL ? 0 : offloader->regions.count;
}

static refit_place place_of(refit_offloader *offloader, refit_region_id id)
{
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    refit_place place = offloader->regions.items[id].place;
    rft_unlock(&offloader->lock);
    return place;
}

refit_status refit_offloader_region(refit_offloader *offloader, refit_region_id region,
                                    refit_region_info *info, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || info == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_region needs an offloader and a place for the description");
    RFT_REFUSE_IF(info->size < offsetof(refit_region_info, host_offset), error, REFIT_ERR_INVALID,
                  "refit_region_info.size is %zu: set it to sizeof(refit_region_info)", info->size);
    RFT_TRY(find_region(offloader, region, error));
    const rft_region *from = &offloader->regions.items[region];
    const refit_region_info full = {.size = info->size,
                                    .name = from->name,
                                    .memory = from->bound ? from->memory : NULL,
                                    .bytes = from->bytes,
                                    .host_offset = from->host_offset,
                                    .policy = from->policy,
                                    .group = from->group,
                                    .priority = from->priority,
                                    .place = place_of(offloader, region),
                                    .bound = from->bound,
                                    .in_arena = from->arena != NULL,
                                    .host_bytes = from->host_bytes};
    memcpy(info, &full,
           rft_min_u64(full.size, sizeof full)); /* an older caller has room for less */
    return REFIT_OK;
}

refit_status refit_offloader_unbind(refit_offloader *offloader, refit_region_id region,
                                    refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    RFT_TRY(find_region(offloader, region, error));
    refit_offloader_state state = refit_offloader_get_state(offloader);
    rft_region *item = &offloader->regions.items[region];
    RFT_REFUSE_IF(state != REFIT_OFFLOADED && state != REFIT_FAILED, error, REFIT_ERR_STATE,
                  "region %s cannot lose its memory in %s: offload and wait first", item->name,
                  refit_offloader_state_name(state));
    RFT_REFUSE_IF(item->place != REFIT_ON_HOST, error, REFIT_ERR_STATE,
                  "the bytes of region %s are on the device: offload again first", item->name);
    RFT_REFUSE_IF(item->arena != NULL, error, REFIT_ERR_INVALID,
                  "region %s lies in an arena, which keeps its address: refit_offloader_wait "
                  "gives its memory back",
                  item->name);
    if (!item->bound) return REFIT_OK;
    rft_region_detach(&offloader->regions, region);
    rft_lock(&offloader->lock);
    offloader->figures.reclaimed_last += item->bytes;
    rft_unlock(&offloader->lock);
    return REFIT_OK;
}

refit_status refit_offloader_bind(refit_offloader *offloader, refit_region_id region, void *memory,
                                  refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    RFT_TRY(find_region(offloader, region, error));
    refit_offloader_state state = refit_offloader_get_state(offloader);
    const rft_region *item = &offloader->regions.items[region];
    RFT_REFUSE_IF(state == REFIT_OFFLOADING || state == REFIT_RESTORING, error, REFIT_ERR_STATE,
                  "region %s cannot move while copies run (%s): wait first", item->name,
                  refit_offloader_state_name(state));
    return rft_region_attach(&offloader->regions, region, memory, error);
}

refit_status refit_offloader_bind_weights(refit_offloader *offloader, refit_region_id region,
                                          const uint16_t *weights, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    RFT_TRY(find_region(offloader, region, error));
    refit_offloader_state state = refit_offloader_get_state(offloader);
    const rft_region *item = &offloader->regions.items[region];
    RFT_REFUSE_IF(state == REFIT_OFFLOADING || state == REFIT_RESTORING, error, REFIT_ERR_STATE,
                  "the weights of region %s cannot move while copies run (%s): wait first",
                  item->name, refit_offloader_state_name(state));
    bool stepping = rft_offloader_is_stepping(offloader, &offloader->windows);
    RFT_REFUSE_IF(stepping && item->coded, error, REFIT_ERR_STATE,
                  "the weights of region %s cannot move during a step in windows: end it, and call "
                  "refit_window_wait first",
                  item->name);
    RFT_REFUSE_IF(item->weights == NULL || weights == NULL, error, REFIT_ERR_INVALID,
                  "region %s was added without weights, or there are none now", item->name);
    return rft_region_set_weights(&offloader->regions, region, weights, error);
}

refit_status refit_offloader_unbind_each(refit_offloader *offloader, const refit_region_id *regions,
                                         uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(regions == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "refit_offloader_unbind_each needs the regions");
    for (uint32_t at = 0; at < count; at++) {
        RFT_TRY(refit_offloader_unbind(offloader, regions[at], error));
    }
    return REFIT_OK;
}

refit_status refit_offloader_bind_each(refit_offloader *offloader, const refit_region_id *regions,
                                       void *const *memory, uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF((regions == NULL || memory == NULL) && count > 0, error, REFIT_ERR_INVALID,
                  "refit_offloader_bind_each needs the regions, and an address for each");
    for (uint32_t at = 0; at < count; at++) {
        RFT_TRY(refit_offloader_bind(offloader, regions[at], memory[at], error));
    }
    return REFIT_OK;
}

/* ---- Device memory comes and goes ------------------------------------------------------------
 * Device memory of regions that are away: given back, and taken again, by the arena that holds a
 * region or else by the caller's hooks. A region with neither is left to its caller (unbind, bind).
 * Each step is remembered in the region, so that a walk that failed half-way goes on where it was.
 *
 * Regions that lie side by side in one arena come and go in one call. A region whose memory was not
 * given back may have lost some of it: the call is repeated all the same, and the restore takes
 * memory for every region of an arena, whether it has some or not. Both calls are idempotent.
 */

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
                            "refit_offloader_wait again",
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

/* ---- Give back and take ------------------------------------------------------------------- */

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
    bool pieces = false, others = false; /* of an arena; without memory, and of none */
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        RFT_REFUSE_IF(!region->bound && !has_provider(offloader, region), error, REFIT_ERR_STATE,
                      "region %s has no memory to come back to: allocate it and call "
                      "refit_offloader_bind first",
                      region->name);
        pieces = pieces || region->arena != NULL;
        others = others || (!region->bound && region->arena == NULL);
    }
    if (pieces) RFT_TRY(for_runs(offloader, commit_run, error));
    for (uint32_t at = 0; others && at < schedule->count; at++) {
        refit_region_id id = schedule->order[at];
        if (!offloader->regions.items[id].bound) RFT_TRY(take_by_hook(offloader, id, error));
    }
    return REFIT_OK;
}
