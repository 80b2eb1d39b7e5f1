/*
 * image_memory: the host image's memory, from nothing to page-locked, and back.
 *
 * One mapping of exactly the image's size (rounded up to a page), placed on the wanted NUMA node,
 * with huge pages where a probe shows that they come cheap, touched by several threads and page-
 * locked slab by slab. A forked child does not have it, and core dumps leave it out.
 */
#ifndef RFT_IMAGE_MEMORY_H
#define RFT_IMAGE_MEMORY_H

#include <refit/config.h>

#include "memory/machine_lock.h"
#include "memory/slab_pins.h"

typedef struct rft_image_memory {
    rft_slab_pins pins; /* pins.base NULL: nothing is mapped */
    bool huge_pages;    /* asked for, after the probe */
    int numa_node;      /* the node it is placed on, or a REFIT_NUMA_* */
    int64_t spent;      /* ns of touch and page-lock */
} rft_image_memory;

/* Takes pins.bytes, cut into pins.slabs, for pins.device; the caller has filled in these. With
 * offload.take_turns it waits for `machine_lock` first, and holds it until it is done. Blocks. On
 * failure nothing is held. REFIT_ERR_BUDGET names need, budget and where the budget comes from;
 * REFIT_ERR_PIN the slab, the limit and how to raise it; REFIT_ERR_HOST_MEMORY, REFIT_ERR_CONFIG (a
 * NUMA node that is not there), REFIT_ERR_SYSTEM, REFIT_ERR_TIMEOUT (the lock), REFIT_ERR_CANCELLED
 * (`token`). */
refit_status rft_image_memory_take(rft_image_memory *memory, const refit_config *config,
                                   rft_machine_lock *machine_lock, rft_cancel_token *token,
                                   refit_error *error);

/* Gives back what there is. No copy may use it any more. */
void rft_image_memory_drop(rft_image_memory *memory);

#endif
