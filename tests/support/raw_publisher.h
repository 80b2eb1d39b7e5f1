/*
 * A publisher that does exactly what the test says, one message at a time: to stop, lie, vanish and
 * come back at any step of the protocol. It speaks through a real channel; while it waits for a
 * worker it beats, unless it is told to be silent. Every wait ends after 50 seconds by failing the
 * test.
 */
#ifndef RAW_PUBLISHER_H
#define RAW_PUBLISHER_H

#include "net/channel.h"
#include "store/segment.h"
#include "tests/support/sample_version.h"

typedef struct raw_publisher {
    refit_config config;
    rft_limits limits;
    rft_channel *channel;
    uint64_t epoch;
    bool silent;
    rft_segment probe;  /* not open: no shared memory is proposed */
    rft_peer_id worker; /* the sender of `heard` */
    rft_message heard;
    rft_bytes heard_bytes; /* what `heard` points into */
    rft_pending pending;
} raw_publisher;

/* `shm`: with a probe segment. */
void raw_open(raw_publisher *raw, const char *endpoint, uint64_t epoch, bool shm);
/* Without a word. */
void raw_close(raw_publisher *raw);

/* Waits for a message of that kind; others are passed over. */
const rft_message *raw_hear(raw_publisher *raw, rft_message_kind kind);
/*
 * Waits for STAGED of this version, with its digest. A worker repeats STAGED with every beat until
 * it has heard of the commit: one of the version before may still come first.
 */
void raw_hear_staged(raw_publisher *raw, const sample_version *sample);
/* Waits for a message of any kind. */
const rft_message *raw_hear_any(raw_publisher *raw);

void raw_say(raw_publisher *raw, rft_message message);
/* Any bytes, with a second part if `payload` is not NULL. */
void raw_say_bytes(raw_publisher *raw, rft_view message, const rft_view *payload);

/* From HELLO to a first beat. */
void raw_join(raw_publisher *raw);
/* MANIFEST and OFFER, through the socket. */
void raw_offer(raw_publisher *raw, const sample_version *sample, uint64_t base);
/* All frames, heedless of credits; `base` may be NULL. */
void raw_frames(raw_publisher *raw, sample_version *sample, const sample_version *base);
/* Offer, frames, SEAL, and STAGED heard. */
void raw_stage(raw_publisher *raw, sample_version *sample, const sample_version *base);

/* A version as a store keeps it: its seqlock, then its bytes. */
void raw_slot_open(rft_segment *segment, const sample_version *sample);
rft_seqlock *raw_slot_seqlock(const rft_segment *segment);

#endif
