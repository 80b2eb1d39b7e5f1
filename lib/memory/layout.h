/*
 * layout: regions to offsets. Pure arithmetic: no memory, no device.
 *
 * Regions are laid out in the order they are to come back (higher priority first, then group, then
 * as given), each aligned, none across the end of a slab, unless it is larger than a slab: then it
 * starts on one and the slabs it covers become one. The total exceeds the payload by alignment and
 * slab ends only: under 1 % for states of any size worth moving.
 */
#ifndef RFT_LAYOUT_H
#define RFT_LAYOUT_H

#include <stdint.h>

#include "base/error.h"

typedef struct rft_layout_item {
    uint64_t bytes;   /* in; 0 for what needs no host memory (DISCARD, ZERO) */
    uint32_t group;   /* in */
    int32_t priority; /* in */
    uint64_t offset;  /* out: into the host image */
    uint32_t order;   /* out: place in the order of return, 0 first */
} rft_layout_item;

/* A stretch of the image that one page-lock registration covers. */
typedef struct rft_slab {
    uint64_t offset;
    uint64_t bytes;
} rft_slab;

typedef struct rft_layout {
    uint64_t payload_bytes; /* sum of the items */
    uint64_t image_bytes;   /* with alignment and slab ends */
    rft_slab *slabs;        /* owned */
    uint32_t slab_count;
} rft_layout;

/* Fills in offsets and orders of `items`. `alignment` and `slab_bytes` are powers of two. On
 * failure nothing is owned. REFIT_ERR_LIMIT (sizes that overflow), REFIT_ERR_HOST_MEMORY. */
refit_status rft_layout_open(rft_layout *layout, rft_layout_item *items, uint32_t count,
                             uint64_t alignment, uint64_t slab_bytes, refit_error *error);
void rft_layout_close(rft_layout *layout);

#endif
