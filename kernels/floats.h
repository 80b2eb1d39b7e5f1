/*
 * floats: fp32 from bf16 and fp16, which is exact, and fp16 from fp32, rounded to nearest even. As
 * in cast.h every NaN becomes 0x7FFF there, and floating-point modes of the caller make no
 * difference.
 */
#ifndef RFT_KERNEL_FLOATS_H
#define RFT_KERNEL_FLOATS_H

#include <stddef.h>
#include <stdint.h>

typedef enum rft_float_type { RFT_FP32, RFT_BF16, RFT_FP16 } rft_float_type;

/* Of one number. */
static inline size_t rft_float_bytes(rft_float_type type)
{
    return type == RFT_FP32 ? 4 : 2;
}

/* `to` and `from` do not overlap. */
void rft_floats_from_bf16(float *to, const uint16_t *from, size_t count);
void rft_floats_from_half(float *to, const uint16_t *from, size_t count);
void rft_floats_to_half(uint16_t *to, const float *from, size_t count);

#endif
