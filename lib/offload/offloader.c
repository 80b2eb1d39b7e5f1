/*
 * The offloader: opening, closing, planning, figures, read locks, and the states. offload_restore.c
 * has the verbs of a cycle, offloader_regions.c those of regions.
 *
 *        seal            offload                copies end
 *   OPEN ────► RESIDENT ─────────► OFFLOADING ──────────────► OFFLOADED
 *        ◄────     ▲                  ▲  │ refused, lost          │
 *       unseal     │          offload │  ▼                        │
 *                  │                FAILED                        │ restore
 *                  │          restore │  ▲                        │
 *                  │ copies end       ▼  │ refused, lost          │
 *                  └───────────── RESTORING ◄─────────────────────┘
 *
 *   state       bytes of a region count       the image             device memory
 *   OPEN        on the device                 may be there, cached  all bound
 *   RESIDENT    on the device                 holds nothing         all bound
 *   OFFLOADING  on the device                 being written         all bound
 *   OFFLOADED   in the image                  whole                 bound until wait or unbind
 *   RESTORING   in the image                  whole, not written    all bound
 *   FAILED      where its `place` says        holds those away      bound if its bytes are there
 *
 * An offloader whose regions live on the host is sealed to OFFLOADED: their bytes begin as zeros in
 * the image. In OFFLOADED a window (window.c) may step parts of the image on the device; a read
 * lock and a restore are refused meanwhile.
 *
 * With offload.background the image's memory may still be coming in OPEN and RESIDENT: an
 * offload waits for it.
 *
 * When copies have ended, the next look moves the state on: a verb on the offloader's thread, or on
 * any thread a future or refit_offloader_get_state. An offload changes the place of all its regions
 * at once, when the last copy has ended. Copies do not fail, unless the device is lost; but what
 * they brought may be refused, by a digest or the check of masters. A restore of which a part was
 * refused has changed the place of the other groups: their users may have gone on with them. A verb
 * that fails before its copies are under way leaves the state as it was.
 *
 * On a lost device an offload or restore ends in FAILED and changes no place; no verb starts
 * anything any more. The image is what it was: a read lock reads it, if it is whole.
 *
 * Independent of: sockets, workers, what the bytes mean.
 */
#include "offload/offloader.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "config/config.h"
#include "memory/budget.h"
#include "offload/masters.h"

/* ---- Open and close ----------------------------------------------------------------------- */

static refit_status open_movers(refit_offloader *offloader, refit_error *error)
{
    if (!offloader->config.use_pinned_optimizer_offload) return REFIT_OK;
    uint64_t limit = offloader->config.offload_rate_limit;
    RFT_TRY(rft_mover_open(offloader->device, limit, &offloader->movers[RFT_OFFLOAD], error));
    return rft_mover_open(offloader->device, limit, &offloader->movers[RFT_RESTORE], error);
}

/* Nothing is under way, so neither has anything to wait for. */
static refit_status close_movers(refit_offloader *offloader, uint32_t timeout_ms,
                                 refit_error *error)
{
    for (int direction = RFT_OFFLOAD; direction <= RFT_RESTORE; direction++) {
        if (offloader->movers[direction] == NULL) continue;
        RFT_TRY(rft_mover_close(offloader->movers[direction], timeout_ms, error));
        offloader->movers[direction] = NULL;
    }
    return REFIT_OK;
}

static refit_status open_parts(refit_offloader *offloader, refit_error *error)
{
    refit_status status;
    RFT_TRY_GOTO(rft_mutex_open(&offloader->lock, error), out);
    RFT_TRY_GOTO(rft_mutex_open(&offloader->verify_lock, error), close_lock);
    RFT_TRY_GOTO(open_movers(offloader, error), close_opened);
    return REFIT_OK;

close_opened:
    (void)close_movers(offloader, 0, NULL);
    rft_mutex_close(&offloader->verify_lock);
close_lock:
    rft_mutex_close(&offloader->lock);
out:
    return status;
}

refit_status refit_offloader_open(refit_device *device, const refit_config *config,
                                  refit_offloader **out, refit_error *error)
{
    RFT_REFUSE_IF(device == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_open needs a device and a place for the result");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    refit_offloader *offloader = rft_calloc(1, sizeof *offloader);
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for an offloader");
    offloader->device = device;
    offloader->config = own;
    offloader->caps = rft_device_get_caps(device);
    rft_region_table_open(&offloader->regions, device);
    refit_status status = open_parts(offloader, error);
    if (status != REFIT_OK) {
        rft_free(offloader);
        return status;
    }
    rft_device_retain(device);
    *out = offloader;
    return REFIT_OK;
}

/* Waits for copies under way. Their status does not matter any more. */
static refit_status end_copies(refit_offloader *offloader, refit_error *error)
{
    rft_lock(&offloader->lock);
    bool locked = offloader->read_locks != 0;
    rft_mover *mover = rft_offloader_is_moving(offloader) ? offloader->operation.mover : NULL;
    rft_unlock(&offloader->lock);
    RFT_REFUSE_IF(locked, error, REFIT_ERR_BUSY,
                  "the offloader cannot close while a read lock reads its image: release it first");
    if (mover == NULL) return REFIT_OK;
    rft_mover_hurry(mover);
    refit_status status = rft_mover_wait(mover, offloader->config.offload_timeout_ms, error);
    return status == REFIT_ERR_TIMEOUT ? status : REFIT_OK;
}

refit_status refit_offloader_close(refit_offloader *offloader, refit_error *error)
{
    if (offloader == NULL) return REFIT_OK;
    RFT_REFUSE_IF(offloader->window != NULL, error, REFIT_ERR_BUSY,
                  "the offloader cannot close while it has a window: close that first");
    RFT_REFUSE_IF(offloader->host_step != NULL, error, REFIT_ERR_BUSY,
                  "the offloader cannot close while it has a host step: close that first");
    RFT_TRY(end_copies(offloader, error));
    RFT_TRY(rft_image_end(offloader, error));
    offloader->closing = true;
    RFT_TRY(close_movers(offloader, offloader->config.offload_timeout_ms, error));
    RFT_TRY(rft_masters_drop_staging(offloader, error));
    rft_units_drop(offloader);
    RFT_TRY(rft_image_drop(offloader, error));
    rft_schedule_close(&offloader->schedule);
    rft_region_table_close(&offloader->regions);
    rft_mutex_close(&offloader->verify_lock);
    rft_mutex_close(&offloader->lock);
    rft_device_release(offloader->device);
    rft_free(offloader);
    return REFIT_OK;
}

refit_offloader_state refit_offloader_get_state(refit_offloader *offloader)
{
    if (offloader == NULL) return REFIT_OPEN;
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    refit_offloader_state state = offloader->state;
    rft_unlock(&offloader->lock);
    return state;
}

const char *refit_offloader_state_name(refit_offloader_state state)
{
    switch (state) {
    case REFIT_OPEN: return "OPEN";
    case REFIT_RESIDENT: return "RESIDENT";
    case REFIT_OFFLOADING: return "OFFLOADING";
    case REFIT_OFFLOADED: return "OFFLOADED";
    case REFIT_RESTORING: return "RESTORING";
    case REFIT_FAILED: return "FAILED";
    }
    return "UNKNOWN";
}

refit_status refit_offloader_set_accumulating(refit_offloader *offloader, int open,
                                              refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    offloader->accumulating = open != 0;
    return REFIT_OK;
}

refit_status refit_offloader_set_memory(refit_offloader *offloader, const refit_memory_hooks *hooks,
                                        refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_OPEN && state != REFIT_RESIDENT, error, REFIT_ERR_STATE,
                  "hooks cannot change while states are away (%s): restore first",
                  refit_offloader_state_name(state));
    if (hooks == NULL) {
        offloader->hooks = (refit_memory_hooks){0};
        return REFIT_OK;
    }
    RFT_REFUSE_IF(hooks->size < offsetof(refit_memory_hooks, user), error, REFIT_ERR_INVALID,
                  "refit_memory_hooks.size is %zu: set it to sizeof(refit_memory_hooks)",
                  hooks->size);
    RFT_REFUSE_IF(hooks->release == NULL || hooks->acquire == NULL, error, REFIT_ERR_INVALID,
                  "the memory hooks come in a pair: give release and acquire");
    offloader->hooks = (refit_memory_hooks){0};
    memcpy(&offloader->hooks, hooks, rft_min_u64(hooks->size, sizeof *hooks));
    return REFIT_OK;
}

/* ---- Planning --------------------------------------------------------------------------------
 * Planning, undone and taken back: estimate, seal, prepare, unseal, clear, trim. The only places
 * where host memory for the image comes and goes, but for an offload after a trim. No bytes move
 * here.
 */

uint32_t rft_offloader_batch_most(const refit_offloader *offloader)
{
    uint32_t most = offloader->caps.batch_most;
    return offloader->config.offload_batch < most ? offloader->config.offload_batch : most;
}

/* Host bytes that the sealed offloader would take at its most. */
static refit_status measure(refit_offloader *offloader, uint64_t *bytes, refit_error *error)
{
    uint64_t image_bytes;
    uint64_t payload_bytes;
    if (refit_offloader_get_state(offloader) == REFIT_OPEN) {
        RFT_TRY(rft_masters_decide(offloader, error));
    }
    RFT_TRY(rft_schedule_measure(&offloader->regions, &offloader->config, &image_bytes,
                                 &payload_bytes, error));
    *bytes = offloader->config.use_pinned_optimizer_offload ? image_bytes : payload_bytes;
    return REFIT_OK;
}

refit_status refit_offloader_estimate(refit_offloader *offloader, uint64_t *host_bytes,
                                      uint64_t *budget_bytes, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || host_bytes == NULL || budget_bytes == NULL, error,
                  REFIT_ERR_INVALID,
                  "refit_offloader_estimate needs an offloader and places for "
                  "the host bytes and the budget");
    uint64_t bytes;
    rft_budget budget;
    RFT_TRY(measure(offloader, &bytes, error));
    RFT_TRY(rft_budget_read("", &offloader->config, rft_image_held(offloader), 0, &budget, error));
    *host_bytes = bytes;
    *budget_bytes = budget.bytes;
    return REFIT_OK;
}

/* The arena checks its own budget; for single mallocs it is checked here. */
static refit_status check_pageable_budget(refit_offloader *offloader, refit_error *error)
{
    uint64_t need = offloader->schedule.layout.payload_bytes;
    rft_budget budget;
    if (offloader->config.use_pinned_optimizer_offload) return REFIT_OK;
    RFT_TRY(rft_budget_read("", &offloader->config, 0, 0, &budget, error));
    RFT_REFUSE_IF(need > budget.bytes, error, REFIT_ERR_BUDGET,
                  "offloading needs %" PRIu64 " bytes of host memory, %s allows %" PRIu64
                  ": raise offload.budget_bytes or keep less",
                  need, budget.source, budget.bytes);
    return REFIT_OK;
}

static void set_state(refit_offloader *offloader, refit_offloader_state state)
{
    rft_lock(&offloader->lock);
    offloader->state = state;
    rft_unlock(&offloader->lock);
}

/* The plan of all regions, and the device memory that some of them pass through. */
static refit_status open_plan(refit_offloader *offloader, rft_schedule *schedule,
                              refit_error *error)
{
    RFT_TRY(rft_masters_decide(offloader, error));
    RFT_TRY(rft_units_open(offloader, error));
    RFT_TRY(rft_masters_take_staging(offloader, error));
    RFT_TRY(rft_schedule_open(schedule, &offloader->regions, &offloader->config,
                              rft_offloader_batch_most(offloader), error));
    schedule->staging = offloader->staging;
    return REFIT_OK;
}

bool rft_offloader_misfits(refit_offloader *offloader)
{
    rft_lock(&offloader->lock);
    bool misfits = offloader->misfits;
    rft_unlock(&offloader->lock);
    return misfits;
}

static void forget_misfits(refit_offloader *offloader)
{
    rft_lock(&offloader->lock);
    offloader->misfits = false;
    rft_unlock(&offloader->lock);
}

refit_status rft_offloader_renew_plan(refit_offloader *offloader, refit_error *error)
{
    rft_schedule fresh;
    if (!rft_offloader_misfits(offloader)) return REFIT_OK;
    RFT_REFUSE_IF(rft_offloader_is_away(offloader), error, REFIT_ERR_LIMIT,
                  "masters did not fit into the plan, which cannot change while other regions are "
                  "in the host image: restore first");
    RFT_TRY(rft_offloader_check_movers(offloader, error));
    RFT_TRY(open_plan(offloader, &fresh, error));
    rft_schedule_close(&offloader->schedule);
    offloader->schedule = fresh;
    RFT_TRY(rft_image_begin(offloader, error));
    forget_misfits(offloader);
    return REFIT_OK;
}

/* Regions that live on the host begin in the image; after a restore and an unseal they are on the
 * device. `*away`: they are in the image. */
static refit_status check_placement(const refit_offloader *offloader, bool *away,
                                    refit_error *error)
{
    const rft_region_table *regions = &offloader->regions;
    *away = false;
    if (rft_region_table_placement(regions) == REFIT_PLACEMENT_DEVICE) return REFIT_OK;
    RFT_REFUSE_IF(!offloader->config.use_pinned_optimizer_offload, error, REFIT_ERR_UNSUPPORTED,
                  "regions that live on the host need use_pinned_optimizer_offload: true");
    const rft_region *first = &regions->items[0];
    for (uint32_t id = 1; id < regions->count; id++) {
        RFT_REFUSE_IF(regions->items[id].place != first->place, error, REFIT_ERR_STATE,
                      "region %s begins in the host image, and region %s is on the device: clear, "
                      "and add both again",
                      first->place == REFIT_ON_HOST ? first->name : regions->items[id].name,
                      first->place == REFIT_ON_HOST ? regions->items[id].name : first->name);
    }
    *away = first->place == REFIT_ON_HOST;
    return REFIT_OK;
}

refit_status refit_offloader_seal(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    if (refit_offloader_get_state(offloader) != REFIT_OPEN) return REFIT_OK;
    bool away;
    RFT_TRY(check_placement(offloader, &away, error));
    refit_status status = open_plan(offloader, &offloader->schedule, error);
    if (status != REFIT_OK) goto drop_staging;
    RFT_TRY_GOTO(check_pageable_budget(offloader, error), close_schedule);
    RFT_TRY_GOTO(rft_image_begin(offloader, error), close_schedule);
    if (away) rft_image_zero(offloader);
    set_state(offloader, away ? REFIT_OFFLOADED : REFIT_RESIDENT);
    forget_misfits(offloader);
    return REFIT_OK;

close_schedule:
    rft_schedule_close(&offloader->schedule);
drop_staging:
    rft_units_drop(offloader);
    (void)rft_masters_drop_staging(offloader, NULL); /* the close tries it again */
    return status;
}

refit_status refit_offloader_prepare(refit_offloader *offloader, uint32_t timeout_ms,
                                     refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state == REFIT_OPEN, error, REFIT_ERR_STATE,
                  "the offloader is not sealed: call refit_offloader_seal first");
    RFT_REFUSE_IF(offloader->closing, error, REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    return rft_image_await(offloader, timeout_ms, error);
}

/* Are the image and the plan unused? */
static refit_status check_unused(refit_offloader *offloader, refit_error *error)
{
    rft_lock(&offloader->lock);
    uint32_t read_locks = offloader->read_locks;
    rft_unlock(&offloader->lock);
    RFT_REFUSE_IF(read_locks != 0, error, REFIT_ERR_BUSY,
                  "%u read lock(s) still read the host image: release them first", read_locks);
    return rft_offloader_check_movers(offloader, error);
}

refit_status refit_offloader_unseal(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_RESIDENT, error, REFIT_ERR_STATE,
                  "only a RESIDENT offloader can be planned anew, and this one is %s",
                  refit_offloader_state_name(state));
    RFT_TRY(check_unused(offloader, error));
    set_state(offloader, REFIT_OPEN);
    rft_units_drop(offloader);
    rft_schedule_close(&offloader->schedule);
    return REFIT_OK;
}

refit_status refit_offloader_clear(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(
        state != REFIT_OPEN, error, REFIT_ERR_STATE,
        "regions can be removed only while OPEN, and the offloader is %s: unseal it first",
        refit_offloader_state_name(state));
    rft_region_table_clear(&offloader->regions);
    return REFIT_OK;
}

refit_status refit_offloader_trim(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    bool moving = state == REFIT_OFFLOADING || state == REFIT_RESTORING;
    RFT_REFUSE_IF(moving || rft_offloader_is_away(offloader), error, REFIT_ERR_STATE,
                  "the host image is in use (%s): restore before it is given back",
                  refit_offloader_state_name(state));
    RFT_TRY(check_unused(offloader, error));
    if (state == REFIT_OPEN) RFT_TRY(rft_masters_drop_staging(offloader, error));
    rft_units_reset(offloader);
    rft_units_trim(offloader);
    return rft_image_drop(offloader, error);
}

/* ---- Figures ---------------------------------------------------------------------------------
 * The offloader's figures, as refit_stats shows them. A caller compiled against an older list gets
 * as many as its struct has room for.
 */

static void add_directions(const rft_offload_figures *figures, refit_stats *stats)
{
    stats->offload_count = figures->count[RFT_OFFLOAD];
    stats->offload_copies_per_cycle = figures->copies_last;
    stats->offload_bytes_total = figures->bytes_total[RFT_OFFLOAD];
    stats->offload_bytes_last = figures->bytes_last[RFT_OFFLOAD];
    stats->offload_reclaimed_bytes_last = figures->reclaimed_last;
    stats->offload_seconds_last = rft_seconds(figures->last[RFT_OFFLOAD]);
    stats->offload_blocked_seconds_last = rft_seconds(figures->blocked[RFT_OFFLOAD]);
    stats->restore_count = figures->count[RFT_RESTORE];
    stats->restore_bytes_total = figures->bytes_total[RFT_RESTORE];
    stats->restore_bytes_last = figures->bytes_last[RFT_RESTORE];
    stats->restore_seconds_last = rft_seconds(figures->last[RFT_RESTORE]);
    stats->restore_blocked_seconds_last = rft_seconds(figures->blocked[RFT_RESTORE]);
    stats->offload_failures = figures->failures;
}

static void add_image(refit_offloader *offloader, refit_stats *stats)
{
    stats->offload_regions = offloader->regions.count;
    stats->host_payload_bytes = offloader->schedule.layout.payload_bytes;
    if (offloader->image == NULL) return;
    const uint64_t *units = offloader->unit_bytes;
    rft_host_arena_info info = rft_host_arena_describe(offloader->image);
    stats->host_bytes = info.bytes + units[0] + units[1];
    stats->host_ready_bytes = info.ready_bytes + units[0] + units[1];
    stats->host_pinned_bytes = info.pinned_bytes + units[1];
    stats->host_pageable_bytes = info.pageable_bytes + units[0];
    stats->host_huge_pages = info.huge_pages;
    stats->host_pin_seconds = info.seconds;
}

refit_status refit_offloader_stats(refit_offloader *offloader, refit_stats *stats,
                                   refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || stats == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_stats needs an offloader and a place for the figures");
    RFT_REFUSE_IF(stats->size < sizeof stats->size, error, REFIT_ERR_INVALID,
                  "refit_stats.size is %zu: call refit_stats_init first", stats->size);
    refit_stats whole = {0};
    size_t known = stats->size < sizeof whole ? stats->size : sizeof whole;
    memcpy(&whole, stats, known);
    whole.host_bytes = whole.host_ready_bytes = 0;
    whole.host_pinned_bytes = whole.host_pageable_bytes = 0;
    add_image(offloader, &whole);
    rft_window_stats(offloader, &whole);
    rft_host_step_stats(offloader, &whole);
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    add_directions(&offloader->figures, &whole);
    uint64_t pageable = rft_pageable_bytes(offloader);
    whole.host_bytes += pageable;
    whole.host_ready_bytes += pageable;
    whole.host_pageable_bytes += pageable;
    whole.read_locks = offloader->read_locks;
    rft_unlock(&offloader->lock);
    memcpy(stats, &whole, known);
    return REFIT_OK;
}

/* ---- The image, while a step changes it --------------------------------------------------- */

refit_status rft_offloader_claim_image(refit_offloader *offloader, rft_stepper *by,
                                       refit_error *error)
{
    rft_lock(&offloader->lock);
    uint32_t read_locks = offloader->read_locks;
    if (by != NULL && read_locks == 0) by->stepping = true;
    rft_unlock(&offloader->lock);
    RFT_REFUSE_IF(read_locks != 0, error, REFIT_ERR_BUSY,
                  "%u read lock(s) read the host image, which a step changes: release them first",
                  read_locks);
    return REFIT_OK;
}

void rft_offloader_release_image(refit_offloader *offloader, rft_stepper *by)
{
    rft_lock(&offloader->lock);
    by->stepping = false;
    rft_unlock(&offloader->lock);
}

bool rft_offloader_is_stepping(refit_offloader *offloader, const rft_stepper *by)
{
    rft_lock(&offloader->lock);
    bool stepping = by->stepping;
    rft_unlock(&offloader->lock);
    return stepping;
}

/*
 * ---- Read locks
 *
 * Readers of the host image. A count under the lock is all there is: while it is not zero, nothing
 * that would change or free the image begins. Copies no bytes.
 */

/* The masters of a region, decoded for a read lock. */
typedef struct read_copy {
    struct read_copy *next;
    refit_region_id region;
    void *bytes; /* owned */
} read_copy;

struct refit_read_lock {
    refit_offloader *offloader;
    read_copy **copies; /* owned; the first; guarded by the offloader's lock */
};

/* Does the image hold every byte that is kept? Not so after an offload or a restore that was
 * refused, when some regions never left or have been used since. Lock held. */
static bool image_is_whole(const refit_offloader *offloader)
{
    refit_offloader_state state = offloader->state;
    if (state != REFIT_OFFLOADED && state != REFIT_RESTORING && state != REFIT_FAILED) return false;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (region->policy == REFIT_KEEP && region->place != REFIT_ON_HOST) return false;
    }
    return true;
}

static void close_lock(refit_read_lock *lock)
{
    read_copy *copy = *lock->copies;
    while (copy != NULL) {
        read_copy *next = copy->next;
        rft_free(copy->bytes);
        rft_free(copy);
        copy = next;
    }
    rft_free(lock->copies);
    rft_free(lock);
}

static refit_status open_lock(refit_offloader *offloader, refit_read_lock **out, refit_error *error)
{
    refit_read_lock *lock = rft_calloc(1, sizeof *lock);
    read_copy **copies = rft_calloc(1, sizeof(read_copy *));
    if (lock == NULL || copies == NULL) {
        rft_free(lock);
        rft_free(copies);
        return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no host memory for a read lock");
    }
    *lock = (refit_read_lock){.offloader = offloader, .copies = copies};
    *out = lock;
    return REFIT_OK;
}

static const void *find_copy(const refit_read_lock *lock, refit_region_id region)
{
    rft_lock(&lock->offloader->lock);
    const read_copy *copy = *lock->copies;
    while (copy != NULL && copy->region != region) {
        copy = copy->next;
    }
    const void *bytes = copy == NULL ? NULL : copy->bytes;
    rft_unlock(&lock->offloader->lock);
    return bytes;
}

/* Two threads may read the same region at once; each then has a copy of its own. */
static refit_status read_masters(const refit_read_lock *lock, refit_region_id region,
                                 const void **bytes, refit_error *error)
{
    const rft_region *item = &lock->offloader->regions.items[region];
    *bytes = find_copy(lock, region);
    if (*bytes != NULL) return REFIT_OK;
    read_copy *copy = rft_calloc(1, sizeof *copy);
    void *masters = rft_calloc(item->bytes / 4, 4);
    refit_status status = REFIT_OK;
    if (copy == NULL || masters == NULL) {
        status = rft_fail(error, REFIT_ERR_HOST_MEMORY,
                          "no host memory for the %" PRIu64 " bytes of region %s, whose masters a "
                          "read lock reads",
                          item->bytes, item->name);
    }
    if (status == REFIT_OK) status = rft_masters_read(lock->offloader, item, masters, error);
    if (status != REFIT_OK) {
        rft_free(copy);
        rft_free(masters);
        return status;
    }
    *copy = (read_copy){.region = region, .bytes = masters};
    rft_lock(&lock->offloader->lock);
    copy->next = *lock->copies;
    *lock->copies = copy;
    rft_unlock(&lock->offloader->lock);
    *bytes = masters;
    return REFIT_OK;
}

refit_status refit_read_lock_acquire(refit_offloader *offloader, refit_read_lock **out,
                                     refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_read_lock_acquire needs an offloader and a place for the read lock");
    refit_read_lock *lock = NULL;
    RFT_TRY(open_lock(offloader, &lock, error));

    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    bool stepping = offloader->windows.stepping || offloader->cpu.stepping;
    bool ready = rft_image_is_ready(offloader);
    bool whole = image_is_whole(offloader);
    if (whole && ready && !stepping) offloader->read_locks++;
    refit_offloader_state state = offloader->state;
    rft_unlock(&offloader->lock);
    if (stepping && rft_device_is_lost(offloader->device)) {
        close_lock(lock);
        return rft_fail(error, REFIT_ERR_DEVICE,
                        "the device was lost during a step, so the host image holds some states "
                        "from before the step and some from after it");
    }
    if (stepping) {
        close_lock(lock);
        return rft_fail(error, REFIT_ERR_BUSY,
                        "a step changes the host image: end it, and call refit_window_wait or "
                        "refit_host_step_run first");
    }
    if (!whole) {
        close_lock(lock);
        return rft_fail(error, REFIT_ERR_STATE,
                        "the host image does not hold all states in %s: a read lock begins in "
                        "OFFLOADED or RESTORING, or in FAILED if all are away",
                        refit_offloader_state_name(state));
    }
    if (!ready) {
        close_lock(lock);
        return rft_fail(error, REFIT_ERR_BUSY,
                        "the host memory of the image is still coming: call "
                        "refit_offloader_prepare first");
    }
    *out = lock;
    return REFIT_OK;
}

refit_status refit_read_lock_read(const refit_read_lock *lock, refit_region_id region,
                                  const void **bytes, uint64_t *count, refit_error *error)
{
    RFT_REFUSE_IF(
        lock == NULL || bytes == NULL || count == NULL, error, REFIT_ERR_INVALID,
        "refit_read_lock_read needs a read lock and places for the bytes and their count");
    const rft_region_table *regions = &lock->offloader->regions;
    RFT_REFUSE_IF(region >= regions->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no region %u: there are %u", region, regions->count);
    const rft_region *item = &regions->items[region];
    RFT_REFUSE_IF(item->policy != REFIT_KEEP, error, REFIT_ERR_NOT_FOUND,
                  "region %s is not kept, so the image has no bytes of it", item->name);
    *count = item->bytes;
    if (item->coded) return read_masters(lock, region, bytes, error);
    *bytes = rft_image_of(lock->offloader, item);
    return REFIT_OK;
}

void refit_read_lock_release(refit_read_lock *lock)
{
    if (lock == NULL) return;
    refit_offloader *offloader = lock->offloader;
    rft_lock(&offloader->lock);
    offloader->read_locks--;
    rft_pageable_trim(offloader);
    rft_unlock(&offloader->lock);
    close_lock(lock);
}
