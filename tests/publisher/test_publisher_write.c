/* What is written from a GPU's memory, or as a list: tensor by tensor and in one call workers get
 * the same version, and after any failure it can be finished or dropped. */
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "device/device.h"
#include "fake_cuda.h"
#include "publisher/publisher.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

#define SOON_MS 200 /* what is waited for does not come */

typedef struct scene {
    refit_device *device; /* NULL: the weights lie in host memory */
    refit_config config;
    test_trainer trainer; /* writes lists if it is `at_once`, else one tensor after the other */
    raw_worker worker;
    bool worker_there;
} scene;

/* The driver takes no kernels: digests are taken from the store. */
static void without_kernels(refit_config *config)
{
    (void)config;
    fake_cuda_hide("cuLibraryLoadData", 0);
}

static void scene_open(scene *on, bool gpu, uint32_t slots, void (*change)(refit_config *config))
{
    memset(on, 0, sizeof *on);
    fake_cuda_reset();
    on->config = trainer_config();
    on->config.broadcast_slots = slots;
    on->config.offload_slab_bytes = 64 * 1024; /* the store is page-locked in several pieces */
    if (change != NULL) change(&on->config);
    if (gpu) assert_ok(refit_device_open("cuda:0", NULL, &on->device, NULL));
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
    if (on->device != NULL) assert_ok(refit_device_close(on->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

/* On a GPU, with two slots. */
static int open_scene(void **state)
{
    static scene on;
    scene_open(&on, true, 2, NULL);
    *state = &on;
    return 0;
}

static int close_scene(void **state)
{
    scene_close(*state);
    return 0;
}

#define ON_GPU(name) TEST_ON(scene *on, name, open_scene, close_scene)

static void take(scene *on, uint64_t version)
{
    raw_worker_stage(&on->worker);
    trainer_check_bytes(&on->worker, version);
    raw_worker_apply(&on->worker);
}

static void apply(scene *on, uint64_t version)
{
    trainer_offer(&on->trainer, version);
    take(on, version);
    assert_ok(trainer_join(&on->trainer));
}

static void write_and_commit(scene *on, uint64_t version)
{
    trainer_begin(&on->trainer, version);
    trainer_write(&on->trainer);
    assert_ok(refit_publisher_commit(on->trainer.publisher, NULL));
}

/* What has been written is committed, and a worker gets the version. */
static void commit_and_check(scene *on, uint64_t version)
{
    assert_ok(refit_publisher_commit(on->trainer.publisher, NULL));
    scene_join(on, false);
    take(on, version);
}

static refit_status write_one(scene *on, uint32_t tensor, const void *memory, refit_error *error)
{
    return refit_publisher_write(on->trainer.publisher, tensor, memory,
                                 on->trainer.sample.manifest->tensors[tensor].bytes, on->device,
                                 on->trainer.after, error);
}

/* In one call, or tensor by tensor until one fails. */
static refit_status write_list(scene *on, const refit_weight *weights, uint32_t count,
                               refit_error *error)
{
    refit_status status = REFIT_OK;
    if (on->trainer.at_once)
        return refit_publisher_write_all(on->trainer.publisher, weights, count, on->device,
                                         on->trainer.after, error);
    for (uint32_t i = 0; i < count && status == REFIT_OK; i++)
        status = write_one(on, weights[i].tensor, weights[i].memory, error);
    return status;
}

/* ---- What goes well */

static const struct delivery {
    const char *name;
    bool gpu;
    void (*change)(refit_config *config);
    bool digests; /* the device takes them */
    bool shm;
} DELIVERIES[] = {
    {"from the host, by socket", .gpu = false},
    {"digests of the device, by socket", .gpu = true, .digests = true},
    {"digests of the device, in shared memory", .gpu = true, .digests = true, .shm = true},
    {"digests of the CPU, by socket", .gpu = true, .change = without_kernels},
    {"digests of the CPU, in shared memory", .gpu = true, .change = without_kernels, .shm = true},
};

/* Blocks that did not change are found also where a device writes. */
static void check_delivery(const struct delivery *row, uint32_t slots, bool at_once)
{
    scene on;
    print_message("%s, %u slots, %s\n", row->name, slots, at_once ? "in one call" : "one by one");
    scene_open(&on, row->gpu, slots, row->change);
    on.trainer.at_once = at_once;
    if (row->gpu) assert_int_equal(rft_device_get_caps(on.device).digests, row->digests);
    scene_join(&on, row->shm);
    for (uint64_t version = 1; version <= 5; version++) {
        bool same = version % 2 != 0 && version > 1;
        apply(&on, version);
        assert_int_equal(trainer_stats(&on.trainer).publish_same_blocks_last, same ? 2 : 0);
        if (!row->shm) assert_int_equal(on.worker.offer.as.offer.base, version - 1);
        if (slots == 1 || version > 1)
            raw_worker_say_released(&on.worker, slots == 1 ? version : version - 1);
    }
    assert_int_equal(on.worker.held.version, 5);
    scene_close(&on);
}

TEST(workers_receive_what_was_written)
{
    for (size_t i = 0; i < COUNT_OF(DELIVERIES); i++)
        for (uint32_t slots = 1; slots <= 2; slots++)
            for (int at_once = 0; at_once < 2; at_once++)
                check_delivery(&DELIVERIES[i], slots, at_once);
}

/* The tensor that was written last is compared, and its frames are sent, while the next one is
 * copied, but not after an abort. */
ON_GPU(a_version_dropped_half_written_leaves_the_next_one_alone)
{
    trainer_begin(&on->trainer, 1);
    const rft_store *store = on->trainer.publisher->store;
    const rft_manifest *manifest = store->manifest;
    assert_ok(write_one(on, 0, on->trainer.memory, NULL));
    assert_int_equal(store->ready_count, 0);
    assert_ok(refit_publisher_abort(on->trainer.publisher, NULL));
    trainer_begin(&on->trainer, 2);
    uint32_t last = manifest->count - 1;
    assert_ok(write_one(on, last, on->trainer.memory + manifest->tensors[last].offset, NULL));
    assert_int_equal(store->ready_count, 0);
    assert_ok(refit_publisher_abort(on->trainer.publisher, NULL));
    scene_join(on, false);
    apply(on, 3);
}

TEST(part_after_part_makes_a_version)
{
    for (int gpu = 0; gpu < 2; gpu++) {
        scene on;
        refit_weight weights[SAMPLE_TENSORS];
        scene_open(&on, gpu, 2, NULL);
        on.trainer.at_once = true;
        trainer_begin(&on.trainer, 1);
        uint32_t count = trainer_weights(&on.trainer, weights);
        assert_ok(write_list(&on, NULL, 0, NULL));
        assert_ok(write_list(&on, weights, 1, NULL));
        assert_ok(write_one(&on, weights[1].tensor, weights[1].memory, NULL));
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_ERR_STATE);
        assert_ok(write_list(&on, weights + 2, count - 2, NULL));
        commit_and_check(&on, 1);
        scene_close(&on);
    }
}

#define MANY (2 * RFT_DIGEST_BATCH_MOST + 452)

static refit_tensor *many_tensors(void)
{
    refit_tensor *tensors = calloc(MANY, sizeof *tensors);
    char(*names)[16] = calloc(MANY, sizeof *names);
    assert_non_null(tensors);
    assert_non_null(names);
    for (uint32_t i = 0; i < MANY; i++) {
        uint64_t bytes = i % 7 == 0 ? 0 : 1 + i % 90;
        snprintf(names[i], sizeof names[i], "t%u", i);
        tensors[i] =
            (refit_tensor){sizeof *tensors, names[i], REFIT_U8, 1, {bytes}, bytes, REFIT_NO_ALIAS};
    }
    return tensors;
}

static void allow_many(refit_config *config)
{
    config->limits_tensors = MANY;
}

/* What `count` tensors took. */
typedef struct many_costs {
    uint64_t waits; /* events that were recorded */
    uint64_t launches;
} many_costs;

/* Gives the version's digest. */
static rft_digest128 publish_many(bool gpu, uint32_t count, many_costs *costs)
{
    scene on;
    static unsigned char bytes[MANY * 128];
    void *memory = bytes;
    refit_tensor *tensors = many_tensors();
    refit_weight *weights = calloc(MANY, sizeof *weights);
    assert_non_null(weights);
    scene_open(&on, gpu, 2, allow_many);
    on.trainer.at_once = true;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 31 + i / 251);
    if (gpu) {
        assert_ok(refit_memory_alloc(on.device, sizeof bytes, &memory, NULL));
        assert_ok(
            refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, bytes, sizeof bytes, NULL));
    }
    for (uint32_t i = 0; i < MANY; i++)
        weights[i] = (refit_weight){i, (unsigned char *)memory + i * 128, tensors[i].bytes};
    refit_publisher *publisher = on.trainer.publisher;
    assert_ok(refit_publisher_declare(publisher, tensors, count, NULL));
    assert_ok(refit_publisher_begin(publisher, 1, NULL));
    uint64_t waits = fake_cuda_calls("cuEventRecord"), launches = fake_cuda_calls("cuLaunchKernel");
    assert_ok(write_list(&on, weights, count, NULL));
    costs->waits = fake_cuda_calls("cuEventRecord") - waits;
    costs->launches = fake_cuda_calls("cuLaunchKernel") - launches;
    assert_ok(refit_publisher_commit(publisher, NULL));
    rft_digest128 digest = publisher->store->committed.digest;
    if (gpu) assert_ok(refit_memory_free(on.device, memory, NULL));
    scene_close(&on);
    free((char *)(uintptr_t)tensors[0].name);
    free(tensors);
    free(weights);
    return digest;
}

/* One wait and one kernel for as many tensors as a batch has. */
TEST(a_gpu_is_waited_for_once_a_batch_of_tensors)
{
    static const uint32_t counts[] = {40, 400, RFT_DIGEST_BATCH_MOST, MANY};
    static const uint64_t batches[] = {1, 1, 1, 3};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        many_costs costs;
        rft_digest128 by_cpu = publish_many(false, counts[i], &costs);
        rft_digest128 by_gpu = publish_many(true, counts[i], &costs);
        assert_true(rft_digest128_equal(&by_cpu, &by_gpu));
        assert_int_equal(costs.waits, batches[i]);
        assert_int_equal(costs.launches, batches[i]);
    }
}

ON_GPU(the_store_is_page_locked_when_a_gpu_first_writes)
{
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, 0);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    for (uint64_t version = 1; version <= 3; version++) {
        trainer_begin(&on->trainer, version);
        uint64_t pageable = fake_cuda_pageable_copies();
        trainer_write(&on->trainer);
        assert_int_equal(fake_cuda_pageable_copies(), pageable);
        assert_ok(refit_publisher_commit(on->trainer.publisher, NULL));
    }
    uint64_t one = on->trainer.sample.manifest->store_bytes + RFT_SEQLOCK_BYTES;
    uint64_t slab = on->config.offload_slab_bytes;
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, 2 * one);
    assert_int_equal(fake_cuda_alive().registrations, 2 * ((one + slab - 1) / slab));
}

ON_GPU(a_store_that_cannot_be_page_locked_is_written_all_the_same)
{
    scene_join(on, true);
    fake_cuda_fail("cuMemHostRegister", 3, 1000, RFT_CU_OUT_OF_MEMORY);
    apply(on, 1);
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, 0);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    assert_int_equal(fake_cuda_calls("cuMemHostRegister"), 3); /* not asked again */
}

/* The time until the next try has passed. */
static void let_time_pass(const scene *on)
{
    const rft_store *store = on->trainer.publisher->store;
    for (uint32_t i = 0; i < store->slot_count; i++)
        store->slots[i].buffer->pin_at = 1;
}

ON_GPU(a_store_is_page_locked_once_a_shortage_is_over)
{
    fake_cuda_fail("cuMemHostRegister", 1, 1000, RFT_CU_OUT_OF_MEMORY);
    write_and_commit(on, 1);
    uint64_t one = on->trainer.sample.manifest->store_bytes + RFT_SEQLOCK_BYTES;
    write_and_commit(on, 2);
    let_time_pass(on);
    write_and_commit(on, 3);
    write_and_commit(on, 4);
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, 0);
    fake_cuda_forget_faults();
    write_and_commit(on, 5);
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, 0); /* not asked so soon */
    let_time_pass(on);
    write_and_commit(on, 6);
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, one);
    write_and_commit(on, 7);
    assert_int_equal(trainer_stats(&on->trainer).publish_pinned_bytes, 2 * one);
}

/* Another stream of the caller's is blocked meanwhile. */
ON_GPU(write_waits_for_no_other_stream)
{
    refit_stream_ref stream;
    assert_ok(refit_stream_open(on->device, &stream, NULL));
    trainer_begin(&on->trainer, 1);
    fake_cuda_stop_stream((rft_cu_stream)stream.native);
    assert_ok(rft_device_zero(on->device, stream, on->trainer.memory, 1, NULL));
    trainer_write(&on->trainer);
    assert_ok(refit_publisher_commit(on->trainer.publisher, NULL));
    fake_cuda_go_stream((rft_cu_stream)stream.native);
    assert_ok(refit_stream_close(on->device, stream, NULL));
}

/* The caller's stream is blocked before a copy that makes the weights; write runs on a thread. */
ON_GPU(write_comes_after_the_callers_work)
{
    refit_stream_ref stream;
    void *fresh = NULL;
    scene_join(on, true);
    trainer_begin(&on->trainer, 1);
    uint64_t bytes = on->trainer.sample.manifest->store_bytes;
    unsigned char *weights = on->trainer.memory;
    assert_ok(refit_memory_alloc(on->device, bytes, &fresh, NULL));
    assert_ok(refit_stream_copy(on->device, REFIT_STREAM_NONE, fresh, weights, bytes, NULL));
    assert_ok(rft_device_zero(on->device, REFIT_STREAM_NONE, weights, bytes, NULL));
    assert_ok(refit_stream_open(on->device, &stream, NULL));
    fake_cuda_stop();
    assert_ok(refit_stream_copy(on->device, stream, weights, fresh, bytes, NULL));
    on->trainer.after = stream;
    trainer_start(&on->trainer, TRAINER_WRITE, 1);
    fake_cuda_go();
    take(on, 1);
    assert_ok(trainer_join(&on->trainer));
    assert_ok(refit_stream_close(on->device, stream, NULL));
    assert_ok(refit_memory_free(on->device, fresh, NULL));
}

/* Publisher and both devices are closed here, the second one in the order that is refused. */
ON_GPU(two_gpus_may_write_one_version)
{
    refit_device *second = NULL;
    void *memory = NULL;
    refit_weight weights[SAMPLE_TENSORS];
    scene_join(on, true);
    assert_ok(refit_device_open("cuda:1", NULL, &second, NULL));
    trainer_begin(&on->trainer, 1);
    uint64_t bytes = on->trainer.sample.manifest->store_bytes;
    assert_ok(refit_memory_alloc(second, bytes, &memory, NULL));
    assert_ok(refit_stream_copy(second, REFIT_STREAM_NONE, memory, on->trainer.sample.image, bytes,
                                NULL));
    uint32_t count = trainer_weights(&on->trainer, weights);
    for (uint32_t i = 0; i < count; i++) {
        const unsigned char *from = weights[i].memory;
        if (i % 2 == 0) from = (unsigned char *)memory + (from - on->trainer.memory);
        assert_ok(refit_publisher_write(on->trainer.publisher, weights[i].tensor, from,
                                        weights[i].bytes, i % 2 == 0 ? second : on->device,
                                        REFIT_STREAM_NONE, NULL));
    }
    trainer_start(&on->trainer, TRAINER_COMMIT, 1);
    take(on, 1);
    assert_ok(trainer_join(&on->trainer));
    assert_ok(refit_memory_free(second, memory, NULL));
    assert_int_equal(refit_device_close(second, NULL), REFIT_ERR_BUSY); /* the publisher has it */
    refit_publisher_close(on->trainer.publisher);
    on->trainer.publisher = NULL;
    assert_ok(refit_device_close(second, NULL));
}

/* ---- What is refused before anything is written */

ON_GPU(memory_that_is_not_the_devices_is_refused)
{
    trainer_begin(&on->trainer, 1);
    rft_cu_ptr managed = fake_cuda_managed(0, 1 << 20);
    const void *const wrong[] = {on->trainer.sample.image, (void *)(uintptr_t)managed,
                                 (void *)(uintptr_t)64};
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        assert_invalid(write_one(on, 0, wrong[i], NULL));
    trainer_write(&on->trainer);
    assert_int_equal(write_one(on, 0, on->trainer.memory, NULL), REFIT_ERR_STATE);
    assert_ok(refit_publisher_commit(on->trainer.publisher, NULL));
    fake_cuda_managed_free(managed);
}

static void name_none(refit_weight *last, const refit_weight *first)
{
    (void)first;
    last->tensor = SAMPLE_TENSORS;
}

static void name_a_tied_one(refit_weight *last, const refit_weight *first)
{
    (void)first;
    last->tensor = 3;
}

static void name_one_twice(refit_weight *last, const refit_weight *first)
{
    *last = *first;
}

static void shorten(refit_weight *last, const refit_weight *first)
{
    (void)first;
    last->bytes--;
}

static void take_the_memory_away(refit_weight *last, const refit_weight *first)
{
    (void)first;
    last->memory = NULL;
}

TEST(a_wrong_list_is_refused_and_writes_nothing)
{
    static const struct {
        void (*spoil)(refit_weight *last, const refit_weight *first);
        refit_status status;
    } rows[] = {
        {name_none, REFIT_ERR_INVALID},
        {name_a_tied_one, REFIT_ERR_INVALID},
        {name_one_twice, REFIT_ERR_STATE},
        {shorten, REFIT_ERR_INVALID},
        {take_the_memory_away, REFIT_ERR_INVALID},
    };
    for (size_t i = 0; i < 2 * COUNT_OF(rows); i++) {
        scene on;
        refit_error error;
        refit_weight good[SAMPLE_TENSORS], bad[SAMPLE_TENSORS];
        scene_open(&on, i % 2, 2, NULL);
        on.trainer.at_once = true;
        trainer_begin(&on.trainer, 1);
        uint32_t count = trainer_weights(&on.trainer, good);
        memcpy(bad, good, sizeof bad);
        rows[i / 2].spoil(&bad[count - 1], &bad[0]);
        assert_int_equal(write_list(&on, bad, count, &error), rows[i / 2].status);
        assert_says(&error, "tensor");
        assert_ok(write_list(&on, good, count, NULL));
        assert_int_equal(write_list(&on, good, count, NULL), REFIT_ERR_STATE);
        commit_and_check(&on, 1);
        scene_close(&on);
    }
}

ON_GPU(arguments_and_states_are_checked)
{
    refit_weight weights[SAMPLE_TENSORS];
    on->trainer.at_once = true;
    assert_invalid(refit_publisher_write_all(NULL, weights, 1, NULL, REFIT_STREAM_NONE, NULL));
    assert_invalid(write_list(on, NULL, 1, NULL));
    assert_int_equal(write_list(on, weights, 0, NULL), REFIT_ERR_STATE);
    trainer_begin(&on->trainer, 1);
    uint32_t count = trainer_weights(&on->trainer, weights);
    weights[count - 1].memory = on->trainer.sample.image; /* of the host */
    assert_invalid(write_list(on, weights, count, NULL));
    trainer_write(&on->trainer);
    commit_and_check(on, 1);
}

/* ---- What fails on the way */

/* The tensors that were written are the first ones of the list. */
static uint32_t written_of(const scene *on, const refit_weight *weights, uint32_t count)
{
    const unsigned char *written = on->trainer.publisher->store->written;
    uint32_t first = 0;
    while (first < count && written[weights[first].tensor])
        first++;
    for (uint32_t i = first; i < count; i++)
        assert_false(written[weights[i].tensor]);
    return first;
}

/* The nth call of the driver fails: the rest of the list is written by the next call. */
static void await_no_goodbye(refit_config *config)
{
    config->broadcast_linger_ms = 0;
}

static void fail_a_call(const char *call, unsigned nth, bool at_once)
{
    scene on;
    refit_stream_ref stream;
    refit_error error;
    refit_weight weights[SAMPLE_TENSORS];
    scene_open(&on, true, 1, await_no_goodbye);
    on.trainer.at_once = at_once;
    assert_ok(refit_stream_open(on.device, &stream, NULL));
    on.trainer.after = stream;
    trainer_begin(&on.trainer, 1);
    uint32_t count = trainer_weights(&on.trainer, weights);
    fake_cuda_fail(call, nth, 1, RFT_CU_OUT_OF_MEMORY);
    refit_status status = write_list(&on, weights, count, &error);
    fake_cuda_forget_faults();
    uint32_t done = written_of(&on, weights, count);
    assert_int_equal(status == REFIT_OK, done == count);
    if (status != REFIT_OK) assert_true(strlen(error.text) > 20);
    assert_ok(write_list(&on, weights + done, count - done, NULL));
    commit_and_check(&on, 1);
    assert_ok(refit_stream_close(on.device, stream, NULL));
    scene_close(&on);
}

/* (Without memory for the digest batch nothing fails: the tensors are written one by one.) */
TEST(a_call_that_fails_leaves_the_rest_to_be_written)
{
    const char *const calls[] = {"cuPointerGetAttributes", "cuMemcpyAsync",
                                 "cuMemcpyBatchAsync",     "cuEventRecord",
                                 "cuEventQuery",           "cuEventCreate",
                                 "cuStreamWaitEvent",      "cuStreamCreateWithPriority",
                                 "cuLaunchKernel",         "cuMemAlloc",
                                 "cuMemHostRegister",      "cuMemsetD8Async"};
    for (size_t i = 0; i < COUNT_OF(calls); i++)
        for (unsigned nth = 1; nth <= 12; nth++)
            for (int at_once = 0; at_once < 2; at_once++)
                fail_a_call(calls[i], nth, at_once);
}

TEST(a_lost_gpu_is_told_and_the_publisher_goes_on_from_the_host)
{
    static const struct {
        bool at_once;
        const char *call;
        unsigned nth;
    } rows[] = {
        {false, "cuMemcpyAsync", 1}, {true, "cuMemcpyAsync", 2}, {true, "cuLaunchKernel", 2}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        scene on;
        refit_error error;
        refit_weight weights[SAMPLE_TENSORS];
        scene_open(&on, true, 2, NULL);
        on.trainer.at_once = rows[i].at_once;
        write_and_commit(&on, 1);
        trainer_begin(&on.trainer, 2);
        uint32_t count = trainer_weights(&on.trainer, weights);
        fake_cuda_fail_later(rows[i].call, rows[i].nth, RFT_CU_ILLEGAL_ADDRESS);
        fake_cuda_fail_later("cuMemcpyBatchAsync", 1, RFT_CU_ILLEGAL_ADDRESS);
        assert_int_equal(write_list(&on, weights, count, &error), REFIT_ERR_DEVICE);
        if (rows[i].at_once) assert_says(&error, "\""); /* the tensor's name */
        assert_int_equal(written_of(&on, weights, count), 0);
        assert_ok(refit_publisher_abort(on.trainer.publisher, NULL));
        trainer_take_device(&on.trainer, NULL);
        trainer_begin(&on.trainer, 3);
        trainer_write(&on.trainer);
        commit_and_check(&on, 3);
        scene_close(&on);
    }
}

static void linger_briefly(refit_config *config)
{
    config->broadcast_linger_ms = SOON_MS;
}

/* Copies that were given up may still end at any time: until then the slot that they write to and
 * the digest batch are not used for anything else, and the slot is not unmapped. */
static void stop_a_stream(uint32_t slots, bool at_once)
{
    scene on;
    refit_stream_ref stream;
    refit_error error;
    refit_weight weights[SAMPLE_TENSORS];
    scene_open(&on, true, slots, linger_briefly);
    on.trainer.at_once = at_once;
    write_and_commit(&on, 1);
    assert_ok(refit_stream_open(on.device, &stream, NULL));
    trainer_begin(&on.trainer, 2);
    fake_cuda_stop_stream((rft_cu_stream)stream.native);
    assert_ok(rft_device_zero(on.device, stream, on.trainer.memory + 1024 * 256, 16, NULL));
    on.trainer.after = stream;
    uint32_t count = trainer_weights(&on.trainer, weights);
    publisher_set_stage_timeout(on.trainer.publisher, SOON_MS);
    assert_int_equal(write_list(&on, weights, count, &error), REFIT_ERR_TIMEOUT);
    assert_int_equal(write_list(&on, weights, count, &error), REFIT_ERR_TIMEOUT);
    assert_says(&error, "earlier write");
    assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_ERR_STATE);
    assert_ok(refit_publisher_abort(on.trainer.publisher, NULL));
    publisher_set_stage_timeout(on.trainer.publisher, on.config.broadcast_stage_timeout_ms);
    scene_join(&on, true);
    take(&on, 1);
    fake_cuda_go_stream((rft_cu_stream)stream.native);
    fake_cuda_settle();
    trainer_check_bytes(&on.worker, 1); /* the late copies went elsewhere */
    raw_worker_say_released(&on.worker, 1);
    on.trainer.after = REFIT_STREAM_NONE;
    uint64_t locked = fake_cuda_calls("cuMemHostRegister");
    apply(&on, 3);
    /* With two slots the late copies are seen to have ended: the slot is used again. */
    if (slots == 2) assert_int_equal(fake_cuda_calls("cuMemHostRegister"), locked);
    assert_ok(refit_stream_close(on.device, stream, NULL));
    scene_close(&on);
}

TEST(a_stream_that_stands_costs_the_version_and_no_bytes)
{
    for (uint32_t slots = 1; slots <= 2; slots++)
        for (int at_once = 0; at_once < 2; at_once++)
            stop_a_stream(slots, at_once);
}

/* Opens, declares, begins, writes and commits one tensor. */
static refit_status publish_one(bool at_once, refit_device **device, refit_publisher **publisher,
                                void **memory)
{
    const refit_config config = trainer_config();
    const refit_tensor *tensor = sample_tensors();
    RFT_TRY(refit_device_open("cuda:0", NULL, device, NULL));
    RFT_TRY(refit_memory_alloc(*device, tensor->bytes, memory, NULL));
    RFT_TRY(refit_publisher_open("tcp://127.0.0.1:0", &config, publisher, NULL));
    RFT_TRY(refit_publisher_declare(*publisher, tensor, 1, NULL));
    RFT_TRY(refit_publisher_begin(*publisher, 1, NULL));
    const refit_weight weight = {0, *memory, tensor->bytes};
    RFT_TRY(at_once ? refit_publisher_write_all(*publisher, &weight, 1, *device, REFIT_STREAM_NONE,
                                                NULL)
                    : refit_publisher_write(*publisher, 0, *memory, weight.bytes, *device,
                                            REFIT_STREAM_NONE, NULL));
    return refit_publisher_commit(*publisher, NULL);
}

/* Each allocation fails in turn. Without memory for some of the bookkeeping the version is written
 * another way, from a store that is pageable, say. */
TEST(no_memory_for_the_books_is_an_error_that_leaks_nothing)
{
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        came = false;
        for (int at_once = 0; at_once < 2; at_once++) {
            refit_device *device = NULL;
            refit_publisher *publisher = NULL;
            void *memory = NULL;
            fake_cuda_reset();
            failing_alloc_begin(nth);
            refit_status status = publish_one(at_once, &device, &publisher, &memory);
            refit_publisher_close(publisher);
            if (memory != NULL) assert_ok(refit_memory_free(device, memory, NULL));
            assert_ok(refit_device_close(device, NULL));
            bool failed = failing_alloc_end();
            assert_true(status == REFIT_OK || (failed && status == REFIT_ERR_HOST_MEMORY));
            assert_int_equal(fake_cuda_leaks(), 0);
            came |= failed;
        }
    }
}

int main(void)
{
    return test_run("publisher_write");
}
