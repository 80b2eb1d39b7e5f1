/*
 * Deltas without vectors: the oracle of the other forms, and the form for other architectures. One
 * element after the other, as delta.h describes.
 */
#include "kernels/delta_scalar.h"

/* ---- Comparing */

static bool differs(const unsigned char *a, const unsigned char *b, uint32_t width)
{
    switch (width) {
    case 1: return *a != *b;
    case 2: return memcmp(a, b, 2) != 0;
    case 4: return memcmp(a, b, 4) != 0;
    default: return memcmp(a, b, 8) != 0;
    }
}

static uint64_t compare_word(const unsigned char *a, const unsigned char *b, uint32_t count,
                             uint32_t width)
{
    uint64_t word = 0;
    if (memcmp(a, b, (size_t)count * width) == 0) return 0;
    for (uint32_t i = 0; i < count; i++) {
        word |= (uint64_t)differs(a + (size_t)i * width, b + (size_t)i * width, width) << i;
    }
    return word;
}

uint32_t rft_delta_compare_scalar(rft_delta_shape shape, uint32_t from, const void *before,
                                  const void *after, uint64_t *map)
{
    const unsigned char *a = before, *b = after;
    uint32_t changed = 0, width = shape.width;
    for (uint32_t at = from; at < shape.elements; at += 64) {
        uint32_t count = shape.elements - at < 64 ? shape.elements - at : 64;
        uint64_t word = compare_word(a + (size_t)at * width, b + (size_t)at * width, count, width);
        map[at / 64] = word;
        changed += (uint32_t)__builtin_popcountll(word);
    }
    return changed;
}

/* ---- Encoding */

/* Into a plane that is 0 there so far. */
static void put_bits(unsigned char *plane, uint32_t at, uint32_t bits)
{
    for (uint32_t shifted = bits << at % 8, i = at / 8; shifted != 0; shifted >>= 8, i++) {
        plane[i] |= (unsigned char)shifted;
    }
}

static void put_position(rft_delta_writer *to, uint32_t i, uint32_t position)
{
    uint32_t low = to->low_bits, rank = low == 0 ? 0 : i;
    put_bits(to->plane[RFT_DELTA_LOW], i * low, position & ((1u << low) - 1));
    put_bits(to->plane[RFT_DELTA_HIGH], (position >> low) + rank, 1);
}

static void put_escape(rft_delta_writer *to, uint32_t escape)
{
    uint32_t i = to->entry->escapes++;
    unsigned char *at = to->plane[RFT_DELTA_ESCAPES] + i / 2;
    *at = (unsigned char)(i % 2 == 0 ? escape : *at | escape << 4);
}

static void put_half(rft_delta_writer *to, uint32_t i, uint32_t old_bits, uint32_t bits)
{
    uint32_t old = rft_delta_number(old_bits), number = rft_delta_number(bits);
    uint32_t distance = number > old ? number - old : old - number;
    put_bits(to->plane[RFT_DELTA_SYMBOLS], 2 * i, distance <= 1 ? number % 3 : 3);
    if (distance <= 1) return;
    put_escape(to, distance <= 7 ? number % 15 : 15);
    if (distance > 7) rft_delta_put_far(to, old_bits, bits);
}

static void put_value(rft_delta_writer *to, uint32_t i, const unsigned char *before,
                      const unsigned char *after)
{
    uint32_t width = to->shape.width;
    if (to->shape.kind == RFT_DELTA_HALF) {
        put_half(to, i, rft_delta_half(before), rft_delta_half(after));
    } else {
        memcpy(to->plane[RFT_DELTA_VALUES] + (size_t)i * width, after, width);
    }
}

void rft_delta_encode_scalar(rft_delta_writer *to, const void *before, const void *after,
                             const uint64_t *map)
{
    const unsigned char *a = before, *b = after;
    uint32_t done = 0;
    memset(to->plane[0], 0, (size_t)(to->plane[RFT_DELTA_ESCAPES] - to->plane[0]));
    for (uint32_t at = 0; at < to->shape.elements; at += 64) {
        for (uint64_t word = map[at / 64]; word != 0; word &= word - 1, done++) {
            uint32_t position = at + (uint32_t)__builtin_ctzll(word);
            size_t from = (size_t)position * to->shape.width;
            put_position(to, done, position);
            put_value(to, done, a + from, b + from);
            if (to->swap != NULL) memcpy(to->swap + from, a + from, to->shape.width);
        }
    }
}

/* ---- Applying */

static uint32_t get_bits(const rft_delta_reader *from, rft_delta_plane plane, uint32_t at,
                         uint32_t count)
{
    uint64_t word =
        rft_delta_load_before(from->plane[plane] + at / 8, from->plane[RFT_DELTA_PLANES]);
    return (uint32_t)(word >> at % 8) & ((1u << count) - 1);
}

static bool get_escape(rft_delta_reader *from, uint32_t own, uint32_t *bits)
{
    if (from->escapes == from->entry->escapes) return false;
    uint32_t escape = get_bits(from, RFT_DELTA_ESCAPES, 4 * from->escapes++, 4);
    if (escape == 15) return rft_delta_get_far(from, own, bits);
    *bits = rft_delta_bits(rft_delta_nearest(rft_delta_number(own), escape, 15));
    return true;
}

static bool get_half(rft_delta_reader *from, unsigned char *element)
{
    uint32_t own = rft_delta_half(element), bits = 0;
    uint32_t symbol = get_bits(from, RFT_DELTA_SYMBOLS, 2 * from->done, 2);
    if (symbol == 3) {
        if (!get_escape(from, own, &bits)) return false;
    } else {
        bits = rft_delta_bits(rft_delta_nearest(rft_delta_number(own), symbol, 3));
    }
    rft_delta_put_half(element, bits);
    return true;
}

/* The element whose bit of HIGH is `bit`, which lies at `least` or after. */
static bool get_element(rft_delta_reader *from, uint32_t bit, unsigned char *block, uint32_t *least)
{
    uint32_t low = from->low_bits, rank = low == 0 ? 0 : from->done, width = from->shape.width;
    if (from->done == from->entry->changed) return false;
    uint32_t position = (bit - rank) << low | get_bits(from, RFT_DELTA_LOW, from->done * low, low);
    if (position < *least || position >= from->shape.elements) return false;
    *least = position + 1;
    unsigned char *element = block + (size_t)position * width;
    if (from->shape.kind == RFT_DELTA_HALF) {
        if (!get_half(from, element)) return false;
    } else {
        memcpy(element, from->plane[RFT_DELTA_VALUES] + (size_t)from->done * width, width);
    }
    from->done++;
    return true;
}

bool rft_delta_apply_scalar(rft_delta_reader *from, unsigned char *block)
{
    const unsigned char *high = from->plane[RFT_DELTA_HIGH];
    const unsigned char *end = high + from->entry->bytes[RFT_DELTA_HIGH];
    uint32_t least = 0;
    for (const unsigned char *at = high; at < end; at += 8) {
        for (uint64_t word = rft_delta_load_before(at, end); word != 0; word &= word - 1) {
            uint32_t bit = (uint32_t)(at - high) * 8 + (uint32_t)__builtin_ctzll(word);
            if (!get_element(from, bit, block, &least)) return false;
        }
    }
    return rft_delta_is_read(from);
}
