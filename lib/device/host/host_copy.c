/*
 * Copies on the CPU: small ones by the thread that asks, large ones shared by bytes with the
 * threads of a pool.
 *
 * A job is a list of copies, with a cursor. Its threads claim the next part of it, some hundred
 * kilobytes that may hold many small copies or a piece of a large one. So the work is shared by
 * bytes, not by copies, and a helper that comes late finds less to do.
 */
#include "device/host/host_copy.h"

#include <string.h>

#include "base/checked.h"
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

typedef struct copy_job {
    rft_pool_job job; /* first, so that it is the job's address */
    cursor at;        /* guarded by the pool's lock, like left */
    uint64_t left;    /* bytes not claimed yet */
    uint32_t threads;
} copy_job;

refit_status rft_host_copy_open(rft_pool *pool, uint32_t threads, refit_error *error)
{
    static const rft_pool_kind copies = {.thread = "refit-copy", .work = "copies"};
    return rft_pool_open(pool, &copies, threads, error);
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

/* Large parts at first, smaller ones towards the end, so that all finish together. */
static uint64_t part_of(const copy_job *copies)
{
    uint64_t part = copies->left / (2 * (uint64_t)copies->threads);
    part = rft_max_u64(rft_min_u64(part, PART_MOST), PART_LEAST);
    return rft_min_u64(part & ~UINT64_C(63), copies->left);
}

static bool claim_part(rft_pool_job *job, rft_pool_part *part)
{
    copy_job *copies = (copy_job *)job;
    if (copies->left == 0) return false;
    uint64_t bytes = part_of(copies);
    *part = (rft_pool_part){.at = copies->at.copy, .from = copies->at.done, .count = bytes};
    copies->at = advance(copies->at, bytes, pass_by);
    copies->left -= bytes;
    return true;
}

static void copy_part(rft_pool_job *job, const rft_pool_part *part, uint32_t worker)
{
    (void)job;
    (void)worker;
    (void)advance((cursor){part->at, part->from}, part->count, copy_shared);
}

void rft_host_copy(rft_pool *pool, const rft_copy *copies, uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        bytes += copies[i].bytes;
    }
    if (pool->threads > 1 && bytes >= SHARE_LEAST) {
        copy_job shared = {.job = {.claim = claim_part, .run = copy_part},
                           .at = {copies, 0},
                           .left = bytes,
                           .threads = pool->threads};
        rft_pool_share(pool, &shared.job);
    } else {
        (void)advance((cursor){copies, 0}, bytes, bytes < STREAM_LEAST ? copy_alone : copy_shared);
    }
}
