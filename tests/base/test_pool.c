/* Pool: every part is done once, and two workers at once are never the same one. */
#include <stdatomic.h>

#include "base/pool.h"
#include "tests/support/test.h"

#define ITEMS 200u

static const rft_pool_kind kind = {.thread = "pool-test", .work = "items"};

typedef struct bench {
    atomic_uint done[ITEMS];
    atomic_uint busy[RFT_POOL_MOST]; /* items that the worker is at */
    atomic_bool shared;              /* one worker twice at once */
    atomic_uint helped;              /* items that a helper did */
    rft_mutex lock;
    rft_cond met;
    uint32_t waiting; /* guarded by lock */
} bench;

static void do_item(void *user, uint32_t item, uint32_t worker)
{
    bench *b = user;
    if (atomic_fetch_add(&b->busy[worker], 1) != 0) atomic_store(&b->shared, true);
    atomic_fetch_add(&b->done[item], 1);
    if (worker != 0) atomic_fetch_add(&b->helped, 1);
    atomic_fetch_sub(&b->busy[worker], 1);
}

TEST(every_item_is_done_once)
{
    for (uint32_t threads = 1; threads <= 5; threads++) {
        rft_pool pool;
        assert_ok(rft_pool_open(&pool, &kind, threads, NULL));
        for (uint32_t count = 0; count <= ITEMS; count += 25) {
            bench b = {0};
            rft_pool_items(&pool, count, do_item, &b);
            for (uint32_t i = 0; i < ITEMS; i++)
                assert_int_equal(b.done[i], i < count ? 1 : 0);
            assert_false(b.shared);
        }
        assert_int_equal(pool.started, threads - 1);
        rft_pool_close(&pool);
    }
}

/* No thread goes on before all four are there. */
static void meet(void *user, uint32_t item, uint32_t worker)
{
    bench *b = user;
    do_item(user, item, worker);
    rft_lock(&b->lock);
    b->waiting++;
    rft_cond_wake_all(&b->met);
    while (b->waiting < 4)
        rft_cond_wait_idle(&b->met, &b->lock);
    rft_unlock(&b->lock);
}

TEST(items_are_done_at_once)
{
    bench b = {0};
    rft_pool pool;
    assert_ok(rft_mutex_open(&b.lock, NULL));
    assert_ok(rft_cond_open(&b.met, NULL));
    assert_ok(rft_pool_open(&pool, &kind, 4, NULL));
    rft_pool_items(&pool, 4, meet, &b);
    assert_int_equal(b.helped, 3);
    rft_pool_close(&pool);
    rft_cond_close(&b.met);
    rft_mutex_close(&b.lock);
}

TEST(no_thread_starts_before_there_is_work_to_share)
{
    bench b = {0};
    rft_pool pool;
    assert_ok(rft_pool_open(&pool, &kind, 4, NULL));
    rft_pool_items(&pool, 0, do_item, &b);
    rft_pool_items(&pool, 1, do_item, &b);
    assert_int_equal(pool.started, 0);
    assert_int_equal(b.helped, 0);
    rft_pool_close(&pool);
    rft_pool_close(&pool);
}

TEST(threads_have_a_limit_and_a_default)
{
    rft_pool pool;
    assert_ok(rft_pool_open(&pool, &kind, 0, NULL));
    assert_in_range(pool.threads, 1, 8);
    rft_pool_close(&pool);
    assert_ok(rft_pool_open(&pool, &kind, 1000, NULL));
    assert_int_equal(pool.threads, RFT_POOL_MOST);
    rft_pool_close(&pool);
}

/* ---- Jobs of several owners -------------------------------------------------------------- */

typedef struct sum_job {
    rft_pool_job job;
    uint64_t left; /* parts to claim; guarded by the pool's lock */
    atomic_uint_fast64_t sum;
} sum_job;

static bool claim_one(rft_pool_job *job, rft_pool_part *part)
{
    sum_job *it = (sum_job *)job;
    if (it->left == 0) return false;
    *part = (rft_pool_part){.at = it, .from = it->left--, .count = 1};
    return true;
}

static void add_one(rft_pool_job *job, const rft_pool_part *part, uint32_t worker)
{
    (void)worker;
    if (part->at == job) atomic_fetch_add(&((sum_job *)job)->sum, part->from);
}

static void *share_jobs(void *user)
{
    rft_pool *pool = user;
    for (uint64_t parts = 0; parts < ITEMS; parts++) {
        sum_job it = {.job = {.claim = claim_one, .run = add_one}, .left = parts};
        rft_pool_share(pool, &it.job);
        if (it.sum != parts * (parts + 1) / 2) return "a part is missing, or was done twice";
    }
    return NULL;
}

TEST(several_threads_may_ask_at_once)
{
    rft_pool pool;
    rft_thread others[2];
    assert_ok(rft_pool_open(&pool, &kind, 3, NULL));
    for (int i = 0; i < 2; i++)
        assert_ok(rft_thread_start(&others[i], "owner", share_jobs, &pool, NULL));
    assert_null(share_jobs(&pool));
    for (int i = 0; i < 2; i++) {
        void *wrong;
        assert_int_equal(pthread_join(others[i], &wrong), 0);
        assert_null(wrong);
    }
    assert_null(pool.jobs);
    rft_pool_close(&pool);
}

int main(void)
{
    return test_run("pool");
}
