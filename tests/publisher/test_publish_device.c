/* Versions written from a GPU's memory: the bytes reach the store on a stream of the publisher's
 * own, behind the caller's work, and after any failure the version can be finished or dropped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "device/device.h"
#include "fake_cuda.h"
#include "publisher/publisher.h"
#include "tests/support/starved_publish.h"
#include "tests/support/trainer.h"

#define SOON_MS 200

typedef struct scene {
    refit_device *device;
    refit_config config;
    test_trainer trainer;
    raw_worker worker;
    bool worker_there;
} scene;

static void scene_open(scene *on, uint32_t slots, void (*change)(refit_config *config))
{
    refit_error error;
    memset(on, 0, sizeof *on);
    fake_cuda_reset();
    on->config = trainer_config();
    on->config.broadcast_slots = slots;
    on->config.offload_slab_bytes = 64 * 1024; /* the store is page-locked in several pieces */
    if (change != NULL) change(&on->config);
    if (refit_device_open("cuda:0", NULL, &on->device, &error) != REFIT_OK) {
        fail_msg("%s", error.text);
    }
    trainer_open(&on->trainer, &on->config);
    trainer_take_device(&on->trainer, on->device);
}

static void scene_join(scene *on, bool shm)
{
    raw_worker_open(&on->worker, refit_publisher_endpoint(on->trainer.publisher), "w", shm);
    raw_worker_join(&on->worker);
    trainer_wait_workers(&on->trainer, 1);
    on->worker_there = true;
}

static void scene_close(scene *on)
{
    if (on->worker_there) raw_worker_close(&on->worker);
    trainer_close(&on->trainer);
    assert_int_equal(refit_device_close(on->device, NULL), REFIT_OK);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static void apply(scene *on, uint64_t version, uint64_t let_go)
{
    trainer_offer(&on->trainer, version);
    raw_worker_stage(&on->worker);
    trainer_check_bytes(&on->worker, version);
    raw_worker_apply(&on->worker);
    assert_int_equal(trainer_join(&on->trainer), REFIT_OK);
    if (let_go != 0) raw_worker_say_released(&on->worker, let_go);
}

static refit_status write_one(scene *on, uint32_t tensor, const void *memory, refit_error *error)
{
    return refit_publisher_write(on->trainer.publisher, tensor, memory,
                                 on->trainer.sample.manifest->tensors[tensor].bytes, on->device,
                                 on->trainer.after, error);
}

/* The driver takes no kernels: digests are taken from the store. */
static void without_kernels(refit_config *config)
{
    (void)config;
    fake_cuda_hide("cuLibraryLoadData", 0);
}

static const struct delivery {
    const char *name;
    void (*change)(refit_config *config);
    bool digests; /* the device takes them */
    bool shm;
} DELIVERIES[] = {
    {"digests of the device, by socket", NULL, true, false},
    {"digests of the device, in shared memory", NULL, true, true},
    {"digests of the CPU, by socket", without_kernels, false, false},
    {"digests of the CPU, in shared memory", without_kernels, false, true},
};

static void workers_receive_what_lies_on_the_gpu(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        for (size_t i = 0; i < sizeof DELIVERIES / sizeof DELIVERIES[0]; i++) {
            const struct delivery *delivery = &DELIVERIES[i];
            scene on;
            scene_open(&on, slots, delivery->change);
            if (rft_device_get_caps(on.device).digests != delivery->digests)
                fail_msg("%s, but rft_device_get_caps says otherwise", delivery->name);
            scene_join(&on, delivery->shm);
            for (uint64_t version = 1; version <= 4; version++)
                apply(&on, version, slots == 1 ? version : version - 1);
            if (on.worker.held.version != 4) fail_msg("%s: version 4 is not held", delivery->name);
            scene_close(&on);
        }
    }
}

static void blocks_that_did_not_change_are_found(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        scene on;
        scene_open(&on, slots, NULL);
        scene_join(&on, false);
        apply(&on, 2, 0);
        assert_int_equal(trainer_stats(&on.trainer).publish_same_blocks_last, 0);
        apply(&on, 3, 0);
        assert_int_equal(trainer_stats(&on.trainer).publish_same_blocks_last, 2);
        assert_int_equal(on.worker.offer.as.offer.base, 2);
        scene_close(&on);
    }
}

static void an_aborted_version_leaves_the_one_before_bit_for_bit(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        scene on;
        scene_open(&on, slots, NULL);
        trainer_begin(&on.trainer, 1);
        trainer_write(&on.trainer);
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
        trainer_begin(&on.trainer, 2);
        trainer_write(&on.trainer);
        assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
        scene_join(&on, false);
        raw_worker_stage(&on.worker);
        trainer_check_bytes(&on.worker, 1);
        raw_worker_apply(&on.worker);
        scene_close(&on);
    }
}

/* The tensor that was written last is compared, and its frames are sent, while the next one is
 * copied, but not after an abort. */
static void a_version_dropped_half_written_leaves_the_next_one_alone(void **state)
{
    (void)state;
    scene on;
    scene_open(&on, 2, NULL);
    trainer_begin(&on.trainer, 1);
    const rft_store *store = on.trainer.publisher->store;
    const rft_manifest *manifest = store->manifest;
    assert_int_equal(write_one(&on, 0, on.trainer.memory, NULL), REFIT_OK);
    assert_int_equal(store->ready_count, 0);
    assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
    trainer_begin(&on.trainer, 2);
    uint32_t last = manifest->count - 1;
    assert_int_equal(write_one(&on, last, on.trainer.memory + manifest->tensors[last].offset, NULL),
                     REFIT_OK);
    assert_int_equal(store->ready_count, 0);
    assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
    scene_join(&on, false);
    apply(&on, 3, 0);
    scene_close(&on);
}

static void the_store_is_page_locked_when_a_gpu_first_writes(void **state)
{
    (void)state;
    scene on;
    scene_open(&on, 2, NULL);
    assert_int_equal(trainer_stats(&on.trainer).publish_pinned_bytes, 0);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    for (uint64_t version = 1; version <= 3; version++) {
        trainer_begin(&on.trainer, version);
        uint64_t pageable = fake_cuda_pageable_copies();
        trainer_write(&on.trainer);
        assert_int_equal(fake_cuda_pageable_copies(), pageable);
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
    }
    uint64_t one = on.trainer.sample.manifest->store_bytes + RFT_SEQLOCK_BYTES;
    assert_int_equal(trainer_stats(&on.trainer).publish_pinned_bytes, 2 * one);
    assert_int_equal(fake_cuda_alive().registrations,
                     2 * ((one + on.config.offload_slab_bytes - 1) / on.config.offload_slab_bytes));
    scene_close(&on);
}

static void a_store_that_cannot_be_page_locked_is_written_all_the_same(void **state)
{
    (void)state;
    scene on;
    scene_open(&on, 2, NULL);
    scene_join(&on, true);
    fake_cuda_fail("cuMemHostRegister", 3, 1000, RFT_CU_OUT_OF_MEMORY);
    apply(&on, 1, 0);
    assert_int_equal(trainer_stats(&on.trainer).publish_pinned_bytes, 0);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    assert_int_equal(fake_cuda_calls("cuMemHostRegister"), 3); /* not asked again */
    scene_close(&on);
}

/* Another stream of the caller's is blocked meanwhile. */
static void write_waits_for_no_other_stream(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    scene_open(&on, 2, NULL);
    assert_int_equal(refit_stream_open(on.device, &stream, NULL), REFIT_OK);
    trainer_begin(&on.trainer, 1);
    fake_cuda_stop_stream((rft_cu_stream)stream.native);
    assert_int_equal(rft_device_zero(on.device, stream, on.trainer.memory, 1, NULL), REFIT_OK);
    trainer_write(&on.trainer);
    assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
    fake_cuda_go_stream((rft_cu_stream)stream.native);
    assert_int_equal(refit_stream_close(on.device, stream, NULL), REFIT_OK);
    scene_close(&on);
}

/* The caller's stream is blocked before a copy that makes the weights; write runs on a thread. */
static void write_comes_behind_the_callers_work(void **state)
{
    (void)state;
    scene on;
    sample_version wanted;
    refit_stream_ref stream;
    void *fresh = NULL;
    scene_open(&on, 2, NULL);
    scene_join(&on, true);
    trainer_begin(&on.trainer, 1);
    sample_open(&wanted, 1);
    uint64_t bytes = wanted.manifest->store_bytes;
    assert_int_equal(refit_memory_alloc(on.device, bytes, &fresh, NULL), REFIT_OK);
    assert_int_equal(
        refit_stream_copy(on.device, REFIT_STREAM_NONE, fresh, on.trainer.memory, bytes, NULL),
        REFIT_OK);
    assert_int_equal(rft_device_zero(on.device, REFIT_STREAM_NONE, on.trainer.memory, bytes, NULL),
                     REFIT_OK);
    assert_int_equal(refit_stream_open(on.device, &stream, NULL), REFIT_OK);
    fake_cuda_stop();
    assert_int_equal(refit_stream_copy(on.device, stream, on.trainer.memory, fresh, bytes, NULL),
                     REFIT_OK);
    on.trainer.after = stream;
    trainer_start(&on.trainer, TRAINER_WRITE, 1);
    fake_cuda_go();
    raw_worker_stage(&on.worker);
    trainer_check_bytes(&on.worker, 1);
    raw_worker_apply(&on.worker);
    assert_int_equal(trainer_join(&on.trainer), REFIT_OK);
    sample_close(&wanted);
    assert_int_equal(refit_stream_close(on.device, stream, NULL), REFIT_OK);
    assert_int_equal(refit_memory_free(on.device, fresh, NULL), REFIT_OK);
    scene_close(&on);
}

static void impatient(refit_config *config)
{
    config->broadcast_stage_timeout_ms = SOON_MS;
    config->broadcast_linger_ms = SOON_MS;
}

/* A copy that was given up may still end at any time: the slot that it writes to is not used for
 * anything else, and not unmapped. */
static void a_stream_that_stands_costs_the_version_and_no_bytes(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        scene on;
        refit_stream_ref stream;
        refit_error error;
        scene_open(&on, slots, impatient);
        trainer_begin(&on.trainer, 1);
        trainer_write(&on.trainer);
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
        assert_int_equal(refit_stream_open(on.device, &stream, NULL), REFIT_OK);
        trainer_begin(&on.trainer, 2);
        fake_cuda_stop_stream((rft_cu_stream)stream.native);
        assert_int_equal(
            rft_device_zero(on.device, stream, on.trainer.memory + 1024 * 256, 16, NULL), REFIT_OK);
        on.trainer.after = stream;
        assert_int_equal(write_one(&on, 0, on.trainer.memory, &error), REFIT_ERR_TIMEOUT);
        assert_int_equal(write_one(&on, 0, on.trainer.memory, &error), REFIT_ERR_TIMEOUT);
        assert_non_null(strstr(error.text, "earlier write"));
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_ERR_STATE);
        assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
        scene_join(&on, true);
        raw_worker_stage(&on.worker);
        trainer_check_bytes(&on.worker, 1);
        raw_worker_apply(&on.worker);
        fake_cuda_go_stream((rft_cu_stream)stream.native);
        fake_cuda_settle();
        trainer_check_bytes(&on.worker, 1); /* the late copy went elsewhere */
        raw_worker_say_released(&on.worker, 1);
        on.trainer.after = REFIT_STREAM_NONE;
        uint64_t locked = fake_cuda_calls("cuMemHostRegister");
        apply(&on, 3, 0);
        /* With two slots the late copy is seen to have ended: the slot is used again. */
        if (slots == 2) assert_int_equal(fake_cuda_calls("cuMemHostRegister"), locked);
        assert_int_equal(refit_stream_close(on.device, stream, NULL), REFIT_OK);
        scene_close(&on);
    }
}

static void memory_that_is_not_the_devices_is_refused(void **state)
{
    (void)state;
    scene on;
    refit_error error;
    scene_open(&on, 2, NULL);
    trainer_begin(&on.trainer, 1);
    rft_cu_ptr managed = fake_cuda_managed(0, 1 << 20);
    assert_int_equal(write_one(&on, 0, on.trainer.sample.image, &error), REFIT_ERR_INVALID);
    assert_int_equal(write_one(&on, 0, (void *)(uintptr_t)managed, &error), REFIT_ERR_INVALID);
    assert_int_equal(write_one(&on, 0, (void *)(uintptr_t)64, &error), REFIT_ERR_INVALID);
    trainer_write(&on.trainer);
    assert_int_equal(write_one(&on, 0, on.trainer.memory, &error), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
    fake_cuda_managed_free(managed);
    scene_close(&on);
}

/* Each driver call of one version fails, one after the other: the write returns the failure, and
 * succeeds when it is repeated. */
static void a_call_that_fails_costs_one_write(void **state)
{
    (void)state;
    const char *const calls[] = {"cuPointerGetAttributes", "cuMemcpyAsync",
                                 "cuMemcpyBatchAsync",     "cuEventRecord",
                                 "cuEventQuery",           "cuEventCreate",
                                 "cuStreamWaitEvent",      "cuStreamCreateWithPriority"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        bool failed = true;
        for (unsigned nth = 1; failed; nth++) {
            scene on;
            refit_stream_ref stream;
            scene_open(&on, 1, NULL);
            assert_int_equal(refit_stream_open(on.device, &stream, NULL), REFIT_OK);
            on.trainer.after = stream;
            trainer_begin(&on.trainer, 1);
            fake_cuda_fail(calls[i], nth, 1, RFT_CU_OUT_OF_MEMORY);
            failed = write_one(&on, 0, on.trainer.memory, NULL) != REFIT_OK;
            fake_cuda_forget_faults();
            if (failed) assert_int_equal(write_one(&on, 0, on.trainer.memory, NULL), REFIT_OK);
            for (uint32_t tensor = 1; tensor < on.trainer.sample.manifest->count; tensor++) {
                const rft_manifest_tensor *place = &on.trainer.sample.manifest->tensors[tensor];
                if (place->alias_of != REFIT_NO_ALIAS) continue;
                assert_int_equal(write_one(&on, tensor, on.trainer.memory + place->offset, NULL),
                                 REFIT_OK);
            }
            assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
            scene_join(&on, false);
            raw_worker_stage(&on.worker);
            trainer_check_bytes(&on.worker, 1);
            raw_worker_apply(&on.worker);
            assert_int_equal(refit_stream_close(on.device, stream, NULL), REFIT_OK);
            scene_close(&on);
        }
    }
}

static void a_lost_gpu_is_told_and_the_publisher_goes_on_from_the_host(void **state)
{
    (void)state;
    scene on;
    refit_error error;
    scene_open(&on, 2, impatient);
    trainer_begin(&on.trainer, 1);
    trainer_write(&on.trainer);
    assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
    trainer_begin(&on.trainer, 2);
    fake_cuda_fail_later("cuMemcpyAsync", 1, RFT_CU_ILLEGAL_ADDRESS);
    fake_cuda_fail_later("cuMemcpyBatchAsync", 1, RFT_CU_ILLEGAL_ADDRESS);
    assert_int_equal(write_one(&on, 0, on.trainer.memory, &error), REFIT_ERR_DEVICE);
    assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
    on.trainer.device = NULL;
    assert_int_equal(refit_publisher_begin(on.trainer.publisher, 3, NULL), REFIT_OK);
    trainer_write(&on.trainer);
    assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
    on.trainer.device = on.device;
    refit_publisher_close(on.trainer.publisher);
    assert_int_equal(refit_memory_free(on.device, on.trainer.memory, NULL), REFIT_OK);
    sample_close(&on.trainer.sample);
    assert_int_equal(refit_device_close(on.device, NULL), REFIT_OK);
    fake_cuda_reset();
}

static void two_gpus_may_write_one_version(void **state)
{
    (void)state;
    scene on;
    refit_device *second = NULL;
    void *memory = NULL;
    scene_open(&on, 2, NULL);
    scene_join(&on, true);
    assert_int_equal(refit_device_open("cuda:1", NULL, &second, NULL), REFIT_OK);
    trainer_begin(&on.trainer, 1);
    const rft_manifest *manifest = on.trainer.sample.manifest;
    assert_int_equal(refit_memory_alloc(second, manifest->store_bytes, &memory, NULL), REFIT_OK);
    assert_int_equal(refit_stream_copy(second, REFIT_STREAM_NONE, memory, on.trainer.sample.image,
                                       manifest->store_bytes, NULL),
                     REFIT_OK);
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        const unsigned char *from = i % 2 == 0 ? memory : on.trainer.memory;
        assert_int_equal(refit_publisher_write(on.trainer.publisher, i, from + tensor->offset,
                                               tensor->bytes, i % 2 == 0 ? second : on.device,
                                               REFIT_STREAM_NONE, NULL),
                         REFIT_OK);
    }
    trainer_start(&on.trainer, TRAINER_COMMIT, 1);
    raw_worker_stage(&on.worker);
    trainer_check_bytes(&on.worker, 1);
    raw_worker_apply(&on.worker);
    assert_int_equal(trainer_join(&on.trainer), REFIT_OK);
    raw_worker_close(&on.worker);
    on.worker_there = false;
    assert_int_equal(refit_memory_free(second, memory, NULL), REFIT_OK);
    assert_int_equal(refit_device_close(second, NULL), REFIT_ERR_BUSY); /* the publisher has it */
    trainer_close(&on.trainer);
    assert_int_equal(refit_device_close(second, NULL), REFIT_OK);
    assert_int_equal(refit_device_close(on.device, NULL), REFIT_OK);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static refit_status write_first(refit_publisher *publisher, refit_device *device,
                                const void *memory, uint64_t bytes)
{
    return refit_publisher_write(publisher, 0, memory, bytes, device, REFIT_STREAM_NONE, NULL);
}

/* Without memory for the list of what is page-locked, the store is pageable. */
static void no_memory_for_the_books_is_an_error_that_leaks_nothing(void **state)
{
    (void)state;
    starve_a_publish(write_first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workers_receive_what_lies_on_the_gpu),
        cmocka_unit_test(blocks_that_did_not_change_are_found),
        cmocka_unit_test(an_aborted_version_leaves_the_one_before_bit_for_bit),
        cmocka_unit_test(a_version_dropped_half_written_leaves_the_next_one_alone),
        cmocka_unit_test(the_store_is_page_locked_when_a_gpu_first_writes),
        cmocka_unit_test(a_store_that_cannot_be_page_locked_is_written_all_the_same),
        cmocka_unit_test(write_waits_for_no_other_stream),
        cmocka_unit_test(write_comes_behind_the_callers_work),
        cmocka_unit_test(a_stream_that_stands_costs_the_version_and_no_bytes),
        cmocka_unit_test(memory_that_is_not_the_devices_is_refused),
        cmocka_unit_test(a_call_that_fails_costs_one_write),
        cmocka_unit_test(a_lost_gpu_is_told_and_the_publisher_goes_on_from_the_host),
        cmocka_unit_test(two_gpus_may_write_one_version),
        cmocka_unit_test(no_memory_for_the_books_is_an_error_that_leaks_nothing),
    };
    return cmocka_run_group_tests_name("publish_device", tests, NULL, NULL);
}
