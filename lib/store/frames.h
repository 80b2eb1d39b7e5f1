/*
 * frames: the version being served as encoded FRAMEs, each made once a coding and shared by all
 * workers. A frame whose blocks are all sent whole is the slot's own memory; any other is gathered
 * into a buffer, which lives until the frame is made for a later version and the transport is done
 * with it. So what was coded against the version before can be sent again, and to workers that are
 * slow, when that version's bytes are long gone; a frame that no worker has asked for by then is
 * coded without them: what changed in it travels whole.
 *
 * Buffers of one coding take at most the store's size together. Belongs to the publisher's service
 * thread, which lets others help it with what takes long.
 */
#ifndef RFT_FRAMES_H
#define RFT_FRAMES_H

#include "base/pool.h"
#include "net/channel.h"
#include "store/store.h"
#include "wire/reassembly.h"

typedef enum rft_coding {
    RFT_CODING_WHOLE,  /* for a worker that has no base */
    RFT_CODING_SAME,   /* blocks that are as in the base are left out */
    RFT_CODING_SPARSE, /* the same, and others are sent as what changed */
    RFT_CODING_PACKED, /* the same, compressed */
    RFT_CODINGS
} rft_coding;

/* What became of the version's blocks in the codings that build on the base; a frame once for each
 * of them. */
typedef struct rft_frames_counts {
    uint64_t version;
    rft_frame_counts blocks;
    uint64_t bytes; /* payload */
    double seconds;
} rft_frames_counts;

typedef struct rft_frames rft_frames;

/* A pool whose threads share the coding of frames; close it with rft_pool_close. `threads` 0: one
 * per core, at most 8. */
refit_status rft_frames_open_pool(rft_pool *pool, uint32_t threads, refit_error *error);

/* `manifest` and `encoders` are borrowed, the latter until close; NULL: the calling thread alone.
 */
refit_status rft_frames_open(const rft_manifest *manifest, const refit_config *config,
                             rft_pool *encoders, rft_frames **out, refit_error *error);
/* Buffers are retired. NULL is allowed. */
void rft_frames_close(rft_frames *frames, rft_retire_list *retired);

/* One frame as it is sent; valid until the next call. */
typedef struct rft_encoded {
    rft_view message;
    rft_payload payload;
} rft_encoded;

/* Frame `sequence` of the version that `store` serves, as much of it as is wanted: some, at least.
 * If it has to be coded against the base, so are others that will be asked for next, by all threads
 * at once: those among the first `ready` of store->ready. */
refit_status rft_frames_encode(rft_frames *frames, const rft_store *store, uint32_t sequence,
                               rft_coding coding, rft_want *want, uint32_t ready, rft_encoded *out,
                               refit_error *error);

rft_frames_counts rft_frames_count(const rft_frames *frames);

#endif
