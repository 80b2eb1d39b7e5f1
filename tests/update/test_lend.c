/* A trainer lends its own tensors to workers on its GPU: nothing is copied for them, what they copy
 * is what was lent, and once the version is over the tensors are the trainer's again. */
#include "base/clock.h"
#include "store/copy_queue.h"
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#define LONG_MS 20000u

static void open_lending(gpu_play *play, void (*change)(refit_config *config))
{
    gpu_play_open(play, change);
    play->trainer.lends = true;
}

static refit_subscriber *subscribe(gpu_play *play)
{
    refit_subscriber *subscriber = NULL;
    const char *endpoint = refit_publisher_endpoint(play->trainer.publisher);
    assert_ok(refit_subscriber_open(endpoint, &play->config, &subscriber, NULL));
    assert_ok(refit_subscriber_use_device(subscriber, play->theirs, NULL));
    while (trainer_stats(&play->trainer).workers_gpu == 0)
        trainer_wait_workers(&play->trainer, 1);
    return subscriber;
}

static refit_update *next_of(refit_subscriber *subscriber)
{
    refit_update *update = NULL;
    assert_done(refit_subscriber_next(subscriber, LONG_MS, &update, error));
    return update;
}

/* Begin, lend, and commit on the trainer's thread. */
static refit_update *lend_to(gpu_play *play, refit_subscriber *subscriber, uint64_t version)
{
    trainer_begin(&play->trainer, version);
    trainer_write(&play->trainer);
    trainer_start(&play->trainer, TRAINER_COMMIT, version);
    return next_of(subscriber);
}

PLAY_TEST(lent_tensors_are_read_where_they_lie)
{
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_bring(play, member, 1);
    uint64_t taken = fake_cuda_calls("cuMemAlloc");
    uint64_t exports = fake_cuda_calls("cuIpcGetMemHandle");
    uint64_t pinned = fake_cuda_calls("cuMemHostRegister");
    for (uint64_t version = 2; version <= 5; version++)
        gpu_play_expect(play, version, gpu_play_publish(play, version));
    assert_int_equal(fake_cuda_calls("cuMemAlloc"), taken);
    assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), exports); /* once an allocation */
    assert_int_equal(fake_cuda_calls("cuMemHostRegister"), pinned);
    assert_true(rollouts_was_on_device(member, 5));
    refit_stats stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_gpu_bytes, 0);
    assert_int_equal(stats.publish_pinned_bytes, 0);
}

PLAY_TEST(an_update_gives_the_addresses_of_the_trainer)
{
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, NULL);
    refit_subscriber *subscriber = subscribe(play);
    refit_update *update = lend_to(play, subscriber, 1);
    uint32_t count = trainer_weights(&play->trainer, weights);
    for (uint32_t i = 0; i < count; i++) {
        const void *bytes = NULL;
        assert_ok(refit_update_tensor(update, weights[i].tensor, NULL, &bytes, NULL));
        if (weights[i].bytes > 0) assert_ptr_equal(bytes, weights[i].memory);
    }
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    refit_subscriber_close(subscriber);
}

PLAY_TEST(a_worker_that_comes_late_gets_the_next_version)
{
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_bring(play, member, 1);
    rollout_thread *late = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
    assert_int_equal(rollouts_count(late, 1), 0);
}

/* The other worker reads the same version on the host. */
PLAY_TEST(a_worker_elsewhere_gets_a_copy)
{
    open_lending(play, NULL);
    rollout_thread *here = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    rollout_thread *elsewhere = gpu_play_hire(play, false, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 3; version++) {
        uint64_t digest = gpu_play_publish(play, version);
        assert_true(rollouts_wait(here, version, 1) == digest);
        assert_true(rollouts_wait(elsewhere, version, 1) == digest);
        assert_true(rollouts_was_on_device(here, version));
        assert_false(rollouts_was_on_device(elsewhere, version));
    }
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 0);
}

/* From host memory, which no worker on the GPU can map. */
PLAY_TEST(what_cannot_be_lent_is_copied)
{
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_take_device(&play->trainer, NULL);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    assert_true(rollouts_was_on_device(member, 1));
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes,
                     play->trainer.sample.manifest->store_bytes);
    trainer_take_device(&play->trainer, play->device);
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
    gpu_play_expect(play, 3, gpu_play_publish(play, 3));
}

static refit_status lend(gpu_play *play, const refit_weight *weights, uint32_t count)
{
    return refit_publisher_lend(play->trainer.publisher, weights, count, play->device,
                                REFIT_STREAM_NONE, NULL);
}

static refit_status write_all(gpu_play *play, const refit_weight *weights, uint32_t count)
{
    return refit_publisher_write_all(play->trainer.publisher, weights, count, play->device,
                                     REFIT_STREAM_NONE, NULL);
}

/* Changes the first byte of each of the trainer's tensors. */
static void spoil(gpu_play *play, const refit_weight *weights, uint32_t count)
{
    const unsigned char other = 0x77;
    for (uint32_t i = 0; i < count; i++) {
        unsigned char *at = play->trainer.memory + ((const unsigned char *)weights[i].memory -
                                                    (const unsigned char *)play->trainer.memory);
        if (weights[i].bytes > 0)
            assert_ok(refit_stream_copy(play->device, REFIT_STREAM_NONE, at, &other, 1, NULL));
    }
}

/* Half of the tensors are lent, and half are copied, in one version, in both orders. */
PLAY_TEST(a_version_may_be_lent_in_part)
{
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 6; version++) {
        trainer_begin(&play->trainer, version);
        uint32_t count = trainer_weights(&play->trainer, weights), half = count / 2;
        if (version % 2 == 0) assert_ok(write_all(play, weights + half, count - half));
        assert_ok(lend(play, weights, half));
        if (version % 2 == 1) assert_ok(write_all(play, weights + half, count - half));
        spoil(play, weights + half, count - half); /* those are copied */
        assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
        assert_true(rollouts_wait(member, version, 1) == gpu_play_digest(version));
        /* Two blocks at most: the worker may still be about to let go of the one before. */
        assert_in_range(trainer_stats(&play->trainer).publish_gpu_bytes, 1,
                        2 * play->trainer.sample.manifest->store_bytes);
    }
}

/* What a failed call had lent already is copied by the one that takes its place. */
PLAY_TEST(what_was_lent_by_a_call_that_failed_can_be_copied)
{
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    uint32_t count = trainer_weights(&play->trainer, weights);
    fake_cuda_fail("cuEventRecord", 1, 1, RFT_CU_UNKNOWN);
    assert_int_equal(lend(play, weights, count), REFIT_ERR_DEVICE);
    assert_ok(write_all(play, weights, count));
    spoil(play, weights, count);
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
    assert_true(rollouts_was_on_device(member, 1));
}

PLAY_TEST(what_is_not_aligned_is_copied)
{
    void *memory = NULL;
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    uint32_t count = trainer_weights(&play->trainer, weights);
    const refit_weight first = weights[count - 1];
    assert_ok(refit_memory_alloc(play->device, first.bytes + 8, &memory, NULL));
    unsigned char *odd = (unsigned char *)memory + 8;
    assert_ok(
        refit_stream_copy(play->device, REFIT_STREAM_NONE, odd, first.memory, first.bytes, NULL));
    weights[count - 1].memory = odd;
    assert_ok(lend(play, weights, count));
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
    assert_true(trainer_stats(&play->trainer).publish_gpu_bytes >= first.bytes);
    assert_ok(refit_memory_free(play->device, memory, NULL));
}

static void small_bucket(refit_config *config)
{
    config->broadcast_gpu_bucket_bytes = 4096;
}

/* Half is lent; the other half needs more than the GPU may be used for. */
PLAY_TEST(copies_on_the_gpu_are_bounded)
{
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    uint32_t count = trainer_weights(&play->trainer, weights), half = 2; /* those are small */
    assert_ok(write_all(play, weights, half));
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 4096);
    assert_ok(lend(play, weights + half, count - half));
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
    assert_true(rollouts_was_on_device(member, 1));
    trainer_begin(&play->trainer, 2);
    count = trainer_weights(&play->trainer, weights);
    assert_ok(lend(play, weights, half));
    assert_ok(write_all(play, weights + half, count - half));
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_true(rollouts_wait(member, 2, 1) == gpu_play_digest(2));
    assert_true(rollouts_was_streamed(member, 2));
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 4096);
}

static void no_bucket(refit_config *config)
{
    config->broadcast_gpu_bucket_bytes = 0;
}

/* What is only copied, and too much for the GPU, does not begin there each time; what is lent does
 * again. */
PLAY_TEST(a_version_that_was_too_much_for_the_gpu_begins_on_the_host)
{
    gpu_play_open(play, no_bucket);
    play->trainer.at_once = true;
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 4; version++) {
        uint64_t taken = fake_cuda_calls("cuIpcGetMemHandle");
        gpu_play_bring(play, member, version);
        assert_false(rollouts_was_on_device(member, version));
        assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, 0);
        assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), taken); /* nothing is exported */
    }
    play->trainer.lends = true;
    for (uint64_t version = 5; version <= 7; version++) {
        gpu_play_bring(play, member, version);
        assert_int_equal(rollouts_was_on_device(member, version), version > 5);
    }
}

static void stored(refit_config *config)
{
    config->broadcast_gpu = REFIT_GPU_STORE;
    config->broadcast_gpu_bucket_bytes = 0;
}

/* Workers that come between two versions are served. */
PLAY_TEST(with_store_nothing_is_lent)
{
    open_lending(play, stored);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    uint64_t digest = gpu_play_publish(play, 1);
    assert_true(rollouts_wait(member, 1, 1) == digest);
    assert_true(rollouts_was_on_device(member, 1));
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes,
                     play->trainer.sample.manifest->store_bytes);
    rollout_thread *late = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    assert_true(rollouts_wait(late, 1, 1) == digest);
    assert_true(rollouts_was_on_device(late, 1));
}

/* ---- From the GPU to the host after all */

/* Version 1 with half of its tensors lent, and no room on the GPU for the others; how many it has.
 */
static uint32_t lend_half_of_one(gpu_play *play, refit_weight weights[SAMPLE_TENSORS])
{
    trainer_begin(&play->trainer, 1);
    uint32_t count = trainer_weights(&play->trainer, weights);
    assert_ok(lend(play, weights, count / 2));
    fake_cuda_fail("cuMemAlloc", 1, 3, RFT_CU_OUT_OF_MEMORY); /* for the ring, too */
    return count;
}

/* The GPU has no room for what cannot be lent, when some is lent already. */
PLAY_TEST(where_the_gpu_is_full_what_is_lent_goes_over_the_host_too)
{
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    uint32_t count = lend_half_of_one(play, weights), half = count / 2;
    assert_ok(write_all(play, weights + half, count - half));
    spoil(play, weights, count); /* all is copied by now */
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
    assert_false(rollouts_was_on_device(member, 1));
    gpu_play_bring(play, member, 2); /* there is room again */
    assert_true(rollouts_was_on_device(member, 2));
}

PLAY_TEST(where_the_gpu_is_full_and_required_the_version_ends)
{
    refit_weight weights[SAMPLE_TENSORS];
    open_lending(play, with_gpu_required);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    uint32_t count = lend_half_of_one(play, weights), half = count / 2;
    assert_int_equal(write_all(play, weights + half, count - half), REFIT_ERR_DEVICE_MEMORY);
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    gpu_play_bring(play, member, 2);
}

/* Half of the weights lie on the workers' GPU, half on another one. */
PLAY_TEST(weights_of_two_gpus_make_one_version)
{
    void *memory = NULL;
    refit_device *other = NULL;
    refit_weight weights[SAMPLE_TENSORS], theirs[SAMPLE_TENSORS];
    open_lending(play, NULL);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 4; version++) {
        trainer_begin(&play->trainer, version);
        const sample_version *sample = &play->trainer.sample;
        uint32_t count = trainer_weights(&play->trainer, weights), half = count / 2;
        assert_ok(refit_memory_alloc(other, sample->manifest->store_bytes, &memory, NULL));
        assert_ok(refit_stream_copy(other, REFIT_STREAM_NONE, memory, sample->image,
                                    sample->manifest->store_bytes, NULL));
        for (uint32_t i = half; i < count; i++) {
            uint64_t offset = sample->manifest->tensors[weights[i].tensor].offset;
            theirs[i] = weights[i];
            theirs[i].memory = (unsigned char *)memory + offset;
        }
        if (version % 2 == 1) assert_ok(lend(play, weights, half));
        assert_ok(refit_publisher_lend(play->trainer.publisher, theirs + half, count - half, other,
                                       REFIT_STREAM_NONE, NULL));
        if (version % 2 == 0) assert_ok(lend(play, weights, half));
        assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
        assert_true(rollouts_wait(member, version, 1) == gpu_play_digest(version));
        assert_ok(refit_memory_free(other, memory, NULL));
    }
    gpu_play_dismiss(play);
    trainer_close(&play->trainer);
    trainer_open_on(&play->trainer, &play->config, play->device);
    assert_ok(refit_device_close(other, NULL));
}

/* A member that cannot map what is lent: the version is brought to the host for it, with all that
 * was written; the other one has it on the GPU. */
PLAY_TEST(for_a_worker_that_maps_nothing_the_version_is_brought_to_the_host)
{
    void (*const changes[])(refit_config *) = {NULL, with_one_slot};
    for (size_t trial = 0; trial < COUNT_OF(changes); trial++) {
        open_lending(play, changes[trial]);
        rollout_thread *one = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        rollout_thread *two = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        for (uint64_t version = 1; version <= 4; version++) {
            /* A worker maps once: the first call is the trainer's. */
            if (version == 1) fake_cuda_fail("cuIpcGetMemHandle", 2, 1, RFT_CU_UNKNOWN);
            uint64_t digest = gpu_play_publish(play, version);
            assert_true(rollouts_wait(one, version, 1) == digest);
            assert_true(rollouts_wait(two, version, 1) == digest);
            assert_int_equal(
                rollouts_was_on_device(one, version) + rollouts_was_on_device(two, version), 1);
        }
    }
}

/* Frees the weights' memory and takes as much until it lies where it lay. */
static void take_again(gpu_play *play)
{
    const void *before = play->trainer.memory;
    void *memory = NULL;
    trainer_take_device(&play->trainer, play->device); /* gives it back */
    do {
        assert_ok(refit_memory_free(play->device, memory, NULL));
        uint64_t bytes = play->trainer.sample.manifest->store_bytes;
        assert_ok(refit_memory_alloc(play->device, bytes, &memory, NULL));
    } while (memory != before);
    play->trainer.memory = memory;
}

/* With one slot, and with a GPU and no other way. */
PLAY_TEST(lending_needs_no_second_slot)
{
    open_lending(play, with_gpu_required_and_one_slot);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 4; version++) {
        gpu_play_expect(play, version, gpu_play_publish(play, version));
        assert_true(rollouts_was_on_device(member, version));
    }
    refit_stats stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_gpu_bytes, 0);
    assert_int_equal(stats.publish_pinned_bytes, 0);
}

/* A trainer that frees its weights, and gets memory at the same addresses. */
PLAY_TEST(memory_that_was_taken_again_is_exported_again)
{
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_bring(play, member, 1);
    const void *before = play->trainer.memory;
    for (uint64_t version = 2; version <= 6; version++) {
        take_again(play);
        uint64_t exports = fake_cuda_calls("cuIpcGetMemHandle");
        gpu_play_expect(play, version, gpu_play_publish(play, version));
        assert_true(fake_cuda_calls("cuIpcGetMemHandle") > exports);
        assert_ptr_equal(play->trainer.memory, before);
    }
}

static void hasty(refit_config *config)
{
    config->broadcast_commit_timeout_ms = 300;
}

PLAY_TEST(what_is_over_cannot_be_accepted)
{
    refit_error error;
    open_lending(play, hasty);
    refit_subscriber *subscriber = subscribe(play);
    refit_update *update = lend_to(play, subscriber, 1);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER); /* it did not wait */
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STALE);
    refit_update_close(update);
    while (trainer_stats(&play->trainer).workers_gpu == 0)
        trainer_wait_workers(&play->trainer, 1);
    update = lend_to(play, subscriber, 2);
    assert_int_equal(refit_update_version(update), 2);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    (void)trainer_join(&play->trainer);
    refit_subscriber_close(subscriber);
}

PLAY_TEST(an_aborted_version_is_the_trainers_again)
{
    open_lending(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_bring(play, member, 1);
    trainer_begin(&play->trainer, 2);
    trainer_write(&play->trainer);
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    gpu_play_expect(play, 3, gpu_play_publish(play, 3));
    assert_int_equal(rollouts_count(member, 2), 0);
}

/* ---- Copies to the engine */

typedef struct engine {
    refit_device *device;
    refit_target targets[SAMPLE_TENSORS];
    uint32_t count;
    unsigned char *memory;
} engine;

/* Room for each tensor, `shift` bytes after a boundary of 512. */
static void engine_open_on(engine *to, const gpu_play *play, refit_device *device, uint64_t shift)
{
    void *memory = NULL;
    const rft_manifest *manifest = play->trainer.sample.manifest;
    assert_ok(refit_memory_alloc(device, manifest->store_bytes + shift, &memory, NULL));
    to->device = device;
    to->memory = memory;
    to->count = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        to->targets[to->count++] =
            (refit_target){i, to->memory + tensor->offset + shift, tensor->bytes, NULL};
    }
}

static void engine_open(engine *to, const gpu_play *play, uint64_t shift)
{
    engine_open_on(to, play, play->theirs, shift);
}

static void engine_close(const engine *to)
{
    assert_ok(refit_memory_free(to->device, to->memory, NULL));
}

static void engine_expect(const engine *to, const gpu_play *play)
{
    const sample_version *sample = &play->trainer.sample;
    for (uint32_t i = 0; i < to->count; i++) {
        const refit_target *one = &to->targets[i];
        unsigned char here[1 << 20];
        assert_true(one->bytes <= sizeof here);
        if (one->bytes == 0) continue;
        assert_ok(
            refit_stream_copy(to->device, REFIT_STREAM_NONE, here, one->memory, one->bytes, NULL));
        assert_memory_equal(here, sample->image + sample->manifest->tensors[one->tensor].offset,
                            one->bytes);
    }
}

PLAY_TEST(a_version_is_copied_to_the_engine)
{
    open_lending(play, NULL);
    refit_subscriber *subscriber = subscribe(play);
    for (uint64_t version = 1; version <= 3; version++) {
        engine to;
        refit_update *update = lend_to(play, subscriber, version);
        engine_open(&to, play, version == 2 ? 3 : 0); /* at odd addresses, too */
        assert_ok(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, NULL));
        engine_expect(&to, play);
        assert_ok(refit_update_accept(update, NULL));
        refit_update_close(update);
        assert_ok(trainer_join(&play->trainer));
        engine_close(&to);
    }
    refit_subscriber_close(subscriber);
}

/* A worker on another GPU than the trainer's, whose weights lie on the host. */
static refit_subscriber *subscribe_elsewhere(gpu_play *play, refit_device **other)
{
    refit_subscriber *subscriber = NULL;
    trainer_take_device(&play->trainer, NULL);
    assert_ok(refit_device_open("cuda:1", NULL, other, NULL));
    const char *endpoint = refit_publisher_endpoint(play->trainer.publisher);
    assert_ok(refit_subscriber_open(endpoint, &play->config, &subscriber, NULL));
    assert_ok(refit_subscriber_use_device(subscriber, *other, NULL));
    trainer_wait_workers(&play->trainer, 1);
    return subscriber;
}

static void without_shm(refit_config *config)
{
    config->broadcast_shm = REFIT_SHM_OFF;
}

/* From shared memory and from the worker's own: page-locked once, and copied with one wait. */
PLAY_TEST(a_version_on_the_host_is_copied_to_the_engine)
{
    void (*const changes[])(refit_config *) = {NULL, without_shm};
    for (size_t trial = 0; trial < COUNT_OF(changes); trial++) {
        engine to;
        refit_device *other = NULL;
        gpu_play_open(play, changes[trial]);
        refit_subscriber *subscriber = subscribe_elsewhere(play, &other);
        uint64_t locked = 0;
        for (uint64_t version = 1; version <= 6; version++) {
            refit_update *update = lend_to(play, subscriber, version);
            assert_null(refit_update_device(update));
            engine_open_on(&to, play, other, version % 2 == 0 ? 3 : 0);
            uint64_t waits = fake_cuda_calls("cuEventRecord");
            assert_ok(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, NULL));
            assert_int_equal(fake_cuda_calls("cuEventRecord"), waits + 1);
            engine_expect(&to, play);
            assert_ok(refit_update_accept(update, NULL));
            /* It is on the host, and can still be read. */
            assert_ok(refit_update_copy(update, to.targets, 1, REFIT_STREAM_NONE, NULL));
            refit_update_close(update);
            assert_ok(trainer_join(&play->trainer));
            engine_close(&to);
            if (version == 3) locked = fake_cuda_calls("cuMemHostRegister");
        }
        assert_in_range(locked, 1, 1000);
        assert_int_equal(fake_cuda_calls("cuMemHostRegister"), locked);
        refit_subscriber_close(subscriber);
        assert_ok(refit_device_close(other, NULL));
    }
}

/* Through memory of the worker's own that is. */
PLAY_TEST(a_version_that_cannot_be_page_locked_goes_through_memory_that_is)
{
    engine to;
    refit_device *other = NULL;
    gpu_play_open(play, NULL);
    refit_subscriber *subscriber = subscribe_elsewhere(play, &other);
    refit_update *update = lend_to(play, subscriber, 1);
    engine_open_on(&to, play, other, 0);
    fake_cuda_fail("cuMemHostRegister", 1, 1, RFT_CU_OUT_OF_MEMORY);
    uint64_t pageable = fake_cuda_pageable_copies();
    assert_ok(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, NULL));
    assert_int_equal(fake_cuda_pageable_copies(), pageable);
    engine_expect(&to, play);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    engine_close(&to);
    refit_subscriber_close(subscriber);
    assert_ok(refit_device_close(other, NULL));
}

/* The copies are slow, and right. */
PLAY_TEST(where_nothing_can_be_page_locked_the_version_is_copied_all_the_same)
{
    engine to;
    refit_device *other = NULL;
    gpu_play_open(play, NULL);
    refit_subscriber *subscriber = subscribe_elsewhere(play, &other);
    fake_cuda_fail("cuMemHostRegister", 1, 1000, RFT_CU_OUT_OF_MEMORY);
    uint64_t tries = 0;
    for (uint64_t version = 1; version <= 3; version++) {
        refit_update *update = lend_to(play, subscriber, version);
        engine_open_on(&to, play, other, 0);
        assert_ok(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, NULL));
        engine_expect(&to, play);
        assert_ok(refit_update_accept(update, NULL));
        refit_update_close(update);
        assert_ok(trainer_join(&play->trainer));
        engine_close(&to);
        if (version == 1) tries = fake_cuda_calls("cuMemHostRegister");
    }
    assert_int_equal(fake_cuda_calls("cuMemHostRegister"), tries); /* not for each version */
    fake_cuda_forget_faults();
    refit_subscriber_close(subscriber);
    assert_ok(refit_device_close(other, NULL));
}

/* A few times each of the sample's: one wait and one kernel for as many as a batch has. The driver
 * is asked about an allocation, and not about each tensor in it. */
PLAY_TEST(a_copy_waits_once_for_each_batch_of_tensors)
{
    engine to;
    static refit_target many[RFT_DIGEST_BATCH_MOST + 1];
    open_lending(play, NULL);
    refit_subscriber *subscriber = subscribe(play);
    uint64_t asked = fake_cuda_calls("cuPointerGetAttributes");
    refit_update *update = lend_to(play, subscriber, 1);
    /* when the list is checked, is lent, and when the allocation is exported */
    assert_int_equal(fake_cuda_calls("cuPointerGetAttributes"), asked + 3);
    engine_open(&to, play, 0);
    for (uint32_t i = 0; i < COUNT_OF(many); i++)
        many[i] = to.targets[i % to.count];
    assert_ok(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, NULL));
    static const uint32_t counts[] = {10, 100, 1000, RFT_DIGEST_BATCH_MOST, COUNT_OF(many)};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        uint64_t waits = fake_cuda_calls("cuEventRecord"), batches = 1 + counts[i] / COUNT_OF(many);
        uint64_t launches = fake_cuda_calls("cuLaunchKernel");
        asked = fake_cuda_calls("cuPointerGetAttributes");
        assert_ok(refit_update_copy(update, many, counts[i], REFIT_STREAM_NONE, NULL));
        assert_int_equal(fake_cuda_calls("cuPointerGetAttributes"), asked + 1);
        assert_int_equal(fake_cuda_calls("cuEventRecord"), waits + batches);
        assert_int_equal(fake_cuda_calls("cuLaunchKernel"), launches + batches);
    }
    engine_expect(&to, play);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    engine_close(&to);
    refit_subscriber_close(subscriber);
}

/* The trainer may change them: they cannot be read any more. */
PLAY_TEST(bytes_of_the_gpu_end_with_the_decision)
{
    engine to;
    refit_error error;
    const void *bytes;
    refit_tensor tensor = {.size = sizeof tensor};
    open_lending(play, NULL);
    refit_subscriber *subscriber = subscribe(play);
    for (uint64_t version = 1; version <= 2; version++) {
        refit_update *update = lend_to(play, subscriber, version);
        engine_open(&to, play, 0);
        assert_ok(refit_update_tensor(update, 0, &tensor, &bytes, NULL));
        if (version == 1) assert_ok(refit_update_accept(update, NULL));
        if (version == 2) assert_ok(refit_update_refuse(update, "no", 1, NULL));
        assert_int_equal(refit_update_tensor(update, 0, &tensor, &bytes, &error), REFIT_ERR_STATE);
        assert_non_null(strstr(error.text, "the trainer's again"));
        assert_ok(refit_update_tensor(update, 0, &tensor, NULL, NULL)); /* what it is */
        assert_int_equal(refit_update_copy(update, to.targets, 1, REFIT_STREAM_NONE, NULL),
                         REFIT_ERR_STATE);
        refit_update_close(update);
        assert_int_equal(trainer_join(&play->trainer), version == 1 ? REFIT_OK : REFIT_ERR_PEER);
        engine_close(&to);
    }
    refit_subscriber_close(subscriber);
}

PLAY_TEST(tensors_that_change_while_they_are_lent_are_found_out)
{
    refit_error error;
    engine to;
    unsigned char other = 0x77;
    open_lending(play, NULL);
    refit_subscriber *subscriber = subscribe(play);
    refit_update *update = lend_to(play, subscriber, 1);
    engine_open(&to, play, 0);
    assert_ok(refit_stream_copy(play->device, REFIT_STREAM_NONE, play->trainer.memory + 5, &other,
                                1, NULL));
    assert_int_equal(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, &error),
                     REFIT_ERR_CORRUPT);
    assert_non_null(strstr(error.text, "was changed by the trainer"));
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    assert_non_null(strstr(error.text, "refuse it"));
    assert_ok(refit_update_refuse(update, "changed", 1, NULL)); /* it does not count as kept */
    refit_update_close(update);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER);
    assert_non_null(strstr(play->trainer.error.text, "catches up with the next one"));
    while (trainer_stats(&play->trainer).workers_gpu == 0) /* so it has joined again */
        trainer_wait_workers(&play->trainer, 1);
    update = lend_to(play, subscriber, 2);
    assert_ok(refit_update_copy(update, to.targets, to.count, REFIT_STREAM_NONE, NULL));
    engine_expect(&to, play);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    engine_close(&to);
    refit_subscriber_close(subscriber);
}

static void wait_for_gate(void *user)
{
    rft_mutex *gate = user;
    rft_lock(gate);
    rft_unlock(gate);
}

/* The engine's stream stands still: the copy gives up, and its memory is not given back before it
 * has ended. */
PLAY_TEST(a_copy_that_does_not_end_keeps_the_version)
{
    engine to;
    rft_mutex gate;
    refit_error error;
    refit_stream_ref stream;
    refit_update *next = NULL;
    open_lending(play, NULL);
    play->config.broadcast_stage_timeout_ms = 100; /* the worker's, for copies alone */
    refit_subscriber *subscriber = subscribe(play);
    refit_update *update = lend_to(play, subscriber, 1);
    engine_open(&to, play, 0);
    assert_ok(rft_mutex_open(&gate, NULL));
    assert_ok(refit_stream_open(play->theirs, &stream, NULL));
    rft_lock(&gate);
    assert_ok(refit_stream_call(play->theirs, stream, wait_for_gate, &gate, NULL));
    assert_int_equal(refit_update_copy(update, to.targets, to.count, stream, &error),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_update_copy(update, to.targets, to.count, stream, &error),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    assert_ok(refit_update_refuse(update, "late", 0, NULL));
    refit_update_close(update);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER);
    assert_int_equal(refit_subscriber_next(subscriber, 50, &next, &error), REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "does not end its copies of version 1"));
    rft_unlock(&gate);
    assert_ok(refit_stream_wait(play->theirs, stream, LONG_MS, NULL));
    while (trainer_stats(&play->trainer).workers_gpu == 0)
        trainer_wait_workers(&play->trainer, 1);
    update = lend_to(play, subscriber, 2);
    assert_int_equal(refit_update_version(update), 2);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    assert_ok(refit_stream_close(play->theirs, stream, NULL));
    rft_mutex_close(&gate);
    engine_close(&to);
    refit_subscriber_close(subscriber);
}

PLAY_TEST(what_does_not_fit_is_refused_before_the_first_byte)
{
    engine to;
    refit_error error;
    open_lending(play, NULL);
    refit_subscriber *subscriber = subscribe(play);
    refit_update *update = lend_to(play, subscriber, 1);
    engine_open(&to, play, 0);
    const refit_target wrong[] = {
        {to.targets[0].tensor, to.targets[0].memory, to.targets[0].bytes + 1, NULL},
        {SAMPLE_TENSORS, to.targets[0].memory, to.targets[0].bytes, NULL},
        {to.targets[0].tensor, &to, to.targets[0].bytes, NULL}, /* host memory */
        {to.targets[0].tensor, NULL, to.targets[0].bytes, NULL},
    };
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        const refit_target both[] = {to.targets[1], wrong[i]};
        assert_int_equal(refit_update_copy(update, both, 2, REFIT_STREAM_NONE, &error),
                         REFIT_ERR_INVALID);
    }
    assert_ok(refit_update_copy(update, NULL, 0, REFIT_STREAM_NONE, NULL));
    assert_invalid(refit_update_copy(update, NULL, 1, REFIT_STREAM_NONE, NULL));
    assert_invalid(refit_update_copy(NULL, to.targets, 1, REFIT_STREAM_NONE, NULL));
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_int_equal(refit_update_copy(update, to.targets, 1, REFIT_STREAM_NONE, NULL),
                     REFIT_ERR_STATE);
    assert_ok(trainer_join(&play->trainer));
    engine_close(&to);
    refit_subscriber_close(subscriber);
}

int main(void)
{
    return test_run("lend");
}
