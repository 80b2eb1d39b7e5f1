/*
 * mover_state: what mover.c (open, close, start) and mover_wait.c (completion, waits, joins) share.
 * Only they include this; the states are drawn in mover.c.
 */
#ifndef RFT_MOVER_STATE_H
#define RFT_MOVER_STATE_H

#include "base/thread.h"
#include "transfer/completion.h"
#include "transfer/mover.h"
#include "transfer/rate_limiter.h"

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
    rft_rate_limiter *limiter;    /* owned; NULL: as fast as the link goes */
    /* The thread that is STARTING writes these without the lock; else guarded by lock. */
    refit_stream_ref stream; /* owned; none after a failure: the next start opens it */
    rft_completion completion;
};

/* Is the event over? A wait that itself fails does not say so. */
bool rft_mover_is_over(rft_mover *mover, rft_event *event);

/* rft_mover_wait and what a finished or broken operation answers, with the lock held. */
refit_status rft_mover_wait_all(rft_mover *mover, int64_t deadline, refit_error *error);
refit_status rft_mover_answer(const rft_mover *mover, refit_error *error);

#endif
