/*
 * pack: many small copies as one piece of work. The GPU's version (pack.cu, "rft_pack_kernel") and
 * the C twin do the same; the entries of one call do not overlap and may lie at any address. The
 * GPU is fastest where both ends agree modulo 16, and where no entry is much longer than the rest:
 * such a one is better given as several.
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
