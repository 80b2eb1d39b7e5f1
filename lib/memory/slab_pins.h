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

#include "device/device.h"
#include "memory/cancel_token.h"
#include "memory/layout.h"

typedef struct rft_slab_pins {
    refit_device *device;
    char *base;            /* whole pages, fresh */
    uint64_t bytes;        /* of them */
    const rft_slab *slabs; /* by offset */
    uint32_t count;
    uint32_t touch_threads;
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

#endif
