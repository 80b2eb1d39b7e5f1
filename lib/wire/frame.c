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
#include "kernels/digest.h"
#include "wire/reassembly.h"
#include "wire/sparse.h"

typedef struct frame_gather {
    const rft_manifest *manifest;
    const rft_frame_span *span;
    const rft_frame_source *source;
    unsigned char *modes;
    unsigned char *entries;
    unsigned char *next; /* where the next block's bytes go */
    uint32_t copied;     /* blocks up to here are in place; of those behind, none is sparse */
    unsigned char *hole; /* where the bytes of these go */
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

/* Up to `end`. Dense blocks are copied once a sparse one stands behind them, or all is decided: a
 * frame that goes whole has none, and nothing is copied for it. */
static void fill_hole(frame_gather *gather, uint32_t end)
{
    const rft_block *blocks = &gather->manifest->blocks[gather->span->first_block];
    for (; gather->copied < end; gather->copied++) {
        const rft_block *block = &blocks[gather->copied];
        if (gather->modes[gather->copied] != RFT_BLOCK_DENSE) continue;
        memcpy(gather->hole, gather->source->image + block->offset, block->bytes);
        gather->hole += block->bytes;
    }
}

static uint64_t part_of(const rft_parts *parts, const unsigned char *image, const rft_block *block,
                        uint32_t index)
{
    if (parts->known != NULL && parts->known[index] != 0) return parts->parts[index];
    return rft_digest_part(image + block->offset, block->bytes, block->tensor_offset);
}

static bool add_sparse(frame_gather *gather, uint32_t at)
{
    const rft_frame_source *source = gather->source;
    uint32_t index = gather->span->first_block + at;
    const rft_block *block = &gather->manifest->blocks[index];
    rft_sparse sparse;
    if (source->base == NULL) return false;
    if (!rft_sparse_encode(gather->manifest, block, source->price, source->base + block->offset,
                           source->image + block->offset, gather->next, &sparse)) {
        return false;
    }
    sparse.before = part_of(&source->before, source->base, block, index);
    sparse.after = part_of(&source->after, source->image, block, index);
    fill_hole(gather, at);
    size_t place = (size_t)gather->counts.sparse * RFT_SPARSE_ENTRY_BYTES;
    rft_sparse_write_entry(&sparse, gather->entries + place);
    gather->next += sparse.delta.total;
    gather->copied = at + 1;
    gather->hole = gather->next;
    gather->modes[at] = RFT_BLOCK_SPARSE;
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
        if (!add_sparse(gather, i)) gather->next += blocks[i].bytes;
    }
}

/* What is gathered, with the entries right before it; the last dense blocks are not there yet. */
static refit_status gather_blocks(frame_gather *gather, rft_bytes *scratch, rft_view *payload,
                                  refit_error *error)
{
    size_t directory = (size_t)gather->span->blocks * RFT_SPARSE_ENTRY_BYTES;
    rft_bytes_reset(scratch);
    RFT_TRY(
        rft_bytes_reserve(scratch, directory + gather->span->bytes + coding_room(gather), error));
    gather->entries = scratch->data;
    gather->next = gather->hole = scratch->data + directory;
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
    rft_frame_codec *codec = gather->source->codec;
    rft_view packed = {0};
    if (codec == NULL || frame->payload.count == 0) return REFIT_OK;
    RFT_TRY(rft_frame_codec_pack(codec, gather->manifest, gather->span, gather->modes,
                                 frame->payload, &packed, frame->planes, error));
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
    if (coded) fill_hole(&gather, gather.span->blocks);
    if (coded) RFT_TRY(pack(&gather, out, error));
    out->hash = XXH3_64bits(out->payload.data, out->payload.count);
    return REFIT_OK;
}
