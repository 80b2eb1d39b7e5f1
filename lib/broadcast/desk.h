/*
 * desk: where a subscriber's service thread and its caller meet.
 *
 * The service thread puts a committed version there and copies of what may be known; the caller
 * takes the version and leaves orders. One lock guards it, held for a few copies at most; neither
 * side ever waits for the other with it.
 */
#ifndef RFT_DESK_H
#define RFT_DESK_H

#include <stdatomic.h>

#include "base/thread.h"
#include "broadcast/session.h"

typedef enum rft_order_kind {
    RFT_ORDER_ACCEPT,
    RFT_ORDER_REFUSE,
    RFT_ORDER_RELEASE, /* the update is closed */
} rft_order_kind;

#define RFT_REASON_BYTES 161u /* 160 and a NUL */

typedef struct rft_order {
    rft_order_kind kind;
    refit_status code; /* of a refusal, with the next two */
    bool kept;
    char reason[RFT_REASON_BYTES];
} rft_order;

/* A version is delivered only when all orders about the one before it but its release have been
 * carried out, so no more than a release, a decision and a second release can wait. */
#define RFT_DESK_ORDERS 3u

typedef struct rft_desk {
    int ready_fd;          /* set while take would not wait */
    int wake_fd;           /* set while the service thread has something to look at */
    const char *endpoint;  /* where the trainer is to be; borrowed, set before the thread starts */
    atomic_bool cancelled; /* by rft_desk_cancel, until a take has said so */
    rft_mutex lock;
    rft_image *ready;                  /* guarded by lock */
    rft_session_report report;         /* guarded by lock */
    rft_order orders[RFT_DESK_ORDERS]; /* guarded by lock */
    uint32_t order_count;              /* guarded by lock */
    refit_device *device; /* guarded by lock; to be used from now on; NULL: nothing new */
    bool closing;         /* guarded by lock */
} rft_desk;

refit_status rft_desk_open(rft_desk *desk, refit_error *error);
void rft_desk_close(rft_desk *desk);

/* ---- The caller's side ---- */

/* Waits for a version and takes it. REFIT_ERR_TIMEOUT, REFIT_ERR_CANCELLED, or the final error. */
refit_status rft_desk_take(rft_desk *desk, uint32_t timeout_ms, rft_image **out,
                           refit_error *error);
/* Any thread, and safe in a signal handler. */
void rft_desk_cancel(rft_desk *desk);
/* About the update of `version`. */
void rft_desk_order(rft_desk *desk, const rft_order *order, uint64_t version);
/* The GPU whose memory may be shared. */
void rft_desk_bring(rft_desk *desk, refit_device *device);
/* Tells the service thread to leave. */
void rft_desk_shut(rft_desk *desk);
/* Any thread. */
void rft_desk_read(rft_desk *desk, rft_session_report *out);

/* ---- The service thread's side ---- */

void rft_desk_deliver(rft_desk *desk, rft_image *image);
/* False if it has been taken. */
bool rft_desk_withdraw(rft_desk *desk);
/* Takes the oldest order; false if there is none. */
bool rft_desk_next_order(rft_desk *desk, rft_order *out);
/* What was brought since; NULL: nothing. */
refit_device *rft_desk_take_device(rft_desk *desk);
/* Copies the report; while an order waits, the version stays what the caller has decided. False
 * once it is shut and no order is left. */
bool rft_desk_publish(rft_desk *desk, const rft_session_report *report);

#endif
