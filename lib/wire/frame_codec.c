/*
 * Payloads to planes, planes to payloads.
 *
 *     gathered   [entry][entry] [low high symbols …][dense][low high symbols …]
 *     planes     [entry][entry] [low][low] [high][high] [symbols][symbols] … [dense]
 *
 * Both ways are one walk over the blocks with a cursor a plane; between them stands a buffer with
 * all planes as they are. Unpacking goes plane by plane, because only the directory says how long
 * the next ones are, the escapes how long the far ones, and those how many values there are.
 */
#include "wire/frame_codec.h"

#include <string.h>

#include <zstd.h>

#include "base/alloc.h"
#include "kernels/delta_plan.h"
#include "wire/reassembly.h"
#include "wire/sparse.h"

#define DIRECTORY 0u
#define DELTA     1u /* the first of kernels/delta.h's */
#define DENSE     (RFT_PACK_PLANES - 1u)
/* Less is not worth a try. */
#define LEAST 32u

struct rft_frame_codec {
    int level;
    ZSTD_CCtx *compressor;   /* NULL: not needed so far */
    ZSTD_DCtx *decompressor; /* likewise */
    rft_bytes apart;         /* all planes as they are */
    rft_bytes made;          /* what is handed out */
};

/* One frame on its way through. */
typedef struct frame_walk {
    const rft_manifest *manifest;
    const rft_block *blocks;
    uint32_t count;
    const unsigned char *modes;
    unsigned char *at[RFT_PACK_PLANES]; /* where each plane begins, or has come to */
    uint64_t bytes[RFT_PACK_PLANES];    /* of each plane */
} frame_walk;

refit_status rft_frame_codec_open(uint32_t level, rft_frame_codec **out, refit_error *error)
{
    rft_frame_codec *codec = rft_calloc(1, sizeof *codec);
    RFT_REFUSE_IF(codec == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to pack frames");
    codec->level = (int)level;
    *out = codec;
    return REFIT_OK;
}

void rft_frame_codec_close(rft_frame_codec *codec)
{
    if (codec == NULL) return;
    (void)ZSTD_freeCCtx(codec->compressor);
    (void)ZSTD_freeDCtx(codec->decompressor);
    rft_bytes_close(&codec->apart);
    rft_bytes_close(&codec->made);
    rft_free(codec);
}

static frame_walk walk_start(const rft_manifest *manifest, const rft_frame_span *span,
                             const unsigned char *modes)
{
    return (frame_walk){
        .manifest = manifest,
        .blocks = &manifest->blocks[span->first_block],
        .count = span->blocks,
        .modes = modes,
    };
}

/* The planes one behind the other from `start`, by their lengths. */
static unsigned char *walk_place(frame_walk *walk, unsigned char *start)
{
    for (uint32_t i = 0; i < RFT_PACK_PLANES; i++) {
        walk->at[i] = start;
        start += walk->bytes[i];
    }
    return start;
}

static void move(unsigned char **to, const unsigned char **from, size_t count)
{
    if (count != 0) memcpy(*to, *from, count);
    *to += count;
    *from += count;
}

/* ---- Packing */

/* Lengths of the planes, or, the second time, the planes themselves. */
static void take_apart(frame_walk *walk, rft_view payload, bool copies)
{
    const unsigned char *entry = payload.data, *end = entry + payload.count;
    const unsigned char *next = entry;
    for (uint32_t i = 0; i < walk->count; i++)
        next += walk->modes[i] == RFT_BLOCK_SPARSE ? RFT_SPARSE_ENTRY_BYTES : 0;
    for (uint32_t i = 0; i < walk->count; i++) {
        const rft_block *block = &walk->blocks[i];
        rft_sparse sparse = {0};
        uint64_t lengths[RFT_PACK_PLANES] = {0};
        if (walk->modes[i] == RFT_BLOCK_DENSE) lengths[DENSE] = block->bytes;
        if (walk->modes[i] == RFT_BLOCK_SPARSE &&
            rft_sparse_read(walk->manifest, block, entry, next, (size_t)(end - next), &sparse)) {
            lengths[DIRECTORY] = RFT_SPARSE_ENTRY_BYTES;
            for (uint32_t plane = 0; plane < RFT_DELTA_PLANES; plane++)
                lengths[DELTA + plane] = sparse.delta.bytes[plane];
        }
        for (uint32_t plane = 0; plane < RFT_PACK_PLANES; plane++) {
            const unsigned char **from = plane == DIRECTORY ? &entry : &next;
            if (copies) {
                move(&walk->at[plane], from, lengths[plane]);
            } else {
                walk->bytes[plane] += lengths[plane];
                *from += lengths[plane];
            }
        }
    }
}

/* Appends the plane as it is shortest; its length if that is compressed, else 0. */
static refit_status add_plane(rft_frame_codec *codec, const unsigned char *plane, size_t bytes,
                              uint32_t *length, refit_error *error)
{
    rft_bytes *made = &codec->made;
    *length = 0;
    RFT_TRY(rft_bytes_reserve(made, ZSTD_compressBound(bytes), error));
    size_t shrunk = bytes < LEAST
                        ? bytes
                        : ZSTD_compressCCtx(codec->compressor, made->data + made->count,
                                            made->room - made->count, plane, bytes, codec->level);
    if (ZSTD_isError(shrunk) != 0 || shrunk >= bytes) {
        return rft_bytes_append(made, plane, bytes, error);
    }
    made->count += shrunk;
    *length = (uint32_t)shrunk;
    return REFIT_OK;
}

refit_status rft_frame_codec_pack(rft_frame_codec *codec, const rft_manifest *manifest,
                                  const rft_frame_span *span, const unsigned char *modes,
                                  rft_view payload, rft_view *packed,
                                  unsigned char planes[RFT_PACK_BYTES], refit_error *error)
{
    frame_walk walk = walk_start(manifest, span, modes);
    *packed = (rft_view){0};
    if (payload.count == 0) return REFIT_OK; /* and so no memory, which planes could lie in */
    if (codec->compressor == NULL) codec->compressor = ZSTD_createCCtx();
    RFT_REFUSE_IF(codec->compressor == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to compress a frame");
    rft_bytes_reset(&codec->apart);
    rft_bytes_reset(&codec->made);
    RFT_TRY(rft_bytes_reserve(&codec->apart, payload.count, error));
    take_apart(&walk, payload, false);
    (void)walk_place(&walk, codec->apart.data);
    take_apart(&walk, payload, true);
    const unsigned char *next = codec->apart.data;
    for (uint32_t i = 0; i < RFT_PACK_PLANES; i++) {
        uint32_t length;
        RFT_TRY(add_plane(codec, next, walk.bytes[i], &length, error));
        rft_put_u32(planes + 4 * i, length);
        next += walk.bytes[i];
    }
    if (codec->made.count < payload.count) *packed = rft_bytes_view(&codec->made);
    return REFIT_OK;
}

/* ---- Unpacking */

typedef struct unpack_state {
    frame_walk walk;
    rft_frame_codec *codec;
    const unsigned char *lengths; /* of FRAME */
    const unsigned char *next;    /* in the packed payload */
    size_t left;                  /* of it */
    unsigned char *room;          /* where the next plane goes */
    uint64_t most;                /* bytes that there is room for */
} unpack_state;

/* One plane, which is walk.bytes[plane] long once it is unpacked. */
static bool unpack_plane(unpack_state *state, uint32_t plane)
{
    uint64_t bytes = state->walk.bytes[plane];
    uint32_t coded = rft_get_u32(state->lengths + 4 * plane);
    uint64_t travels = coded == 0 ? bytes : coded;
    state->walk.at[plane] = state->room;
    if (bytes > state->most || travels > state->left || (coded != 0 && coded >= bytes))
        return false;
    if (coded == 0) {
        if (bytes != 0) memcpy(state->room, state->next, bytes);
    } else if (ZSTD_decompressDCtx(state->codec->decompressor, state->room, bytes, state->next,
                                   coded) != bytes) {
        return false;
    }
    state->next += travels;
    state->left -= travels;
    state->room += bytes;
    state->most -= bytes;
    return true;
}

/* What an entry alone says of the lengths. */
static bool lay_out(const frame_walk *walk, const rft_block *block, const unsigned char *entry,
                    rft_delta_entry *delta)
{
    rft_delta_shape shape = rft_sparse_shape(walk->manifest, block);
    rft_sparse_read_counts(entry, &delta->changed, &delta->escapes);
    bool half = shape.kind == RFT_DELTA_HALF;
    if (delta->changed > shape.elements || delta->escapes > delta->changed) return false;
    if (!half && delta->escapes != 0) return false;
    if (!half) delta->values = delta->changed;
    rft_delta_lay_out(shape, delta);
    return true;
}

/* What the planes up to `known` decide of the counts; the block's parts begin so far into them. */
static void complete(const frame_walk *walk, const rft_block *block, uint32_t known,
                     uint64_t escapes, uint64_t far, rft_delta_entry *delta)
{
    if (delta->values != 0) return; /* no half: it has neither */
    if (known >= RFT_DELTA_ESCAPES) {
        delta->far =
            rft_delta_count_far(walk->at[DELTA + RFT_DELTA_ESCAPES] + escapes, delta->escapes);
    }
    if (known >= RFT_DELTA_FAR) {
        delta->values = rft_delta_count_values(walk->at[DELTA + RFT_DELTA_FAR] + far, delta->far);
    }
    rft_delta_lay_out(rft_sparse_shape(walk->manifest, block), delta);
}

/* Adds up the lengths of the planes `first` to `last` - 1, which those before them decide. */
static bool add_lengths(unpack_state *state, uint32_t first, uint32_t last)
{
    frame_walk *walk = &state->walk;
    const unsigned char *entry = walk->at[DIRECTORY];
    uint64_t escapes = 0, far = 0;
    for (uint32_t i = 0; i < walk->count; i++) {
        rft_delta_entry delta = {0};
        if (walk->modes[i] != RFT_BLOCK_SPARSE) continue;
        if (!lay_out(walk, &walk->blocks[i], entry, &delta)) return false;
        if (first > 0) complete(walk, &walk->blocks[i], first - 1, escapes, far, &delta);
        for (uint32_t plane = first; plane < last; plane++)
            walk->bytes[DELTA + plane] += delta.bytes[plane];
        entry += RFT_SPARSE_ENTRY_BYTES;
        escapes += delta.bytes[RFT_DELTA_ESCAPES];
        far += delta.bytes[RFT_DELTA_FAR];
    }
    return true;
}

static bool unpack_delta(unpack_state *state, uint32_t first, uint32_t last)
{
    bool fits = add_lengths(state, first, last);
    for (uint32_t plane = first; fits && plane < last; plane++)
        fits = unpack_plane(state, DELTA + plane);
    return fits;
}

static bool unpack_planes(unpack_state *state)
{
    frame_walk *walk = &state->walk;
    for (uint32_t i = 0; i < walk->count; i++) {
        if (walk->modes[i] == RFT_BLOCK_SPARSE) walk->bytes[DIRECTORY] += RFT_SPARSE_ENTRY_BYTES;
        if (walk->modes[i] == RFT_BLOCK_DENSE) walk->bytes[DENSE] += walk->blocks[i].bytes;
    }
    return unpack_plane(state, DIRECTORY) && unpack_delta(state, RFT_DELTA_LOW, RFT_DELTA_FAR) &&
           unpack_delta(state, RFT_DELTA_FAR, RFT_DELTA_VALUES) &&
           unpack_delta(state, RFT_DELTA_VALUES, RFT_DELTA_PLANES) && unpack_plane(state, DENSE) &&
           state->left == 0;
}

/* From planes to blocks. The lengths have been seen to add up. */
static void put_together(const frame_walk *walk, unsigned char *to)
{
    const unsigned char *from[RFT_PACK_PLANES];
    uint64_t escapes = 0, far = 0;
    for (uint32_t i = 0; i < RFT_PACK_PLANES; i++)
        from[i] = walk->at[i];
    const unsigned char *entry = walk->at[DIRECTORY];
    move(&to, &from[DIRECTORY], walk->bytes[DIRECTORY]);
    for (uint32_t i = 0; i < walk->count; i++) {
        const rft_block *block = &walk->blocks[i];
        rft_delta_entry delta = {0};
        if (walk->modes[i] == RFT_BLOCK_DENSE) move(&to, &from[DENSE], block->bytes);
        if (walk->modes[i] != RFT_BLOCK_SPARSE || !lay_out(walk, block, entry, &delta)) continue;
        complete(walk, block, RFT_DELTA_FAR, escapes, far, &delta);
        for (uint32_t plane = 0; plane < RFT_DELTA_PLANES; plane++)
            move(&to, &from[DELTA + plane], delta.bytes[plane]);
        entry += RFT_SPARSE_ENTRY_BYTES;
        escapes += delta.bytes[RFT_DELTA_ESCAPES];
        far += delta.bytes[RFT_DELTA_FAR];
    }
}

refit_status rft_frame_codec_unpack(rft_frame_codec *codec, const rft_manifest *manifest,
                                    const rft_frame_span *span, const unsigned char *modes,
                                    rft_view planes, rft_view packed, rft_view *payload,
                                    refit_error *error)
{
    RFT_REFUSE_IF(planes.count != RFT_PACK_BYTES, error, REFIT_ERR_PROTOCOL,
                  "a frame has %zu bytes of planes", planes.count);
    if (codec->decompressor == NULL) codec->decompressor = ZSTD_createDCtx();
    RFT_REFUSE_IF(codec->decompressor == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to unpack a frame");
    rft_bytes_reset(&codec->apart);
    rft_bytes_reset(&codec->made);
    RFT_TRY(rft_bytes_reserve(&codec->apart, span->bytes, error));
    RFT_TRY(rft_bytes_reserve(&codec->made, span->bytes, error));
    unpack_state state = {
        .walk = walk_start(manifest, span, modes),
        .codec = codec,
        .lengths = planes.data,
        .next = packed.data,
        .left = packed.count,
        .room = codec->apart.data,
        .most = span->bytes,
    };
    RFT_REFUSE_IF(!unpack_planes(&state), error, REFIT_ERR_PROTOCOL,
                  "a frame's planes contradict each other, or are not as long as they should be");
    put_together(&state.walk, codec->made.data);
    codec->made.count = span->bytes - state.most;
    *payload = rft_bytes_view(&codec->made);
    return REFIT_OK;
}
