/*
 * A frame as the publisher sends it: one mode byte a block, and the payload.
 *
 * The common case, all blocks dense, copies nothing: the payload is the stretch of the store
 * itself, with the padding between its tensors. As soon as one block is left out, the others are
 * gathered one behind the other, without padding, into a buffer that is reused from frame to frame.
 */
#include <string.h>

#include <xxhash.h>

#include "wire/assembly.h"

/* Fills `modes`; `count` is how many blocks are dense. */
static refit_status set_modes(const rft_frame_span *span, const unsigned char *same,
                              rft_bytes *modes, uint32_t *count, refit_error *error)
{
    rft_bytes_reset(modes);
    RFT_TRY(rft_bytes_reserve(modes, span->blocks, error));
    memset(modes->data, RFT_BLOCK_DENSE, span->blocks);
    modes->count = span->blocks;
    *count = span->blocks;
    for (uint32_t i = 0; same != NULL && i < span->blocks; i++) {
        if (same[span->first_block + i] == 0) continue;
        modes->data[i] = RFT_BLOCK_SAME;
        *count -= 1;
    }
    return REFIT_OK;
}

static refit_status gather(const rft_manifest *manifest, const rft_frame_span *span,
                           const unsigned char *image, const rft_bytes *modes, rft_bytes *scratch,
                           refit_error *error)
{
    rft_bytes_reset(scratch);
    RFT_TRY(rft_bytes_reserve(scratch, span->bytes, error));
    for (uint32_t i = 0; i < span->blocks; i++) {
        const rft_block *block = &manifest->blocks[span->first_block + i];
        if (modes->data[i] != RFT_BLOCK_DENSE) continue;
        RFT_TRY(rft_bytes_append(scratch, image + block->offset, block->bytes, error));
    }
    return REFIT_OK;
}

refit_status rft_frame_encode(const rft_manifest *manifest, uint32_t sequence,
                              const unsigned char *image, const unsigned char *same,
                              rft_bytes *modes, rft_bytes *scratch, rft_view *payload,
                              uint64_t *hash, refit_error *error)
{
    RFT_REFUSE_IF(sequence >= manifest->frame_count, error, REFIT_ERR_INVALID,
                  "frame %u of a version that has %u", sequence, manifest->frame_count);
    const rft_frame_span *span = &manifest->frames[sequence];
    uint32_t dense;
    RFT_TRY(set_modes(span, same, modes, &dense, error));
    rft_view bytes = {image + span->offset, span->bytes};
    if (dense < span->blocks) {
        RFT_TRY(gather(manifest, span, image, modes, scratch, error));
        bytes = rft_bytes_view(scratch);
    }
    *payload = bytes;
    *hash = XXH3_64bits(bytes.data, bytes.count);
    return REFIT_OK;
}
