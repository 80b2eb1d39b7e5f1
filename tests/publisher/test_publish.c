/* Versions published to workers that behave correctly: through frames, through shared memory, whole
 * and in parts, early, late and in time. */
#include "scene.h"

ON_SCENE(worker_receives_what_was_written)
{
    for (int shm = 0; shm < 2; shm++) {
        scene_renew(on);
        on->config.broadcast_slots = 2;
        scene_open(on, 1, shm);
        for (uint64_t version = 1; version <= 5; version++)
            scene_publish(on, version);
        refit_worker_info info = trainer_worker(&on->trainer, "a");
        assert_int_equal(info.version, 5);
        assert_true(info.committed && info.member && info.subscribed);
        assert_int_equal(info.path, shm ? REFIT_PATH_SHM : REFIT_PATH_SOCKET);
        assert_int_equal(trainer_stats(&on->trainer).workers_committed_last, 1);
    }
}

/* The version has no members, so commit decides at once, while frames are made for the guest. */
ON_SCENE(guest_fetches_while_the_version_commits)
{
    scene_open(on, 0, false);
    for (uint64_t version = 1; version <= 10; version++) {
        trainer_begin(&on->trainer, version);
        raw_worker *guest = scene_add(on, "g", false);
        raw_worker_join(guest);
        raw_worker_offer(guest);
        trainer_write(&on->trainer);
        raw_worker_pull(guest, guest->config.broadcast_window);
        trainer_start(&on->trainer, TRAINER_COMMIT, version);
        assert_ok(trainer_join(&on->trainer));
        raw_worker_fetch(guest);
        trainer_check_bytes(guest, version);
        raw_worker_say_bye(guest);
        while (trainer_stats(&on->trainer).workers > 0)
            rft_channel_poll(guest->channel, -1, 5);
        scene_close_worker(guest);
    }
}

ON_SCENE(frames_travel_while_the_rest_is_written)
{
    scene_open(on, 1, false);
    raw_worker *worker = &on->workers[0];
    trainer_begin(&on->trainer, 1);
    raw_worker_offer(worker);
    assert_int_equal(worker->offer.as.offer.deadline_ms, UINT32_MAX);
    raw_worker_pull(worker, 2);
    const rft_manifest_tensor *tensor = &on->trainer.sample.manifest->tensors[0];
    assert_ok(refit_publisher_write(on->publisher, 0, on->trainer.sample.image, tensor->bytes, NULL,
                                    REFIT_STREAM_NONE, NULL));
    (void)raw_worker_expect(worker, RFT_FRAME);
    assert_false(worker->sealed);
    assert_ok(refit_publisher_abort(on->publisher, NULL));
    (void)raw_worker_expect(worker, RFT_ABORT);
}

ON_SCENE(worker_that_holds_the_version_is_offered_nothing)
{
    scene_open(on, 1, false);
    scene_publish(on, 1);
    raw_worker_join(&on->workers[0]);
    raw_worker_beat(&on->workers[0], 0);
    (void)raw_worker_expect(&on->workers[0], RFT_BEAT);
    (void)raw_worker_expect(&on->workers[0], RFT_BEAT);
}

ON_SCENE(lost_frames_are_sent_again)
{
    scene_open(on, 1, false);
    raw_worker *worker = &on->workers[0];
    trainer_offer(&on->trainer, 1);
    raw_worker_offer(worker);
    raw_worker_resend(worker, 0);
    assert_int_equal(raw_worker_expect(worker, RFT_FRAME)->as.frame.sequence, 0);
    assert_int_equal(trainer_stats(&on->trainer).publish_resent_frames, 1);
    raw_worker_resend(worker, 0);
    (void)raw_worker_expect(worker, RFT_FRAME);
    raw_worker_say_failed(worker, REFIT_ERR_CORRUPT, true);
    assert_int_equal(trainer_join(&on->trainer), REFIT_ERR_PEER);
}

ON_SCENE(one_slot_waits_until_the_update_is_closed)
{
    char segment[RFT_SEGMENT_NAME_BYTES];
    scene_open(on, 1, true);
    scene_publish(on, 1);
    raw_worker *worker = &on->workers[0];
    strcpy(segment, worker->segment);
    trainer_start(&on->trainer, TRAINER_PUBLISH, 2);
    raw_worker_beat(worker, 0);
    (void)raw_worker_expect(worker, RFT_BEAT);
    trainer_check_bytes(worker, 1);
    raw_worker_say_released(worker, 1);
    raw_worker_stage(worker);
    assert_string_equal(worker->segment, segment);
    raw_worker_apply(worker);
    assert_ok(trainer_join(&on->trainer));
}

ON_SCENE(store_is_as_before_after_an_abort)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        scene_renew(on);
        on->config.broadcast_slots = slots;
        scene_open(on, 0, false);
        scene_publish(on, 1);
        trainer_begin(&on->trainer, 2);
        trainer_write(&on->trainer);
        assert_ok(refit_publisher_abort(on->publisher, NULL));
        raw_worker *worker = scene_add(on, "w", slots == 1);
        raw_worker_join(worker);
        scene_take(worker, 1);
        assert_int_equal(worker->offer.as.offer.version, 1);
    }
}

int main(void)
{
    return test_run("publish");
}
