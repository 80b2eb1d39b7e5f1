/*
 * host_copy: copies on the CPU. Large ones are shared by a pool, whose threads start with the first
 * copy that is worth sharing; smaller ones are done by the thread that asks.
 */
#ifndef RFT_HOST_COPY_H
#define RFT_HOST_COPY_H

#include "base/pool.h"
#include "device/device.h"

/* A pool for copies; close it with rft_pool_close. `threads` 0: one per core, at most 8. */
refit_status rft_host_copy_open(rft_pool *pool, uint32_t threads, refit_error *error);

/* Does all `copies` and returns when they are done; one without a source is zeroed. Any thread. */
void rft_host_copy(rft_pool *pool, const rft_copy *copies, uint32_t count);

#endif
