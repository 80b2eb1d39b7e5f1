/* Keys on a connection: with the right ones versions arrive whole, whatever the transport; with a
 * wrong one, or none, no worker joins and no trainer is believed, and a sentence says why. */
#include <stdio.h>
#include <stdlib.h>

#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/crew.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/locksmith.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

#define WAIT_MS 20000u

static refit_config keyed_trainer(const locksmith *smith)
{
    refit_config config = trainer_config();
    locksmith_equip_trainer(smith, &config);
    return config;
}

/* Gives up on a trainer soon. */
static refit_config keyed_worker(const locksmith *smith, const char *name)
{
    refit_config config = quick_config();
    config.broadcast_heartbeat_timeout_ms = 500;
    locksmith_equip_worker(smith, name, &config);
    return config;
}

static const char *endpoint_of(const test_trainer *trainer)
{
    return refit_publisher_endpoint(trainer->publisher);
}

/* ---- The right keys */

static void versions_arrive(const char *endpoint, bool shm)
{
    locksmith smith = locksmith_open();
    refit_config config = keyed_trainer(&smith), own = keyed_worker(&smith, "w0");
    refit_publisher *publisher = NULL;
    refit_error error;
    crew_member member;
    locksmith_admit(&smith, "w0");
    config.broadcast_shm = own.broadcast_shm = shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF;
    own.broadcast_heartbeat_timeout_ms = WAIT_MS;
    if (refit_publisher_open(endpoint, &config, &publisher, &error) != REFIT_OK)
        fail_msg("%s", error.text);
    assert_ok(refit_publisher_declare(publisher, sample_tensors(), SAMPLE_TENSORS, NULL));
    crew_start(&member, refit_publisher_endpoint(publisher), &own, CREW_ACCEPT);
    assert_ok(refit_publisher_wait_workers(publisher, 1, WAIT_MS, NULL));
    for (uint64_t version = 1; version <= 3; version++) {
        sample_version sample;
        sample_open(&sample, version);
        assert_ok(refit_publisher_begin(publisher, version, NULL));
        const void *bytes[SAMPLE_TENSORS];
        for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
            const rft_manifest_tensor *tensor = &sample.manifest->tensors[i];
            bytes[i] = sample.image + tensor->offset;
            if (tensor->alias_of != REFIT_NO_ALIAS) continue;
            assert_ok(refit_publisher_write(publisher, i, bytes[i], tensor->bytes, NULL,
                                            REFIT_STREAM_NONE, NULL));
        }
        assert_ok(refit_publisher_commit(publisher, NULL));
        assert_true(crew_wait(&member, version, 1) ==
                    crew_digest(sample_tensors(), SAMPLE_TENSORS, bytes));
        sample_close(&sample);
    }
    crew_stop(&member);
    refit_publisher_close(publisher);
    locksmith_close(&smith);
}

static void versions_arrive_by_tcp(void **state)
{
    versions_arrive("tcp://127.0.0.1:0", false);
}

static void versions_arrive_by_shared_memory(void **state)
{
    versions_arrive("tcp://127.0.0.1:0", true);
}

static void versions_arrive_by_ipc(void **state)
{
    versions_arrive("ipc:///tmp/refit-curve.sock", false);
}

/* Without a handshake there: keys are not asked for. */
static void versions_arrive_within_the_process(void **state)
{
#if defined(__SANITIZE_THREAD__)
    skip(); /* it does not see libzmq's locks */
#endif
    versions_arrive("inproc://curve", false);
}

static void with_keys_an_address_beyond_this_host_can_be_bound(void **state)
{
    locksmith smith = locksmith_open();
    refit_config config = keyed_trainer(&smith), plain = trainer_config();
    rft_channel *channel = NULL;
    refit_error error;
    assert_int_equal(rft_channel_bind("tcp://0.0.0.0:0", &plain, &channel, &error),
                     REFIT_ERR_SECURITY);
    assert_says(&error, "security.key");
    assert_says(&error, "broadcast.insecure");
    assert_ok(rft_channel_bind("tcp://0.0.0.0:0", &config, &channel, NULL));
    rft_channel_close(channel);
    locksmith_close(&smith);
}

static void a_new_file_lets_in_without_a_restart(void **state)
{
    locksmith smith = locksmith_open();
    refit_config config = keyed_trainer(&smith);
    test_trainer trainer;
    crew_member member;
    locksmith_make(&smith, "w0");
    refit_config own = keyed_worker(&smith, "w0");
    own.broadcast_heartbeat_timeout_ms = WAIT_MS; /* refused for so long, it would give up */
    trainer_open(&trainer, &config);
    crew_start(&member, endpoint_of(&trainer), &own, CREW_ACCEPT);
    refit_update *update = NULL;
    assert_int_equal(refit_publisher_wait_workers(trainer.publisher, 1, 300, NULL),
                     REFIT_ERR_TIMEOUT);
    locksmith_allow(&smith, "w0");
    trainer_wait_workers(&trainer, 1);
    assert_null(update);
    crew_stop(&member);
    trainer_close(&trainer);
    locksmith_close(&smith);
}

/* ---- Wrong ones */

/* Waits as a worker does, and gives what that ended with. */
static refit_status end_of(const char *endpoint, const refit_config *config, uint32_t timeout_ms,
                           refit_error *error)
{
    refit_subscriber *subscriber = NULL;
    refit_update *update = NULL;
    if (refit_subscriber_open(endpoint, config, &subscriber, error) != REFIT_OK)
        fail_msg("%s", error->text);
    refit_status status = refit_subscriber_next(subscriber, timeout_ms, &update, error);
    refit_subscriber_close(subscriber);
    return status;
}

static void check_words(const refit_error *error, const char *words)
{
    if (strstr(error->text, words) == NULL) fail_msg("%s", error->text);
}

typedef struct mismatch {
    const char *name;
    bool trainer_keys;
    const char *key;        /* of the worker; NULL: it has none */
    const char *server_key; /* that the worker expects */
    uint32_t timeout_ms;
    refit_status status;
    const char *words[2];
} mismatch;

static const mismatch mismatches[] = {
    {"a key that is not allowed",
     true,
     "stranger",
     "trainer",
     WAIT_MS,
     REFIT_ERR_SECURITY,
     {"does not allow this worker's key", ""}},
    /* The trainer may be away, and something else may answer: the worker goes on looking. */
    {"another trainer's key",
     true,
     "w0",
     "another",
     1500,
     REFIT_ERR_TIMEOUT,
     {"handshake failed", "security.server_key"}},
    {"a worker without keys",
     true,
     NULL,
     NULL,
     WAIT_MS,
     REFIT_ERR_SECURITY,
     {"the trainer asks for keys", ""}},
    {"a trainer without keys",
     false,
     "w0",
     "trainer",
     WAIT_MS,
     REFIT_ERR_SECURITY,
     {"uses no keys", ""}},
};

static refit_config mismatched_worker(const locksmith *smith, const mismatch *it)
{
    refit_config config = quick_config();
    if (it->key == NULL) {
        config.broadcast_heartbeat_timeout_ms = 500;
        return config;
    }
    char path[64];
    (void)snprintf(path, sizeof path, "keys/%s.public", it->server_key);
    config = keyed_worker(smith, it->key);
    locksmith_path(smith, path, config.security_server_key);
    return config;
}

static void ends_that_do_not_accept_each_other_say_why(void **state)
{
    for (size_t i = 0; i < COUNT_OF(mismatches); i++) {
        const mismatch *it = &mismatches[i];
        locksmith smith = locksmith_open();
        refit_config config = it->trainer_keys ? keyed_trainer(&smith) : trainer_config();
        refit_error error = {0};
        test_trainer trainer;
        locksmith_admit(&smith, "w0");
        locksmith_make(&smith, "stranger");
        locksmith_make(&smith, "another");
        trainer_open(&trainer, &config);
        const refit_config own = mismatched_worker(&smith, it);
        refit_status status = end_of(endpoint_of(&trainer), &own, it->timeout_ms, &error);
        if (status != it->status) fail_msg("%s: status %d: %s", it->name, status, error.text);
        check_words(&error, it->words[0]);
        check_words(&error, it->words[1]);
        assert_int_equal(trainer_stats(&trainer).workers, 0);
        trainer_close(&trainer);
        locksmith_close(&smith);
    }
}

/* A worker that waited while the trainer had other keys need not be started again. */
static void a_worker_finds_a_trainer_that_comes_back_with_the_right_keys(void **state)
{
    locksmith smith = locksmith_open();
    refit_config plain = trainer_config(), keyed = keyed_trainer(&smith);
    test_trainer trainer;
    crew_member member;
    char endpoint[64];
    locksmith_admit(&smith, "w0");
    refit_config own = keyed_worker(&smith, "w0");
    own.broadcast_heartbeat_timeout_ms = WAIT_MS;
    trainer_open(&trainer, &plain);
    (void)snprintf(endpoint, sizeof endpoint, "%s", endpoint_of(&trainer));
    crew_start(&member, endpoint, &own, CREW_ACCEPT);
    assert_int_equal(refit_publisher_wait_workers(trainer.publisher, 1, 300, NULL),
                     REFIT_ERR_TIMEOUT);
    trainer_close(&trainer);
    refit_publisher *publisher = NULL;
    assert_ok(refit_publisher_open(endpoint, &keyed, &publisher, NULL));
    assert_ok(refit_publisher_wait_workers(publisher, 1, WAIT_MS, NULL));
    crew_stop(&member);
    refit_publisher_close(publisher);
    locksmith_close(&smith);
}

/* ---- Two publishers of one process */

static void each_publisher_has_its_own_list(void **state)
{
    locksmith left = locksmith_open(), right = locksmith_open();
    refit_config left_config = keyed_trainer(&left), right_config = keyed_trainer(&right);
    test_trainer one, two;
    refit_error error;
    crew_member member, other;
    locksmith_admit(&left, "w0");
    locksmith_admit(&right, "w1");
    trainer_open(&one, &left_config);
    trainer_open(&two, &right_config);

    /* Allowed there, but not here. */
    refit_config own = keyed_worker(&left, "w0");
    locksmith_path(&right, "keys/trainer.public", own.security_server_key);
    assert_int_equal(end_of(endpoint_of(&two), &own, WAIT_MS, &error), REFIT_ERR_SECURITY);

    own = keyed_worker(&left, "w0");
    refit_config second = keyed_worker(&right, "w1");
    own.broadcast_heartbeat_timeout_ms = second.broadcast_heartbeat_timeout_ms = WAIT_MS;
    crew_start(&member, endpoint_of(&one), &own, CREW_ACCEPT);
    crew_start(&other, endpoint_of(&two), &second, CREW_ACCEPT);
    trainer_wait_workers(&one, 1);
    trainer_wait_workers(&two, 1);

    /* The ZAP handler outlives the first publisher, and starts again after the last. */
    crew_stop(&member);
    trainer_close(&one);
    crew_stop(&other);
    crew_start(&other, endpoint_of(&two), &second, CREW_ACCEPT);
    trainer_wait_workers(&two, 1);
    crew_stop(&other);
    trainer_close(&two);
    trainer_open(&one, &left_config);
    crew_start(&member, endpoint_of(&one), &own, CREW_ACCEPT);
    trainer_wait_workers(&one, 1);
    crew_stop(&member);
    trainer_close(&one);
    locksmith_close(&left);
    locksmith_close(&right);
}

/* ---- Files */

static refit_status open_with(const refit_config *config, refit_error *error)
{
    refit_publisher *publisher = NULL;
    refit_status status = refit_publisher_open("tcp://127.0.0.1:0", config, &publisher, error);
    if (status == REFIT_OK) refit_publisher_close(publisher);
    return status;
}

static void key_files_that_are_not_right_are_refused_at_open(void **state)
{
    locksmith smith = locksmith_open();
    refit_config config = keyed_trainer(&smith), bad;
    refit_error error;
    char path[256];
    assert_ok(open_with(&config, &error));
    locksmith_path(&smith, "keys/trainer.secret", path);

    assert_int_equal(chmod(path, 0644), 0);
    assert_int_equal(open_with(&config, &error), REFIT_ERR_SECURITY);
    check_words(&error, "chmod 600");
    assert_int_equal(chmod(path, 0600), 0);

    bad = config;
    locksmith_path(&smith, "keys/none.secret", bad.security_key);
    assert_int_equal(open_with(&bad, &error), REFIT_ERR_IO);
    bad = config;
    locksmith_path(&smith, "keys/trainer.public", bad.security_key);
    assert_int_equal(open_with(&bad, &error), REFIT_ERR_SECURITY);
    bad = config;
    locksmith_path(&smith, "none", bad.security_allow);
    assert_int_equal(open_with(&bad, &error), REFIT_ERR_IO);
    bad = config;
    locksmith_path(&smith, "keys/trainer.public", bad.security_allow);
    assert_int_equal(open_with(&bad, &error), REFIT_ERR_IO);

    refit_subscriber *subscriber = NULL;
    locksmith_make(&smith, "w0");
    bad = keyed_worker(&smith, "w0");
    locksmith_path(&smith, "keys/w0.secret", bad.security_server_key);
    assert_int_equal(refit_subscriber_open("tcp://127.0.0.1:1", &bad, &subscriber, &error),
                     REFIT_ERR_SECURITY);
    check_words(&error, "holds a secret key");
    assert_ok(open_with(&config, &error));
    locksmith_close(&smith);
}

/* On either side, from the first allocation to the last. */
static void every_allocation_that_fails_at_open_leaks_nothing(void **state)
{
    locksmith smith = locksmith_open();
    locksmith_admit(&smith, "w0");
    refit_config trainer = keyed_trainer(&smith), worker = keyed_worker(&smith, "w0");
    for (uint64_t nth = 1;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = open_with(&trainer, NULL);
        if (!failing_alloc_end()) break;
        if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    for (uint64_t nth = 1;; nth++) {
        refit_subscriber *subscriber = NULL;
        failing_alloc_begin(nth);
        refit_status status =
            refit_subscriber_open("tcp://127.0.0.1:1", &worker, &subscriber, NULL);
        refit_subscriber_close(subscriber);
        if (!failing_alloc_end()) break;
        if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_ok(open_with(&trainer, NULL));
    locksmith_close(&smith);
}

static void half_of_what_keys_need_is_refused(void **state)
{
    locksmith smith = locksmith_open();
    refit_config trainer = keyed_trainer(&smith), config;
    refit_error error;
    refit_subscriber *subscriber = NULL;
    config = trainer;
    config.security_key[0] = '\0';
    assert_int_equal(open_with(&config, &error), REFIT_ERR_CONFIG);
    check_words(&error, "security.key");
    config = trainer;
    config.security_allow[0] = '\0';
    assert_int_equal(open_with(&config, &error), REFIT_ERR_CONFIG);
    check_words(&error, "security.allow");
    /* A worker's keys on a trainer, and a trainer's on a worker. */
    locksmith_make(&smith, "w0");
    config = keyed_worker(&smith, "w0");
    assert_int_equal(open_with(&config, &error), REFIT_ERR_CONFIG);
    check_words(&error, "security.allow");
    assert_int_equal(refit_subscriber_open("tcp://127.0.0.1:1", &trainer, &subscriber, &error),
                     REFIT_ERR_CONFIG);
    check_words(&error, "security.server_key");
    locksmith_close(&smith);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(versions_arrive_by_tcp),
        cmocka_unit_test(versions_arrive_by_shared_memory),
        cmocka_unit_test(versions_arrive_by_ipc),
        cmocka_unit_test(versions_arrive_within_the_process),
        cmocka_unit_test(with_keys_an_address_beyond_this_host_can_be_bound),
        cmocka_unit_test(a_new_file_lets_in_without_a_restart),
        cmocka_unit_test(ends_that_do_not_accept_each_other_say_why),
        cmocka_unit_test(a_worker_finds_a_trainer_that_comes_back_with_the_right_keys),
        cmocka_unit_test(each_publisher_has_its_own_list),
        cmocka_unit_test(key_files_that_are_not_right_are_refused_at_open),
        cmocka_unit_test(every_allocation_that_fails_at_open_leaks_nothing),
        cmocka_unit_test(half_of_what_keys_need_is_refused),
    };
    return cmocka_run_group_tests_name("curve", tests, NULL, NULL);
}
