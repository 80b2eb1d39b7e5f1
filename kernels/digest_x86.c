/*
 * The digest with vectors: every lane takes its own words and keys, and the sums of all lanes are
 * added at the end; that the digest is a sum makes this exact.
 *
 * One step takes a block of 256 bytes in independent chains, so that the multiplier's latency is
 * hidden and the speed is that of the memory. The reading and the copying form are one inline
 * function, compiled once for each.
 */
#include "kernels/digest_wide.h"

#include <stdbool.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define AHEAD 1024u

/* What becomes of the bytes besides being read. */
typedef enum run_way { READS, STORES, STREAMS } run_way;

#define TARGET_AVX2   __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f")))
#define INLINE        __attribute__((always_inline)) inline

/* An integer sum, for it may point beyond the source; prefetching there does no harm. */
static inline void prefetch_block(const char *from, size_t at)
{
    uintptr_t ahead = (uintptr_t)from + at + AHEAD;
    for (size_t line = 0; line < RFT_DIGEST_BLOCK; line += 64) {
        _mm_prefetch((const char *)(ahead + line), _MM_HINT_NTA);
    }
}

TARGET_AVX2 static INLINE __m256i part_avx2(__m256i word, __m256i key)
{
    __m256i x = _mm256_xor_si256(word, key);
    __m256i product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
    return _mm256_add_epi64(product, _mm256_shuffle_epi32(x, 0xB1)); /* 0xB1 swaps the halves */
}

TARGET_AVX2 static INLINE uint64_t total_avx2(__m256i sum)
{
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)lanes, sum);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

TARGET_AVX2 static INLINE uint64_t run_avx2(char *to, const char *from, size_t bytes, uint64_t key,
                                            run_way way)
{
    const uint64_t lanes_apart = 4 * RFT_DIGEST_STEP;
    const __m256i step = _mm256_set1_epi64x((long long)lanes_apart);
    uint64_t first[4];
    for (unsigned lane = 0; lane < 4; lane++) {
        first[lane] = key + lane * RFT_DIGEST_STEP;
    }
    __m256i keys = _mm256_loadu_si256((const __m256i *)first);
    __m256i even = _mm256_setzero_si256();
    __m256i odd = _mm256_setzero_si256();
    for (size_t at = 0; at < bytes; at += RFT_DIGEST_BLOCK) {
        prefetch_block(from, at);
        for (size_t in = 0; in < RFT_DIGEST_BLOCK; in += 64) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(from + at + in));
            __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + in + 32));
            if (way == STREAMS) {
                _mm256_stream_si256((__m256i *)(to + at + in), a);
                _mm256_stream_si256((__m256i *)(to + at + in + 32), b);
            }
            if (way == STORES) {
                _mm256_storeu_si256((__m256i *)(to + at + in), a);
                _mm256_storeu_si256((__m256i *)(to + at + in + 32), b);
            }
            even = _mm256_add_epi64(even, part_avx2(a, keys));
            keys = _mm256_add_epi64(keys, step);
            odd = _mm256_add_epi64(odd, part_avx2(b, keys));
            keys = _mm256_add_epi64(keys, step);
        }
    }
    if (way == STREAMS) _mm_sfence();
    return total_avx2(_mm256_add_epi64(even, odd));
}

TARGET_AVX2 uint64_t rft_digest_avx2(char *to, const char *from, size_t bytes, uint64_t key,
                                     bool streams)
{
    if (to == NULL) return run_avx2(to, from, bytes, key, READS);
    if (streams) return run_avx2(to, from, bytes, key, STREAMS);
    return run_avx2(to, from, bytes, key, STORES);
}

#define STEPS(count) ((long long)((count)*RFT_DIGEST_STEP))

TARGET_AVX512 static INLINE __m512i part_avx512(__m512i word, __m512i key)
{
    __m512i x = _mm512_xor_si512(word, key);
    __m512i product = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
    return _mm512_add_epi64(product, _mm512_rol_epi64(x, 32));
}

/* By halves: no array of 64 bytes, for which ASan's stack frames are not aligned enough, and not
 * _mm512_reduce_add_epi64, which adds signed numbers: these wrap. */
TARGET_AVX512 static INLINE uint64_t total_avx512(__m512i sum)
{
    return total_avx2(
        _mm256_add_epi64(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1)));
}

TARGET_AVX512 static INLINE uint64_t run_avx512(char *to, const char *from, size_t bytes,
                                                uint64_t key, run_way way)
{
    const uint64_t lanes_apart = 8 * RFT_DIGEST_STEP;
    const __m512i step = _mm512_set1_epi64((long long)lanes_apart);
    const __m512i lanes =
        _mm512_set_epi64(STEPS(7), STEPS(6), STEPS(5), STEPS(4), STEPS(3), STEPS(2), STEPS(1), 0);
    __m512i keys = _mm512_add_epi64(_mm512_set1_epi64((long long)key), lanes);
    __m512i even = _mm512_setzero_si512();
    __m512i odd = _mm512_setzero_si512();
    for (size_t at = 0; at < bytes; at += RFT_DIGEST_BLOCK) {
        prefetch_block(from, at);
        for (size_t in = 0; in < RFT_DIGEST_BLOCK; in += 128) {
            __m512i a = _mm512_loadu_si512(from + at + in);
            __m512i b = _mm512_loadu_si512(from + at + in + 64);
            if (way == STREAMS) {
                _mm512_stream_si512((__m512i *)(to + at + in), a);
                _mm512_stream_si512((__m512i *)(to + at + in + 64), b);
            }
            if (way == STORES) {
                _mm512_storeu_si512((__m512i *)(to + at + in), a);
                _mm512_storeu_si512((__m512i *)(to + at + in + 64), b);
            }
            even = _mm512_add_epi64(even, part_avx512(a, keys));
            keys = _mm512_add_epi64(keys, step);
            odd = _mm512_add_epi64(odd, part_avx512(b, keys));
            keys = _mm512_add_epi64(keys, step);
        }
    }
    if (way == STREAMS) _mm_sfence();
    return total_avx512(_mm512_add_epi64(even, odd));
}

TARGET_AVX512 uint64_t rft_digest_avx512(char *to, const char *from, size_t bytes, uint64_t key,
                                         bool streams)
{
    if (to == NULL) return run_avx512(to, from, bytes, key, READS);
    if (streams) return run_avx512(to, from, bytes, key, STREAMS);
    return run_avx512(to, from, bytes, key, STORES);
}
#endif
