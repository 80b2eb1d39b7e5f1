/*
 * mailbox: the exchange between a subscriber's service thread and its caller.
 *
 * The service thread's session puts a committed version there, and the service thread a copy of the
 * session's report; the caller takes the version and leaves orders. One lock guards it, held for a
 * few copies at most; neither side ever waits for the other with it.
 */
#ifndef RFT_MAILBOX_H
#define RFT_MAILBOX_H

#include <stdatomic.h>

#include "base/thread.h"
#include "subscriber/images.h"
#include "wire/selection.h"

typedef enum rft_session_state {
    RFT_SESSION_CONNECTING,
    RFT_SESSION_JOINING,
    RFT_SESSION_CURRENT,
    RFT_SESSION_STAGING,
    RFT_SESSION_STAGED,
    RFT_SESSION_APPLYING,
} rft_session_state;

/* The public part of a session's state; a copy. */
typedef struct rft_session_report {
    rft_session_state state;
    refit_path path;
    uint64_t epoch;                   /* of the trainer it knows; 0: none */
    uint64_t version;                 /* held */
    refit_error final;                /* status REFIT_OK: there is no final error */
    char refusal[RFT_SENTENCE_BYTES]; /* why the trainer refused this worker when last asked, or
                                         what cannot be read of the archive; empty: neither */
    uint64_t applied;                 /* versions */
    uint64_t aborted;                 /* versions */
    uint64_t refused;                 /* messages that broke the protocol */
    uint64_t bytes_received;
    uint64_t bad_frames;
    double stage_seconds; /* of the last version staged */
} rft_session_report;

typedef enum rft_order_kind {
    RFT_ORDER_ACCEPT,
    RFT_ORDER_STAGE, /* of one that came piece by piece: accept, if the trainer commits it */
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
 * carried out, so no more than a release, a decision and a second release can wait; and one more
 * decision, where a version that was to be staged has come to nothing. */
#define RFT_MAILBOX_ORDERS 4u

typedef struct rft_mailbox {
    int ready_fd;         /* set while take would not wait */
    int wake_fd;          /* set while the service thread has something to look at */
    const char *endpoint; /* where the trainer is to be, or the folder of an archive; borrowed; with
                             the next one set before the thread starts */
    bool archive;         /* it is a folder */
    atomic_bool cancelled; /* by rft_mailbox_cancel, until a take has said so */
    rft_mutex lock;
    rft_image *ready;                     /* guarded by lock; not to be taken while a selection
                                             waits, which it is not of */
    rft_session_report report;            /* guarded by lock */
    rft_order orders[RFT_MAILBOX_ORDERS]; /* guarded by lock */
    uint32_t order_count;                 /* guarded by lock */
    refit_device *device;     /* guarded by lock; to be used from now on; NULL: nothing new */
    rft_selection *selection; /* guarded by lock; owned; NULL: nothing new */
    bool passed;              /* guarded by lock: `ready` gave way to a selection */
    bool whole;               /* guarded by lock: versions are taken as a whole alone */
    bool closing;             /* guarded by lock */
} rft_mailbox;

refit_status rft_mailbox_open(rft_mailbox *mailbox, refit_error *error);
void rft_mailbox_close(rft_mailbox *mailbox);

/* ---- The caller's side ---- */

/* Waits for a version and takes it. REFIT_ERR_TIMEOUT, REFIT_ERR_CANCELLED, or the final error. */
refit_status rft_mailbox_take(rft_mailbox *mailbox, uint32_t timeout_ms, rft_image **out,
                              refit_error *error);
/* Any thread, and safe in a signal handler. */
void rft_mailbox_cancel(rft_mailbox *mailbox);
/* About the update of `version`. */
void rft_mailbox_order(rft_mailbox *mailbox, const rft_order *order, uint64_t version);
/* The GPU whose memory may be shared. */
void rft_mailbox_bring(rft_mailbox *mailbox, refit_device *device);
/* What is selected from now on, which it takes. Until the service thread knows, no version is. */
void rft_mailbox_select(rft_mailbox *mailbox, rft_selection *selection);
/* Whether versions are taken as a whole alone. */
void rft_mailbox_take_whole(rft_mailbox *mailbox, bool whole);
/* The caller's engine runs on the version, as the service thread knows. */
void rft_mailbox_note_version(rft_mailbox *mailbox, uint64_t version);
/* Tells the service thread to leave. */
void rft_mailbox_shut(rft_mailbox *mailbox);
/* Any thread. */
void rft_mailbox_read(rft_mailbox *mailbox, rft_session_report *out);

/* ---- The service thread's side ---- */

/* With the report as of now: who has taken a version never reads a report from before it. */
void rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image, const rft_session_report *report);
/* The same in the place of the one that is there, so that one is at every moment. False if that has
 * been taken, and the new one is not delivered. */
bool rft_mailbox_replace(rft_mailbox *mailbox, rft_image *image, const rft_session_report *report);
/* False if it has been taken. */
bool rft_mailbox_withdraw(rft_mailbox *mailbox);
/* Takes the oldest order; false if there is none. */
bool rft_mailbox_next_order(rft_mailbox *mailbox, rft_order *out);
/* The device that was brought since; NULL: none. */
refit_device *rft_mailbox_take_device(rft_mailbox *mailbox);
/* What was selected since the last call, for the caller to close; NULL: nothing. What is there
 * cannot be taken any more: rft_mailbox_withdraw says so. */
rft_selection *rft_mailbox_take_selection(rft_mailbox *mailbox);
bool rft_mailbox_is_whole(rft_mailbox *mailbox);
/* Copies the report; while an order waits, the version stays what the caller has decided. False
 * once it is shut and no order is left. */
bool rft_mailbox_publish(rft_mailbox *mailbox, const rft_session_report *report);

#endif
