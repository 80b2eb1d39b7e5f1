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

/* Writes `base` plus the place of each set bit; returns how many there are. Always writes four, so
 * that the usual few cost no branch that cannot be foreseen. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE uint32_t rft_delta_places(uint64_t word, uint32_t base,
                                                                   uint16_t *to)
{
    uint32_t count = (uint32_t)_mm_popcnt_u64(word), i = 0;
    do {
        for (uint32_t k = 0; k < 4; k++, word = _blsr_u64(word)) {
            to[i + k] = (uint16_t)(base + (uint32_t)_tzcnt_u64(word));
        }
        i += 4;
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

/* Modulo 3: 0xAAAB / 2^17 is a third, near enough for 16 bits. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i rft_delta_third16(__m256i number)
{
    __m256i third =
        _mm256_srli_epi16(_mm256_mulhi_epu16(number, _mm256_set1_epi16((short)0xAAAB)), 1);
    return _mm256_sub_epi16(number, _mm256_add_epi16(third, _mm256_slli_epi16(third, 1)));
}
#endif

#endif
