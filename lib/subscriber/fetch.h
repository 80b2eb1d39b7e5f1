/*
 * fetch: the frames of one publisher, on their way into an image.
 *
 * It asks for frames by credits, places what comes, and has damaged and missing frames sent again.
 * The window bounds the credits granted with PULL (wire/frame.h); as many frames may be asked for
 * again with RESEND, and no more wait at once. Which image, and what is to come of the version, its
 * owner says with begin. Several fetches may fill one image, each with a part of its own. No
 * socket, no clock, no thread.
 */
#ifndef RFT_FETCH_H
#define RFT_FETCH_H

#include "net/send_queue.h"
#include "subscriber/images.h"
#include "wire/reassembly.h"

/* What has come, for the report. */
typedef struct rft_fetch_counts {
    uint64_t bytes_received; /* payload */
    uint64_t bad_frames;
} rft_fetch_counts;

/* What is to be fetched, and to where. All is borrowed. */
typedef struct rft_fetch_plan {
    rft_catalog *catalog; /* of the version */
    uint64_t version;
    rft_want *want;            /* until end; what comes from this publisher; NULL: all */
    unsigned char *memory;     /* until end; of the image */
    const unsigned char *base; /* until end; of the version that it builds on; NULL: none */
    uint32_t window;           /* credits in flight at most */
} rft_fetch_plan;

typedef struct rft_fetch {
    const refit_config *config; /* borrowed, as the next three */
    const rft_limits *limits;
    rft_send_queue *send_queue; /* to the publisher */
    rft_fetch_counts *counts;

    uint64_t version;           /* whose frames come; 0: none */
    rft_reassembly *reassembly; /* of `catalog`; kept for the next version */
    rft_catalog *catalog;       /* the manifest it was opened for */
    uint16_t *resends;          /* how often each frame was asked for again */
    uint32_t window;            /* credits in flight at most */
    int32_t in_flight;          /* parts of credits that were granted and are not used up by what
                                   has arrived; a frame may use more than is left */
    int64_t quiet_since;        /* first beat since the last frame, or the last asking; 0: none */
} rft_fetch;

/* All is borrowed until close. Messages are put into the send queue; a failure is noted there. */
void rft_fetch_init(rft_fetch *fetch, const refit_config *config, const rft_limits *limits,
                    rft_send_queue *send_queue, rft_fetch_counts *counts);
void rft_fetch_close(rft_fetch *fetch);

/* Gets ready for the frames of a version, in the place of any before it. REFIT_ERR_HOST_MEMORY */
refit_status rft_fetch_begin(rft_fetch *fetch, const rft_fetch_plan *plan, refit_error *error);
/* Its version is not wanted any more. */
void rft_fetch_end(rft_fetch *fetch);

/* Says a first PULL that has more to say than credits: `pull` lacks the version and the credits. At
 * least one is granted, though none may be needed. */
void rft_fetch_announce(rft_fetch *fetch, const rft_message *pull);
/* Tops up the window. */
void rft_fetch_pull(rft_fetch *fetch);

/* Takes a frame of its version, and asks for others. REFIT_ERR_CORRUPT: it was damaged too often;
 * and the other errors of rft_reassembly_take. */
refit_status rft_fetch_frame(rft_fetch *fetch, const rft_message *frame, rft_view payload,
                             refit_error *error);

/* The publisher's heart beat, one each `heartbeat_ms`, once all of the version is written: frames
 * that have not come while several were heard, though they were asked for, are lost and asked for
 * again. Beats queue after frames, so a slow line is not a loss; and many beats heard at once are
 * no more than one, so neither is a worker that was stopped. */
refit_status rft_fetch_beat(rft_fetch *fetch, uint32_t heartbeat_ms, int64_t now,
                            refit_error *error);

#endif
