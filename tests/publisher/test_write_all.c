/* Many tensors written in one call: workers get the same version as from single writes, a wrong
 * list changes nothing, and after a failure in the middle the state is that which the header
 * states. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/device.h"
#include "fake_cuda.h"
#include "publisher/publisher.h"
#include "tests/support/starved_publish.h"
#include "tests/support/trainer.h"

#define SOON_MS 200

typedef struct scene {
    refit_device *device; /* NULL: the weights lie in host memory */
    test_trainer trainer;
    raw_worker worker;
    bool worker_there;
} scene;

static void impatient(refit_config *config)
{
    config->broadcast_stage_timeout_ms = SOON_MS;
    config->broadcast_linger_ms = SOON_MS;
}

/* The driver takes no kernels: the device takes no digests. */
static void without_kernels(refit_config *config)
{
    (void)config;
    fake_cuda_hide("cuLibraryLoadData", 0);
}

static void scene_open(scene *on, bool gpu, uint32_t slots, void (*change)(refit_config *config))
{
    refit_config config = trainer_config();
    memset(on, 0, sizeof *on);
    fake_cuda_reset();
    config.broadcast_slots = slots;
    config.offload_slab_bytes = 64 * 1024; /* the store is page-locked in several pieces */
    if (change != NULL) change(&config);
    if (gpu) assert_int_equal(refit_device_open("cuda:0", NULL, &on->device, NULL), REFIT_OK);
    trainer_open(&on->trainer, &config);
    trainer_take_device(&on->trainer, on->device);
    on->trainer.at_once = true;
}

static void scene_join(scene *on)
{
    raw_worker_open(&on->worker, refit_publisher_endpoint(on->trainer.publisher), "w", false);
    raw_worker_join(&on->worker);
    trainer_wait_workers(&on->trainer, 1);
    on->worker_there = true;
}

static void scene_close(scene *on)
{
    if (on->worker_there) raw_worker_close(&on->worker);
    trainer_close(&on->trainer);
    if (on->device != NULL) assert_int_equal(refit_device_close(on->device, NULL), REFIT_OK);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static void apply(scene *on, uint64_t version)
{
    trainer_offer(&on->trainer, version);
    raw_worker_stage(&on->worker);
    trainer_check_bytes(&on->worker, version);
    raw_worker_apply(&on->worker);
    assert_int_equal(trainer_join(&on->trainer), REFIT_OK);
    raw_worker_say_released(&on->worker, version);
}

static refit_status write_list(scene *on, const refit_weight *weights, uint32_t count,
                               refit_error *error)
{
    return refit_publisher_write_all(on->trainer.publisher, weights, count, on->device,
                                     on->trainer.after, error);
}

/* What has been written is committed, and a worker gets the version. */
static void commit_and_check(scene *on, uint64_t version)
{
    assert_int_equal(refit_publisher_commit(on->trainer.publisher, NULL), REFIT_OK);
    scene_join(on);
    raw_worker_stage(&on->worker);
    trainer_check_bytes(&on->worker, version);
    raw_worker_apply(&on->worker);
}

/* ---- What goes well */

static void workers_receive_what_was_written(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        for (int trial = 0; trial < 3; trial++) {
            scene on;
            scene_open(&on, trial > 0, slots, trial == 2 ? without_kernels : NULL);
            scene_join(&on);
            for (uint64_t version = 1; version <= 5; version++) {
                apply(&on, version);
                bool same = version % 2 != 0 && version > 1; /* found also where a device writes */
                assert_int_equal(trainer_stats(&on.trainer).publish_same_blocks_last, same ? 2 : 0);
            }
            scene_close(&on);
        }
    }
}

static void part_after_part_makes_a_version(void **state)
{
    (void)state;
    for (int gpu = 0; gpu < 2; gpu++) {
        scene on;
        refit_weight weights[SAMPLE_TENSORS];
        scene_open(&on, gpu, 2, NULL);
        trainer_begin(&on.trainer, 1);
        uint32_t count = trainer_weights(&on.trainer, weights);
        assert_int_equal(write_list(&on, NULL, 0, NULL), REFIT_OK);
        assert_int_equal(write_list(&on, weights, 1, NULL), REFIT_OK);
        assert_int_equal(refit_publisher_write(on.trainer.publisher, weights[1].tensor,
                                               weights[1].memory, weights[1].bytes, on.device,
                                               REFIT_STREAM_NONE, NULL),
                         REFIT_OK);
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_ERR_STATE);
        assert_int_equal(write_list(&on, weights + 2, count - 2, NULL), REFIT_OK);
        commit_and_check(&on, 1);
        scene_close(&on);
    }
}

#define MANY 2500u

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

/* Gives the version's digest; `waits`: the events that were recorded for it. */
static rft_digest128 publish_many(bool gpu, uint64_t *waits)
{
    scene on;
    static unsigned char bytes[MANY * 128];
    void *memory = bytes;
    refit_tensor *tensors = many_tensors();
    refit_weight *weights = calloc(MANY, sizeof *weights);
    assert_non_null(weights);
    scene_open(&on, gpu, 2, allow_many);
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)(i * 31 + i / 251);
    }
    if (gpu) {
        assert_int_equal(refit_memory_alloc(on.device, sizeof bytes, &memory, NULL), REFIT_OK);
        assert_int_equal(
            refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, bytes, sizeof bytes, NULL),
            REFIT_OK);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        weights[i] = (refit_weight){i, (unsigned char *)memory + i * 128, tensors[i].bytes};
    }
    refit_publisher *publisher = on.trainer.publisher;
    assert_int_equal(refit_publisher_declare(publisher, tensors, MANY, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_begin(publisher, 1, NULL), REFIT_OK);
    uint64_t before = fake_cuda_calls("cuEventRecord");
    assert_int_equal(write_list(&on, weights, MANY, NULL), REFIT_OK);
    *waits = fake_cuda_calls("cuEventRecord") - before;
    assert_int_equal(refit_publisher_commit(publisher, NULL), REFIT_OK);
    rft_digest128 digest = publisher->store->committed.digest;
    if (gpu) assert_int_equal(refit_memory_free(on.device, memory, NULL), REFIT_OK);
    scene_close(&on);
    free((char *)(uintptr_t)tensors[0].name);
    free(tensors);
    free(weights);
    return digest;
}

static void a_gpu_is_waited_for_once_a_thousand_tensors(void **state)
{
    (void)state;
    uint64_t waits;
    rft_digest128 by_cpu = publish_many(false, &waits);
    rft_digest128 by_gpu = publish_many(true, &waits);
    assert_true(rft_digest128_equal(&by_cpu, &by_gpu));
    assert_int_equal(waits, 3);
}

/* ---- What is refused before anything is written */

typedef void (*spoil)(refit_weight *weights, uint32_t count);

static void name_none(refit_weight *weights, uint32_t count)
{
    weights[count - 1].tensor = SAMPLE_TENSORS;
}

static void name_a_tied_one(refit_weight *weights, uint32_t count)
{
    weights[count - 1].tensor = 3;
}

static void name_one_twice(refit_weight *weights, uint32_t count)
{
    weights[count - 1] = weights[0];
}

static void shorten(refit_weight *weights, uint32_t count)
{
    weights[count - 1].bytes--;
}

static void take_the_memory_away(refit_weight *weights, uint32_t count)
{
    weights[count - 1].memory = NULL;
}

static void a_wrong_list_is_refused_and_writes_nothing(void **state)
{
    (void)state;
    static const struct {
        spoil how;
        refit_status status;
    } cases[] = {
        {name_none, REFIT_ERR_INVALID},
        {name_a_tied_one, REFIT_ERR_INVALID},
        {name_one_twice, REFIT_ERR_STATE},
        {shorten, REFIT_ERR_INVALID},
        {take_the_memory_away, REFIT_ERR_INVALID},
    };
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        scene on;
        refit_error error;
        refit_weight good[SAMPLE_TENSORS], bad[SAMPLE_TENSORS];
        scene_open(&on, i % 2, 2, NULL);
        trainer_begin(&on.trainer, 1);
        uint32_t count = trainer_weights(&on.trainer, good);
        memcpy(bad, good, sizeof bad);
        cases[i / 2].how(bad, count);
        assert_int_equal(write_list(&on, bad, count, &error), cases[i / 2].status);
        assert_non_null(strstr(error.text, "tensor"));
        assert_int_equal(write_list(&on, good, count, NULL), REFIT_OK);
        assert_int_equal(write_list(&on, good, count, NULL), REFIT_ERR_STATE);
        commit_and_check(&on, 1);
        scene_close(&on);
    }
}

static void arguments_and_states_are_checked(void **state)
{
    (void)state;
    scene on;
    refit_weight weights[SAMPLE_TENSORS];
    scene_open(&on, true, 2, NULL);
    assert_int_equal(refit_publisher_write_all(NULL, weights, 1, NULL, REFIT_STREAM_NONE, NULL),
                     REFIT_ERR_INVALID);
    assert_int_equal(write_list(&on, NULL, 1, NULL), REFIT_ERR_INVALID);
    assert_int_equal(write_list(&on, weights, 0, NULL), REFIT_ERR_STATE);
    trainer_begin(&on.trainer, 1);
    uint32_t count = trainer_weights(&on.trainer, weights);
    weights[count - 1].memory = on.trainer.sample.image; /* of the host */
    assert_int_equal(write_list(&on, weights, count, NULL), REFIT_ERR_INVALID);
    trainer_write(&on.trainer);
    commit_and_check(&on, 1);
    scene_close(&on);
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

/* Each driver call fails, one after the other: the rest of the list is written by the next call.
 * (Without memory for the digest batch nothing fails: the tensors are written one by one.) */
static void a_call_that_fails_leaves_the_rest_to_be_written(void **state)
{
    (void)state;
    const char *const calls[] = {"cuPointerGetAttributes", "cuMemcpyAsync", "cuMemcpyBatchAsync",
                                 "cuEventRecord",          "cuEventQuery",  "cuStreamWaitEvent",
                                 "cuLaunchKernel",         "cuMemAlloc",    "cuMemHostRegister",
                                 "cuMemsetD8Async",        "cuEventCreate"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (unsigned nth = 1; nth <= 12; nth++) {
            scene on;
            refit_stream_ref stream;
            refit_error error;
            refit_weight weights[SAMPLE_TENSORS];
            scene_open(&on, true, 1, NULL);
            assert_int_equal(refit_stream_open(on.device, &stream, NULL), REFIT_OK);
            on.trainer.after = stream;
            trainer_begin(&on.trainer, 1);
            uint32_t count = trainer_weights(&on.trainer, weights);
            fake_cuda_fail(calls[i], nth, 1, RFT_CU_OUT_OF_MEMORY);
            refit_status status = write_list(&on, weights, count, &error);
            fake_cuda_forget_faults();
            uint32_t done = written_of(&on, weights, count);
            assert_int_equal(status == REFIT_OK, done == count);
            if (status != REFIT_OK) assert_true(strlen(error.text) > 20);
            assert_int_equal(write_list(&on, weights + done, count - done, NULL), REFIT_OK);
            commit_and_check(&on, 1);
            assert_int_equal(refit_stream_close(on.device, stream, NULL), REFIT_OK);
            scene_close(&on);
        }
    }
}

static void a_lost_gpu_is_told_and_the_publisher_goes_on_from_the_host(void **state)
{
    (void)state;
    static const char *const calls[] = {"cuMemcpyAsync", "cuLaunchKernel"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        scene on;
        refit_error error;
        refit_weight weights[SAMPLE_TENSORS];
        scene_open(&on, true, 2, impatient);
        trainer_begin(&on.trainer, 1);
        trainer_write(&on.trainer);
        assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
        trainer_begin(&on.trainer, 2);
        uint32_t count = trainer_weights(&on.trainer, weights);
        fake_cuda_fail_later(calls[i], 2, RFT_CU_ILLEGAL_ADDRESS);
        fake_cuda_fail_later("cuMemcpyBatchAsync", 1, RFT_CU_ILLEGAL_ADDRESS);
        assert_int_equal(write_list(&on, weights, count, &error), REFIT_ERR_DEVICE);
        assert_non_null(strstr(error.text, "\""));
        assert_int_equal(written_of(&on, weights, count), 0);
        assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
        trainer_take_device(&on.trainer, NULL);
        trainer_begin(&on.trainer, 3);
        trainer_write(&on.trainer);
        commit_and_check(&on, 3);
        scene_close(&on);
    }
}

/* The late copies may end at any time: until then neither their destination nor the digest batch is
 * used. */
static void a_stream_that_stands_costs_the_version_and_no_bytes(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    refit_error error;
    refit_weight weights[SAMPLE_TENSORS];
    scene_open(&on, true, 2, impatient);
    trainer_begin(&on.trainer, 1);
    trainer_write(&on.trainer);
    assert_int_equal(refit_publisher_commit(on.trainer.publisher, NULL), REFIT_OK);
    assert_int_equal(refit_stream_open(on.device, &stream, NULL), REFIT_OK);
    trainer_begin(&on.trainer, 2);
    fake_cuda_stop_stream((rft_cu_stream)stream.native);
    assert_int_equal(rft_device_zero(on.device, stream, on.trainer.memory + 1024 * 256, 16, NULL),
                     REFIT_OK);
    on.trainer.after = stream;
    uint32_t count = trainer_weights(&on.trainer, weights);
    assert_int_equal(write_list(&on, weights, count, &error), REFIT_ERR_TIMEOUT);
    assert_int_equal(write_list(&on, weights, count, &error), REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "earlier write"));
    assert_int_equal(refit_publisher_abort(on.trainer.publisher, NULL), REFIT_OK);
    fake_cuda_go_stream((rft_cu_stream)stream.native);
    fake_cuda_settle();
    on.trainer.after = REFIT_STREAM_NONE;
    trainer_begin(&on.trainer, 3);
    trainer_write(&on.trainer);
    commit_and_check(&on, 3);
    assert_int_equal(refit_stream_close(on.device, stream, NULL), REFIT_OK);
    scene_close(&on);
}

static refit_status write_first(refit_publisher *publisher, refit_device *device,
                                const void *memory, uint64_t bytes)
{
    const refit_weight weight = {0, memory, bytes};
    return refit_publisher_write_all(publisher, &weight, 1, device, REFIT_STREAM_NONE, NULL);
}

/* If there is no memory for some of the bookkeeping, the tensors are written another way. */
static void no_memory_for_the_books_is_an_error_that_leaks_nothing(void **state)
{
    (void)state;
    starve_a_publish(write_first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workers_receive_what_was_written),
        cmocka_unit_test(part_after_part_makes_a_version),
        cmocka_unit_test(a_gpu_is_waited_for_once_a_thousand_tensors),
        cmocka_unit_test(a_wrong_list_is_refused_and_writes_nothing),
        cmocka_unit_test(arguments_and_states_are_checked),
        cmocka_unit_test(a_call_that_fails_leaves_the_rest_to_be_written),
        cmocka_unit_test(a_lost_gpu_is_told_and_the_publisher_goes_on_from_the_host),
        cmocka_unit_test(a_stream_that_stands_costs_the_version_and_no_bytes),
        cmocka_unit_test(no_memory_for_the_books_is_an_error_that_leaks_nothing),
    };
    return cmocka_run_group_tests_name("write_all", tests, NULL, NULL);
}
