/*
 * host_memory: the host device's memory: allocations and arenas against one capacity.
 */
#ifndef RFT_HOST_MEMORY_H
#define RFT_HOST_MEMORY_H

#include "base/thread.h"
#include "device/blocks.h"
#include "device/device.h"
#include "device/host_extents.h"

/* Addresses without memory, and what of them has memory. */
typedef struct rft_host_reservation {
    struct rft_host_reservation *next;
    rft_extent range;
    rft_host_extents committed;
} rft_host_reservation;

typedef struct rft_host_memory {
    uint64_t capacity; /* UINT64_MAX: what the machine has */
    uint64_t granule;  /* a page */
    rft_mutex lock;
    uint64_t used;                      /* guarded by lock, like the rest */
    rft_blocks blocks;                  /* given by alloc */
    rft_host_reservation *reservations; /* given by reserve */
} rft_host_memory;

refit_status rft_host_memory_open(rft_host_memory *memory, uint64_t capacity, refit_error *error);
void rft_host_memory_close(rft_host_memory *memory);
uint64_t rft_host_memory_used(rft_host_memory *memory);

/* Books `bytes`, the lock held, or refuses. rft_host_memory_give takes them off the books. */
refit_status rft_host_memory_take(rft_host_memory *memory, uint64_t bytes, refit_error *error);
void rft_host_memory_give(rft_host_memory *memory, uint64_t bytes);

/* The slots of device.h. */
refit_status rft_host_memory_alloc(rft_host_memory *memory, uint64_t bytes, void **out,
                                   refit_error *error);
refit_status rft_host_memory_free(rft_host_memory *memory, void *block, refit_error *error);
refit_status rft_host_memory_reserve(rft_host_memory *memory, uint64_t bytes, void **out,
                                     uint64_t *granule, refit_error *error);
refit_status rft_host_memory_commit(rft_host_memory *memory, void *base, uint64_t bytes,
                                    refit_error *error);
refit_status rft_host_memory_decommit(rft_host_memory *memory, void *base, uint64_t bytes,
                                      uint64_t *freed, refit_error *error);
void rft_host_memory_unreserve(rft_host_memory *memory, void *base);

/* The first of `copies` that touches bytes of a reservation which have no memory now; `count` if
 * none does. */
uint32_t rft_host_memory_find_lost(rft_host_memory *memory, const rft_copy *copies, uint32_t count);

#endif
