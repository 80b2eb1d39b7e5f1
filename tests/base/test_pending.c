/* The counter of payloads in flight: it waits for zero, wakes at once, and keeps its deadline. */
#include "base/clock.h"
#include "base/thread.h"
#include "tests/support/test.h"

#define ROUNDS 2000

static void counts_up_and_down(void **state)
{
    rft_pending pending = {0};
    assert_int_equal(rft_pending_count(&pending), 0);
    rft_pending_raise(&pending);
    rft_pending_raise(&pending);
    assert_int_equal(rft_pending_count(&pending), 2);
    rft_pending_lower(&pending);
    assert_int_equal(rft_pending_count(&pending), 1);
}

static void zero_is_not_waited_for(void **state)
{
    rft_pending pending = {0};
    assert_true(rft_pending_wait(&pending, 0));
}

static void deadline_ends_the_wait_and_the_count_stays(void **state)
{
    rft_pending pending = {0};
    rft_pending_raise(&pending);
    assert_false(rft_pending_wait(&pending, rft_deadline(5)));
    assert_int_equal(rft_pending_count(&pending), 1);
}

static void *lower_all(void *user)
{
    for (int i = 0; i < ROUNDS; i++) {
        rft_pending_lower(user);
    }
    return NULL;
}

static void last_one_of_another_thread_wakes(void **state)
{
    for (int round = 0; round < 50; round++) {
        rft_pending pending = {0};
        rft_thread thread;
        for (int i = 0; i < ROUNDS; i++) {
            rft_pending_raise(&pending);
        }
        assert_ok(rft_thread_start(&thread, "lower", lower_all, &pending, NULL));
        bool empty = rft_pending_wait(&pending, rft_deadline(20000));
        rft_thread_join(thread);
        assert_true(empty);
        assert_int_equal(rft_pending_count(&pending), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_up_and_down),
        cmocka_unit_test(zero_is_not_waited_for),
        cmocka_unit_test(deadline_ends_the_wait_and_the_count_stays),
        cmocka_unit_test(last_one_of_another_thread_wakes),
    };
    return cmocka_run_group_tests_name("pending", tests, NULL, NULL);
}
