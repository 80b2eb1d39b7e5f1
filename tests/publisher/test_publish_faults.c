/* Workers that fail, lie, fall silent or vanish in each phase: which worker is blamed, what is
 * committed, and that others do not notice. */
#include "scene.h"

#include "tests/support/file_size_limit.h"

#define SOON_MS 100 /* what is waited for does not come */

/* One worker does as it should, the other does not. */
static raw_worker *good(scene *on)
{
    return &on->workers[0];
}

static raw_worker *bad(scene *on)
{
    return &on->workers[1];
}

/* The first version, which the good one has staged. */
static void offer(scene *on, bool shm)
{
    scene_open(on, 2, shm);
    trainer_offer(&on->trainer, 1);
    raw_worker_stage(good(on));
}

static void expect_abort(raw_worker *worker, uint64_t version)
{
    const rft_message *abort = raw_worker_expect(worker, RFT_ABORT);
    assert_int_equal(abort->as.failed.version, version);
}

/* Waits until the publisher has heard all that the worker has said: it answers a beat about a
 * version that it does not know, and may have answered others before. */
static void await_heard(raw_worker *worker)
{
    raw_worker_beat(worker, 9);
    while (raw_worker_expect(worker, RFT_ABORT)->as.failed.version != 9)
        ;
}

static void publish_to_good(scene *on, uint64_t version)
{
    trainer_start(&on->trainer, TRAINER_PUBLISH, version);
    scene_take(good(on), version);
    assert_ok(trainer_join(&on->trainer));
    raw_worker_say_released(good(on), version);
}

static void leave(scene *on)
{
    raw_worker_say_bye(bad(on));
    while (trainer_worker(&on->trainer, "b").subscribed)
        await_heard(good(on));
}

/* ---- While staging: the version is aborted */

/* The good worker is told, and the next version is committed with it alone. (test_transaction.c has
 * all ways in which a worker can be lost.) */
ON_SCENE(worker_that_fails_aborts_the_version)
{
    offer(on, true);
    raw_worker_offer(bad(on));
    raw_worker_say_failed(bad(on), REFIT_ERR_HOST_MEMORY, true);
    expect_abort(good(on), 1);
    assert_int_equal(trainer_join(&on->trainer), REFIT_ERR_PEER);
    assert_non_null(strstr(on->trainer.error.text, "worker b"));
    const refit_worker_info info = trainer_worker(&on->trainer, "b");
    assert_int_equal(info.status, REFIT_ERR_HOST_MEMORY);
    assert_string_equal(info.reason, "the test wants it so");
    assert_true(info.subscribed);
    assert_int_equal(refit_publisher_version(on->publisher), 0);
    assert_int_equal(trainer_stats(&on->trainer).publish_aborts, 1);
    assert_ok(trainer_worker(&on->trainer, "a").status);
    leave(on);
    publish_to_good(on, 2);
}

/* The timeout is short once nothing more has to come in time. */
ON_SCENE(late_or_silent_worker_is_evicted_and_has_to_join_again)
{
    for (int silent = 0; silent < 2; silent++) {
        const refit_status status = silent ? REFIT_ERR_PEER : REFIT_ERR_TIMEOUT;
        scene_renew(on);
        scene_open(on, 1, false);
        raw_worker *lost = &on->workers[0];
        if (!silent) publisher_set_stage_timeout(on->publisher, SOON_MS);
        trainer_offer(&on->trainer, 1);
        if (silent) publisher_set_silence(on->publisher, SOON_MS);
        assert_int_equal(trainer_join(&on->trainer), status);
        assert_non_null(strstr(on->trainer.error.text, "worker a"));
        assert_int_equal(trainer_worker(&on->trainer, "a").status, status);
        assert_int_equal(trainer_stats(&on->trainer).workers_evicted, 1);
        publisher_set_stage_timeout(on->publisher, on->config.broadcast_stage_timeout_ms);
        publisher_set_silence(on->publisher, on->config.broadcast_heartbeat_timeout_ms);
        raw_worker_offer(lost);
        (void)raw_worker_expect(lost, RFT_BYE);
        raw_worker_beat(lost, 0);
        const rft_message *refuse = raw_worker_expect(lost, RFT_REFUSE);
        assert_int_equal(refuse->as.refuse.code, REFIT_ERR_STALE);
        assert_false(refuse->as.refuse.final);
        raw_worker_join(lost);
        trainer_wait_workers(&on->trainer, 1);
        scene_publish(on, 2);
    }
}

/* ---- After the decision: the version stays */

/* All have applied the first version; the bad worker still maps it. */
static void open_with_a_reader(scene *on, uint32_t slots, refit_shm shm)
{
    scene_renew(on);
    on->config.broadcast_slots = slots;
    on->config.broadcast_shm = (int32_t)shm;
    scene_open(on, 2, true);
    scene_publish(on, 1);
    raw_worker_say_released(good(on), 1);
    await_heard(good(on));
}

/* With one slot begin evicts a worker that does not let go; with two the worker goes by itself.
 * What it has mapped never changes, however long it stays. */
ON_SCENE(bytes_that_a_lost_worker_maps_never_change)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        open_with_a_reader(on, slots, REFIT_SHM_AUTO);
        if (slots == 1) publisher_set_stage_timeout(on->trainer.publisher, SOON_MS);
        if (slots == 2) leave(on);
        trainer_begin(&on->trainer, 2);
        publisher_set_stage_timeout(on->trainer.publisher, on->config.broadcast_stage_timeout_ms);
        assert_int_equal(trainer_stats(&on->trainer).workers, 1);
        trainer_write(&on->trainer);
        trainer_start(&on->trainer, TRAINER_COMMIT, 2);
        scene_take(good(on), 2);
        assert_ok(trainer_join(&on->trainer));
        raw_worker_say_released(good(on), 2);
        for (uint64_t version = 3; version <= 4; version++) {
            publish_to_good(on, version);
            trainer_check_bytes(bad(on), 1);
        }
    }
}

/* The slot that the lost worker maps is to be replaced while no shared memory can be had. */
static void lose_a_reader(scene *on, uint32_t slots, refit_shm shm)
{
    open_with_a_reader(on, slots, shm);
    leave(on);
    if (slots == 2) publish_to_good(on, 2);
}

ON_SCENE(sockets_take_over_where_shared_memory_has_run_out)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        lose_a_reader(on, slots, REFIT_SHM_AUTO);
        assert_int_equal(trainer_worker(&on->trainer, "a").path, REFIT_PATH_SHM);
        struct rlimit before = file_size_limit_to(0);
        for (uint64_t version = 3; version <= 5; version++) {
            publish_to_good(on, version);
            assert_int_equal(trainer_worker(&on->trainer, "a").path, REFIT_PATH_SOCKET);
            trainer_check_bytes(bad(on), 1);
        }
        file_size_limit_back(&before);
    }
}

ON_SCENE(required_shared_memory_that_is_missing_stops_only_this_begin)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        lose_a_reader(on, slots, REFIT_SHM_REQUIRE);
        struct rlimit before = file_size_limit_to(0);
        for (int i = 0; i < 2; i++)
            assert_int_equal(refit_publisher_begin(on->publisher, 3, NULL), REFIT_ERR_SYSTEM);
        file_size_limit_back(&before);
        publish_to_good(on, 3);
        assert_int_equal(trainer_worker(&on->trainer, "a").path, REFIT_PATH_SHM);
    }
}

ON_SCENE(what_is_said_twice_is_answered_twice)
{
    offer(on, false);
    raw_worker *worker = good(on);
    raw_worker_say_staged(worker);
    raw_worker_stage(bad(on));
    (void)raw_worker_expect(worker, RFT_COMMIT);
    raw_worker_beat(worker, 1);
    (void)raw_worker_expect(worker, RFT_COMMIT);
    raw_worker_say_staged(worker);
    raw_worker_apply(worker);
    raw_worker_say_committed(worker);
    raw_worker_apply(bad(on));
    assert_ok(trainer_join(&on->trainer));
    raw_worker_say_committed(worker);
    await_heard(worker);
    assert_int_equal(trainer_worker(&on->trainer, "a").version, 1);
}

/* COMMITTED was lost: the next beat says it. */
ON_SCENE(beat_makes_up_for_a_lost_answer)
{
    offer(on, false);
    raw_worker_stage(bad(on));
    raw_worker_apply(good(on));
    (void)raw_worker_expect(bad(on), RFT_COMMIT);
    bad(on)->held = (rft_version_id){bad(on)->epoch, 1, bad(on)->digest};
    raw_worker_beat(bad(on), 0);
    assert_ok(trainer_join(&on->trainer));
}

ON_SCENE(garbage_costs_only_its_sender)
{
    static const char *const garbage[] = {"", "x", "\x81\xa1k\xa5hello", "\x81\xa1k\xa7welcome",
                                          "\xdd\xff\xff\xff\xff"};
    for (size_t i = 0; i < COUNT_OF(garbage); i++) {
        scene_renew(on);
        scene_open(on, 2, false);
        trainer_begin(&on->trainer, 1);
        raw_worker_offer(bad(on));
        raw_worker_send_bytes(bad(on), garbage[i], strlen(garbage[i]));
        (void)raw_worker_expect(bad(on), RFT_BYE);
        raw_worker_send_bytes(bad(on), garbage[i], strlen(garbage[i]));
        do /* a beat that it had sent meanwhile is refused, too, and does not count */
            (void)raw_worker_expect(bad(on), RFT_REFUSE);
        while (trainer_stats(&on->trainer).messages_refused < 2);
        assert_int_equal(trainer_stats(&on->trainer).messages_refused, 2);
        assert_true(trainer_worker(&on->trainer, "a").subscribed);
        assert_ok(refit_publisher_abort(on->publisher, NULL));
        raw_worker_offer(good(on));
        expect_abort(good(on), 1);
        publish_to_good(on, 2);
    }
}

ON_SCENE(worker_that_asks_for_the_impossible_is_evicted)
{
    scene_open(on, 2, false);
    trainer_begin(&on->trainer, 1);
    raw_worker_offer(bad(on));
    raw_worker_resend(bad(on), 0x7fffffff);
    (void)raw_worker_expect(bad(on), RFT_BYE);
    raw_worker_join(bad(on));
    raw_worker_offer(bad(on));
    raw_worker_say_staged(bad(on)); /* before it is written */
    (void)raw_worker_expect(bad(on), RFT_BYE);
}

/* Through inproc, which keeps the messages that a worker has not read when the trainer closes: over
 * TCP ZeroMQ drops them once the connection has ended (channel.c). */
ON_SCENE(close_in_every_phase_tells_the_workers)
{
    for (int phase = 0; phase < 3; phase++) {
        scene_renew(on);
        (void)snprintf(on->config.broadcast_endpoint, sizeof on->config.broadcast_endpoint,
                       "inproc://close-in-phase-%d", phase);
        scene_open(on, 2, false);
        if (phase > 0) trainer_begin(&on->trainer, 1);
        if (phase > 0) raw_worker_offer(good(on));
        if (phase > 0) raw_worker_offer(bad(on));
        if (phase > 1) trainer_write(&on->trainer);
        refit_publisher_close(on->publisher);
        on->trainer.publisher = NULL;
        if (phase > 0) expect_abort(good(on), 1);
        if (phase > 0) expect_abort(bad(on), 1);
        (void)raw_worker_expect(good(on), RFT_BYE);
        (void)raw_worker_expect(bad(on), RFT_BYE);
    }
}

int main(void)
{
    return test_run("publish_faults");
}
