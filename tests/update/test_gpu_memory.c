/* The GPU's memory that versions lie in: taken when a worker reads it, never changed or freed under
 * a reader, and what happens when there is none. */
#include <poll.h>

#include "base/clock.h"
#include "publisher/publisher.h"
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#define LONG_MS   20000u
#define GPU_BYTES (UINT64_C(64) << 20) /* of the fake driver */

/* A version for which one worker is a quorum; one that is still reading may miss it, and is not
 * waited for where there is no memory but its own. */
static void one_is_enough(refit_config *config)
{
    config->broadcast_linger_ms = 500;
    config->broadcast_commit = REFIT_COMMIT_QUORUM;
    config->broadcast_quorum = 1;
}

static void one_is_enough_and_required(refit_config *config)
{
    one_is_enough(config);
    with_gpu_required(config);
}

/* What is not applied soon is not waited for. */
static void hasty_one_slot(refit_config *config)
{
    with_one_slot(config);
    config->broadcast_commit_timeout_ms = 300;
}

static uint64_t store_bytes(const gpu_play *play)
{
    return play->trainer.sample.manifest->store_bytes;
}

static uint64_t gpu_bytes(gpu_play *play)
{
    return trainer_stats(&play->trainer).publish_gpu_bytes;
}

PLAY_TEST(memory_is_taken_while_a_worker_wants_it)
{
    gpu_play_open(play, NULL);
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    assert_int_equal(gpu_bytes(play), 0);
    (void)gpu_play_publish(play, 1);
    assert_int_equal(gpu_bytes(play), store_bytes(play));
    (void)gpu_play_publish(play, 2);
    assert_int_equal(gpu_bytes(play), 2 * store_bytes(play));
    uint64_t taken = fake_cuda_calls("cuMemAlloc");
    for (uint64_t version = 3; version <= 8; version++)
        gpu_play_expect(play, version, gpu_play_publish(play, version));
    assert_int_equal(fake_cuda_calls("cuMemAlloc"), taken); /* the same two blocks all along */
    gpu_play_dismiss(play);
    gpu_play_await_nobody(play);
    (void)gpu_play_publish(play, 9);
    assert_int_equal(gpu_bytes(play), 0);
}

static refit_status begin(gpu_play *play, uint64_t version)
{
    return refit_publisher_begin(play->trainer.publisher, version, NULL);
}

/* The worker that reads the version's slot is evicted: it does not let go. */
static refit_status begin_over_a_reader(gpu_play *play, uint64_t version)
{
    publisher_set_stage_timeout(play->trainer.publisher, 300);
    refit_status status = begin(play, version);
    publisher_set_stage_timeout(play->trainer.publisher, play->config.broadcast_stage_timeout_ms);
    return status;
}

/* The good worker has the version; another one is not waited for. */
static void publish_to(gpu_play *play, rollout_thread *good, uint64_t version,
                       refit_status (*begins)(gpu_play *play, uint64_t version))
{
    refit_publisher *publisher = play->trainer.publisher;
    trainer_sample(&play->trainer, version);
    assert_ok(begins(play, version));
    trainer_write(&play->trainer);
    trainer_start(&play->trainer, TRAINER_COMMIT, version);
    assert_true(rollouts_wait(good, version, 1) == gpu_play_digest(version));
    refit_publisher_cancel(publisher);
    if (trainer_join(&play->trainer) != REFIT_ERR_CANCELLED)
        (void)!refit_publisher_wait_workers(publisher, 0, 0, NULL); /* takes the cancel */
    assert_int_equal(refit_publisher_version(publisher), version);
}

/* The keeper reads version 1 all the time; version 3 would be written over it. */
PLAY_TEST(a_kept_version_stays_as_it_was_while_others_come)
{
    gpu_play_open(play, one_is_enough);
    rollout_thread *good = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    rollout_thread *keeper = gpu_play_hire(play, true, ROLLOUT_KEEP);
    gpu_play_bring(play, keeper, 1);
    publish_to(play, good, 2, begin);
    uint64_t locked = fake_cuda_calls("cuMemHostRegister");
    publish_to(play, good, 3, begin_over_a_reader);
    assert_int_equal(fake_cuda_calls("cuMemHostRegister"), locked); /* the host's slot is as good */
    assert_true(rollouts_was_on_device(good, 3));
    assert_int_equal(gpu_bytes(play), 3 * store_bytes(play));
    rollout_set_action(keeper, ROLLOUT_ACCEPT);
    rollouts_let_go(keeper);
    assert_true(rollouts_wait(keeper, 3, 1) == gpu_play_digest(3));
    assert_true(rollouts_was_on_device(keeper, 3));
    publish_to(play, good, 4, begin);
    publish_to(play, good, 5, begin);
    assert_int_equal(gpu_bytes(play), 2 * store_bytes(play)); /* the old one is free again */
}

static refit_update *next_of(refit_subscriber *subscriber)
{
    refit_update *update = NULL;
    assert_done(refit_subscriber_next(subscriber, LONG_MS, &update, error));
    return update;
}

/* The worker takes its time over version 1, and the trainer goes on without it. */
PLAY_TEST(evicted_worker_cannot_accept_the_bytes_it_read)
{
    refit_subscriber *subscriber = NULL;
    refit_error error;
    gpu_play_open(play, hasty_one_slot);
    const char *endpoint = refit_publisher_endpoint(play->trainer.publisher);
    assert_ok(refit_subscriber_open(endpoint, &play->config, &subscriber, NULL));
    assert_ok(refit_subscriber_use_device(subscriber, play->theirs, NULL));
    trainer_wait_workers(&play->trainer, 1);
    while (trainer_stats(&play->trainer).workers_gpu == 0)
        trainer_wait_workers(&play->trainer, 1);
    trainer_begin(&play->trainer, 1);
    trainer_write(&play->trainer);
    trainer_start(&play->trainer, TRAINER_COMMIT, 1);
    refit_update *update = next_of(subscriber);
    assert_ptr_equal(refit_update_device(update), play->theirs);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER); /* committed, not applied */
    trainer_begin(&play->trainer, 2);
    trainer_write(&play->trainer);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STALE);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    refit_update_close(update);
    trainer_start(&play->trainer, TRAINER_COMMIT, 2);
    update = next_of(subscriber);
    assert_int_equal(refit_update_version(update), 2);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    (void)trainer_join(&play->trainer); /* as a guest it may be late */
    refit_subscriber_close(subscriber);
}

PLAY_TEST(where_the_gpu_is_full_versions_go_another_way)
{
    gpu_play_open(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    fake_cuda_fail("cuMemAlloc", 2, 2, RFT_CU_OUT_OF_MEMORY); /* the first is the weights' own */
    gpu_play_bring(play, member, 1);
    assert_false(rollouts_was_on_device(member, 1));
    assert_int_equal(gpu_play_path(play, member), REFIT_PATH_SHM);
    assert_int_equal(trainer_stats(&play->trainer).workers_gpu, 0);
    gpu_play_bring(play, member, 2); /* there is room again */
    assert_true(rollouts_was_on_device(member, 2));
    assert_int_equal(gpu_play_path(play, member), REFIT_PATH_CUDA_IPC);
}

static refit_status write_first(gpu_play *play, refit_error *error)
{
    refit_weight weights[SAMPLE_TENSORS];
    (void)trainer_weights(&play->trainer, weights);
    return refit_publisher_write(play->trainer.publisher, weights[0].tensor, weights[0].memory,
                                 weights[0].bytes, play->trainer.device, REFIT_STREAM_NONE, error);
}

PLAY_TEST(where_the_gpu_is_full_and_required_a_write_says_so)
{
    gpu_play_open(play, with_gpu_required);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    (void)gpu_play_publish(play, 1);
    trainer_begin(&play->trainer, 2);
    fake_cuda_fail("cuMemAlloc", 1, 3, RFT_CU_OUT_OF_MEMORY); /* for pieces, too */
    assert_refused(write_first(play, error), REFIT_ERR_DEVICE_MEMORY, "broadcast.gpu");
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    assert_int_equal(refit_publisher_version(play->trainer.publisher), 1);
    rollout_thread *late = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    assert_true(rollouts_wait(late, 1, 1) == gpu_play_digest(1)); /* it is still served */
    gpu_play_bring(play, member, 3);
}

/* An evicted reader keeps the block, and there is no room for another. */
PLAY_TEST(a_stuck_reader_and_a_full_gpu_do_not_tear_anything)
{
    for (int require = 0; require < 2; require++) {
        gpu_play_open(play, require ? one_is_enough_and_required : one_is_enough);
        rollout_thread *good = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        rollout_thread *keeper = gpu_play_hire(play, true, ROLLOUT_KEEP);
        (void)gpu_play_publish(play, 1);
        assert_true(rollouts_wait(keeper, 1, 1) == gpu_play_digest(1));
        publish_to(play, good, 2, begin);
        fake_cuda_fail("cuMemAlloc", 1, 1000, RFT_CU_OUT_OF_MEMORY);
        assert_ok(begin_over_a_reader(play, 3));
        assert_int_equal(write_first(play, NULL), require ? REFIT_ERR_DEVICE_MEMORY : REFIT_OK);
        assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
        rollout_set_action(keeper, ROLLOUT_ACCEPT);
        rollouts_let_go(keeper);
        assert_true(rollouts_wait(keeper, 2, 1) == gpu_play_digest(2));
        fake_cuda_forget_faults();
        publish_to(play, good, 4, begin);
    }
}

static void declare_anew(gpu_play *play)
{
    refit_tensor changed[SAMPLE_TENSORS];
    memcpy(changed, sample_tensors(), sizeof changed);
    changed[0].name = "renamed";
    assert_ok(refit_publisher_declare(play->trainer.publisher, changed, SAMPLE_TENSORS, NULL));
}

/* No beat comes by itself in time. */
static void slow_heart(refit_config *config)
{
    config->broadcast_heartbeat_ms = 15000;
    config->broadcast_linger_ms = 10000;
}

static void slow_heart_and_required(refit_config *config)
{
    slow_heart(config);
    with_gpu_required(config);
}

PLAY_TEST(other_tensors_take_other_memory_when_the_old_is_let_go)
{
    void (*const changes[])(refit_config *) = {slow_heart, slow_heart_and_required};
    for (size_t trial = 0; trial < 2; trial++) {
        gpu_play_open(play, changes[trial]);
        rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        gpu_play_expect(play, 1, gpu_play_publish(play, 1));
        gpu_play_expect(play, 2, gpu_play_publish(play, 2));
        /* Room for what there is, and not for more. */
        fake_cuda_set_taken(0, GPU_BYTES - fake_cuda_used(0));
        declare_anew(play);
        gpu_play_bring(play, member, 3);
        assert_true(rollouts_was_on_device(member, 3));
        fake_cuda_set_taken(0, 0);
    }
}

typedef struct closing {
    test_trainer *trainer;
    atomic_bool released; /* by the reader */
    bool waited;
} closing;

static void *close_trainer(void *user)
{
    closing *it = user;
    refit_publisher_close(it->trainer->publisher);
    it->waited = atomic_load(&it->released);
    it->trainer->publisher = NULL;
    return NULL;
}

static void await_goodbye(rollout_thread *member)
{
    refit_subscriber_info info = {.size = sizeof info, .connected = 1};
    while (info.connected)
        assert_ok(refit_subscriber_describe(member->subscriber, &info, NULL));
}

/* The memory, which the trainer lends or not, is freed when the reader releases it, and not before.
 */
PLAY_TEST(close_waits_for_readers)
{
    for (int lends = 0; lends < 2; lends++) {
        rft_thread thread;
        gpu_play_open(play, slow_heart);
        play->trainer.lends = lends != 0;
        closing it = {.trainer = &play->trainer};
        rollout_thread *keeper = gpu_play_hire(play, true, ROLLOUT_KEEP);
        (void)gpu_play_publish(play, 1);
        assert_true(rollouts_wait(keeper, 1, 1) == gpu_play_digest(1));
        assert_ok(rft_thread_start(&thread, "close", close_trainer, &it, NULL));
        await_goodbye(keeper);
        atomic_store(&it.released, true);
        rollouts_let_go(keeper);
        rft_thread_join(thread);
        assert_true(it.waited);
    }
}

static void linger_briefly(refit_config *config)
{
    config->broadcast_linger_ms = 100;
}

/* The publisher stops waiting for a reader: nothing is freed under it, and the device has all its
 * memory back once the reader has released it. */
PLAY_TEST(what_is_read_beyond_the_close_is_freed_with_the_device)
{
    gpu_play_open(play, linger_briefly);
    rollout_thread *keeper = gpu_play_hire(play, true, ROLLOUT_KEEP);
    gpu_play_bring(play, keeper, 1);
    trainer_close(&play->trainer);
    assert_refused(refit_device_close(play->device, error), REFIT_ERR_BUSY, "mapped");
    /* Another publisher on the device is not held up by it. */
    trainer_open_on(&play->trainer, &play->config, play->device);
    assert_int_equal(refit_device_close(play->device, NULL), REFIT_ERR_BUSY);
    rollouts_let_go(keeper);
}

PLAY_TEST(an_aborted_version_leaves_what_can_be_served)
{
    static const struct {
        void (*change)(refit_config *config);
        bool served; /* version 1, to a late worker */
        bool on_gpu;
    } trials[] = {{NULL, true, true},
                  {with_gpu_required, true, true},
                  {with_one_slot, false, false},
                  {with_gpu_required_and_one_slot, false, false}};
    for (size_t trial = 0; trial < COUNT_OF(trials); trial++) {
        gpu_play_open(play, trials[trial].change);
        rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
        gpu_play_expect(play, 1, gpu_play_publish(play, 1));
        trainer_begin(&play->trainer, 2);
        trainer_write(&play->trainer);
        assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
        assert_int_equal(refit_publisher_version(play->trainer.publisher), 1);
        rollout_thread *late = gpu_play_hire_as(play, &play->config, play->theirs, ROLLOUT_ACCEPT);
        trainer_wait_workers(&play->trainer, 2);
        if (trials[trial].served) {
            assert_true(rollouts_wait(late, 1, 1) == gpu_play_digest(1));
            assert_true(rollouts_was_on_device(late, 1) == trials[trial].on_gpu);
        }
        gpu_play_expect(play, 3, gpu_play_publish(play, 3));
        assert_int_equal(rollouts_count(member, 2), 0);
        assert_int_equal(rollouts_count(late, 1), trials[trial].served ? 1 : 0);
    }
}

PLAY_TEST(weights_of_the_host_and_of_another_gpu_are_brought_there)
{
    refit_device *other = NULL;
    gpu_play_open(play, NULL);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_take_device(&play->trainer, NULL);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    trainer_take_device(&play->trainer, other);
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
    gpu_play_expect(play, 3, gpu_play_publish(play, 3));
    assert_true(rollouts_was_on_device(member, 1) && rollouts_was_on_device(member, 3));
    gpu_play_dismiss(play);
    trainer_close(&play->trainer);
    trainer_open_on(&play->trainer, &play->config, play->device);
    assert_ok(refit_device_close(other, NULL));
}

PLAY_TEST(with_require_weights_of_the_host_go_up)
{
    gpu_play_open(play, with_gpu_required);
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_take_device(&play->trainer, NULL);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
}

/* A version with the same bytes as the one on the GPU. */
static refit_status publish_again(gpu_play *play)
{
    const rft_manifest *manifest = play->trainer.sample.manifest;
    RFT_TRY(refit_publisher_begin(play->trainer.publisher, 0, NULL));
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(refit_publisher_write(play->trainer.publisher, i,
                                      play->trainer.memory + tensor->offset, tensor->bytes,
                                      play->device, REFIT_STREAM_NONE, NULL));
    }
    return refit_publisher_commit(play->trainer.publisher, NULL);
}

/* Each call of the driver fails, one after the other: the version is published, or the error says
 * what failed. */
PLAY_TEST(a_driver_that_fails_costs_a_version_and_nothing_else)
{
    const char *const calls[] = {
        "cuMemAlloc",    "cuIpcGetMemHandle",  "cuPointerGetAttributes", "cuMemGetAddressRange",
        "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuEventRecord"};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        for (unsigned nth = 1; nth <= 6; nth++) {
            gpu_play_open(play, NULL);
            rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
            (void)gpu_play_publish(play, 1);
            fake_cuda_fail(calls[i], nth, 1, RFT_CU_OUT_OF_MEMORY);
            refit_status status = publish_again(play);
            fake_cuda_forget_faults();
            bool open = status != REFIT_OK &&
                        refit_publisher_abort(play->trainer.publisher, NULL) == REFIT_OK;
            assert_true(open || status == REFIT_OK || status == REFIT_ERR_PEER);
            gpu_play_bring(play, member, 4);
        }
    }
}

/* ---- Reports of the memory, and versions where it is scarce */

static void hold(rft_share_lock *share_lock, const refit_publisher *publisher, uint32_t slot)
{
    const rft_gpu_block *block = publisher->gpu->slots[slot].block;
    assert_ok(rft_share_lock_hold(share_lock, block->share_lock.segment.name, NULL));
}

/* Of the two blocks before, one is freed while begin looks for memory, and one much later. */
PLAY_TEST(room_for_one_version_is_enough_for_one)
{
    rft_share_lock kept = {0}, late = {0};
    gpu_play_open(play, NULL);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
    hold(&kept, play->trainer.publisher, 0);
    hold(&late, play->trainer.publisher, 1);
    fake_cuda_set_taken(0, GPU_BYTES - fake_cuda_used(0));
    declare_anew(play);
    uint64_t asked = fake_cuda_calls("cuMemAlloc");
    trainer_begin(&play->trainer, 3);
    trainer_start(&play->trainer, TRAINER_WRITE, 3);
    while (fake_cuda_calls("cuMemAlloc") == asked)
        (void)poll(NULL, 0, 1);
    rft_share_lock_close(&late);
    assert_ok(trainer_join(&play->trainer));
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes,
                     2 * play->trainer.sample.manifest->store_bytes);
    assert_true(rollouts_wait(member, 3, 1) == gpu_play_digest(3));
    assert_true(rollouts_was_on_device(member, 3));
    rft_share_lock_close(&kept);
    fake_cuda_set_taken(0, 0);
}

PLAY_TEST(the_figures_are_those_of_the_tensors_there_are)
{
    gpu_play_open(play, NULL);
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    uint64_t bytes = play->trainer.sample.manifest->store_bytes;
    refit_stats stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_gpu_bytes, bytes);
    assert_int_equal(stats.publish_pinned_bytes, 0); /* no worker reads it on the host */
    gpu_play_dismiss(play);
    declare_anew(play);
    stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_gpu_bytes, 0);
    assert_int_equal(stats.publish_pinned_bytes, 0);
}

enum { BYTES = 4096 };

/* The slot's version takes a chunk, all of it. */
static void begin_slot(rft_gpu_store *store, uint32_t slot)
{
    assert_ok(rft_gpu_store_clear(store, slot, NULL));
    store->writing = slot;
    store->slots[slot].version = slot + 1;
    if (store->slots[slot].block->chunk_count == 0)
        assert_ok(rft_gpu_store_grow(store, BYTES, NULL));
    store->slots[slot].block->chunks[0].used = BYTES;
}

/* Though the next slot keeps the block that it has. */
TEST(what_was_let_go_is_freed_when_the_next_slot_is_cleared)
{
    refit_device *device = NULL;
    rft_gpu_store *store = NULL;
    rft_share_lock reader = {0};
    fake_cuda_reset();
    assert_ok(refit_device_open("cuda:0", NULL, &device, NULL));
    assert_ok(rft_gpu_store_open(device, &store, NULL));
    for (uint32_t slot = 0; slot < 2; slot++)
        begin_slot(store, slot);
    const char *name = store->slots[0].block->share_lock.segment.name;
    assert_ok(rft_share_lock_hold(&reader, name, NULL));
    assert_ok(rft_share_lock_read(&reader, NULL));
    begin_slot(store, 0);
    assert_int_equal(rft_gpu_store_bytes(store), 3 * BYTES);
    rft_share_lock_close(&reader);
    const rft_gpu_block *kept = store->slots[1].block;
    assert_ok(rft_gpu_store_clear(store, 1, NULL));
    assert_ptr_equal(store->slots[1].block, kept);
    assert_int_equal(rft_gpu_store_bytes(store), 2 * BYTES);
    /* A chunk that the last version did not need is not kept. */
    store->slots[1].block->chunks[0].needed = false;
    assert_ok(rft_gpu_store_clear(store, 1, NULL));
    assert_int_equal(rft_gpu_store_bytes(store), BYTES);
    assert_int_equal(rft_gpu_store_close(store, 0), 0);
    assert_ok(refit_device_close(device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
}

int main(void)
{
    return test_run("gpu_memory");
}
