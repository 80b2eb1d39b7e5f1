/* The publisher's calls: the refusals of each in every state, and the reports. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "memory/budget.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/trainer.h"

static refit_publisher *open_bare(void)
{
    refit_config config = trainer_config();
    refit_publisher *publisher = NULL;
    assert_int_equal(refit_publisher_open("inproc://bare", &config, &publisher, NULL), REFIT_OK);
    return publisher;
}

static refit_status write_one(refit_publisher *publisher, uint32_t tensor, uint64_t bytes)
{
    static const unsigned char memory[65536 * 4];
    refit_error error = {0};
    refit_status status =
        refit_publisher_write(publisher, tensor, memory, bytes, NULL, REFIT_STREAM_NONE, &error);
    if (status != REFIT_OK) assert_true(strlen(error.text) > 20);
    return status;
}

static void missing_arguments_are_refused(void **state)
{
    (void)state;
    refit_publisher *publisher = open_bare();
    refit_worker_info info = {0};
    refit_stats stats = {0};
    assert_int_equal(refit_publisher_open(NULL, NULL, NULL, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_declare(publisher, NULL, 1, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_declare(publisher, sample_tensors(), 0, NULL),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_begin(NULL, 0, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_commit(NULL, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_abort(NULL, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_worker(publisher, 0, &info, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_stats(publisher, &stats, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_version(NULL), 0);
    assert_null(refit_publisher_endpoint(NULL));
    refit_publisher_close(NULL);
    refit_publisher_close(publisher);
}

static void calls_in_the_wrong_state_are_refused(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_config config = trainer_config();
    refit_publisher *bare = open_bare();
    assert_int_equal(refit_publisher_begin(bare, 0, NULL), REFIT_ERR_STATE);
    assert_int_equal(write_one(bare, 0, 1), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_commit(bare, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_abort(bare, NULL), REFIT_ERR_STATE);
    refit_publisher_close(bare);

    trainer_open(&trainer, &config);
    assert_int_equal(write_one(trainer.publisher, 0, 65536 * 2), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_abort(trainer.publisher, NULL), REFIT_ERR_STATE);
    trainer_begin(&trainer, 1);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 0, NULL), REFIT_ERR_STATE);
    assert_int_equal(
        refit_publisher_declare(trainer.publisher, sample_tensors(), SAMPLE_TENSORS, NULL),
        REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_abort(trainer.publisher, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_commit(trainer.publisher, NULL), REFIT_ERR_STATE);
    trainer_close(&trainer);
}

static void wrong_writes_are_refused_and_change_nothing(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    trainer_begin(&trainer, 1);
    assert_int_equal(write_one(trainer.publisher, SAMPLE_TENSORS, 1), REFIT_ERR_INVALID);
    assert_int_equal(write_one(trainer.publisher, 0, 65536), REFIT_ERR_INVALID);
    assert_int_equal(write_one(trainer.publisher, 3, 3 * 65569), REFIT_ERR_INVALID);
    assert_int_equal(write_one(trainer.publisher, 2, 0), REFIT_OK);
    assert_int_equal(write_one(trainer.publisher, 0, 65536 * 2), REFIT_OK);
    assert_int_equal(write_one(trainer.publisher, 0, 65536 * 2), REFIT_ERR_STATE);
    trainer_close(&trainer);
}

static void version_that_lacks_a_tensor_stays_open(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_error error;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    trainer_begin(&trainer, 1);
    assert_int_equal(write_one(trainer.publisher, 0, 65536 * 2), REFIT_OK);
    assert_int_equal(refit_publisher_commit(trainer.publisher, &error), REFIT_ERR_STATE);
    assert_non_null(strstr(error.text, "large"));
    assert_int_equal(write_one(trainer.publisher, 1, 3 * 65569), REFIT_OK);
    assert_int_equal(write_one(trainer.publisher, 4, 8), REFIT_OK);
    assert_int_equal(write_one(trainer.publisher, 5, 5), REFIT_OK);
    assert_int_equal(refit_publisher_commit(trainer.publisher, NULL), REFIT_OK);
    trainer_close(&trainer);
}

static void no_number_is_above_the_last_one(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_error error;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    assert_int_equal(refit_publisher_begin(trainer.publisher, UINT64_MAX, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_abort(trainer.publisher, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 0, &error), REFIT_ERR_STALE);
    assert_non_null(strstr(error.text, "no number is left above 18446744073709551615"));
    trainer_close(&trainer);
}

static void memory_that_cannot_be_is_refused(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_error error;
    void *const wrong[] = {NULL, (void *)(UINTPTR_MAX - 3)};
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 0, NULL), REFIT_OK);
    for (size_t i = 0; i < 2; i++) {
        const refit_weight weight = {4, wrong[i], 8};
        assert_int_equal(refit_publisher_write(trainer.publisher, 4, wrong[i], 8, NULL,
                                               REFIT_STREAM_NONE, &error),
                         REFIT_ERR_INVALID);
        assert_non_null(strstr(error.text, "has no memory"));
        assert_int_equal(refit_publisher_write_all(trainer.publisher, &weight, 1, NULL,
                                                   REFIT_STREAM_NONE, &error),
                         REFIT_ERR_INVALID);
    }
    trainer_close(&trainer);
}

static void numbers_only_rise(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    trainer_start(&trainer, TRAINER_PUBLISH, 7);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    assert_int_equal(refit_publisher_version(trainer.publisher), 7);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 7, NULL), REFIT_ERR_STALE);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 9, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_abort(trainer.publisher, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 9, NULL), REFIT_ERR_STALE);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 0, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_version(trainer.publisher), 7);
    trainer_close(&trainer);
}

static void bad_manifests_are_refused(void **state)
{
    (void)state;
    refit_publisher *publisher = open_bare();
    refit_tensor tensors[2] = {sample_tensors()[0], sample_tensors()[0]};
    assert_int_equal(refit_publisher_declare(publisher, tensors, 2, NULL), REFIT_ERR_INVALID);
    tensors[0].bytes++;
    assert_int_equal(refit_publisher_declare(publisher, tensors, 1, NULL), REFIT_ERR_INVALID);
    refit_publisher_close(publisher);
}

#define HUGE_BYTES (UINT64_C(1) << 38)

static void store_that_does_not_fit_is_an_error_where_shm_is_required(void **state)
{
    (void)state;
    rft_budget room;
    refit_publisher *publisher = NULL;
    refit_error error;
    refit_config config = trainer_config();
    refit_tensor huge = {.size = sizeof huge, .name = "huge", .dtype = REFIT_C64, .rank = 1};
    huge.shape[0] = HUGE_BYTES / 8;
    huge.bytes = HUGE_BYTES;
    huge.alias_of = REFIT_NO_ALIAS;
    rft_budget_free("", &room);
    if (room.free_bytes >= HUGE_BYTES) skip();
    config.broadcast_shm = REFIT_SHM_REQUIRE;
    config.broadcast_frame_bytes = 16 * 1024 * 1024;
    config.limits_version_bytes = HUGE_BYTES * 2;
    assert_int_equal(refit_publisher_open("inproc://huge", &config, &publisher, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_declare(publisher, &huge, 1, &error), REFIT_ERR_SYSTEM);
    assert_non_null(strstr(error.text, "broadcast.slots"));
    assert_int_equal(refit_publisher_begin(publisher, 0, NULL), REFIT_ERR_STATE);
    refit_publisher_close(publisher);
}

static void endpoints_are_guarded(void **state)
{
    (void)state;
    refit_config config = trainer_config();
    refit_publisher *first = NULL, *second = NULL;
    assert_int_equal(refit_publisher_open("tcp://0.0.0.0:0", &config, &first, NULL),
                     REFIT_ERR_SECURITY);
    assert_int_equal(refit_publisher_open("http://x", &config, &first, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_publisher_open("tcp://127.0.0.1:0", &config, &first, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_open(refit_publisher_endpoint(first), &config, &second, NULL),
                     REFIT_ERR_BUSY);
    assert_null(second);
    refit_publisher_close(first);
    config.broadcast_heartbeat_ms = config.broadcast_heartbeat_timeout_ms;
    assert_int_equal(refit_publisher_open("inproc://x", &config, &first, NULL), REFIT_ERR_CONFIG);
}

static void wait_for_workers_ends_at_its_timeout(void **state)
{
    (void)state;
    refit_publisher *publisher = open_bare();
    refit_error error;
    refit_worker_info info = {.size = sizeof info};
    assert_int_equal(refit_publisher_wait_workers(publisher, 0, 0, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_wait_workers(publisher, 2, 5, &error), REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "0 of 2 workers have"));
    assert_int_equal(refit_publisher_wait_workers(publisher, 1, 0, &error), REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "0 of 1 worker has"));
    assert_int_equal(refit_publisher_worker(publisher, 0, &info, NULL), REFIT_ERR_NOT_FOUND);
    refit_publisher_close(publisher);
}

static void without_workers_a_version_commits_at_once(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_config config = trainer_config();
    for (uint32_t slots = 1; slots <= 2; slots++) {
        config.broadcast_slots = slots;
        trainer_open(&trainer, &config);
        for (uint64_t version = 1; version <= 3; version++) {
            trainer_start(&trainer, TRAINER_PUBLISH, version);
            assert_int_equal(trainer_join(&trainer), REFIT_OK);
        }
        refit_stats stats = trainer_stats(&trainer);
        assert_int_equal(stats.publish_version, 3);
        assert_int_equal(stats.publish_count, 3);
        assert_int_equal(stats.publish_same_blocks_last, 2);
        trainer_close(&trainer);
    }
}

static void quorum_without_workers_is_aborted(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_config config = trainer_config();
    config.broadcast_commit = REFIT_COMMIT_QUORUM;
    config.broadcast_quorum = 1;
    trainer_open(&trainer, &config);
    trainer_start(&trainer, TRAINER_PUBLISH, 1);
    assert_int_equal(trainer_join(&trainer), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(trainer.publisher), 0);
    assert_int_equal(trainer_stats(&trainer).publish_aborts, 1);
    trainer_close(&trainer);
}

static void changed_tensors_make_a_new_store(void **state)
{
    (void)state;
    test_trainer trainer;
    refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    trainer_start(&trainer, TRAINER_PUBLISH, 1);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    assert_int_equal(refit_publisher_declare(trainer.publisher, sample_tensors(), 1, NULL),
                     REFIT_OK);
    assert_int_equal(refit_publisher_version(trainer.publisher), 1);
    assert_int_equal(refit_publisher_begin(trainer.publisher, 0, NULL), REFIT_OK);
    assert_int_equal(write_one(trainer.publisher, 0, 65536 * 2), REFIT_OK);
    assert_int_equal(refit_publisher_commit(trainer.publisher, NULL), REFIT_OK);
    assert_int_equal(refit_publisher_version(trainer.publisher), 2);
    trainer_close(&trainer);
}

static refit_status open_declare_publish(const refit_config *config)
{
    refit_publisher *publisher = NULL;
    const refit_tensor *tensors = sample_tensors();
    refit_status status = refit_publisher_open("inproc://alloc", config, &publisher, NULL);
    if (status != REFIT_OK) return status;
    status = refit_publisher_declare(publisher, tensors, 1, NULL);
    if (status == REFIT_OK) status = refit_publisher_begin(publisher, 0, NULL);
    if (status == REFIT_OK) status = write_one(publisher, 0, tensors[0].bytes);
    if (status == REFIT_OK) status = refit_publisher_commit(publisher, NULL);
    refit_publisher_close(publisher);
    return status;
}

static void every_failed_allocation_is_an_error(void **state)
{
    (void)state;
    refit_config config = trainer_config();
    for (uint32_t slots = 1; slots <= 2; slots++) {
        config.broadcast_slots = slots;
        for (uint64_t nth = 1;; nth++) {
            failing_alloc_begin(nth);
            refit_status status = open_declare_publish(&config);
            if (!failing_alloc_end()) {
                assert_int_equal(status, REFIT_OK);
                break;
            }
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
    }
}

static void what_was_kept_of_a_worker_goes_with_the_publisher(void **state)
{
    (void)state;
    test_trainer trainer;
    raw_worker worker;
    refit_config config = trainer_config();
    failing_alloc_begin(0);
    trainer_open(&trainer, &config);
    raw_worker_open(&worker, refit_publisher_endpoint(trainer.publisher), "w", false);
    raw_worker_join(&worker);
    trainer_wait_workers(&trainer, 1);
    trainer_offer(&trainer, 1);
    raw_worker_stage(&worker);
    raw_worker_apply(&worker);
    assert_int_equal(trainer_join(&trainer), REFIT_OK);
    raw_worker_close(&worker);
    trainer_close(&trainer);
    (void)failing_alloc_end(); /* fails where a block is left */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_arguments_are_refused),
        cmocka_unit_test(calls_in_the_wrong_state_are_refused),
        cmocka_unit_test(wrong_writes_are_refused_and_change_nothing),
        cmocka_unit_test(version_that_lacks_a_tensor_stays_open),
        cmocka_unit_test(numbers_only_rise),
        cmocka_unit_test(no_number_is_above_the_last_one),
        cmocka_unit_test(memory_that_cannot_be_is_refused),
        cmocka_unit_test(bad_manifests_are_refused),
        cmocka_unit_test(store_that_does_not_fit_is_an_error_where_shm_is_required),
        cmocka_unit_test(endpoints_are_guarded),
        cmocka_unit_test(wait_for_workers_ends_at_its_timeout),
        cmocka_unit_test(without_workers_a_version_commits_at_once),
        cmocka_unit_test(quorum_without_workers_is_aborted),
        cmocka_unit_test(changed_tensors_make_a_new_store),
        cmocka_unit_test(every_failed_allocation_is_an_error),
        cmocka_unit_test(what_was_kept_of_a_worker_goes_with_the_publisher),
    };
    return cmocka_run_group_tests_name("publisher", tests, NULL, NULL);
}
