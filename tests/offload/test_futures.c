/* Futures: each gives the end of its own operation to any thread, however late it is asked. */
#include "tests/offload/rig.h"

#include <string.h>

#include "base/thread.h"

static refit_future *start_offload(rig *on)
{
    refit_future *future;
    assert_ok(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, &future, &on->error));
    return future;
}

static refit_future *start_restore(rig *on)
{
    refit_future *future;
    assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, &future, &on->error));
    return future;
}

static void a_future_waits_and_says_when_it_is_done(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    faulty_device_stop(on.device);
    refit_future *future = start_offload(&on);
    assert_int_equal(refit_future_done(future), 0);
    assert_int_equal(refit_future_wait(future, 0, &on.error), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_future_wait_group(future, 2, 0, &on.error), REFIT_ERR_TIMEOUT);
    assert_ok(refit_future_wait_group(future, 63, 0, &on.error));
    faulty_device_go(on.device);
    assert_ok(refit_future_wait_group(future, 2, PATIENCE_MS, &on.error));
    assert_ok(refit_future_wait(future, PATIENCE_MS, &on.error));
    assert_int_equal(refit_future_done(future), 1);
    assert_ok(refit_future_wait(future, 0, &on.error));
    refit_future_close(future);
    refit_future_close(NULL);
    rig_close(&on);
}

static void a_future_outlives_the_next_operations(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_HOOKS, NULL);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
    refit_future *failed = start_offload(&on);
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    refit_future *out = start_offload(&on);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    refit_future *back = start_restore(&on);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    faulty_device_stop(on.device);
    refit_future *running = start_offload(&on);
    assert_int_equal(refit_future_wait(failed, 0, &on.error), REFIT_ERR_COPY);
    assert_int_equal(on.error.status, REFIT_ERR_COPY);
    assert_int_equal(refit_future_wait_group(failed, 0, 0, &on.error), REFIT_ERR_COPY);
    assert_ok(refit_future_wait(out, 0, &on.error));
    assert_ok(refit_future_wait(back, 0, &on.error));
    assert_int_equal(refit_future_wait(running, 0, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    refit_future_close(running);
    refit_future_close(failed);
    refit_future_close(out);
    refit_future_close(back);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void a_verb_that_does_nothing_gives_the_future_of_what_is(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    refit_future *never = start_restore(&on);
    assert_int_equal(refit_future_done(never), 1);
    assert_ok(refit_future_wait(never, 0, &on.error));
    faulty_device_stop(on.device);
    refit_future *first = start_offload(&on);
    refit_future *second = start_offload(&on);
    assert_int_equal(refit_future_done(second), 0);
    faulty_device_go(on.device);
    assert_ok(refit_future_wait(second, PATIENCE_MS, &on.error));
    assert_int_equal(refit_future_done(first), 1);
    refit_future *third = start_offload(&on);
    assert_int_equal(refit_future_done(third), 1);
    refit_future_close(never);
    refit_future_close(first);
    refit_future_close(second);
    refit_future_close(third);
    rig_close(&on);
}

static void too_many_futures_keep_an_operation_from_starting(void **state)
{
    (void)state;
    enum { MOST = 64 };
    rig on;
    refit_future *futures[MOST];
    refit_future *more = NULL;
    rig_open(&on, RIG_BOUND, NULL);
    for (int i = 0; i < MOST; i++) {
        futures[i] = start_restore(&on);
    }
    assert_int_equal(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &more, &on.error),
                     REFIT_ERR_BUSY);
    assert_non_null(strstr(on.error.text, "64 futures"));
    assert_null(more);
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    refit_future_close(futures[7]);
    more = start_offload(&on);
    assert_ok(refit_future_wait(more, PATIENCE_MS, &on.error));
    refit_future_close(more);
    for (int i = 0; i < MOST; i++) {
        if (i != 7) refit_future_close(futures[i]);
    }
    rig_close(&on);
}

static void an_operation_that_does_not_start_keeps_no_future(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    for (int i = 0; i < 100; i++) {
        refit_future *future = NULL;
        faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        assert_int_equal(
            refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error),
            REFIT_ERR_COPY);
        assert_null(future);
    }
    assert_int_equal(rig_stats(&on).offload_failures, 100);
    rig_close(&on);
}

static void a_joined_stream_waits_and_the_cpu_goes_on(void **state)
{
    (void)state;
    rig on;
    refit_stream_ref all;
    refit_stream_ref group;
    rig_open(&on, RIG_HOOKS, NULL);
    assert_ok(refit_stream_open(on.device, &all, &on.error));
    assert_ok(refit_stream_open(on.device, &group, &on.error));
    rig_offload(&on);
    faulty_device_stop(on.device);
    refit_future *future = start_restore(&on);
    assert_ok(refit_future_join(future, all, &on.error));
    assert_ok(refit_future_join_group(future, 0, group, &on.error));
    assert_int_equal(refit_stream_wait(on.device, all, 0, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_stream_wait(on.device, group, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_ok(refit_stream_wait(on.device, group, PATIENCE_MS, &on.error));
    rig_check(&on, 8);
    assert_ok(refit_stream_wait(on.device, all, PATIENCE_MS, &on.error));
    rig_check_bytes(&on, true);
    assert_ok(refit_future_join(future, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_future_join_group(future, 1, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_future_join(future, all, &on.error));
    refit_future_close(future);
    assert_ok(refit_stream_close(on.device, all, &on.error));
    assert_ok(refit_stream_close(on.device, group, &on.error));
    rig_close(&on);
}

typedef struct waiter {
    refit_future *future;
    rft_thread thread;
    refit_status status;
} waiter;

static void *wait_long(void *user)
{
    waiter *self = user;
    self->status = refit_future_wait(self->future, PATIENCE_MS, NULL);
    return NULL;
}

static void many_threads_wait_for_one_operation(const char *const *settings, refit_status expected)
{
    enum { WAITERS = 6 };
    rig on;
    waiter waiters[WAITERS];
    rig_open(&on, RIG_HOOKS, settings);
    faulty_device_stop(on.device);
    if (expected != REFIT_OK) {
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 2, expected);
    }
    for (int i = 0; i < WAITERS; i++) {
        waiters[i].future = start_offload(&on);
        assert_ok(rft_thread_start(&waiters[i].thread, "waiter", wait_long, &waiters[i], NULL));
    }
    faulty_device_go(on.device);
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error), expected);
    for (int i = 0; i < WAITERS; i++) {
        rft_thread_join(waiters[i].thread);
        assert_int_equal(waiters[i].status, expected);
        refit_future_close(waiters[i].future);
    }
    rig_restore(&on);
    rig_check_kept(&on);
    rig_close(&on);
}

static void every_waiter_gets_the_same_status(void **state)
{
    (void)state;
    const char *const verified[] = {"offload.verify=true", NULL};
    many_threads_wait_for_one_operation(NULL, REFIT_OK);
    many_threads_wait_for_one_operation(NULL, REFIT_ERR_COPY);
    many_threads_wait_for_one_operation(verified, REFIT_OK);
    many_threads_wait_for_one_operation(verified, REFIT_ERR_COPY);
}

static void arguments_are_checked(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    refit_future *future = start_offload(&on);
    assert_int_equal(refit_future_wait(NULL, 0, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_future_wait_group(future, REFIT_GROUPS, 0, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_future_join(NULL, REFIT_STREAM_NONE, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_future_join_group(future, 99, REFIT_STREAM_NONE, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_future_done(NULL), 0);
    refit_future_close(future);
    rig_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_future_waits_and_says_when_it_is_done),
        cmocka_unit_test(a_future_outlives_the_next_operations),
        cmocka_unit_test(a_verb_that_does_nothing_gives_the_future_of_what_is),
        cmocka_unit_test(too_many_futures_keep_an_operation_from_starting),
        cmocka_unit_test(an_operation_that_does_not_start_keeps_no_future),
        cmocka_unit_test(a_joined_stream_waits_and_the_cpu_goes_on),
        cmocka_unit_test(every_waiter_gets_the_same_status),
        cmocka_unit_test(arguments_are_checked),
    };
    return cmocka_run_group_tests_name("futures", tests, NULL, NULL);
}
