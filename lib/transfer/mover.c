/*
 * The mover: one operation at a time on a stream of its own.
 *
 *     IDLE ──start──► STARTING ──issued──► MOVING ──seen done──► DONE ──start──► STARTING
 *       ▲               │   │
 *       └─failed, over──┘   └──failed, hangs──► BROKEN
 *
 * IDLE      Nothing is under way, no status is kept.
 * STARTING  One thread issues, without the lock; all others wait until it has.
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
 * - An operation that fails to start never was: what it had issued is waited for, and only its
 *   caller hears of it.
 * - Nothing is cancelled: copies end by themselves. Close waits for them, or is refused.
 */
#include "transfer/mover.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "transfer/issue.h"
#include "transfer/trail.h"

#define SHORT_MS   30000 /* for what ends by itself, unless the device hangs */
#define FOREVER_MS UINT32_MAX

typedef enum mover_state { IDLE, STARTING, MOVING, DONE, BROKEN } mover_state;

struct rft_mover {
    refit_device *device; /* retained */
    rft_mutex lock;
    rft_cond changed;             /* the state, or the last waiter has left */
    mover_state state;            /* guarded by lock */
    uint32_t waiters;             /* threads in an event's wait; guarded by lock */
    refit_status status;          /* in DONE and BROKEN; guarded by lock */
    refit_error failure;          /* its sentence; guarded by lock */
    atomic_int_fast64_t finished; /* when the last byte moved, or 0 */
    /* The thread that is STARTING writes these without the lock; else guarded by lock. */
    refit_stream_ref stream; /* owned; none after a failure: the next start opens it */
    rft_trail trail;
};

/* ---- Issuing, by the one thread that starts ---------------------------------------------- */

/* On the stream's thread. */
static void note_finish(void *user)
{
    rft_mover *mover = user;
    atomic_store(&mover->finished, rft_now());
}

static refit_status issue(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                          rft_copy_order order, refit_error *error)
{
    if (mover->stream.native == NULL) {
        RFT_TRY(refit_stream_open(mover->device, &mover->stream, error));
    }
    RFT_TRY(rft_trail_begin(&mover->trail, plan, after, mover->stream, error));
    RFT_TRY(rft_issue_plan(&mover->trail, plan, mover->stream, order, error));
    refit_status status =
        refit_stream_call(mover->device, mover->stream, note_finish, mover, error);
    if (status != REFIT_OK && status != REFIT_ERR_UNSUPPORTED) return status;
    return rft_trail_end(&mover->trail, mover->stream, error);
}

/* Whether the event is over; a wait that itself fails does not say so. */
static bool is_over(rft_mover *mover, rft_event *event)
{
    return rft_device_event_wait(mover->device, event, 0, NULL) != REFIT_ERR_TIMEOUT;
}

/* Waits for what was issued before a failure; false if it hangs. A stream that takes no event is
 * closed: that waits too, and needs nothing. */
static bool drain(rft_mover *mover)
{
    if (mover->stream.native == NULL) return true;
    if (rft_trail_end(&mover->trail, mover->stream, NULL) == REFIT_OK) {
        (void)rft_device_event_wait(mover->device, mover->trail.all, SHORT_MS, NULL);
        if (is_over(mover, mover->trail.all)) return true;
    }
    if (refit_stream_close(mover->device, mover->stream, NULL) != REFIT_OK) return false;
    mover->stream = REFIT_STREAM_NONE;
    return true;
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

/* Only a thread that starts keeps others waiting here, and only while it issues. */
static refit_status wait_started(rft_mover *mover, int64_t deadline, refit_error *error)
{
    while (mover->state == STARTING) {
        RFT_REFUSE_IF(!rft_cond_wait(&mover->changed, &mover->lock, deadline), error,
                      REFIT_ERR_TIMEOUT, "the copies were not yet issued when the time was up");
    }
    return REFIT_OK;
}

/* The last event is done with `last` and its sentence: the operation is over. */
static void complete(rft_mover *mover, refit_status last, const refit_error *sentence)
{
    mover->failure = *sentence;
    mover->status = rft_trail_outcome(&mover->trail, last, &mover->failure);
    if (atomic_load(&mover->finished) == 0) atomic_store(&mover->finished, rft_now());
    mover->state = DONE;
    rft_cond_wake_all(&mover->changed);
}

static refit_status answer(const rft_mover *mover, refit_error *error)
{
    if (mover->state != DONE && mover->state != BROKEN) return REFIT_OK;
    if (mover->status != REFIT_OK && error != NULL) *error = mover->failure;
    return mover->status;
}

static refit_status wait_all(rft_mover *mover, int64_t deadline, refit_error *error)
{
    refit_error sentence = {0};
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != MOVING) return answer(mover, error);
    refit_status last = wait_event(mover, mover->trail.all, deadline, &sentence);
    bool over = last == REFIT_OK || (last != REFIT_ERR_TIMEOUT && is_over(mover, mover->trail.all));
    if (mover->state == MOVING && !over) {
        if (error != NULL) *error = sentence;
        return last;
    }
    if (mover->state == MOVING) complete(mover, last, &sentence);
    return answer(mover, error);
}

static refit_status wait_group(rft_mover *mover, uint32_t group, int64_t deadline,
                               refit_error *error)
{
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != MOVING && mover->state != DONE) return answer(mover, error);
    if (!mover->trail.groups[group].used) return REFIT_OK;
    /* What came before may have failed long ago: that is told once the group's copies are over. */
    rft_event *event = mover->trail.events[group];
    refit_status own = wait_event(mover, event, deadline, error);
    if (own == REFIT_ERR_TIMEOUT || (own != REFIT_OK && !is_over(mover, event))) return own;
    return rft_trail_group_outcome(&mover->trail, group, error);
}

static refit_status check_group(uint32_t group, refit_error *error)
{
    RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                  "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
    return REFIT_OK;
}

/* ---- The calls --------------------------------------------------------------------------- */

refit_status rft_mover_open(refit_device *device, rft_mover **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    rft_mover *mover = rft_calloc(1, sizeof *mover);
    RFT_REFUSE_IF(mover == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a mover");
    mover->device = device;
    atomic_init(&mover->finished, 0);
    RFT_TRY_GOTO(rft_mutex_open(&mover->lock, error), free_mover);
    RFT_TRY_GOTO(rft_cond_open(&mover->changed, error), close_lock);
    RFT_TRY_GOTO(rft_trail_open(&mover->trail, device, error), close_changed);
    RFT_TRY_GOTO(refit_stream_open(device, &mover->stream, error), close_trail);
    rft_device_retain(device);
    *out = mover;
    return REFIT_OK;

close_trail:
    rft_trail_close(&mover->trail);
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
    if (rft_mover_wait(mover, timeout_ms, error) == REFIT_ERR_TIMEOUT) return REFIT_ERR_TIMEOUT;
    if (mover->stream.native != NULL) {
        RFT_TRY(refit_stream_close(mover->device, mover->stream, error));
    }
    rft_trail_close(&mover->trail);
    rft_cond_close(&mover->changed);
    rft_mutex_close(&mover->lock);
    rft_device_release(mover->device);
    rft_free(mover);
    return REFIT_OK;
}

/* To STARTING, once everybody has picked up the status of the operation before. */
static refit_status begin_start(rft_mover *mover, refit_error *error)
{
    int64_t deadline = rft_deadline(SHORT_MS);
    (void)wait_all(mover, rft_now(), NULL);
    while ((mover->state == IDLE || mover->state == DONE) && mover->waiters > 0) {
        RFT_REFUSE_IF(
            !rft_cond_wait(&mover->changed, &mover->lock, deadline), error, REFIT_ERR_TIMEOUT,
            "%" PRIu32 " threads did not stop waiting for the last operation", mover->waiters);
    }
    if (mover->state == BROKEN) return answer(mover, error);
    RFT_REFUSE_IF(mover->state != IDLE && mover->state != DONE, error, REFIT_ERR_STATE,
                  "copies are under way: wait for them before the next are started");
    mover->state = STARTING;
    atomic_store(&mover->finished, 0);
    return REFIT_OK;
}

static void end_start(rft_mover *mover, mover_state state, refit_status status,
                      const refit_error *failure)
{
    rft_lock(&mover->lock);
    mover->state = state;
    mover->status = status;
    mover->failure = *failure;
    if (state == IDLE) atomic_store(&mover->finished, 0);
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
    status = issue(mover, plan, after, order, &failure);
    if (status == REFIT_OK) {
        end_start(mover, MOVING, REFIT_OK, &failure);
        return REFIT_OK;
    }
    end_start(mover, drain(mover) ? IDLE : BROKEN, status, &failure);
    if (error != NULL) *error = failure;
    return status;
}

refit_status rft_mover_wait(rft_mover *mover, uint32_t timeout_ms, refit_error *error)
{
    rft_lock(&mover->lock);
    refit_status status = wait_all(mover, rft_deadline(timeout_ms), error);
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

/* Queues the wait with the lock held, so that the event stays where it is; that does not block. */
static refit_status join_event(rft_mover *mover, rft_event *event, refit_stream_ref stream,
                               refit_error *error)
{
    if (mover->state != MOVING) return mover->state == BROKEN ? answer(mover, error) : REFIT_OK;
    return rft_device_event_join(mover->device, event, stream, error);
}

refit_status rft_mover_join(rft_mover *mover, refit_stream_ref stream, refit_error *error)
{
    if (stream.native == NULL) return rft_mover_wait(mover, FOREVER_MS, error);
    rft_lock(&mover->lock);
    refit_status status = wait_started(mover, rft_deadline(SHORT_MS), error);
    if (status == REFIT_OK) status = join_event(mover, mover->trail.all, stream, error);
    rft_unlock(&mover->lock);
    return status;
}

refit_status rft_mover_join_group(rft_mover *mover, uint32_t group, refit_stream_ref stream,
                                  refit_error *error)
{
    if (stream.native == NULL) return rft_mover_wait_group(mover, group, FOREVER_MS, error);
    RFT_TRY(check_group(group, error));
    rft_lock(&mover->lock);
    refit_status status = wait_started(mover, rft_deadline(SHORT_MS), error);
    if (status == REFIT_OK && mover->trail.groups[group].used) {
        status = join_event(mover, mover->trail.events[group], stream, error);
    }
    rft_unlock(&mover->lock);
    return status;
}

int64_t rft_mover_finished_at(const rft_mover *mover)
{
    return atomic_load(&mover->finished);
}
