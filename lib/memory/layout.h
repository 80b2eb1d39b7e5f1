/*
 * layout: regions to offsets. Pure arithmetic: no memory, no device.
 *
 * Regions are laid out in the order they are to come back (higher priority first, then group, then
 * as given), each aligned. The image is cut into slabs of at most slab_bytes, each of which is
 * page-locked by one registration. A region lies in one slab, which ends early where the next one
 * no longer fits; only a region larger than slab_bytes covers several: it starts at the beginning
 * of one, and all but its last are slab_bytes long. Slabs follow each other without holes, so the
 * image exceeds the payload by alignment only. That is at most 1/32 of each region of 2 KiB or
 * more: where regions are aligned to 512 or less, those of fewer than 32 times as many bytes are
 * aligned to a smaller power of two, down to 64.
 */
#ifndef RFT_LAYOUT_H
#define RFT_LAYOUT_H

#include <stdint.h>

#include "base/error.h"

typedef struct rft_layout_item {
    uint64_t bytes;   /* in; 0 for what needs no host memory (DISCARD, ZERO) */
    uint32_t group;   /* in */
    int32_t priority; /* in */
    uint64_t offset;  /* out: into the host image; 0 for what needs none */
    uint32_t order;   /* out: place in the order of return, 0 first */
} rft_layout_item;

/* A range of the image that one page-lock registration covers. */
typedef struct rft_slab {
    uint64_t offset; /* a multiple of RFT_SLAB_EDGE, unless slab_bytes is smaller than that */
    uint64_t bytes;
} rft_slab;

/* What suits copy engines. An alignment above this one holds for small regions as well. */
#define RFT_USUAL_ALIGNMENT UINT64_C(512)

/* Slabs begin on pages, whatever the page size of the machine: two registrations share none. */
#define RFT_SLAB_EDGE UINT64_C(65536)

typedef struct rft_layout {
    uint64_t payload_bytes; /* sum of the items */
    uint64_t image_bytes;   /* with alignment and slab ends */
    rft_slab *slabs;        /* owned; by offset */
    uint32_t slab_count;
} rft_layout;

/* Fills in offsets and orders of `items`. `alignment` and `slab_bytes` are powers of two, the
 * second not below the first. On failure nothing is owned. REFIT_ERR_INVALID, REFIT_ERR_LIMIT
 * (sizes that overflow), REFIT_ERR_HOST_MEMORY. */
refit_status rft_layout_open(rft_layout *layout, rft_layout_item *items, uint32_t count,
                             uint64_t alignment, uint64_t slab_bytes, refit_error *error);
void rft_layout_close(rft_layout *layout);

/* The slab that holds byte `at` of the image, which has one. */
uint32_t rft_layout_find(const rft_layout *layout, uint64_t at);

#endif
