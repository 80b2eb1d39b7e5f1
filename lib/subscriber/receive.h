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
    RFT_RECEIVE_RESUMING,  /* it has an image, to which another worker's frames are being copied */
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
    rft_want *want;       /* acquired; what comes of it; NULL: all */
    rft_image *image;     /* from start on */
    rft_image *left;      /* of the same version, by the worker that received it before; NULL */
    uint32_t left_next;   /* the frame that is looked at next there */
    uint64_t epoch;
    uint64_t version;
    uint64_t base;
    refit_path path;
    bool share;     /* neighbors are to map the image */
    bool announced; /* its name, and what is there already, were said with PULL */
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

/* Before an OFFER of `version` is taken: what a neighbor has received of the same version, if this
 * worker has that mapped and waits for it; NULL: it has none. The caller drops its use as STAGED,
 * or gives it to rft_receive_resume after the offer. */
rft_image *rft_receive_leave(rft_receive *receive, uint64_t version);
/* The offered version begins with the frames that are there. Takes the image; NULL is allowed. */
void rft_receive_resume(rft_receive *receive, rft_image *left);

/* Takes an OFFER in the place of any version before it; `own` is the part that the publisher was
 * told to send. REFIT_ERR_PROTOCOL: it contradicts the manifest. */
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
