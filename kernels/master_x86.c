/*
 * Splitting and joining masters with vectors, 32 elements a step. AVX2 works in 16-bit lanes, in
 * which "above the middle" is a signed comparison once the middle is taken away; AVX-512 in 32-bit
 * lanes, for which it needs no more than its foundation. The plain and the streaming form of
 * joining are one inline function, compiled once for each.
 */
#include "kernels/master_wide.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET_AVX2   __attribute__((target("avx2,popcnt")))
#define TARGET_AVX512 __attribute__((target("avx512f,popcnt")))
#define INLINE        __attribute__((always_inline)) inline

/* All ones, which is -1, in the lanes whose remainder is above the middle. */
TARGET_AVX2 static INLINE __m256i above_avx2(__m256i low)
{
    __m256i centred = _mm256_xor_si256(low, _mm256_set1_epi16((short)0x8000));
    return _mm256_cmpgt_epi16(centred, _mm256_setzero_si256());
}

/* Packing works within 128-bit halves; 0xD8 puts the quarters back in order. */
TARGET_AVX2 static INLINE __m256i pack_avx2(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
}

/* Sixteen elements. */
TARGET_AVX2 static INLINE uint32_t split_avx2(char *to, const char *master, const char *weights)
{
    const __m256i half = _mm256_set1_epi32(0xFFFF);
    __m256i a = _mm256_loadu_si256((const __m256i *)master);
    __m256i b = _mm256_loadu_si256((const __m256i *)(master + 32));
    __m256i weight = _mm256_loadu_si256((const __m256i *)weights);
    __m256i low = pack_avx2(_mm256_and_si256(a, half), _mm256_and_si256(b, half));
    __m256i high = pack_avx2(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
    __m256i upper = _mm256_add_epi16(weight, above_avx2(low));
    _mm256_storeu_si256((__m256i *)to, low);
    int same = _mm256_movemask_epi8(_mm256_cmpeq_epi16(upper, high));
    return 16 - (uint32_t)_mm_popcnt_u32((unsigned)same) / 2;
}

TARGET_AVX2 uint32_t rft_master_split_avx2(char *low, const char *master, const char *weights,
                                           size_t count)
{
    uint32_t exceptions = 0;
    for (size_t i = 0; i < count; i += 16) {
        exceptions += split_avx2(low + 2 * i, master + 4 * i, weights + 2 * i);
    }
    return exceptions;
}

TARGET_AVX2 static INLINE void put_avx2(char *to, __m256i value, bool streams)
{
    if (streams) {
        _mm256_stream_si256((__m256i *)to, value);
    } else {
        _mm256_storeu_si256((__m256i *)to, value);
    }
}

/* Interleaving, too, works within 128-bit halves. */
TARGET_AVX2 static INLINE void join_avx2(char *to, const char *weights, const char *from,
                                         size_t count, bool streams)
{
    for (size_t i = 0; i < count; i += 16) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + 2 * i));
        __m256i weight = _mm256_loadu_si256((const __m256i *)(weights + 2 * i));
        __m256i upper = _mm256_add_epi16(weight, above_avx2(low));
        __m256i even = _mm256_unpacklo_epi16(low, upper);
        __m256i odd = _mm256_unpackhi_epi16(low, upper);
        put_avx2(to + 4 * i, _mm256_permute2x128_si256(even, odd, 0x20), streams);
        put_avx2(to + 4 * i + 32, _mm256_permute2x128_si256(even, odd, 0x31), streams);
    }
    if (streams) _mm_sfence();
}

TARGET_AVX2 void rft_master_join_avx2(char *master, const char *weights, const char *low,
                                      size_t count, bool streams)
{
    if (streams) {
        join_avx2(master, weights, low, count, true);
    } else {
        join_avx2(master, weights, low, count, false);
    }
}

/* Sixteen upper halves, each in the low half of its lane. */
TARGET_AVX512 static INLINE __m512i upper_avx512(const char *weights, __m512i low)
{
    __m512i weight = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)weights));
    __mmask16 above = _mm512_cmpgt_epu32_mask(low, _mm512_set1_epi32(0x8000));
    __m512i upper = _mm512_mask_sub_epi32(weight, above, weight, _mm512_set1_epi32(1));
    return _mm512_and_si512(upper, _mm512_set1_epi32(0xFFFF));
}

TARGET_AVX512 uint32_t rft_master_split_avx512(char *low, const char *master, const char *weights,
                                               size_t count)
{
    uint32_t exceptions = 0;
    for (size_t i = 0; i < count; i += 16) {
        __m512i bits = _mm512_loadu_si512(master + 4 * i);
        __m512i rest = _mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF));
        __m512i upper = upper_avx512(weights + 2 * i, rest);
        __mmask16 other = _mm512_cmpneq_epi32_mask(upper, _mm512_srli_epi32(bits, 16));
        _mm256_storeu_si256((__m256i *)(low + 2 * i), _mm512_cvtepi32_epi16(rest));
        exceptions += (uint32_t)_mm_popcnt_u32((unsigned)other);
    }
    return exceptions;
}

TARGET_AVX512 static INLINE void join_avx512(char *to, const char *weights, const char *from,
                                             size_t count, bool streams)
{
    for (size_t i = 0; i < count; i += 16) {
        __m256i packed = _mm256_loadu_si256((const __m256i *)(from + 2 * i));
        __m512i low = _mm512_cvtepu16_epi32(packed);
        __m512i upper = upper_avx512(weights + 2 * i, low);
        __m512i bits = _mm512_or_si512(_mm512_slli_epi32(upper, 16), low);
        if (streams) {
            _mm512_stream_si512((__m512i *)(to + 4 * i), bits);
        } else {
            _mm512_storeu_si512(to + 4 * i, bits);
        }
    }
    if (streams) _mm_sfence();
}

TARGET_AVX512 void rft_master_join_avx512(char *master, const char *weights, const char *low,
                                          size_t count, bool streams)
{
    if (streams) {
        join_avx512(master, weights, low, count, true);
    } else {
        join_avx512(master, weights, low, count, false);
    }
}
#endif
