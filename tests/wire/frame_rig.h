/* frame_rig: a version, the one before it, and a worker that makes the first of the second. */
#ifndef FRAME_RIG_H
#define FRAME_RIG_H

#include "wire/reassembly.h"

#define FRAME_RIG_TENSORS 12u

typedef struct frame_rig {
    rft_manifest *manifest;
    unsigned char *base;
    unsigned char *image;
    unsigned char *staging;
    unsigned char *same; /* per block: 1 where image and base are equal */
    unsigned char digests[8 * FRAME_RIG_TENSORS];
    rft_message seal;
    rft_reassembly *reassembly;
    rft_bytes modes;
    rft_bytes scratch;
    rft_frame_counts counts; /* of the frame that was encoded last */
    rft_frame_codec *codec;  /* NULL: frames travel unpacked */
    uint32_t price;          /* of a changed element */
    rft_parts before, after; /* {0}: none are known */
    unsigned char planes[RFT_PACK_BYTES];
    uint64_t seed;
} frame_rig;

/* Seeded tensors and then `last`, in frames of at most `frame_bytes`; the base, and room for what
 * comes of it, which is filled with 0xee. The image is the test's to make. */
void frame_rig_open(frame_rig *f, uint64_t seed, uint64_t most_elements, const refit_tensor *last,
                    uint64_t frame_bytes);
/* Once there is an image, and again when it has changed: which blocks are the same, and the seal.
 */
void frame_rig_seal(frame_rig *f);
/* The worker, with the base. */
void frame_rig_assemble(frame_rig *f);
void frame_rig_close(frame_rig *f);

/* Of version 1; in the rig until its next use. */
rft_message frame_rig_encode(frame_rig *f, uint32_t sequence, const rft_frame_source *source,
                             rft_view *payload);

void assert_staged(const frame_rig *f);

/* The status of a frame whose payload ends where its memory does. */
refit_status frame_rig_take_copy(frame_rig *f, const rft_message *frame, rft_view payload);

/* A refused frame leaves staging as it was, and is not counted. */
void assert_frame_refused(frame_rig *f, const rft_message *frame, rft_view payload);

#endif
