/* adam_wide: the wide forms of a step, which adam.c chooses between. */
#ifndef RFT_KERNEL_ADAM_WIDE_H
#define RFT_KERNEL_ADAM_WIDE_H

#include "kernels/adam.h"

/* What a pass over the elements does. With a root of the caller's, two passes are a step; only Adam
 * and Adagrad have parts. */
typedef enum rft_adam_part {
    RFT_ADAM_WHOLE,
    RFT_ADAM_MOMENTS, /* the states; writes to `roots` what the root is asked of */
    RFT_ADAM_APPLY,   /* the parameter, with the roots */
} rft_adam_part;

/* Return how many elements they have done, from the first on: all but less than a vector. */
size_t rft_adam_avx2(const rft_adam_rule *rule, const rft_adam_span *span, rft_adam_part part,
                     float *roots);
size_t rft_adam_avx512(const rft_adam_rule *rule, const rft_adam_span *span, rft_adam_part part,
                       float *roots);
size_t rft_adam_neon(const rft_adam_rule *rule, const rft_adam_span *span, rft_adam_part part,
                     float *roots);

#endif
