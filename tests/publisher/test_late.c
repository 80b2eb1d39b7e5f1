/* Commits that do not wait until workers have applied the version: broadcast.wait staged and none.
 * Who ends such a version, and what is left if it comes to nothing, or is cancelled, or the
 * publisher closes. */
#include "base/clock.h"
#include "scene.h"

#define LONG_MS 30000u

static void open_late(scene *on, refit_wait wait, uint32_t workers)
{
    on->config.broadcast_slots = 2;
    on->config.broadcast_wait = (int32_t)wait;
    scene_open(on, workers, false);
}

/* Begins, writes and commits on this thread: only a commit that waits for nothing returns. */
static void leave(scene *on, uint64_t version)
{
    trainer_begin(&on->trainer, version);
    trainer_write(&on->trainer);
    assert_ok(refit_publisher_commit(on->publisher, NULL));
}

static void await_version(scene *on, uint64_t version)
{
    refit_publisher *publisher = on->publisher;
    int64_t deadline = rft_deadline(LONG_MS);
    rft_lock(&publisher->lock);
    while (publisher->server.current.version != version && rft_ms_until(deadline) > 0)
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, rft_deadline(10));
    rft_unlock(&publisher->lock);
    assert_int_equal(refit_publisher_version(publisher), version);
}

static void await_aborts(scene *on, uint64_t count)
{
    int64_t deadline = rft_deadline(LONG_MS);
    while (trainer_stats(&on->trainer).publish_aborts != count && rft_ms_until(deadline) > 0)
        rft_channel_poll(on->workers[0].channel, -1, 5);
    assert_int_equal(trainer_stats(&on->trainer).publish_aborts, count);
}

/* ---- staged */

ON_SCENE(a_commit_ends_when_workers_have_the_version)
{
    open_late(on, REFIT_WAIT_STAGED, 1);
    raw_worker *worker = &on->workers[0];
    for (uint64_t version = 1; version <= 4; version++) {
        trainer_offer(&on->trainer, version);
        raw_worker_stage(worker);
        trainer_check_bytes(worker, version);
        assert_ok(trainer_join(&on->trainer));
        assert_int_equal(refit_publisher_version(on->publisher), version);
        (void)raw_worker_expect(worker, RFT_COMMIT);
    }
    assert_false(trainer_worker(&on->trainer, "a").committed);
    raw_worker_say_committed(worker);
    raw_worker *other = scene_add(on, "b", false);
    raw_worker_join(other); /* what was said before is heard before */
    assert_true(trainer_worker(&on->trainer, "a").committed);
    assert_int_equal(trainer_worker(&on->trainer, "a").version, 4);
    assert_int_equal(trainer_stats(&on->trainer).workers_evicted, 0);
}

ON_SCENE(a_worker_without_the_version_is_waited_for)
{
    open_late(on, REFIT_WAIT_STAGED, 2);
    trainer_offer(&on->trainer, 1);
    raw_worker_stage(&on->workers[0]);
    raw_worker_offer(&on->workers[1]);
    raw_worker_say_failed(&on->workers[1], REFIT_ERR_HOST_MEMORY, true);
    assert_int_equal(trainer_join(&on->trainer), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(on->publisher), 0);
    (void)raw_worker_expect(&on->workers[0], RFT_ABORT);
}

ON_SCENE(a_wait_is_chosen_between_versions)
{
    refit_error error;
    open_late(on, REFIT_WAIT_APPLIED, 1);
    assert_int_equal(refit_publisher_set_wait(NULL, REFIT_WAIT_NONE, &error), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_set_wait(on->publisher, (refit_wait)3, &error),
                     REFIT_ERR_INVALID);
    trainer_begin(&on->trainer, 1);
    assert_int_equal(refit_publisher_set_wait(on->publisher, REFIT_WAIT_NONE, &error),
                     REFIT_ERR_STATE);
    assert_ok(refit_publisher_abort(on->publisher, NULL));
    assert_ok(refit_publisher_set_wait(on->publisher, REFIT_WAIT_NONE, NULL));
    leave(on, 2);
    scene_renew(on);
    on->config.broadcast_slots = 1;
    scene_open(on, 0, false);
    assert_int_equal(refit_publisher_set_wait(on->publisher, REFIT_WAIT_STAGED, &error),
                     REFIT_ERR_STATE);
    assert_says(&error, "2 slots");
    assert_ok(refit_publisher_set_wait(on->publisher, REFIT_WAIT_APPLIED, NULL));
}

/* ---- none */

typedef struct later_call {
    refit_publisher *publisher;
    refit_status (*make)(refit_publisher *publisher, refit_error *error);
    refit_status status;
    refit_error error;
} later_call;

static refit_status begin(refit_publisher *publisher, refit_error *error)
{
    return refit_publisher_begin(publisher, 0, error);
}

static refit_status declare(refit_publisher *publisher, refit_error *error)
{
    const refit_tensor tensor = {sizeof tensor, "other", REFIT_F32, 1, {4}, 16, REFIT_NO_ALIAS};
    return refit_publisher_declare(publisher, &tensor, 1, error);
}

static refit_status set_wait(refit_publisher *publisher, refit_error *error)
{
    return refit_publisher_set_wait(publisher, REFIT_WAIT_STAGED, error);
}

static void *make_call(void *user)
{
    later_call *it = user;
    it->status = it->make(it->publisher, &it->error);
    return NULL;
}

static refit_status (*const later_calls[])(refit_publisher *, refit_error *) = {begin, declare,
                                                                                set_wait};
#define LATER_CALLS (sizeof later_calls / sizeof later_calls[0])

/* Leaves version 1 on its way to one worker, and makes the call on a thread. */
static rft_thread start_call(scene *on, later_call *it, size_t number)
{
    rft_thread thread;
    scene_renew(on);
    open_late(on, REFIT_WAIT_NONE, 1);
    leave(on, 1);
    assert_int_equal(refit_publisher_version(on->publisher), 0);
    *it = (later_call){.publisher = on->publisher, .make = later_calls[number]};
    assert_ok(rft_thread_start(&thread, "calls", make_call, it, NULL));
    return thread;
}

ON_SCENE(the_next_call_waits_for_a_version_that_was_left)
{
    for (size_t i = 0; i < LATER_CALLS; i++) {
        later_call it;
        rft_thread thread = start_call(on, &it, i);
        raw_worker_stage(&on->workers[0]);
        trainer_check_bytes(&on->workers[0], 1);
        (void)raw_worker_expect(&on->workers[0], RFT_COMMIT);
        rft_thread_join(thread);
        assert_ok(it.status);
        assert_int_equal(refit_publisher_version(on->publisher), 1);
    }
}

ON_SCENE(a_version_that_was_left_is_committed_with_no_call)
{
    open_late(on, REFIT_WAIT_NONE, 1);
    for (uint64_t version = 1; version <= 4; version++) {
        leave(on, version);
        raw_worker_stage(&on->workers[0]);
        await_version(on, version);
        raw_worker_apply(&on->workers[0]);
    }
    assert_int_equal(trainer_stats(&on->trainer).publish_aborts, 0);
}

ON_SCENE(cancelling_the_wait_leaves_the_version_alone)
{
    for (size_t i = 0; i < LATER_CALLS; i++) {
        later_call it;
        rft_thread thread = start_call(on, &it, i);
        refit_publisher_cancel(on->publisher);
        rft_thread_join(thread);
        assert_int_equal(it.status, REFIT_ERR_CANCELLED);
        assert_says(&it.error, "which goes on");
        raw_worker_stage(&on->workers[0]);
        await_version(on, 1);
        raw_worker_apply(&on->workers[0]);
        leave(on, 2); /* the number is free */
    }
}

/* The store is as before at the next call, and a worker that joined meanwhile is served then. */
ON_SCENE(a_version_that_came_to_nothing_is_rolled_back_by_the_next_call)
{
    open_late(on, REFIT_WAIT_APPLIED, 1);
    scene_publish(on, 1);
    assert_ok(refit_publisher_set_wait(on->publisher, REFIT_WAIT_NONE, NULL));
    leave(on, 2);
    raw_worker_offer(&on->workers[0]);
    raw_worker_say_failed(&on->workers[0], REFIT_ERR_HOST_MEMORY, true);
    await_aborts(on, 1);
    assert_int_equal(refit_publisher_version(on->publisher), 1);
    raw_worker *late = scene_add(on, "late", false);
    raw_worker_join(late);
    assert_false(raw_worker_has_heard(late, RFT_OFFER));
    assert_ok(refit_publisher_wait_workers(on->publisher, 2, LONG_MS, NULL));
    raw_worker_stage(late);
    trainer_check_bytes(late, 1);
    raw_worker_apply(late);
    raw_worker_say_bye(&on->workers[0]);
    while (trainer_stats(&on->trainer).workers > 1)
        rft_channel_poll(late->channel, -1, 5);
    leave(on, 3);
    raw_worker_stage(late);
    await_version(on, 3);
    trainer_check_bytes(late, 3);
}

static void *close_it(void *user)
{
    refit_publisher_close(user);
    return NULL;
}

ON_SCENE(a_publisher_that_closes_lets_the_version_end)
{
    rft_thread thread;
    on->config.broadcast_linger_ms = LONG_MS;
    open_late(on, REFIT_WAIT_NONE, 1);
    leave(on, 1);
    assert_ok(rft_thread_start(&thread, "closes", close_it, on->publisher, NULL));
    raw_worker_stage(&on->workers[0]);
    trainer_check_bytes(&on->workers[0], 1);
    (void)raw_worker_expect(&on->workers[0], RFT_COMMIT);
    (void)raw_worker_expect(&on->workers[0], RFT_BYE);
    raw_worker_say_bye(&on->workers[0]);
    rft_thread_join(thread);
    on->publisher = on->trainer.publisher = NULL;
}

ON_SCENE(a_publisher_that_closes_waits_no_longer_than_it_lingers)
{
    on->config.broadcast_linger_ms = 50;
    open_late(on, REFIT_WAIT_NONE, 1);
    leave(on, 1);
    refit_publisher_close(on->publisher);
    on->publisher = on->trainer.publisher = NULL;
    (void)raw_worker_expect(&on->workers[0], RFT_OFFER);
    (void)raw_worker_expect(&on->workers[0], RFT_ABORT);
}

int main(void)
{
    return test_run("late");
}
