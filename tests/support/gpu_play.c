/* A trainer on a GPU, and workers. */
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#include <poll.h>

#include "base/clock.h"

void with_gpu_required(refit_config *config)
{
    config->broadcast_gpu = REFIT_GPU_REQUIRE;
}

void with_one_slot(refit_config *config)
{
    config->broadcast_slots = 1;
}

void with_gpu_required_and_one_slot(refit_config *config)
{
    with_gpu_required(config);
    with_one_slot(config);
}

static void close_play(gpu_play *play)
{
    for (uint32_t i = 0; i < play->rollouts_count; i++) {
        rollouts_stop(&play->rollouts[i]);
        assert_false(play->rollouts[i].torn);
    }
    trainer_close(&play->trainer);
    assert_ok(refit_device_close(play->theirs, NULL));
    assert_ok(refit_device_close(play->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    memset(play, 0, sizeof *play);
}

void gpu_play_open(gpu_play *play, void (*change)(refit_config *config))
{
    refit_error error;
    if (play->device != NULL) close_play(play);
    fake_cuda_reset();
    play->config = trainer_config();
    play->config.broadcast_slots = 2;
    if (change != NULL) change(&play->config);
    if (refit_device_open("cuda:0", NULL, &play->device, &error) != REFIT_OK ||
        refit_device_open("cuda:0", NULL, &play->theirs, &error) != REFIT_OK) {
        fail_msg("%s", error.text);
    }
    trainer_open_on(&play->trainer, &play->config, play->device);
}

int gpu_play_setup(void **state)
{
    static gpu_play play;
    *state = &play;
    return 0;
}

int gpu_play_teardown(void **state)
{
    gpu_play *play = *state;
    if (play->device != NULL) close_play(play);
    return 0;
}

rollout_thread *gpu_play_hire_as(gpu_play *play, const refit_config *config, refit_device *device,
                                 rollout_action action)
{
    rollout_thread *member = &play->rollouts[play->rollouts_count++];
    rollouts_start_on(member, refit_publisher_endpoint(play->trainer.publisher), config, device,
                      action);
    return member;
}

rollout_thread *gpu_play_hire(gpu_play *play, bool on_gpu, rollout_action action)
{
    rollout_thread *member =
        gpu_play_hire_as(play, &play->config, on_gpu ? play->theirs : NULL, action);
    trainer_wait_workers(&play->trainer, play->rollouts_count);
    if (on_gpu) gpu_play_await_path(play, member, REFIT_PATH_CUDA_IPC);
    return member;
}

void gpu_play_await_nobody(gpu_play *play)
{
    int64_t deadline = rft_deadline(60000);
    while (trainer_stats(&play->trainer).workers > 0) {
        if (rft_ms_until(deadline) == 0) fail_msg("a worker that has left is still subscribed");
        (void)poll(NULL, 0, 2);
    }
}

uint64_t gpu_play_digest(uint64_t version)
{
    sample_version sample;
    const void *bytes[SAMPLE_TENSORS];
    sample_open(&sample, version);
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++)
        bytes[i] = sample.image + sample.manifest->tensors[i].offset;
    uint64_t digest = rollouts_digest(sample_tensors(), SAMPLE_TENSORS, bytes);
    sample_close(&sample);
    return digest;
}

uint64_t gpu_play_publish(gpu_play *play, uint64_t version)
{
    trainer_begin(&play->trainer, version);
    trainer_write(&play->trainer);
    assert_done(refit_publisher_commit(play->trainer.publisher, error));
    return gpu_play_digest(version);
}

void gpu_play_bring(gpu_play *play, rollout_thread *member, uint64_t version)
{
    uint64_t digest = gpu_play_publish(play, version);
    assert_true(rollouts_wait(member, version, 1) == digest);
}

void gpu_play_expect(gpu_play *play, uint64_t version, uint64_t digest)
{
    for (uint32_t i = 0; i < play->rollouts_count; i++)
        assert_true(rollouts_wait(&play->rollouts[i], version, 1) == digest);
}

void gpu_play_dismiss(gpu_play *play)
{
    for (uint32_t i = 0; i < play->rollouts_count; i++)
        rollouts_stop(&play->rollouts[i]);
    play->rollouts_count = 0;
}

refit_path gpu_play_path(gpu_play *play, const rollout_thread *member)
{
    refit_subscriber_info subscriber = {.size = sizeof subscriber};
    refit_worker_info info = {.size = sizeof info};
    assert_ok(refit_subscriber_describe(member->subscriber, &subscriber, NULL));
    for (uint32_t i = 0;
         refit_publisher_worker(play->trainer.publisher, i, &info, NULL) == REFIT_OK; i++) {
        if (strcmp(info.name, subscriber.worker) == 0) return info.path;
    }
    return REFIT_PATH_NONE;
}

void gpu_play_await_path(gpu_play *play, const rollout_thread *member, refit_path path)
{
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    while (gpu_play_path(play, member) != path) {
        if (rft_ms_until(deadline) == 0) fail_msg("the worker does not take path %d", (int)path);
        (void)poll(NULL, 0, 2);
    }
}
