/* A copy that a write gave up waiting for may end at any time: nothing else is written to its
 * destination, and nothing is served from there. */
#include <sys/resource.h>
#include <unistd.h>

#include "device/device.h"
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#define SOON_MS 200

static void linger_briefly(refit_config *config)
{
    config->broadcast_linger_ms = SOON_MS;
}

static void linger_briefly_one_slot(refit_config *config)
{
    linger_briefly(config);
    config->broadcast_shm = REFIT_SHM_REQUIRE;
    config->broadcast_slots = 1;
}

static refit_status write_first(gpu_play *play, const void *memory, refit_device *device,
                                refit_stream_ref after, refit_error *error)
{
    uint64_t bytes = play->trainer.sample.manifest->tensors[0].bytes;
    return refit_publisher_write(play->trainer.publisher, 0, memory, bytes, device, after, error);
}

/* The write is given up: its copy does not end. */
static void write_in_vain(gpu_play *play, const void *memory, refit_device *device,
                          refit_stream_ref after, refit_error *error)
{
    publisher_set_stage_timeout(play->trainer.publisher, SOON_MS);
    assert_int_equal(write_first(play, memory, device, after, error), REFIT_ERR_TIMEOUT);
    publisher_set_stage_timeout(play->trainer.publisher, play->config.broadcast_stage_timeout_ms);
}

/* A stream that is blocked before its work. */
static refit_stream_ref stream_stop(refit_device *device, void *memory)
{
    refit_stream_ref stream;
    assert_ok(refit_stream_open(device, &stream, NULL));
    fake_cuda_stop_stream((rft_cu_stream)stream.native);
    assert_ok(rft_device_zero(device, stream, memory, 16, NULL));
    return stream;
}

static void stream_go(refit_device *device, refit_stream_ref stream)
{
    fake_cuda_go_stream((rft_cu_stream)stream.native);
    fake_cuda_settle();
    assert_ok(refit_stream_close(device, stream, NULL));
}

/* All tensors but the first. */
static void write_rest(gpu_play *play)
{
    const rft_manifest *manifest = play->trainer.sample.manifest;
    for (uint32_t i = 1; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        assert_ok(refit_publisher_write(play->trainer.publisher, i,
                                        play->trainer.memory + tensor->offset, tensor->bytes,
                                        play->device, REFIT_STREAM_NONE, NULL));
    }
}

/* The first tensor again, from other memory, while the copy of the wrong bytes is blocked. */
PLAY_TEST(a_tensor_from_elsewhere_waits_for_the_copy_that_was_given_up)
{
    for (int trial = 0; trial < 4; trial++) {
        bool from_other = trial % 2 != 0, on_gpu = trial / 2 != 0;
        refit_error error;
        refit_device *other = NULL;
        void *memory = NULL, *wrong = NULL;
        gpu_play_open(play, linger_briefly);
        assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
        rollout_thread *member = gpu_play_hire(play, on_gpu, ROLLOUT_ACCEPT);
        trainer_begin(&play->trainer, 1);
        const sample_version *sample = &play->trainer.sample;
        uint64_t bytes = sample->manifest->tensors[0].bytes;
        const void *good = sample->image + sample->manifest->tensors[0].offset;
        assert_ok(refit_memory_alloc(play->device, bytes, &wrong, NULL));
        assert_ok(refit_memory_alloc(other, bytes, &memory, NULL));
        assert_ok(refit_stream_copy(other, REFIT_STREAM_NONE, memory, good, bytes, NULL));
        refit_stream_ref stream = stream_stop(play->device, wrong);
        write_in_vain(play, wrong, play->device, stream, NULL);
        const void *from = from_other ? memory : good;
        refit_device *device = from_other ? other : NULL;
        write_in_vain(play, from, device, REFIT_STREAM_NONE, &error);
        assert_says(&error, "earlier write");
        stream_go(play->device, stream);
        assert_ok(write_first(play, from, device, REFIT_STREAM_NONE, &error));
        write_rest(play);
        assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
        assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
        assert_ok(refit_memory_free(play->device, wrong, NULL));
        assert_ok(refit_memory_free(other, memory, NULL));
        gpu_play_dismiss(play);
        trainer_close(&play->trainer);
        trainer_open_on(&play->trainer, &play->config, play->device);
        assert_ok(refit_device_close(other, NULL));
    }
}

/* The slots that it writes to are not used again. */
PLAY_TEST(another_version_does_not_wait_for_it)
{
    void *wrong = NULL;
    gpu_play_open(play, linger_briefly);
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    const sample_version *sample = &play->trainer.sample;
    assert_ok(refit_memory_alloc(play->device, sample->manifest->tensors[0].bytes, &wrong, NULL));
    refit_stream_ref stream = stream_stop(play->device, wrong);
    write_in_vain(play, wrong, play->device, stream, NULL);
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    gpu_play_dismiss(play); /* or host memory would go up on the stream that stands */
    refit_device *device = play->trainer.device;
    trainer_begin(&play->trainer, 2);
    play->trainer.device = NULL; /* from the host */
    trainer_write(&play->trainer);
    play->trainer.device = device;
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    stream_go(play->device, stream);
    rollout_thread *late = gpu_play_hire_as(play, &play->config, NULL, ROLLOUT_ACCEPT);
    assert_true(rollouts_wait(late, 2, 1) == gpu_play_digest(2));
    assert_ok(refit_memory_free(play->device, wrong, NULL));
}

#define FILES_MOST 256

typedef struct shortage {
    struct rlimit limit;
    int files[FILES_MOST];
    int count;
} shortage;

/* No file can be opened, so that there is no shared memory either. */
static void shortage_begin(shortage *none)
{
    int file;
    *none = (shortage){0};
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &none->limit), 0);
    struct rlimit few = {FILES_MOST, none->limit.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while ((file = dup(STDERR_FILENO)) >= 0)
        none->files[none->count++] = file;
}

static void shortage_end(shortage *none)
{
    while (none->count > 0)
        close(none->files[--none->count]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none->limit), 0);
}

/* There is one slot, the copy writes over the committed version, and there is no memory to save
 * that: it is no longer served, so that no worker gets torn bytes. */
PLAY_TEST(with_no_other_memory_the_version_before_is_not_served)
{
    void *wrong = NULL;
    gpu_play_open(play, linger_briefly_one_slot);
    (void)gpu_play_publish(play, 1);
    trainer_begin(&play->trainer, 2);
    const sample_version *sample = &play->trainer.sample;
    assert_ok(refit_memory_alloc(play->device, sample->manifest->tensors[0].bytes, &wrong, NULL));
    refit_stream_ref stream = stream_stop(play->device, wrong);
    write_in_vain(play, wrong, play->device, stream, NULL);
    shortage none;
    shortage_begin(&none);
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    shortage_end(&none);
    rollout_thread *late = gpu_play_hire(play, false, ROLLOUT_ACCEPT);
    stream_go(play->device, stream);
    gpu_play_bring(play, late, 3);
    assert_int_equal(rollouts_count(late, 1), 0);
    assert_ok(refit_memory_free(play->device, wrong, NULL));
}

int main(void)
{
    return test_run("late_copies");
}
