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
 * - The first thread that sees the last event done completes the operation. No thread of refit
 *   watches, and a late look loses nothing: the stream itself notes the time.
 * - Every call that waits, and every call that asks until the next start, gets the same status and
 *   sentence. A start first lets the waiters of the operation before it pick up theirs (they no
 *   longer block on anything), so no event moves under a waiter.
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

/* ---- Completion: the events of one operation -------------------------------------------------
 * The events that one operation leaves on its stream, and its status, which is read off them.
 *
 * One event stands on the caller's stream, one behind the last batch of each group, one behind
 * everything. The device gives a failure to the event behind it, once; a group's batches may lie
 * between events of other groups. So the status of a group is the first failure of any event from
 * its first batch to its own event, and the status of all that of any event. The caller's stream
 * counts first in both, since the operation moves what that stream has made.
 *
 * No lock: one thread records, then any thread reads; the mover keeps the two apart. An index into
 * `recorded` is a place in the order of the stream, so "from its first batch to its own event" is a
 * range of it. Knows nothing of waiters or time.
 */

typedef struct rft_completion_group {
    bool used;
    uint32_t last_batch;
    uint32_t first_event; /* in `recorded`: the first behind its first batch */
    uint32_t own_event;   /* behind its last batch */
} rft_completion_group;

typedef struct rft_completion {
    refit_device *device; /* borrowed */
    bool follows;         /* `before` belongs to this operation */
    rft_event *before;
    rft_event *all;
    rft_event *events[REFIT_GROUPS]; /* by group */
    rft_completion_group groups[REFIT_GROUPS];
    uint32_t recorded[REFIT_GROUPS]; /* groups in the order of their events */
    uint32_t recorded_count;
} rft_completion;

static refit_status open_groups(rft_completion *completion, refit_error *error)
{
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        RFT_TRY(rft_device_event_open(completion->device, &completion->events[group], error));
    }
    return REFIT_OK;
}

static void completion_close(rft_completion *completion)
{
    rft_device_event_close(completion->device, completion->before);
    rft_device_event_close(completion->device, completion->all);
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        rft_device_event_close(completion->device, completion->events[group]);
    }
}

/* Opens all events, so that recording allocates nothing. On failure nothing is owned. */
static refit_status completion_open(rft_completion *completion, refit_device *device,
                                    refit_error *error)
{
    refit_status status;
    memset(completion, 0, sizeof *completion);
    completion->device = device;
    RFT_TRY_GOTO(rft_device_event_open(device, &completion->before, error), close_events);
    RFT_TRY_GOTO(rft_device_event_open(device, &completion->all, error), close_events);
    RFT_TRY_GOTO(open_groups(completion, error), close_events);
    return REFIT_OK;

close_events:
    completion_close(completion);
    return status;
}

static refit_status mark_groups(rft_completion *completion, const rft_plan *plan,
                                refit_error *error)
{
    memset(completion->groups, 0, sizeof completion->groups);
    completion->recorded_count = 0;
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        uint32_t group = plan->batches[i].group;
        RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                      "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
        completion->groups[group].last_batch = i;
    }
    return REFIT_OK;
}

/* A new operation that submits `plan` on `stream` behind what `after` has queued.
 * REFIT_ERR_INVALID for a group that is not below REFIT_GROUPS. For REFIT_STREAM_NONE there is
 * nothing to follow: all that the caller did is done. */
static refit_status completion_begin(rft_completion *completion, const rft_plan *plan,
                                     refit_stream_ref after, refit_stream_ref stream,
                                     refit_error *error)
{
    completion->follows = false;
    RFT_TRY(mark_groups(completion, plan, error));
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(completion->device, completion->before, after, error));
    completion->follows = true;
    return rft_device_event_join(completion->device, completion->before, stream, error);
}

/* Around each batch, in order. */
static void completion_enter(rft_completion *completion, const rft_plan *plan, uint32_t batch)
{
    rft_completion_group *group = &completion->groups[plan->batches[batch].group];
    if (!group->used) group->first_event = completion->recorded_count;
    group->used = true;
}

static refit_status completion_leave(rft_completion *completion, const rft_plan *plan,
                                     uint32_t batch, refit_stream_ref stream, refit_error *error)
{
    uint32_t number = plan->batches[batch].group;
    rft_completion_group *group = &completion->groups[number];
    if (batch != group->last_batch) return REFIT_OK;
    RFT_TRY(rft_device_event_record(completion->device, completion->events[number], stream, error));
    group->own_event = completion->recorded_count;
    completion->recorded[completion->recorded_count++] = number;
    return REFIT_OK;
}

/* Behind everything. */
static refit_status completion_end(rft_completion *completion, refit_stream_ref stream,
                                   refit_error *error)
{
    return rft_device_event_record(completion->device, completion->all, stream, error);
}

/* The first failure among the caller's stream and the events from place `from` up to `to`, all of
 * which are over. */
static refit_status first_failure(rft_completion *completion, uint32_t from, uint32_t to,
                                  refit_error *error)
{
    refit_status status = REFIT_OK;
    if (completion->follows)
        status = rft_device_event_wait(completion->device, completion->before, 0, error);
    for (uint32_t i = from; i < to && status == REFIT_OK; i++) {
        rft_event *event = completion->events[completion->recorded[i]];
        status = rft_device_event_wait(completion->device, event, 0, error);
    }
    return status;
}

/* The operation's status, once the last event is done; `last` is the status of that event. */
static refit_status completion_outcome(rft_completion *completion, refit_status last,
                                       refit_error *error)
{
    refit_error earlier;
    refit_status status = first_failure(completion, 0, completion->recorded_count, &earlier);
    if (status == REFIT_OK) return last;
    if (error != NULL) *error = earlier;
    return status;
}

/* The group's status, once its event is done. */
static refit_status completion_group_outcome(rft_completion *completion, uint32_t group,
                                             refit_error *error)
{
    const rft_completion_group *part = &completion->groups[group];
    return first_failure(completion, part->first_event, part->own_event + 1, error);
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
 * rate limiter. A stretch of a master is coded before its copies, or decoded behind them, on the
 * same stream: so the next stretch may use the same memory. Knows nothing of waiters.
 */

/* What goes where, and how. */
typedef struct rft_submission {
    const rft_plan *plan;
    refit_stream_ref stream;
    rft_copy_order order;
    rft_completion *completion;
    rate_limiter *limiter; /* NULL: as fast as the link goes */
} rft_submission;

static refit_status submit_zeroes(const rft_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    const rft_copy *copies = &submission->plan->copies[batch->first];
    for (uint32_t i = 0; i < batch->count; i++) {
        RFT_TRY(rft_device_zero(submission->completion->device, submission->stream, copies[i].to,
                                copies[i].bytes, error));
    }
    return REFIT_OK;
}

static refit_status submit_copies(const rft_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    return rft_device_copy_batch(submission->completion->device, submission->stream,
                                 &submission->plan->copies[batch->first], batch->count,
                                 submission->order, error);
}

/* In calls of as many as the device takes. The memory of the device is used again by the next
 * stretch, so these are never read early. */
static refit_status submit_stretch(const rft_submission *submission, const rft_batch *batch,
                                   refit_error *error)
{
    uint32_t most = submission->plan->limits.batch_most;
    for (uint32_t done = 0; done < batch->count;) {
        uint32_t count = batch->count - done < most ? batch->count - done : most;
        RFT_TRY(rft_device_copy_batch(submission->completion->device, submission->stream,
                                      &submission->plan->copies[batch->first + done], count,
                                      RFT_COPY_STREAM, error));
        done += count;
    }
    return REFIT_OK;
}

/* The copies stand between what makes them and what reads them. */
static refit_status submit_recode(const rft_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    refit_device *device = submission->completion->device;
    const rft_recode *recode = batch->recode;
    const rft_master_job *job = &recode->job;
    rft_copy verdict = {.to = recode->verdict,
                        .from = job->verdict,
                        .bytes = sizeof *job->verdict,
                        .known_memory = true};
    if (recode->begins) {
        RFT_TRY(
            rft_device_zero(device, submission->stream, job->verdict, sizeof *job->verdict, error));
    }
    if (recode->out) RFT_TRY(rft_device_master_encode(device, submission->stream, job, error));
    RFT_TRY(submit_stretch(submission, batch, error));
    if (!recode->out) RFT_TRY(rft_device_master_decode(device, submission->stream, job, error));
    if (recode->verdict == NULL) return REFIT_OK;
    return rft_device_copy_batch(device, submission->stream, &verdict, 1, RFT_COPY_STREAM, error);
}

static refit_status submit_batch(const rft_submission *submission, const rft_batch *batch,
                                 refit_error *error)
{
    if (submission->plan->copies[batch->first].from == NULL)
        return submit_zeroes(submission, batch, error);
    if (batch->recode != NULL) return submit_recode(submission, batch, error);
    return submit_copies(submission, batch, error);
}

/* Where a step of the rate limiter begins, its wait; `*next` is then where the one behind it does.
 */
static refit_status submit_wait(const rft_submission *submission, uint32_t batch, uint32_t *next,
                                refit_error *error)
{
    rate_limiter *limiter = submission->limiter;
    if (limiter == NULL || batch < *next || !has_source(submission->plan, batch)) return REFIT_OK;
    *next = batch;
    (void)take_step(limiter, next);
    return limiter_put(limiter, submission->completion->device, submission->stream, error);
}

/* Takes no memory and does not wait. On failure some of it may be on the stream.
 * REFIT_ERR_UNSUPPORTED: there is a rate limiter, and streams of the device cannot call it. */
static refit_status submit_plan(const rft_submission *submission, refit_error *error)
{
    uint32_t next_step = 0;
    for (uint32_t i = 0; i < submission->plan->batch_count; i++) {
        RFT_TRY(submit_wait(submission, i, &next_step, error));
        completion_enter(submission->completion, submission->plan, i);
        RFT_TRY(submit_batch(submission, &submission->plan->batches[i], error));
        RFT_TRY(completion_leave(submission->completion, submission->plan, i, submission->stream,
                                 error));
    }
    return REFIT_OK;
}

/* ---- The mover ---------------------------------------------------------------------------- */

#define RFT_MOVER_SHORT_MS 30000 /* for what ends by itself, unless the device hangs */

typedef enum rft_mover_state {
    RFT_MOVER_IDLE,
    RFT_MOVER_STARTING,
    RFT_MOVER_MOVING,
    RFT_MOVER_DONE,
    RFT_MOVER_BROKEN,
} rft_mover_state;

struct rft_mover {
    refit_device *device; /* retained */
    rft_mutex lock;
    rft_cond changed;             /* the state, or the last waiter has left */
    rft_mover_state state;        /* guarded by lock */
    uint32_t waiters;             /* threads in an event's wait; guarded by lock */
    refit_status status;          /* in DONE and BROKEN; guarded by lock */
    refit_error failure;          /* its sentence; guarded by lock */
    atomic_int_fast64_t finished; /* when the last byte moved, or 0 */
    rate_limiter *limiter;        /* owned; NULL: as fast as the link goes */
    /* The thread that is STARTING writes these without the lock; else guarded by lock. */
    refit_stream_ref stream; /* owned; none after a failure: the next start opens it */
    rft_completion completion;
};

/* ---- Waiting ---------------------------------------------------------------------------------
 * The end of an operation is noticed exactly once, and returned to every waiter, as promised above.
 */

/* Is the event over? A wait that itself fails does not say so. */
static bool is_over(rft_mover *mover, rft_event *event)
{
    return rft_device_event_wait(mover->device, event, 0, NULL) != REFIT_ERR_TIMEOUT;
}

/* Nothing blocks on the device with the lock held, and no event moves while a thread waits for one.
 */
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

/* Waits only for a thread that starts an operation, and only while it submits. */
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
    mover->status = completion_outcome(&mover->completion, last, &mover->failure);
    if (atomic_load(&mover->finished) == 0) atomic_store(&mover->finished, rft_now());
    mover->state = RFT_MOVER_DONE;
    rft_cond_wake_all(&mover->changed);
}

static refit_status answer(const rft_mover *mover, refit_error *error)
{
    if (mover->state != RFT_MOVER_DONE && mover->state != RFT_MOVER_BROKEN) return REFIT_OK;
    if (mover->status != REFIT_OK && error != NULL) *error = mover->failure;
    return mover->status;
}

/* rft_mover_wait and what a finished or broken operation answers, with the lock held. */
static refit_status wait_all(rft_mover *mover, int64_t deadline, refit_error *error)
{
    refit_error sentence = {0};
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != RFT_MOVER_MOVING) return answer(mover, error);
    refit_status last = wait_event(mover, mover->completion.all, deadline, &sentence);
    bool over =
        last == REFIT_OK || (last != REFIT_ERR_TIMEOUT && is_over(mover, mover->completion.all));
    if (mover->state == RFT_MOVER_MOVING && !over) {
        if (error != NULL) *error = sentence;
        return last;
    }
    if (mover->state == RFT_MOVER_MOVING) complete(mover, last, &sentence);
    return answer(mover, error);
}

static refit_status wait_group(rft_mover *mover, uint32_t group, int64_t deadline,
                               refit_error *error)
{
    RFT_TRY(wait_started(mover, deadline, error));
    if (mover->state != RFT_MOVER_MOVING && mover->state != RFT_MOVER_DONE)
        return answer(mover, error);
    if (!mover->completion.groups[group].used) return REFIT_OK;
    /* Work before the group may have failed long ago: that is reported once the group's copies are
     * over. */
    rft_event *event = mover->completion.events[group];
    refit_status own = wait_event(mover, event, deadline, error);
    if (own == REFIT_ERR_TIMEOUT || (own != REFIT_OK && !is_over(mover, event))) return own;
    return completion_group_outcome(&mover->completion, group, error);
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
    bool broken = mover->state == RFT_MOVER_BROKEN;
    refit_status status = broken ? answer(mover, error) : REFIT_OK;
    rft_unlock(&mover->lock);
    return status;
}

bool rft_mover_is_moving(rft_mover *mover)
{
    rft_lock(&mover->lock);
    bool moving = mover->state == RFT_MOVER_STARTING || mover->state == RFT_MOVER_MOVING;
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
    if (mover->state == RFT_MOVER_BROKEN) return answer(mover, error);
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
    RFT_TRY(completion_begin(&mover->completion, plan, after, mover->stream, error));
    RFT_TRY(submit_plan(&(rft_submission){.plan = plan,
                                          .stream = mover->stream,
                                          .order = order,
                                          .completion = &mover->completion,
                                          .limiter = mover->limiter},
                        error));
    refit_status status =
        refit_stream_call(mover->device, mover->stream, note_finish, mover, error);
    if (status != REFIT_OK && status != REFIT_ERR_UNSUPPORTED) return status;
    return completion_end(&mover->completion, mover->stream, error);
}

/* Waits for what was submitted before a failure; false if it hangs. A stream that takes no event is
 * closed, which waits too and needs no event. */
static bool drain(rft_mover *mover)
{
    if (mover->stream.native == NULL) return true;
    limiter_hurry(mover->limiter);
    if (completion_end(&mover->completion, mover->stream, NULL) == REFIT_OK) {
        (void)rft_device_event_wait(mover->device, mover->completion.all, RFT_MOVER_SHORT_MS, NULL);
        if (is_over(mover, mover->completion.all)) return true;
    }
    if (refit_stream_close(mover->device, mover->stream, NULL) != REFIT_OK) return false;
    mover->stream = REFIT_STREAM_NONE;
    return true;
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
    RFT_TRY_GOTO(completion_open(&mover->completion, device, error), close_limiter);
    RFT_TRY_GOTO(refit_stream_open(device, &mover->stream, error), close_completion);
    rft_device_retain(device);
    *out = mover;
    return REFIT_OK;

close_completion:
    completion_close(&mover->completion);
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
    bool broken = rft_mover_check(mover, NULL) != REFIT_OK; /* by whatever, a timeout too */
    if (!broken && rft_mover_wait(mover, timeout_ms, error) == REFIT_ERR_TIMEOUT) {
        return REFIT_ERR_TIMEOUT;
    }
    if (mover->stream.native != NULL) {
        RFT_TRY(refit_stream_close(mover->device, mover->stream, error));
    }
    completion_close(&mover->completion);
    limiter_close(mover->limiter);
    rft_cond_close(&mover->changed);
    rft_mutex_close(&mover->lock);
    rft_device_release(mover->device);
    rft_free(mover);
    return REFIT_OK;
}

/* To STARTING, once all waiters have picked up the status of the operation before. */
static refit_status begin_start(rft_mover *mover, refit_error *error)
{
    int64_t deadline = rft_deadline(RFT_MOVER_SHORT_MS);
    (void)wait_all(mover, rft_now(), NULL);
    while ((mover->state == RFT_MOVER_IDLE || mover->state == RFT_MOVER_DONE) &&
           mover->waiters > 0) {
        RFT_REFUSE_IF(
            !rft_cond_wait(&mover->changed, &mover->lock, deadline), error, REFIT_ERR_TIMEOUT,
            "%" PRIu32 " threads did not stop waiting for the last operation", mover->waiters);
    }
    if (mover->state == RFT_MOVER_BROKEN) return answer(mover, error);
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
    status = submit_all(mover, plan, after, order, &failure);
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
    limiter_hurry(mover->limiter);
}
