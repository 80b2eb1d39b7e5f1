/*
 * Splitting and joining masters with NEON, in 16-bit lanes: its loads and stores of pairs part the
 * halves of eight masters and join them. Joining does not stream: cast_neon.c says why.
 */
#include "kernels/master_wide.h"

#if defined(__aarch64__)
#include <arm_neon.h>

static inline uint16x8_t load_neon(const char *from)
{
    return vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)from));
}

/* All ones, which is -1, in the lanes whose remainder is above the middle. */
static inline uint16x8_t upper_neon(const char *weights, uint16x8_t low)
{
    return vaddq_u16(load_neon(weights), vcgtq_u16(low, vdupq_n_u16(0x8000)));
}

uint32_t rft_master_split_neon(char *low, const char *master, const char *weights, size_t count)
{
    uint32x4_t same = vdupq_n_u32(0);
    for (size_t i = 0; i < count; i += 8) {
        uint16x8x2_t halves = vld2q_u16((const uint16_t *)(const void *)(master + 4 * i));
        uint16x8_t upper = upper_neon(weights + 2 * i, halves.val[0]);
        vst1q_u8((uint8_t *)(low + 2 * i), vreinterpretq_u8_u16(halves.val[0]));
        same = vpadalq_u16(same, vshrq_n_u16(vceqq_u16(upper, halves.val[1]), 15));
    }
    return (uint32_t)count - vaddvq_u32(same);
}

void rft_master_join_neon(char *master, const char *weights, const char *low, size_t count)
{
    for (size_t i = 0; i < count; i += 8) {
        uint16x8x2_t halves;
        halves.val[0] = load_neon(low + 2 * i);
        halves.val[1] = upper_neon(weights + 2 * i, halves.val[0]);
        vst2q_u16((uint16_t *)(void *)(master + 4 * i), halves);
    }
}
#endif
