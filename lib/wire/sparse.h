/*
 * sparse: a block as what changed in it, inside a frame's payload.
 *
 * The payload of a frame with sparse blocks begins with their directory, an entry of 20 bytes each,
 * in order, little-endian:
 *
 *     u16 changed - 1 | u16 escapes | u64 digest part before | u64 digest part after
 *
 * Behind it stands, block after block, what each has: its bytes (dense), nothing (same), or its
 * planes (sparse), one behind the other as kernels/delta.h lays them out. How long those are
 * follows from the entry and from the planes themselves, so no length travels. The parts are those
 * of rft_digest_part at the block's place in its tensor: `before` says to which bytes the changes
 * belong, `after` what comes of them.
 *
 * A block is coded so only where that is smaller than its bytes, entry included: a frame is never
 * longer than the stretch of the image that it stands for.
 */
#ifndef RFT_SPARSE_H
#define RFT_SPARSE_H

#include "kernels/delta.h"
#include "wire/manifest.h"

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

#endif
