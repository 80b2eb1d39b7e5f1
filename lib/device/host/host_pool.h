/*
 * host_pool: the threads that share one large copy. They start with the first copy that is worth
 * sharing; smaller ones are done by the thread that asks.
 */
#ifndef RFT_HOST_POOL_H
#define RFT_HOST_POOL_H

#include "base/thread.h"
#include "device/device.h"

#define RFT_HOST_POOL_MOST 64u

typedef struct rft_host_job rft_host_job;

typedef struct rft_host_pool {
    uint32_t threads; /* that share one copy, the asking one included */
    rft_mutex lock;
    rft_cond work;      /* jobs is not empty, or closing */
    rft_cond finished;  /* a job's last part is done */
    rft_host_job *jobs; /* with bytes that nobody has claimed; guarded by lock, like the rest */
    uint32_t started;   /* helpers */
    bool refused;       /* a helper could not be started; said once, not tried again */
    bool closing;
    rft_thread helpers[RFT_HOST_POOL_MOST];
} rft_host_pool;

/* `threads` 0: one per core, at most 8. */
refit_status rft_host_pool_open(rft_host_pool *pool, uint32_t threads, refit_error *error);
void rft_host_pool_close(rft_host_pool *pool);

/* Does all `copies` and returns when they are done; one without a source is zeroed. Any thread. */
void rft_host_pool_copy(rft_host_pool *pool, const rft_copy *copies, uint32_t count);

#endif
