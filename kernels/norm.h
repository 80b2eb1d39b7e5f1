/*
 * norm: the sum of the squares of gradients, in an order that is the same however the work is
 * divided; on the way they can be copied.
 *
 * A block is 4096 elements; the first begins at the parameter's first element, and the last may be
 * shorter. Of each element the square is taken of `element * scale`, a product rounded to fp32, and
 * is exact in double. A block has 16 sums, in double: sum j is that of elements j, j + 16, j + 32 …
 * in this order. Then sum j + 8 is added to sum j for the lower eight, sum j + 4 for the lower
 * four, and so on. Sums of blocks are added in their order (rft_norm_total).
 *
 * So a caller that divides at multiples of a block gets the same bits with any number of threads.
 * No sum of finite numbers is infinite: a sum is finite only where all its numbers are.
 *
 * Every form (scalar, AVX2, AVX-512, NEON) gives the same bits; of a NaN, a NaN.
 */
#ifndef RFT_KERNEL_NORM_H
#define RFT_KERNEL_NORM_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/floats.h"

#define RFT_NORM_BLOCK ((size_t)4096) /* elements */

/* Gradients of one parameter, from a multiple of a block on. */
typedef struct rft_norm_span {
    size_t count;
    const void *gradient;
    rft_float_type type;
    float scale; /* 1 / loss scale, or 1 */
    void *copy;  /* as many bytes, streamed there unscaled; or NULL */
} rft_norm_span;

/* Blocks of so many elements. */
size_t rft_norm_blocks(size_t count);

/* Writes the sum of each block to `sums`. No thread is started and nothing is allocated. */
void rft_norm_sum(const rft_norm_span *span, double *sums);

/* The square of the norm. */
double rft_norm_total(const double *sums, size_t blocks);

#endif
