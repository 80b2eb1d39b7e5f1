/* norm_wide: the wide forms of a block's sums, which norm.c chooses between. */
#ifndef RFT_KERNEL_NORM_WIDE_H
#define RFT_KERNEL_NORM_WIDE_H

#include "kernels/norm.h"

#define RFT_NORM_LANES ((size_t)16)

/* Add the squares of `count` elements, a multiple of RFT_NORM_LANES, to the lanes. */
void rft_norm_avx2(double *lanes, const void *from, rft_float_type type, float scale, size_t count);
void rft_norm_avx512(double *lanes, const void *from, rft_float_type type, float scale,
                     size_t count);
void rft_norm_neon(double *lanes, const void *from, rft_float_type type, float scale, size_t count);

#endif
