/*
 * host_arena: the page-locked host memory that offloaded bytes live in.
 *
 * One mapping of exactly the image's size (rounded up to a page), placed on the wanted NUMA node,
 * with huge pages where a probe shows that they come cheap, touched by several threads, and
 * page-locked slab by slab through the device; a slab that fails rolls all back. Kept between
 * cycles; given back by close. A forked child does not have it, and core dumps leave it out.
 */
#ifndef RFT_HOST_ARENA_H
#define RFT_HOST_ARENA_H

#include "device/device.h"
#include "memory/layout.h"

typedef struct rft_host_arena rft_host_arena;

typedef struct rft_host_arena_info {
    uint64_t bytes;          /* taken */
    uint64_t pinned_bytes;   /* page-locked: all or none */
    uint64_t pageable_bytes; /* not */
    bool huge_pages;         /* asked for, after the probe */
    int numa_node;           /* the node it is placed on, or a REFIT_NUMA_* */
    double seconds;          /* touch and page-lock */
} rft_host_arena_info;

/* Takes the memory for `layout`, which is not kept. Blocks. REFIT_ERR_BUDGET names need, budget and
 * where the budget comes from; REFIT_ERR_PIN names the limit and how to raise it;
 * REFIT_ERR_HOST_MEMORY, REFIT_ERR_CONFIG (a NUMA node that is not there), REFIT_ERR_SYSTEM. On
 * failure nothing is held. */
refit_status rft_host_arena_open(refit_device *device, const rft_layout *layout,
                                 const refit_config *config, rft_host_arena **out,
                                 refit_error *error);

/* NULL is allowed. No copy may use it any more. */
void rft_host_arena_close(rft_host_arena *arena);

/* Can the arena that is there serve `layout` too (each slab inside one that it has)? Then it is
 * kept. */
bool rft_host_arena_fits(const rft_host_arena *arena, const rft_layout *layout);

/* Where the image lies; NULL for an image of no bytes. */
char *rft_host_arena_base(const rft_host_arena *arena);
rft_host_arena_info rft_host_arena_describe(const rft_host_arena *arena);

#endif
