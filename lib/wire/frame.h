/*
 * frame: some blocks of a version as FRAME carries them: one mode byte a block, and the payload.
 *
 * If all blocks are dense, the payload is the range of the image as it lies. Else it is gathered:
 * first the directory of the sparse blocks, then, block after block, what each has: its bytes
 * (dense), nothing (same), or its planes (sparse). A gathered payload may be packed.
 *
 * For a worker that wants a part of the version (want.h), what a block has are its wanted bytes, or
 * what changed of these: such a frame is gathered, unless all of it is wanted, and never packed.
 *
 * A frame is never longer than the range of the image that it stands for.
 */
#ifndef RFT_FRAME_H
#define RFT_FRAME_H

#include "kernels/delta.h"
#include "wire/shard.h"

typedef enum rft_block_mode {
    RFT_BLOCK_DENSE = 0,  /* the block as it is */
    RFT_BLOCK_SAME = 1,   /* as in the base; nothing in the payload */
    RFT_BLOCK_SPARSE = 2, /* what changed against the base (rft_sparse) */
} rft_block_mode;

/* ---- Sparse blocks
 *
 * A block as its changes. It has an entry of 20 bytes in the directory, little-endian:
 *
 *     u16 changed - 1 | u16 escapes | u64 digest part before | u64 digest part after
 *
 * and its planes, one after the other as kernels/delta.h lays them out. How long those are follows
 * from the entry and from the planes themselves, so no length travels. The parts are those of
 * rft_digest_part at the block's place in its tensor: `before` says to which bytes the changes
 * belong, `after` is that of the result. A block is coded so only where that is smaller than its
 * bytes, entry included.
 */

#define RFT_SPARSE_ENTRY_BYTES RFT_DELTA_ENTRY_BYTES

typedef struct rft_sparse {
    rft_delta_shape shape;
    rft_delta_entry delta;
    uint64_t before;
    uint64_t after;
} rft_sparse;

/* What the elements of a block are: halves where their type says so, else bits of its width; bytes
 * where an element has fewer bits or an odd number of them. */
rft_delta_shape rft_sparse_shape(const rft_manifest *manifest, const rft_block *block);

/* The block with its wanted bytes alone, of which a sparse block is made: after one another, at the
 * block's place in its tensor. False: those are none, or not whole elements. */
bool rft_sparse_cut(const rft_manifest *manifest, const rft_want *want, const rft_block *block,
                    rft_block *cut);

/* Codes the block, which is `before` in the base and `after` now: its planes go to `planes`, which
 * has rft_delta_bound bytes of room. The digests are the caller's. False: its own bytes are as
 * small, or coding them does not pay at this price (rft_delta_encode_if). */
bool rft_sparse_encode(const rft_manifest *manifest, const rft_block *block, uint32_t price,
                       const void *before, const void *after, unsigned char *planes,
                       rft_sparse *out);
void rft_sparse_write_entry(const rft_sparse *sparse, unsigned char *entry);

void rft_sparse_read_counts(const unsigned char *entry, uint32_t *changed, uint32_t *escapes);

/* Reads an entry and measures the planes that begin at `planes`, of which at most `room` bytes are
 * there. False: they contradict each other, do not fit, or are not smaller than the block. */
bool rft_sparse_read(const rft_manifest *manifest, const rft_block *block,
                     const unsigned char *entry, const unsigned char *planes, size_t room,
                     rft_sparse *out);

/* ---- Packed payloads
 *
 * A gathered payload plane by plane, each of them compressed (zstd) where it shrinks.
 *
 * What the blocks of a frame have in common compresses better together than what stands next to it
 * in a block. So the payload is taken apart into planes over the whole frame, one after the other:
 * the directory of the sparse blocks, the six planes of kernels/delta.h, and the bytes of dense
 * blocks; in each the blocks' parts in their order. FRAME says in `planes` how long each is as it
 * travels, 4 bytes each: 0 where it is not compressed, and then as long as the blocks need.
 *
 * How long a plane is once it is unpacked follows from the block modes and from the planes before
 * it, and all of them together are no longer than the range of the image that the frame stands
 * for: memory is reserved for that, once, and never because a message says so.
 */

#define RFT_PACK_PLANES (RFT_DELTA_PLANES + 2u)
#define RFT_PACK_BYTES  (RFT_PACK_PLANES * 4u) /* of FRAME's `planes` */

/* What one thread needs to pack and unpack frames. It takes memory as it is used, and keeps it. */
typedef struct rft_frame_codec rft_frame_codec;

/* `level` as zstd has them, 1 and up. REFIT_ERR_HOST_MEMORY */
refit_status rft_frame_codec_open(uint32_t level, rft_frame_codec **out, refit_error *error);
/* NULL is allowed. */
void rft_frame_codec_close(rft_frame_codec *codec);

/* Packs a gathered payload, as rft_frame_encode has made it. `*packed` is in the codec's memory
 * until its next use; it is empty if nothing shrinks or there is nothing, and `planes` says nothing
 * then. REFIT_ERR_HOST_MEMORY */
refit_status rft_frame_codec_pack(rft_frame_codec *codec, const rft_manifest *manifest,
                                  const rft_frame_span *span, const unsigned char *modes,
                                  rft_view payload, rft_view *packed,
                                  unsigned char planes[RFT_PACK_BYTES], refit_error *error);

/* Unpacks received bytes. `modes` must have been checked; the content of `*payload` is not checked
 * here. REFIT_ERR_PROTOCOL, REFIT_ERR_HOST_MEMORY */
refit_status rft_frame_codec_unpack(rft_frame_codec *codec, const rft_manifest *manifest,
                                    const rft_frame_span *span, const unsigned char *modes,
                                    rft_view planes, rft_view packed, rft_view *payload,
                                    refit_error *error);

/* ---- Frames as the publisher sends them ---- */

/* The digest parts of a version's blocks, where they were taken already. */
typedef struct rft_parts {
    const uint64_t *parts;      /* per block of the version */
    const unsigned char *known; /* per block of the version, 0: not taken; NULL: none is */
} rft_parts;

/* What a frame is made of. */
typedef struct rft_frame_source {
    const unsigned char *image;
    const unsigned char *same; /* per block of the version, 1: as in the base; NULL: none is */
    const unsigned char *base; /* an image in which at least the other blocks are as in the base;
                                  NULL: no block is sparse */
    uint64_t worth; /* a frame is gathered only if that saves at least so many bytes; 0: whenever it
                       saves any */
    rft_frame_codec *codec; /* NULL: what is gathered travels as it is */
    uint32_t price;         /* of coding a changed element, in bytes: 0 for whatever is smaller */
    rft_parts before;       /* of the base */
    rft_parts after;        /* of the image */
    const rft_want *want;   /* borrowed; NULL: everything */
    const rft_want *shard;  /* borrowed; all that the images have; NULL: everything */
    const rft_manifest *layout; /* borrowed; where it lies in them; NULL: as in a version */
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
    bool gathered; /* the payload is not the image's own memory */
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

/* ---- Credits
 *
 * A PULL grants whole credits, and a credit is room for a whole frame in the window that bounds
 * what is in flight to a worker. A frame of which less travels, because it goes as what changed,
 * takes as many sixteenths of a credit as that is of its bytes, rounded up. So the window bounds
 * bytes, and a long link is kept as busy by small frames as by whole ones. The sender knows the
 * cost only after coding: it may begin while any part of a credit is left, and owes the rest. Both
 * ends count alike, in parts.
 */

/* Parts of a credit. */
#define RFT_CREDIT 16

/* In parts: 1 to RFT_CREDIT. `bytes` is what the frame takes in the store, `payload` what of it
 * travels. */
int32_t rft_credit_cost(uint64_t payload, uint64_t bytes);

#endif
