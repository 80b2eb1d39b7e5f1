/*
 * Applying with vectors, the inverse of delta_encode_wide.c. The planes are checked chunk by chunk,
 * before an element of the chunk is touched. Planes are read from a copy of their next bytes, so
 * that reading by words cannot go beyond what there is.
 */
#include "kernels/delta_wide.h"

#if defined(__x86_64__) || defined(__aarch64__)
#include "kernels/delta_chunk.h"

typedef struct decoder {
    rft_delta_reader *from;
    unsigned char *block;
    uint32_t least;               /* where the next element may lie */
    uint16_t bit[RFT_DELTA_ROOM]; /* of HIGH, modulo 65,536 */
    uint16_t place[RFT_DELTA_ROOM];
    uint16_t half[RFT_DELTA_ROOM];
    uint16_t symbol[RFT_DELTA_ROOM];
    unsigned char bytes[2 * RFT_DELTA_ROOM + 16]; /* of a plane */
} decoder;

/* The bytes in which the next `count` elements have `bits` bits each, and zeros after them. */
static const unsigned char *fetch(decoder *d, rft_delta_plane plane, uint32_t bits, uint32_t count)
{
    size_t at = (size_t)d->from->done * bits / 8, bytes = ((size_t)count * bits + 7) / 8;
    memcpy(d->bytes, d->from->plane[plane] + at, bytes);
    memset(d->bytes + bytes, 0, 16);
    return d->bytes;
}

/* The low bits of all. */
RFT_DELTA_TARGET static void get_low(decoder *d, uint32_t count)
{
    uint32_t low = d->from->low_bits;
    const unsigned char *at = fetch(d, RFT_DELTA_LOW, low, count);
    for (uint32_t i = 0; i < count; i += 8, at += low) {
        uint64_t four[2];
        four[0] = rft_delta_spread4(rft_delta_load(at), low);
        four[1] = rft_delta_spread4(rft_delta_load(at + low / 2) >> low % 2 * 4, low);
        memcpy(d->place + i, four, sizeof four);
    }
}

/* The places from both parts. Those of the high part never fall, and the last one is not beyond the
 * block's last, so that nothing is lost in 16 bits. */
RFT_DELTA_TARGET static bool get_high(decoder *d, uint32_t count)
{
    uint32_t low = d->from->low_bits, rank = d->from->done;
    uint32_t last = (uint16_t)(d->bit[count - 1] - (rank + count - 1));
    if (last > (d->from->shape.elements - 1) >> low) return false;
    for (uint32_t i = 0; i < count; i += 16) {
        rft_delta_join16(d->place + i, d->bit + i, rank + i, low);
    }
    return true;
}

/* Each place lies after the one before it. */
RFT_DELTA_TARGET static bool is_rising(const uint16_t *place, uint32_t count)
{
    rft_delta_lanes falls = rft_delta_zero16();
    uint32_t i = 1;
    for (; i + 16 <= count; i += 16) {
        falls = rft_delta_falls16(falls, place + i);
    }
    for (; i < count; i++) {
        if (place[i] <= place[i - 1]) return false;
    }
    return rft_delta_none16(falls);
}

RFT_DELTA_TARGET static bool get_places(decoder *d, uint32_t count)
{
    if (d->from->low_bits == 0) {
        memcpy(d->place, d->bit, count * sizeof *d->place);
    } else {
        get_low(d, count);
        if (!get_high(d, count) || !is_rising(d->place, count)) return false;
    }
    if (d->place[0] < d->least || d->place[count - 1] >= d->from->shape.elements) return false;
    d->least = (uint32_t)d->place[count - 1] + 1;
    return true;
}

/* A symbol a lane. */
RFT_DELTA_TARGET static void get_symbols(decoder *d, uint32_t count)
{
    const unsigned char *at = fetch(d, RFT_DELTA_SYMBOLS, 2, count);
    for (uint32_t i = 0; i < count; i += 8) {
        uint64_t four[2] = {rft_delta_spread4(at[i / 4], 2), rft_delta_spread4(at[i / 4 + 1], 2)};
        memcpy(d->symbol + i, four, sizeof four);
    }
}

/* What the halves become; those whose symbol is 3 stay, and are listed. */
RFT_DELTA_TARGET static uint32_t make_near(decoder *d, uint32_t count, uint16_t *escaped)
{
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < count; i += 16) {
        rft_delta_lanes own = rft_delta_get16(d->half + i);
        rft_delta_lanes symbols = rft_delta_get16(d->symbol + i);
        rft_delta_lanes made = rft_delta_nearest16(own, symbols, 3);
        rft_delta_put16(d->half + i, rft_delta_keep16(made, own, symbols, 3));
        escapes +=
            rft_delta_places(rft_delta_find16(symbols, 3, count - i), i, escaped + escapes, 4);
    }
    return escapes;
}

/* An escape a lane of `symbol`. */
RFT_DELTA_TARGET static bool get_escapes(decoder *d, uint32_t count)
{
    rft_delta_reader *from = d->from;
    uint32_t odd = from->escapes % 2, bytes = (odd + count + 1) / 2;
    if (count > from->entry->escapes - from->escapes) return false;
    memcpy(d->bytes, from->plane[RFT_DELTA_ESCAPES] + from->escapes / 2, bytes);
    memset(d->bytes + bytes, 0, 16);
    for (uint32_t i = 0; i < count; i += 4) {
        uint64_t four = rft_delta_spread4(rft_delta_load(d->bytes + i / 2) >> 4 * odd, 4);
        memcpy(d->symbol + i, &four, sizeof four);
    }
    from->escapes += count;
    return true;
}

/* What the listed halves become. */
RFT_DELTA_TARGET static bool make_escapes(decoder *d, const uint16_t *escaped, uint32_t count)
{
    uint16_t half[RFT_DELTA_ROOM], far[RFT_DELTA_ROOM];
    uint32_t fars = 0, bits;
    if (!get_escapes(d, count)) return false;
    for (uint32_t i = 0; i < count; i++) {
        half[i] = d->half[escaped[i]];
    }
    for (uint32_t i = 0; i < count; i += 16) {
        rft_delta_lanes escapes = rft_delta_get16(d->symbol + i);
        rft_delta_put16(half + i, rft_delta_nearest16(rft_delta_get16(half + i), escapes, 15));
        fars += rft_delta_places(rft_delta_find16(escapes, 15, count - i), i, far + fars, 2);
    }
    for (uint32_t i = 0; i < fars; i++) {
        if (!rft_delta_get_far(d->from, d->half[escaped[far[i]]], &bits)) return false;
        half[far[i]] = (uint16_t)bits;
    }
    for (uint32_t i = 0; i < count; i++) {
        d->half[escaped[i]] = half[i];
    }
    return true;
}

RFT_DELTA_TARGET static bool apply_halves(decoder *d, uint32_t count)
{
    uint16_t escaped[RFT_DELTA_ROOM];
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&d->half[i], d->block + 2 * (size_t)d->place[i], 2);
    }
    get_symbols(d, count);
    uint32_t escapes = make_near(d, count, escaped);
    if (!make_escapes(d, escaped, escapes)) return false;
    for (uint32_t i = 0; i < count; i++) {
        memcpy(d->block + 2 * (size_t)d->place[i], &d->half[i], 2);
    }
    return true;
}

#define APPLY_VALUES(width)                                                                        \
    for (uint32_t i = 0; i < count; i++) {                                                         \
        memcpy(d->block + (size_t)(width)*d->place[i], from + (size_t)(width)*i, (width));         \
    }                                                                                              \
    break

static void apply_values(decoder *d, uint32_t count)
{
    uint32_t width = d->from->shape.width;
    const unsigned char *from = d->from->plane[RFT_DELTA_VALUES] + (size_t)d->from->done * width;
    switch (width) {
    case 1: APPLY_VALUES(1);
    case 2: APPLY_VALUES(2);
    case 4: APPLY_VALUES(4);
    default: APPLY_VALUES(8);
    }
}

RFT_DELTA_TARGET static bool apply_chunk(decoder *d, uint32_t count)
{
    if (count == 0) return true;
    if (count > d->from->entry->changed - d->from->done) return false;
    if (!get_places(d, count)) return false;
    if (d->from->shape.kind == RFT_DELTA_RAW) {
        apply_values(d, count);
    } else if (!apply_halves(d, count)) {
        return false;
    }
    d->from->done += count;
    return true;
}

RFT_DELTA_TARGET bool rft_delta_apply_wide(rft_delta_reader *from, unsigned char *block)
{
    decoder d;
    d.from = from;
    d.block = block;
    d.least = 0;
    const unsigned char *high = from->plane[RFT_DELTA_HIGH];
    const unsigned char *end = high + from->entry->bytes[RFT_DELTA_HIGH];
    uint32_t count = 0;
    for (const unsigned char *at = high; at < end; at += 8) {
        uint32_t base = (uint32_t)(at - high) * 8;
        count += rft_delta_places(rft_delta_load_before(at, end), base, d.bit + count, 8);
        if (count < RFT_DELTA_CHUNK) continue;
        uint32_t whole = count / RFT_DELTA_GROUP * RFT_DELTA_GROUP;
        if (!apply_chunk(&d, whole)) return false;
        memcpy(d.bit, d.bit + whole, RFT_DELTA_GROUP * sizeof *d.bit);
        count -= whole;
    }
    return apply_chunk(&d, count) && rft_delta_is_read(from);
}
#endif
