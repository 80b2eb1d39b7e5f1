/* optim_wide: the wide forms of a step, which optim.c chooses between. */
#ifndef RFT_KERNEL_ADAM_WIDE_H
#define RFT_KERNEL_ADAM_WIDE_H

#include "kernels/optim.h"

/* What a pass over the elements does. With a root of the caller's, two passes are a step; only Adam
 * and Adagrad have parts. */
typedef enum rft_optim_part {
    RFT_OPTIM_WHOLE,
    RFT_OPTIM_MOMENTS, /* the states; writes to `roots` what the root is asked of */
    RFT_OPTIM_APPLY,   /* the parameter, with the roots */
} rft_optim_part;

/* Return how many elements they have done, from the first on: all but less than a vector. */
size_t rft_optim_avx2(const rft_optim_rule *rule, const rft_optim_span *span, rft_optim_part part,
                      float *roots);
size_t rft_optim_avx512(const rft_optim_rule *rule, const rft_optim_span *span, rft_optim_part part,
                        float *roots);
size_t rft_optim_neon(const rft_optim_rule *rule, const rft_optim_span *span, rft_optim_part part,
                      float *roots);

#endif
