/*
 * shard_link: a worker's link to one of several publishers that share the tensors.
 *
 * The worker is subscribed at the coordinator (session.h), and fetches frames alone from each rank,
 * through a connection of its own. A link says HELLO until the rank has joined the coordinator,
 * then beats, and asks for its part of a version once that is offered. It decides nothing: a call
 * that fails says why the version under way cannot be had.
 *
 * Events go in, and messages for the rank are put into the send queue, as in session.h. No socket,
 * no clock, no thread.
 */
#ifndef RFT_SHARD_LINK_H
#define RFT_SHARD_LINK_H

#include "net/endpoint.h"
#include "subscriber/fetch.h"

/* What the links of a worker have in common. */
typedef struct rft_link_common {
    const refit_config *config; /* borrowed, as the next three */
    const rft_limits *limits;
    const char *worker;       /* its name, for reports */
    rft_fetch_counts *counts; /* of all of them */
    uint64_t instance;        /* the worker's */
    uint64_t epoch;           /* of the coordinator, as the next one */
    uint64_t frame_bytes;
} rft_link_common;

typedef struct rft_shard_link {
    const rft_link_common *common; /* borrowed */
    uint32_t rank;
    uint64_t serial;                   /* no other link of the worker has had it */
    char endpoint[RFT_ENDPOINT_BYTES]; /* empty: that of the session */
    rft_want *rows;                    /* what it publishes; NULL: that is not known */

    rft_send_queue send_queue; /* messages for the rank */
    uint32_t failures_seen;    /* of the send queue's */
    bool joined;
    uint32_t window;       /* these three are of WELCOME */
    uint32_t heartbeat_ms; /* of the configuration until it has joined */
    uint32_t heartbeat_timeout_ms;
    int64_t next_beat;            /* or the next HELLO */
    int64_t heard;                /* when the rank last said something */
    char why[RFT_SENTENCE_BYTES]; /* it was last lost; that was logged */

    rft_fetch fetch;
    rft_want *part;   /* what it fetches of a version; of the last one while none is under way */
    rft_want *wanted; /* acquired; what the worker wanted, when `part` was found; NULL: all */
    bool cut;         /* `part` is of `rows` and `wanted` */
    bool told;        /* the rank knows `part`, where that is not all of `rows` */
    bool ready;       /* it may ask, once it has joined */
    bool asked;
    uint64_t base; /* of the version under way */
    rft_view have; /* of PULL */
} rft_shard_link;

/* `shard` is valid; the manifest of `rows`, which it takes, outlives it. REFIT_ERR_HOST_MEMORY, and
 * takes nothing. */
refit_status rft_shard_link_open(const rft_link_common *common, const rft_message *shard,
                                 uint64_t serial, rft_want *rows, int64_t now, rft_shard_link **out,
                                 refit_error *error);
/* NULL is allowed. */
void rft_shard_link_close(rft_shard_link *link);
/* What it publishes from now on; NULL: that is not known. Takes it. The version under way goes on
 * as it began. */
void rft_shard_link_set_rows(rft_shard_link *link, rft_want *rows);

/* A version is under way: gets ready for what of it the rank has. `plan` says what the worker
 * wants, and its window. REFIT_ERR_HOST_MEMORY */
refit_status rft_shard_link_begin(rft_shard_link *link, const rft_fetch_plan *plan,
                                  refit_error *error);
/* Asks for it, perhaps later. `base`: the version that it builds on, or 0; `have` as in PULL,
 * borrowed until the end. */
void rft_shard_link_pull(rft_shard_link *link, uint64_t base, rft_view have);
/* The version is not wanted any more. */
void rft_shard_link_end(rft_shard_link *link);
/* Whether frames of a version come from the rank, and whether some are missing. NULL is allowed. */
bool rft_shard_link_is_fetching(const rft_shard_link *link);
bool rft_shard_link_lacks(const rft_shard_link *link);

/* One decoded message of the rank; payload is that of a FRAME. Its own beats: see
 * rft_receive_link_message. REFIT_ERR_PEER: the link is lost, and with it frames of the version
 * under way; REFIT_ERR_STALE: the rank does not serve it; and the errors of rft_fetch_frame. */
refit_status rft_shard_link_message(rft_shard_link *link, const rft_message *message,
                                    rft_view payload, int64_t now, refit_error *error);
/* The connection is lost, or does not come about: HELLO is said again. REFIT_ERR_PEER, as above. */
refit_status rft_shard_link_lose(rft_shard_link *link, const char *why, int64_t now,
                                 refit_error *error);

/* Acts on the time. REFIT_ERR_PEER, as above. */
refit_status rft_shard_link_tick(rft_shard_link *link, int64_t now, refit_error *error);
/* When tick has something to do at the latest. */
int64_t rft_shard_link_tick_at(const rft_shard_link *link);

#endif
