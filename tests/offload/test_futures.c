/* Futures: each gives the end of its own operation to any thread, however late it is asked. */
#include "tests/offload/rig.h"

#include "base/thread.h"

static const char *const verified[] = {"offload.verify=true", NULL};

SCENE(a_future_waits_and_says_when_it_is_done, 0)
{
    faulty_device_stop(on->device);
    refit_future *future = rig_start(on, false);
    assert_int_equal(refit_future_done(future), 0);
    assert_int_equal(refit_future_wait(future, 0, &on->error), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_future_wait_group(future, 2, 0, &on->error), REFIT_ERR_TIMEOUT);
    assert_ok(refit_future_wait_group(future, 63, 0, &on->error));
    faulty_device_go(on->device);
    assert_ok(refit_future_wait_group(future, 2, TIMEOUT_MS, &on->error));
    assert_ok(refit_future_wait(future, TIMEOUT_MS, &on->error));
    assert_int_equal(refit_future_done(future), 1);
    assert_ok(refit_future_wait(future, 0, &on->error));
    refit_future_close(future);
    refit_future_close(NULL);
}

SCENE(a_future_outlives_the_next_operations, .memory = RIG_HOOKS, .settings = verified)
{
    refit_future *failed = rig_start(on, false);
    rig_flip(on, 0);
    assert_int_equal(finish(on), REFIT_ERR_CORRUPT);
    rig_flip(on, 0);
    refit_future *out = rig_start(on, false);
    assert_ok(finish(on));
    refit_future *back = rig_start(on, true);
    assert_ok(finish(on));
    faulty_device_stop(on->device);
    refit_future *running = rig_start(on, false);
    assert_int_equal(refit_future_wait(failed, 0, &on->error), REFIT_ERR_CORRUPT);
    assert_int_equal(on->error.status, REFIT_ERR_CORRUPT);
    assert_int_equal(refit_future_wait_group(failed, 0, 0, &on->error), REFIT_ERR_CORRUPT);
    assert_ok(refit_future_wait(out, 0, &on->error));
    assert_ok(refit_future_wait(back, 0, &on->error));
    assert_int_equal(refit_future_wait(running, 0, &on->error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on->device);
    refit_future_close(running);
    refit_future_close(failed);
    refit_future_close(out);
    refit_future_close(back);
    assert_ok(finish(on));
    rig_restore(on);
    rig_check_bytes(on, true);
}

SCENE(a_verb_that_does_nothing_gives_the_future_of_what_is, 0)
{
    refit_future *never = rig_start(on, true);
    assert_int_equal(refit_future_done(never), 1);
    assert_ok(refit_future_wait(never, 0, &on->error));
    faulty_device_stop(on->device);
    refit_future *first = rig_start(on, false);
    refit_future *second = rig_start(on, false);
    assert_int_equal(refit_future_done(second), 0);
    faulty_device_go(on->device);
    assert_ok(refit_future_wait(second, TIMEOUT_MS, &on->error));
    assert_int_equal(refit_future_done(first), 1);
    refit_future *third = rig_start(on, false);
    assert_int_equal(refit_future_done(third), 1);
    refit_future_close(never);
    refit_future_close(first);
    refit_future_close(second);
    refit_future_close(third);
}

SCENE(too_many_futures_keep_an_operation_from_starting, 0)
{
    enum { MOST = 64 };
    refit_future *futures[MOST], *more = NULL;
    for (int i = 0; i < MOST; i++)
        futures[i] = rig_start(on, true);
    assert_int_equal(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, &more, &on->error),
                     REFIT_ERR_BUSY);
    assert_says(&on->error, "64 futures");
    assert_null(more);
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    refit_future_close(futures[7]);
    more = rig_start(on, false);
    assert_ok(refit_future_wait(more, TIMEOUT_MS, &on->error));
    refit_future_close(more);
    for (int i = 0; i < MOST; i++) {
        if (i != 7) refit_future_close(futures[i]);
    }
}

SCENE(an_operation_that_does_not_start_keeps_no_future, 0)
{
    for (int i = 0; i < 100; i++) {
        refit_future *future = NULL;
        faulty_device_fail(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        assert_int_equal(
            refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, &future, &on->error),
            REFIT_ERR_COPY);
        assert_null(future);
    }
    assert_int_equal(rig_stats(on).offload_failures, 100);
}

SCENE(a_joined_stream_waits_and_the_cpu_goes_on, .memory = RIG_HOOKS)
{
    refit_stream_ref all, group;
    assert_ok(refit_stream_open(on->device, &all, &on->error));
    assert_ok(refit_stream_open(on->device, &group, &on->error));
    rig_offload(on);
    faulty_device_stop(on->device);
    refit_future *future = rig_start(on, true);
    assert_ok(refit_future_join(future, all, &on->error));
    assert_ok(refit_future_join_group(future, 0, group, &on->error));
    assert_int_equal(refit_stream_wait(on->device, all, 0, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_stream_wait(on->device, group, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(on->device);
    assert_ok(refit_stream_wait(on->device, group, TIMEOUT_MS, &on->error));
    rig_check(on, 8);
    assert_ok(refit_stream_wait(on->device, all, TIMEOUT_MS, &on->error));
    rig_check_bytes(on, true);
    assert_ok(refit_future_join(future, REFIT_STREAM_NONE, &on->error));
    assert_ok(refit_future_join_group(future, 1, REFIT_STREAM_NONE, &on->error));
    assert_ok(refit_future_join(future, all, &on->error));
    refit_future_close(future);
    assert_ok(refit_stream_close(on->device, all, &on->error));
    assert_ok(refit_stream_close(on->device, group, &on->error));
}

typedef struct waiter {
    refit_future *future;
    rft_thread thread;
    refit_status status;
} waiter;

static void *wait_long(void *user)
{
    waiter *self = user;
    self->status = refit_future_wait(self->future, TIMEOUT_MS, NULL);
    return NULL;
}

SCENE(every_waiter_gets_the_same_status, .memory = RIG_HOOKS)
{
    enum { WAITERS = 6 };
    static const refit_status ends[] = {REFIT_OK, REFIT_ERR_DEVICE};
    for (size_t at = 0; at < COUNT_OF(ends); at++) {
        waiter waiters[WAITERS];
        faulty_device_stop(on->device);
        if (ends[at] != REFIT_OK) faulty_device_lose(on->device, FAULTY_COPY_BATCH, 2);
        for (int i = 0; i < WAITERS; i++) {
            waiters[i].future = rig_start(on, false);
            assert_ok(rft_thread_start(&waiters[i].thread, "waiter", wait_long, &waiters[i], NULL));
        }
        faulty_device_go(on->device);
        assert_int_equal(finish(on), ends[at]);
        for (int i = 0; i < WAITERS; i++) {
            rft_thread_join(waiters[i].thread);
            assert_int_equal(waiters[i].status, ends[at]);
            refit_future_close(waiters[i].future);
        }
        if (ends[at] != REFIT_OK) continue;
        rig_restore(on);
        rig_check_kept(on);
    }
}
SCENE_AGAIN(every_waiter_gets_the_same_status, verified, .memory = RIG_HOOKS, .settings = verified)

SCENE(arguments_are_checked, 0)
{
    refit_future *future = rig_start(on, false);
    assert_invalid(refit_future_wait(NULL, 0, &on->error));
    assert_invalid(refit_future_wait_group(future, REFIT_GROUPS, 0, &on->error));
    assert_invalid(refit_future_join(NULL, REFIT_STREAM_NONE, &on->error));
    assert_invalid(refit_future_join_group(future, 99, REFIT_STREAM_NONE, &on->error));
    assert_int_equal(refit_future_done(NULL), 0);
    refit_future_close(future);
}

int main(void)
{
    return test_run("futures");
}
