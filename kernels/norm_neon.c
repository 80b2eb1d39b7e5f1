/*
 * Sums of squares with NEON: 16 elements a step, a lane of doubles each. The square of an fp32 is
 * exact in double, so that adding it fused is the same as adding it.
 */
#include "kernels/norm_wide.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define INLINE  __attribute__((always_inline)) inline
#define VECTORS (RFT_NORM_LANES / 2) /* of sums */

/* Four elements. */
static INLINE float32x4_t load_neon(const char *from, rft_float_type type)
{
    if (type == RFT_FP32) return vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)from));
    uint16x4_t halves = vreinterpret_u16_u8(vld1_u8((const uint8_t *)from));
    if (type == RFT_FP16) return vcvt_f32_f16(vreinterpret_f16_u16(halves));
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
}

static INLINE void sum_neon(double *lanes, const char *from, rft_float_type type, float scale,
                            size_t count)
{
    const size_t width = rft_float_bytes(type);
    float64x2_t sums[VECTORS];
    for (size_t j = 0; j < VECTORS; j++)
        sums[j] = vld1q_f64(lanes + 2 * j);
    for (size_t i = 0; i < count; i += RFT_NORM_LANES) {
        for (size_t j = 0; j < VECTORS; j += 2, from += 4 * width) {
            float32x4_t value = vmulq_n_f32(load_neon(from, type), scale);
            float64x2_t low = vcvt_f64_f32(vget_low_f32(value)), high = vcvt_high_f64_f32(value);
            sums[j] = vfmaq_f64(sums[j], low, low);
            sums[j + 1] = vfmaq_f64(sums[j + 1], high, high);
        }
    }
    for (size_t j = 0; j < VECTORS; j++)
        vst1q_f64(lanes + 2 * j, sums[j]);
}

void rft_norm_neon(double *lanes, const void *from, rft_float_type type, float scale, size_t count)
{
    switch (type) {
    case RFT_FP32: sum_neon(lanes, from, RFT_FP32, scale, count); break;
    case RFT_BF16: sum_neon(lanes, from, RFT_BF16, scale, count); break;
    case RFT_FP16: sum_neon(lanes, from, RFT_FP16, scale, count); break;
    }
}
#endif
