/*
 * Comparing with vectors: 64 elements, of any width, become a word of bits in a few steps that do
 * not depend on their values. The processor then waits for memory only: vectors of 64 bytes are no
 * faster in the cache, and read memory a tenth slower where that was measured.
 */
#include "kernels/delta_wide.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET_AVX2 __attribute__((target("avx2,popcnt")))
#define INLINE      __attribute__((always_inline)) inline

/* Vector `i` of both. */
TARGET_AVX2 static INLINE __m256i load_avx2(const unsigned char *at, uint32_t i)
{
    return _mm256_loadu_si256((const __m256i *)at + i);
}

/* All bits of the elements that are equal; 32 bytes of elements are one vector. */
#define EQUAL_AVX2(type, a, b, i) _mm256_cmpeq_##type(load_avx2(a, i), load_avx2(b, i))

/* Each of the next gives the bits of 32 elements that are equal. */

TARGET_AVX2 static INLINE uint32_t equal_bytes(const unsigned char *a, const unsigned char *b)
{
    return (uint32_t)_mm256_movemask_epi8(EQUAL_AVX2(epi8, a, b, 0));
}

/* Packing takes the halves of its sources by turns; 0xD8 puts them in order. */
TARGET_AVX2 static INLINE uint32_t equal_halves(const unsigned char *a, const unsigned char *b)
{
    __m256i packed = _mm256_packs_epi16(EQUAL_AVX2(epi16, a, b, 0), EQUAL_AVX2(epi16, a, b, 1));
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(packed, 0xD8));
}

TARGET_AVX2 static INLINE uint32_t equal_words(const unsigned char *a, const unsigned char *b)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 4; i++) {
        __m256 equal = _mm256_castsi256_ps(EQUAL_AVX2(epi32, a, b, i));
        bits |= (uint32_t)_mm256_movemask_ps(equal) << 8 * i;
    }
    return bits;
}

TARGET_AVX2 static INLINE uint32_t equal_doubles(const unsigned char *a, const unsigned char *b)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 8; i++) {
        __m256d equal = _mm256_castsi256_pd(EQUAL_AVX2(epi64, a, b, i));
        bits |= (uint32_t)_mm256_movemask_pd(equal) << 4 * i;
    }
    return bits;
}

/* Made once for each width. */
#define COMPARE_AVX2(equal, width)                                                                 \
    do {                                                                                           \
        for (uint32_t i = 0; i < words; i++, a += 64 * (width), b += 64 * (width)) {               \
            uint64_t low = equal(a, b), high = equal(a + 32 * (width), b + 32 * (width));          \
            map[i] = ~(high << 32 | low);                                                          \
            changed += (uint32_t)_mm_popcnt_u64(map[i]);                                           \
        }                                                                                          \
        return changed;                                                                            \
    } while (0)

TARGET_AVX2 uint32_t rft_delta_compare_wide(uint32_t width, uint32_t words, const void *before,
                                            const void *after, uint64_t *map)
{
    const unsigned char *a = before, *b = after;
    uint32_t changed = 0;
    switch (width) {
    case 1: COMPARE_AVX2(equal_bytes, 1);
    case 2: COMPARE_AVX2(equal_halves, 2);
    case 4: COMPARE_AVX2(equal_words, 4);
    default: COMPARE_AVX2(equal_doubles, 8);
    }
}
#endif
