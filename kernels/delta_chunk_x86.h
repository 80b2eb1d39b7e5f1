/* delta_chunk_x86: the vectors of delta_chunk.h with AVX2, BMI1, BMI2 and POPCNT. */
#ifndef RFT_KERNEL_DELTA_CHUNK_X86_H
#define RFT_KERNEL_DELTA_CHUNK_X86_H

#include <immintrin.h>

#include "kernels/delta_plan.h"

#define RFT_DELTA_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))

typedef __m256i rft_delta_lanes;

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

/* The low `bits` of four elements, one after the other, and back. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE uint64_t rft_delta_pack4(uint64_t four, uint32_t bits)
{
    return _pext_u64(four, rft_delta_four(bits));
}

RFT_DELTA_TARGET static RFT_DELTA_INLINE uint64_t rft_delta_spread4(uint64_t packed, uint32_t bits)
{
    return _pdep_u64(packed, rft_delta_four(bits));
}

RFT_DELTA_TARGET static RFT_DELTA_INLINE rft_delta_lanes rft_delta_get16(const uint16_t *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}

RFT_DELTA_TARGET static RFT_DELTA_INLINE void rft_delta_put16(uint16_t *to, rft_delta_lanes lanes)
{
    _mm256_storeu_si256((__m256i *)to, lanes);
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

/* `own` where `lanes` hold `value`, else `made`. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE rft_delta_lanes rft_delta_keep16(rft_delta_lanes made,
                                                                          rft_delta_lanes own,
                                                                          rft_delta_lanes lanes,
                                                                          int value)
{
    __m256i kept = _mm256_cmpeq_epi16(lanes, _mm256_set1_epi16((short)value));
    return _mm256_blendv_epi8(made, own, kept);
}

RFT_DELTA_TARGET static RFT_DELTA_INLINE rft_delta_lanes rft_delta_zero16(void)
{
    return _mm256_setzero_si256();
}

/* `falls`, and what is not above the place before it. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE rft_delta_lanes rft_delta_falls16(rft_delta_lanes falls,
                                                                           const uint16_t *place)
{
    __m256i rise = _mm256_subs_epu16(rft_delta_get16(place), rft_delta_get16(place - 1));
    return _mm256_or_si256(falls, _mm256_cmpeq_epi16(rise, _mm256_setzero_si256()));
}

RFT_DELTA_TARGET static RFT_DELTA_INLINE bool rft_delta_none16(rft_delta_lanes lanes)
{
    return _mm256_testz_si256(lanes, lanes) != 0;
}

/* The high parts from their bits, of which the first has the rank `rank`, above the low ones. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE void rft_delta_join16(uint16_t *place, const uint16_t *bit,
                                                               uint32_t rank, uint32_t low)
{
    const __m256i lanes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m256i ranks = _mm256_add_epi16(_mm256_set1_epi16((short)rank), lanes);
    __m256i high = _mm256_sub_epi16(rft_delta_get16(bit), ranks);
    high = _mm256_sll_epi16(high, _mm_cvtsi32_si128((int)low));
    rft_delta_put16(place, _mm256_or_si256(high, rft_delta_get16(place)));
}

/* Four symbols to a byte: 8 bytes. `escapes` gets a bit for each that is 3. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE uint64_t rft_delta_symbols32(rft_delta_lanes first,
                                                                      rft_delta_lanes second,
                                                                      uint32_t *escapes)
{
    __m256i each = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xD8);
    *escapes = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(each, _mm256_set1_epi8(3)));
    __m256i two = _mm256_maddubs_epi16(each, _mm256_set1_epi16(0x0401));
    __m256i four = _mm256_madd_epi16(two, _mm256_set1_epi32(0x00100001));
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(four, four), 0xD8);
    __m128i bytes = _mm256_castsi256_si128(words);
    return (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi16(bytes, bytes));
}

#endif
