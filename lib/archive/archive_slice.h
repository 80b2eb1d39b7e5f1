/*
 * archive_slice: one frame of a version as a version of its own, which begins at byte 0.
 *
 * So wire's coding of frames works on a buffer of one frame, and nobody needs a second image of all
 * weights: not who writes a version that lies elsewhere, not who applies one file after another.
 */
#ifndef RFT_ARCHIVE_SLICE_H
#define RFT_ARCHIVE_SLICE_H

#include "wire/reassembly.h"

/* Valid until the next cut; names and shapes are borrowed from the manifest. */
typedef struct rft_archive_slice {
    rft_manifest manifest; /* tensors from `tensor` on; one frame; no names' index, no encoding */
    rft_frame_span frame;  /* its only one */
    uint32_t tensor;       /* number of its first tensor in the version */
    uint64_t offset;       /* of its first byte in the version's image */
    rft_block blocks[RFT_FRAME_BLOCKS];
} rft_archive_slice;

/* Frame `sequence` of a manifest that has it. */
void rft_archive_slice_cut(rft_archive_slice *slice, const rft_manifest *manifest,
                           uint32_t sequence);

/* Bytes of the longest frame. */
uint64_t rft_archive_slice_most(const rft_manifest *manifest);

#endif
