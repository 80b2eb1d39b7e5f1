/*
 * receive: one version on its way in, from its OFFER until it is complete and verified.
 *
 *     NONE ──offer──► WAITING ──start──► FETCHING ──frames, seal──► COMPLETE
 *       ▲                │                  │                       ▲   │
 *       │                │                seal, broadcast.verify:   │   │
 *       │                │                  ▼ always                │   │
 *       │                │              VERIFYING ──verify──────────┘   │
 *       │                │                  │                           │
 *       └────────────────┴──────drop────────┴───────────drop────────────┘
 *
 * A version that another worker of the host receives is FETCHING until that one has it whole. If
 * that one is lost, this one takes over: start goes to RESUMING, in which the frames that are there
 * already are copied while others come, and to FETCHING from there.
 *
 * A version of several publishers comes through links (shard_links.h), all into one image. Its
 * digests are sums of theirs and of blocks that they divide, which are read again in VERIFYING.
 *
 * A version that comes piece by piece is complete once SEAL says so, though its user still copies.
 *
 * It checks the publisher's offer against the manifest and the limits, asks for frames by credits,
 * has damaged and missing ones sent again, and compares the digests of SEAL with the bytes that
 * arrived. Every call that fails says with which status the version is to be refused; the session
 * sends that and drops the version. No socket, no clock, no thread.
 */
#ifndef RFT_RECEIVE_H
#define RFT_RECEIVE_H

#include "store/copy_queue.h"
#include "subscriber/shard_links.h"

/* How far the digests of an image in a GPU's memory are. {0} is not open. */
typedef struct rft_gpu_verify {
    refit_device *device;       /* borrowed; NULL: not open */
    const refit_config *config; /* borrowed */
    rft_copy_queue *copy_queue;
    rft_image *image;         /* to verify; NULL: none */
    rft_gpu_version *version; /* whose bytes may be read by the GPU; NULL: none */
    uint64_t *sums;           /* per tensor */
    uint32_t tensor;          /* reached */
    uint64_t offset;          /* in it */
    uint64_t asked;           /* bytes whose digest is under way */
    bool started;             /* nothing else is under way any more */
    bool done;                /* all of the image is verified */
} rft_gpu_verify;

typedef enum rft_receive_phase {
    RFT_RECEIVE_NONE,
    RFT_RECEIVE_WAITING,   /* offered; no image is free, or the worker holds it already */
    RFT_RECEIVE_RESUMING,  /* it has an image, to which another worker's frames are being copied */
    RFT_RECEIVE_FETCHING,  /* it has an image; frames or SEAL are missing */
    RFT_RECEIVE_VERIFYING, /* all is here, in the publisher's memory, or from several publishers;
                              its bytes are being digested */
    RFT_RECEIVE_COMPLETE,  /* verified */
} rft_receive_phase;

typedef struct rft_receive {
    const refit_config *config;
    rft_images *images;
    rft_shard_links *links;

    rft_receive_phase phase;
    rft_catalog *catalog; /* of the version */
    rft_want *want;       /* acquired; what comes of it; NULL: all */
    rft_image *image;     /* from start on */
    rft_image *left;      /* of the same version, by the worker that received it before; NULL */
    uint32_t left_next;   /* the frame that is looked at next there */
    uint64_t epoch;
    uint64_t version;
    uint64_t base;
    refit_path path;
    uint32_t ranks; /* the frames come through so many links; 0: through the session's connection */
    bool share;     /* neighbors are to map the image */
    char segment[RFT_SEGMENT_NAME_BYTES]; /* of the store, or of a neighbor's image */
    uint64_t segment_offset;
    char lock[RFT_SEGMENT_NAME_BYTES]; /* of LEND; empty: it has not come */
    rft_bytes areas;                   /* of LEND */
    rft_bytes places;                  /* of LEND */
    rft_bytes have;                    /* of PULL */
    bool unmappable;                   /* what LEND names could not be mapped */
    int64_t offered_at;
    int64_t deadline;
    bool sealed;
    rft_digest128 digest;     /* of SEAL */
    rft_bytes tensor_digests; /* of SEAL */
    rft_image_cursor cursor;  /* while VERIFYING: how far it is */
    rft_gpu_verify gpu;       /* the same in the GPU's memory */
    uint64_t verify_bytes;    /* that one call of work reads at most */

    uint32_t window;         /* of the fetch */
    rft_fetch fetch;         /* of the frames that come through the session's connection */
    rft_joint_sums joint;    /* while VERIFYING what came through links */
    uint32_t joined;         /* links whose sums are in there */
    rft_fetch_counts counts; /* since it was opened */
} rft_receive;

/* All is borrowed until close. Messages are put into the send queue; a failure is noted there. */
void rft_receive_init(rft_receive *receive, const refit_config *config, rft_images *images,
                      rft_shard_links *links, rft_send_queue *send_queue, const rft_limits *limits);
void rft_receive_close(rft_receive *receive);

/* Before an OFFER of `version` is taken: what a neighbor has received of the same version, if this
 * worker has that mapped and waits for it; NULL: it has none. The caller drops its use as STAGED,
 * or gives it to rft_receive_resume after the offer. */
rft_image *rft_receive_leave(rft_receive *receive, uint64_t version);
/* The offered version begins with the frames that are there. Takes the image; NULL is allowed. */
void rft_receive_resume(rft_receive *receive, rft_image *left);

/* Takes an OFFER in the place of any version before it; `own` is the part that the publisher was
 * told to send. REFIT_ERR_PROTOCOL: it contradicts the manifest, or what the ranks publish. */
refit_status rft_receive_offer(rft_receive *receive, const rft_message *offer, rft_catalog *catalog,
                               rft_want *own, uint32_t window, int64_t now, refit_error *error);

/* Gets an image and asks for frames; once more, if the GPU's memory was busy. `held` is the version
 * that the worker holds in this epoch, with its image; NULL: none. REFIT_ERR_BUSY: no image is
 * free, start again later. REFIT_ERR_STALE: the worker does not hold the base.
 * REFIT_ERR_HOST_MEMORY, _SYSTEM, … */
refit_status rft_receive_start(rft_receive *receive, const rft_image *held, refit_error *error);

/* Messages about another version are ignored. */
refit_status rft_receive_frame(rft_receive *receive, const rft_message *frame, rft_view payload,
                               refit_error *error);
/* A message of a rank, to its link; what rft_shard_link_message answers. */
refit_status rft_receive_link_message(rft_receive *receive, rft_shard_link *link,
                                      const rft_message *message, rft_view payload, int64_t now,
                                      refit_error *error);
refit_status rft_receive_lend(rft_receive *receive, const rft_message *lend, refit_error *error);
/* `wake_fd` is that of rft_piece_queue_open. REFIT_ERR_BUSY: no image is free. */
refit_status rft_receive_pieces(rft_receive *receive, const rft_message *pieces, int wake_fd,
                                refit_error *error);
refit_status rft_receive_seal(rft_receive *receive, const rft_message *seal, refit_error *error);

/* Whether there is something to do that takes long: to digest the image (VERIFYING), or to copy
 * another worker's frames (RESUMING). */
bool rft_receive_is_busy(const rft_receive *receive);
/* Does the next part of it, which is short against a heartbeat, so that the caller can speak and
 * hear between two. */
refit_status rft_receive_work(rft_receive *receive, refit_error *error);

/* The publisher's heart beat, one each `heartbeat_ms`: as rft_fetch_beat. */
refit_status rft_receive_beat(rft_receive *receive, uint32_t heartbeat_ms, int64_t now,
                              refit_error *error);

/* Hands the verified image over, in use as STAGED, and is NONE again. */
rft_image *rft_receive_take(rft_receive *receive);
void rft_receive_drop(rft_receive *receive);

#endif
