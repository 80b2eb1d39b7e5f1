/*
 * server: the publisher's side of the protocol as a state machine.
 *
 * Events go in: a decoded message with its sender, the time, a step of the publisher. Messages for
 * the workers come out in `send_queue`, frames are picked one at a time, and the state can be read.
 * No socket, no clock, no thread: the lock of the server's owner guards all of it.
 *
 *     server.c ─────► transaction.c ──► ranks.c ──► server_send.c
 *     rank_link.c ──►
 *
 * server.c has the workers and their messages, transaction.c one version from begin to its end (its
 * states are drawn there), ranks.c the other publishers of several, rank_link.c what rank 0 of them
 * says, server_send.c the messages to workers. Calls go along the arrows only, also past others;
 * but ranks.c dooms a version (rft_transaction_doom), which transaction.c then ends.
 */
#ifndef RFT_SERVER_H
#define RFT_SERVER_H

#include "net/send_queue.h"
#include "publisher/neighbors.h"
#include "publisher/ranks.h"
#include "store/frames.h"
#include "store/gpu_store.h"
#include "store/store.h"

typedef enum rft_transaction_state {
    RFT_TRANSACTION_IDLE,
    RFT_TRANSACTION_PREPARING,
    RFT_TRANSACTION_WRITING,
    RFT_TRANSACTION_STAGING,
    RFT_TRANSACTION_COMMITTING,
    RFT_TRANSACTION_ABORTED,
} rft_transaction_state;

/* One version on its way. */
typedef struct rft_transaction {
    rft_transaction_state state;
    uint64_t version;
    uint64_t last; /* highest number ever used */
    uint32_t members;
    uint32_t lost;      /* members that failed or are gone */
    int64_t began;      /* when the offers went out */
    int64_t decided;    /* when COMMIT went out */
    int64_t deadline;   /* of staging */
    bool doomed;        /* a rank has failed with it: it is aborted once it is sealed */
    bool undecided;     /* its bytes are being brought to the host: nothing is decided meanwhile */
    refit_error result; /* status REFIT_OK: nothing has gone wrong so far */
} rft_transaction;

#define RFT_RECENT_MOST 65u /* one more than broadcast.max_behind may be */

#define RFT_QUERY_LIMIT_MOST 64u   /* observers that are answered within RFT_QUERY_LIMIT_MS */
#define RFT_QUERY_LIMIT_MS   1000u /* between two answers to one of them */

/* The observers that were answered last. A query is short and the answer may be long, so neither
 * one observer nor many together make the publisher answer without end. {0} is empty. */
typedef struct rft_query_limit {
    rft_peer_id ids[RFT_QUERY_LIMIT_MOST];
    int64_t at[RFT_QUERY_LIMIT_MOST]; /* of its answer; 0: the place is free */
} rft_query_limit;

/* Figures for the statistics. */
typedef struct rft_server_counts {
    uint64_t committed; /* versions */
    uint64_t aborted;   /* versions */
    uint64_t evicted;
    uint64_t refused;
    uint64_t resent;
    uint64_t applied_last; /* workers that applied the last version */
    uint64_t same_blocks;  /* of the last version */
    uint64_t shm_bytes;    /* that workers took from shared memory */
    uint64_t gpu_bytes;    /* that workers took from their GPU's memory */
    double stage_seconds;
    double commit_seconds;
} rft_server_counts;

typedef struct rft_server rft_server;

struct rft_server {
    const refit_config *config; /* borrowed */
    rft_limits limits;
    rft_allow_list *allow;             /* borrowed; NULL: no keys are asked for */
    uint64_t keys_edition;             /* of allow, at the last look */
    uint64_t epoch;                    /* of rank 0, if this is another rank */
    char endpoint[RFT_ENDPOINT_BYTES]; /* as bound */
    char key[RFT_KEY_TEXT]; /* the public half of its own; empty: no keys are asked for */
    uint64_t proof;         /* content of the probe segment */
    char probe[RFT_SEGMENT_NAME_BYTES]; /* empty: no shared memory */
    rft_store *store;                   /* borrowed; NULL before the first declaration */
    rft_gpu_store *gpu;                 /* borrowed; NULL: the publisher shows no GPU's memory */
    rft_version_id current; /* the last committed version, also when a new store has none */
    uint64_t recent[RFT_RECENT_MOST]; /* the versions that were committed last, in a ring */
    uint32_t recent_next;
    rft_peers peers;
    rft_transaction transaction;
    rft_ranks ranks;
    rft_send_queue send_queue;
    rft_cached_message manifest;  /* of the store, as the workers are told */
    rft_cached_message seal;      /* of the version served */
    rft_cached_message committed; /* the seal of the committed version, as observers are told */
    rft_retire_list retired;      /* messages that the transport still holds */
    rft_query_limit query_limit;  /* of observers */
    bool regroup; /* a worker shares an image since the last event, or one does no longer */
    rft_server_counts counts;
    rft_bytes scratch;
    int64_t next_beat;
    uint32_t next_peer;            /* is sent the next frame */
    char gone[RFT_SENTENCE_BYTES]; /* the worker that was lost or refused last since the last
                                      version began, and why */
};

void rft_server_init(rft_server *server, const refit_config *config, uint64_t epoch, int64_t now);
/* Waits until `deadline` for the messages that the transport still holds. Returns the number of
 * those that it did not give back, which stay. */
uint32_t rft_server_close(rft_server *server, int64_t deadline);

/* ---- Events */

void rft_server_message(rft_server *server, const rft_peer_id *from, const rft_message *message,
                        int64_t now);
/* A message that cannot be decoded, and why. */
void rft_server_garbage(rft_server *server, const rft_peer_id *from, const refit_error *why,
                        int64_t now);
/* A message to it could not be sent: REFIT_ERR_PEER, REFIT_ERR_BUSY, REFIT_ERR_HOST_MEMORY, … */
void rft_server_unreachable(rft_server *server, const rft_peer_id *to, refit_status why,
                            int64_t now);
/* Beats, silence, deadlines. */
void rft_server_tick(rft_server *server, int64_t now);
/* When tick has something to do at the latest. */
int64_t rft_server_tick_at(const rft_server *server);
/* If the allow list has another edition: evicts the workers whose keys are no longer in it, and
 * renames those whose keys have another name. */
void rft_server_check_keys(rft_server *server, int64_t now);

/* The tensors have changed: `store`, which has no version yet, takes the place of the one before.
 */
void rft_server_adopt(rft_server *server, rft_store *store);
/* Versions are shown in the memory of a GPU from now on: workers on it join once more. */
void rft_server_use_gpu(rft_server *server, rft_gpu_store *gpu);
/* Blocks of the GPU's memory were taken away: workers on it are sent a beat, on which they unmap
 * what they no longer need. */
void rft_server_recall_gpu(rft_server *server);
/* All workers are told BYE; `final`: and that no trainer follows. They are gone once they have
 * answered. */
void rft_server_leave(rft_server *server, bool final);

/* Whether a worker may be reading the slot that the next version goes to. */
bool rft_server_has_readers(const rft_server *server);
/* Evicts those workers. */
void rft_server_evict_readers(rft_server *server, int64_t now);

/* Whether the sender's key is in the allow list, if there is one; and the name of the key, or "".
 * `key_name` may be NULL. */
bool rft_server_admits(const rft_server *server, const rft_peer_id *from,
                       char key_name[RFT_KEY_NAME_BYTES]);
/* The worker is told BYE and is gone; a member counts as lost in the transaction. The reason is
 * copied. */
void rft_server_evict(rft_server *server, rft_peer *peer, refit_status status, const char *reason);

/* ---- Frames */

typedef struct rft_frame_order {
    rft_peer_id to;
    uint64_t version;
    uint32_t sequence;
    bool again; /* it was asked for again */
    rft_coding coding;
    rft_want *want; /* of which the frame is sent; the caller's to release */
    uint32_t ready; /* frames that are ready now */
} rft_frame_order;

/* Whether a worker may be sent a frame. */
bool rft_server_wants_frames(const rft_server *server);
/* Takes the next frame that a worker may be sent, each worker in turn; false if there is none. */
bool rft_server_next_frame(rft_server *server, rft_frame_order *out);
/* The frame has been sent, with so many bytes of payload. */
void rft_server_frame_sent(rft_server *server, const rft_frame_order *order, uint64_t payload);

/* ---- A version (transaction.c) */

/* Nothing is offered from now on; workers that still fetch an older version are told to drop it.
 * REFIT_ERR_STATE, REFIT_ERR_STALE. `*version` 0 becomes the next number. */
refit_status rft_transaction_prepare(rft_server *server, uint64_t *version, refit_error *error);
/* There is no room for the version on the GPU, and what is written of it is on the host: workers on
 * the GPU are offered it another way. */
void rft_transaction_leave_gpu(rft_server *server, int64_t now);
/* No slot became free: back to the state before prepare. Rank 0, if there is one, is told. */
void rft_transaction_expire(rft_server *server, int64_t now);
/* The store has begun: offers go out. */
void rft_transaction_begin(rft_server *server, int64_t now);
/* The store is sealed: SEAL goes out, and the workers' answers decide. */
void rft_transaction_seal(rft_server *server, int64_t now);
/* Drops the version under way; legal while it is being written or staged. */
void rft_transaction_abort(rft_server *server, refit_status status, const char *reason);
/* The trainer waits no longer. Before the decision the version is aborted; after it, the version
 * stands, and no worker is awaited any more. Legal from begin until it is finished. */
void rft_transaction_cancel(rft_server *server, int64_t now);
/* Whether the sealed version lies on the GPU alone, and a member has come back without its GPU. */
bool rft_transaction_wants_host(const rft_server *server);
/* It has bytes on the host now, and such members are offered it; or it could not be brought there,
 * and they fail. */
void rft_transaction_serve_host(rft_server *server, const refit_error *failure, int64_t now);
/* ---- One that leaves the GPU's memory piece by piece */

/* Whether every worker that takes the version from the GPU's memory can take it piece by piece. */
bool rft_transaction_may_stream(const rft_server *server);
/* Sends PIECES to those workers. */
void rft_transaction_send_pieces(rft_server *server, const rft_message *pieces);
/* Whether none of them reads pieces up to this sequence any more. */
bool rft_transaction_pieces_taken(const rft_server *server, uint32_t sequence);
/* Evicts those that do. */
void rft_transaction_evict_slow(rft_server *server, uint32_t sequence, int64_t now);

/* The version has ended, and its tensors are the trainer's again: a worker that has not read it
 * gets it from the host, or not any more. */
void rft_transaction_end_lending(rft_server *server, int64_t now);
/* The store is rolled back: workers that lag are offered the committed version. */
void rft_transaction_end_rollback(rft_server *server, int64_t now);

/* Tells a staged worker that its version is committed. */
void rft_transaction_commit_peer(rft_server *server, rft_peer *peer);
/* The worker has applied the last version. */
void rft_transaction_applied(rft_server *server, rft_peer *peer);
/* Whether the trainer waits until the worker has applied the version just committed, or, with
 * broadcast.wait: staged, one that is new enough. */
bool rft_transaction_awaits(const rft_server *server, const rft_peer *peer);
/* It runs on an older version than the last, which may be new enough. */
void rft_transaction_caught_up(rft_server *server, rft_peer *peer);
/* The worker could not stage or apply the version, or is gone: notes the reason and the consequence
 * for the transaction. Only its first failure counts. */
void rft_transaction_blame(rft_server *server, rft_peer *peer, refit_status status,
                           const char *reason);
/* The worker has staged the version: a member that had failed with it no longer counts as lost. */
void rft_transaction_forgive(rft_server *server, rft_peer *peer);
/* A rank has failed, or is gone: the version, if it is not decided, cannot be committed. */
void rft_transaction_doom(rft_server *server, refit_status status, const char *reason);
/* Decides or finishes the version if it can be: called at the end of every event. */
void rft_transaction_evaluate(rft_server *server, int64_t now);

/* ---- Messages to workers (server_send.c) */

bool rft_server_send(rft_server *server, rft_peer *peer, const rft_message *message);
/* To an id that need not be a worker's. */
void rft_server_refuse(rft_server *server, const rft_peer_id *to, refit_status code, bool final,
                       const char *reason);
void rft_server_send_bye(rft_server *server, rft_peer *peer, refit_status code, const char *reason);
/* BYE, for good. */
void rft_server_send_end(rft_server *server, rft_peer *peer);
void rft_server_send_beat(rft_server *server, rft_peer *peer);
void rft_server_send_seal(rft_server *server, rft_peer *peer);
/* MANIFEST and SEAL of the committed version, as far as there are any. */
void rft_server_send_committed(rft_server *server, rft_peer *peer, int64_t now);
void rft_server_send_commit(rft_server *server, rft_peer *peer, uint64_t version);
void rft_server_send_abort(rft_server *server, rft_peer *peer, uint64_t version, refit_status code,
                           const char *reason);
/* The worker's path for the version; NONE: it cannot have it. */
refit_path rft_server_path(const rft_server *server, const rft_peer *peer, uint64_t version);
/* Whether this is the committed version. */
bool rft_server_is_current(const rft_server *server, const rft_version_id *held);
/* Whether offers of the served version are valid, and its frames may be sent. */
bool rft_server_offers_stand(const rft_server *server);
/* Offers the served version, with its seal if there is one, unless the worker has it or failed with
 * it. */
void rft_server_offer(rft_server *server, rft_peer *peer, int64_t now);
/* Tells the worker to drop a version that it has not been told to apply. */
void rft_server_drop_task(rft_server *server, rft_peer *peer, refit_status code,
                          const char *reason);

#endif
