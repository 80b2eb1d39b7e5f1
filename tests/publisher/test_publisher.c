/* The publisher's calls: the refusals of each in every state, and the reports. */
#include <stdatomic.h>

#include "memory/budget.h"
#include "scene.h"
#include "tests/support/descriptors.h"
#include "tests/support/failing_alloc.h"

static refit_publisher *open_bare(void)
{
    refit_config config = trainer_config();
    refit_publisher *publisher = NULL;
    assert_ok(refit_publisher_open("inproc://bare", &config, &publisher, NULL));
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

TEST(missing_arguments_are_refused)
{
    refit_publisher *publisher = open_bare();
    refit_worker_info info = {0};
    refit_stats stats = {0};
    assert_invalid(refit_publisher_open(NULL, NULL, NULL, NULL));
    assert_invalid(refit_publisher_declare(publisher, NULL, 1, NULL));
    assert_invalid(refit_publisher_declare(publisher, sample_tensors(), 0, NULL));
    assert_invalid(refit_publisher_begin(NULL, 0, NULL));
    assert_invalid(refit_publisher_commit(NULL, NULL));
    assert_invalid(refit_publisher_abort(NULL, NULL));
    assert_invalid(refit_publisher_worker(publisher, 0, &info, NULL));
    assert_invalid(refit_publisher_stats(publisher, &stats, NULL));
    assert_int_equal(refit_publisher_version(NULL), 0);
    assert_null(refit_publisher_endpoint(NULL));
    refit_publisher_close(NULL);
    refit_publisher_close(publisher);
}

ON_SCENE(calls_in_the_wrong_state_are_refused)
{
    refit_publisher *bare = open_bare();
    assert_int_equal(refit_publisher_begin(bare, 0, NULL), REFIT_ERR_STATE);
    assert_int_equal(write_one(bare, 0, 1), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_commit(bare, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_abort(bare, NULL), REFIT_ERR_STATE);
    refit_publisher_close(bare);

    scene_open(on, 0, false);
    assert_int_equal(write_one(on->publisher, 0, 65536 * 2), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_abort(on->publisher, NULL), REFIT_ERR_STATE);
    trainer_begin(&on->trainer, 1);
    assert_int_equal(refit_publisher_begin(on->publisher, 0, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_publisher_declare(on->publisher, sample_tensors(), SAMPLE_TENSORS, NULL),
                     REFIT_ERR_STATE);
    assert_ok(refit_publisher_abort(on->publisher, NULL));
    assert_int_equal(refit_publisher_commit(on->publisher, NULL), REFIT_ERR_STATE);
}

ON_SCENE(wrong_writes_are_refused_and_change_nothing)
{
    scene_open(on, 0, false);
    trainer_begin(&on->trainer, 1);
    assert_invalid(write_one(on->publisher, SAMPLE_TENSORS, 1));
    assert_invalid(write_one(on->publisher, 0, 65536));
    assert_invalid(write_one(on->publisher, 3, 3 * 65569));
    assert_ok(write_one(on->publisher, 2, 0));
    assert_ok(write_one(on->publisher, 0, 65536 * 2));
    assert_int_equal(write_one(on->publisher, 0, 65536 * 2), REFIT_ERR_STATE);
}

ON_SCENE(version_that_lacks_a_tensor_stays_open)
{
    scene_open(on, 0, false);
    trainer_begin(&on->trainer, 1);
    assert_ok(write_one(on->publisher, 0, 65536 * 2));
    assert_refused(refit_publisher_commit(on->publisher, error), REFIT_ERR_STATE, "large");
    assert_ok(write_one(on->publisher, 1, 3 * 65569));
    assert_ok(write_one(on->publisher, 4, 8));
    assert_ok(write_one(on->publisher, 5, 5));
    assert_ok(refit_publisher_commit(on->publisher, NULL));
}

ON_SCENE(no_number_is_above_the_last_one)
{
    scene_open(on, 0, false);
    assert_ok(refit_publisher_begin(on->publisher, UINT64_MAX, NULL));
    assert_ok(refit_publisher_abort(on->publisher, NULL));
    assert_refused(refit_publisher_begin(on->publisher, 0, error), REFIT_ERR_STALE,
                   "no number is left above 18446744073709551615");
}

ON_SCENE(memory_that_cannot_be_is_refused)
{
    refit_error error;
    void *const wrong[] = {NULL, (void *)(UINTPTR_MAX - 3)};
    scene_open(on, 0, false);
    assert_ok(refit_publisher_begin(on->publisher, 0, NULL));
    for (size_t i = 0; i < 2; i++) {
        const refit_weight weight = {4, wrong[i], 8};
        assert_invalid(
            refit_publisher_write(on->publisher, 4, wrong[i], 8, NULL, REFIT_STREAM_NONE, &error));
        assert_says(&error, "has no memory");
        assert_invalid(
            refit_publisher_write_all(on->publisher, &weight, 1, NULL, REFIT_STREAM_NONE, &error));
    }
}

ON_SCENE(numbers_only_rise)
{
    scene_open(on, 0, false);
    scene_publish(on, 7);
    assert_int_equal(refit_publisher_version(on->publisher), 7);
    assert_int_equal(refit_publisher_begin(on->publisher, 7, NULL), REFIT_ERR_STALE);
    assert_ok(refit_publisher_begin(on->publisher, 9, NULL));
    assert_ok(refit_publisher_abort(on->publisher, NULL));
    assert_int_equal(refit_publisher_begin(on->publisher, 9, NULL), REFIT_ERR_STALE);
    assert_ok(refit_publisher_begin(on->publisher, 0, NULL));
    assert_int_equal(refit_publisher_version(on->publisher), 7);
}

TEST(bad_manifests_are_refused)
{
    refit_publisher *publisher = open_bare();
    refit_tensor tensors[2] = {sample_tensors()[0], sample_tensors()[0]};
    assert_invalid(refit_publisher_declare(publisher, tensors, 2, NULL));
    tensors[0].bytes++;
    assert_invalid(refit_publisher_declare(publisher, tensors, 1, NULL));
    refit_publisher_close(publisher);
}

#define HUGE_BYTES (UINT64_C(1) << 38)

TEST(store_that_does_not_fit_is_an_error_where_shm_is_required)
{
    rft_budget room;
    refit_publisher *publisher = NULL;
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
    assert_ok(refit_publisher_open("inproc://huge", &config, &publisher, NULL));
    assert_ok(refit_publisher_declare(publisher, &huge, 1, NULL));
    for (int times = 0; times < 2; times++) {
        assert_refused(refit_publisher_begin(publisher, 0, error), REFIT_ERR_SYSTEM,
                       "broadcast.slots");
    }
    refit_publisher_close(publisher);
}

TEST(endpoints_are_guarded)
{
    refit_config config = trainer_config();
    refit_publisher *first = NULL, *second = NULL;
    assert_int_equal(refit_publisher_open("tcp://0.0.0.0:0", &config, &first, NULL),
                     REFIT_ERR_SECURITY);
    assert_invalid(refit_publisher_open("http://x", &config, &first, NULL));
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &config, &first, NULL));
    assert_int_equal(refit_publisher_open(refit_publisher_endpoint(first), &config, &second, NULL),
                     REFIT_ERR_BUSY);
    assert_null(second);
    refit_publisher_close(first);
    config.broadcast_heartbeat_ms = config.broadcast_heartbeat_timeout_ms;
    assert_int_equal(refit_publisher_open("inproc://x", &config, &first, NULL), REFIT_ERR_CONFIG);
}

TEST(wait_for_workers_ends_at_its_timeout)
{
    refit_publisher *publisher = open_bare();
    refit_worker_info info = {.size = sizeof info};
    assert_ok(refit_publisher_wait_workers(publisher, 0, 0, NULL));
    assert_refused(refit_publisher_wait_workers(publisher, 2, 5, error), REFIT_ERR_TIMEOUT,
                   "0 of 2 workers have");
    assert_refused(refit_publisher_wait_workers(publisher, 1, 0, error), REFIT_ERR_TIMEOUT,
                   "0 of 1 worker has");
    assert_int_equal(refit_publisher_worker(publisher, 0, &info, NULL), REFIT_ERR_NOT_FOUND);
    refit_publisher_close(publisher);
}

ON_SCENE(without_workers_a_version_commits_at_once)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        scene_renew(on);
        on->config.broadcast_slots = slots;
        scene_open(on, 0, false);
        for (uint64_t version = 1; version <= 3; version++)
            scene_publish(on, version);
        refit_stats stats = trainer_stats(&on->trainer);
        assert_int_equal(stats.publish_version, 3);
        assert_int_equal(stats.publish_count, 3);
        assert_int_equal(stats.publish_same_blocks_last, 2);
    }
}

ON_SCENE(quorum_without_workers_is_aborted)
{
    on->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    on->config.broadcast_quorum = 1;
    scene_open(on, 0, false);
    trainer_start(&on->trainer, TRAINER_PUBLISH, 1);
    assert_int_equal(trainer_join(&on->trainer), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(on->publisher), 0);
    assert_int_equal(trainer_stats(&on->trainer).publish_aborts, 1);
}

ON_SCENE(changed_tensors_make_a_new_store)
{
    scene_open(on, 0, false);
    scene_publish(on, 1);
    assert_ok(refit_publisher_declare(on->publisher, sample_tensors(), 1, NULL));
    assert_int_equal(refit_publisher_version(on->publisher), 1);
    assert_ok(refit_publisher_begin(on->publisher, 0, NULL));
    assert_ok(write_one(on->publisher, 0, 65536 * 2));
    assert_ok(refit_publisher_commit(on->publisher, NULL));
    assert_int_equal(refit_publisher_version(on->publisher), 2);
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

TEST(every_failed_allocation_is_an_error)
{
    refit_config config = trainer_config();
    for (uint32_t slots = 1; slots <= 2; slots++) {
        config.broadcast_slots = slots;
        for (uint64_t nth = 1;; nth++) {
            failing_alloc_begin(nth);
            refit_status status = open_declare_publish(&config);
            if (!failing_alloc_end()) {
                assert_ok(status);
                break;
            }
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
    }
}

ON_SCENE(what_was_kept_of_a_worker_goes_with_the_publisher)
{
    failing_alloc_begin(0);
    scene_open(on, 1, false);
    scene_publish(on, 1);
    scene_renew(on);
    (void)failing_alloc_end(); /* fails where a block is left */
}

/* ---- No thread: the linker puts these functions before those of base/thread.c */

static bool without_threads;
static atomic_int mutexes; /* open ones */

refit_status __real_rft_thread_start(rft_thread *thread, const char *name, void *(*run)(void *),
                                     void *user, refit_error *error);
refit_status __wrap_rft_thread_start(rft_thread *thread, const char *name, void *(*run)(void *),
                                     void *user, refit_error *error);
refit_status __real_rft_mutex_open(rft_mutex *mutex, refit_error *error);
refit_status __wrap_rft_mutex_open(rft_mutex *mutex, refit_error *error);
void __real_rft_mutex_close(rft_mutex *mutex);
void __wrap_rft_mutex_close(rft_mutex *mutex);

refit_status __wrap_rft_thread_start(rft_thread *thread, const char *name, void *(*run)(void *),
                                     void *user, refit_error *error)
{
    if (without_threads) return rft_fail(error, REFIT_ERR_SYSTEM, "the test has no threads");
    return __real_rft_thread_start(thread, name, run, user, error);
}

refit_status __wrap_rft_mutex_open(rft_mutex *mutex, refit_error *error)
{
    mutexes++;
    return __real_rft_mutex_open(mutex, error);
}

void __wrap_rft_mutex_close(rft_mutex *mutex)
{
    mutexes--;
    __real_rft_mutex_close(mutex);
}

TEST(open_that_gets_no_thread_leaves_nothing_open)
{
    refit_config config = trainer_config();
    refit_publisher *publisher = NULL;
    const int before = mutexes, descriptors = count_descriptors();
    without_threads = true;
    refit_status status = refit_publisher_open("inproc://thread", &config, &publisher, NULL);
    without_threads = false;
    assert_int_equal(status, REFIT_ERR_SYSTEM);
    assert_null(publisher);
    assert_int_equal(mutexes, before);
    assert_int_equal(count_descriptors(), descriptors);
}

int main(void)
{
    return test_run("publisher");
}
