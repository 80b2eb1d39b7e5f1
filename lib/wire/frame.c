/*
 * A frame: one mode byte a block, and the payload.
 *
 * The common case without a base, all blocks dense, copies nothing: the payload is the range of
 * the store itself, with the padding between its tensors. As soon as one block is left out or is
 * sparse, what the others need is gathered one after the other, without padding, into a buffer
 * that is reused from frame to frame:
 *
 *     [ room for an entry a block, in use from its end ][ block ][ block ] …
 *
 * What was gathered may then be packed, plane by plane. Unpacking is here as well, because both
 * directions walk the same layout; reassembly.c reads the blocks.
 */
#include "wire/frame.h"

#include <string.h>

#include <xxhash.h>
#include <zstd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/delta_plan.h"
#include "kernels/digest.h"

/* ---- A sparse block and its entry in the directory; kernels/delta.c does the coding ---- */

rft_delta_shape rft_sparse_shape(const rft_manifest *manifest, const rft_block *block)
{
    refit_dtype dtype = manifest->tensors[block->tensor].dtype;
    uint32_t bits = refit_dtype_bits(dtype);
    uint32_t width = bits % 8 == 0 ? bits / 8 : 1;
    bool half = dtype == REFIT_BF16 || dtype == REFIT_F16;
    return (rft_delta_shape){
        .elements = (uint32_t)(block->bytes / width),
        .width = width,
        .kind = half ? RFT_DELTA_HALF : RFT_DELTA_RAW,
    };
}

bool rft_sparse_cut(const rft_manifest *manifest, const rft_want *want, const rft_block *block,
                    rft_block *cut)
{
    *cut = *block;
    cut->bytes = rft_want_block(want, block);
    return cut->bytes > 0 && cut->bytes % rft_sparse_shape(manifest, block).width == 0;
}

bool rft_sparse_encode(const rft_manifest *manifest, const rft_block *block, uint32_t price,
                       const void *before, const void *after, unsigned char *planes,
                       rft_sparse *out)
{
    out->shape = rft_sparse_shape(manifest, block);
    return rft_delta_encode_if(out->shape, price, before, after, planes, &out->delta);
}

static void put_u16(unsigned char *to, uint32_t value)
{
    to[0] = (unsigned char)value;
    to[1] = (unsigned char)(value >> 8);
}

static uint32_t get_u16(const unsigned char *from)
{
    return (uint32_t)from[0] | (uint32_t)from[1] << 8;
}

void rft_sparse_write_entry(const rft_sparse *sparse, unsigned char *entry)
{
    put_u16(entry, sparse->delta.changed - 1);
    put_u16(entry + 2, sparse->delta.escapes);
    rft_put_u64(entry + 4, sparse->before);
    rft_put_u64(entry + 12, sparse->after);
}

void rft_sparse_read_counts(const unsigned char *entry, uint32_t *changed, uint32_t *escapes)
{
    *changed = get_u16(entry) + 1;
    *escapes = get_u16(entry + 2);
}

bool rft_sparse_read(const rft_manifest *manifest, const rft_block *block,
                     const unsigned char *entry, const unsigned char *planes, size_t room,
                     rft_sparse *out)
{
    uint32_t changed, escapes;
    rft_sparse_read_counts(entry, &changed, &escapes);
    out->shape = rft_sparse_shape(manifest, block);
    out->before = rft_get_u64(entry + 4);
    out->after = rft_get_u64(entry + 12);
    return rft_delta_measure(out->shape, changed, escapes, planes, room, &out->delta) &&
           (uint64_t)out->delta.total + RFT_SPARSE_ENTRY_BYTES < block->bytes;
}

/* ---- Packed payloads
 *
 *     gathered   [entry][entry] [low high symbols …][dense][low high symbols …]
 *     planes     [entry][entry] [low][low] [high][high] [symbols][symbols] … [dense]
 *
 * Both directions are one walk over the blocks with a cursor a plane; between them stands a buffer
 * with all planes as they are. Unpacking goes plane by plane, because only the directory says how
 * long the next ones are, the escapes how long the far ones, and those how many values there are.
 */

#define DIRECTORY 0u
#define DELTA     1u /* the first of kernels/delta.h's */
#define DENSE     (RFT_PACK_PLANES - 1u)
/* Planes with fewer bytes are not compressed. */
#define LEAST 32u

struct rft_frame_codec {
    int level;
    ZSTD_CCtx *compressor;   /* NULL: not needed so far */
    ZSTD_DCtx *decompressor; /* NULL: not needed so far */
    rft_bytes apart;         /* all planes as they are */
    rft_bytes made;          /* the result that a call returns */
};

/* A walk over the blocks of one frame. */
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

/* The planes one after the other from `start`, by their lengths. */
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

/* Appends the plane, compressed if that is shorter; `length` is that of the compressed plane, else
 * 0. */
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

/* The lengths that follow from an entry alone. */
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

/* The counts that follow from the planes up to `known`; `escapes` and `far` are where the block's
 * parts begin in theirs. */
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

/* ---- Frames as the publisher sends them ---- */

typedef struct frame_gather {
    const rft_manifest *manifest;
    const rft_frame_span *span;
    const rft_frame_source *source;
    unsigned char *modes;
    unsigned char *entries;
    unsigned char *next; /* where the next block's bytes go */
    uint32_t copied;     /* blocks up to here are in place; of those after, none is sparse */
    unsigned char *hole; /* where the bytes of these go */
    unsigned char *pair; /* room for what is wanted of a block, in the base and in the image */
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

/* Coding a block may need more room than the result takes. */
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

static uint64_t wanted_bytes(const frame_gather *gather, const rft_block *block)
{
    return rft_want_block(gather->source->want, block);
}

/* Room for what is wanted of a block, before and after. */
static size_t pair_room(const frame_gather *gather)
{
    const rft_block *blocks = &gather->manifest->blocks[gather->span->first_block];
    size_t most = 0;
    for (uint32_t i = 0; gather->source->base != NULL && i < gather->span->blocks; i++) {
        uint64_t wanted = wanted_bytes(gather, &blocks[i]);
        if (wanted < blocks[i].bytes && wanted > most) most = (size_t)wanted;
    }
    return 2 * most;
}

/* The block as it lies in the images. */
static const rft_block *placed(const frame_gather *gather, uint32_t at)
{
    const rft_manifest *layout = gather->source->layout;
    return &(layout == NULL ? gather->manifest : layout)->blocks[gather->span->first_block + at];
}

/* Copies what is wanted of a block in an image of the source. */
static void copy_wanted(const frame_gather *gather, uint32_t at, const unsigned char *image,
                        unsigned char *to)
{
    const rft_frame_source *source = gather->source;
    const rft_block *block = placed(gather, at);
    const rft_block *whole = &gather->manifest->blocks[gather->span->first_block + at];
    uint64_t wanted = wanted_bytes(gather, whole);
    if (wanted == block->bytes)
        memcpy(to, image + block->offset, wanted);
    else if (block->bytes == whole->bytes)
        rft_want_gather(source->want, block, image, to);
    else
        rft_shard_gather(source->want, source->shard, block, image, to);
}

/* Appends what is wanted of a block. */
static void copy_dense(frame_gather *gather, uint32_t at)
{
    copy_wanted(gather, at, gather->source->image, gather->hole);
    gather->hole += wanted_bytes(gather, &gather->manifest->blocks[gather->span->first_block + at]);
}

/* Copies the dense blocks before `end`. That is done when a sparse block follows them, or at the
 * end if the frame is coded: for a frame that is sent whole nothing is copied. */
static void fill_hole(frame_gather *gather, uint32_t end)
{
    for (; gather->copied < end; gather->copied++) {
        if (gather->modes[gather->copied] == RFT_BLOCK_DENSE) copy_dense(gather, gather->copied);
    }
}

static uint64_t part_of(const rft_parts *parts, const unsigned char *image, const rft_block *block,
                        uint32_t index)
{
    if (parts->known != NULL && parts->known[index] != 0) return parts->parts[index];
    return rft_digest_part(image + block->offset, block->bytes, block->tensor_offset);
}

static bool code_whole(const frame_gather *gather, uint32_t at, rft_sparse *sparse)
{
    const rft_frame_source *source = gather->source;
    uint32_t index = gather->span->first_block + at;
    const rft_block *block = placed(gather, at);
    if (!rft_sparse_encode(gather->manifest, block, source->price, source->base + block->offset,
                           source->image + block->offset, gather->next, sparse)) {
        return false;
    }
    sparse->before = part_of(&source->before, source->base, block, index);
    sparse->after = part_of(&source->after, source->image, block, index);
    return true;
}

/* The wanted bytes of a block, after one another. */
static bool code_cut(const frame_gather *gather, uint32_t at, const rft_block *cut,
                     rft_sparse *sparse)
{
    const rft_frame_source *source = gather->source;
    unsigned char *before = gather->pair, *after = gather->pair + cut->bytes;
    copy_wanted(gather, at, source->base, before);
    copy_wanted(gather, at, source->image, after);
    if (!rft_sparse_encode(gather->manifest, cut, source->price, before, after, gather->next,
                           sparse)) {
        return false;
    }
    sparse->before = rft_digest_part(before, cut->bytes, cut->tensor_offset);
    sparse->after = rft_digest_part(after, cut->bytes, cut->tensor_offset);
    return true;
}

static bool add_sparse(frame_gather *gather, uint32_t at)
{
    const rft_block *whole = &gather->manifest->blocks[gather->span->first_block + at];
    rft_block cut;
    rft_sparse sparse;
    if (gather->source->base == NULL) return false;
    if (!rft_sparse_cut(gather->manifest, gather->source->want, whole, &cut)) return false;
    if (!(cut.bytes == whole->bytes ? code_whole(gather, at, &sparse)
                                    : code_cut(gather, at, &cut, &sparse)))
        return false;
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
        if (!add_sparse(gather, i)) gather->next += wanted_bytes(gather, &blocks[i]);
    }
}

/* Gathers the blocks, with the entries right before them; the last dense blocks are not copied yet.
 */
static refit_status gather_blocks(frame_gather *gather, rft_bytes *scratch, rft_view *payload,
                                  refit_error *error)
{
    size_t directory = (size_t)gather->span->blocks * RFT_SPARSE_ENTRY_BYTES;
    size_t room = directory + gather->span->bytes + coding_room(gather);
    rft_bytes_reset(scratch);
    RFT_TRY(rft_bytes_reserve(scratch, room + pair_room(gather), error));
    gather->entries = scratch->data;
    gather->next = gather->hole = scratch->data + directory;
    gather->pair = scratch->data + room;
    add_blocks(gather);
    size_t used = (size_t)gather->counts.sparse * RFT_SPARSE_ENTRY_BYTES;
    unsigned char *start = scratch->data + directory - used;
    memmove(start, gather->entries, used);
    scratch->count = (size_t)(gather->next - scratch->data);
    *payload = (rft_view){start, (size_t)(gather->next - start)};
    return REFIT_OK;
}

/* The range of the image as it is. In a layout the padding after a tensor's part may be another
 * one: then it is put together. */
static refit_status whole(frame_gather *gather, rft_bytes *scratch, rft_view *payload, bool *copied,
                          refit_error *error)
{
    const rft_frame_span *span = gather->span;
    const rft_block *blocks = &gather->manifest->blocks[span->first_block];
    const rft_block *first = placed(gather, 0), *last = placed(gather, span->blocks - 1);
    const unsigned char *image = gather->source->image;
    memset(gather->modes, RFT_BLOCK_DENSE, span->blocks);
    gather->counts = (rft_frame_counts){.dense = span->blocks};
    rft_bytes_reset(scratch);
    *copied = last->offset + last->bytes - first->offset != span->bytes;
    *payload = (rft_view){image + first->offset, span->bytes};
    if (!*copied) return REFIT_OK;
    RFT_TRY(rft_bytes_reserve(scratch, span->bytes, error));
    memset(scratch->data, 0, span->bytes);
    for (uint32_t i = 0; i < span->blocks; i++)
        memcpy(scratch->data + (blocks[i].offset - span->offset), image + first[i].offset,
               blocks[i].bytes);
    scratch->count = span->bytes;
    *payload = rft_bytes_view(scratch);
    return REFIT_OK;
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
    bool cut = rft_want_frame(source->want, sequence) != RFT_WANT_ALL;
    bool coded = source->base != NULL || gather.counts.same > 0 || cut;
    if (coded) RFT_TRY(gather_blocks(&gather, scratch, &payload, error));
    coded = cut || (gather.counts.dense < gather.span->blocks &&
                    payload.count + source->worth <= gather.span->bytes);
    bool copied = coded;
    if (!coded) RFT_TRY(whole(&gather, scratch, &payload, &copied, error));
    *out = (rft_frame){.payload = payload, .gathered = copied, .counts = gather.counts};
    if (coded) fill_hole(&gather, gather.span->blocks);
    if (coded && !cut) RFT_TRY(pack(&gather, out, error));
    out->hash = XXH3_64bits(out->payload.data, out->payload.count);
    return REFIT_OK;
}

/* ---- Credits ---- */

int32_t rft_credit_cost(uint64_t payload, uint64_t bytes)
{
    if (payload >= bytes) return RFT_CREDIT;
    uint64_t part = (bytes + RFT_CREDIT - 1) / RFT_CREDIT;
    uint64_t parts = (payload + part - 1) / part;
    return parts == 0 ? 1 : (int32_t)parts;
}
