/*
 * pool: threads that share the parts of one piece of work.
 *
 * A job is claimed part by part, under the pool's lock, and done outside it. The thread that asks
 * takes part, so the work is done with no helper as well. Helpers start with the first job that is
 * shared, or before (rft_pool_start), and end with the pool. A running pool allocates nothing: jobs
 * lie on their owners' stacks.
 */
#ifndef RFT_POOL_H
#define RFT_POOL_H

#include "base/thread.h"

#define RFT_POOL_MOST 64u /* threads */

/* What a claim took, in words of the job's own. */
typedef struct rft_pool_part {
    const void *at;
    uint64_t from;
    uint64_t count;
} rft_pool_part;

typedef struct rft_pool_job {
    /* Claims the next part. Called with the pool's lock held, so it only counts. False: no part is
     * left, and none will come. */
    bool (*claim)(struct rft_pool_job *job, rft_pool_part *part);
    /* Does a part, without the lock. `worker` is below RFT_POOL_MOST, 0 for the thread that asked;
     * two that are at one job at once are never the same. */
    void (*run)(struct rft_pool_job *job, const rft_pool_part *part, uint32_t worker);
    /* The pool's, guarded by its lock. */
    struct rft_pool_job *next;
    uint32_t running; /* claimed parts under way */
} rft_pool_job;

/* What the pool's threads are for. */
typedef struct rft_pool_kind {
    const char *thread; /* the helpers' name: at most 15 bytes */
    const char *work;   /* for the log: "copies are shared by 2 threads, not 8" */
} rft_pool_kind;

typedef struct rft_pool {
    const rft_pool_kind *kind;
    uint32_t threads; /* that share one job, the asking one included; 0: not open */
    rft_mutex lock;
    rft_cond work;      /* jobs is not empty, or closing */
    rft_cond finished;  /* a job's last part is done */
    rft_pool_job *jobs; /* with parts to claim; guarded by lock, like the rest */
    uint32_t started;   /* helpers */
    uint32_t named;     /* of these, those that know which worker they are */
    bool refused;       /* a helper could not be started; said once, not tried again */
    bool closing;
    void (*begin)(void *user); /* each helper calls it first; or NULL */
    void *user;
    rft_thread helpers[RFT_POOL_MOST];
} rft_pool;

/* `kind` must stay. `threads` 0: one per core, at most 8. Starts none. REFIT_ERR_SYSTEM. */
refit_status rft_pool_open(rft_pool *pool, const rft_pool_kind *kind, uint32_t threads,
                           refit_error *error);
/* Starts the helpers now, so that no job takes memory for them. One that cannot be started is a
 * line in the log. Each calls `begin` first, with `user`; NULL: nothing. Called once, before the
 * first job. */
void rft_pool_start(rft_pool *pool, void (*begin)(void *user), void *user);
/* No job is under way. {0} is allowed. */
void rft_pool_close(rft_pool *pool);

/* Does the job, whose claim and run are set and the rest zero; returns when all of it is done. Any
 * thread. */
void rft_pool_share(rft_pool *pool, rft_pool_job *job);

/* Does items 0 to count - 1, in any order, and returns when all are done; a single one on the
 * calling thread. */
typedef void (*rft_pool_item_fn)(void *user, uint32_t item, uint32_t worker);
void rft_pool_items(rft_pool *pool, uint32_t count, rft_pool_item_fn run, void *user);

#endif
