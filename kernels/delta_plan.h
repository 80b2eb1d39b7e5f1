/*
 * delta_plan: what the parts of the delta coder share: how long planes are, how their bits lie, and
 * how half floats are numbered.
 */
#ifndef RFT_KERNEL_DELTA_PLAN_H
#define RFT_KERNEL_DELTA_PLAN_H

#include <string.h>

#include "kernels/delta.h"

#define RFT_DELTA_MAP_WORDS (RFT_DELTA_ELEMENTS / 64)

/* l of delta.h. */
static inline uint32_t rft_delta_low_bits(uint32_t elements, uint32_t changed)
{
    uint32_t each = elements / changed;
    return each < 4 ? 0 : 31 - (uint32_t)__builtin_clz(each);
}

static inline uint32_t rft_delta_high_bits(uint32_t elements, uint32_t changed)
{
    uint32_t low = rft_delta_low_bits(elements, changed);
    return low == 0 ? elements : ((elements - 1) >> low) + changed;
}

/* Fills the lengths from the counts, which are taken as they are. */
static inline void rft_delta_lay_out(rft_delta_shape shape, rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    uint32_t changed = entry->changed;
    entry->bytes[RFT_DELTA_LOW] = (changed * rft_delta_low_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_HIGH] = (rft_delta_high_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_SYMBOLS] = half ? (changed + 3) / 4 : 0;
    entry->bytes[RFT_DELTA_ESCAPES] = (entry->escapes + 1) / 2;
    entry->bytes[RFT_DELTA_FAR] = entry->far;
    entry->bytes[RFT_DELTA_VALUES] = entry->values * shape.width;
    entry->total = 0;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        entry->total += entry->bytes[i];
    }
}

static inline uint64_t rft_delta_load(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline void rft_delta_store(unsigned char *at, uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(at, &word, sizeof word);
}

/* The 8 bytes at `at`, of which those from `end` on count as 0 and are not read. */
static inline uint64_t rft_delta_load_before(const unsigned char *at, const unsigned char *end)
{
    if (end - at >= 8) return rft_delta_load(at);
    unsigned char last[8] = {0};
    if (end > at) memcpy(last, at, (size_t)(end - at));
    return rft_delta_load(last);
}

/* u of delta.h from the element's two bytes, and back. */
static inline uint32_t rft_delta_number(const unsigned char *half)
{
    uint32_t bits = (uint32_t)half[0] | (uint32_t)half[1] << 8;
    return (bits & 0x8000u) != 0 ? ~bits & 0xFFFFu : bits | 0x8000u;
}

static inline void rft_delta_put_number(unsigned char *half, uint32_t number)
{
    uint32_t bits = (number & 0x8000u) != 0 ? number & 0x7FFFu : ~number & 0xFFFFu;
    half[0] = (unsigned char)bits;
    half[1] = (unsigned char)(bits >> 8);
}

#endif
