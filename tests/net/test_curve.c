/* Keys on a connection: with the right ones versions arrive whole, whatever the transport; with a
 * wrong one, or none, no worker joins and no trainer is believed, and a sentence says why. */
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/failing_alloc.h"
#include "tests/support/key_fixture.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

#define WAIT_MS 50000u
#define SOON_MS 500u

static key_fixture smith; /* of each test; "w0" is allowed, "stranger" and "another" are not */

static int make_keys(void **state)
{
    smith = key_fixture_open();
    key_fixture_admit(&smith, "w0");
    key_fixture_make(&smith, "stranger");
    key_fixture_make(&smith, "another");
    return 0;
}

static int remove_keys(void **state)
{
    key_fixture_close(&smith);
    return 0;
}

#define WITH_KEYS(name) TEST_WITH(name, make_keys, remove_keys)

static refit_config keyed_trainer(void)
{
    refit_config config = trainer_config();
    key_fixture_equip_trainer(&smith, &config);
    return config;
}

static refit_config keyed_worker(const char *name)
{
    refit_config config = quick_config();
    key_fixture_equip_worker(&smith, name, &config);
    return config;
}

static const char *endpoint_of(const test_trainer *trainer)
{
    return refit_publisher_endpoint(trainer->publisher);
}

/* ---- The right keys */

/* `endpoint` "ipc": in the folder of the keys. */
static void versions_arrive(const char *endpoint, refit_shm shm)
{
    refit_config config = keyed_trainer(), own = keyed_worker("w0");
    test_trainer trainer;
    rollout_thread member;
    config.broadcast_shm = own.broadcast_shm = (int32_t)shm;
    strcpy(config.broadcast_endpoint, endpoint);
    if (strcmp(endpoint, "ipc") == 0)
        (void)snprintf(config.broadcast_endpoint, sizeof config.broadcast_endpoint, "ipc://%s/s",
                       smith.tree.root);
    /* Within one process ZeroMQ waits for all of it. */
    if (strncmp(endpoint, "inproc:", 7) == 0)
        config.broadcast_linger_ms = own.broadcast_linger_ms = 0;
    trainer_open(&trainer, &config);
    rollouts_start(&member, endpoint_of(&trainer), &own, ROLLOUT_ACCEPT);
    trainer_wait_workers(&trainer, 1);
    for (uint64_t version = 1; version <= 3; version++) {
        trainer_start(&trainer, TRAINER_PUBLISH, version);
        assert_ok(trainer_join(&trainer));
        const void *bytes[SAMPLE_TENSORS];
        for (uint32_t i = 0; i < SAMPLE_TENSORS; i++)
            bytes[i] = trainer.sample.image + trainer.sample.manifest->tensors[i].offset;
        assert_true(rollouts_wait(&member, version, 1) ==
                    rollouts_digest(sample_tensors(), SAMPLE_TENSORS, bytes));
    }
    rollouts_stop(&member);
    trainer_close(&trainer);
}

WITH_KEYS(versions_arrive_by_tcp)
{
    versions_arrive("tcp://127.0.0.1:0", REFIT_SHM_OFF);
}

WITH_KEYS(versions_arrive_by_shared_memory)
{
    versions_arrive("tcp://127.0.0.1:0", REFIT_SHM_REQUIRE);
}

WITH_KEYS(versions_arrive_by_ipc)
{
    versions_arrive("ipc", REFIT_SHM_OFF);
}

#if !defined(__SANITIZE_THREAD__) /* which does not see libzmq's locks */
WITH_KEYS(versions_arrive_within_the_process)
{
    versions_arrive("inproc://curve", REFIT_SHM_OFF); /* where keys are not asked for */
}
#endif

WITH_KEYS(with_keys_an_address_beyond_this_host_can_be_bound)
{
    refit_config config = keyed_trainer(), plain = trainer_config();
    rft_channel *channel = NULL;
    refit_error error;
    assert_int_equal(rft_channel_bind("tcp://0.0.0.0:0", &plain, &channel, &error),
                     REFIT_ERR_SECURITY);
    assert_says(&error, "security.key");
    assert_says(&error, "broadcast.insecure");
    assert_ok(rft_channel_bind("tcp://0.0.0.0:0", &config, &channel, NULL));
    rft_channel_close(channel);
}

WITH_KEYS(a_new_file_lets_in_without_a_restart)
{
    refit_config config = keyed_trainer(), own = keyed_worker("stranger");
    test_trainer trainer;
    rollout_thread member;
    trainer_open(&trainer, &config);
    rollouts_start(&member, endpoint_of(&trainer), &own, ROLLOUT_ACCEPT);
    assert_int_equal(refit_publisher_wait_workers(trainer.publisher, 1, 300, NULL),
                     REFIT_ERR_TIMEOUT);
    key_fixture_allow(&smith, "stranger");
    trainer_wait_workers(&trainer, 1);
    rollouts_stop(&member);
    trainer_close(&trainer);
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

typedef struct mismatch {
    const char *name;
    bool trainer_keys;
    const char *key;        /* of the worker; NULL: it has none */
    const char *server_key; /* that the worker expects */
    refit_status status;
    const char *words;
} mismatch;

static const mismatch mismatches[] = {
    {"a key that is not allowed", true, "stranger", "trainer", REFIT_ERR_SECURITY,
     "does not allow this worker's key"},
    {"a worker without keys", true, NULL, NULL, REFIT_ERR_SECURITY, "the trainer asks for keys"},
    {"a trainer without keys", false, "w0", "trainer", REFIT_ERR_SECURITY, "uses no keys"},
};

static refit_config worker_with(const char *key, const char *server_key)
{
    char path[64];
    refit_config config = key == NULL ? quick_config() : keyed_worker(key);
    config.broadcast_heartbeat_timeout_ms = SOON_MS; /* then it gives up */
    if (key == NULL) return config;
    (void)snprintf(path, sizeof path, "keys/%s.public", server_key);
    key_fixture_path(&smith, path, config.security_server_key);
    return config;
}

WITH_KEYS(ends_that_do_not_accept_each_other_say_why)
{
    for (size_t i = 0; i < COUNT_OF(mismatches); i++) {
        const mismatch *it = &mismatches[i];
        const refit_config config = it->trainer_keys ? keyed_trainer() : trainer_config();
        refit_config own = worker_with(it->key, it->server_key);
        refit_error error = {0};
        if (!it->trainer_keys) own.broadcast_heartbeat_timeout_ms *= 6; /* not all reports say it */
        test_trainer trainer;
        trainer_open(&trainer, &config);
        refit_status status = end_of(endpoint_of(&trainer), &own, WAIT_MS, &error);
        if (status != it->status || strstr(error.text, it->words) == NULL)
            fail_msg("%s: status %d: %s", it->name, status, error.text);
        assert_int_equal(trainer_stats(&trainer).workers, 0);
        trainer_close(&trainer);
    }
}

/* The trainer may be away, and something else may answer: the worker goes on looking. */
WITH_KEYS(a_worker_that_expects_another_key_waits_and_says_so)
{
    const refit_config config = keyed_trainer(), own = worker_with("w0", "another");
    refit_error error = {0};
    test_trainer trainer;
    trainer_open(&trainer, &config);
    for (uint32_t ms = 500; strstr(error.text, "handshake failed") == NULL; ms *= 4) {
        assert_true(ms <= WAIT_MS);
        assert_int_equal(end_of(endpoint_of(&trainer), &own, ms, &error), REFIT_ERR_TIMEOUT);
    }
    assert_says(&error, "security.server_key");
    assert_int_equal(trainer_stats(&trainer).workers, 0);
    trainer_close(&trainer);
}

/* A worker that waited while the trainer had other keys need not be started again. */
WITH_KEYS(a_worker_finds_a_trainer_that_comes_back_with_the_right_keys)
{
    refit_config plain = trainer_config(), keyed = keyed_trainer();
    const refit_config own = keyed_worker("w0");
    test_trainer trainer;
    rollout_thread member;
    own_tcp(plain.broadcast_endpoint);
    trainer_open(&trainer, &plain);
    strcpy(keyed.broadcast_endpoint, endpoint_of(&trainer));
    rollouts_start(&member, endpoint_of(&trainer), &own, ROLLOUT_ACCEPT);
    assert_int_equal(refit_publisher_wait_workers(trainer.publisher, 1, 300, NULL),
                     REFIT_ERR_TIMEOUT);
    trainer_close(&trainer);
    trainer_open(&trainer, &keyed);
    trainer_wait_workers(&trainer, 1);
    rollouts_stop(&member);
    trainer_close(&trainer);
}

/* ---- Two publishers of one process */

WITH_KEYS(each_publisher_has_its_own_list)
{
    key_fixture right = key_fixture_open();
    const refit_config left_config = keyed_trainer();
    refit_config right_config = trainer_config(), second = quick_config();
    test_trainer one, two;
    refit_error error;
    rollout_thread member, other;
    key_fixture_admit(&right, "w1");
    key_fixture_equip_trainer(&right, &right_config);
    key_fixture_equip_worker(&right, "w1", &second);
    trainer_open(&one, &left_config);
    trainer_open(&two, &right_config);

    /* Allowed there, but not here. */
    refit_config own = keyed_worker("w0");
    own.broadcast_heartbeat_timeout_ms = SOON_MS;
    key_fixture_path(&right, "keys/trainer.public", own.security_server_key);
    assert_int_equal(end_of(endpoint_of(&two), &own, WAIT_MS, &error), REFIT_ERR_SECURITY);

    own = keyed_worker("w0");
    rollouts_start(&member, endpoint_of(&one), &own, ROLLOUT_ACCEPT);
    rollouts_start(&other, endpoint_of(&two), &second, ROLLOUT_ACCEPT);
    trainer_wait_workers(&one, 1);
    trainer_wait_workers(&two, 1);

    /* The ZAP handler outlives the first publisher, and starts again after the last. */
    rollouts_stop(&member);
    trainer_close(&one);
    rollouts_stop(&other);
    rollouts_start(&other, endpoint_of(&two), &second, ROLLOUT_ACCEPT);
    trainer_wait_workers(&two, 1);
    rollouts_stop(&other);
    trainer_close(&two);
    trainer_open(&one, &left_config);
    rollouts_start(&member, endpoint_of(&one), &own, ROLLOUT_ACCEPT);
    trainer_wait_workers(&one, 1);
    rollouts_stop(&member);
    trainer_close(&one);
    key_fixture_close(&right);
}

/* ---- Files */

static refit_status open_with(const refit_config *config, refit_error *error)
{
    refit_publisher *publisher = NULL;
    refit_status status = refit_publisher_open("tcp://127.0.0.1:0", config, &publisher, error);
    if (status == REFIT_OK) refit_publisher_close(publisher);
    return status;
}

static refit_status look_with(const refit_config *config, refit_error *error)
{
    refit_subscriber *subscriber = NULL;
    refit_status status = refit_subscriber_open("tcp://127.0.0.1:1", config, &subscriber, error);
    refit_subscriber_close(subscriber);
    return status;
}

WITH_KEYS(a_secret_that_others_may_read_is_refused_at_open)
{
    const refit_config config = keyed_trainer();
    refit_error error;
    assert_ok(open_with(&config, &error));
    assert_int_equal(chmod(config.security_key, 0644), 0);
    assert_int_equal(open_with(&config, &error), REFIT_ERR_SECURITY);
    assert_says(&error, "chmod 600");
}

WITH_KEYS(key_files_that_are_not_right_are_refused_at_open)
{
    static const struct {
        const char *file; /* empty: none */
        bool allow;       /* security.allow, not security.key */
        refit_status status;
        const char *words;
    } rows[] = {
        {"keys/none.secret", false, REFIT_ERR_IO, "none.secret"},
        {"keys/trainer.public", false, REFIT_ERR_SECURITY, "holds a public key"},
        {"none", true, REFIT_ERR_IO, "none"},
        {"keys/trainer.public", true, REFIT_ERR_IO, "trainer.public"},
        {"", false, REFIT_ERR_CONFIG, "security.key"},
        {"", true, REFIT_ERR_CONFIG, "security.allow"},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        refit_config bad = keyed_trainer();
        char *place = rows[i].allow ? bad.security_allow : bad.security_key;
        place[0] = '\0';
        if (rows[i].file[0] != '\0') key_fixture_path(&smith, rows[i].file, place);
        refit_error error = {0};
        refit_status status = open_with(&bad, &error);
        if (status != rows[i].status || strstr(error.text, rows[i].words) == NULL)
            fail_msg("\"%s\": status %d: %s", rows[i].file, status, error.text);
    }
}

WITH_KEYS(keys_of_the_other_end_are_refused)
{
    const refit_config trainer = keyed_trainer(), worker = keyed_worker("w0");
    refit_config bad = worker;
    assert_refused(open_with(&worker, error), REFIT_ERR_CONFIG, "security.allow");
    assert_refused(look_with(&trainer, error), REFIT_ERR_CONFIG, "security.server_key");
    key_fixture_path(&smith, "keys/w0.secret", bad.security_server_key);
    assert_refused(look_with(&bad, error), REFIT_ERR_SECURITY, "holds a secret key");
}

static refit_status open_plainly(const refit_config *config)
{
    return open_with(config, NULL);
}

static refit_status look_plainly(const refit_config *config)
{
    return look_with(config, NULL);
}

/* On either side, from the first allocation to the last. */
WITH_KEYS(every_allocation_that_fails_at_open_leaks_nothing)
{
    refit_status (*const opens[])(const refit_config *config) = {open_plainly, look_plainly};
    const refit_config configs[] = {keyed_trainer(), keyed_worker("w0")};
    for (size_t end = 0; end < 2; end++) {
        for (uint64_t nth = 1;; nth++) {
            failing_alloc_begin(nth);
            refit_status status = opens[end](&configs[end]);
            if (!failing_alloc_end()) break;
            if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
    }
    assert_ok(open_plainly(&configs[0]));
}

int main(void)
{
    return test_run("curve");
}
