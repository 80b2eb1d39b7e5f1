/*
 * cast: fp32 to bf16, round to nearest even; every NaN becomes 0x7FFF (what CUDA's own conversion
 * gives). The GPU's version (cast.cu, "rft_cast_kernel") and the C twin agree bit for bit.
 */
#ifndef RFT_KERNEL_CAST_H
#define RFT_KERNEL_CAST_H

#include <stddef.h>
#include <stdint.h>

/* `to` and `from` do not overlap. */
void rft_cast_bf16(uint16_t *to, const float *from, size_t count);

#endif
