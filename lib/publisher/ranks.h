/*
 * ranks: the publishers that share the tensors, each with the shard of its own rank.
 *
 *     rank 0                                     rank 1, 2, …
 *                              ◄─ HELLO, SHARD   joins
 *     all shards are there: SHARD ─►
 *     begins a version:     OFFER ─►             begins it
 *     writes, seals                              writes, seals
 *                              ◄─ SUMS
 *     all sums are there:    SEAL ─►             (and to workers)
 *     workers have staged: COMMIT ─►             (and to workers)
 *
 * Rank 0 coordinates: workers are subscribed to it, and it alone decides about a version. The
 * others serve frames, and follow. A rank that is lost, or fails, ends the version everywhere,
 * whatever broadcast.commit says.
 *
 * Plain state, and the messages about it; transaction.c decides. The lock of the server guards it.
 */
#ifndef RFT_RANKS_H
#define RFT_RANKS_H

#include "net/endpoint.h"
#include "net/send_queue.h"
#include "publisher/peer.h"
#include "wire/shard.h"

/* One of them, as rank 0 knows it. */
typedef struct rft_rank {
    rft_peer *peer;   /* borrowed; NULL: it has not joined, is gone, or is this publisher */
    rft_want *shard;  /* acquired; NULL: not told so far */
    rft_want *agreed; /* acquired; the shard, when all were the tensors last; NULL: never */
    uint64_t version; /* whose sums come, so many so far */
    uint32_t sums;
    uint64_t summed;   /* the last version that it has written; 0: none */
    uint64_t held;     /* the version that it serves; 0: none */
    uint64_t instance; /* which one it was when all were the tensors first; 0: they were not */
    char endpoint[RFT_ENDPOINT_BYTES];
} rft_rank;

/*
 * How far another rank than 0 is with rank 0:
 *
 *   OFF ──open──► CONNECTING ──WELCOME──► JOINING ──SHARD──► JOINED
 *                     ▲   ▲                  │ REFUSE           │ silence, BYE, REFUSE
 *                     │   └──────────────────┘                  │
 *                     └─────────────────────────────────────────┘
 *
 * A REFUSE for good leads back to OFF, and so does close.
 */
typedef enum rft_link_state {
    RFT_LINK_OFF,
    RFT_LINK_CONNECTING, /* HELLO every heartbeat */
    RFT_LINK_JOINING,    /* SHARD every heartbeat: others are missing */
    RFT_LINK_JOINED,
} rft_link_state;

typedef struct rft_rank_link {
    rft_link_state state;
    char endpoint[RFT_ENDPOINT_BYTES]; /* of rank 0; empty: off */
    bool unopened;                     /* the channel could not be opened */
    bool reopen;                       /* another channel is to be opened */
    uint64_t instance;
    uint64_t epoch;     /* of rank 0, since it was joined first; 0: it was not */
    uint64_t own_epoch; /* of this publisher, while that stands in its place */
    rft_send_queue send_queue;
    uint32_t silence_ms; /* of WELCOME: rank 0 is lost once it is silent so long */
    int64_t heard;
    int64_t lost_at; /* when it was, last */
    int64_t next_beat;
    uint64_t offered; /* the last version that rank 0 has begun */
    uint64_t decided; /* the last version that it has committed */
    bool reminded;    /* it was told that it has not decided in time about the one under way */
    uint64_t aborted; /* the last version that it has aborted, and why */
    refit_error aborted_why;
    refit_error why; /* the last refusal, or how the channel failed; REFIT_OK: none */
} rft_rank_link;

typedef struct rft_ranks {
    uint32_t count;      /* 0: the tensors are this publisher's alone */
    uint32_t rank;       /* of this one */
    bool complete;       /* all have joined, and their shards are the tensors exactly */
    refit_error failure; /* why they are not; REFIT_OK: some are missing */
    uint64_t edition;    /* of what workers are told: counts up */

    rft_rank *list; /* owned; of rank 0 */
    uint64_t *sums; /* owned; of rank 0: per tensor, of the version under way */
    rft_bytes words;
    uint32_t summed; /* ranks whose part is in these */
    bool concluded;  /* all are, and the digests are known */

    rft_rank_link link; /* of another rank */
} rft_ranks;

struct rft_server;

/* The tensors are this publisher's alone again: the ranks of before are told, or rank 0. */
void rft_ranks_close(struct rft_server *server);
/* From now on the server's store has the shard of `rank` of `count`. Rank 0 then waits for the
 * others. REFIT_ERR_HOST_MEMORY. */
refit_status rft_ranks_open(struct rft_server *server, uint32_t rank, uint32_t count,
                            refit_error *error);

/* Whether this publisher is one of several, rank 0 of them, another one. */
bool rft_ranks_are_many(const struct rft_server *server);
bool rft_ranks_coordinates(const struct rft_server *server);
bool rft_ranks_follows(const struct rft_server *server);

/* ---- At rank 0 */

/* A rank says which shard it has: it joins, or is refused and told why. */
void rft_ranks_take_shard(struct rft_server *server, rft_peer *peer, const rft_message *shard);
/* It has written its shard. Of a version that is over it is told what became of it.
 * REFIT_ERR_PROTOCOL: the message does not fit the version. */
refit_status rft_ranks_take_sums(struct rft_server *server, rft_peer *peer, const rft_message *sums,
                                 refit_error *error);
/* It has failed with a version, or is gone: the version under way cannot be committed. Of one that
 * is not under way it is told what became of it. */
void rft_ranks_take_failed(struct rft_server *server, rft_peer *peer, const rft_message *failed);
void rft_ranks_lose(struct rft_server *server, rft_peer *peer, refit_status status,
                    const char *reason);

/* A version begins: the ranks are told. */
void rft_ranks_begin(struct rft_server *server);
/* The store is sealed: its part of the digests is added, or sent to rank 0. The ranks have until
 * `due` for theirs. */
void rft_ranks_seal(struct rft_server *server, int64_t due);
/* Whether all parts of the digests are there, and the store has them. */
bool rft_ranks_conclude(struct rft_server *server);
/* The version's seal, and the decision. */
void rft_ranks_tell_seal(struct rft_server *server);
void rft_ranks_tell_commit(struct rft_server *server);
void rft_ranks_tell_abort(struct rft_server *server, refit_status status, const char *reason);

/* Tells a worker where the shards are, unless it knows, or there is one publisher alone. False:
 * they are not all there now, or not all have the version. */
bool rft_ranks_introduce(struct rft_server *server, rft_peer *peer, uint64_t version);

/* Notes the ranks that are missing, for a sentence: "1, 3 and 2 more". */
void rft_ranks_list_missing(const struct rft_server *server, char *text, size_t room);

/* ---- At another rank (rank_link.c) */

/* Looks for rank 0 at the endpoint from now on. */
void rft_rank_link_open(struct rft_server *server, const char *endpoint, uint64_t instance,
                        int64_t now);
void rft_rank_link_message(struct rft_server *server, const rft_message *message, int64_t now);
/* The channel could not be opened, or what came cannot be decoded. */
void rft_rank_link_fail(struct rft_server *server, const refit_error *why, int64_t now);
void rft_rank_link_tick(struct rft_server *server, int64_t now);
int64_t rft_rank_link_tick_at(const struct rft_server *server);
/* The user has dropped the version under way, or its commit was cancelled: rank 0 is told. */
void rft_rank_link_send_failed(struct rft_server *server, refit_status status, const char *reason);
void rft_rank_link_leave(struct rft_server *server, const char *reason);

#endif
