/*
 * The mover: one operation at a time on a stream of its own.
 *
 *     IDLE ──start──► STARTING ──submitted──► MOVING ──seen done──► DONE ──start──► STARTING
 *       ▲               │   │
 *       └─failed, over──┘   └──failed, hangs──► BROKEN
 *
 * IDLE      Nothing is under way, no status is kept.
 * STARTING  One thread submits, without the lock; all others wait until it has.
 * MOVING    All is on the stream; no event moves.
 * DONE      Nothing is under way; status and failure stay as they are until the next start.
 * BROKEN    Copies may be under way that cannot be waited for; only close is left.
 *
 * Completion, exactly once:
 * - Who completes: the first thread that sees the last event done, whoever it is. No thread of ours
 *   watches, and nothing is lost by looking late: the stream itself notes the time.
 * - Who hears of it: all who wait, and all who ask until the next start, get the same status and
 *   sentence. A start first lets those who still wait for the operation before it pick up theirs
 *   (they no longer block on anything), so no event moves under a waiter.
 * - An operation that fails to start never was: what it had submitted is waited for, and only its
 *   caller hears of it.
 * - Nothing is cancelled: copies end by themselves. Close waits for them, or is refused.
 *
 * Completion itself is in mover_wait.c.
 */
#include "transfer/mover.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "transfer/mover_state.h"
#include "transfer/submit.h"

/* ---- Issuing, by the one thread that starts ---------------------------------------------- */

/* On the stream's thread. */
static void note_finish(void *user)
{
    rft_mover *mover = user;
    atomic_store(&mover->finished, rft_now());
}

static refit_status submission(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                               rft_copy_order order, refit_error *error)
{
    if (mover->stream.native == NULL) {
        RFT_TRY(refit_stream_open(mover->device, &mover->stream, error));
    }
    if (mover->limiter != NULL) rft_rate_limiter_begin(mover->limiter, plan);
    RFT_TRY(rft_completion_begin(&mover->completion, plan, after, mover->stream, error));
    RFT_TRY(rft_submit_plan(&(rft_submission){.plan = plan,
                                              .stream = mover->stream,
                                              .order = order,
                                              .completion = &mover->completion,
                                              .limiter = mover->limiter},
                            error));
    refit_status status =
        refit_stream_call(mover->device, mover->stream, note_finish, mover, error);
    if (status != REFIT_OK && status != REFIT_ERR_UNSUPPORTED) return status;
    return rft_completion_end(&mover->completion, mover->stream, error);
}

/* Waits for what was submitted before a failure; false if it hangs. A stream that takes no event is
 * closed: that waits too, and needs nothing. */
static bool drain(rft_mover *mover)
{
    if (mover->stream.native == NULL) return true;
    rft_rate_limiter_hurry(mover->limiter);
    if (rft_completion_end(&mover->completion, mover->stream, NULL) == REFIT_OK) {
        (void)rft_device_event_wait(mover->device, mover->completion.all, RFT_MOVER_SHORT_MS, NULL);
        if (rft_mover_is_over(mover, mover->completion.all)) return true;
    }
    if (refit_stream_close(mover->device, mover->stream, NULL) != REFIT_OK) return false;
    mover->stream = REFIT_STREAM_NONE;
    return true;
}

/* ---- The calls --------------------------------------------------------------------------- */

refit_status rft_mover_open(refit_device *device, uint64_t rate_limit, rft_mover **out,
                            refit_error *error)
{
    refit_status status = REFIT_OK;
    rft_mover *mover = rft_calloc(1, sizeof *mover);
    RFT_REFUSE_IF(mover == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a mover");
    mover->device = device;
    atomic_init(&mover->finished, 0);
    RFT_TRY_GOTO(rft_mutex_open(&mover->lock, error), free_mover);
    RFT_TRY_GOTO(rft_cond_open(&mover->changed, error), close_lock);
    RFT_TRY_GOTO(rft_rate_limiter_open(rate_limit, &mover->limiter, error), close_changed);
    RFT_TRY_GOTO(rft_completion_open(&mover->completion, device, error), close_limiter);
    RFT_TRY_GOTO(refit_stream_open(device, &mover->stream, error), close_completion);
    rft_device_retain(device);
    *out = mover;
    return REFIT_OK;

close_completion:
    rft_completion_close(&mover->completion);
close_limiter:
    rft_rate_limiter_close(mover->limiter);
close_changed:
    rft_cond_close(&mover->changed);
close_lock:
    rft_mutex_close(&mover->lock);
free_mover:
    rft_free(mover);
    return status;
}

refit_status rft_mover_close(rft_mover *mover, uint32_t timeout_ms, refit_error *error)
{
    if (mover == NULL) return REFIT_OK;
    rft_mover_hurry(mover);
    bool broken = rft_mover_check(mover, NULL) != REFIT_OK; /* by whatever, a timeout too */
    if (!broken && rft_mover_wait(mover, timeout_ms, error) == REFIT_ERR_TIMEOUT) {
        return REFIT_ERR_TIMEOUT;
    }
    if (mover->stream.native != NULL) {
        RFT_TRY(refit_stream_close(mover->device, mover->stream, error));
    }
    rft_completion_close(&mover->completion);
    rft_rate_limiter_close(mover->limiter);
    rft_cond_close(&mover->changed);
    rft_mutex_close(&mover->lock);
    rft_device_release(mover->device);
    rft_free(mover);
    return REFIT_OK;
}

/* To STARTING, once everybody has picked up the status of the operation before. */
static refit_status begin_start(rft_mover *mover, refit_error *error)
{
    int64_t deadline = rft_deadline(RFT_MOVER_SHORT_MS);
    (void)rft_mover_wait_all(mover, rft_now(), NULL);
    while ((mover->state == RFT_MOVER_IDLE || mover->state == RFT_MOVER_DONE) &&
           mover->waiters > 0) {
        RFT_REFUSE_IF(
            !rft_cond_wait(&mover->changed, &mover->lock, deadline), error, REFIT_ERR_TIMEOUT,
            "%" PRIu32 " threads did not stop waiting for the last operation", mover->waiters);
    }
    if (mover->state == RFT_MOVER_BROKEN) return rft_mover_answer(mover, error);
    RFT_REFUSE_IF(mover->state != RFT_MOVER_IDLE && mover->state != RFT_MOVER_DONE, error,
                  REFIT_ERR_STATE,
                  "copies are under way: wait for them before the next are started");
    mover->state = RFT_MOVER_STARTING;
    atomic_store(&mover->finished, 0);
    return REFIT_OK;
}

static void end_start(rft_mover *mover, rft_mover_state state, refit_status status,
                      const refit_error *failure)
{
    rft_lock(&mover->lock);
    mover->state = state;
    mover->status = status;
    mover->failure = *failure;
    if (state == RFT_MOVER_IDLE) atomic_store(&mover->finished, 0);
    rft_cond_wake_all(&mover->changed);
    rft_unlock(&mover->lock);
}

refit_status rft_mover_start(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                             rft_copy_order order, refit_error *error)
{
    refit_error failure = {0};
    rft_lock(&mover->lock);
    refit_status status = begin_start(mover, error);
    rft_unlock(&mover->lock);
    RFT_TRY(status);
    status = submission(mover, plan, after, order, &failure);
    if (status == REFIT_OK) {
        end_start(mover, RFT_MOVER_MOVING, REFIT_OK, &failure);
        return REFIT_OK;
    }
    end_start(mover, drain(mover) ? RFT_MOVER_IDLE : RFT_MOVER_BROKEN, status, &failure);
    if (error != NULL) *error = failure;
    return status;
}

void rft_mover_hurry(rft_mover *mover)
{
    rft_rate_limiter_hurry(mover->limiter);
}
