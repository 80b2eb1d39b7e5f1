/* Workers on the trainer's GPU read the weights where they lie; all others get them as before, or
 * are refused where an end requires the GPU. */
#include "tests/support/file_size_limit.h"
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#define SOON_MS 400u /* what is waited for does not come */

static refit_stats worker_stats(rollout_thread *member)
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

PLAY_TEST(a_worker_on_the_gpu_reads_every_version_there)
{
    void (*const changes[])(refit_config *) = {NULL,
                                               with_one_slot,
                                               with_gpu_required,
                                               with_gpu_required_and_one_slot,
                                               required_and_verified,
                                               without_kernels,
                                               required_without_kernels};
    for (size_t trial = 0; trial < COUNT_OF(changes); trial++) {
        gpu_play_open(play, changes[trial]);
        rollout_thread *first = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        rollout_thread *second = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        for (uint64_t version = 1; version <= 4; version++) {
            play->trainer.at_once = version % 2 == 0;
            gpu_play_expect(play, version, gpu_play_publish(play, version));
            assert_true(rollouts_was_on_device(first, version));
            assert_true(rollouts_was_on_device(second, version));
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

PLAY_TEST(with_require_nothing_is_kept_on_the_host)
{
    gpu_play_open(play, with_gpu_required);
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
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

PLAY_TEST(workers_on_the_gpu_and_elsewhere_switch_together)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        gpu_play_open(play, slots == 1 ? with_one_slot : NULL);
        refit_config socket = play->config;
        socket.broadcast_shm = REFIT_SHM_OFF;
        rollout_thread *on_gpu = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        rollout_thread *on_host = gpu_play_hire(play, false, ROLLOUT_ACCEPT);
        rollout_thread *far = gpu_play_hire_as(play, &socket, play->theirs, ROLLOUT_ACCEPT);
        trainer_wait_workers(&play->trainer, 3);
        for (uint64_t version = 1; version <= 4; version++)
            gpu_play_expect(play, version, gpu_play_publish(play, version));
        assert_int_equal(gpu_play_path(play, on_gpu), REFIT_PATH_CUDA_IPC);
        assert_int_equal(gpu_play_path(play, on_host), REFIT_PATH_SHM);
        assert_int_equal(gpu_play_path(play, far), REFIT_PATH_SOCKET);
        assert_false(rollouts_was_on_device(on_host, 4) || rollouts_was_on_device(far, 4));
    }
}

PLAY_TEST(a_late_worker_on_the_gpu_takes_what_there_is)
{
    gpu_play_open(play, NULL);
    uint64_t version = 1, digest = gpu_play_publish(play, 1); /* no worker was on the GPU */
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 0);
    rollout_thread *late = gpu_play_hire_as(play, &play->config, play->theirs, ROLLOUT_ACCEPT);
    assert_true(rollouts_wait(late, 1, 1) == digest);
    assert_false(rollouts_was_on_device(late, 1));
    /* It may have begun to join before it was told its device. */
    while (!rollouts_was_on_device(late, version))
        gpu_play_bring(play, late, ++version);
    rollout_thread *later = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    assert_true(rollouts_wait(later, version, 1) == gpu_play_digest(version));
}

PLAY_TEST(with_require_a_late_worker_finds_the_version_on_the_gpu)
{
    gpu_play_open(play, with_gpu_required);
    uint64_t digest = gpu_play_publish(play, 1);
    rollout_thread *late = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    assert_true(rollouts_wait(late, 1, 1) == digest);
    assert_true(rollouts_was_on_device(late, 1));
}

/* The trainer names its GPU after the worker has joined. */
PLAY_TEST(present_workers_join_once_more)
{
    gpu_play_open(play, NULL);
    test_trainer second;
    rollout_thread member;
    trainer_open(&second, &play->config);
    rollouts_start_on(&member, refit_publisher_endpoint(second.publisher), &play->config,
                      play->theirs, ROLLOUT_ACCEPT);
    trainer_wait_workers(&second, 1);
    assert_ok(refit_publisher_use_device(second.publisher, play->device, NULL));
    trainer_take_device(&second, play->device);
    test_trainer first = play->trainer;
    play->trainer = second;
    gpu_play_await_path(play, &member, REFIT_PATH_CUDA_IPC);
    gpu_play_bring(play, &member, 1);
    assert_true(rollouts_was_on_device(&member, 1));
    rollouts_stop(&member);
    trainer_close(&play->trainer);
    play->trainer = first;
}

/* ---- Workers that are refused on the GPU: told the reason, and served another way unless an end
 * requires the GPU */

static void off(refit_config *config)
{
    config->broadcast_gpu = REFIT_GPU_OFF;
}

static refit_subscriber *subscriber_open(gpu_play *play, const refit_config *config,
                                         refit_device *device)
{
    refit_subscriber *subscriber = NULL;
    const char *endpoint = refit_publisher_endpoint(play->trainer.publisher);
    assert_ok(refit_subscriber_open(endpoint, config, &subscriber, NULL));
    if (device != NULL) assert_ok(refit_subscriber_use_device(subscriber, device, NULL));
    return subscriber;
}

/* Waits until next returns something other than a timeout, or says that the trainer does not take
 * the worker for now. */
static refit_status await_answer(refit_subscriber *subscriber, refit_error *error)
{
    refit_update *update = NULL;
    for (;;) {
        refit_status status = refit_subscriber_next(subscriber, 50, &update, error);
        if (status != REFIT_ERR_TIMEOUT) return status;
        if (strstr(error->text, "for now") != NULL) return status;
    }
}

PLAY_TEST(a_worker_without_the_gpu_is_put_off_where_it_is_required)
{
    refit_config config;
    gpu_play_open(play, with_gpu_required);
    config = play->config;
    config.broadcast_gpu = REFIT_GPU_AUTO;
    refit_subscriber *subscriber = subscriber_open(play, &config, NULL);
    assert_refused(await_answer(subscriber, error), REFIT_ERR_TIMEOUT,
                   "refit_subscriber_use_device");
    /* It learns its device late, and is taken. */
    assert_ok(refit_subscriber_use_device(subscriber, play->theirs, NULL));
    trainer_wait_workers(&play->trainer, 1);
    refit_subscriber_close(subscriber);
}

PLAY_TEST(worker_on_another_gpu_is_refused_for_good_if_required)
{
    refit_device *other = NULL;
    refit_device_info info = {.size = sizeof info};
    gpu_play_open(play, with_gpu_required);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    assert_ok(refit_device_describe(play->device, &info, NULL));
    refit_subscriber *subscriber = subscriber_open(play, &play->config, other);
    assert_refused(await_answer(subscriber, error), REFIT_ERR_PROTOCOL, info.uuid);
    assert_int_equal(refit_publisher_wait_workers(play->trainer.publisher, 1, 0, NULL),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(trainer_stats(&play->trainer).messages_refused, 1);
    refit_subscriber_close(subscriber);
    assert_ok(refit_device_close(other, NULL));
}

PLAY_TEST(a_worker_on_another_gpu_takes_another_way)
{
    refit_device *other = NULL;
    gpu_play_open(play, NULL);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    rollout_thread *member = gpu_play_hire_as(play, &play->config, other, ROLLOUT_ACCEPT);
    trainer_wait_workers(&play->trainer, 1);
    gpu_play_bring(play, member, 1);
    assert_int_equal(gpu_play_path(play, member), REFIT_PATH_SHM);
    gpu_play_dismiss(play);
    assert_ok(refit_device_close(other, NULL));
}

PLAY_TEST(a_worker_that_requires_the_gpu_takes_no_other_trainer)
{
    refit_update *update = NULL;
    refit_device *other = NULL;
    gpu_play_open(play, NULL);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    refit_config config = play->config;
    with_gpu_required(&config);
    refit_subscriber *subscriber = subscriber_open(play, &config, NULL);
    assert_refused(refit_subscriber_next(subscriber, 0, &update, error), REFIT_ERR_STATE,
                   "refit_subscriber_use_device");
    assert_int_equal(refit_publisher_wait_workers(play->trainer.publisher, 1, SOON_MS, NULL),
                     REFIT_ERR_TIMEOUT); /* it has not even said hello */
    assert_ok(refit_subscriber_use_device(subscriber, other, NULL));
    assert_refused(await_answer(subscriber, error), REFIT_ERR_UNSUPPORTED, "another GPU");
    refit_subscriber_close(subscriber);
    assert_ok(refit_device_close(other, NULL));
}

PLAY_TEST(worker_requiring_gpu_waits_for_trainer_that_shows_one)
{
    refit_error error;
    test_trainer late;
    gpu_play_open(play, NULL);
    trainer_open(&late, &play->config);
    refit_config config = play->config;
    with_gpu_required(&config);
    test_trainer first = play->trainer;
    play->trainer = late;
    refit_subscriber *subscriber = subscriber_open(play, &config, play->theirs);
    assert_int_equal(await_answer(subscriber, &error), REFIT_ERR_TIMEOUT);
    assert_ok(refit_publisher_use_device(late.publisher, play->device, NULL));
    trainer_wait_workers(&play->trainer, 1);
    refit_subscriber_close(subscriber);
    trainer_close(&play->trainer);
    play->trainer = first;
}

PLAY_TEST(no_probe_means_no_gpu)
{
    for (int require = 0; require < 2; require++) {
        gpu_play_open(play, NULL);
        refit_config config = play->config;
        config.broadcast_shm = REFIT_SHM_OFF;
        if (require) {
            with_gpu_required(&config);
            refit_subscriber *none = NULL;
            assert_refused(refit_subscriber_open("tcp://127.0.0.1:1", &config, &none, error),
                           REFIT_ERR_CONFIG, "broadcast.gpu");
        } else {
            rollout_thread *member = gpu_play_hire_as(play, &config, play->theirs, ROLLOUT_ACCEPT);
            trainer_wait_workers(&play->trainer, 1);
            gpu_play_bring(play, member, 1);
            assert_int_equal(gpu_play_path(play, member), REFIT_PATH_SOCKET);
        }
    }
}

PLAY_TEST(with_off_the_gpu_is_left_alone)
{
    for (int end = 0; end < 2; end++) {
        gpu_play_open(play, end == 0 ? off : NULL);
        refit_config config = play->config;
        config.broadcast_gpu = end == 0 ? REFIT_GPU_AUTO : REFIT_GPU_OFF;
        rollout_thread *member = gpu_play_hire_as(play, &config, play->theirs, ROLLOUT_ACCEPT);
        trainer_wait_workers(&play->trainer, 1);
        gpu_play_bring(play, member, 1);
        assert_int_equal(gpu_play_path(play, member), REFIT_PATH_SHM);
        assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 0);
        assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), end); /* the trainer's probe */
    }
}

TEST(device_sharing_nothing_is_refused_only_if_required)
{
    refit_device *host = NULL;
    refit_error error;
    assert_ok(refit_device_open("host", NULL, &host, NULL));
    for (int mode = REFIT_GPU_AUTO; mode <= REFIT_GPU_OFF; mode++) {
        refit_publisher *publisher = NULL;
        refit_subscriber *subscriber = NULL;
        refit_config config = trainer_config();
        config.broadcast_gpu = mode;
        refit_status expected = mode == REFIT_GPU_REQUIRE ? REFIT_ERR_UNSUPPORTED : REFIT_OK;
        assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &config, &publisher, NULL));
        assert_int_equal(refit_publisher_use_device(publisher, host, &error), expected);
        assert_ok(
            refit_subscriber_open(refit_publisher_endpoint(publisher), &config, &subscriber, NULL));
        assert_int_equal(refit_subscriber_use_device(subscriber, host, &error), expected);
        refit_subscriber_close(subscriber);
        refit_publisher_close(publisher);
    }
    assert_ok(refit_device_close(host, NULL));
}

/* /dev/shm was full, or is not there, when the publisher was opened. */
TEST(gpu_without_shared_memory_is_refused_only_if_required)
{
    refit_device *device = NULL;
    refit_error error;
    fake_cuda_reset();
    assert_ok(refit_device_open("cuda:0", NULL, &device, NULL));
    for (int mode = REFIT_GPU_AUTO; mode <= REFIT_GPU_OFF; mode++) {
        refit_publisher *publisher = NULL;
        refit_config config = trainer_config();
        config.broadcast_gpu = mode;
        struct rlimit before = file_size_limit_to(0);
        refit_status opened =
            refit_publisher_open("tcp://127.0.0.1:0", &config, &publisher, &error);
        file_size_limit_back(&before);
        assert_ok(opened);
        bool required = mode == REFIT_GPU_REQUIRE;
        assert_int_equal(refit_publisher_use_device(publisher, device, &error),
                         required ? REFIT_ERR_SYSTEM : REFIT_OK);
        if (required) assert_says(&error, "there is no shared memory");
        /* It is not in use, so that another may be told. */
        assert_ok(refit_device_close(device, NULL));
        assert_ok(refit_device_open("cuda:0", NULL, &device, NULL));
        refit_publisher_close(publisher);
    }
    assert_ok(refit_device_close(device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
}

PLAY_TEST(use_device_is_told_once_and_between_versions)
{
    refit_error error;
    refit_publisher *publisher = NULL;
    gpu_play_open(play, NULL);
    publisher = play->trainer.publisher;
    assert_ok(refit_publisher_use_device(publisher, play->device, NULL));
    assert_int_equal(refit_publisher_use_device(publisher, play->theirs, &error), REFIT_ERR_STATE);
    assert_invalid(refit_publisher_use_device(NULL, play->device, NULL));
    assert_invalid(refit_publisher_use_device(publisher, NULL, NULL));
    trainer_begin(&play->trainer, 1);
    assert_int_equal(refit_publisher_use_device(publisher, play->device, NULL), REFIT_ERR_STATE);
    assert_ok(refit_publisher_abort(publisher, NULL));
    refit_subscriber *subscriber = subscriber_open(play, &play->config, play->theirs);
    assert_ok(refit_subscriber_use_device(subscriber, play->theirs, NULL));
    assert_int_equal(refit_subscriber_use_device(subscriber, play->device, NULL), REFIT_ERR_STATE);
    assert_invalid(refit_subscriber_use_device(subscriber, NULL, NULL));
    assert_invalid(refit_subscriber_use_device(NULL, play->theirs, NULL));
    assert_int_equal(refit_device_close(play->theirs, NULL), REFIT_ERR_BUSY);
    assert_null(refit_update_device(NULL));
    refit_subscriber_close(subscriber);
}

TEST(with_require_the_trainer_says_which_gpu_before_it_declares)
{
    refit_publisher *publisher = NULL;
    refit_config config = trainer_config();
    with_gpu_required(&config);
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &config, &publisher, NULL));
    assert_refused(refit_publisher_declare(publisher, sample_tensors(), SAMPLE_TENSORS, error),
                   REFIT_ERR_STATE, "refit_publisher_use_device");
    refit_publisher_close(publisher);
}

PLAY_TEST(with_require_weights_of_another_gpu_are_refused)
{
    refit_error error;
    refit_device *other = NULL;
    void *memory = NULL;
    gpu_play_open(play, with_gpu_required);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    trainer_begin(&play->trainer, 1);
    const rft_manifest_tensor *first = &play->trainer.sample.manifest->tensors[0];
    assert_ok(refit_memory_alloc(other, first->bytes, &memory, NULL));
    assert_invalid(refit_publisher_write(play->trainer.publisher, 0, memory, first->bytes, other,
                                         REFIT_STREAM_NONE, &error));
    assert_non_null(strstr(strstr(error.text, "GPU-") + 4, "GPU-")); /* both by name */
    trainer_write(&play->trainer);
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_ok(refit_memory_free(other, memory, NULL));
    assert_ok(refit_device_close(other, NULL));
}

/* The trainer's own export is the first call; the worker's look at its own memory is the second. */
PLAY_TEST(memory_that_cannot_be_mapped_comes_another_way)
{
    gpu_play_open(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    fake_cuda_fail("cuIpcGetMemHandle", 2, 1, RFT_CU_UNKNOWN);
    gpu_play_bring(play, member, 1);
    assert_false(rollouts_was_on_device(member, 1));
    assert_int_equal(gpu_play_path(play, member), REFIT_PATH_SHM);
    gpu_play_bring(play, member, 2);
    assert_false(rollouts_was_on_device(member, 2));
}

/* Another container, or a driver that refuses: it shows when the worker joins. */
PLAY_TEST(a_worker_that_maps_nothing_joins_another_way)
{
    gpu_play_open(play, NULL);
    fake_cuda_fail("cuIpcGetMemHandle", 1, 1, RFT_CU_UNKNOWN);
    rollout_thread *member = gpu_play_hire_as(play, &play->config, play->theirs, ROLLOUT_ACCEPT);
    trainer_wait_workers(&play->trainer, 1);
    gpu_play_bring(play, member, 1);
    assert_false(rollouts_was_on_device(member, 1));
    assert_int_equal(gpu_play_path(play, member), REFIT_PATH_SHM);
}

PLAY_TEST(memory_that_cannot_be_mapped_is_an_error_if_required)
{
    refit_error error;
    gpu_play_open(play, NULL);
    refit_config config = play->config;
    with_gpu_required(&config);
    refit_subscriber *subscriber = subscriber_open(play, &config, play->theirs);
    trainer_wait_workers(&play->trainer, 1);
    fake_cuda_fail("cuIpcGetMemHandle", 2, 1, RFT_CU_UNKNOWN);
    trainer_begin(&play->trainer, 1);
    trainer_write(&play->trainer);
    assert_int_equal(refit_publisher_commit(play->trainer.publisher, &error), REFIT_ERR_PEER);
    assert_int_equal(await_answer(subscriber, &error), REFIT_ERR_DEVICE);
    refit_subscriber_close(subscriber);
}

int main(void)
{
    return test_run("gpu_path");
}
