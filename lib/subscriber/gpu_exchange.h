/*
 * gpu_exchange: blocks of an engine's memory on a GPU, made as those of a version by kernels, and
 * brought back.
 *
 * begin, add for each block, run. The new bytes lie on the same GPU, or in host memory, from which
 * they come through two windows in turn. Old elements are noted on the GPU, in at most
 * broadcast.gpu_bucket_bytes; what does not fit there moves to page-locked host memory, which
 * counts against offload.budget_bytes. No byte of the blocks crosses the link, and a run waits once
 * for each time that the notes fill their memory.
 *
 * Notes stay until reset; undo brings the blocks back to before the first run. A run that failed
 * has changed some blocks: undo then comes before the next run. Belongs to the caller's thread.
 */
#ifndef RFT_GPU_EXCHANGE_H
#define RFT_GPU_EXCHANGE_H

#include "kernels/delta.h"
#include "store/copy_queue.h"

typedef struct rft_gpu_exchange rft_gpu_exchange;

/* On a device that takes deltas. */
refit_status rft_gpu_exchange_open(refit_device *device, const refit_config *config,
                                   rft_gpu_exchange **out, refit_error *error);
/* Notes are forgotten. False: work did not end by `deadline`, and all stays open. NULL is allowed.
 */
bool rft_gpu_exchange_close(rft_gpu_exchange *exchange, int64_t deadline);

/* A list of at most `blocks`. REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE_MEMORY. */
refit_status rft_gpu_exchange_begin(rft_gpu_exchange *exchange, uint32_t blocks,
                                    refit_error *error);
/* `block` is memory of the device that was checked; `after` is too, or lies in host memory. */
void rft_gpu_exchange_add(rft_gpu_exchange *exchange, void *block, const void *after,
                          rft_delta_shape shape);

typedef struct rft_exchange_way {
    bool noted;                 /* else it cannot be undone */
    bool from_host;             /* where the new bytes lie */
    const rft_pinning *pinning; /* of host memory; NULL: it is not page-locked */
} rft_exchange_way;

/* Makes the blocks of the list as they are to be; adds to `*changed` the bytes of elements that
 * differed. REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_HOST_MEMORY, REFIT_ERR_BUDGET: there is no memory
 * for notes; REFIT_ERR_TIMEOUT, and the work goes on; those of the device. */
refit_status rft_gpu_exchange_run(rft_gpu_exchange *exchange, const rft_exchange_way *way,
                                  uint64_t *changed, refit_error *error);

/* Whether there is nothing to undo. NULL is allowed, as in the next ones. */
bool rft_gpu_exchange_is_empty(const rft_gpu_exchange *exchange);
/* Again after a failure. */
refit_status rft_gpu_exchange_undo(rft_gpu_exchange *exchange, refit_error *error);
/* Forgets the notes, and gives the memory back that only they and the windows need. */
void rft_gpu_exchange_reset(rft_gpu_exchange *exchange);
/* Waits for work that an earlier call gave up waiting for. False: it has not ended. */
bool rft_gpu_exchange_await(rft_gpu_exchange *exchange, uint32_t timeout_ms);

#endif
