/*
 * publisher: what the door's object is made of, and what the door and its service thread say to
 * each other.
 *
 * The hub has all that is shared, under one lock. The caller's thread takes steps of the round
 * there and waits for `changed`; the service thread owns the channel, hands messages in and sends
 * what comes out. Bytes are written and sent without the lock: see `sending`.
 */
#ifndef RFT_PUBLISHER_H
#define RFT_PUBLISHER_H

#include "base/thread.h"
#include "broadcast/channel.h"
#include "broadcast/frames.h"
#include "broadcast/hub.h"

struct refit_publisher {
    refit_config config;
    rft_segment probe;
    rft_channel *channel; /* the service thread's while it runs */
    int waker;            /* ends the service thread's poll */
    rft_thread thread;

    rft_mutex lock;
    rft_cond changed;     /* something in the hub may have changed, or `sending` has ended */
    rft_hub hub;          /* guarded by lock */
    bool stopping;        /* guarded by lock */
    bool sending;         /* guarded by lock: the service thread uses store and frames unlocked */
    uint64_t sent_bytes;  /* guarded by lock */
    double write_seconds; /* guarded by lock: of the version under way, or the last one */

    rft_store *store;   /* the caller's; changed only under lock and while nothing is sent */
    rft_frames *frames; /* likewise, and the service thread's while `sending` */
    rft_attic attic;    /* the caller's */
};

/* Waits until the service thread uses neither store nor frames. Called with the lock held. */
void rft_publisher_await_sending(refit_publisher *publisher);

/* The service thread: sends, receives, beats, until `stopping`. `user` is the publisher. */
void *rft_publisher_serve(void *user);

#endif
