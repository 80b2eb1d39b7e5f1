/*
 * The cast with NEON: a block of 32 elements a step, rounded in 32-bit lanes and narrowed to one
 * line. It has no streaming form: ARM has no store that goes round the caches, only a hint (STNP),
 * and its processors see by themselves that whole lines are written, and do not read them first.
 */
#include "kernels/cast_wide.h"

#if defined(__aarch64__)
#include <arm_neon.h>

/* Four results. The sum's upper half is the result, and cannot be carried out of: only a NaN's
 * could be. */
static inline uint16x4_t round_neon(const char *from)
{
    uint32x4_t bits = vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)from));
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    uint32x4_t size = vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF));
    uint16x4_t nan = vmovn_u32(vcgtq_u32(size, vdupq_n_u32(0x7F800000)));
    return vbsl_u16(nan, vdup_n_u16(0x7FFF), rounded);
}

void rft_cast_neon(char *to, const char *from, size_t count)
{
    for (size_t i = 0; i < count; i += RFT_CAST_BLOCK) {
        for (size_t in = 0; in < RFT_CAST_BLOCK; in += 8, to += 16, from += 32) {
            uint16x8_t eight = vcombine_u16(round_neon(from), round_neon(from + 16));
            vst1q_u8((uint8_t *)to, vreinterpretq_u8_u16(eight));
        }
    }
}
#endif
