/*
 * frames: the version being served as encoded FRAMEs, each made once a kind and shared by all
 * workers. A frame whose blocks are all sent whole is the slot's own memory; one that leaves blocks
 * out is gathered into a buffer that lives until the transport is done with it.
 *
 * Belongs to the publisher's service thread.
 */
#ifndef RFT_FRAMES_H
#define RFT_FRAMES_H

#include "broadcast/channel.h"
#include "broadcast/store.h"
#include "wire/assembly.h"

typedef struct rft_frames rft_frames;

/* `manifest` is borrowed. */
refit_status rft_frames_open(const rft_manifest *manifest, const rft_limits *limits,
                             rft_frames **out, refit_error *error);
/* Buffers go to the attic. NULL is allowed. */
void rft_frames_close(rft_frames *frames, rft_attic *attic);

/* One frame as it is sent; valid until the next call. */
typedef struct rft_encoded {
    rft_view message;
    rft_payload payload;
} rft_encoded;

/* Frame `sequence` of the version that `store` serves, with `same` blocks left out if `delta`. */
refit_status rft_frames_encode(rft_frames *frames, const rft_store *store, uint32_t sequence,
                               bool delta, rft_encoded *out, refit_error *error);

#endif
