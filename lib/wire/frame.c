/*
 * A frame as the publisher sends it: one mode byte a block, and the payload.
 *
 * The common case without a base, all blocks dense, copies nothing: the payload is the stretch of
 * the store itself, with the padding between its tensors. As soon as one block is left out or is
 * sparse, what the others need is gathered one behind the other, without padding, into a buffer
 * that is reused from frame to frame:
 *
 *     [ room for an entry a block, in use from its end ][ block ][ block ] …
 */
#include <string.h>

#include <xxhash.h>

#include "base/checked.h"
#include "wire/assembly.h"
#include "wire/sparse.h"

typedef struct frame_gather {
    const rft_manifest *manifest;
    const rft_frame_span *span;
    const rft_frame_source *source;
    unsigned char *modes;
    unsigned char *entries;
    unsigned char *next; /* where the next block's bytes go */
    rft_frame_counts counts;
} frame_gather;

static bool is_same(const frame_gather *gather, uint32_t block)
{
    const unsigned char *same = gather->source->same;
    return same != NULL && same[gather->span->first_block + block] != 0;
}

static refit_status set_modes(frame_gather *gather, rft_bytes *modes, refit_error *error)
{
    uint32_t blocks = gather->span->blocks;
    rft_bytes_reset(modes);
    RFT_TRY(rft_bytes_reserve(modes, blocks, error));
    modes->count = blocks;
    gather->modes = modes->data;
    for (uint32_t i = 0; i < blocks; i++) {
        gather->modes[i] = is_same(gather, i) ? RFT_BLOCK_SAME : RFT_BLOCK_DENSE;
        gather->counts.same += is_same(gather, i);
    }
    gather->counts.dense = blocks - gather->counts.same;
    return REFIT_OK;
}

/* Coding a block may need more room than what comes of it takes. */
static size_t coding_room(const frame_gather *gather)
{
    const rft_block *blocks = &gather->manifest->blocks[gather->span->first_block];
    size_t most = 0;
    for (uint32_t i = 0; gather->source->base != NULL && i < gather->span->blocks; i++) {
        size_t bound = rft_delta_bound(rft_sparse_shape(gather->manifest, &blocks[i]));
        if (bound > most) most = bound;
    }
    return most;
}

static bool add_sparse(frame_gather *gather, const rft_block *block)
{
    const rft_frame_source *source = gather->source;
    rft_sparse sparse;
    if (source->base == NULL) return false;
    if (!rft_sparse_encode(gather->manifest, block, source->base + block->offset,
                           source->image + block->offset, gather->next, &sparse)) {
        return false;
    }
    size_t place = (size_t)gather->counts.sparse * RFT_SPARSE_ENTRY_BYTES;
    rft_sparse_write_entry(&sparse, gather->entries + place);
    gather->next += sparse.delta.total;
    gather->counts.sparse++;
    gather->counts.dense--;
    gather->counts.changed += sparse.delta.changed;
    return true;
}

static void add_blocks(frame_gather *gather)
{
    const rft_block *blocks = &gather->manifest->blocks[gather->span->first_block];
    for (uint32_t i = 0; i < gather->span->blocks; i++) {
        if (gather->modes[i] == RFT_BLOCK_SAME) continue;
        if (add_sparse(gather, &blocks[i])) {
            gather->modes[i] = RFT_BLOCK_SPARSE;
            continue;
        }
        memcpy(gather->next, gather->source->image + blocks[i].offset, blocks[i].bytes);
        gather->next += blocks[i].bytes;
    }
}

/* What was gathered, with the entries right before it. */
static refit_status gather_blocks(frame_gather *gather, rft_bytes *scratch, rft_view *payload,
                                  refit_error *error)
{
    size_t directory = (size_t)gather->span->blocks * RFT_SPARSE_ENTRY_BYTES;
    rft_bytes_reset(scratch);
    RFT_TRY(
        rft_bytes_reserve(scratch, directory + gather->span->bytes + coding_room(gather), error));
    gather->entries = scratch->data;
    gather->next = scratch->data + directory;
    add_blocks(gather);
    size_t used = (size_t)gather->counts.sparse * RFT_SPARSE_ENTRY_BYTES;
    unsigned char *start = scratch->data + directory - used;
    memmove(start, gather->entries, used);
    scratch->count = (size_t)(gather->next - scratch->data);
    *payload = (rft_view){start, (size_t)(gather->next - start)};
    return REFIT_OK;
}

/* The stretch of the image as it is. */
static rft_view whole(frame_gather *gather)
{
    memset(gather->modes, RFT_BLOCK_DENSE, gather->span->blocks);
    gather->counts = (rft_frame_counts){.dense = gather->span->blocks};
    return (rft_view){gather->source->image + gather->span->offset, gather->span->bytes};
}

static refit_status pack(const frame_gather *gather, rft_frame *frame, refit_error *error)
{
    rft_packer *packer = gather->source->packer;
    rft_view packed = {0};
    if (packer == NULL || frame->payload.count == 0) return REFIT_OK;
    RFT_TRY(rft_packer_pack(packer, gather->manifest, gather->span, gather->modes, frame->payload,
                            &packed, frame->planes, error));
    frame->packed = packed.count > 0;
    if (frame->packed) frame->payload = packed;
    return REFIT_OK;
}

refit_status rft_frame_encode(const rft_manifest *manifest, uint32_t sequence,
                              const rft_frame_source *source, rft_bytes *modes, rft_bytes *scratch,
                              rft_frame *out, refit_error *error)
{
    RFT_REFUSE_IF(sequence >= manifest->frame_count, error, REFIT_ERR_INVALID,
                  "frame %u of a version that has %u", sequence, manifest->frame_count);
    frame_gather gather = {
        .manifest = manifest, .span = &manifest->frames[sequence], .source = source};
    rft_view payload = {0};
    RFT_TRY(set_modes(&gather, modes, error));
    bool coded = source->base != NULL || gather.counts.same > 0;
    if (coded) RFT_TRY(gather_blocks(&gather, scratch, &payload, error));
    coded = gather.counts.dense < gather.span->blocks &&
            payload.count + source->worth <= gather.span->bytes;
    if (!coded) {
        payload = whole(&gather);
        rft_bytes_reset(scratch);
    }
    *out = (rft_frame){.payload = payload, .counts = gather.counts};
    if (coded) RFT_TRY(pack(&gather, out, error));
    out->hash = XXH3_64bits(out->payload.data, out->payload.count);
    return REFIT_OK;
}
