/*
 * What trainers send today, in its simplest correct form:
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
#include "bench_codec.h"

#include <string.h>

#include <zstd.h>

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

bool bench_codec_open_zstd(bench_coder *coder)
{
    coder->zstd_in = ZSTD_createCCtx();
    coder->zstd_out = ZSTD_createDCtx();
    return coder->zstd_in != NULL && coder->zstd_out != NULL;
}

void bench_codec_close_zstd(bench_coder *coder)
{
    (void)ZSTD_freeCCtx(coder->zstd_in);
    (void)ZSTD_freeDCtx(coder->zstd_out);
}

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

const bench_codec bench_codec_baselines[BENCH_CODEC_RIVALS] = {
    {"int32_value",
     {{"encode", BENCH_ENCODES, encode_values}, {"decode", BENCH_APPLIES, decode_values}}},
    {"xor_zstd1",
     {{"encode", BENCH_ENCODES, encode_dense}, {"decode", BENCH_APPLIES, decode_dense}}},
    {"gap16_xor_zstd1",
     {{"encode", BENCH_ENCODES, encode_gaps}, {"decode", BENCH_APPLIES, decode_gaps}}},
};
