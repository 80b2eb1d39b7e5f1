/*
 * Comparing with NEON: 64 elements, of any width, become a word of bits in a few steps that do not
 * depend on their values. Lanes that are all ones or all zeros are narrowed to bytes; each byte
 * keeps a bit of its own, and sums of neighbours make bytes of bits.
 */
#include "kernels/delta_wide.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define INLINE __attribute__((always_inline)) inline

static INLINE uint8x16_t load_neon(const unsigned char *at, uint32_t i)
{
    return vld1q_u8(at + 16 * (size_t)i);
}

/* All ones in the lanes of vector `i` that are equal, for each width. */

static INLINE uint8x16_t equal_bytes(const unsigned char *a, const unsigned char *b, uint32_t i)
{
    return vceqq_u8(load_neon(a, i), load_neon(b, i));
}

static INLINE uint16x8_t equal_halves(const unsigned char *a, const unsigned char *b, uint32_t i)
{
    return vceqq_u16(vreinterpretq_u16_u8(load_neon(a, i)), vreinterpretq_u16_u8(load_neon(b, i)));
}

static INLINE uint32x4_t equal_words(const unsigned char *a, const unsigned char *b, uint32_t i)
{
    return vceqq_u32(vreinterpretq_u32_u8(load_neon(a, i)), vreinterpretq_u32_u8(load_neon(b, i)));
}

static INLINE uint64x2_t equal_doubles(const unsigned char *a, const unsigned char *b, uint32_t i)
{
    return vceqq_u64(vreinterpretq_u64_u8(load_neon(a, i)), vreinterpretq_u64_u8(load_neon(b, i)));
}

/* The even lanes of both, which are half as wide. */
static INLINE uint8x16_t narrow_halves(uint16x8_t a, uint16x8_t b)
{
    return vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}

static INLINE uint16x8_t narrow_words(uint32x4_t a, uint32x4_t b)
{
    return vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
}

static INLINE uint32x4_t narrow_doubles(uint64x2_t a, uint64x2_t b)
{
    return vuzp1q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b));
}

/* Eight equal 64-bit lanes' halves from vector `i` on. */
static INLINE uint16x8_t equal_eight(const unsigned char *a, const unsigned char *b, uint32_t i)
{
    return narrow_words(narrow_doubles(equal_doubles(a, b, i), equal_doubles(a, b, i + 1)),
                        narrow_doubles(equal_doubles(a, b, i + 2), equal_doubles(a, b, i + 3)));
}

/* A byte for each of the sixteen elements from number 16 * `i` on. */
static INLINE uint8x16_t equal_sixteen(uint32_t width, const unsigned char *a,
                                       const unsigned char *b, uint32_t i)
{
    switch (width) {
    case 1: return equal_bytes(a, b, i);
    case 2: return narrow_halves(equal_halves(a, b, 2 * i), equal_halves(a, b, 2 * i + 1));
    case 4:
        return narrow_halves(
            narrow_words(equal_words(a, b, 4 * i), equal_words(a, b, 4 * i + 1)),
            narrow_words(equal_words(a, b, 4 * i + 2), equal_words(a, b, 4 * i + 3)));
    default: return narrow_halves(equal_eight(a, b, 8 * i), equal_eight(a, b, 8 * i + 4));
    }
}

/* The bits of 64 elements that differ. */
static INLINE uint64_t compare_word(uint32_t width, const unsigned char *a, const unsigned char *b)
{
    const uint8x16_t place = vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
    uint8x16_t part[4];
    for (uint32_t i = 0; i < 4; i++)
        part[i] = vbicq_u8(place, equal_sixteen(width, a, b, i));
    uint8x16_t pairs = vpaddq_u8(vpaddq_u8(part[0], part[1]), vpaddq_u8(part[2], part[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
}

static INLINE uint32_t compare_words(uint32_t width, uint32_t words, const unsigned char *a,
                                     const unsigned char *b, uint64_t *map)
{
    uint32_t changed = 0;
    for (uint32_t i = 0; i < words; i++, a += 64 * (size_t)width, b += 64 * (size_t)width) {
        map[i] = compare_word(width, a, b);
        changed += (uint32_t)__builtin_popcountll(map[i]);
    }
    return changed;
}

uint32_t rft_delta_compare_wide(uint32_t width, uint32_t words, const void *before,
                                const void *after, uint64_t *map)
{
    switch (width) {
    case 1: return compare_words(1, words, before, after, map);
    case 2: return compare_words(2, words, before, after, map);
    case 4: return compare_words(4, words, before, after, map);
    default: return compare_words(8, words, before, after, map);
    }
}
#endif
