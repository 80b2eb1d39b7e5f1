/* delta_wide: the wide forms of the delta coder, which delta.c chooses between. */
#ifndef RFT_KERNEL_DELTA_WIDE_H
#define RFT_KERNEL_DELTA_WIDE_H

#include "kernels/delta_plan.h"

/* Compares `words` times 64 elements of `width` bytes: a word of bits for each 64. Returns how many
 * differ. */
uint32_t rft_delta_compare_wide(uint32_t width, uint32_t words, const void *before,
                                const void *after, uint64_t *map);

/* As the scalar forms. */
void rft_delta_encode_wide(rft_delta_writer *to, const void *before, const void *after,
                           const uint64_t *map);
bool rft_delta_apply_wide(rft_delta_reader *from, unsigned char *block);

#endif
