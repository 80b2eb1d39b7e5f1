/*
 * A step with vectors: the ops of optim_lanes.h for AVX2 (with FMA and F16C) and for AVX-512. Only
 * `fused` contracts; all of refit is compiled with -ffp-contract=off, since the compiler would also
 * contract the intrinsics of a product and a sum.
 */
#include "kernels/optim_wide.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define INLINE       __attribute__((always_inline)) inline
#define AHEAD        512u              /* bytes to prefetch before they are read */
#define STREAM_LEAST ((size_t)1 << 12) /* elements; fewer are likely to be read soon */

/* ---- AVX2 */

#define TARGET     __attribute__((target("avx2,fma,f16c")))
#define FORM(name) name##_avx2
#define LANES      ((size_t)8)
#define lanes      __m256

TARGET static INLINE lanes set_avx2(float value)
{
    return _mm256_set1_ps(value);
}

TARGET static INLINE lanes load_avx2(const char *from)
{
    return _mm256_loadu_ps((const float *)(const void *)from);
}

TARGET static INLINE void store_avx2(char *to, lanes value)
{
    _mm256_storeu_ps((float *)(void *)to, value);
}

TARGET static INLINE lanes mul_avx2(lanes a, lanes b)
{
    return _mm256_mul_ps(a, b);
}

TARGET static INLINE lanes add_avx2(lanes a, lanes b)
{
    return _mm256_add_ps(a, b);
}

TARGET static INLINE lanes sub_avx2(lanes a, lanes b)
{
    return _mm256_sub_ps(a, b);
}

TARGET static INLINE lanes div_avx2(lanes a, lanes b)
{
    return _mm256_div_ps(a, b);
}

TARGET static INLINE lanes root_avx2(lanes a)
{
    return _mm256_sqrt_ps(a);
}

TARGET static INLINE lanes fused_avx2(lanes a, lanes b, lanes c)
{
    return _mm256_fmadd_ps(a, b, c);
}

TARGET static INLINE lanes negated_avx2(lanes a)
{
    return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
}

/* The instruction gives its second operand where one is a NaN. */
TARGET static INLINE lanes larger_avx2(lanes a, lanes b)
{
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

/* -1, 0 or 1; a NaN is neither above nor below zero. */
TARGET static INLINE lanes sign_avx2(lanes a)
{
    const lanes none = _mm256_setzero_ps(), one = _mm256_set1_ps(1);
    lanes above = _mm256_and_ps(_mm256_cmp_ps(a, none, _CMP_GT_OQ), one);
    return _mm256_sub_ps(above, _mm256_and_ps(_mm256_cmp_ps(a, none, _CMP_LT_OQ), one));
}

TARGET static INLINE __m256i halves_avx2(const char *from)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

/* The low halves of the lanes, whose upper ones are zero; 0xD8 puts the quarters back in order. */
TARGET static INLINE __m128i pack_avx2(__m256i wide)
{
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0xD8);
    return _mm256_castsi256_si128(packed);
}

TARGET static INLINE __m256i is_nan_avx2(lanes value)
{
    return _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

TARGET static INLINE lanes from_bf16_avx2(const char *from)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(halves_avx2(from), 16));
}

TARGET static INLINE lanes from_fp16_avx2(const char *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

TARGET static INLINE void put_halves_avx2(char *to, __m128i halves, bool streams)
{
    if (streams) {
        _mm_stream_si128((__m128i *)to, halves);
    } else {
        _mm_storeu_si128((__m128i *)to, halves);
    }
}

TARGET static INLINE void fence_avx2(void)
{
    _mm_sfence();
}

TARGET static INLINE void to_bf16_avx2(char *to, lanes value, bool streams)
{
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FFF), is_nan_avx2(value));
    put_halves_avx2(to, pack_avx2(rounded), streams);
}

TARGET static INLINE void to_fp16_avx2(char *to, lanes value, bool streams)
{
    __m128i rounded = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i nan = _mm256_and_si256(is_nan_avx2(value), _mm256_set1_epi32(0xFFFF));
    rounded = _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7FFF), pack_avx2(nan));
    put_halves_avx2(to, rounded, streams);
}

TARGET static INLINE lanes join_avx2(const char *weights, const char *remainders)
{
    __m256i low = halves_avx2(remainders);
    __m256i upper = _mm256_sub_epi32(halves_avx2(weights), _mm256_srli_epi32(low, 15));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(upper, 16), low));
}

TARGET static INLINE void split_avx2(char *weights, char *remainders, lanes value)
{
    const __m256i half = _mm256_set1_epi32(0xFFFF);
    __m256i bits = _mm256_castps_si256(value);
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FC00000), is_nan_avx2(value));
    __m256i low = _mm256_and_si256(bits, half);
    __m256i upper = _mm256_add_epi32(_mm256_srli_epi32(bits, 16), _mm256_srli_epi32(low, 15));
    _mm_storeu_si128((__m128i *)weights, pack_avx2(_mm256_and_si256(upper, half)));
    _mm_storeu_si128((__m128i *)remainders, pack_avx2(low));
}

#include "kernels/optim_lanes.h"

#undef TARGET
#undef FORM
#undef LANES
#undef lanes

/* ---- AVX-512 */

#define TARGET     __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define FORM(name) name##_avx512
#define LANES      ((size_t)16)
#define lanes      __m512

TARGET static INLINE lanes set_avx512(float value)
{
    return _mm512_set1_ps(value);
}

TARGET static INLINE lanes load_avx512(const char *from)
{
    return _mm512_loadu_ps(from);
}

TARGET static INLINE void store_avx512(char *to, lanes value)
{
    _mm512_storeu_ps(to, value);
}

TARGET static INLINE lanes mul_avx512(lanes a, lanes b)
{
    return _mm512_mul_ps(a, b);
}

TARGET static INLINE lanes add_avx512(lanes a, lanes b)
{
    return _mm512_add_ps(a, b);
}

TARGET static INLINE lanes sub_avx512(lanes a, lanes b)
{
    return _mm512_sub_ps(a, b);
}

TARGET static INLINE lanes div_avx512(lanes a, lanes b)
{
    return _mm512_div_ps(a, b);
}

TARGET static INLINE lanes root_avx512(lanes a)
{
    return _mm512_sqrt_ps(a);
}

TARGET static INLINE lanes fused_avx512(lanes a, lanes b, lanes c)
{
    return _mm512_fmadd_ps(a, b, c);
}

TARGET static INLINE lanes negated_avx512(lanes a)
{
    return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}

TARGET static INLINE lanes larger_avx512(lanes a, lanes b)
{
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}

TARGET static INLINE lanes sign_avx512(lanes a)
{
    const lanes none = _mm512_setzero_ps();
    __mmask16 above = _mm512_cmp_ps_mask(a, none, _CMP_GT_OQ);
    __mmask16 below = _mm512_cmp_ps_mask(a, none, _CMP_LT_OQ);
    lanes sign = _mm512_mask_mov_ps(none, above, _mm512_set1_ps(1));
    return _mm512_mask_mov_ps(sign, below, _mm512_set1_ps(-1));
}

TARGET static INLINE __m512i halves_avx512(const char *from)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

TARGET static INLINE void put_halves_avx512(char *to, __m512i wide, bool streams)
{
    __m256i halves = _mm512_cvtepi32_epi16(wide);
    if (streams) {
        _mm256_stream_si256((__m256i *)to, halves);
    } else {
        _mm256_storeu_si256((__m256i *)to, halves);
    }
}

TARGET static INLINE void fence_avx512(void)
{
    _mm_sfence();
}

TARGET static INLINE __mmask16 is_nan_avx512(lanes value)
{
    return _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
}

TARGET static INLINE lanes from_bf16_avx512(const char *from)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(halves_avx512(from), 16));
}

TARGET static INLINE lanes from_fp16_avx512(const char *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

TARGET static INLINE void to_bf16_avx512(char *to, lanes value, bool streams)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    put_halves_avx512(to, _mm512_mask_set1_epi32(rounded, is_nan_avx512(value), 0x7FFF), streams);
}

TARGET static INLINE void to_fp16_avx512(char *to, lanes value, bool streams)
{
    __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i rounded = _mm512_cvtepu16_epi32(half);
    put_halves_avx512(to, _mm512_mask_set1_epi32(rounded, is_nan_avx512(value), 0x7FFF), streams);
}

/* Words 0, 16, 1, 17 …: of two halves of a vector, whole elements. */
TARGET static INLINE __m512i interleaved_avx512(void)
{
    __m512i even = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(even,
                           _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(16)), 16));
}

/* Words 0, 2 … 30, 1, 3 … 31: the low halves of elements, and the upper ones. */
TARGET static INLINE __m512i separated_avx512(void)
{
    return _mm512_set_epi32(0x1F001D, 0x1B0019, 0x170015, 0x130011, 0x0F000D, 0x0B0009, 0x070005,
                            0x030001, 0x1E001C, 0x1A0018, 0x160014, 0x120010, 0x0E000C, 0x0A0008,
                            0x060004, 0x020000);
}

TARGET static INLINE lanes join_avx512(const char *weights, const char *remainders)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)remainders);
    __m256i weight = _mm256_loadu_si256((const __m256i *)weights);
    __m256i upper = _mm256_sub_epi16(weight, _mm256_srli_epi16(low, 15));
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), upper, 1);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(interleaved_avx512(), both));
}

TARGET static INLINE void split_avx512(char *weights, char *remainders, lanes value)
{
    __m512i bits = _mm512_castps_si512(value);
    bits = _mm512_mask_set1_epi32(bits, is_nan_avx512(value), 0x7FC00000);
    __m512i both = _mm512_permutexvar_epi16(separated_avx512(), bits);
    __m256i low = _mm512_castsi512_si256(both), upper = _mm512_extracti64x4_epi64(both, 1);
    upper = _mm256_add_epi16(upper, _mm256_srli_epi16(low, 15));
    _mm256_storeu_si256((__m256i *)weights, upper);
    _mm256_storeu_si256((__m256i *)remainders, low);
}

#include "kernels/optim_lanes.h"
#endif
