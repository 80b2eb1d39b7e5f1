/*
 * A worker that speaks the protocol one message at a time, so that a test can stop, lie, repeat
 * itself, send garbage or vanish at any point. It does nothing by itself: it beats only while it
 * waits for a message.
 *
 * Everything here fails the test if it does not come about within RAW_WAIT_MS, so it must run on
 * the test's main thread.
 */
#ifndef RAW_WORKER_H
#define RAW_WORKER_H

#include "net/channel.h"
#include "store/segment.h"
#include "wire/reassembly.h"

#define RAW_WAIT_MS 50000u

typedef struct raw_worker {
    refit_config config;
    rft_limits limits;
    rft_channel *channel;
    char name[64];
    uint64_t instance;
    bool shm;
    bool delta; /* says that it takes sparse blocks: set it before it joins */
    rft_version_id held;

    /* From the trainer's messages. */
    uint64_t epoch;
    uint64_t frame_bytes;
    uint64_t proof;
    rft_manifest *manifest;
    rft_message offer;                    /* its views are gone */
    char segment[RFT_SEGMENT_NAME_BYTES]; /* of the offer; empty: frames */
    bool sealed;
    rft_digest128 digest; /* of the seal */
    uint64_t sums[256];   /* of the seal */

    rft_reassembly *reassembly;
    uint32_t sparse_blocks; /* in the frames that it took, ever */
    unsigned char *staging; /* filled with frames */
    unsigned char *base;    /* the version held, if it came in frames */
    rft_segment mapped;

    rft_bytes scratch;
    rft_message heard; /* the last message; its views are good until the next */
    rft_view payload;
} raw_worker;

/* Connects; nothing is said yet. */
void raw_worker_open(raw_worker *worker, const char *endpoint, const char *name, bool shm);
/* As raw_worker_open, with another configuration than quick_config. */
void raw_worker_open_as(raw_worker *worker, const char *endpoint, const char *name, bool shm,
                        const refit_config *config);
/* Without a word, like a process that was killed. */
void raw_worker_close(raw_worker *worker);

void raw_worker_send(raw_worker *worker, const rft_message *message);
void raw_worker_send_bytes(raw_worker *worker, const void *bytes, size_t count);

/* Waits for a message of that kind; takes MANIFEST, FRAME and SEAL for itself and passes over beats
 * while it waits. Any other kind fails the test. */
const rft_message *raw_worker_expect(raw_worker *worker, rft_message_kind kind);
/* Takes what is there; whether a message of that kind was among it. */
bool raw_worker_has_heard(raw_worker *worker, rft_message_kind kind);

/* ---- Steps in good order, each up to the message it is named after */

void raw_worker_say_hello(raw_worker *worker);
void raw_worker_join(raw_worker *worker);  /* HELLO, WELCOME, JOIN, first BEAT */
void raw_worker_offer(raw_worker *worker); /* waits for OFFER */
void raw_worker_pull(raw_worker *worker, uint32_t credits);
void raw_worker_resend(raw_worker *worker, uint32_t sequence);
void raw_worker_fetch(raw_worker *worker); /* all frames, or the slot mapped; waits for SEAL */
void raw_worker_say_staged(raw_worker *worker);
void raw_worker_stage(raw_worker *worker); /* OFFER to STAGED, verified */
void raw_worker_say_committed(raw_worker *worker);
void raw_worker_apply(raw_worker *worker); /* waits for COMMIT, says COMMITTED */
void raw_worker_say_released(raw_worker *worker, uint64_t version);
void raw_worker_say_failed(raw_worker *worker, refit_status code, bool kept);
void raw_worker_beat(raw_worker *worker, uint64_t staged);
void raw_worker_say_bye(raw_worker *worker);

/* The version's bytes as it has staged them. */
const unsigned char *raw_worker_bytes(const raw_worker *worker);

#endif
