/*
 * Sums of squares with vectors: 16 elements a step, a lane of doubles each. The square of an fp32
 * is exact in double, so that adding it fused is the same as adding it.
 */
#include "kernels/norm_wide.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET_AVX2   __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f")))
#define INLINE        __attribute__((always_inline)) inline
#define AHEAD         1024u

/* An integer sum, for it may point beyond the array; prefetching there does no harm. */
static INLINE void fetch(const char *from)
{
    __builtin_prefetch((const void *)((uintptr_t)from + AHEAD), 0, 3);
}

/* Eight elements. */
TARGET_AVX2 static INLINE __m256 load_avx2(const char *from, rft_float_type type)
{
    if (type == RFT_FP32) return _mm256_loadu_ps((const float *)(const void *)from);
    __m128i halves = _mm_loadu_si128((const __m128i *)from);
    if (type == RFT_FP16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

TARGET_AVX2 static INLINE void add_avx2(__m256d *low, __m256d *high, __m256 value)
{
    __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    *low = _mm256_fmadd_pd(a, a, *low);
    *high = _mm256_fmadd_pd(b, b, *high);
}

TARGET_AVX2 static INLINE void sum_avx2(double *lanes, const char *from, rft_float_type type,
                                        float scale, size_t count)
{
    const __m256 by = _mm256_set1_ps(scale);
    const size_t width = rft_float_bytes(type);
    __m256d sums[4];
    for (size_t j = 0; j < 4; j++)
        sums[j] = _mm256_loadu_pd(lanes + 4 * j);
    for (size_t i = 0; i < count; i += RFT_NORM_LANES, from += RFT_NORM_LANES * width) {
        fetch(from);
        add_avx2(&sums[0], &sums[1], _mm256_mul_ps(load_avx2(from, type), by));
        add_avx2(&sums[2], &sums[3], _mm256_mul_ps(load_avx2(from + 8 * width, type), by));
    }
    for (size_t j = 0; j < 4; j++)
        _mm256_storeu_pd(lanes + 4 * j, sums[j]);
}

TARGET_AVX2 void rft_norm_avx2(double *lanes, const void *from, rft_float_type type, float scale,
                               size_t count)
{
    switch (type) {
    case RFT_FP32: sum_avx2(lanes, from, RFT_FP32, scale, count); break;
    case RFT_BF16: sum_avx2(lanes, from, RFT_BF16, scale, count); break;
    case RFT_FP16: sum_avx2(lanes, from, RFT_FP16, scale, count); break;
    }
}

/* Sixteen elements. */
TARGET_AVX512 static INLINE __m512 load_avx512(const char *from, rft_float_type type)
{
    if (type == RFT_FP32) return _mm512_loadu_ps(from);
    __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    if (type == RFT_FP16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

TARGET_AVX512 static INLINE void sum_avx512(double *lanes, const char *from, rft_float_type type,
                                            float scale, size_t count)
{
    const __m512 by = _mm512_set1_ps(scale);
    const size_t width = rft_float_bytes(type);
    __m512d low = _mm512_loadu_pd(lanes), high = _mm512_loadu_pd(lanes + 8);
    for (size_t i = 0; i < count; i += RFT_NORM_LANES, from += RFT_NORM_LANES * width) {
        fetch(from);
        __m512 value = _mm512_mul_ps(load_avx512(from, type), by);
        __m512d bits = _mm512_castps_pd(value);
        __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
        __m512d b = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1)));
        low = _mm512_fmadd_pd(a, a, low);
        high = _mm512_fmadd_pd(b, b, high);
    }
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
}

TARGET_AVX512 void rft_norm_avx512(double *lanes, const void *from, rft_float_type type,
                                   float scale, size_t count)
{
    switch (type) {
    case RFT_FP32: sum_avx512(lanes, from, RFT_FP32, scale, count); break;
    case RFT_BF16: sum_avx512(lanes, from, RFT_BF16, scale, count); break;
    case RFT_FP16: sum_avx512(lanes, from, RFT_FP16, scale, count); break;
    }
}
#endif
