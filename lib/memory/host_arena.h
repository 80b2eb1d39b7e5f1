/*
 * host_arena: the page-locked host memory that offloaded bytes live in.
 *
 * Opened for a layout, it has no memory yet. The memory is taken once: by the thread that calls
 * rft_host_arena_take, or by a thread of the arena's own while its owner goes on
 * (rft_host_arena_begin). It is kept between cycles and given back by close.
 *
 * Forked children can read it (fork_map.h), unless it is hidden from them, or private for the sake
 * of huge pages that offload.huge_pages insists on and the kernel has for no shared memory.
 */
#ifndef RFT_HOST_ARENA_H
#define RFT_HOST_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/config.h>

#include "device/device.h"
#include "memory/layout.h"

typedef struct rft_host_arena rft_host_arena;

typedef struct rft_host_arena_info {
    uint64_t bytes;       /* taken, or being taken */
    uint64_t taken_bytes; /* of these, memory by now */
    uint64_t ready_bytes; /* of these, touched and, if wanted, page-locked; equals `bytes` once the
                             memory is taken */
    /* The rest once all is taken; zero before. */
    uint64_t pinned_bytes;   /* page-locked: all or none */
    uint64_t pageable_bytes; /* not */
    bool huge_pages;         /* asked for, after the probe */
    int numa_node;           /* the node it is placed on, or a REFIT_NUMA_* */
    double seconds;          /* touch and page-lock */
} rft_host_arena_info;

/* An arena for `layout` and `config`, which are not kept. Takes none of its memory. Reads the
 * environment. REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY. */
refit_status rft_host_arena_open(refit_device *device, const rft_layout *layout,
                                 const refit_config *config, rft_host_arena **out,
                                 refit_error *error);

/* Before its memory is taken: forked children have none of it. Private memory has huge pages on
 * more kernels. */
void rft_host_arena_hide(rft_host_arena *arena);

/* Takes the memory on the calling thread. Blocks. On failure it holds nothing. REFIT_ERR_BUDGET,
 * _PIN, _HOST_MEMORY, _CONFIG, _SYSTEM, _TIMEOUT, _CANCELLED. */
refit_status rft_host_arena_take(rft_host_arena *arena, refit_error *error);

/* Lets a thread of its own do that ("refit-pin"). REFIT_ERR_SYSTEM. */
refit_status rft_host_arena_begin(rft_host_arena *arena, refit_error *error);

/* Waits until the memory is taken: REFIT_OK, or how that failed. REFIT_ERR_TIMEOUT says how far it
 * is; 0 only looks. Nothing but a close can be done with an arena that has failed. */
refit_status rft_host_arena_wait(rft_host_arena *arena, uint32_t timeout_ms, refit_error *error);

/* Has it failed? */
bool rft_host_arena_has_failed(rft_host_arena *arena);

/* Stops the taking, if it is under way, at the next slab: a page-lock cannot be interrupted.
 * REFIT_ERR_TIMEOUT: end it again. */
refit_status rft_host_arena_end(rft_host_arena *arena, uint32_t timeout_ms, refit_error *error);

/* NULL is allowed. No copy may use it any more. Waits for the arena's thread: end it first where
 * that may take time. */
void rft_host_arena_close(rft_host_arena *arena);

/* Can the arena serve `layout` too (each slab inside one that it has)? Then it is kept. */
bool rft_host_arena_fits(const rft_host_arena *arena, const rft_layout *layout);

/* Where the image lies; NULL for an image of no bytes. The memory is taken. */
char *rft_host_arena_base(const rft_host_arena *arena);

/* The thread that takes the memory may be at it. */
rft_host_arena_info rft_host_arena_describe(rft_host_arena *arena);

/* ---- Huge pages ------------------------------------------------------------------------------
 * huge_pages: pages of 2 MiB make the first touch and the page-lock many times cheaper, unless the
 * machine's memory is so fragmented that the kernel must move things about for each of them. A
 * short probe tells. Where the kernel's base pages are larger than 4 KiB, so are its huge pages.
 */

#define RFT_HUGE_PAGE (UINT64_C(2) << 20) /* with base pages of 4 KiB */

/* Does the kernel give huge pages, at its touch, to shared memory that asks for them? Most are set
 * up to give none: /sys/kernel/mm/transparent_hugepage/shmem_enabled. */
bool rft_huge_pages_can_be_shared(void);

/* Asks for huge pages in [base, base + bytes), or for none, as `wanted` says; true if they were
 * asked for. REFIT_HUGE_PAGES_AUTO touches up to 80 MiB of the range to find out; with `collapse`
 * by rft_touch_huge, as all of it is to be touched then (slab_pins.h). */
bool rft_huge_pages_ask(void *base, uint64_t bytes, refit_huge_pages wanted, bool collapse);

#endif
