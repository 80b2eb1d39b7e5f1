/* delta_scalar: the forms of the delta coder that run everywhere, step by step. */
#ifndef RFT_KERNEL_DELTA_SCALAR_H
#define RFT_KERNEL_DELTA_SCALAR_H

#include "kernels/delta.h"

/* Sets the bits of the elements that differ, in words of 64, and clears the others of the last
 * word. Returns how many differ. */
uint32_t rft_delta_compare_scalar(rft_delta_shape shape, const void *before, const void *after,
                                  uint64_t *map);

/* Writes the planes of a block whose `map` has entry->changed bits, and completes the entry, of
 * which the planes LOW, HIGH and SYMBOLS are laid out (all of them for RFT_DELTA_RAW). */
void rft_delta_encode_scalar(rft_delta_shape shape, const void *before, const void *after,
                             const uint64_t *map, unsigned char *out, rft_delta_entry *entry);

/* rft_delta_apply. */
bool rft_delta_apply_scalar(rft_delta_shape shape, const rft_delta_entry *entry,
                            const unsigned char *coded, void *block);

#endif
