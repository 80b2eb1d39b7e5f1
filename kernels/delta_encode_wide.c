/*
 * Encoding with vectors, from the bits of the changed elements on: a chunk's positions are listed,
 * then its low bits, high bits and values are made, each in a loop of its own without branches that
 * depend on the data.
 */
#include "kernels/delta_wide.h"

#if defined(__x86_64__) || defined(__aarch64__)
#include "kernels/delta_chunk.h"

typedef struct encoder {
    rft_delta_writer *to;
    const unsigned char *before, *after;
    uint32_t done;  /* elements before this chunk */
    uint32_t count; /* listed in `place` */
    uint32_t words; /* of the map, gone through */
    uint64_t high;  /* the word of HIGH under way, and which it is */
    uint32_t high_at;
    uint16_t place[RFT_DELTA_ROOM];
    uint16_t old[RFT_DELTA_ROOM];
    uint16_t now[RFT_DELTA_ROOM];
    unsigned char bytes[2 * RFT_DELTA_ROOM]; /* of a plane */
} encoder;

/* Eight elements become as many bytes as each has low bits. */
RFT_DELTA_TARGET static void put_low(encoder *e, uint32_t count)
{
    uint32_t low = e->to->low_bits;
    unsigned char *at = e->bytes;
    memset(e->place + count, 0, 8 * sizeof *e->place);
    for (uint32_t i = 0; i < count; i += 8, at += low) {
        uint64_t four[2];
        memcpy(four, e->place + i, sizeof four);
        uint64_t a = rft_delta_pack4(four[0], low), b = rft_delta_pack4(four[1], low);
        rft_delta_store(at, a | b << 4 * low);
        if (low > 8) rft_delta_store(at + 8, b >> (64 - 4 * low));
    }
    size_t from = (size_t)e->done * low / 8;
    memcpy(e->to->plane[RFT_DELTA_LOW] + from, e->bytes, ((size_t)count * low + 7) / 8);
}

static void flush_high(encoder *e)
{
    unsigned char *at = e->to->plane[RFT_DELTA_HIGH] + 8 * (size_t)e->high_at;
    unsigned char word[8];
    size_t left = (size_t)(e->to->plane[RFT_DELTA_SYMBOLS] - at);
    rft_delta_store(word, e->high);
    memcpy(at, word, left < 8 ? left : 8);
    e->high = 0;
}

RFT_DELTA_TARGET static void put_high(encoder *e, uint32_t count)
{
    uint32_t low = e->to->low_bits;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bit = ((uint32_t)e->place[i] >> low) + e->done + i;
        if (bit / 64 != e->high_at) {
            flush_high(e);
            e->high_at = bit / 64;
        }
        e->high |= UINT64_C(1) << bit % 64;
    }
}

/* Gathers what the elements were and are; the lanes after the last are 0. */
RFT_DELTA_TARGET static void get_halves(encoder *e, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        size_t at = 2 * (size_t)e->place[i];
        memcpy(&e->old[i], e->before + at, 2);
        memcpy(&e->now[i], e->after + at, 2);
    }
    memset(e->old + count, 0, 32 * sizeof *e->old);
    memset(e->now + count, 0, 32 * sizeof *e->now);
}

/* Those of `count` elements whose symbol is 3. `e->old` and `e->now` are theirs. */
RFT_DELTA_TARGET static void put_escapes(encoder *e, uint32_t count)
{
    uint16_t escape[RFT_DELTA_ROOM], far[RFT_DELTA_ROOM];
    uint32_t fars = 0, odd = e->to->entry->escapes % 2;
    unsigned char *at = e->to->plane[RFT_DELTA_ESCAPES] + e->to->entry->escapes / 2;
    escape[0] = odd != 0 ? *at : 0; /* the first half of a byte */
    for (uint32_t i = 0; i < count; i += 16) {
        rft_delta_lanes escapes = rft_delta_code16(e->old + i, e->now + i, 15, 15);
        rft_delta_put16(escape + odd + i, escapes);
        fars += rft_delta_places(rft_delta_find16(escapes, 15, count - i), i, far + fars, 2);
    }
    memset(escape + odd + count, 0, 4 * sizeof *escape);
    for (uint32_t i = 0; i < odd + count; i += 4) {
        uint64_t four;
        memcpy(&four, escape + i, sizeof four);
        rft_delta_store(e->bytes + i / 2, rft_delta_pack4(four, 4));
    }
    memcpy(at, e->bytes, (odd + count + 1) / 2);
    e->to->entry->escapes += count;
    for (uint32_t i = 0; i < fars; i++) {
        rft_delta_put_far(e->to, e->old[far[i]], e->now[far[i]]);
    }
}

RFT_DELTA_TARGET static void put_halves(encoder *e, uint32_t count)
{
    uint16_t escaped[RFT_DELTA_ROOM];
    uint32_t escapes = 0;
    get_halves(e, count);
    for (uint32_t i = 0; i < count; i += 32) {
        uint32_t set;
        uint64_t symbols =
            rft_delta_symbols32(rft_delta_code16(e->old + i, e->now + i, 3, 3),
                                rft_delta_code16(e->old + i + 16, e->now + i + 16, 3, 3), &set);
        rft_delta_store(e->bytes + i / 4, symbols);
        if (count - i < 32) set &= (1u << (count - i)) - 1;
        escapes += rft_delta_places(set, i, escaped + escapes, 4);
    }
    if (count % 4 != 0) e->bytes[count / 4] &= (unsigned char)((1u << count % 4 * 2) - 1);
    memcpy(e->to->plane[RFT_DELTA_SYMBOLS] + e->done / 4, e->bytes, (count + 3) / 4);
    for (uint32_t i = 0; i < escapes; i++) {
        e->old[i] = e->old[escaped[i]];
        e->now[i] = e->now[escaped[i]];
    }
    put_escapes(e, escapes);
}

#define PUT_VALUES(width)                                                                          \
    for (uint32_t i = 0; i < count; i++) {                                                         \
        memcpy(to + (size_t)(width)*i, e->after + (size_t)(width)*e->place[i], (width));           \
    }                                                                                              \
    break

static void put_values(encoder *e, uint32_t count)
{
    uint32_t width = e->to->shape.width;
    unsigned char *to = e->to->plane[RFT_DELTA_VALUES] + (size_t)e->done * width;
    switch (width) {
    case 1: PUT_VALUES(1);
    case 2: PUT_VALUES(2);
    case 4: PUT_VALUES(4);
    default: PUT_VALUES(8);
    }
}

#define SWAP_VALUES(width)                                                                         \
    for (uint32_t i = 0; i < count; i++) {                                                         \
        size_t at = (size_t)(width)*e->place[i];                                                   \
        memcpy(e->to->swap + at, e->before + at, (width));                                         \
    }                                                                                              \
    break

static void swap_values(encoder *e, uint32_t count)
{
    switch (e->to->shape.width) {
    case 1: SWAP_VALUES(1);
    case 2: SWAP_VALUES(2);
    case 4: SWAP_VALUES(4);
    default: SWAP_VALUES(8);
    }
}

RFT_DELTA_TARGET static void put_chunk(encoder *e, uint32_t count)
{
    if (e->to->low_bits != 0) {
        put_low(e, count);
        put_high(e, count);
    }
    if (e->to->shape.kind == RFT_DELTA_HALF) {
        put_halves(e, count);
    } else {
        put_values(e, count);
    }
    if (e->to->swap != NULL) swap_values(e, count);
    e->done += count;
}

/* The map as it is. */
static void put_map(const rft_delta_writer *to, const uint64_t *map)
{
    unsigned char *at = to->plane[RFT_DELTA_HIGH], word[8];
    for (uint32_t i = 0; i < to->entry->bytes[RFT_DELTA_HIGH]; i += 8) {
        uint32_t left = to->entry->bytes[RFT_DELTA_HIGH] - i;
        rft_delta_store(word, map[i / 8]);
        memcpy(at + i, word, left < 8 ? left : 8);
    }
}

/* Words of the map until a chunk is full. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE void fill(encoder *e, const uint64_t *map, uint32_t words,
                                                   uint32_t step)
{
    uint32_t count = e->count, i = e->words;
    for (; i < words && count < RFT_DELTA_CHUNK; i++) {
        count += rft_delta_places(map[i], 64 * i, e->place + count, step);
    }
    e->count = count;
    e->words = i;
}

/* By how many bits a word has. */
RFT_DELTA_TARGET static void fill_chunk(encoder *e, const uint64_t *map, uint32_t words)
{
    uint32_t changed = e->to->entry->changed;
    if (changed < words / 3) {
        fill(e, map, words, 1);
    } else if (changed < words) {
        fill(e, map, words, 2);
    } else if (changed < 4 * words) {
        fill(e, map, words, 4);
    } else {
        fill(e, map, words, 8);
    }
}

RFT_DELTA_TARGET void rft_delta_encode_wide(rft_delta_writer *to, const void *before,
                                            const void *after, const uint64_t *map)
{
    encoder e;
    e.to = to;
    e.before = before;
    e.after = after;
    e.done = e.high_at = e.count = e.words = 0;
    e.high = 0;
    uint32_t words = (to->shape.elements + 63) / 64;
    memset(to->plane[RFT_DELTA_HIGH], 0, to->entry->bytes[RFT_DELTA_HIGH]);
    for (fill_chunk(&e, map, words); e.words < words; fill_chunk(&e, map, words)) {
        uint32_t whole = e.count / RFT_DELTA_GROUP * RFT_DELTA_GROUP;
        uint16_t rest[RFT_DELTA_GROUP];
        memcpy(rest, e.place + whole, sizeof rest);
        put_chunk(&e, whole);
        memcpy(e.place, rest, sizeof rest);
        e.count -= whole;
    }
    put_chunk(&e, e.count);
    if (to->low_bits == 0) {
        put_map(to, map);
    } else {
        flush_high(&e);
    }
}
#endif
