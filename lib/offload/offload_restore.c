/*
 * The verbs of a cycle: offload, restore, wait.
 *
 * The first two are one function with a direction: admitted under the lock, then planned and
 * started without it. A failure before the copies are under way changes nothing, except that memory
 * which a restore has taken stays bound.
 *
 * wait waits for the operation under way and, after an offload, gives device memory back. That
 * happens there, on the caller's thread, and nowhere else: hooks run code of the caller's.
 */
#include "base/clock.h"
#include "offload/masters.h"
#include "offload/offloader.h"

/* ---- May it start? ------------------------------------------------------------------------ */

/* A region that an offload would lose while a gradient accumulation is open, or NULL. */
static const rft_region *find_loss(const refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (region->place == REFIT_ON_DEVICE && region->policy != REFIT_KEEP) return region;
    }
    return NULL;
}

static refit_status check_offload(const refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader->read_locks != 0, error, REFIT_ERR_BUSY,
                  "%u read lock(s) still read the host image: release them before the next offload",
                  offloader->read_locks);
    const rft_region *loss = offloader->accumulating ? find_loss(offloader) : NULL;
    RFT_REFUSE_IF(loss != NULL, error, REFIT_ERR_STATE,
                  "an open gradient accumulation would lose region %s: close it first, or keep the "
                  "region",
                  loss->name);
    return REFIT_OK;
}

/* REFIT_ERR_STATE: in this state the direction makes no sense. Lock held. */
static refit_status check_state(const refit_offloader *offloader, rft_direction direction,
                                refit_error *error)
{
    if (direction == RFT_OFFLOAD) {
        RFT_REFUSE_IF(offloader->state == REFIT_OPEN, error, REFIT_ERR_STATE,
                      "the offloader is not sealed: call refit_offloader_seal first");
        RFT_REFUSE_IF(offloader->state == REFIT_RESTORING, error, REFIT_ERR_STATE,
                      "states are still coming back: call refit_offloader_wait before the next "
                      "offload");
        return REFIT_OK;
    }
    RFT_REFUSE_IF(offloader->state == REFIT_OPEN, error, REFIT_ERR_STATE,
                  "the offloader is not sealed: nothing has left, so nothing can return");
    RFT_REFUSE_IF(offloader->state == REFIT_OFFLOADING, error, REFIT_ERR_STATE,
                  "states are still leaving: call refit_offloader_wait before the restore");
    RFT_REFUSE_IF(offloader->windows.stepping, error, REFIT_ERR_BUSY,
                  "a step in windows changes the host image: end it, and call refit_window_wait "
                  "before the restore");
    RFT_REFUSE_IF(offloader->cpu.stepping, error, REFIT_ERR_BUSY,
                  "a step on the CPU has changed a part of the host image: call "
                  "refit_host_step_run or refit_host_step_skip before the restore");
    return REFIT_OK;
}

/* Is there anything to start, or has it been started, or done, already? Lock held. */
static bool is_to_start(const refit_offloader *offloader, rft_direction direction)
{
    refit_offloader_state state = offloader->state;
    if (direction == RFT_OFFLOAD) return state != REFIT_OFFLOADING && state != REFIT_OFFLOADED;
    return state == REFIT_OFFLOADED || state == REFIT_FAILED;
}

/* May it start (`*start`), or has it already? Takes the future. Lock held. */
static refit_status admit(refit_offloader *offloader, rft_direction direction, bool *start,
                          refit_future **future, refit_error *error)
{
    rft_operation_notice(offloader);
    RFT_TRY(check_state(offloader, direction, error));
    *start = is_to_start(offloader, direction);
    RFT_REFUSE_IF((*start || direction == RFT_RESTORE) && offloader->closing, error,
                  REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    if (*start && direction == RFT_OFFLOAD) RFT_TRY(check_offload(offloader, error));
    return future == NULL ? REFIT_OK : rft_future_take(offloader, *start, future, error);
}

/* ---- Start -------------------------------------------------------------------------------- */

/* Finds the regions whose bytes the image has already. A region that is copied has no bytes there
 * that count until the copy has ended. */
static refit_status find_unchanged(refit_offloader *offloader, refit_stream_ref after,
                                   refit_error *error)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        bool asked = region->reuse && region->place == REFIT_ON_DEVICE;
        if (!asked || !offloader->caps.digests) continue;
        uint64_t sum = 0;
        RFT_TRY(rft_device_digest(offloader->device, after, region->memory, region->bytes, 0, &sum,
                                  error));
        region->unchanged = region->imaged && sum == region->left;
        region->imaged = region->unchanged;
        region->left = sum;
    }
    return REFIT_OK;
}

/* The copies of the pinned path. The bytes in the image do not change, so a restore may read them
 * at any time; the image's memory may still be coming for regions that begin there. */
static refit_status start_copies(refit_offloader *offloader, refit_stream_ref after,
                                 rft_operation *operation, refit_error *error)
{
    bool out = operation->direction == RFT_OFFLOAD;
    rft_schedule *schedule = &offloader->schedule;
    bool begins_there = rft_region_table_placement(&offloader->regions) == REFIT_PLACEMENT_HOST;
    RFT_TRY(rft_offloader_check_movers(offloader, error));
    if (out || begins_there) {
        RFT_TRY(rft_image_await(offloader, offloader->config.offload_timeout_ms, error));
    }
    if (out) RFT_TRY(find_unchanged(offloader, after, error));
    if (out) offloader->image_used = true;
    if (out) rft_units_reset(offloader);
    char *image = offloader->image == NULL ? NULL : rft_host_arena_base(offloader->image);
    RFT_TRY((out ? rft_schedule_offload : rft_schedule_restore)(schedule, &offloader->regions,
                                                                image, error));
    operation->mover = offloader->movers[operation->direction];
    operation->bytes = schedule->plan.bytes;
    operation->copies = schedule->plan.copy_count;
    operation->decodes = !out && schedule->chunks != 0;
    return rft_mover_start(operation->mover, &schedule->plan, after,
                           out ? RFT_COPY_STREAM : RFT_COPY_ANY, error);
}

static refit_status start_now(refit_offloader *offloader, refit_stream_ref after,
                              rft_operation *operation, refit_error *error)
{
    bool out = operation->direction == RFT_OFFLOAD;
    if (out) RFT_TRY(rft_offloader_renew_plan(offloader, error));
    if (!out) {
        offloader->giving_back = false;
        RFT_TRY(rft_regions_take(offloader, error));
    }
    if (offloader->config.use_pinned_optimizer_offload) {
        return start_copies(offloader, after, operation, error);
    }
    return out ? rft_pageable_offload(offloader, after, operation, error)
               : rft_pageable_restore(offloader, after, operation, error);
}

static refit_status start(refit_offloader *offloader, rft_direction direction,
                          refit_stream_ref after, refit_future **out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    rft_operation operation = {.direction = direction, .began = rft_now()};
    refit_future *future = NULL;
    bool begins = false;
    rft_lock(&offloader->lock);
    refit_status status = admit(offloader, direction, &begins, out == NULL ? NULL : &future, error);
    rft_unlock(&offloader->lock);
    if (status != REFIT_OK) return status;

    if (begins) {
        status = start_now(offloader, after, &operation, error);
        if (status != REFIT_OK) return rft_operation_not_begun(offloader, future, status);
        rft_operation_begin(offloader, &operation, future);
    }
    if (direction == RFT_OFFLOAD) offloader->giving_back = true;
    if (out != NULL) *out = future;
    return REFIT_OK;
}

refit_status refit_offloader_offload(refit_offloader *offloader, refit_stream_ref after,
                                     refit_future **out, refit_error *error)
{
    return start(offloader, RFT_OFFLOAD, after, out, error);
}

refit_status refit_offloader_restore(refit_offloader *offloader, refit_stream_ref after,
                                     refit_future **out, refit_error *error)
{
    return start(offloader, RFT_RESTORE, after, out, error);
}

/* ---- Wait --------------------------------------------------------------------------------- */

static refit_status give_back(refit_offloader *offloader, uint64_t number, refit_error *error)
{
    int64_t began = rft_now();
    refit_status status = rft_regions_give_back(offloader, error);
    rft_operation_count_blocked(offloader, number, began);
    if (status == REFIT_OK) offloader->giving_back = false;
    return status;
}

refit_status refit_offloader_wait(refit_offloader *offloader, uint32_t timeout_ms,
                                  refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    rft_lock(&offloader->lock);
    uint64_t number = offloader->operation.number;
    rft_unlock(&offloader->lock);
    RFT_TRY(rft_operation_wait(offloader, number, timeout_ms, error));

    rft_lock(&offloader->lock);
    refit_offloader_state state = offloader->state;
    refit_error failure = offloader->operation.failure;
    rft_unlock(&offloader->lock);
    if (state == REFIT_FAILED) {
        if (error != NULL) *error = failure;
        return (refit_status)failure.status;
    }
    if (state != REFIT_OFFLOADED || !offloader->giving_back) return REFIT_OK;
    return give_back(offloader, number, error);
}
