/* Publisher and subscribers of one process: every worker sees every version whole, on every path,
 * also when workers join late, refuse, leave or return. */
#include "tests/support/file_tree.h"
#include "tests/support/trainer.h"
#include "training_run.h"

/* Through inproc a message's memory is passed on inside libzmq, whose locks ThreadSanitizer does
 * not see. */
#if defined(__SANITIZE_THREAD__)
#define INPROC "tcp://127.0.0.1:0"
#else
#define INPROC "inproc://endtoend"
#endif

static const struct {
    const char *name;
    int shm; /* broadcast.shm */
    refit_path path;
} PATHS[] = {
    {"by socket", REFIT_SHM_OFF, REFIT_PATH_SOCKET},
    {"in shared memory", REFIT_SHM_REQUIRE, REFIT_PATH_SHM},
};
#define TCP "tcp://127.0.0.1:0"

/* A large tensor, a small one, a tied one and an empty one. */
static void add_usual_tensors(training_run *run)
{
    run_add_tensor(run, REFIT_BF16, 300001, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F32, 17, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_BF16, 300001, 0);
    run_add_tensor(run, REFIT_F16, 0, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_U8, 200000, REFIT_NO_ALIAS);
}

/* With no tensors and no publisher yet. `path` is an index into PATHS. */
static void prepare(training_run *run, uint32_t path, uint32_t slots)
{
    run_begin(run, slots);
    run->config.broadcast_shm = PATHS[path].shm;
    print_message("%s, slots %u\n", PATHS[path].name, slots);
}

static void open_usual(training_run *run, uint32_t path, uint32_t slots)
{
    prepare(run, path, slots);
    add_usual_tensors(run);
    run_open(run, TCP);
}

/* New bytes for all tensors but the first `same`, and their digest. */
static uint64_t change_model(training_run *run, uint64_t seed, uint32_t same)
{
    for (uint32_t i = same; i < run->count; i++) {
        unsigned char *at = run->bytes[i];
        if (run->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        for (uint64_t k = 0; k < run->tensors[i].bytes; k++)
            at[k] = (unsigned char)(k * 31 + (k >> 9) + seed * 17 + i);
    }
    return run_digest(run);
}

static uint64_t publish(training_run *run, uint64_t version)
{
    uint64_t digest = change_model(run, version, 0);
    run_write(run, version);
    run_commit(run);
    return digest;
}

static refit_worker_info worker_named(training_run *run, const rollout_thread *member)
{
    refit_subscriber_info own = {.size = sizeof own};
    refit_worker_info info = {.size = sizeof info};
    assert_ok(refit_subscriber_describe(member->subscriber, &own, NULL));
    for (uint32_t i = 0;; i++) {
        if (refit_publisher_worker(run->publisher, i, &info, NULL) != REFIT_OK)
            fail_msg("the publisher does not know worker %s", own.worker);
        if (strcmp(info.name, own.worker) == 0) return info;
    }
}

/* ---- Paths */

/* With one worker in one slot, and with several in two. */
static void one_path_brings_every_version(const char *endpoint, uint32_t path, uint32_t slots)
{
    training_run run;
    prepare(&run, path, slots);
    add_usual_tensors(&run);
    run_open(&run, endpoint);
    for (uint32_t i = 0; i < (slots == 1 ? 1 : RUN_CREW); i++)
        run_add_worker(&run, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 3; version++) {
        uint64_t digest = publish(&run, version);
        run_expect(&run, version, digest);
    }
    refit_worker_info info = worker_named(&run, &run.rollouts[0]);
    assert_int_equal(info.path, PATHS[path].path);
    assert_int_equal(info.version, 3);
    assert_int_equal(info.committed, 1);
    bool sent_nothing = run_stats(&run).publish_sent_bytes_total == 0;
    assert_int_equal(sent_nothing, PATHS[path].path == REFIT_PATH_SHM);
    run_end(&run);
}

TEST(every_path_brings_every_version_to_every_worker)
{
    char ipc[80];
    file_tree folder = file_tree_open();
    snprintf(ipc, sizeof ipc, "ipc://%s/s", folder.root);
    const char *endpoints[] = {TCP, ipc, INPROC};
    for (uint32_t trial = 0; trial < 12; trial++) {
        uint32_t path = trial % 2, slots = 1 + trial / 2 % 2;
        one_path_brings_every_version(endpoints[trial / 4], path, slots);
    }
    file_tree_close(&folder);
}

TEST(every_element_type_passes_through)
{
    for (uint32_t path = 0; path < 2; path++) {
        training_run run;
        prepare(&run, path, 1);
#define ADD_DTYPE(name, number, bits) run_add_tensor(&run, REFIT_##name, 65537, REFIT_NO_ALIAS);
        REFIT_DTYPE_MAP(ADD_DTYPE)
#undef ADD_DTYPE
        run_open(&run, TCP);
        rollout_thread *member = run_add_worker(&run, ROLLOUT_ACCEPT);
        uint64_t digest = publish(&run, 1);
        assert_int_equal(rollouts_wait(member, 1, 1), digest);
        run_end(&run);
    }
}

TEST(a_version_of_empty_tensors_passes_through)
{
    for (uint32_t path = 0; path < 2; path++) {
        training_run run;
        prepare(&run, path, 1);
        run_add_tensor(&run, REFIT_F32, 0, REFIT_NO_ALIAS);
        run_open(&run, TCP);
        rollout_thread *member = run_add_worker(&run, ROLLOUT_ACCEPT);
        (void)publish(&run, 1);
        (void)rollouts_wait(member, 1, 1);
        run_end(&run);
    }
}

TEST(blocks_that_did_not_change_do_not_travel)
{
    training_run run;
    open_usual(&run, 0, 2);
    rollout_thread *member = run_add_worker(&run, ROLLOUT_ACCEPT);
    (void)publish(&run, 1);
    uint64_t before = run_stats(&run).publish_sent_bytes_total;
    uint64_t digest = change_model(&run, 9, 4);
    run_write(&run, 2);
    run_commit(&run);
    assert_int_equal(rollouts_wait(member, 2, 1), digest);
    uint64_t sent = run_stats(&run).publish_sent_bytes_total - before;
    assert_true(sent >= run.tensors[4].bytes);
    assert_true(sent <= run.tensors[4].bytes + 4096);
    run_end(&run);
}

/* ---- Workers that join, leave and refuse */

TEST(a_late_worker_is_brought_to_the_current_version)
{
    for (uint32_t path = 0; path < 2; path++) {
        training_run run;
        open_usual(&run, path, 2);
        run_add_worker(&run, ROLLOUT_ACCEPT);
        (void)publish(&run, 1);
        uint64_t digest = publish(&run, 2);
        rollout_thread *late = run_add_worker(&run, ROLLOUT_ACCEPT);
        assert_int_equal(rollouts_wait(late, 2, 1), digest);
        assert_int_equal(rollouts_count(late, 1), 0);
        digest = publish(&run, 3);
        assert_int_equal(rollouts_wait(&run.rollouts[0], 3, 1), digest);
        assert_int_equal(rollouts_wait(late, 3, 1), digest);
        run_end(&run);
    }
}

TEST(a_worker_that_comes_while_a_version_is_written_gets_it)
{
    training_run run;
    open_usual(&run, 0, 2);
    run_add_worker(&run, ROLLOUT_ACCEPT);
    uint64_t digest = change_model(&run, 1, 0);
    run_write(&run, 1);
    rollout_thread *late = run_add_worker(&run, ROLLOUT_ACCEPT);
    run_commit(&run);
    assert_int_equal(rollouts_wait(&run.rollouts[0], 1, 1), digest);
    assert_int_equal(rollouts_wait(late, 1, 1), digest);
    run_end(&run);
}

TEST(a_worker_that_leaves_in_the_middle_fails_the_version_for_all)
{
    training_run run;
    refit_error error;
    open_usual(&run, 0, 2);
    run_add_worker(&run, ROLLOUT_ACCEPT);
    uint64_t first = publish(&run, 1);
    run_add_worker(&run, ROLLOUT_ACCEPT);
    (void)change_model(&run, 2, 0);
    run_write(&run, 2);
    rollouts_stop(&run.rollouts[1]);
    run.rollouts_count = 1;
    assert_int_equal(refit_publisher_commit(run.publisher, &error), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(run.publisher), 1);
    assert_int_equal(rollouts_wait(&run.rollouts[0], 1, 1), first);
    uint64_t digest = publish(&run, 3);
    assert_int_equal(rollouts_wait(&run.rollouts[0], 3, 1), digest);
    assert_int_equal(rollouts_count(&run.rollouts[0], 2), 0);
    run_end(&run);
}

TEST(a_worker_that_cannot_stage_fails_the_version_or_is_outvoted)
{
    for (int quorum = 0; quorum < 2; quorum++) {
        training_run run;
        refit_error error;
        prepare(&run, 0, 1);
        run.config.broadcast_commit = quorum ? REFIT_COMMIT_QUORUM : REFIT_COMMIT_ALL;
        run.config.broadcast_quorum = quorum ? 2 : 0;
        add_usual_tensors(&run);
        run_open(&run, TCP);
        run_add_worker(&run, ROLLOUT_ACCEPT);
        run_add_worker(&run, ROLLOUT_ACCEPT);
        run.config.limits_version_bytes = 300000; /* for the third alone */
        run_add_worker(&run, ROLLOUT_ACCEPT);
        uint64_t digest = change_model(&run, 1, 0);
        run_write(&run, 1);
        refit_status status = refit_publisher_commit(run.publisher, &error);
        assert_int_equal(status, quorum ? REFIT_OK : REFIT_ERR_PEER);
        refit_worker_info info = worker_named(&run, &run.rollouts[2]);
        assert_int_equal(info.status, REFIT_ERR_LIMIT);
        if (quorum) {
            assert_int_equal(rollouts_wait(&run.rollouts[0], 1, 1), digest);
            assert_int_equal(rollouts_wait(&run.rollouts[1], 1, 1), digest);
        }
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(rollouts_count(&run.rollouts[i], 1), quorum && i < 2 ? 1 : 0);
        run_end(&run);
    }
}

static const struct refusal {
    const char *name;
    rollout_action action;
    uint64_t left; /* the version that the worker has afterwards */
} REFUSALS[] = {
    {"refuses and keeps the version before", ROLLOUT_REFUSE_KEPT, 1},
    {"refuses and has lost the version before", ROLLOUT_REFUSE_LOST, 0},
    {"closes the update", ROLLOUT_CLOSE, 0},
};

static void one_refusal(const struct refusal *refusal, uint32_t path)
{
    training_run run;
    refit_error error;
    open_usual(&run, path, 2);
    print_message("a worker that %s\n", refusal->name);
    run_add_worker(&run, ROLLOUT_ACCEPT);
    rollout_thread *stubborn = run_add_worker(&run, ROLLOUT_ACCEPT);
    (void)publish(&run, 1);
    rollout_set_action(stubborn, refusal->action);
    uint64_t digest = change_model(&run, 2, 0);
    run_write(&run, 2);
    assert_int_equal(refit_publisher_commit(run.publisher, &error), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(run.publisher), 2);
    assert_int_equal(rollouts_wait(&run.rollouts[0], 2, 1), digest);
    refit_worker_info info = worker_named(&run, stubborn);
    assert_int_not_equal(info.status, REFIT_OK);
    assert_int_equal(info.committed, 0);
    assert_int_equal(info.version, refusal->left);
    rollout_set_action(stubborn, ROLLOUT_ACCEPT);
    if (info.version == 0) assert_int_equal(rollouts_wait(stubborn, 2, 2), digest);
    run_wait_workers(&run, 2);
    digest = publish(&run, 3);
    assert_int_equal(rollouts_wait(stubborn, 3, 1), digest);
    run_end(&run);
}

TEST(a_worker_that_refuses_is_named_and_comes_back)
{
    for (size_t i = 0; i < COUNT_OF(REFUSALS); i++)
        for (uint32_t path = 0; path < 2; path++)
            one_refusal(&REFUSALS[i], path);
}

TEST(a_trainer_that_closes_and_opens_again_is_found)
{
    for (uint32_t path = 0; path < 2; path++) {
        training_run run;
        char endpoint[128];
        open_usual(&run, path, 2);
        run_add_worker(&run, ROLLOUT_ACCEPT);
        run_add_worker(&run, ROLLOUT_ACCEPT);
        (void)publish(&run, 1);
        memcpy(endpoint, run.endpoint, sizeof endpoint);
        refit_publisher_close(run.publisher);
        run_open(&run, endpoint);
        run_wait_workers(&run, 2);
        uint64_t digest = change_model(&run, 77, 0);
        run_write(&run, 1);
        run_commit(&run);
        assert_int_equal(rollouts_wait(&run.rollouts[0], 1, 2), digest);
        assert_int_equal(rollouts_wait(&run.rollouts[1], 1, 2), digest);
        run_end(&run);
    }
}

TEST(a_changed_manifest_brings_a_full_version)
{
    for (uint32_t path = 0; path < 2; path++) {
        training_run run;
        open_usual(&run, path, 2);
        rollout_thread *member = run_add_worker(&run, ROLLOUT_ACCEPT);
        (void)publish(&run, 1);
        run_add_tensor(&run, REFIT_F32, 100000, REFIT_NO_ALIAS);
        assert_ok(refit_publisher_declare(run.publisher, run.tensors, run.count, NULL));
        uint64_t digest = publish(&run, 2);
        assert_int_equal(rollouts_wait(member, 2, 1), digest);
        run_end(&run);
    }
}

/* ---- Updates that stay open */

TEST(an_open_update_stays_whole_while_the_next_version_is_written)
{
    for (uint32_t path = 0; path < 2; path++) {
        training_run run;
        open_usual(&run, path, 2);
        rollout_thread *member = run_add_worker(&run, ROLLOUT_KEEP);
        (void)publish(&run, 1);
        (void)rollouts_wait(member, 1, 1);
        uint64_t digest = change_model(&run, 2, 0);
        run_write(&run, 2);
        rollouts_let_go(member);
        run_commit(&run);
        assert_int_equal(rollouts_wait(member, 2, 1), digest);
        assert_false(member->torn);
        run_end(&run);
    }
}

TEST(update_left_open_with_one_slot_costs_worker_its_place)
{
    training_run run;
    prepare(&run, 1, 1);
    add_usual_tensors(&run);
    run_open(&run, TCP);
    rollout_thread *member = run_add_worker(&run, ROLLOUT_KEEP);
    (void)publish(&run, 1);
    (void)rollouts_wait(member, 1, 1);
    uint64_t digest = change_model(&run, 2, 0);
    publisher_set_stage_timeout(run.publisher, 300);
    run_write(&run, 2); /* waits, then evicts the reader */
    publisher_set_stage_timeout(run.publisher, RUN_WAIT_MS);
    run_commit(&run);
    rollouts_let_go(member);
    assert_int_equal(rollouts_wait(member, 2, 1), digest);
    assert_false(member->torn);
    run_end(&run);
}

int main(void)
{
    return test_run("endtoend");
}
