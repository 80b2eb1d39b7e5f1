/*
 * reassembly: frames in, a verified version out.
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

#include "wire/frame.h"

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

/* Until the next reset it assembles this part of the version alone: frames of which nothing is
 * wanted count as taken. At once after open or reset; `want` must outlive that, and be of the
 * manifest. NULL is allowed. */
void rft_reassembly_narrow(rft_reassembly *reassembly, const rft_want *want);

/* Takes one frame. REFIT_ERR_CORRUPT: the hash does not match, or the result of applying a sparse
 * block does not have the expected digest; request the frame again. REFIT_ERR_STALE: the base is
 * not the one that a sparse block was coded against, so the version is to be had whole only.
 * REFIT_ERR_PROTOCOL: it breaks the rules. Unless a sparse block is the reason, staging is as it
 * was. */
refit_status rft_reassembly_take(rft_reassembly *reassembly, const rft_message *frame,
                                 rft_view payload, refit_error *error);

/* Takes one from `image`, where another process has placed it: its bytes are final there. Nothing
 * if it is taken already. */
void rft_reassembly_take_placed(rft_reassembly *reassembly, uint32_t sequence,
                                const unsigned char *image);

/* Whether a frame is taken. */
bool rft_reassembly_has(const rft_reassembly *reassembly, uint32_t sequence);

/* Frames taken so far, and whether all are in (a version of empty tensors has none). */
uint32_t rft_reassembly_taken(const rft_reassembly *reassembly);
bool rft_reassembly_complete(const rft_reassembly *reassembly);

/* The lowest sequence number not yet taken, at least `from` and below `before`; UINT32_MAX if there
 * is none. */
uint32_t rft_reassembly_missing(const rft_reassembly *reassembly, uint32_t from, uint32_t before);

/* Holds the digests of SEAL (its `tensors`, 8 bytes each) against those of the bytes taken, and its
 * version digest against both. Of tensors that are wanted in part the frames' hashes are all that
 * was compared. REFIT_ERR_CORRUPT names the first tensor that differs; REFIT_ERR_STATE if frames
 * are missing. */
refit_status rft_reassembly_verify(const rft_reassembly *reassembly, const rft_message *seal,
                                   refit_error *error);

/* The same check for bytes that did not travel (shared memory, broadcast.verify: always): digests
 * the image itself, all of it at once. */
refit_status rft_image_verify(const rft_manifest *manifest, const unsigned char *image,
                              const rft_message *seal, refit_error *error);

/* How far an image has been verified; {0} is the start, and but for `want` {0}. */
typedef struct rft_image_cursor {
    const rft_want *want; /* tensors of which it has not all are passed over; NULL: none */
    uint32_t tensor;      /* reached */
    uint32_t original;    /* its number among those that are not aliases */
    uint64_t offset;      /* bytes of it that are in `sum` */
    uint64_t sum;
    bool done; /* all of the image is what the publisher wrote */
} rft_image_cursor;

/* The same check in parts: a call reads `most` bytes at most (8 or more) and goes on from the
 * cursor when it is called again with the same arguments. */
refit_status rft_image_verify_part(const rft_manifest *manifest, const unsigned char *image,
                                   const rft_message *seal, uint64_t most, rft_image_cursor *cursor,
                                   refit_error *error);

/* Whether bytes are the version that a SEAL message describes. `sums`: per tensor, the sum of its
 * digest's parts; aliases' are not looked at, nor those of which `want` has not all.
 * REFIT_ERR_CORRUPT names the first tensor that differs; REFIT_ERR_PROTOCOL: SEAL does not fit the
 * manifest. */
refit_status rft_seal_check(const rft_manifest *manifest, const rft_want *want,
                            const uint64_t *sums, const rft_message *seal, refit_error *error);

/* ---- Several reassemblies, one image
 *
 * Where each fills a part of its own, a tensor's digest is the sum of theirs, for the blocks that
 * one of them has whole; a block that they divide is digested where it lies.
 */

typedef struct rft_joint_sums {
    const rft_manifest *manifest; /* borrowed */
    uint64_t *sums;               /* per tensor, of the blocks that are known */
    unsigned char *known;         /* per block, 1: it is in the sums */
    uint32_t block;               /* the next that is looked at in the image */
} rft_joint_sums;

/* The manifest must outlive it. REFIT_ERR_HOST_MEMORY */
refit_status rft_joint_sums_open(const rft_manifest *manifest, rft_joint_sums *out,
                                 refit_error *error);
/* {0} is closed. */
void rft_joint_sums_close(rft_joint_sums *joint);

/* Adds those of a reassembly that is complete. Once each, before the next. */
void rft_joint_sums_add(rft_joint_sums *joint, const rft_reassembly *reassembly);

/* Adds blocks that are not known, of tensors of which `want` (NULL: everything) has all: at most
 * `most` bytes of the image, or one block, and goes on from there when it is called again. True:
 * all are known, and rft_seal_check may look at the sums. */
bool rft_joint_sums_digest(rft_joint_sums *joint, const rft_want *want, const unsigned char *image,
                           uint64_t most);

#endif
