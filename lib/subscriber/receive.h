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
 * A version that comes piece by piece is complete once SEAL says so, though its user still copies.
 *
 * It checks the publisher's offer against the manifest and the limits, asks for frames by credits,
 * has damaged and missing ones sent again, and compares the digests of SEAL with the bytes that
 * arrived. Every call that fails says with which status the version is to be refused; the session
 * sends that and drops the version. No socket, no clock, no thread.
 */
#ifndef RFT_RECEIVE_H
#define RFT_RECEIVE_H

#include "net/send_queue.h"
#include "store/copy_queue.h"
#include "subscriber/images.h"
#include "wire/reassembly.h"

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
    RFT_RECEIVE_FETCHING,  /* it has an image; frames or SEAL are missing */
    RFT_RECEIVE_VERIFYING, /* all is here, in the publisher's memory; its bytes are being digested
                            */
    RFT_RECEIVE_COMPLETE,  /* verified */
} rft_receive_phase;

typedef struct rft_receive {
    const refit_config *config;
    rft_images *images;
    rft_send_queue *send_queue; /* the session's, as the next one */
    const rft_limits *limits;

    rft_receive_phase phase;
    rft_catalog *catalog; /* of the version */
    rft_image *image;     /* from start on */
    uint64_t version;
    uint64_t base;
    refit_path path;
    char segment[RFT_SEGMENT_NAME_BYTES]; /* of the store */
    uint64_t segment_offset;
    char lock[RFT_SEGMENT_NAME_BYTES]; /* of LEND; empty: it has not come */
    rft_bytes areas;                   /* of LEND */
    rft_bytes places;                  /* of LEND */
    bool unmappable;                   /* what LEND names could not be mapped */
    int64_t offered_at;
    int64_t deadline;
    bool sealed;
    rft_digest128 digest;     /* of SEAL */
    rft_bytes tensor_digests; /* of SEAL */
    rft_image_cursor cursor;  /* while VERIFYING: how far it is */
    rft_gpu_verify gpu;       /* the same in the GPU's memory */
    uint64_t verify_bytes;    /* that one call of verify reads at most */

    rft_reassembly *reassembly;      /* of reassembly_catalog; kept for the next version */
    rft_catalog *reassembly_catalog; /* the manifest it was opened for */
    uint16_t *resends;               /* how often each frame was asked for again */
    uint32_t window;                 /* credits in flight at most */
    int32_t in_flight;               /* parts of credits that were granted and are not used up by
                                        what has arrived; a frame may use more than is left */
    int64_t quiet_since; /* first beat since the last frame, or the last asking; 0: none */

    uint64_t bytes_received; /* payload, since it was opened */
    uint64_t bad_frames;     /* since it was opened */
} rft_receive;

/* All is borrowed until close. Messages are put into the send queue; a failure is noted there. */
void rft_receive_init(rft_receive *receive, const refit_config *config, rft_images *images,
                      rft_send_queue *send_queue, const rft_limits *limits);
void rft_receive_close(rft_receive *receive);

/* Takes an OFFER in the place of any version before it. REFIT_ERR_PROTOCOL: it contradicts the
 * manifest. */
refit_status rft_receive_offer(rft_receive *receive, const rft_message *offer, rft_catalog *catalog,
                               uint32_t window, int64_t now, refit_error *error);

/* Gets an image and asks for frames; once more, if the GPU's memory was busy. `held` is the version
 * that the worker holds in this epoch, with its image; NULL: none. REFIT_ERR_BUSY: no image is
 * free, start again later. REFIT_ERR_STALE: the worker does not hold the base.
 * REFIT_ERR_HOST_MEMORY, _SYSTEM, … */
refit_status rft_receive_start(rft_receive *receive, const rft_image *held, refit_error *error);

/* Messages about another version are ignored. */
refit_status rft_receive_frame(rft_receive *receive, const rft_message *frame, rft_view payload,
                               refit_error *error);
refit_status rft_receive_lend(rft_receive *receive, const rft_message *lend, refit_error *error);
/* `wake_fd` is that of rft_piece_queue_open. REFIT_ERR_BUSY: no image is free. */
refit_status rft_receive_pieces(rft_receive *receive, const rft_message *pieces, int wake_fd,
                                refit_error *error);
refit_status rft_receive_seal(rft_receive *receive, const rft_message *seal, refit_error *error);

/* Digests the next part of the image while VERIFYING: a part is short against a heartbeat, so the
 * caller can speak and hear between two. */
refit_status rft_receive_verify(rft_receive *receive, refit_error *error);

/* The publisher's heart beat, one each `heartbeat_ms`: frames that have not come while several were
 * heard, though they were asked for and all is written, are lost and asked for again. Beats queue
 * after frames, so a slow line is not a loss; and many beats heard at once are no more than one, so
 * neither is a worker that was stopped. */
refit_status rft_receive_beat(rft_receive *receive, uint32_t heartbeat_ms, int64_t now,
                              refit_error *error);

/* Hands the verified image over, in use as STAGED, and is NONE again. */
rft_image *rft_receive_take(rft_receive *receive);
void rft_receive_drop(rft_receive *receive);

#endif
