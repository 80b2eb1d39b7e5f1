/* Workers on the trainer's GPU read the weights where they lie; all others get them as before. */
#include "tests/support/gpu_play.h"
#include "tests/support/unit.h"

static refit_stats worker_stats(crew_member *member)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(member->subscriber, &stats, NULL));
    return stats;
}

static void required_and_verified(refit_config *config)
{
    with_gpu_required(config);
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

/* The driver takes no kernels: all digests are taken by the CPU. */
static void without_kernels(refit_config *config)
{
    fake_cuda_hide("cuLibraryLoadData", 0);
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

static void required_without_kernels(refit_config *config)
{
    without_kernels(config);
    with_gpu_required(config);
}

static void a_worker_on_the_gpu_reads_every_version_there(void **state)
{
    gpu_play *play = *state;
    void (*const changes[])(refit_config *) = {NULL,
                                               with_one_slot,
                                               with_gpu_required,
                                               with_gpu_required_and_one_slot,
                                               required_and_verified,
                                               without_kernels,
                                               required_without_kernels};
    for (size_t trial = 0; trial < COUNT_OF(changes); trial++) {
        gpu_play_open(play, changes[trial]);
        crew_member *first = gpu_play_hire(play, true, CREW_ACCEPT);
        crew_member *second = gpu_play_hire(play, true, CREW_ACCEPT);
        for (uint64_t version = 1; version <= 4; version++) {
            play->trainer.at_once = version % 2 == 0;
            gpu_play_expect(play, version, gpu_play_publish(play, version));
            assert_true(crew_was_on_device(first, version));
            assert_true(crew_was_on_device(second, version));
        }
        uint64_t bytes = play->trainer.sample.manifest->payload_bytes;
        refit_stats stats = trainer_stats(&play->trainer);
        assert_int_equal(stats.workers_gpu, 2);
        assert_int_equal(stats.workers_shm, 0);
        assert_int_equal(stats.publish_gpu_bytes_total, 2 * 4 * bytes);
        assert_int_equal(stats.publish_shm_bytes_total, 0);
        assert_int_equal(stats.publish_sent_bytes_total, 0);
        assert_int_equal(worker_stats(first).receive_bytes_total, 0);
    }
}

static void with_require_nothing_is_kept_on_the_host(void **state)
{
    gpu_play *play = *state;
    gpu_play_open(play, with_gpu_required);
    (void)gpu_play_hire(play, true, CREW_ACCEPT);
    (void)gpu_play_publish(play, 1);
    assert_int_equal(trainer_stats(&play->trainer).publish_pinned_bytes, 0);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes,
                     play->trainer.sample.manifest->store_bytes);
    (void)gpu_play_publish(play, 2);
    (void)gpu_play_publish(play, 3);
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes,
                     2 * play->trainer.sample.manifest->store_bytes);
}

static void workers_on_the_gpu_and_elsewhere_switch_together(void **state)
{
    gpu_play *play = *state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        gpu_play_open(play, slots == 1 ? with_one_slot : NULL);
        refit_config socket = play->config;
        socket.broadcast_shm = REFIT_SHM_OFF;
        crew_member *on_gpu = gpu_play_hire(play, true, CREW_ACCEPT);
        crew_member *on_host = gpu_play_hire(play, false, CREW_ACCEPT);
        crew_member *far = gpu_play_hire_as(play, &socket, play->theirs, CREW_ACCEPT);
        trainer_wait_workers(&play->trainer, 3);
        for (uint64_t version = 1; version <= 4; version++) {
            gpu_play_expect(play, version, gpu_play_publish(play, version));
        }
        assert_int_equal(gpu_play_path(play, on_gpu), REFIT_PATH_CUDA_IPC);
        assert_int_equal(gpu_play_path(play, on_host), REFIT_PATH_SHM);
        assert_int_equal(gpu_play_path(play, far), REFIT_PATH_SOCKET);
        assert_false(crew_was_on_device(on_host, 4) || crew_was_on_device(far, 4));
    }
}

static void a_late_worker_on_the_gpu_takes_what_there_is(void **state)
{
    gpu_play *play = *state;
    gpu_play_open(play, NULL);
    uint64_t version = 1, digest = gpu_play_publish(play, 1); /* no worker was on the GPU */
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 0);
    crew_member *late = gpu_play_hire_as(play, &play->config, play->theirs, CREW_ACCEPT);
    assert_true(crew_wait(late, 1, 1) == digest);
    assert_false(crew_was_on_device(late, 1));
    /* It may have begun to join before it was told its device. */
    while (!crew_was_on_device(late, version)) {
        gpu_play_bring(play, late, ++version);
    }
    crew_member *later = gpu_play_hire(play, true, CREW_ACCEPT);
    assert_true(crew_wait(later, version, 1) == gpu_play_digest(version));
}

static void with_require_a_late_worker_finds_the_version_on_the_gpu(void **state)
{
    gpu_play *play = *state;
    gpu_play_open(play, with_gpu_required);
    uint64_t digest = gpu_play_publish(play, 1);
    crew_member *late = gpu_play_hire(play, true, CREW_ACCEPT);
    assert_true(crew_wait(late, 1, 1) == digest);
    assert_true(crew_was_on_device(late, 1));
}

/* The trainer names its GPU after the worker has joined. */
static void present_workers_join_once_more(void **state)
{
    gpu_play *play = *state;
    gpu_play_open(play, NULL);
    test_trainer second;
    crew_member member;
    trainer_open(&second, &play->config);
    crew_start_on(&member, refit_publisher_endpoint(second.publisher), &play->config, play->theirs,
                  CREW_ACCEPT);
    trainer_wait_workers(&second, 1);
    assert_ok(refit_publisher_use_device(second.publisher, play->device, NULL));
    trainer_take_device(&second, play->device);
    test_trainer first = play->trainer;
    play->trainer = second;
    gpu_play_await_path(play, &member, REFIT_PATH_CUDA_IPC);
    gpu_play_bring(play, &member, 1);
    assert_true(crew_was_on_device(&member, 1));
    crew_stop(&member);
    trainer_close(&play->trainer);
    play->trainer = first;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        PLAY_TEST(a_worker_on_the_gpu_reads_every_version_there),
        PLAY_TEST(with_require_nothing_is_kept_on_the_host),
        PLAY_TEST(workers_on_the_gpu_and_elsewhere_switch_together),
        PLAY_TEST(a_late_worker_on_the_gpu_takes_what_there_is),
        PLAY_TEST(with_require_a_late_worker_finds_the_version_on_the_gpu),
        PLAY_TEST(present_workers_join_once_more),
    };
    return cmocka_run_group_tests_name("gpu_path", tests, NULL, NULL);
}
