/*
 * Copy threads, shared by all streams of one host device.
 *
 * A job is a list of copies on its owner's stack, with a cursor. Owner and helpers claim the next
 * part of it, some hundred kilobytes that may hold many small copies or a piece of a large one,
 * under the lock, and copy it outside. So the work is shared by bytes, not by copies, a helper that
 * comes late finds less to do, and nothing is allocated. The owner always takes part: with no
 * helper at all the copy is still done.
 */
#include "device/host/host_pool.h"

#include <string.h>

#include "base/checked.h"
#include "base/log.h"
#include "kernels/copy.h"

/* Less than this is copied before a helper has woken up. */
#define SHARE_LEAST  (UINT64_C(512) << 10)
#define STREAM_LEAST (UINT64_C(1) << 20)
#define PART_MOST    (UINT64_C(4) << 20)
#define PART_LEAST   (UINT64_C(128) << 10)

/* A place in a list of copies. */
typedef struct cursor {
    const rft_copy *copy;
    uint64_t done; /* bytes of it */
} cursor;

struct rft_host_job {
    rft_host_job *next;
    cursor at;        /* guarded by the pool's lock, like the rest */
    uint64_t left;    /* bytes not claimed yet */
    uint32_t running; /* claimed parts under way */
};

refit_status rft_host_pool_open(rft_host_pool *pool, uint32_t threads, refit_error *error)
{
    if (threads == 0) threads = (uint32_t)rft_min_u64(rft_cpu_count(), 8);
    *pool = (rft_host_pool){.threads = (uint32_t)rft_min_u64(threads, RFT_HOST_POOL_MOST)};
    refit_status status = REFIT_OK;
    RFT_TRY(rft_mutex_open(&pool->lock, error));
    RFT_TRY_GOTO(rft_cond_open(&pool->work, error), close_lock);
    RFT_TRY_GOTO(rft_cond_open(&pool->finished, error), close_work);
    return REFIT_OK;

close_work:
    rft_cond_close(&pool->work);
close_lock:
    rft_mutex_close(&pool->lock);
    return status;
}

void rft_host_pool_close(rft_host_pool *pool)
{
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
}

/* What happens to the bytes that a cursor passes. */
typedef void (*pass_fn)(void *to, const void *from, size_t bytes);

static void pass_by(void *to, const void *from, size_t bytes)
{
    (void)to;
    (void)from;
    (void)bytes;
}

/* Small copies of a large job are streamed too: together they are too large for the caches. */
static void copy_shared(void *to, const void *from, size_t bytes)
{
    if (from == NULL) {
        memset(to, 0, bytes);
    } else {
        rft_copy_piece(to, from, bytes);
    }
}

static void copy_alone(void *to, const void *from, size_t bytes)
{
    if (from == NULL) {
        memset(to, 0, bytes);
    } else {
        rft_copy_bytes(to, from, bytes);
    }
}

/* Moves `bytes` on from `at`. */
static cursor advance(cursor at, uint64_t bytes, pass_fn pass)
{
    while (bytes != 0) {
        const rft_copy *it = at.copy;
        uint64_t step = rft_min_u64(bytes, it->bytes - at.done);
        const char *from = it->from == NULL ? NULL : (const char *)it->from + at.done;
        if (step != 0) pass((char *)it->to + at.done, from, step);
        bytes -= step;
        at.done += step;
        if (at.done == it->bytes) at = (cursor){it + 1, 0};
    }
    return at;
}

/* Takes a job whose bytes are all claimed off the list. */
static void unlink_job(rft_host_pool *pool, const rft_host_job *job)
{
    rft_host_job **link = &pool->jobs;
    while (*link != NULL && *link != job) {
        link = &(*link)->next;
    }
    if (*link != NULL) *link = job->next;
}

/* Large parts at first, smaller ones towards the end, so that all finish together. */
static uint64_t part_of(const rft_host_pool *pool, uint64_t left)
{
    uint64_t part = left / (2 * (uint64_t)pool->threads);
    part = rft_max_u64(rft_min_u64(part, PART_MOST), PART_LEAST);
    return rft_min_u64(part & ~UINT64_C(63), left);
}

/* Claims one part of the job and copies it. The lock is held before and after, not meanwhile. */
static void do_part(rft_host_pool *pool, rft_host_job *job)
{
    uint64_t bytes = part_of(pool, job->left);
    cursor at = job->at;
    job->at = advance(at, bytes, pass_by);
    job->left -= bytes;
    job->running++;
    if (job->left == 0) unlink_job(pool, job);
    rft_unlock(&pool->lock);
    advance(at, bytes, copy_shared);
    rft_lock(&pool->lock);
    job->running--;
    if (job->left == 0 && job->running == 0) rft_cond_wake_all(&pool->finished);
}

static void *help(void *user)
{
    rft_host_pool *pool = user;
    rft_lock(&pool->lock);
    while (!pool->closing) {
        if (pool->jobs != NULL) {
            do_part(pool, pool->jobs);
        } else {
            rft_cond_wait_idle(&pool->work, &pool->lock);
        }
    }
    rft_unlock(&pool->lock);
    return NULL;
}

/* Copies are right without helpers, only slower: that is worth a line in the log, no failure. */
static void start_helpers(rft_host_pool *pool)
{
    while (pool->started + 1 < pool->threads && !pool->refused) {
        refit_error error;
        if (rft_thread_start(&pool->helpers[pool->started], "refit-copy", help, pool, &error) ==
            REFIT_OK) {
            pool->started++;
            continue;
        }
        pool->refused = true;
        rft_log(REFIT_LOG_WARNING, "copies are shared by %u threads, not %u: %s", pool->started + 1,
                pool->threads, error.text);
    }
}

/* The last wait is for copies that are under way: it ends as they do. */
static void share(rft_host_pool *pool, const rft_copy *copies, uint64_t bytes)
{
    rft_host_job job = {.at = {copies, 0}, .left = bytes};
    rft_lock(&pool->lock);
    start_helpers(pool);
    job.next = pool->jobs;
    pool->jobs = &job;
    rft_cond_wake_all(&pool->work);
    while (job.left != 0) {
        do_part(pool, &job);
    }
    while (job.running != 0) {
        rft_cond_wait_idle(&pool->finished, &pool->lock);
    }
    rft_unlock(&pool->lock);
}

void rft_host_pool_copy(rft_host_pool *pool, const rft_copy *copies, uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        bytes += copies[i].bytes;
    }
    if (pool->threads > 1 && bytes >= SHARE_LEAST) {
        share(pool, copies, bytes);
    } else {
        advance((cursor){copies, 0}, bytes, bytes < STREAM_LEAST ? copy_alone : copy_shared);
    }
}
