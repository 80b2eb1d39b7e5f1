/* Encoders: every item is done once, by workers that never share a desk, however often. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "store/encoders.h"

#define ITEMS 200u

typedef struct bench {
    atomic_uint done[ITEMS];
    atomic_uint busy[RFT_ENCODERS_MOST]; /* items that the worker is at */
    atomic_bool shared;                  /* a desk by two at once */
    atomic_uint helped;                  /* items that a helper did */
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

static void every_item_is_done_once(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        rft_encoders encoders;
        assert_int_equal(rft_encoders_open(&encoders, threads, NULL), REFIT_OK);
        for (uint32_t count = 0; count <= ITEMS; count += 25) {
            bench b = {0};
            rft_encoders_run(&encoders, count, do_item, &b);
            for (uint32_t i = 0; i < ITEMS; i++)
                assert_int_equal(b.done[i], i < count ? 1 : 0);
            assert_false(b.shared);
        }
        assert_int_equal(encoders.started, threads - 1);
        rft_encoders_close(&encoders);
    }
}

/* Nobody goes on before all four are there. */
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

static void items_are_done_at_once(void **state)
{
    (void)state;
    bench b = {0};
    rft_encoders encoders;
    assert_int_equal(rft_mutex_open(&b.lock, NULL), REFIT_OK);
    assert_int_equal(rft_cond_open(&b.met, NULL), REFIT_OK);
    assert_int_equal(rft_encoders_open(&encoders, 4, NULL), REFIT_OK);
    rft_encoders_run(&encoders, 4, meet, &b);
    assert_int_equal(b.helped, 3);
    rft_encoders_close(&encoders);
    rft_cond_close(&b.met);
    rft_mutex_close(&b.lock);
}

static void no_thread_starts_before_there_is_work_to_share(void **state)
{
    (void)state;
    bench b = {0};
    rft_encoders encoders;
    assert_int_equal(rft_encoders_open(&encoders, 4, NULL), REFIT_OK);
    rft_encoders_run(&encoders, 0, do_item, &b);
    rft_encoders_run(&encoders, 1, do_item, &b);
    assert_int_equal(encoders.started, 0);
    assert_int_equal(b.helped, 0);
    rft_encoders_close(&encoders);
    rft_encoders_close(&encoders);
}

static void threads_have_a_limit_and_a_default(void **state)
{
    (void)state;
    rft_encoders encoders;
    assert_int_equal(rft_encoders_open(&encoders, 0, NULL), REFIT_OK);
    assert_in_range(encoders.threads, 1, 8);
    rft_encoders_close(&encoders);
    assert_int_equal(rft_encoders_open(&encoders, 1000, NULL), REFIT_OK);
    assert_int_equal(encoders.threads, RFT_ENCODERS_MOST);
    rft_encoders_close(&encoders);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_is_done_once),
        cmocka_unit_test(items_are_done_at_once),
        cmocka_unit_test(no_thread_starts_before_there_is_work_to_share),
        cmocka_unit_test(threads_have_a_limit_and_a_default),
    };
    return cmocka_run_group_tests_name("encoders", tests, NULL, NULL);
}
