/* refit_publisher_cancel ends each of the publisher's waits, leaves the state that the header
 * states, and ends one wait only. */
#include <signal.h>

#include "base/clock.h"
#include "scene.h"

#define LONG_MS 30000u

/* Waits until the call on the trainer's thread waits in that state: it releases the lock nowhere
 * else. */
static void await_state(scene *on, rft_transaction_state state)
{
    refit_publisher *publisher = on->publisher;
    int64_t deadline = rft_deadline(LONG_MS);
    rft_lock(&publisher->lock);
    while (publisher->server.transaction.state != state && rft_ms_until(deadline) > 0)
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, rft_deadline(10));
    rft_transaction_state now = publisher->server.transaction.state;
    rft_unlock(&publisher->lock);
    assert_int_equal(now, state);
}

static refit_status join_cancelled(scene *on)
{
    refit_publisher_cancel(on->publisher);
    refit_status status = trainer_join(&on->trainer);
    if (status != REFIT_OK) assert_non_null(strstr(on->trainer.error.text, "cancel"));
    return status;
}

/* ---- wait_workers */

typedef struct waiting {
    refit_publisher *publisher;
    refit_status status;
} waiting;

static void *wait_for_one(void *user)
{
    waiting *it = user;
    it->status = refit_publisher_wait_workers(it->publisher, 1, LONG_MS, NULL);
    return NULL;
}

ON_SCENE(a_wait_for_workers_ends)
{
    rft_thread thread;
    scene_open(on, 0, false);
    waiting it = {on->publisher, REFIT_OK};
    for (int i = 0; i < 20; i++) { /* in some turns it waits already, in others not yet */
        assert_ok(rft_thread_start(&thread, "waits", wait_for_one, &it, NULL));
        refit_publisher_cancel(it.publisher);
        rft_thread_join(thread);
        assert_int_equal(it.status, REFIT_ERR_CANCELLED);
    }
}

ON_SCENE(one_with_nothing_to_end_is_for_the_next_wait_and_told_once)
{
    refit_error error;
    scene_open(on, 0, false);
    refit_publisher_cancel(NULL);
    refit_publisher_cancel(on->publisher);
    refit_publisher_cancel(on->publisher);
    assert_int_equal(refit_publisher_wait_workers(on->publisher, 0, 0, &error),
                     REFIT_ERR_CANCELLED);
    assert_ok(refit_publisher_wait_workers(on->publisher, 0, 0, &error));
    assert_int_equal(refit_publisher_wait_workers(on->publisher, 1, 0, &error), REFIT_ERR_TIMEOUT);
    refit_publisher_cancel(on->publisher);
}

static refit_publisher *interrupted;

static void handle(int number)
{
    (void)number;
    refit_publisher_cancel(interrupted);
}

ON_SCENE(a_signal_handler_may_cancel)
{
    rft_thread thread;
    struct sigaction before, action = {.sa_handler = handle};
    scene_open(on, 0, false);
    waiting it = {on->publisher, REFIT_OK};
    interrupted = it.publisher;
    assert_int_equal(sigaction(SIGUSR1, &action, &before), 0);
    assert_ok(rft_thread_start(&thread, "waits", wait_for_one, &it, NULL));
    assert_int_equal(raise(SIGUSR1), 0);
    rft_thread_join(thread);
    assert_int_equal(it.status, REFIT_ERR_CANCELLED);
    assert_int_equal(sigaction(SIGUSR1, &before, NULL), 0);
}

/* ---- begin */

ON_SCENE(a_begin_that_was_cancelled_before_has_begun_nothing)
{
    refit_error error;
    scene_open(on, 1, false);
    scene_publish(on, 1);
    refit_publisher_cancel(on->publisher);
    assert_int_equal(refit_publisher_begin(on->publisher, 1, &error), REFIT_ERR_STALE);
    assert_int_equal(refit_publisher_begin(on->publisher, 2, &error), REFIT_ERR_CANCELLED);
    assert_int_equal(refit_publisher_abort(on->publisher, &error), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_version(on->publisher), 1);
    scene_publish(on, 2); /* the number is free */
}

/* With one slot and shared memory begin waits for the workers that read the version before. */
ON_SCENE(a_begin_that_waits_for_a_reader_ends_and_evicts_no_worker)
{
    scene_open(on, 1, true);
    scene_publish(on, 1);
    trainer_start(&on->trainer, TRAINER_BEGIN, 2);
    await_state(on, RFT_TRANSACTION_PREPARING);
    assert_int_equal(join_cancelled(on), REFIT_ERR_CANCELLED);
    assert_int_equal(trainer_stats(&on->trainer).workers, 1);
    assert_int_equal(trainer_stats(&on->trainer).workers_evicted, 0);
    trainer_check_bytes(&on->workers[0], 1);
    raw_worker_say_released(&on->workers[0], 1);
    scene_publish(on, 2);
}

/* ---- commit */

ON_SCENE(a_commit_that_was_cancelled_before_aborts_the_version)
{
    refit_error error;
    for (int written = 0; written < 2; written++) {
        scene_renew(on);
        scene_open(on, 1, false);
        scene_publish(on, 1);
        trainer_begin(&on->trainer, 2);
        raw_worker_offer(&on->workers[0]);
        if (written) trainer_write(&on->trainer);
        refit_publisher_cancel(on->publisher);
        assert_int_equal(refit_publisher_commit(on->publisher, &error), REFIT_ERR_CANCELLED);
        assert_says(&error, "aborted");
        assert_int_equal(refit_publisher_commit(on->publisher, &error), REFIT_ERR_STATE);
        assert_int_equal(refit_publisher_version(on->publisher), 1);
        assert_int_equal(raw_worker_expect(&on->workers[0], RFT_ABORT)->as.failed.code,
                         REFIT_ERR_CANCELLED);
        scene_publish(on, 3);
    }
}

/* One worker has staged the version, one has not. Both are told to drop it, and a worker that joins
 * later gets the version before, bit for bit. */
ON_SCENE(a_commit_that_waits_for_stages_aborts_the_version)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        scene_renew(on);
        on->config.broadcast_slots = slots;
        scene_open(on, 2, false);
        scene_publish(on, 1);
        trainer_offer(&on->trainer, 2);
        raw_worker_stage(&on->workers[0]);
        raw_worker_offer(&on->workers[1]);
        await_state(on, RFT_TRANSACTION_STAGING);
        assert_int_equal(join_cancelled(on), REFIT_ERR_CANCELLED);
        assert_int_equal(refit_publisher_version(on->publisher), 1);
        (void)raw_worker_expect(&on->workers[0], RFT_ABORT);
        assert_ok(trainer_worker(&on->trainer, "b").status); /* no worker is blamed */
        assert_int_equal(trainer_stats(&on->trainer).workers, 2);
        raw_worker *late = scene_add(on, "late", false);
        raw_worker_join(late);
        raw_worker_stage(late);
        trainer_check_bytes(late, 1);
    }
}

/* COMMIT is out: one has applied it, the other says so later. */
ON_SCENE(a_commit_that_waits_for_applies_leaves_the_version)
{
    scene_open(on, 2, false);
    trainer_offer(&on->trainer, 1);
    raw_worker_stage(&on->workers[0]);
    raw_worker_stage(&on->workers[1]);
    raw_worker_apply(&on->workers[0]);
    await_state(on, RFT_TRANSACTION_COMMITTING);
    assert_int_equal(join_cancelled(on), REFIT_ERR_CANCELLED);
    assert_int_equal(refit_publisher_version(on->publisher), 1);
    assert_int_equal(trainer_stats(&on->trainer).workers, 2);
    assert_int_equal(trainer_stats(&on->trainer).publish_count, 1);
    raw_worker_apply(&on->workers[1]);
    scene_publish(on, 2);
    assert_true(trainer_worker(&on->trainer, "b").committed);
    assert_int_equal(trainer_stats(&on->trainer).workers_evicted, 0);
}

/* A worker that is no longer awaited is not evicted for silence about the old version, and is
 * offered the next one. */
ON_SCENE(worker_that_never_said_committed_is_offered_the_next_version)
{
    scene_open(on, 1, false);
    trainer_offer(&on->trainer, 1);
    raw_worker_stage(&on->workers[0]);
    (void)raw_worker_expect(&on->workers[0], RFT_COMMIT);
    await_state(on, RFT_TRANSACTION_COMMITTING);
    assert_int_equal(join_cancelled(on), REFIT_ERR_CANCELLED);
    scene_publish(on, 2);
    assert_int_equal(trainer_stats(&on->trainer).workers_evicted, 0);
}

int main(void)
{
    return test_run("cancel");
}
