/*
 * The verb restore: admitted under the lock; then memory is taken, and the copies are planned and
 * started, without it. Until they are under way a failure leaves the bytes where they were, and the
 * memory that was taken bound.
 */
#include "base/clock.h"
#include "offload/offloader.h"

/* May it start (`*start`), or has it already? Takes the future. Lock held. */
static refit_status admit(refit_offloader *offloader, bool *start, refit_future **future,
                          refit_error *error)
{
    rft_operation_notice(offloader);
    refit_offloader_state state = offloader->state;
    RFT_REFUSE_IF(state == REFIT_OPEN, error, REFIT_ERR_STATE,
                  "the offloader is not sealed: nothing has left, so nothing can return");
    RFT_REFUSE_IF(state == REFIT_OFFLOADING, error, REFIT_ERR_STATE,
                  "states are still leaving: call refit_offloader_finish before the restore");
    RFT_REFUSE_IF(offloader->closing, error, REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    *start = state == REFIT_OFFLOADED || state == REFIT_FAILED;
    return future == NULL ? REFIT_OK : rft_future_take(offloader, *start, future, error);
}

static refit_status start_copies(refit_offloader *offloader, refit_stream_ref after,
                                 rft_operation *operation, refit_error *error)
{
    rft_schedule *schedule = &offloader->schedule;
    RFT_TRY(rft_offloader_check_movers(offloader, error));
    char *image = offloader->image == NULL ? NULL : rft_host_arena_base(offloader->image);
    RFT_TRY(rft_schedule_restore(schedule, &offloader->regions, image, error));
    operation->mover = offloader->movers[RFT_RESTORE];
    operation->bytes = schedule->plan.bytes;
    operation->copies = schedule->plan.copy_count;
    return rft_mover_start(operation->mover, &schedule->plan, after, RFT_COPY_ANY, error);
}

static refit_status start_way(refit_offloader *offloader, refit_stream_ref after,
                              rft_operation *operation, refit_error *error)
{
    offloader->giving_back = false;
    RFT_TRY(rft_regions_take(offloader, error));
    return offloader->config.use_pinned_optimizer_offload
               ? start_copies(offloader, after, operation, error)
               : rft_pageable_restore(offloader, after, operation, error);
}

refit_status refit_offloader_restore(refit_offloader *offloader, refit_stream_ref after,
                                     refit_future **out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    rft_operation operation = {.direction = RFT_RESTORE, .began = rft_now()};
    refit_future *future = NULL;
    bool start = false;
    rft_lock(&offloader->lock);
    refit_status status = admit(offloader, &start, out == NULL ? NULL : &future, error);
    rft_unlock(&offloader->lock);
    if (status != REFIT_OK) return status;

    if (start) {
        status = start_way(offloader, after, &operation, error);
        if (status != REFIT_OK) return rft_operation_not_begun(offloader, future, status);
        rft_operation_begin(offloader, &operation, future);
    }
    if (out != NULL) *out = future;
    return REFIT_OK;
}
