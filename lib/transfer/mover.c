/*
 * The mover: one operation at a time on a stream of its own.
 *
 *     IDLE ──start──► STARTING ──submitted──► MOVING ──seen done──► IDLE
 *                        │   │                  │
 *          IDLE ◄─failed─┘   └─failed, hangs──► BROKEN ◄─lost
 *
 * IDLE      Nothing is under way; all copies so far have ended well.
 * STARTING  One thread submits, without the lock; all others wait until it has.
 * MOVING    All is on the stream; no event moves.
 * BROKEN    The device is lost, or copies may be under way that cannot be waited for. Every wait
 *           answers the sentence that says which; only close is left.
 *
 * Completion, exactly once:
 * - The first thread that sees the last event done completes the operation. No thread of refit
 *   watches, and a late look loses nothing: the stream itself notes the time.
 * - A start first lets the waiters of the operation before it go (they no longer block on
 *   anything), so no event moves under a waiter.
 * - An operation that fails to start leaves no trace: the copies that it had submitted are waited
 *   for, and only its caller gets the failure.
 * - No copy is cancelled: copies end by themselves. Close waits for them, or is refused.
 */
#include "transfer/mover.h"

#include <inttypes.h>
#include <string.h>

#include <refit/offload.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/thread.h"
#include "transfer/plan.h"

/* ---- The events of one operation -------------------------------------------------------------
 * One stands on the caller's stream, one after the last batch of each group, one after
 * everything. No lock: one thread records, then any thread reads; the mover keeps the two apart.
 */

typedef struct mover_events {
    refit_device *device; /* borrowed */
    rft_event *before;    /* on the caller's stream */
    rft_event *all;
    rft_event *groups[REFIT_GROUPS];
    uint32_t last_batch[REFIT_GROUPS];
    bool used[REFIT_GROUPS]; /* the operation has batches of the group */
} mover_events;

static void close_events(mover_events *events)
{
    rft_device_event_close(events->device, events->before);
    rft_device_event_close(events->device, events->all);
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        rft_device_event_close(events->device, events->groups[group]);
    }
}

static refit_status open_each(mover_events *events, refit_error *error)
{
    RFT_TRY(rft_device_event_open(events->device, &events->before, error));
    RFT_TRY(rft_device_event_open(events->device, &events->all, error));
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        RFT_TRY(rft_device_event_open(events->device, &events->groups[group], error));
    }
    return REFIT_OK;
}

/* Opens all events, so that recording allocates nothing. On failure nothing is owned. */
static refit_status open_events(mover_events *events, refit_device *device, refit_error *error)
{
    *events = (mover_events){.device = device};
    refit_status status = open_each(events, error);
    if (status != REFIT_OK) close_events(events);
    return status;
}

static refit_status mark_groups(mover_events *events, const rft_plan *plan, refit_error *error)
{
    memset(events->used, 0, sizeof events->used);
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        uint32_t group = plan->batches[i].group;
        RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                      "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
        events->used[group] = true;
        events->last_batch[group] = i;
    }
    return REFIT_OK;
}

/* Makes `stream` wait for what `after` has queued. For REFIT_STREAM_NONE there is nothing to wait
 * for: all that the caller did is done. */
static refit_status follow(const mover_events *events, refit_stream_ref after,
                           refit_stream_ref stream, refit_error *error)
{
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(events->device, events->before, after, error));
    return rft_device_event_join(events->device, events->before, stream, error);
}

/* ---- The rate limiter ------------------------------------------------------------------------
 * Holds a stream back between batches, so that an operation takes no more of the link than
 * offload.rate_limit, on average over two of its steps.
 *
 * The stream itself stands: a call on it, on the stream's thread, returns once the bytes of the
 * step before it were due at the given rate. A step is a batch, and steps are short
 * (rft_mover_step_bytes bounds a batch), so other calls on the device do not wait long. An
 * operation of many batches has longer steps: CUDA's queue of a stream takes 56 host functions with
 * copies between them, and the call that brings one more waits, with the thread that starts the
 * operation. Calls run one after the other, so the place of the operation is known without a
 * question to the device. A stream that was held up by other work makes up for one step at most:
 * the limit is there for that work. Knows nothing of events or waiters.
 */

#define STEPS_A_SECOND 20u
#define STEPS_MOST     24u /* of one operation: two may be under way, if one queue has all calls */
#define LEAST_STEP     UINT64_C(65536)

typedef struct rate_limiter {
    uint64_t rate;
    rft_mutex lock;
    rft_cond hurried;
    bool hurry;           /* guarded by lock, like the rest */
    const rft_plan *plan; /* of the operation under way */
    uint64_t step_bytes;  /* of a step, at least; 0: each batch is one. Set before the first call */
    uint32_t at;          /* the first batch of its next step */
    int64_t due;          /* when that one may begin; 0: at once, as the first */
} rate_limiter;

/* `rate`: bytes a second; 0: no rate limiter (`*out` is NULL). */
static refit_status limiter_open(uint64_t rate, rate_limiter **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    *out = NULL;
    if (rate == 0) return REFIT_OK;
    rate_limiter *limiter = rft_calloc(1, sizeof *limiter);
    RFT_REFUSE_IF(limiter == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a rate limiter");
    limiter->rate = rate;
    RFT_TRY_GOTO(rft_mutex_open(&limiter->lock, error), free_limiter);
    RFT_TRY_GOTO(rft_cond_open(&limiter->hurried, error), close_lock);
    *out = limiter;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&limiter->lock);
free_limiter:
    rft_free(limiter);
    return status;
}

/* No call of it may be on a stream any more. NULL is allowed. */
static void limiter_close(rate_limiter *limiter)
{
    if (limiter == NULL) return;
    rft_cond_close(&limiter->hurried);
    rft_mutex_close(&limiter->lock);
    rft_free(limiter);
}

uint64_t rft_mover_step_bytes(uint64_t rate)
{
    return rate == 0 ? 0 : rft_max_u64(rate / STEPS_A_SECOND, LEAST_STEP);
}

/* Zeroes have no source, and are not limited. */
static bool has_source(const rft_plan *plan, uint32_t batch)
{
    return plan->copies[plan->batches[batch].first].from != NULL;
}

static uint64_t step_bytes_of(const rft_plan *plan)
{
    uint64_t bytes = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        if (!has_source(plan, i)) continue;
        bytes += plan->batches[i].bytes;
        count++;
    }
    return count <= STEPS_MOST ? 0 : bytes / STEPS_MOST + 1;
}

/* A new operation begins; the plan must stay until its last call has run. */
static void limiter_begin(rate_limiter *limiter, const rft_plan *plan)
{
    rft_lock(&limiter->lock);
    limiter->hurry = false;
    limiter->plan = plan;
    limiter->step_bytes = step_bytes_of(plan);
    limiter->at = 0;
    limiter->due = 0;
    rft_unlock(&limiter->lock);
}

/* The bytes of the step that begins at batch `*at`, which then is the first of the next. */
static uint64_t take_step(const rate_limiter *limiter, uint32_t *at)
{
    const rft_plan *plan = limiter->plan;
    uint64_t bytes = 0;
    for (; *at < plan->batch_count; ++*at) {
        if (!has_source(plan, *at)) continue;
        if (bytes > 0 && bytes >= limiter->step_bytes) break;
        bytes += plan->batches[*at].bytes;
    }
    return bytes;
}

static int64_t time_of(const rate_limiter *limiter, uint64_t bytes)
{
    return (int64_t)((double)bytes / (double)limiter->rate * 1e9);
}

/* The delay of a batch that begins `now`, as far as it is made up for. */
static int64_t made_up(const rate_limiter *limiter, int64_t now)
{
    if (limiter->due == 0 || now < limiter->due) return 0;
    int64_t late = now - limiter->due;
    uint64_t step = rft_max_u64(rft_mover_step_bytes(limiter->rate), limiter->step_bytes);
    int64_t most = time_of(limiter, step);
    return late < most ? late : most;
}

/* On the stream's thread. */
static void stand(void *user)
{
    rate_limiter *limiter = user;
    rft_lock(&limiter->lock);
    while (!limiter->hurry && rft_now() < limiter->due) {
        (void)rft_cond_wait(&limiter->hurried, &limiter->lock, limiter->due);
    }
    int64_t now = rft_now();
    limiter->due = now - made_up(limiter, now) + time_of(limiter, take_step(limiter, &limiter->at));
    rft_unlock(&limiter->lock);
}

/* Puts the wait of the next step on the stream. REFIT_ERR_UNSUPPORTED: its streams cannot call. */
static refit_status limiter_put(rate_limiter *limiter, refit_device *device,
                                refit_stream_ref stream, refit_error *error)
{
    refit_status status = refit_stream_call(device, stream, stand, limiter, error);
    RFT_REFUSE_IF(status == REFIT_ERR_UNSUPPORTED, error, status,
                  "offload.rate_limit needs a device whose streams can call back: set it to 0");
    return status;
}

/* What is under way goes on as fast as it can, before a close. Any thread. NULL is allowed. */
static void limiter_hurry(rate_limiter *limiter)
{
    if (limiter == NULL) return;
    rft_lock(&limiter->lock);
    limiter->hurry = true;
    rft_cond_wake_all(&limiter->hurried);
    rft_unlock(&limiter->lock);
}

/* ---- Submitting a plan -----------------------------------------------------------------------
 * From batches to calls of the device: a batch of copies in one call (the plan is made for no more
 * copies in a batch than the device takes), a batch of zeroes one by one, and before each batch the
 * rate limiter. A chunk of a master is coded before its copies, or decoded after them, on the
 * same stream: so the next chunk may use the same memory. Knows nothing of waiters.
 */

/* What goes where, and how. */
typedef struct mover_submission {
    const rft_plan *plan;
    refit_stream_ref stream;
    rft_copy_order order;
    const mover_events *events;
    rate_limiter *limiter; /* NULL: as fast as the link goes */
} mover_submission;

static refit_status submit_zeroes(const mover_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    const rft_copy *copies = &submission->plan->copies[batch->first];
    for (uint32_t i = 0; i < batch->count; i++) {
        RFT_TRY(rft_device_zero(submission->events->device, submission->stream, copies[i].to,
                                copies[i].bytes, error));
    }
    return REFIT_OK;
}

static refit_status submit_copies(const mover_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    return rft_device_copy_batch(submission->events->device, submission->stream,
                                 &submission->plan->copies[batch->first], batch->count,
                                 submission->order, error);
}

/* In calls of as many as the device takes. The memory of the device is used again by the next
 * chunk, so these are never read early. */
static refit_status submit_chunk(const mover_submission *submission, const rft_batch *batch,
                                 refit_error *error)
{
    uint32_t most = submission->plan->limits.batch_most;
    for (uint32_t done = 0; done < batch->count;) {
        uint32_t count = batch->count - done < most ? batch->count - done : most;
        RFT_TRY(rft_device_copy_batch(submission->events->device, submission->stream,
                                      &submission->plan->copies[batch->first + done], count,
                                      RFT_COPY_STREAM, error));
        done += count;
    }
    return REFIT_OK;
}

/* The copies stand between what makes them and what reads them. */
static refit_status submit_recode(const mover_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    refit_device *device = submission->events->device;
    const rft_recode *recode = batch->recode;
    const rft_master_job *job = &recode->job;
    rft_copy result = {.to = recode->result,
                       .from = job->result,
                       .bytes = sizeof *job->result,
                       .known_memory = true};
    if (recode->begins) {
        RFT_TRY(
            rft_device_zero(device, submission->stream, job->result, sizeof *job->result, error));
    }
    if (recode->out) RFT_TRY(rft_device_master_encode(device, submission->stream, job, error));
    RFT_TRY(submit_chunk(submission, batch, error));
    if (!recode->out) RFT_TRY(rft_device_master_decode(device, submission->stream, job, error));
    if (recode->result == NULL) return REFIT_OK;
    return rft_device_copy_batch(device, submission->stream, &result, 1, RFT_COPY_STREAM, error);
}

static refit_status submit_batch(const mover_submission *submission, const rft_batch *batch,
                                 refit_error *error)
{
    if (submission->plan->copies[batch->first].from == NULL)
        return submit_zeroes(submission, batch, error);
    if (batch->recode != NULL) return submit_recode(submission, batch, error);
    return submit_copies(submission, batch, error);
}

/* Where a step of the rate limiter begins, its wait; `*next` is then where the one after it does.
 */
static refit_status submit_wait(const mover_submission *submission, uint32_t batch, uint32_t *next,
                                refit_error *error)
{
    rate_limiter *limiter = submission->limiter;
    if (limiter == NULL || batch < *next || !has_source(submission->plan, batch)) return REFIT_OK;
    *next = batch;
    (void)take_step(limiter, next);
    return limiter_put(limiter, submission->events->device, submission->stream, error);
}

/* Takes no memory and does not wait. On failure some of it may be on the stream.
 * REFIT_ERR_UNSUPPORTED: there is a rate limiter, and streams of the device cannot call it. */
static refit_status submit_plan(const mover_submission *submission, refit_error *error)
{
    uint32_t next_step = 0;
    const mover_events *events = submission->events;
    for (uint32_t i = 0; i < submission->plan->batch_count; i++) {
        RFT_TRY(submit_wait(submission, i, &next_step, error));
        RFT_TRY(submit_batch(submission, &submission->plan->batches[i], error));
        uint32_t group = submission->plan->batches[i].group;
        if (events->last_batch[group] != i) continue;
        RFT_TRY(rft_device_event_record(events->device, events->groups[group], submission->stream,
                                        error));
    }
    return REFIT_OK;
}

/* ---- The mover ---------------------------------------------------------------------------- */

#define SHORT_MS 30000 /* for what ends by itself, unless the device hangs */

typedef enum mover_state {
    MOVER_IDLE,
    MOVER_STARTING,
    MOVER_MOVING,
    MOVER_BROKEN,
} mover_state;

struct rft_mover {
    refit_device *device; /* retained */
    rft_mutex lock;
    rft_cond changed;             /* the state, or the last waiter has left */
    mover_state state;            /* guarded by lock */
    uint32_t waiters;             /* threads in an event's wait; guarded by lock */
    refit_error failure;          /* why it is BROKEN; guarded by lock */
    atomic_int_fast64_t finished; /* when the last byte moved, or 0 */
    rate_limiter *limiter;        /* owned; NULL: as fast as the link goes */
    /* The thread that is STARTING writes these without the lock; else guarded by lock. */
    refit_stream_ref stream; /* owned; none after a failure: the next start opens it */
    mover_events events;
};

/* ---- Waiting ---------------------------------------------------------------------------------
 * The end of an operation is noticed exactly once, as promised above.
 */

static void set_state(rft_mover *mover, mover_state state)
{
    mover->state = state;
    rft_cond_wake_all(&mover->changed);
}

/* What there is to say while nothing is under way. */
static refit_status answer(const rft_mover *mover, refit_error *error)
{
    if (mover->state != MOVER_BROKEN) return REFIT_OK;
    if (error != NULL) *error = mover->failure;
    return REFIT_ERR_DEVICE;
}

/* Waits only for a thread that starts an operation, and only while it submits. */
static refit_status wait_started(rft_mover *mover, int64_t deadline, refit_error *error)
{
    while (mover->state == MOVER_STARTING) {
        RFT_REFUSE_IF(!rft_cond_wait(&mover->changed, &mover->lock, deadline), error,
                      REFIT_ERR_TIMEOUT, "the copies were not yet submitted when the time was up");
    }
    return REFIT_OK;
}

/* Nothing blocks on the device with the lock held, and no event moves while a thread waits for one.
 */
static refit_status wait_event(rft_mover *mover, rft_event *event, int64_t deadline,
                               refit_error *error)
{
    refit_error why = {0};
    mover->waiters++;
    rft_unlock(&mover->lock);
    refit_status status =
        rft_device_event_wait(mover->device, event, (uint32_t)rft_ms_until(deadline), &why);
    rft_lock(&mover->lock);
    mover->waiters--;
    if (mover->waiters == 0) rft_cond_wake_all(&mover->changed);
    if (status == REFIT_ERR_DEVICE && mover->state != MOVER_BROKEN) {
        mover->failure = why;
        set_state(mover, MOVER_BROKEN);
    }
    if (status != REFIT_OK && error != NULL) *error = why;
    return status;
}

/* rft_mover_wait, with the lock held. */
static refit_status wait_all(rft_mover *mover, int64_t deadline, refit_error *error)
{
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != MOVER_MOVING) return answer(mover, error);
    RFT_TRY(wait_event(mover, mover->events.all, deadline, error));
    if (mover->state != MOVER_MOVING) return answer(mover, error);
    if (atomic_load(&mover->finished) == 0) atomic_store(&mover->finished, rft_now());
    set_state(mover, MOVER_IDLE);
    return REFIT_OK;
}

static refit_status wait_group(rft_mover *mover, uint32_t group, int64_t deadline,
                               refit_error *error)
{
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != MOVER_MOVING) return answer(mover, error);
    if (!mover->events.used[group]) return REFIT_OK;
    return wait_event(mover, mover->events.groups[group], deadline, error);
}

static refit_status check_group(uint32_t group, refit_error *error)
{
    RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                  "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
    return REFIT_OK;
}

/* ---- Calls that wait and join ------------------------------------------------------------- */

refit_status rft_mover_check(rft_mover *mover, refit_error *error)
{
    rft_lock(&mover->lock);
    refit_status status = answer(mover, error);
    rft_unlock(&mover->lock);
    return status;
}

bool rft_mover_is_moving(rft_mover *mover)
{
    rft_lock(&mover->lock);
    bool moving = mover->state == MOVER_STARTING || mover->state == MOVER_MOVING;
    rft_unlock(&mover->lock);
    return moving;
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
    if (mover->state != MOVER_MOVING) return answer(mover, error);
    return rft_device_event_join(mover->device, event, stream, error);
}

refit_status rft_mover_join(rft_mover *mover, refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(check_joins(stream, error));
    rft_lock(&mover->lock);
    refit_status status = wait_started(mover, rft_deadline(SHORT_MS), error);
    if (status == REFIT_OK) status = join_event(mover, mover->events.all, stream, error);
    rft_unlock(&mover->lock);
    return status;
}

refit_status rft_mover_join_group(rft_mover *mover, uint32_t group, refit_stream_ref stream,
                                  refit_error *error)
{
    RFT_TRY(check_joins(stream, error));
    RFT_TRY(check_group(group, error));
    rft_lock(&mover->lock);
    refit_status status = wait_started(mover, rft_deadline(SHORT_MS), error);
    if (status == REFIT_OK && mover->events.used[group]) {
        status = join_event(mover, mover->events.groups[group], stream, error);
    }
    rft_unlock(&mover->lock);
    return status;
}

int64_t rft_mover_finished_at(const rft_mover *mover)
{
    return atomic_load(&mover->finished);
}

/* ---- Submitting, by the one thread that starts ---------------------------------------------- */

/* On the stream's thread. */
static void note_finish(void *user)
{
    rft_mover *mover = user;
    atomic_store(&mover->finished, rft_now());
}

static refit_status submit_all(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                               rft_copy_order order, refit_error *error)
{
    if (mover->stream.native == NULL) {
        RFT_TRY(refit_stream_open(mover->device, &mover->stream, error));
    }
    if (mover->limiter != NULL) limiter_begin(mover->limiter, plan);
    RFT_TRY(mark_groups(&mover->events, plan, error));
    RFT_TRY(follow(&mover->events, after, mover->stream, error));
    RFT_TRY(submit_plan(&(mover_submission){.plan = plan,
                                            .stream = mover->stream,
                                            .order = order,
                                            .events = &mover->events,
                                            .limiter = mover->limiter},
                        error));
    refit_status status =
        refit_stream_call(mover->device, mover->stream, note_finish, mover, error);
    if (status != REFIT_OK && status != REFIT_ERR_UNSUPPORTED) return status;
    return rft_device_event_record(mover->device, mover->events.all, mover->stream, error);
}

/* Waits for what was submitted before a failure; false if it hangs. A stream that takes no event is
 * closed, which waits too and needs no event. */
static bool drain(rft_mover *mover)
{
    rft_event *all = mover->events.all;
    if (mover->stream.native == NULL) return true;
    limiter_hurry(mover->limiter);
    if (rft_device_event_record(mover->device, all, mover->stream, NULL) == REFIT_OK &&
        rft_device_event_wait(mover->device, all, SHORT_MS, NULL) == REFIT_OK) {
        return true;
    }
    if (refit_stream_close(mover->device, mover->stream, NULL) != REFIT_OK) return false;
    mover->stream = REFIT_STREAM_NONE;
    return true;
}

/* What the mover is after a start that has failed with `failure`. Lock held. */
static void end_failed_start(rft_mover *mover, bool drained, const refit_error *failure)
{
    bool lost = failure->status == REFIT_ERR_DEVICE && rft_device_is_lost(mover->device);
    atomic_store(&mover->finished, 0);
    if (lost) {
        mover->failure = *failure;
    } else if (!drained) {
        (void)rft_fail(&mover->failure, REFIT_ERR_DEVICE,
                       "copies that could not be waited for may still use host memory of states: "
                       "close what they belong to (%s)",
                       failure->text);
    }
    set_state(mover, lost || !drained ? MOVER_BROKEN : MOVER_IDLE);
}

/* ---- Open, close, start ------------------------------------------------------------------- */

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
    RFT_TRY_GOTO(limiter_open(rate_limit, &mover->limiter, error), close_changed);
    RFT_TRY_GOTO(open_events(&mover->events, device, error), close_limiter);
    RFT_TRY_GOTO(refit_stream_open(device, &mover->stream, error), close_opened_events);
    rft_device_retain(device);
    *out = mover;
    return REFIT_OK;

close_opened_events:
    close_events(&mover->events);
close_limiter:
    limiter_close(mover->limiter);
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
    if (rft_mover_wait(mover, timeout_ms, error) == REFIT_ERR_TIMEOUT) return REFIT_ERR_TIMEOUT;
    if (mover->stream.native != NULL) {
        RFT_TRY(refit_stream_close(mover->device, mover->stream, error));
    }
    close_events(&mover->events);
    limiter_close(mover->limiter);
    rft_cond_close(&mover->changed);
    rft_mutex_close(&mover->lock);
    rft_device_release(mover->device);
    rft_free(mover);
    return REFIT_OK;
}

/* To STARTING, once all who wait for the operation before have gone. */
static refit_status begin_start(rft_mover *mover, refit_error *error)
{
    int64_t deadline = rft_deadline(SHORT_MS);
    (void)wait_all(mover, rft_now(), NULL);
    while (mover->state == MOVER_IDLE && mover->waiters > 0) {
        RFT_REFUSE_IF(
            !rft_cond_wait(&mover->changed, &mover->lock, deadline), error, REFIT_ERR_TIMEOUT,
            "%" PRIu32 " threads did not stop waiting for the last operation", mover->waiters);
    }
    RFT_TRY(answer(mover, error));
    RFT_REFUSE_IF(mover->state != MOVER_IDLE, error, REFIT_ERR_STATE,
                  "copies are under way: wait for them before the next are started");
    mover->state = MOVER_STARTING;
    atomic_store(&mover->finished, 0);
    return REFIT_OK;
}

refit_status rft_mover_start(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                             rft_copy_order order, refit_error *error)
{
    refit_error failure = {0};
    rft_lock(&mover->lock);
    refit_status status = begin_start(mover, error);
    rft_unlock(&mover->lock);
    RFT_TRY(status);
    status = submit_all(mover, plan, after, order, &failure);
    bool drained = status == REFIT_OK || drain(mover);
    rft_lock(&mover->lock);
    if (status == REFIT_OK) {
        set_state(mover, MOVER_MOVING);
    } else {
        end_failed_start(mover, drained, &failure);
    }
    rft_unlock(&mover->lock);
    if (status != REFIT_OK && error != NULL) *error = failure;
    return status;
}

void rft_mover_hurry(rft_mover *mover)
{
    limiter_hurry(mover->limiter);
}
