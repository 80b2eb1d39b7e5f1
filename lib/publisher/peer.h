/*
 * peer: one worker as its publisher knows it, and the table of all of them. Plain state: the server
 * decides about it (server.h).
 */
#ifndef RFT_PEER_H
#define RFT_PEER_H

#include <refit/broadcast.h>

#include "net/channel.h"
#include "store/store.h"
#include "wire/frame.h"
#include "wire/message.h"

#define RFT_RESEND_ROOM     64u
#define RFT_LOST_MOST       1024u /* of the lost, how many are remembered, members apart */
#define RFT_PEER_NAME_BYTES 64u   /* with its end */
#define RFT_PEER_NAME_MARK  '/'   /* after a key's name; no such name has one */

/*
 * How far a worker is with the version it was last offered:
 *
 *   NONE ──OFFER──► OFFERED ──STAGED──► STAGED ──COMMIT──► COMMITTING ──COMMITTED──► NONE
 *    ▲                 │ FAILED, ABORT    │ ABORT               │ FAILED
 *    └─────────────────┴──────────────────┴─────────────────────┘
 */
typedef enum rft_stage {
    RFT_STAGE_NONE,
    RFT_STAGE_OFFERED,
    RFT_STAGE_STAGED,
    RFT_STAGE_COMMITTING,
} rft_stage;

typedef struct rft_task {
    rft_stage stage;
    uint64_t version;
    uint64_t base;   /* version that its frames may leave blocks out against; 0: none */
    refit_path path; /* anything but SOCKET: no frames are sent */
    bool share;      /* it was told to share its image, and has not said that it does not */
    int64_t asked;   /* when it was told so */
    bool sealed;     /* with NEIGHBOR: it was sent SEAL, so that what it mapped is whole */
    char segment[RFT_SEGMENT_NAME_BYTES]; /* with NEIGHBOR: of that image */
    int32_t credits; /* in parts (wire/frame.h): while any is left it may be sent a frame */
    uint32_t cursor; /* how many of the ready frames it has been sent */
    uint32_t resend[RFT_RESEND_ROOM];
    uint32_t resend_count;
    uint64_t resent;       /* frames that it asked for again so far */
    uint32_t pieces_sent;  /* sequence of the last PIECES; 0: it comes as a whole */
    uint32_t pieces_taken; /* it reads no more of them up to this one */
} rft_task;

/* What a worker shares with the others of its host (neighbors.h). */
typedef struct rft_shared_image {
    uint64_t version; /* whose frames go there, or went; 0: none */
    bool whole;       /* all of them are there, and were verified */
    rft_want *want;   /* acquired; which of its bytes; NULL: all */
    char segment[RFT_SEGMENT_NAME_BYTES];
} rft_shared_image;

/* A version whose slot a worker's user may be reading; 0: none. */
typedef struct rft_lend {
    uint64_t version;
    refit_path path;
} rft_lend;

typedef struct rft_peer {
    rft_peer_id id;
    char name[RFT_PEER_NAME_BYTES];     /* by which it is known: rft_peer_name_bind */
    char own_name[RFT_PEER_NAME_BYTES]; /* by which it goes itself */
    char key_name[RFT_KEY_NAME_BYTES];  /* of its key's file; empty: no keys are asked for */
    uint64_t instance;
    bool subscribed;         /* it has sent JOIN: it is a worker of this publisher */
    uint32_t rank;           /* it is the publisher of this rank; 0: it is not */
    bool fetches;            /* it is a worker of rank 0, and is sent frames that it asks for */
    uint64_t shards_edition; /* of the ranks, as it was told; 0: it was not */
    bool shm;                /* it has proved that it shares memory */
    bool gpu;                /* it has proved the same, and is on the publisher's GPU */
    bool pieces;             /* it takes versions piece by piece */
    bool named_gpu;          /* it said which GPU it is on: `uuid` */
    unsigned char uuid[RFT_UUID_BYTES];
    char place[RFT_SEGMENT_PLACE_BYTES]; /* where it shares images; empty: it does not */
    rft_shared_image image;
    uint64_t unmapped; /* a version whose image it was offered is gone: it may yet fail with that */
    uint64_t alone;    /* a version that it receives for itself; 0: none so far */
    bool selects;      /* it wants a part of each version */
    rft_bytes rows;    /* of such a part, or of a rank's shard, that has not come whole */
    rft_want
        *want; /* acquired; which part, of the store's manifest; NULL: not told so far, or all */
    refit_status unfit; /* what it selects cannot be had of the manifest; REFIT_OK: nothing is known
                           of that */
    char unfit_reason[160];
    rft_want *sent;  /* acquired; the part that its task's version comes in; NULL: all of it */
    rft_want *base;  /* acquired; the part that the version held is there in */
    rft_bytes have;  /* frames of its task that it has had from another worker, as PULL says them */
    bool delta;      /* it takes sparse blocks */
    bool zstd;       /* it takes packed ones */
    refit_path path; /* of its last offer; before the first, of the next one */
    uint32_t window;
    int64_t heard; /* when it last said anything */
    int64_t due;   /* when it must have answered, or it is evicted; 0: no such moment */
    rft_version_id held;
    bool has_manifest;   /* it was sent `manifest` */
    int64_t manifest_at; /* when */
    rft_digest128 manifest;
    rft_task task;
    rft_lend lends[RFT_SLOTS_MOST];
    uint64_t failed_version; /* not offered to it again */
    uint64_t retried;        /* a version that it had to fail with, as a rank was lost or late */
    bool later;              /* that is offered to it again with the next beat, and not before */

    bool member;    /* the version under way, or the last one, counts on it */
    bool awaited;   /* a staged member that the commit waits for, to hear how applying went */
    bool committed; /* it applied the last version */
    bool missed;    /* there was no memory to tell it something: it cannot stay */
    refit_status status;
    char reason[160];
} rft_peer;

/* {0} is empty. Peers stay where they are until they are dropped. */
typedef struct rft_peers {
    rft_peer **live;
    uint32_t count;
    uint32_t room;
    rft_peer **lost; /* since the last version began, oldest first */
    uint32_t lost_count;
    uint32_t lost_room;
} rft_peers;

void rft_peers_close(rft_peers *peers);

/* The name by which a worker is known. With a key it is the key's name, or begins with it and
 * RFT_PEER_NAME_MARK, so that no key can take a name of another: a name that the worker gives
 * itself, and that does not begin so, is put after both. A name that is too long loses its
 * beginning, because names of workers differ at their ends. */
void rft_peer_name_bind(const char *key_name, const char *own_name, char name[RFT_PEER_NAME_BYTES]);

/* NULL: none. */
rft_peer *rft_peers_find(const rft_peers *peers, const rft_peer_id *id);
rft_peer *rft_peers_find_name(const rft_peers *peers, const char *name);
uint32_t rft_peers_count_subscribed(const rft_peers *peers);
/* Of these, those that take versions in this way. */
uint32_t rft_peers_count_path(const rft_peers *peers, refit_path path);

/* A new one, zeroed; also makes room among the lost for it, so that losing it cannot fail. */
refit_status rft_peers_add(rft_peers *peers, rft_peer **out, refit_error *error);
/* From the living to the lost, in the place of an earlier one by that name. */
void rft_peers_lose(rft_peers *peers, rft_peer *peer);
void rft_peers_forget_lost(rft_peers *peers);
/* One that no report names. */
void rft_peers_drop(rft_peers *peers, rft_peer *peer);

/* How its user may be reading the version's slot; REFIT_PATH_NONE: not at all. */
refit_path rft_peer_reads(const rft_peer *peer, uint64_t version);
void rft_peer_lend(rft_peer *peer, uint64_t version, refit_path path);
void rft_peer_take_back(rft_peer *peer, uint64_t version);

/* Whether the way leads through the slot of the store, or of the GPU. */
bool rft_path_reads_slot(refit_path path);

/* Puts another want, which it takes, in the place of one of the peer's. */
void rft_peer_set_want(rft_want **place, rft_want *want);
/* Forgets what it wants of a manifest. */
void rft_peer_drop_wants(rft_peer *peer);

/* Whether it may be sent a frame that is not a repeated one: it has credit, and a frame is ready
 * that it was not sent, does not have and wants. */
bool rft_peer_takes_frame(rft_peer *peer, const rft_store *store);
/* The next frame to send it: its place among `ready`, or one asked for again, which takes no
 * credit. False: none now. */
bool rft_peer_next_frame(rft_peer *peer, const rft_store *store, uint32_t *sequence, bool *again);
/* Returns the part of its credit that the frame did not use, once it is known how many of its bytes
 * travelled. */
void rft_peer_refund(rft_peer *peer, uint64_t payload, uint64_t bytes);

void rft_peer_describe(const rft_peer *peer, refit_worker_info *info);

#endif
