/*
 * A step with NEON, which every 64-bit ARM has: the ops of optim_lanes.h, four elements a vector.
 * Only `fused` contracts; all of refit is compiled with -ffp-contract=off.
 */
#include "kernels/optim_wide.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define TARGET
#define INLINE       __attribute__((always_inline)) inline
#define FORM(name)   name##_neon
#define LANES        ((size_t)4)
#define lanes        float32x4_t
#define AHEAD        512u     /* bytes to prefetch before they are read */
#define STREAM_LEAST SIZE_MAX /* elements */

static INLINE lanes set_neon(float value)
{
    return vdupq_n_f32(value);
}

static INLINE lanes load_neon(const char *from)
{
    return vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)from));
}

static INLINE void store_neon(char *to, lanes value)
{
    vst1q_u8((uint8_t *)to, vreinterpretq_u8_f32(value));
}

static INLINE lanes mul_neon(lanes a, lanes b)
{
    return vmulq_f32(a, b);
}

static INLINE lanes add_neon(lanes a, lanes b)
{
    return vaddq_f32(a, b);
}

static INLINE lanes sub_neon(lanes a, lanes b)
{
    return vsubq_f32(a, b);
}

static INLINE lanes div_neon(lanes a, lanes b)
{
    return vdivq_f32(a, b);
}

static INLINE lanes root_neon(lanes a)
{
    return vsqrtq_f32(a);
}

static INLINE lanes fused_neon(lanes a, lanes b, lanes c)
{
    return vfmaq_f32(c, a, b);
}

static INLINE lanes negated_neon(lanes a)
{
    return vnegq_f32(a);
}

static INLINE uint32x4_t is_nan_neon(lanes value)
{
    return vmvnq_u32(vceqq_f32(value, value));
}

/* By comparison: the instruction's maximum of zeros is another than the second. */
static INLINE lanes larger_neon(lanes a, lanes b)
{
    return vbslq_f32(vorrq_u32(vcgtq_f32(a, b), is_nan_neon(a)), a, b);
}

/* -1, 0 or 1; a NaN is neither above nor below zero. */
static INLINE lanes sign_neon(lanes a)
{
    lanes sign = vbslq_f32(vcgtzq_f32(a), vdupq_n_f32(1), vdupq_n_f32(0));
    return vbslq_f32(vcltzq_f32(a), vdupq_n_f32(-1), sign);
}

static INLINE uint16x4_t load_halves_neon(const char *from)
{
    return vreinterpret_u16_u8(vld1_u8((const uint8_t *)from));
}

static INLINE void put_halves_neon(char *to, uint16x4_t halves)
{
    vst1_u8((uint8_t *)to, vreinterpret_u8_u16(halves));
}

/* 0x7FFF where the value is a NaN. */
static INLINE uint16x4_t mark_nans_neon(uint16x4_t halves, lanes value)
{
    return vbsl_u16(vmovn_u32(is_nan_neon(value)), vdup_n_u16(0x7FFF), halves);
}

static INLINE lanes from_bf16_neon(const char *from)
{
    return vreinterpretq_f32_u32(vshll_n_u16(load_halves_neon(from), 16));
}

static INLINE lanes from_fp16_neon(const char *from)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(load_halves_neon(from)));
}

static INLINE void to_bf16_neon(char *to, lanes value, bool streams)
{
    (void)streams;
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    put_halves_neon(to, mark_nans_neon(vshrn_n_u32(rounded, 16), value));
}

static INLINE void to_fp16_neon(char *to, lanes value, bool streams)
{
    (void)streams;
    uint16x4_t rounded = vreinterpret_u16_f16(vcvt_f16_f32(value));
    put_halves_neon(to, mark_nans_neon(rounded, value));
}

static INLINE void fence_neon(void)
{
}

static INLINE lanes join_neon(const char *weights, const char *remainders)
{
    uint32x4_t low = vmovl_u16(load_halves_neon(remainders));
    uint32x4_t weight = vmovl_u16(load_halves_neon(weights));
    uint32x4_t upper = vsubq_u32(weight, vshrq_n_u32(low, 15));
    return vreinterpretq_f32_u32(vorrq_u32(vshlq_n_u32(upper, 16), low));
}

static INLINE void split_neon(char *weights, char *remainders, lanes value)
{
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    bits = vbslq_u32(is_nan_neon(value), vdupq_n_u32(0x7FC00000), bits);
    uint32x4_t low = vandq_u32(bits, vdupq_n_u32(0xFFFF));
    uint32x4_t upper = vaddq_u32(vshrq_n_u32(bits, 16), vshrq_n_u32(low, 15));
    put_halves_neon(weights, vmovn_u32(upper));
    put_halves_neon(remainders, vmovn_u32(low));
}

#include "kernels/optim_lanes.h"
#endif
