/*
 * host_memory: the host device's memory: allocations and arenas against one capacity.
 */
#ifndef RFT_HOST_MEMORY_H
#define RFT_HOST_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/pool.h"
#include "base/thread.h"
#include "device/allocations.h"
#include "device/device.h"

/* ---- Extents ---------------------------------------------------------------------------------
 * A set of bytes, as sorted, disjoint ranges. Not thread-safe. */

typedef struct rft_extent {
    uintptr_t from;
    uintptr_t to; /* the first byte after it */
} rft_extent;

/* All zero is the empty set. */
typedef struct rft_host_extents {
    rft_extent *list;
    uint32_t count;
    uint32_t room;
} rft_host_extents;

/* ---- Memory ------------------------------------------------------------------------------- */

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
    rft_allocations allocations;        /* given by alloc */
    rft_host_reservation *reservations; /* given by reserve */
    atomic_bool is_lost;                /* set once */
    refit_error loss;                   /* why; written before is_lost is set */
} rft_host_memory;

refit_status rft_host_memory_open(rft_host_memory *memory, uint64_t capacity, refit_error *error);
void rft_host_memory_close(rft_host_memory *memory);
uint64_t rft_host_memory_used(rft_host_memory *memory);

/* Work in a queue has failed with `why`: the device is lost, as a GPU is. The first failure counts.
 * Any thread. */
void rft_host_lose(rft_host_memory *memory, const refit_error *why);

/* REFIT_OK, or REFIT_ERR_DEVICE: the device is lost, and why. Any thread. */
refit_status rft_host_check_lost(rft_host_memory *memory, refit_error *error);

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

/* ---- Page locks ------------------------------------------------------------------------------
 * Page-locked memory of the host device, which is memory that is never paged out. */

/* REFIT_ERR_PIN names the limit and how to raise it. */
refit_status rft_host_pin(const void *memory, uint64_t bytes, refit_error *error);
void rft_host_unpin(const void *memory, uint64_t bytes);

/* ---- Copies ----------------------------------------------------------------------------------
 * Copies on the CPU. Large ones are shared by a pool, whose threads start with the first copy that
 * is worth sharing; smaller ones are done by the thread that asks. */

/* A pool for copies; close it with rft_pool_close. `threads` 0: one per core, at most 8. */
refit_status rft_host_copy_open(rft_pool *pool, uint32_t threads, refit_error *error);

/* REFIT_ERR_COPY if one of them touches memory of an arena that is not committed. Any thread. */
refit_status rft_host_check_copies(rft_host_memory *memory, const rft_copy *copies, uint32_t count,
                                   refit_error *error);

/* Does all `copies` and returns when they are done; one without a source is zeroed. Any thread.
 * REFIT_ERR_COPY, and nothing is copied, as rft_host_check_copies says. */
refit_status rft_host_copy_now(rft_host_memory *memory, rft_pool *pool, const rft_copy *copies,
                               uint32_t count, refit_error *error);

/* ---- Digests, casts and masters --------------------------------------------------------------
 * The arithmetic of kernels/ on the host device's memory, on the calling thread. */

/* As the slots of device.h. REFIT_ERR_COPY, and nothing is written, if the memory is of an arena
 * and not committed. */
refit_status rft_host_digest_now(rft_host_memory *memory, const void *from, uint64_t bytes,
                                 uint64_t offset, uint64_t *sum, refit_error *error);
refit_status rft_host_digest_list_now(rft_host_memory *memory, rft_digest_job *jobs, uint32_t count,
                                      refit_error *error);
refit_status rft_host_cast_now(rft_host_memory *memory, uint16_t *to, const float *from,
                               uint64_t count, refit_error *error);
/* The units are shared by the pool's threads. */
refit_status rft_host_encode_now(rft_host_memory *memory, rft_pool *pool, const rft_master_job *job,
                                 refit_error *error);
refit_status rft_host_decode_now(rft_host_memory *memory, rft_pool *pool, const rft_master_job *job,
                                 refit_error *error);

#endif
