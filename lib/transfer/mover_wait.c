/*
 * How the end of a mover's operation is noticed, and told: exactly once, as mover.c promises.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "transfer/mover_state.h"

bool rft_mover_is_over(rft_mover *mover, rft_event *event)
{
    return rft_device_event_wait(mover->device, event, 0, NULL) != REFIT_ERR_TIMEOUT;
}

/* ---- Completing, with the lock held ------------------------------------------------------ */

/* Nothing that is locked may block on the device, and no event may move while somebody does. */
static refit_status wait_event(rft_mover *mover, rft_event *event, int64_t deadline,
                               refit_error *error)
{
    mover->waiters++;
    rft_unlock(&mover->lock);
    refit_status status =
        rft_device_event_wait(mover->device, event, (uint32_t)rft_ms_until(deadline), error);
    rft_lock(&mover->lock);
    mover->waiters--;
    if (mover->waiters == 0) rft_cond_wake_all(&mover->changed);
    return status;
}

/* Only a thread that starts keeps others waiting here, and only while it submits. */
static refit_status wait_started(rft_mover *mover, int64_t deadline, refit_error *error)
{
    while (mover->state == RFT_MOVER_STARTING) {
        RFT_REFUSE_IF(!rft_cond_wait(&mover->changed, &mover->lock, deadline), error,
                      REFIT_ERR_TIMEOUT, "the copies were not yet submitted when the time was up");
    }
    return REFIT_OK;
}

/* The last event is done with `last` and its sentence: the operation is over. */
static void complete(rft_mover *mover, refit_status last, const refit_error *sentence)
{
    mover->failure = *sentence;
    mover->status = rft_completion_outcome(&mover->completion, last, &mover->failure);
    if (atomic_load(&mover->finished) == 0) atomic_store(&mover->finished, rft_now());
    mover->state = RFT_MOVER_DONE;
    rft_cond_wake_all(&mover->changed);
}

refit_status rft_mover_answer(const rft_mover *mover, refit_error *error)
{
    if (mover->state != RFT_MOVER_DONE && mover->state != RFT_MOVER_BROKEN) return REFIT_OK;
    if (mover->status != REFIT_OK && error != NULL) *error = mover->failure;
    return mover->status;
}

refit_status rft_mover_wait_all(rft_mover *mover, int64_t deadline, refit_error *error)
{
    refit_error sentence = {0};
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != RFT_MOVER_MOVING) return rft_mover_answer(mover, error);
    refit_status last = wait_event(mover, mover->completion.all, deadline, &sentence);
    bool over = last == REFIT_OK ||
                (last != REFIT_ERR_TIMEOUT && rft_mover_is_over(mover, mover->completion.all));
    if (mover->state == RFT_MOVER_MOVING && !over) {
        if (error != NULL) *error = sentence;
        return last;
    }
    if (mover->state == RFT_MOVER_MOVING) complete(mover, last, &sentence);
    return rft_mover_answer(mover, error);
}

static refit_status wait_group(rft_mover *mover, uint32_t group, int64_t deadline,
                               refit_error *error)
{
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != RFT_MOVER_MOVING && mover->state != RFT_MOVER_DONE)
        return rft_mover_answer(mover, error);
    if (!mover->completion.groups[group].used) return REFIT_OK;
    /* What came before may have failed long ago: that is told once the group's copies are over. */
    rft_event *event = mover->completion.events[group];
    refit_status own = wait_event(mover, event, deadline, error);
    if (own == REFIT_ERR_TIMEOUT || (own != REFIT_OK && !rft_mover_is_over(mover, event)))
        return own;
    return rft_completion_group_outcome(&mover->completion, group, error);
}

static refit_status check_group(uint32_t group, refit_error *error)
{
    RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                  "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
    return REFIT_OK;
}

/* ---- The calls --------------------------------------------------------------------------- */

refit_status rft_mover_check(rft_mover *mover, refit_error *error)
{
    rft_lock(&mover->lock);
    bool broken = mover->state == RFT_MOVER_BROKEN;
    refit_status status = broken ? rft_mover_answer(mover, error) : REFIT_OK;
    rft_unlock(&mover->lock);
    return status;
}

refit_status rft_mover_wait(rft_mover *mover, uint32_t timeout_ms, refit_error *error)
{
    rft_lock(&mover->lock);
    refit_status status = rft_mover_wait_all(mover, rft_deadline(timeout_ms), error);
    rft_unlock(&mover->lock);
    return status;
}

refit_status rft_mover_wait_group(rft_mover *mover, uint32_t group, uint32_t timeout_ms,
                                  refit_error *error)
{
    RFT_TRY(check_group(group, error));
    rft_lock(&mover->lock);
    refit_status status = wait_group(mover, group, rft_deadline(timeout_ms), error);
    rft_unlock(&mover->lock);
    return status;
}

static refit_status check_joins(refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(stream.native == NULL, error, REFIT_ERR_INVALID,
                  "the calling thread cannot be made to wait on the device: it waits itself");
    return REFIT_OK;
}

/* Queues the wait with the lock held, so that the event stays where it is; that does not block. */
static refit_status join_event(rft_mover *mover, rft_event *event, refit_stream_ref stream,
                               refit_error *error)
{
    if (mover->state == RFT_MOVER_BROKEN) return rft_mover_answer(mover, error);
    if (mover->state != RFT_MOVER_MOVING) return REFIT_OK;
    return rft_device_event_join(mover->device, event, stream, error);
}

refit_status rft_mover_join(rft_mover *mover, refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(check_joins(stream, error));
    rft_lock(&mover->lock);
    refit_status status = wait_started(mover, rft_deadline(RFT_MOVER_SHORT_MS), error);
    if (status == REFIT_OK) status = join_event(mover, mover->completion.all, stream, error);
    rft_unlock(&mover->lock);
    return status;
}

refit_status rft_mover_join_group(rft_mover *mover, uint32_t group, refit_stream_ref stream,
                                  refit_error *error)
{
    RFT_TRY(check_joins(stream, error));
    RFT_TRY(check_group(group, error));
    rft_lock(&mover->lock);
    refit_status status = wait_started(mover, rft_deadline(RFT_MOVER_SHORT_MS), error);
    if (status == REFIT_OK && mover->completion.groups[group].used) {
        status = join_event(mover, mover->completion.events[group], stream, error);
    }
    rft_unlock(&mover->lock);
    return status;
}

int64_t rft_mover_finished_at(const rft_mover *mover)
{
    return atomic_load(&mover->finished);
}
