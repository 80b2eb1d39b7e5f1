/* How workers join, join again and are refused: names, instances, epochs, proofs, limits.workers.
 */
#include "scene.h"

static void expect_refusal(raw_worker *worker, refit_status code, bool final)
{
    const rft_message *refuse = raw_worker_expect(worker, RFT_REFUSE);
    assert_int_equal(refuse->as.refuse.code, code);
    assert_int_equal(refuse->as.refuse.final, final);
    assert_true(refuse->as.refuse.reason.count > 10);
}

/* A trainer and a worker "w" that has said nothing yet. */
static raw_worker *open_stranger(scene *on)
{
    scene_open(on, 0, false);
    return scene_add(on, "w", false);
}

ON_SCENE(hello_said_twice_is_welcomed_twice)
{
    raw_worker *worker = open_stranger(on);
    raw_worker_say_hello(worker);
    raw_worker_join(worker);
    (void)raw_worker_has_heard(worker, RFT_WELCOME);
    trainer_wait_workers(&on->trainer, 1);
    assert_int_equal(trainer_stats(&on->trainer).workers, 1);
}

/* The worker has applied version 1; commit is still to be joined. */
static raw_worker *open_applied(scene *on)
{
    scene_open(on, 1, false);
    trainer_offer(&on->trainer, 1);
    raw_worker_stage(&on->workers[0]);
    raw_worker_apply(&on->workers[0]);
    return &on->workers[0];
}

/* While a trainer was stopped, its workers have lost it and say HELLO again. The report still says
 * what they did for its version. */
ON_SCENE(worker_joining_again_is_still_named_for_applied_version)
{
    raw_worker *worker = open_applied(on);
    raw_worker_say_hello(worker);
    assert_ok(trainer_join(&on->trainer));
    (void)raw_worker_expect(worker, RFT_WELCOME);
    const refit_worker_info info = trainer_worker(&on->trainer, "a");
    assert_false(info.subscribed);
    assert_true(info.member && info.committed);
    assert_ok(info.status);
}

/* ---- Messages that are refused */

static void says_hello_in_another_protocol(raw_worker *worker)
{
    rft_message hello = {.kind = RFT_HELLO};
    hello.as.hello.protocol = RFT_PROTOCOL + 1;
    hello.as.hello.worker = rft_view_text("w");
    hello.as.hello.window = 1;
    raw_worker_send(worker, &hello);
}

static void beats_before_its_hello(raw_worker *worker)
{
    raw_worker_beat(worker, 0);
}

static void joins_another_epoch(raw_worker *worker)
{
    raw_worker_say_hello(worker);
    uint64_t epoch = raw_worker_expect(worker, RFT_WELCOME)->as.welcome.epoch;
    rft_message join = {.kind = RFT_JOIN};
    join.as.join.epoch = epoch + 1;
    raw_worker_send(worker, &join);
}

ON_SCENE(worker_that_cannot_join_is_refused_for_now_or_for_good)
{
    static const struct {
        const char *name;
        void (*says)(raw_worker *worker);
        refit_status code;
        bool final;
    } rows[] = {
        {"another protocol", says_hello_in_another_protocol, REFIT_ERR_PROTOCOL, true},
        {"a beat before its hello", beats_before_its_hello, REFIT_ERR_STALE, false},
        {"another epoch", joins_another_epoch, REFIT_ERR_STALE, false},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        print_message("%s\n", rows[i].name);
        scene_renew(on);
        raw_worker *worker = open_stranger(on);
        rows[i].says(worker);
        expect_refusal(worker, rows[i].code, rows[i].final);
    }
}

ON_SCENE(worker_with_a_false_proof_is_evicted)
{
    raw_worker *worker = open_stranger(on);
    raw_worker_say_hello(worker);
    rft_message join = {.kind = RFT_JOIN};
    join.as.join.epoch = raw_worker_expect(worker, RFT_WELCOME)->as.welcome.epoch;
    join.as.join.shm = true;
    join.as.join.proof = 12345;
    raw_worker_send(worker, &join);
    assert_int_equal(raw_worker_expect(worker, RFT_BYE)->as.bye.code, REFIT_ERR_SECURITY);
    assert_int_equal(trainer_stats(&on->trainer).workers, 0);
    assert_int_equal(trainer_stats(&on->trainer).messages_refused, 1);
}

ON_SCENE(without_shared_memory_there_is_no_probe)
{
    on->config.broadcast_shm = REFIT_SHM_OFF;
    raw_worker *worker = open_stranger(on);
    raw_worker_say_hello(worker);
    assert_int_equal(raw_worker_expect(worker, RFT_WELCOME)->as.welcome.probe.count, 0);
}

ON_SCENE(worker_above_the_limit_is_refused_for_now)
{
    on->config.limits_workers = 1;
    scene_open(on, 1, false);
    raw_worker *second = scene_add(on, "second", false);
    raw_worker_say_hello(second);
    expect_refusal(second, REFIT_ERR_LIMIT, false);
    raw_worker_say_bye(&on->workers[0]);
    while (trainer_stats(&on->trainer).workers > 0) {
        raw_worker_say_hello(second);
        (void)raw_worker_has_heard(second, RFT_REFUSE);
    }
    (void)raw_worker_has_heard(second, RFT_REFUSE);
}

ON_SCENE(name_of_a_living_worker_is_taken)
{
    refit_error error;
    scene_open(on, 1, false);
    raw_worker *namesake = scene_add(on, "a", false);
    raw_worker_say_hello(namesake);
    expect_refusal(namesake, REFIT_ERR_EXISTS, false);
    assert_int_equal(refit_publisher_wait_workers(on->publisher, 2, 0, &error), REFIT_ERR_TIMEOUT);
    assert_says(&error, "1 of 2 workers have subscribed");
    assert_says(&error, "refused is worker a: another worker goes by this name");
    assert_true(trainer_worker(&on->trainer, "a").subscribed);
}

/* The heartbeat timeout is not waited for: a HELLO with the same name makes the trainer find out
 * that the killed worker's connection is gone. */
ON_SCENE(name_of_a_dead_worker_is_free_soon)
{
    scene_open(on, 1, false);
    scene_close_worker(&on->workers[0]);
    raw_worker *heir = scene_add(on, "a", false);
    for (rft_message_kind kind = RFT_REFUSE; kind == RFT_REFUSE;) {
        raw_worker_say_hello(heir);
        rft_channel_poll(heir->channel, -1, 100);
        kind = raw_worker_has_heard(heir, RFT_WELCOME) ? RFT_WELCOME : RFT_REFUSE;
    }
}

ON_SCENE(worker_that_reconnects_takes_its_place_again)
{
    scene_open(on, 1, false);
    raw_worker *worker = &on->workers[0];
    trainer_offer(&on->trainer, 1);
    raw_worker_stage(worker);
    (void)raw_worker_expect(worker, RFT_COMMIT);
    raw_worker *again = scene_add(on, "a", false);
    again->instance = worker->instance;
    raw_worker_join(again);
    raw_worker_stage(again);
    raw_worker_apply(again);
    assert_ok(trainer_join(&on->trainer));
    assert_int_equal(trainer_stats(&on->trainer).workers, 1);
    assert_true(trainer_worker(&on->trainer, "a").member);
    raw_worker_beat(worker, 0);
    expect_refusal(worker, REFIT_ERR_STALE, false);
}

ON_SCENE(changed_tensors_are_sent_again)
{
    raw_worker *worker = open_applied(on);
    assert_ok(trainer_join(&on->trainer));
    assert_ok(refit_publisher_declare(on->publisher, sample_tensors() + 4, 1, NULL));
    assert_ok(refit_publisher_begin(on->publisher, 0, NULL));
    raw_worker_offer(worker);
    assert_int_equal(worker->manifest->count, 1);
    assert_int_equal(worker->offer.as.offer.base, 0);
}

int main(void)
{
    return test_run("joining");
}
