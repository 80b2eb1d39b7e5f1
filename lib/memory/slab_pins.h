/*
 * slab_pins: fresh memory made fit for copies: touched by several threads and page-locked slab by
 * slab, each slab as soon as it is touched, while the next ones still are.
 *
 * One thread page-locks, the caller's. The driver holds locks of its own for as long as it
 * registers memory, so a second thread would wait for the first; and registering memory that is
 * touched costs a fraction of touching it.
 */
#ifndef RFT_SLAB_PINS_H
#define RFT_SLAB_PINS_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "memory/cancel_token.h"
#include "memory/layout.h"

/* ---- Page locks, slab by slab --------------------------------------------------------------- */

typedef struct rft_slab_pins {
    refit_device *device;
    char *base;            /* whole pages, fresh */
    uint64_t bytes;        /* of them */
    const rft_slab *slabs; /* by offset */
    uint32_t count;
    uint32_t touch_threads;
    uint64_t huge;   /* put it into huge pages of so many bytes, or 0 (rft_touch_huge) */
    int near;        /* the node whose CPUs are to touch, or -1 */
    uint32_t pinned; /* the first so many are page-locked */
} rft_slab_pins;

/* Touches all of it and, unless `wanted` is REFIT_PIN_OFF, page-locks it; with REFIT_PIN_PREFER a
 * lock that fails leaves all of it pageable, with a line in the log. `wanted` is not _AUTO. Blocks.
 * On failure nothing is locked. REFIT_ERR_PIN says which slab, and what the device says: its size
 * and what to do; REFIT_ERR_HOST_MEMORY, REFIT_ERR_CANCELLED, REFIT_ERR_DEVICE. */
refit_status rft_slab_pins_take(rft_slab_pins *pins, refit_pin wanted, rft_cancel_token *token,
                                refit_error *error);

/* Undoes the locks. */
void rft_slab_pins_drop(rft_slab_pins *pins);

/* ---- First touch -----------------------------------------------------------------------------
 * Gives fresh pages their memory, by several threads at once.
 *
 * The first touch is what costs (the kernel zeroes every page), and it decides on which node a page
 * lies. Asked of the kernel by MADV_POPULATE_WRITE, which answers with an error where a plain write
 * would raise a signal; kernels older than 5.14 do not know it and get the write.
 *
 *     rft_touch touch;
 *     RFT_TRY(rft_touch_open(&touch, base, bytes, 0, 0, -1, token, error)); threads begin
 *     status = rft_touch_reach(&touch, bytes / 2, error);                   half of it can be used
 *     rft_touch_close(&touch);                                              threads are gone
 */

#define RFT_TOUCH_THREADS 64 /* at most */

typedef struct rft_touch {
    char *base;
    uint64_t bytes;
    uint64_t huge; /* of a huge page, which each chunk is put into; 0: it is not */
    rft_cancel_token *token;
    int near; /* the node that helpers go to, or -1 */
    rft_thread helpers[RFT_TOUCH_THREADS];
    uint32_t helper_count;
    rft_mutex lock;
    rft_cond moved;
    uint64_t next; /* the first byte that no thread has taken; guarded by lock */
    uint64_t at[RFT_TOUCH_THREADS + 1]; /* where each thread is, UINT64_MAX: nowhere; guarded */
    uint32_t seats;                     /* of `at` that are given away; guarded */
    refit_status status;                /* of the first failure; guarded, like its sentence */
    refit_error error;
} rft_touch;

/* Touches whole pages on the calling thread. What they held stays. REFIT_ERR_HOST_MEMORY. */
refit_status rft_touch_range(void *base, uint64_t bytes, refit_error *error);

/* Puts shared memory, from a huge page's beginning on, into the huge pages of `huge` bytes that the
 * kernel does not give it at a touch; false: not all of them. It is advice to the kernel (Linux 6.1
 * or newer): what it does not follow is left to the touch. What the pages held stays. */
bool rft_touch_huge(void *base, uint64_t bytes, uint64_t huge);

/* Begins to touch whole pages from `base` on, by `threads` threads, the caller's among them (0: one
 * per core, at most 8). Fewer, if some cannot be started. `huge`: see rft_touch_huge; 0: without.
 * With a node as `near` (-1: none) all are helpers on that node's CPUs, so that the memory lies
 * there. `token` is told how far they are, and stops them. */
refit_status rft_touch_open(rft_touch *touch, void *base, uint64_t bytes, uint64_t huge,
                            uint32_t threads, int near, rft_cancel_token *token,
                            refit_error *error);

/* Until the first `bytes` of it are touched. Blocks. REFIT_ERR_HOST_MEMORY, REFIT_ERR_CANCELLED
 * (`token`). */
refit_status rft_touch_reach(rft_touch *touch, uint64_t bytes, refit_error *error);

/* Ends it where it is. */
void rft_touch_close(rft_touch *touch);

/* All of it, by threads that are gone when it returns. Blocks. REFIT_ERR_HOST_MEMORY,
 * REFIT_ERR_SYSTEM. */
refit_status rft_touch_all(void *base, uint64_t bytes, refit_error *error);

#endif
