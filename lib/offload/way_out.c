/*
 * The verb offload: admitted under the lock, then planned and started without it. Until the copies
 * are under way a failure leaves everything as it was.
 */
#include "base/clock.h"
#include "offload/offloader.h"

/* What would be lost while a gradient accumulation is open? NULL for nothing. */
static const rft_region *find_loss(const refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (region->place == REFIT_ON_DEVICE && region->policy != REFIT_KEEP) return region;
    }
    return NULL;
}

static refit_status check_state(const refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader->state == REFIT_OPEN, error, REFIT_ERR_STATE,
                  "the offloader is not sealed: call refit_offloader_seal first");
    RFT_REFUSE_IF(offloader->state == REFIT_RESTORING, error, REFIT_ERR_STATE,
                  "states are still coming back: call refit_offloader_finish before the next "
                  "offload");
    return REFIT_OK;
}

static refit_status check_start(const refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader->closing, error, REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    RFT_REFUSE_IF(offloader->leases != 0, error, REFIT_ERR_BUSY,
                  "%u lease(s) still read the host image: release them before the next offload",
                  offloader->leases);
    const rft_region *loss = offloader->accumulating ? find_loss(offloader) : NULL;
    RFT_REFUSE_IF(loss != NULL, error, REFIT_ERR_STATE,
                  "an open gradient accumulation would lose region %s: close it first, or keep the "
                  "region",
                  loss->name);
    return REFIT_OK;
}

/* May it start (`*start`), or has it already? Takes the future. Lock held. */
static refit_status admit(refit_offloader *offloader, bool *start, refit_future **future,
                          refit_error *error)
{
    rft_operation_notice(offloader);
    RFT_TRY(check_state(offloader, error));
    *start = !rft_offloader_is_moving(offloader) && offloader->state != REFIT_OFFLOADED;
    if (*start) RFT_TRY(check_start(offloader, error));
    return future == NULL ? REFIT_OK : rft_future_take(offloader, *start, future, error);
}

static refit_status start_copies(refit_offloader *offloader, refit_stream_ref after,
                                 rft_operation *operation, refit_error *error)
{
    rft_schedule *schedule = &offloader->schedule;
    RFT_TRY(rft_offloader_check_movers(offloader, error));
    RFT_TRY(rft_image_await(offloader, offloader->config.offload_timeout_ms, error));
    char *image = offloader->image == NULL ? NULL : rft_host_arena_base(offloader->image);
    RFT_TRY(rft_schedule_offload(schedule, &offloader->regions, image, error));
    operation->mover = offloader->movers[RFT_OFFLOAD];
    operation->bytes = schedule->plan.bytes;
    operation->copies = schedule->plan.copy_count;
    return rft_mover_start(operation->mover, &schedule->plan, after, RFT_COPY_STREAM, error);
}

refit_status refit_offloader_offload(refit_offloader *offloader, refit_stream_ref after,
                                     refit_future **out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    rft_operation operation = {.direction = RFT_OFFLOAD, .began = rft_now()};
    refit_future *future = NULL;
    bool start = false;
    rft_lock(&offloader->lock);
    refit_status status = admit(offloader, &start, out == NULL ? NULL : &future, error);
    rft_unlock(&offloader->lock);
    if (status != REFIT_OK) return status;

    if (start) {
        status = offloader->config.use_pinned_optimizer_offload
                     ? start_copies(offloader, after, &operation, error)
                     : rft_pageable_offload(offloader, after, &operation, error);
        if (status != REFIT_OK) return rft_operation_not_begun(offloader, future, status);
        rft_operation_begin(offloader, &operation, future);
    }
    offloader->giving_back = true;
    if (out != NULL) *out = future;
    return REFIT_OK;
}
