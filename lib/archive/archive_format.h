/*
 * archive_format: one version as a file.
 *
 *     header     176 bytes, below
 *     manifest   the list of tensors as MANIFEST has it (wire/manifest.h)
 *     digests    8 bytes for each tensor that is not tied: those of SEAL
 *     changes    20 bytes for each of those: u64 elements that changed, u32 blocks that are same,
 *                u32 sparse, u32 dense; then u64 XXH3-64 of them all
 *     frames     one after the other, in order; nothing after the last
 *
 * The header; all numbers little-endian, all places in bytes from its beginning:
 *
 *       0  magic "\x89RFTARC\n"           80  u64 elements of the weights
 *       8  u32 format, 2                  88  u64 of those, how many changed
 *      12  u32 tensors                    96  u64 bytes of the manifest
 *      16  u32 frames                    104  u64 bytes of the digests
 *      20  u32 blocks that are same      112  the version's digest
 *      24  u32 sparse                    128  the base's digest; of an anchor 0
 *      28  u32 dense                     144  the manifest's digest
 *      32  u64 epoch                     160  u32 frames that are packed
 *      40  u64 version                   164  u32 0
 *      48  u64 base: version - 1, or 0   168  u64 XXH3-64 of the header up to here
 *      56  u64 bytes of the file
 *      64  u64 frame_bytes, by which the version was partitioned
 *      72  u64 bytes of the weights
 *
 * A frame is what FRAME carries, with a hash of its own for what FRAME says in its message:
 *
 *       0  u32 sequence                    8  u64 bytes of the payload
 *       4  u32 blocks                     16  u64 XXH3-64 of the payload
 *      24  u32 × 8: what FRAME has in `planes` (wire/frame.h); all 0: it is not packed
 *      56  a byte a block: its rft_block_mode
 *       …  u64 XXH3-64 of all before
 *       …  payload
 *
 * Packed dense blocks stand one after the other, without the padding between tensors that they
 * have as they are.
 *
 * Format 1, which is read as well, has no changes, nothing packed, 168 bytes of header (its hash is
 * at 160), and modes at 24 of a frame.
 *
 * So every byte is covered: the header by its hash; the manifest by the manifest's digest; the
 * digests, together with the manifest, by the version's digest; changes and frames by theirs. What
 * the header claims is held against the size of the file and the limits before memory is taken for
 * it; how long a packed frame is once it is unpacked follows from the manifest.
 */
#ifndef RFT_ARCHIVE_FORMAT_H
#define RFT_ARCHIVE_FORMAT_H

#include <refit/advanced/archive.h>

#include "wire/frame.h"

#define RFT_ARCHIVE_HEADER_BYTES 176u /* at most; format 1 has less */
#define RFT_ARCHIVE_HEADER_LEAST 168u
#define RFT_ARCHIVE_FORMAT       2u
#define RFT_ARCHIVE_FRAME_BYTES  (24u + RFT_PACK_BYTES) /* of a frame, before its modes; at most */
#define RFT_ARCHIVE_CHANGE_BYTES 20u                    /* of a tensor */
#define RFT_ARCHIVE_HASH_BYTES   8u

typedef struct rft_archive_header {
    uint32_t format;
    uint32_t tensors, frames, same, sparse, dense, packed;
    uint64_t epoch, version, base;
    uint64_t file_bytes, frame_bytes, weight_bytes, elements, changed;
    uint64_t manifest_bytes, digest_bytes;
    rft_digest128 digest, base_digest, manifest;
} rft_archive_header;

typedef struct rft_archive_frame {
    uint32_t sequence, blocks;
    uint64_t payload_bytes, payload_hash;
    bool packed;
    unsigned char planes[RFT_PACK_BYTES];
} rft_archive_frame;

/* What became of one tensor. */
typedef struct rft_archive_change {
    uint64_t changed; /* elements */
    uint32_t same, sparse, dense;
} rft_archive_change;

/* How many elements a tensor has where its blocks are coded: bytes, if they have fewer bits. */
uint64_t rft_archive_elements(const rft_manifest *manifest, uint32_t tensor);

/* How many blocks its frames have. */
uint64_t rft_archive_blocks(const rft_archive_header *header);

/* How long parts of a file are, in its format. */
uint32_t rft_archive_header_bytes(const rft_archive_header *header);
uint32_t rft_archive_frame_bytes(const rft_archive_header *header);
uint64_t rft_archive_changes_bytes(const rft_archive_header *header);

void rft_archive_header_encode(const rft_archive_header *header,
                               unsigned char out[RFT_ARCHIVE_HEADER_BYTES]);

/* Checks what can be known of it alone, of the `bytes` that its file has, and of the limits. `in`
 * has RFT_ARCHIVE_HEADER_BYTES, or the whole file if that is shorter. REFIT_ERR_INVALID (no
 * archive), REFIT_ERR_UNSUPPORTED (a newer format), REFIT_ERR_CORRUPT, REFIT_ERR_LIMIT. */
refit_status rft_archive_header_decode(const unsigned char *in, uint64_t bytes,
                                       const rft_limits *limits, rft_archive_header *out,
                                       refit_error *error);

/* A frame's beginning, from rft_archive_frame_bytes and to RFT_ARCHIVE_FRAME_BYTES. */
void rft_archive_frame_encode(const rft_archive_frame *frame, unsigned char *out);
rft_archive_frame rft_archive_frame_decode(const rft_archive_header *header,
                                           const unsigned char *in);

/* One tensor's change, from RFT_ARCHIVE_CHANGE_BYTES and to them. */
void rft_archive_change_encode(const rft_archive_change *change, unsigned char *out);
rft_archive_change rft_archive_change_decode(const unsigned char *in);

/* The header as the public API shows it; `name` of its file. REFIT_ERR_INVALID: info->size. */
refit_status rft_archive_header_describe(const rft_archive_header *header, const char *name,
                                         refit_archive_info *info, refit_error *error);

#endif
