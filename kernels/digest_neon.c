/*
 * The digest with NEON: two words a vector, each with its own key; the sums of all lanes are added
 * at the end. Of two vectors the lower halves make one and the upper ones another, of which the
 * multiplier takes both ends.
 *
 * One step takes a block of 256 bytes in independent chains. The reading and the copying form are
 * one inline function, compiled once for each. Neither streams: cast_neon.c says why.
 */
#include "kernels/digest_wide.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define INLINE __attribute__((always_inline)) inline

static INLINE uint64x2_t load_neon(const char *from)
{
    return vreinterpretq_u64_u8(vld1q_u8((const uint8_t *)from));
}

static INLINE void store_neon(char *to, uint64x2_t words)
{
    vst1q_u8((uint8_t *)to, vreinterpretq_u8_u64(words));
}

/* `sum` and the parts of four words, each mixed with its key. */
static INLINE uint64x2_t add_neon(uint64x2_t sum, uint64x2_t first, uint64x2_t second)
{
    uint32x4_t a = vreinterpretq_u32_u64(first), b = vreinterpretq_u32_u64(second);
    uint32x4_t low = vuzp1q_u32(a, b), high = vuzp2q_u32(a, b);
    sum = vaddq_u64(sum, vreinterpretq_u64_u32(vrev64q_u32(a)));
    sum = vaddq_u64(sum, vreinterpretq_u64_u32(vrev64q_u32(b)));
    sum = vmlal_u32(sum, vget_low_u32(low), vget_low_u32(high));
    return vmlal_high_u32(sum, low, high);
}

static INLINE uint64_t run_neon(char *to, const char *from, size_t bytes, uint64_t key, bool copies)
{
    const uint64_t first[2] = {key, key + RFT_DIGEST_STEP};
    const uint64x2_t step = vdupq_n_u64(2 * RFT_DIGEST_STEP);
    uint64x2_t keys = vld1q_u64(first), even = vdupq_n_u64(0), odd = even;
    for (size_t at = 0; at < bytes; at += RFT_DIGEST_BLOCK) {
        for (size_t in = 0; in < RFT_DIGEST_BLOCK; in += 64) {
            uint64x2_t mixed[4];
            for (size_t i = 0; i < 4; i++) {
                uint64x2_t words = load_neon(from + at + in + 16 * i);
                if (copies) store_neon(to + at + in + 16 * i, words);
                mixed[i] = veorq_u64(words, keys);
                keys = vaddq_u64(keys, step);
            }
            even = add_neon(even, mixed[0], mixed[1]);
            odd = add_neon(odd, mixed[2], mixed[3]);
        }
    }
    return vaddvq_u64(vaddq_u64(even, odd));
}

uint64_t rft_digest_neon(char *to, const char *from, size_t bytes, uint64_t key)
{
    if (to == NULL) return run_neon(to, from, bytes, key, false);
    return run_neon(to, from, bytes, key, true);
}
#endif
