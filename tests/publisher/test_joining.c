/* How workers join, join again and are refused: names, instances, epochs, proofs, limits.workers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/trainer.h"

static void expect_refusal(raw_worker *worker, refit_status code, bool final)
{
    const rft_message *refuse = raw_worker_expect(worker, RFT_REFUSE);
    assert_int_equal(refuse->as.refuse.code, code);
    assert_int_equal(refuse->as.refuse.final, final);
    assert_true(refuse->as.refuse.reason.count > 10);
}

static void open_both(test_trainer *trainer, raw_worker *worker, const refit_config *config)
{
    trainer_open(trainer, config);
    raw_worker_open(worker, refit_publisher_endpoint(trainer->publisher), "w", false);
}

static void close_both(test_trainer *trainer, raw_worker *worker)
{
    raw_worker_close(worker);
    trainer_close(trainer);
}

static void hello_said_twice_is_welcomed_twice(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config);
    raw_worker_say_hello(&worker);
    raw_worker_join(&worker);
    (void)raw_worker_has_heard(&worker, RFT_WELCOME);
    trainer_wait_workers(&trainer, 1);
    assert_int_equal(trainer_stats(&trainer).workers, 1);
    close_both(&trainer, &worker);
}

/* Both, and version 1 has been applied; commit is still to be joined. */
static void open_applied(test_trainer *trainer, raw_worker *worker)
{
    refit_config config = trainer_config();
    open_both(trainer, worker, &config);
    raw_worker_join(worker);
    trainer_wait_workers(trainer, 1);
    trainer_offer(trainer, 1);
    raw_worker_stage(worker);
    raw_worker_apply(worker);
}

/* While a trainer was stopped, its workers have lost it and say HELLO again. The report still says
 * what they did for its version. */
static void worker_that_joins_again_is_still_named_for_the_version_it_applied(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    open_applied(&trainer, &worker);
    raw_worker_say_hello(&worker);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    (void)raw_worker_expect(&worker, RFT_WELCOME);
    const refit_worker_info info = trainer_worker(&trainer, "w");
    assert_false(info.subscribed);
    assert_true(info.member && info.committed);
    assert_int_equal(info.status, REFIT_OK);
    close_both(&trainer, &worker);
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

static const struct refusal {
    const char *name;
    void (*says)(raw_worker *worker);
    refit_status code;
    bool final;
} REFUSALS[] = {
    {"another protocol", says_hello_in_another_protocol, REFIT_ERR_PROTOCOL, true},
    {"a beat before its hello", beats_before_its_hello, REFIT_ERR_STALE, false},
    {"another epoch", joins_another_epoch, REFIT_ERR_STALE, false},
};

static void worker_that_cannot_join_is_refused_for_now_or_for_good(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof REFUSALS / sizeof REFUSALS[0]; i++) {
        test_trainer trainer;
        raw_worker worker;
        refit_config config = trainer_config();
        open_both(&trainer, &worker, &config);
        REFUSALS[i].says(&worker);
        const rft_message *refuse = raw_worker_expect(&worker, RFT_REFUSE);
        if (refuse->as.refuse.code != REFUSALS[i].code ||
            refuse->as.refuse.final != REFUSALS[i].final) {
            fail_msg("%s: %s, %s", REFUSALS[i].name,
                     refit_status_name((refit_status)refuse->as.refuse.code),
                     refuse->as.refuse.final ? "for good" : "for now");
        }
        assert_true(refuse->as.refuse.reason.count > 10);
        close_both(&trainer, &worker);
    }
}

static void worker_with_a_false_proof_is_evicted(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config);
    raw_worker_say_hello(&worker);
    rft_message join = {.kind = RFT_JOIN};
    join.as.join.epoch = raw_worker_expect(&worker, RFT_WELCOME)->as.welcome.epoch;
    join.as.join.shm = true;
    join.as.join.proof = 12345;
    raw_worker_send(&worker, &join);
    assert_int_equal(raw_worker_expect(&worker, RFT_BYE)->as.bye.code, REFIT_ERR_SECURITY);
    assert_int_equal(trainer_stats(&trainer).workers, 0);
    assert_int_equal(trainer_stats(&trainer).messages_refused, 1);
    close_both(&trainer, &worker);
}

static void without_shared_memory_there_is_no_probe(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    config.broadcast_shm = REFIT_SHM_OFF;
    open_both(&trainer, &worker, &config);
    raw_worker_say_hello(&worker);
    assert_int_equal(raw_worker_expect(&worker, RFT_WELCOME)->as.welcome.probe.count, 0);
    close_both(&trainer, &worker);
}

static void worker_above_the_limit_is_refused_for_now(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker, second;
    refit_config config = trainer_config();
    config.limits_workers = 1;
    open_both(&trainer, &worker, &config);
    raw_worker_open(&second, refit_publisher_endpoint(trainer.publisher), "second", false);
    raw_worker_join(&worker);
    raw_worker_say_hello(&second);
    expect_refusal(&second, REFIT_ERR_LIMIT, false);
    raw_worker_say_bye(&worker);
    while (trainer_stats(&trainer).workers > 0) {
        raw_worker_say_hello(&second);
        (void)raw_worker_has_heard(&second, RFT_REFUSE);
    }
    (void)raw_worker_has_heard(&second, RFT_REFUSE);
    close_both(&trainer, &worker);
    raw_worker_close(&second);
}

static void name_of_a_living_worker_is_taken(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker, namesake;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config);
    raw_worker_open(&namesake, refit_publisher_endpoint(trainer.publisher), "w", false);
    raw_worker_join(&worker);
    raw_worker_say_hello(&namesake);
    expect_refusal(&namesake, REFIT_ERR_EXISTS, false);
    refit_error error;
    assert_int_equal(refit_publisher_wait_workers(trainer.publisher, 2, 0, &error),
                     REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "1 of 2 workers have subscribed"));
    assert_non_null(strstr(error.text, "refused is worker w: another worker goes by this name"));
    assert_true(trainer_worker(&trainer, "w").subscribed);
    raw_worker_close(&namesake);
    close_both(&trainer, &worker);
}

/* The heartbeat timeout is not waited for: a HELLO with the same name makes the trainer find out
 * that the killed worker's connection is gone. */
static void name_of_a_dead_worker_is_free_soon(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker, heir;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config);
    raw_worker_join(&worker);
    raw_worker_close(&worker);
    raw_worker_open(&heir, refit_publisher_endpoint(trainer.publisher), "w", false);
    int64_t instance = (int64_t)heir.instance;
    for (rft_message_kind kind = RFT_REFUSE; kind == RFT_REFUSE;) {
        raw_worker_say_hello(&heir);
        rft_channel_poll(heir.channel, -1, 100);
        kind = raw_worker_has_heard(&heir, RFT_WELCOME) ? RFT_WELCOME : RFT_REFUSE;
    }
    assert_int_equal(instance, heir.instance);
    raw_worker_close(&heir);
    trainer_close(&trainer);
}

static void worker_that_reconnects_takes_its_place_again(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker, again;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config);
    raw_worker_join(&worker);
    trainer_wait_workers(&trainer, 1);
    trainer_offer(&trainer, 1);
    raw_worker_stage(&worker);
    (void)raw_worker_expect(&worker, RFT_COMMIT);
    raw_worker_open(&again, refit_publisher_endpoint(trainer.publisher), "w", false);
    again.instance = worker.instance;
    raw_worker_join(&again);
    raw_worker_stage(&again);
    raw_worker_apply(&again);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    assert_int_equal(trainer_stats(&trainer).workers, 1);
    assert_true(trainer_worker(&trainer, "w").member);
    raw_worker_beat(&worker, 0);
    expect_refusal(&worker, REFIT_ERR_STALE, false);
    raw_worker_close(&again);
    close_both(&trainer, &worker);
}

static void changed_tensors_are_sent_again(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    open_applied(&trainer, &worker);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    assert_int_equal(refit_publisher_declare(trainer.publisher, sample_tensors() + 4, 1, NULL),
                     REFIT_OK);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 0, NULL), REFIT_OK);
    raw_worker_offer(&worker);
    assert_int_equal(worker.manifest->count, 1);
    assert_int_equal(worker.offer.as.offer.base, 0);
    close_both(&trainer, &worker);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_said_twice_is_welcomed_twice),
        cmocka_unit_test(worker_that_joins_again_is_still_named_for_the_version_it_applied),
        cmocka_unit_test(worker_that_cannot_join_is_refused_for_now_or_for_good),
        cmocka_unit_test(worker_with_a_false_proof_is_evicted),
        cmocka_unit_test(without_shared_memory_there_is_no_probe),
        cmocka_unit_test(worker_above_the_limit_is_refused_for_now),
        cmocka_unit_test(name_of_a_living_worker_is_taken),
        cmocka_unit_test(name_of_a_dead_worker_is_free_soon),
        cmocka_unit_test(worker_that_reconnects_takes_its_place_again),
        cmocka_unit_test(changed_tensors_are_sent_again),
    };
    return cmocka_run_group_tests_name("joining", tests, NULL, NULL);
}
