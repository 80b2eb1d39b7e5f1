/*
 * The cast with vectors: a block of 32 elements a step, rounded in 32-bit lanes and packed to one
 * line. The plain and the streaming form are one inline function, compiled once for each.
 */
#include "kernels/cast_wide.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#define AHEAD 1024u

#define TARGET_AVX2   __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f")))
#define INLINE        __attribute__((always_inline)) inline

/* An integer sum, for it may point beyond the source; prefetching there does no harm. */
static inline void prefetch_block(const char *from)
{
    uintptr_t ahead = (uintptr_t)from + AHEAD;
    _mm_prefetch((const char *)ahead, _MM_HINT_NTA);
    _mm_prefetch((const char *)(ahead + 64), _MM_HINT_NTA);
}

/* Eight results, each in the low half of its lane; the high half is zero. */
TARGET_AVX2 static INLINE __m256i round_avx2(const char *from)
{
    __m256i bits = _mm256_loadu_si256((const __m256i *)from);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    __m256i nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7F800000));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FFF), nan);
}

/* Packing works within 128-bit halves; 0xD8 puts the quarters back in order. */
TARGET_AVX2 static INLINE __m256i pack_avx2(const char *from)
{
    __m256i packed = _mm256_packus_epi32(round_avx2(from), round_avx2(from + 32));
    return _mm256_permute4x64_epi64(packed, 0xD8);
}

TARGET_AVX2 static INLINE void run_avx2(char *to, const char *from, size_t count, bool streams)
{
    for (size_t i = 0; i < count; i += RFT_CAST_BLOCK, to += 64, from += 128) {
        prefetch_block(from);
        __m256i a = pack_avx2(from);
        __m256i b = pack_avx2(from + 64);
        if (streams) {
            _mm256_stream_si256((__m256i *)to, a);
            _mm256_stream_si256((__m256i *)(to + 32), b);
        } else {
            _mm256_storeu_si256((__m256i *)to, a);
            _mm256_storeu_si256((__m256i *)(to + 32), b);
        }
    }
    if (streams) _mm_sfence();
}

TARGET_AVX2 void rft_cast_avx2(char *to, const char *from, size_t count, bool streams)
{
    if (streams) {
        run_avx2(to, from, count, true);
    } else {
        run_avx2(to, from, count, false);
    }
}

/* Sixteen results. */
TARGET_AVX512 static INLINE __m256i pack_avx512(const char *from)
{
    __m512i bits = _mm512_loadu_si512(from);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    __mmask16 nan = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(0x7F800000));
    return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(rounded, nan, 0x7FFF));
}

TARGET_AVX512 static INLINE void run_avx512(char *to, const char *from, size_t count, bool streams)
{
    for (size_t i = 0; i < count; i += RFT_CAST_BLOCK, to += 64, from += 128) {
        prefetch_block(from);
        __m512i low = _mm512_castsi256_si512(pack_avx512(from));
        __m512i line = _mm512_inserti64x4(low, pack_avx512(from + 64), 1);
        if (streams) {
            _mm512_stream_si512((__m512i *)to, line);
        } else {
            _mm512_storeu_si512(to, line);
        }
    }
    if (streams) _mm_sfence();
}

TARGET_AVX512 void rft_cast_avx512(char *to, const char *from, size_t count, bool streams)
{
    if (streams) {
        run_avx512(to, from, count, true);
    } else {
        run_avx512(to, from, count, false);
    }
}
#endif
