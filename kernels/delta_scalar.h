/* delta_scalar: the forms of the delta coder that run everywhere, step by step. */
#ifndef RFT_KERNEL_DELTA_SCALAR_H
#define RFT_KERNEL_DELTA_SCALAR_H

#include "kernels/delta_plan.h"

/* From element `from`, a multiple of 64, on: sets the bits of the elements that differ and clears
 * all others of the words. Returns how many differ. */
uint32_t rft_delta_compare_scalar(rft_delta_shape shape, uint32_t from, const void *before,
                                  const void *after, uint64_t *map);

/* Writes the planes of a block whose `map` has entry->changed bits. */
void rft_delta_encode_scalar(rft_delta_writer *to, const void *before, const void *after,
                             const uint64_t *map);

/* Reads all planes. False: they contradict each other. */
bool rft_delta_apply_scalar(rft_delta_reader *from, unsigned char *block);

#endif
