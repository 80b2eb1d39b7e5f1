/*
 * delta_chunk_x86: the steps that the wide forms of encoding and applying share. Both go through
 * the changed elements in chunks that lie in the first-level cache, step by step: positions, bits,
 * values.
 */
#ifndef RFT_KERNEL_DELTA_CHUNK_X86_H
#define RFT_KERNEL_DELTA_CHUNK_X86_H

#include "kernels/delta_plan.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define RFT_DELTA_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define RFT_DELTA_INLINE __attribute__((always_inline)) inline

/* Elements that are done at once; what a last word of bits adds; what writing by vectors adds. */
#define RFT_DELTA_CHUNK 512u
#define RFT_DELTA_ROOM  (RFT_DELTA_CHUNK + 64 + 32)

/* All chunks but the last are whole groups, so that they begin on whole bytes in every plane. */
#define RFT_DELTA_GROUP 32u

/* Writes `base` plus the place of each set bit; returns how many there are. It writes `step` at a
 * time, at least once: where most words have about as many, no branch is hard to foresee. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE uint32_t rft_delta_places(uint64_t word, uint32_t base,
                                                                   uint16_t *to, uint32_t step)
{
    uint32_t count = (uint32_t)_mm_popcnt_u64(word), i = 0;
    do {
        for (uint32_t k = 0; k < step; k++, word = _blsr_u64(word)) {
            to[i + k] = (uint16_t)(base + (uint32_t)_tzcnt_u64(word));
        }
        i += step;
    } while (i < count);
    return count;
}

/* As rft_delta_load: these processors are little-endian. */
static inline void rft_delta_store(unsigned char *at, uint64_t word)
{
    memcpy(at, &word, sizeof word);
}

/* The low `bits` of each of four elements. */
static inline uint64_t rft_delta_four(uint32_t bits)
{
    return ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
}

/* u of delta.h from the bits of 16 halves, and back. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_number16(__m256i bits)
{
    __m256i sign = _mm256_srai_epi16(bits, 15);
    return _mm256_xor_si256(bits, _mm256_or_si256(sign, _mm256_set1_epi16(INT16_MIN)));
}

RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_bits16(__m256i number)
{
    __m256i high = _mm256_srai_epi16(number, 15);
    __m256i flip = _mm256_or_si256(_mm256_xor_si256(high, _mm256_set1_epi16(-1)),
                                   _mm256_set1_epi16(INT16_MIN));
    return _mm256_xor_si256(number, flip);
}

/* Modulo `by`, 3 or 15: a multiplication by 2^17 / 3 or 2^19 / 15, rounded up, divides 16 bits. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_rest16(__m256i number, int by)
{
    __m256i part =
        by == 3
            ? _mm256_srli_epi16(_mm256_mulhi_epu16(number, _mm256_set1_epi16((short)0xAAAB)), 1)
            : _mm256_srli_epi16(_mm256_mulhi_epu16(number, _mm256_set1_epi16((short)0x8889)), 3);
    return _mm256_sub_epi16(number, _mm256_mullo_epi16(part, _mm256_set1_epi16((short)by)));
}

/* The distances of unsigned numbers. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_distance16(__m256i a, __m256i b)
{
    return _mm256_or_si256(_mm256_subs_epu16(a, b), _mm256_subs_epu16(b, a));
}

/* The remainders by `by` of elements that moved by at most half of it; `full` for the others. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_code16(const uint16_t *old_bits,
                                                                  const uint16_t *bits, int by,
                                                                  int full)
{
    __m256i old = rft_delta_number16(_mm256_loadu_si256((const __m256i *)old_bits));
    __m256i now = rft_delta_number16(_mm256_loadu_si256((const __m256i *)bits));
    __m256i beyond =
        _mm256_subs_epu16(rft_delta_distance16(now, old), _mm256_set1_epi16((short)(by / 2)));
    __m256i near = _mm256_cmpeq_epi16(beyond, _mm256_setzero_si256());
    __m256i other = _mm256_set1_epi16((short)full);
    return _mm256_blendv_epi8(other, rft_delta_rest16(now, by), near);
}

/* The bits of the numbers nearest to those of `bits` that leave `rest` when divided by `by`. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_nearest16(__m256i bits, __m256i rest,
                                                                     int by)
{
    const __m256i zero = _mm256_setzero_si256(), whole = _mm256_set1_epi16((short)by);
    const __m256i most = _mm256_set1_epi16((short)(by / 2));
    __m256i own = rft_delta_number16(bits);
    __m256i apart = _mm256_sub_epi16(rest, rft_delta_rest16(own, by));
    __m256i beyond = _mm256_cmpgt_epi16(apart, most);
    __m256i below = _mm256_cmpgt_epi16(_mm256_sub_epi16(zero, most), apart);
    apart = _mm256_sub_epi16(apart, _mm256_and_si256(beyond, whole));
    apart = _mm256_add_epi16(apart, _mm256_and_si256(below, whole));
    __m256i number = _mm256_add_epi16(own, apart), larger = _mm256_max_epu16(own, number);
    /* Beyond an end of the range, and so round to the other one: the next one back. */
    __m256i over =
        _mm256_and_si256(_mm256_cmpgt_epi16(apart, zero), _mm256_cmpeq_epi16(larger, own));
    __m256i under =
        _mm256_and_si256(_mm256_cmpgt_epi16(zero, apart), _mm256_cmpeq_epi16(larger, number));
    number = _mm256_sub_epi16(number, _mm256_and_si256(over, whole));
    return rft_delta_bits16(_mm256_add_epi16(number, _mm256_and_si256(under, whole)));
}

/* Which of 16 lanes hold `value`, a bit each; only the first `count`. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE uint32_t rft_delta_find16(__m256i lanes, int value,
                                                                   uint32_t count)
{
    __m256i each = _mm256_cmpeq_epi16(lanes, _mm256_set1_epi16((short)value));
    __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
    uint32_t found = (uint32_t)_mm_movemask_epi8(bytes);
    return count < 16 ? found & ((1u << count) - 1) : found;
}
#endif

#endif
