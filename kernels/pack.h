/*
 * pack: many small copies as one piece of work. The GPU's version (pack.cu, "rft_pack_kernel") and
 * the C twin do the same; the entries of one call do not overlap.
 */
#ifndef RFT_KERNEL_PACK_H
#define RFT_KERNEL_PACK_H

#include <stdint.h>

/* The layout is the kernel's too. */
typedef struct rft_pack_entry {
    uint64_t to; /* addresses */
    uint64_t from;
    uint64_t bytes;
} rft_pack_entry;

void rft_pack(const rft_pack_entry *entries, uint32_t count);

#endif
