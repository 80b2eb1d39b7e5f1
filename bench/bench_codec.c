/*
 * bench_codec: refit's format calls the kernels block by block. The others are written out here:
 * positions and values, XOR, gaps and XOR, the last two compressed with zstd.
 */
#include <stdlib.h>
#include <string.h>

#include <zstd.h>

#include "bench_codec.h"
#include "kernels/delta.h"
#include "kernels/digest.h"

/* ---- refit's, block by block, by the kernels; wire/frame.c and wire/reassembly.c do the same
 * with the version around it ---- */

typedef enum block_mode { MODE_SAME, MODE_SPARSE, MODE_DENSE } block_mode;

/* The entry of a sparse block that travels has changed, escapes and the digests:
 * RFT_DELTA_ENTRY_BYTES. */
struct bench_block {
    block_mode mode;
    uint32_t changed, escapes;
    uint64_t before, after;
};

/* ---- What it works with ---- */

static uint64_t blocks_of(const bench_pair *pair)
{
    return (pair->elements + RFT_DELTA_ELEMENTS - 1) / RFT_DELTA_ELEMENTS;
}

bool bench_coder_open(bench_coder *coder, const bench_pairs *pairs)
{
    uint64_t most = pairs->bytes + 4 * pairs->elements; /* positions and values */
    *coder = (bench_coder){0};
    for (uint32_t i = 0; i < pairs->count; i++)
        coder->block_count += blocks_of(&pairs->all[i]);
    /* Besides: what a compressor needs for bytes that it cannot shrink, and refit for a block. */
    coder->coded_room = most + most / 64 + ((uint64_t)pairs->count + 16) * 4096 + (2 << 20);
    coder->coded = malloc(coder->coded_room);
    coder->scratch = malloc(pairs->image_bytes + 2 * pairs->elements + 4096);
    coder->blocks = calloc(coder->block_count + 1, sizeof *coder->blocks);
    if (coder->coded == NULL || coder->scratch == NULL || coder->blocks == NULL) return false;
    memset(coder->coded, 1, coder->coded_room); /* the first use is none of the figures */
    coder->zstd_in = ZSTD_createCCtx();
    coder->zstd_out = ZSTD_createDCtx();
    return coder->zstd_in != NULL && coder->zstd_out != NULL;
}

void bench_coder_close(bench_coder *coder)
{
    (void)ZSTD_freeCCtx(coder->zstd_in);
    (void)ZSTD_freeDCtx(coder->zstd_out);
    free(coder->coded);
    free(coder->scratch);
    free(coder->blocks);
    *coder = (bench_coder){0};
}

/* A block of a pair. */
typedef struct place {
    rft_delta_shape shape;
    uint64_t image_offset, tensor_offset;
    size_t bytes;
} place;

static place place_of(const bench_pair *pair, uint64_t block)
{
    uint64_t first = block * RFT_DELTA_ELEMENTS, left = pair->elements - first;
    uint32_t elements = left < RFT_DELTA_ELEMENTS ? (uint32_t)left : RFT_DELTA_ELEMENTS;
    return (place){.shape = {elements, pair->width, pair->half ? RFT_DELTA_HALF : RFT_DELTA_RAW},
                   .image_offset = pair->offset + first * pair->width,
                   .tensor_offset = first * pair->width,
                   .bytes = (size_t)elements * pair->width};
}

/* ---- Encoding ---- */

static void encode_block(bench_coder *coder, const bench_pairs *pairs, place at, bool digests,
                         struct bench_block *block)
{
    const unsigned char *before = pairs->before + at.image_offset;
    const unsigned char *after = pairs->after + at.image_offset;
    unsigned char *out = coder->coded + coder->bytes;
    rft_delta_entry entry;
    bool sparse = rft_delta_encode(at.shape, before, after, out, &entry);
    *block = (struct bench_block){.mode = MODE_SPARSE, .changed = entry.changed};
    coder->changed += entry.changed;
    if (sparse) {
        block->escapes = entry.escapes;
        coder->bytes += entry.total;
        coder->sparse++;
    } else if (entry.changed > 0) {
        block->mode = MODE_DENSE;
        memcpy(out, after, at.bytes);
        coder->bytes += at.bytes;
        coder->dense++;
    } else {
        block->mode = MODE_SAME;
        coder->same++;
        return;
    }
    if (!digests) return;
    block->before = rft_digest_part(before, at.bytes, at.tensor_offset);
    block->after = rft_digest_part(after, at.bytes, at.tensor_offset);
}

static bool encode(bench_coder *coder, const bench_pairs *pairs, bool digests)
{
    struct bench_block *block = coder->blocks;
    coder->bytes = coder->changed = coder->same = coder->sparse = coder->dense = 0;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        for (uint64_t b = 0; b < blocks_of(pair); b++)
            encode_block(coder, pairs, place_of(pair, b), digests, block++);
    }
    coder->bytes += coder->sparse * RFT_DELTA_ENTRY_BYTES;
    return true;
}

static bool encode_plain(bench_coder *coder, const bench_pairs *pairs)
{
    return encode(coder, pairs, false);
}

static bool encode_with_digests(bench_coder *coder, const bench_pairs *pairs)
{
    return encode(coder, pairs, true);
}

/* ---- Decoding ---- */

typedef struct decoder {
    bool copy;    /* from the version before; otherwise in place */
    bool digests; /* as encode_with_digests left them */
    const unsigned char *next, *end;
} decoder;

/* The block before it changes; its digest if that is wanted. */
static uint64_t bring_base(const decoder *it, const unsigned char *from, unsigned char *to,
                           place at)
{
    if (it->copy && it->digests) return rft_digest_copy_part(to, from, at.bytes, at.tensor_offset);
    if (it->copy) memcpy(to, from, at.bytes);
    return it->digests ? rft_digest_part(to, at.bytes, at.tensor_offset) : 0;
}

/* The bytes that it takes from the coded ones; 0: they contradict each other. */
static size_t take_block(const decoder *it, const struct bench_block *block, unsigned char *to,
                         place at)
{
    rft_delta_entry entry;
    size_t room = (size_t)(it->end - it->next);
    if (block->mode == MODE_DENSE) {
        if (room >= at.bytes) memcpy(to, it->next, at.bytes);
        return room >= at.bytes ? at.bytes : 0;
    }
    if (!rft_delta_measure(at.shape, block->changed, block->escapes, it->next, room, &entry))
        return 0;
    return rft_delta_apply(at.shape, &entry, it->next, to) ? entry.total : 0;
}

static bool decode_block(decoder *it, const bench_pairs *pairs, const struct bench_block *block,
                         place at)
{
    unsigned char *to = pairs->into + at.image_offset;
    if (block->mode == MODE_SAME) {
        if (it->copy) (void)bring_base(it, pairs->before + at.image_offset, to, at);
        return true;
    }
    uint64_t before = bring_base(it, pairs->before + at.image_offset, to, at);
    size_t taken = take_block(it, block, to, at);
    it->next += taken;
    if (taken == 0 || !it->digests) return taken != 0;
    return before == block->before &&
           rft_digest_part(to, at.bytes, at.tensor_offset) == block->after;
}

static bool decode(bench_coder *coder, const bench_pairs *pairs, bool copy, bool digests)
{
    const struct bench_block *block = coder->blocks;
    uint64_t planes = coder->bytes - coder->sparse * RFT_DELTA_ENTRY_BYTES;
    decoder it = {copy, digests, coder->coded, coder->coded + planes};
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        for (uint64_t b = 0; b < blocks_of(pair); b++)
            if (!decode_block(&it, pairs, block++, place_of(pair, b))) return false;
    }
    return it.next == it.end;
}

static bool decode_plain(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, true, false);
}

static bool decode_with_digests(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, true, true);
}

static bool apply_plain(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, false, false);
}

static bool apply_with_digests(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, false, true);
}

const bench_codec bench_codec_refit = {
    "refit",
    {{"encode", BENCH_ENCODES, encode_plain},
     {"encode_with_digests", BENCH_ENCODES, encode_with_digests},
     {"decode", BENCH_COPIES, decode_plain},
     {"decode_with_digests", BENCH_COPIES, decode_with_digests},
     {"apply", BENCH_APPLIES, apply_plain},
     {"apply_with_digests", BENCH_APPLIES, apply_with_digests},
     {NULL, BENCH_ENCODES, NULL}},
};

/* ---- Those of trainers today ---- */

/*
 * In their simplest correct form:
 *
 *     int32_value      positions of 32 bits and new values (vLLM, verl, TRL)
 *     xor_zstd1        the XOR of the whole tensor, by zstd at level 1 (slime, SkyRL)
 *     gap16_xor_zstd1  gaps between positions in 16 bits, and the XOR of what changed, both by zstd
 *                      at level 1 (NeMo-RL). A gap of 65,535 skips so many and has no value
 *
 * Each tensor begins with its counts; numbers are as a little-endian CPU has them. The loops are
 * made for each width of an element. The coder has room for all that can come; what is decoded is
 * what was encoded here.
 */
enum { LEVEL = 1 };
#define SKIP 65535u

#define INLINE static inline __attribute__((always_inline))

#define OF_WIDTH(function, width, ...)                                                             \
    ((width) == 1   ? function(1, __VA_ARGS__)                                                     \
     : (width) == 2 ? function(2, __VA_ARGS__)                                                     \
     : (width) == 4 ? function(4, __VA_ARGS__)                                                     \
                    : function(8, __VA_ARGS__))

INLINE uint64_t load(uint32_t width, const unsigned char *from, uint64_t at)
{
    uint64_t value = 0;
    memcpy(&value, from + at * width, width);
    return value;
}

INLINE void store(uint32_t width, unsigned char *to, uint64_t at, uint64_t value)
{
    memcpy(to + at * width, &value, width);
}

static void append(bench_coder *coder, const void *bytes, size_t count)
{
    memcpy(coder->coded + coder->bytes, bytes, count);
    coder->bytes += count;
}

static void take(const unsigned char **from, void *bytes, size_t count)
{
    memcpy(bytes, *from, count);
    *from += count;
}

/* ---- Positions and values ---- */

/* To `positions`, unaligned numbers of 32 bits; how many. */
INLINE uint64_t find(uint32_t width, const unsigned char *before, const unsigned char *after,
                     uint64_t elements, unsigned char *positions)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < elements; i++) {
        store(4, positions, count, i);
        count += load(width, before, i) != load(width, after, i);
    }
    return count;
}

INLINE uint64_t gather(uint32_t width, const unsigned char *positions, uint64_t count,
                       const unsigned char *from, unsigned char *values)
{
    for (uint64_t i = 0; i < count; i++)
        store(width, values, i, load(width, from, load(4, positions, i)));
    return count * width;
}

INLINE uint64_t scatter(uint32_t width, const unsigned char *positions, uint64_t count,
                        const unsigned char *values, unsigned char *to)
{
    for (uint64_t i = 0; i < count; i++)
        store(width, to, load(4, positions, i), load(width, values, i));
    return count * width;
}

static bool encode_values(bench_coder *coder, const bench_pairs *pairs)
{
    coder->bytes = coder->changed = 0;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        const unsigned char *after = pairs->after + pair->offset;
        unsigned char *positions = coder->coded + coder->bytes + sizeof(uint64_t);
        if (pair->elements > UINT32_MAX) return false;
        uint64_t count = OF_WIDTH(find, pair->width, pairs->before + pair->offset, after,
                                  pair->elements, positions);
        append(coder, &count, sizeof count);
        coder->bytes += count * 4;
        coder->bytes +=
            OF_WIDTH(gather, pair->width, positions, count, after, coder->coded + coder->bytes);
        coder->changed += count;
    }
    return true;
}

static bool decode_values(bench_coder *coder, const bench_pairs *pairs)
{
    const unsigned char *next = coder->coded;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        uint64_t count;
        take(&next, &count, sizeof count);
        next += count * 4 + OF_WIDTH(scatter, pair->width, next, count, next + count * 4,
                                     pairs->into + pair->offset);
    }
    return next == coder->coded + coder->bytes;
}

/* ---- With the compressor ---- */

/* Appends how long it is compressed, and that. */
static bool append_compressed(bench_coder *coder, const void *bytes, uint64_t count)
{
    unsigned char *to = coder->coded + coder->bytes + sizeof(uint64_t);
    size_t room = coder->coded_room - coder->bytes - sizeof(uint64_t);
    uint64_t made = ZSTD_compressCCtx(coder->zstd_in, to, room, bytes, count, LEVEL);
    if (ZSTD_isError(made) != 0) return false;
    append(coder, &made, sizeof made);
    coder->bytes += made;
    return true;
}

static bool take_compressed(bench_coder *coder, const unsigned char **from, void *bytes,
                            uint64_t count)
{
    uint64_t made;
    take(from, &made, sizeof made);
    const unsigned char *packed = *from;
    *from += made;
    return ZSTD_decompressDCtx(coder->zstd_out, bytes, count, packed, made) == count;
}

static bool encode_dense(bench_coder *coder, const bench_pairs *pairs)
{
    coder->bytes = 0;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        const unsigned char *before = pairs->before + pair->offset;
        const unsigned char *after = pairs->after + pair->offset;
        uint64_t bytes = pair->elements * pair->width;
        for (uint64_t b = 0; b < bytes; b++)
            coder->scratch[b] = before[b] ^ after[b];
        if (!append_compressed(coder, coder->scratch, bytes)) return false;
    }
    return true;
}

static bool decode_dense(bench_coder *coder, const bench_pairs *pairs)
{
    const unsigned char *next = coder->coded, *scratch = coder->scratch;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        unsigned char *into = pairs->into + pair->offset;
        uint64_t bytes = pair->elements * pair->width;
        if (!take_compressed(coder, &next, coder->scratch, bytes)) return false;
        for (uint64_t b = 0; b < bytes; b++)
            into[b] ^= scratch[b];
    }
    return next == coder->coded + coder->bytes;
}

/* ---- Gaps ---- */

typedef struct gap_counts {
    uint64_t gaps, values;
} gap_counts;

/* There are no more gaps than elements: the one that skips stands for 65,535. */
INLINE gap_counts find_gaps(uint32_t width, const unsigned char *before, const unsigned char *after,
                            uint64_t elements, unsigned char *gaps, unsigned char *values)
{
    gap_counts counts = {0, 0};
    uint64_t next = 0;
    for (uint64_t i = 0; i < elements; i++) {
        uint64_t difference = load(width, before, i) ^ load(width, after, i);
        if (difference == 0) continue;
        for (; i - next >= SKIP; next += SKIP)
            store(2, gaps, counts.gaps++, SKIP);
        store(2, gaps, counts.gaps++, i - next);
        store(width, values, counts.values++, difference);
        next = i + 1;
    }
    return counts;
}

INLINE bool apply_gaps(uint32_t width, const unsigned char *gaps, gap_counts counts,
                       const unsigned char *values, unsigned char *to)
{
    uint64_t at = 0, taken = 0;
    for (uint64_t i = 0; i < counts.gaps; i++) {
        uint64_t gap = load(2, gaps, i);
        at += gap;
        if (gap == SKIP) continue;
        store(width, to, at, load(width, to, at) ^ load(width, values, taken++));
        at++;
    }
    return taken == counts.values;
}

static bool encode_gaps(bench_coder *coder, const bench_pairs *pairs)
{
    coder->bytes = coder->changed = 0;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        unsigned char *gaps = coder->scratch, *values = gaps + 2 * pair->elements;
        gap_counts counts = OF_WIDTH(find_gaps, pair->width, pairs->before + pair->offset,
                                     pairs->after + pair->offset, pair->elements, gaps, values);
        append(coder, &counts, sizeof counts);
        if (!append_compressed(coder, gaps, counts.gaps * 2)) return false;
        if (!append_compressed(coder, values, counts.values * pair->width)) return false;
        coder->changed += counts.values;
    }
    return true;
}

static bool decode_gaps(bench_coder *coder, const bench_pairs *pairs)
{
    const unsigned char *next = coder->coded;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        unsigned char *gaps = coder->scratch, *values = gaps + 2 * pair->elements;
        gap_counts counts;
        take(&next, &counts, sizeof counts);
        if (!take_compressed(coder, &next, gaps, counts.gaps * 2)) return false;
        if (!take_compressed(coder, &next, values, counts.values * pair->width)) return false;
        if (!OF_WIDTH(apply_gaps, pair->width, gaps, counts, values, pairs->into + pair->offset))
            return false;
    }
    return next == coder->coded + coder->bytes;
}

const bench_codec bench_codec_baselines[BENCH_CODEC_BASELINES] = {
    {"int32_value",
     {{"encode", BENCH_ENCODES, encode_values}, {"decode", BENCH_APPLIES, decode_values}}},
    {"xor_zstd1",
     {{"encode", BENCH_ENCODES, encode_dense}, {"decode", BENCH_APPLIES, decode_dense}}},
    {"gap16_xor_zstd1",
     {{"encode", BENCH_ENCODES, encode_gaps}, {"decode", BENCH_APPLIES, decode_gaps}}},
};
