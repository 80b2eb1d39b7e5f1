/* Versions published to workers that behave correctly: through frames, through shared memory, whole
 * and in parts, early, late and in time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/trainer.h"

static const struct {
    bool shm;
    refit_path path;
} PATHS[] = {{false, REFIT_PATH_SOCKET}, {true, REFIT_PATH_SHM}};

/* A trainer and its worker "w". */
static void open_both(test_trainer *trainer, raw_worker *worker, const refit_config *config,
                      bool shm)
{
    trainer_open(trainer, config);
    raw_worker_open(worker, refit_publisher_endpoint(trainer->publisher), "w", shm);
    raw_worker_join(worker);
    trainer_wait_workers(trainer, 1);
}

static void close_both(test_trainer *trainer, raw_worker *worker)
{
    raw_worker_close(worker);
    trainer_close(trainer);
}

static void apply(test_trainer *trainer, raw_worker *worker, uint64_t version)
{
    trainer_offer(trainer, version);
    raw_worker_stage(worker);
    trainer_check_bytes(worker, version);
    raw_worker_apply(worker);
    assert_int_equal(trainer_join(trainer), REFIT_OK);
    if (version > 1) raw_worker_say_released(worker, version - 1);
}

static void worker_receives_what_was_written(void **state)
{
    (void)state;
    for (int path = 0; path < 2; path++) {
        test_trainer trainer;
        raw_worker worker;
        refit_config config = trainer_config();
        config.broadcast_slots = 2;
        open_both(&trainer, &worker, &config, PATHS[path].shm);
        for (uint64_t version = 1; version <= 5; version++) {
            apply(&trainer, &worker, version);
        }
        refit_worker_info info = trainer_worker(&trainer, "w");
        assert_int_equal(info.version, 5);
        assert_true(info.committed && info.member && info.subscribed);
        assert_int_equal(info.path, PATHS[path].path);
        assert_int_equal(trainer_stats(&trainer).workers_committed_last, 1);
        close_both(&trainer, &worker);
    }
}

static void unchanged_blocks_do_not_travel(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config, false);
    apply(&trainer, &worker, 2);
    assert_int_equal(worker.offer.as.offer.base, 0);
    uint64_t whole = trainer_stats(&trainer).publish_sent_bytes_total;
    apply(&trainer, &worker, 3);
    assert_int_equal(worker.offer.as.offer.base, 2);
    uint64_t part = trainer_stats(&trainer).publish_sent_bytes_total - whole;
    assert_true(whole >= 65536 * 2 + part);
    assert_int_equal(trainer_stats(&trainer).publish_same_blocks_last, 2);
    close_both(&trainer, &worker);
}

/* The version has no members, so commit decides at once, while frames are made for the guest. */
static void guest_fetches_while_the_version_commits(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker guest;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    for (uint64_t version = 1; version <= 10; version++) {
        trainer_begin(&trainer, version);
        raw_worker_open(&guest, refit_publisher_endpoint(trainer.publisher), "g", false);
        raw_worker_join(&guest);
        raw_worker_offer(&guest);
        trainer_write(&trainer);
        raw_worker_pull(&guest, guest.config.broadcast_window);
        trainer_start(&trainer, TRAINER_COMMIT, version);
        assert_int_equal(trainer_join(&trainer), REFIT_OK);
        raw_worker_fetch(&guest);
        trainer_check_bytes(&guest, version);
        raw_worker_say_bye(&guest);
        while (trainer_stats(&trainer).workers > 0) {
            rft_channel_poll(guest.channel, -1, 5);
        }
        raw_worker_close(&guest);
    }
    trainer_close(&trainer);
}

static void frames_travel_while_the_rest_is_written(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config, false);
    trainer_begin(&trainer, 1);
    raw_worker_offer(&worker);
    assert_int_equal(worker.offer.as.offer.deadline_ms, UINT32_MAX);
    raw_worker_pull(&worker, 2);
    const rft_manifest_tensor *tensor = &trainer.sample.manifest->tensors[0];
    assert_int_equal(refit_publisher_write(trainer.publisher, 0, trainer.sample.image,
                                           tensor->bytes, NULL, REFIT_STREAM_NONE, NULL),
                     REFIT_OK);
    (void)raw_worker_expect(&worker, RFT_FRAME);
    assert_false(worker.sealed);
    assert_int_equal(refit_publisher_abort(trainer.publisher, NULL), REFIT_OK);
    (void)raw_worker_expect(&worker, RFT_ABORT);
    close_both(&trainer, &worker);
}

static void late_worker_gets_the_current_version(void **state)
{
    (void)state;
    for (int path = 0; path < 2; path++) {
        test_trainer trainer;
        raw_worker worker;
        refit_config config = trainer_config();
        trainer_open(&trainer, &config);
        trainer_start(&trainer, TRAINER_PUBLISH, 4);
        assert_int_equal(trainer_join(&trainer), REFIT_OK);
        raw_worker_open(&worker, refit_publisher_endpoint(trainer.publisher), "w", PATHS[path].shm);
        raw_worker_join(&worker);
        raw_worker_stage(&worker);
        trainer_check_bytes(&worker, 4);
        raw_worker_apply(&worker);
        close_both(&trainer, &worker);
    }
}

static void worker_that_holds_the_version_is_offered_nothing(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config, false);
    apply(&trainer, &worker, 1);
    raw_worker_join(&worker);
    raw_worker_beat(&worker, 0);
    (void)raw_worker_expect(&worker, RFT_BEAT);
    (void)raw_worker_expect(&worker, RFT_BEAT);
    close_both(&trainer, &worker);
}

static void guest_gets_the_version_and_is_not_counted_on(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker member, guest;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    raw_worker_open(&member, refit_publisher_endpoint(trainer.publisher), "member", true);
    raw_worker_open(&guest, refit_publisher_endpoint(trainer.publisher), "guest", false);
    raw_worker_join(&member);
    trainer_wait_workers(&trainer, 1);
    trainer_begin(&trainer, 1);
    raw_worker_join(&guest);
    trainer_write(&trainer);
    trainer_start(&trainer, TRAINER_COMMIT, 1);
    raw_worker_stage(&member);
    raw_worker_apply(&member);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    raw_worker_stage(&guest);
    raw_worker_apply(&guest);
    assert_false(trainer_worker(&trainer, "guest").member);
    raw_worker_close(&member);
    raw_worker_close(&guest);
    trainer_close(&trainer);
}

static void quorum_commits_and_the_straggler_follows(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker quick, slow;
    refit_config config = trainer_config();
    config.broadcast_commit = REFIT_COMMIT_QUORUM;
    config.broadcast_quorum = 1;
    trainer_open(&trainer, &config);
    raw_worker_open(&quick, refit_publisher_endpoint(trainer.publisher), "quick", false);
    raw_worker_open(&slow, refit_publisher_endpoint(trainer.publisher), "slow", false);
    raw_worker_join(&quick);
    raw_worker_join(&slow);
    trainer_wait_workers(&trainer, 2);
    trainer_offer(&trainer, 1);
    raw_worker_stage(&quick);
    raw_worker_apply(&quick);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    raw_worker_stage(&slow);
    raw_worker_apply(&slow);
    raw_worker_close(&quick);
    raw_worker_close(&slow);
    trainer_close(&trainer);
}

static void lost_frames_are_sent_again(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    open_both(&trainer, &worker, &config, false);
    trainer_offer(&trainer, 1);
    raw_worker_offer(&worker);
    unsigned char first[4] = {0};
    rft_message again = {.kind = RFT_RESEND};
    again.as.resend.version = 1;
    again.as.resend.sequences = (rft_view){first, sizeof first};
    raw_worker_send(&worker, &again);
    const rft_message *frame = raw_worker_expect(&worker, RFT_FRAME);
    assert_int_equal(frame->as.frame.sequence, 0);
    assert_int_equal(trainer_stats(&trainer).publish_resent_frames, 1);
    raw_worker_send(&worker, &again);
    (void)raw_worker_expect(&worker, RFT_FRAME);
    raw_worker_say_failed(&worker, REFIT_ERR_CORRUPT, true);
    assert_int_equal(trainer_join(&trainer), REFIT_ERR_PEER);
    close_both(&trainer, &worker);
}

static void one_slot_waits_until_the_update_is_closed(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    config.broadcast_slots = 1;
    open_both(&trainer, &worker, &config, true);
    apply(&trainer, &worker, 1);
    char segment[RFT_SEGMENT_NAME_BYTES];
    strcpy(segment, worker.segment);
    trainer_start(&trainer, TRAINER_PUBLISH, 2);
    raw_worker_beat(&worker, 0);
    (void)raw_worker_expect(&worker, RFT_BEAT);
    trainer_check_bytes(&worker, 1);
    raw_worker_say_released(&worker, 1);
    raw_worker_stage(&worker);
    assert_string_equal(worker.segment, segment);
    raw_worker_apply(&worker);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    close_both(&trainer, &worker);
}

static void store_is_as_before_after_an_abort(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        test_trainer trainer;
        raw_worker worker;
        refit_config config = trainer_config();
        config.broadcast_slots = slots;
        trainer_open(&trainer, &config);
        trainer_start(&trainer, TRAINER_PUBLISH, 1);
        assert_int_equal(trainer_join(&trainer), REFIT_OK);
        trainer_begin(&trainer, 2);
        trainer_write(&trainer);
        assert_int_equal(refit_publisher_abort(trainer.publisher, NULL), REFIT_OK);
        raw_worker_open(&worker, refit_publisher_endpoint(trainer.publisher), "w", slots == 1);
        raw_worker_join(&worker);
        raw_worker_stage(&worker);
        assert_int_equal(worker.offer.as.offer.version, 1);
        trainer_check_bytes(&worker, 1);
        raw_worker_apply(&worker);
        close_both(&trainer, &worker);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worker_receives_what_was_written),
        cmocka_unit_test(unchanged_blocks_do_not_travel),
        cmocka_unit_test(guest_fetches_while_the_version_commits),
        cmocka_unit_test(frames_travel_while_the_rest_is_written),
        cmocka_unit_test(late_worker_gets_the_current_version),
        cmocka_unit_test(worker_that_holds_the_version_is_offered_nothing),
        cmocka_unit_test(guest_gets_the_version_and_is_not_counted_on),
        cmocka_unit_test(quorum_commits_and_the_straggler_follows),
        cmocka_unit_test(lost_frames_are_sent_again),
        cmocka_unit_test(one_slot_waits_until_the_update_is_closed),
        cmocka_unit_test(store_is_as_before_after_an_abort),
    };
    return cmocka_run_group_tests_name("publish", tests, NULL, NULL);
}
