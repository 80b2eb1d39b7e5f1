/*
 * The pool's list holds the jobs that may have a part to claim. A claim that finds none takes its
 * job off the list; the owner waits for the parts that are under way then. So a job is off the list
 * and at rest when its owner returns, and its memory may go. Whatever a part has written, its
 * thread hands to the owner with the lock: no other order of memory is relied on.
 */
#include "base/pool.h"

#include "base/checked.h"
#include "base/log.h"

#define THREADS_AUTO 8u

refit_status rft_pool_open(rft_pool *pool, const rft_pool_kind *kind, uint32_t threads,
                           refit_error *error)
{
    refit_status status;
    if (threads == 0) threads = (uint32_t)rft_min_u64(rft_cpu_count(), THREADS_AUTO);
    *pool = (rft_pool){.kind = kind};
    RFT_TRY(rft_mutex_open(&pool->lock, error));
    RFT_TRY_GOTO(rft_cond_open(&pool->work, error), close_lock);
    RFT_TRY_GOTO(rft_cond_open(&pool->finished, error), close_work);
    pool->threads = (uint32_t)rft_min_u64(threads, RFT_POOL_MOST);
    return REFIT_OK;

close_work:
    rft_cond_close(&pool->work);
close_lock:
    rft_mutex_close(&pool->lock);
    return status;
}

void rft_pool_close(rft_pool *pool)
{
    if (pool->threads == 0) return;
    rft_lock(&pool->lock);
    pool->closing = true;
    rft_cond_wake_all(&pool->work);
    rft_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->started; i++) {
        rft_thread_join(pool->helpers[i]);
    }
    rft_cond_close(&pool->finished);
    rft_cond_close(&pool->work);
    rft_mutex_close(&pool->lock);
    pool->threads = 0;
}

/* Takes a job that has nothing left to claim off the list. */
static void unlink_job(rft_pool *pool, const rft_pool_job *job)
{
    rft_pool_job **link = &pool->jobs;
    while (*link != NULL && *link != job) {
        link = &(*link)->next;
    }
    if (*link != NULL) *link = job->next;
}

/* Claims one part and does it. The lock is held before and after, not meanwhile. False: there was
 * none. */
static bool do_part(rft_pool *pool, rft_pool_job *job, uint32_t worker)
{
    rft_pool_part part;
    if (!job->claim(job, &part)) {
        unlink_job(pool, job);
        return false;
    }
    job->running++;
    rft_unlock(&pool->lock);
    job->run(job, &part, worker);
    rft_lock(&pool->lock);
    job->running--;
    if (job->running == 0) rft_cond_wake_all(&pool->finished);
    return true;
}

static void *help(void *user)
{
    rft_pool *pool = user;
    if (pool->begin != NULL) pool->begin(pool->user);
    rft_lock(&pool->lock);
    uint32_t worker = ++pool->named;
    while (!pool->closing) {
        if (pool->jobs != NULL) {
            (void)do_part(pool, pool->jobs, worker);
        } else {
            rft_cond_wait_idle(&pool->work, &pool->lock);
        }
    }
    rft_unlock(&pool->lock);
    return NULL;
}

/* Without helpers the work is done too, but slower: a line in the log, no failure. */
static void start_helpers(rft_pool *pool)
{
    while (pool->started + 1 < pool->threads && !pool->refused) {
        refit_error error;
        if (rft_thread_start(&pool->helpers[pool->started], pool->kind->thread, help, pool,
                             &error) == REFIT_OK) {
            pool->started++;
            continue;
        }
        pool->refused = true;
        rft_log(REFIT_LOG_WARNING, "%s are shared by %u threads, not %u: %s", pool->kind->work,
                pool->started + 1, pool->threads, error.text);
    }
}

void rft_pool_start(rft_pool *pool, void (*begin)(void *user), void *user)
{
    pool->begin = begin;
    pool->user = user;
    rft_lock(&pool->lock);
    start_helpers(pool);
    rft_unlock(&pool->lock);
}

/* The last wait is for parts that are under way: it ends as they do. */
void rft_pool_share(rft_pool *pool, rft_pool_job *job)
{
    rft_lock(&pool->lock);
    start_helpers(pool);
    job->next = pool->jobs;
    pool->jobs = job;
    rft_cond_wake_all(&pool->work);
    while (do_part(pool, job, 0)) {
    }
    while (job->running != 0) {
        rft_cond_wait_idle(&pool->finished, &pool->lock);
    }
    rft_unlock(&pool->lock);
}

typedef struct item_job {
    rft_pool_job job; /* first, so that it is the job's address */
    uint32_t next;
    uint32_t count;
    rft_pool_item_fn run;
    void *user;
} item_job;

static bool claim_item(rft_pool_job *job, rft_pool_part *part)
{
    item_job *items = (item_job *)job;
    if (items->next == items->count) return false;
    *part = (rft_pool_part){.from = items->next++, .count = 1};
    return true;
}

static void run_item(rft_pool_job *job, const rft_pool_part *part, uint32_t worker)
{
    const item_job *items = (const item_job *)job;
    items->run(items->user, (uint32_t)part->from, worker);
}

void rft_pool_items(rft_pool *pool, uint32_t count, rft_pool_item_fn run, void *user)
{
    if (count > 1 && pool->threads > 1) {
        item_job items = {.job = {.claim = claim_item, .run = run_item},
                          .count = count,
                          .run = run,
                          .user = user};
        rft_pool_share(pool, &items.job);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        run(user, i, 0);
    }
}
