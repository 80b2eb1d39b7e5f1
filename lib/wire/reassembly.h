/*
 * reassembly: frames in, a verified version out. What a worker does with the bytes that travelled.
 *
 * The caller owns two images of manifest->store_bytes: `staging`, which is filled, and `base`, the
 * version held (NULL if none), which `same` and `sparse` blocks build on. Each frame is checked
 * (sequence, block modes, lengths, XXH3-64), copied and digested in one pass; when all are in and
 * the digests of SEAL are known, reassembly_verify tells whether the version is what the publisher
 * wrote. Order does not matter; a frame that is there already is ignored. No socket, no clock, no
 * thread.
 */
#ifndef RFT_REASSEMBLY_H
#define RFT_REASSEMBLY_H

#include "wire/frame_codec.h"
#include "wire/manifest.h"

typedef enum rft_block_mode {
    RFT_BLOCK_DENSE = 0,  /* the block as it is */
    RFT_BLOCK_SAME = 1,   /* as in the base; nothing in the payload */
    RFT_BLOCK_SPARSE = 2, /* what changed against the base (sparse.h) */
} rft_block_mode;

typedef struct rft_reassembly rft_reassembly;

/* Takes all the memory that it will need, but for what unpacking packed frames needs, which the
 * first of them brings: nothing below allocates. The manifest must outlive it. */
refit_status rft_reassembly_open(const rft_manifest *manifest, unsigned char *staging,
                                 const unsigned char *base, rft_reassembly **out,
                                 refit_error *error);
void rft_reassembly_close(rft_reassembly *reassembly);

/* Starts over for another version of the same manifest. */
void rft_reassembly_reset(rft_reassembly *reassembly, unsigned char *staging,
                          const unsigned char *base);

/* Takes one frame. REFIT_ERR_CORRUPT: the hash does not match, or what comes of a sparse block is
 * not what it should be: ask again. REFIT_ERR_STALE: the base is not the one that a sparse block
 * was coded against, so the version is to be had whole only. REFIT_ERR_PROTOCOL: it breaks the
 * rules. Unless a sparse block is the reason, staging is as it was. */
refit_status rft_reassembly_take(rft_reassembly *reassembly, const rft_message *frame,
                                 rft_view payload, refit_error *error);

/* Frames taken so far, and whether all are in (a version of empty tensors has none). */
uint32_t rft_reassembly_taken(const rft_reassembly *reassembly);
bool rft_reassembly_complete(const rft_reassembly *reassembly);

/* The lowest sequence number not yet taken, at least `from` and below `before`; UINT32_MAX if there
 * is none. */
uint32_t rft_reassembly_missing(const rft_reassembly *reassembly, uint32_t from, uint32_t before);

/* Holds the digests of SEAL (its `tensors`, 8 bytes each) against those of the bytes taken, and its
 * version digest against both. REFIT_ERR_CORRUPT names the first tensor that differs;
 * REFIT_ERR_STATE if frames are missing. */
refit_status rft_reassembly_verify(const rft_reassembly *reassembly, const rft_message *seal,
                                   refit_error *error);

/* The same check for bytes that did not travel (shared memory, broadcast.verify: always): digests
 * the image itself, all of it at once. */
refit_status rft_image_verify(const rft_manifest *manifest, const unsigned char *image,
                              const rft_message *seal, refit_error *error);

/* How far an image has been verified; {0} is the start. */
typedef struct rft_image_cursor {
    uint32_t tensor;   /* reached */
    uint32_t original; /* its number among those that are not aliases */
    uint64_t offset;   /* bytes of it that are in `sum` */
    uint64_t sum;
    bool done; /* all of the image is what the publisher wrote */
} rft_image_cursor;

/* Likewise, but reads `most` bytes at most (8 or more) and goes on from the cursor when it is
 * called again with the same arguments. */
refit_status rft_image_verify_part(const rft_manifest *manifest, const unsigned char *image,
                                   const rft_message *seal, uint64_t most, rft_image_cursor *cursor,
                                   refit_error *error);

/* ---- The publisher's side (frame.c) */

/* The digest parts of a version's blocks, where somebody has taken them already. */
typedef struct rft_parts {
    const uint64_t *parts;      /* per block of the version */
    const unsigned char *known; /* likewise, 0: not taken; NULL: none is */
} rft_parts;

/* What a frame is made of. */
typedef struct rft_frame_source {
    const unsigned char *image;
    const unsigned char *same; /* per block of the version, 1: as in the base; NULL: none is */
    const unsigned char *base; /* an image in which at least the other blocks are as in the base;
                                  NULL: no block is sparse */
    uint64_t worth; /* bytes that must be saved, or the frame goes whole: 0 for any, if need be */
    rft_frame_codec *codec; /* NULL: what is gathered travels as it is */
    uint32_t price;         /* of coding a changed element, in bytes: 0 for whatever is smaller */
    rft_parts before;       /* of the base */
    rft_parts after;        /* of the image */
} rft_frame_source;

/* Its blocks by mode, and the elements that changed in the sparse ones. */
typedef struct rft_frame_counts {
    uint32_t same;
    uint32_t sparse;
    uint32_t dense;
    uint64_t changed;
} rft_frame_counts;

typedef struct rft_frame {
    rft_view payload;
    uint64_t hash;
    rft_frame_counts counts;
    bool packed; /* plane by plane */
    unsigned char planes[RFT_PACK_BYTES];
} rft_frame;

/* Frame `sequence` as modes and payload. If all blocks are dense the payload is a view of the image
 * itself (nothing is copied), padding between tensors included; else what each block needs, without
 * padding, is gathered into `scratch`, which holds the payload until its next use, or the frame
 * codec does. Reused, `modes`, `scratch` and the codec allocate only at first. */
refit_status rft_frame_encode(const rft_manifest *manifest, uint32_t sequence,
                              const rft_frame_source *source, rft_bytes *modes, rft_bytes *scratch,
                              rft_frame *out, refit_error *error);

/* Whether bytes are the version that a SEAL message describes. `sums`: per tensor, the sum of its
 * digest's parts; aliases' are not looked at. REFIT_ERR_CORRUPT names the first tensor that
 * differs; REFIT_ERR_PROTOCOL: SEAL does not fit the manifest. */
refit_status rft_seal_check(const rft_manifest *manifest, const uint64_t *sums,
                            const rft_message *seal, refit_error *error);

#endif
