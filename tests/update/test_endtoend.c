/* Publisher and subscribers of one process: every worker sees every version whole, on every path,
 * whoever comes late, refuses, leaves or returns. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "tests/support/crew.h"
#include "tests/support/quick_config.h"

/* Through inproc a message's memory changes hands inside libzmq, whose locks ThreadSanitizer does
 * not see. */
#if defined(__SANITIZE_THREAD__)
#define INPROC "tcp://127.0.0.1:0"
#else
#define INPROC "inproc://endtoend"
#endif

#define CREW_MOST    4u
#define TENSORS_MOST 32u
#define WAIT_MS      20000u

/* A trainer with its model, and its workers. */
typedef struct theatre {
    refit_config config;
    refit_publisher *publisher;
    char endpoint[128];
    refit_tensor tensors[TENSORS_MOST];
    char names[TENSORS_MOST][32];
    void *bytes[TENSORS_MOST];
    uint32_t count;
    crew_member crew[CREW_MOST];
    uint32_t crew_count;
} theatre;

static void add_tensor(theatre *play, refit_dtype dtype, uint64_t elements, uint32_t alias_of)
{
    uint32_t index = play->count++;
    refit_tensor *tensor = &play->tensors[index];
    snprintf(play->names[index], sizeof play->names[index], "tensor.%u", index);
    *tensor = (refit_tensor){
        .size = sizeof *tensor,
        .name = play->names[index],
        .dtype = dtype,
        .rank = 1,
        .shape = {elements},
        .bytes = (elements * refit_dtype_bits(dtype) + 7) / 8,
        .alias_of = alias_of,
    };
    if (alias_of != REFIT_NO_ALIAS) {
        play->bytes[index] = play->bytes[alias_of];
    } else {
        play->bytes[index] = calloc(tensor->bytes + 1, 1);
        assert_non_null(play->bytes[index]);
    }
}

/* A large tensor, a small one, a tied one and an empty one. */
static void add_usual_tensors(theatre *play)
{
    add_tensor(play, REFIT_BF16, 300001, REFIT_NO_ALIAS);
    add_tensor(play, REFIT_F32, 17, REFIT_NO_ALIAS);
    add_tensor(play, REFIT_BF16, 300001, 0);
    add_tensor(play, REFIT_F16, 0, REFIT_NO_ALIAS);
    add_tensor(play, REFIT_U8, 200000, REFIT_NO_ALIAS);
}

static void open_publisher(theatre *play, const char *endpoint)
{
    refit_error error;
    refit_status status;
    while ((status = refit_publisher_open(endpoint, &play->config, &play->publisher, &error)) ==
           REFIT_ERR_BUSY) {
        (void)poll(NULL, 0, 5); /* ZeroMQ gives an endpoint up in the background */
    }
    if (status != REFIT_OK) fail_msg("%s", error.text);
    snprintf(play->endpoint, sizeof play->endpoint, "%s",
             refit_publisher_endpoint(play->publisher));
    assert_int_equal(refit_publisher_declare(play->publisher, play->tensors, play->count, &error),
                     REFIT_OK);
}

static void begin_play(theatre *play, const char *endpoint, int shm, uint32_t slots)
{
    memset(play, 0, sizeof *play);
    play->config = quick_config();
    play->config.broadcast_shm = shm;
    play->config.broadcast_slots = slots;
    add_usual_tensors(play);
    open_publisher(play, endpoint);
}

static void end_play(theatre *play)
{
    for (uint32_t i = 0; i < play->crew_count; i++) {
        crew_stop(&play->crew[i]);
    }
    refit_publisher_close(play->publisher);
    for (uint32_t i = 0; i < play->count; i++) {
        if (play->tensors[i].alias_of == REFIT_NO_ALIAS) free(play->bytes[i]);
    }
}

static void wait_workers(theatre *play, uint32_t count)
{
    refit_error error;
    if (refit_publisher_wait_workers(play->publisher, count, WAIT_MS, &error) != REFIT_OK) {
        fail_msg("%s", error.text);
    }
}

static crew_member *hire(theatre *play, crew_habit habit)
{
    crew_member *member = &play->crew[play->crew_count++];
    crew_start(member, play->endpoint, &play->config, habit);
    wait_workers(play, play->crew_count);
    return member;
}

/* New bytes for all tensors but the first `same`, and their digest. */
static uint64_t change_model(theatre *play, uint64_t seed, uint32_t same)
{
    for (uint32_t i = same; i < play->count; i++) {
        unsigned char *at = play->bytes[i];
        if (play->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        for (uint64_t k = 0; k < play->tensors[i].bytes; k++) {
            at[k] = (unsigned char)(k * 31 + (k >> 9) + seed * 17 + i);
        }
    }
    return crew_digest(play->tensors, play->count, (const void *const *)play->bytes);
}

static void begin_and_write(theatre *play, uint64_t version)
{
    refit_error error;
    if (refit_publisher_begin(play->publisher, version, &error) != REFIT_OK) {
        fail_msg("%s", error.text);
    }
    for (uint32_t i = 0; i < play->count; i++) {
        if (play->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        assert_int_equal(refit_publisher_write(play->publisher, i, play->bytes[i],
                                               play->tensors[i].bytes, NULL, REFIT_STREAM_NONE,
                                               &error),
                         REFIT_OK);
    }
}

static void commit(theatre *play)
{
    refit_error error;
    if (refit_publisher_commit(play->publisher, &error) != REFIT_OK) fail_msg("%s", error.text);
}

static uint64_t publish(theatre *play, uint64_t version)
{
    uint64_t digest = change_model(play, version, 0);
    begin_and_write(play, version);
    commit(play);
    return digest;
}

static refit_stats publisher_stats(theatre *play)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_int_equal(refit_publisher_stats(play->publisher, &stats, NULL), REFIT_OK);
    return stats;
}

static refit_worker_info worker_named(theatre *play, const crew_member *member)
{
    refit_subscriber_info who = {.size = sizeof who};
    refit_worker_info info = {.size = sizeof info};
    assert_int_equal(refit_subscriber_describe(member->subscriber, &who, NULL), REFIT_OK);
    for (uint32_t i = 0;; i++) {
        if (refit_publisher_worker(play->publisher, i, &info, NULL) != REFIT_OK) {
            fail_msg("the publisher does not know worker %s", who.worker);
        }
        if (strcmp(info.name, who.worker) == 0) return info;
    }
}

/* ---- Paths */

static void every_path_brings_every_version_to_every_worker(void **state)
{
    (void)state;
    char ipc[64];
    snprintf(ipc, sizeof ipc, "ipc:///tmp/refit-test-%ld", (long)getpid());
    const char *endpoints[] = {"tcp://127.0.0.1:0", ipc, INPROC};
    const uint32_t crews[] = {1, CREW_MOST};
    for (uint32_t trial = 0; trial < 12; trial++) {
        theatre play;
        bool shm = trial % 2 == 0;
        begin_play(&play, endpoints[trial / 4], shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF,
                   1 + trial / 2 % 2);
        for (uint32_t i = 0; i < crews[trial / 2 % 2]; i++) {
            hire(&play, CREW_ACCEPT);
        }
        for (uint64_t version = 1; version <= 3; version++) {
            uint64_t digest = publish(&play, version);
            for (uint32_t i = 0; i < play.crew_count; i++) {
                assert_int_equal(crew_wait(&play.crew[i], version, 1), digest);
            }
        }
        refit_worker_info info = worker_named(&play, &play.crew[0]);
        assert_int_equal(info.path, shm ? REFIT_PATH_SHM : REFIT_PATH_SOCKET);
        assert_int_equal(info.version, 3);
        assert_int_equal(info.committed, 1);
        assert_int_equal(publisher_stats(&play).publish_sent_bytes_total == 0, shm);
        end_play(&play);
    }
}

static void every_element_type_passes_through(void **state)
{
    (void)state;
    for (int shm = 0; shm < 2; shm++) {
        theatre play;
        memset(&play, 0, sizeof play);
        play.config = quick_config();
        play.config.broadcast_shm = shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF;
#define ADD_DTYPE(name, number, bits) add_tensor(&play, REFIT_##name, 65537, REFIT_NO_ALIAS);
        REFIT_DTYPE_MAP(ADD_DTYPE)
#undef ADD_DTYPE
        open_publisher(&play, "tcp://127.0.0.1:0");
        crew_member *member = hire(&play, CREW_ACCEPT);
        uint64_t digest = publish(&play, 1);
        assert_int_equal(crew_wait(member, 1, 1), digest);
        end_play(&play);
    }
}

static void a_version_of_empty_tensors_passes_through(void **state)
{
    (void)state;
    for (int shm = 0; shm < 2; shm++) {
        theatre play;
        memset(&play, 0, sizeof play);
        play.config = quick_config();
        play.config.broadcast_shm = shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF;
        add_tensor(&play, REFIT_F32, 0, REFIT_NO_ALIAS);
        open_publisher(&play, "tcp://127.0.0.1:0");
        crew_member *member = hire(&play, CREW_ACCEPT);
        (void)publish(&play, 1);
        (void)crew_wait(member, 1, 1);
        end_play(&play);
    }
}

static void blocks_that_did_not_change_do_not_travel(void **state)
{
    (void)state;
    theatre play;
    begin_play(&play, "tcp://127.0.0.1:0", REFIT_SHM_OFF, 2);
    crew_member *member = hire(&play, CREW_ACCEPT);
    (void)publish(&play, 1);
    uint64_t before = publisher_stats(&play).publish_sent_bytes_total;
    uint64_t digest = change_model(&play, 9, 4);
    begin_and_write(&play, 2);
    commit(&play);
    assert_int_equal(crew_wait(member, 2, 1), digest);
    uint64_t sent = publisher_stats(&play).publish_sent_bytes_total - before;
    assert_true(sent >= play.tensors[4].bytes);
    assert_true(sent <= play.tensors[4].bytes + 4096);
    end_play(&play);
}

/* ---- Who comes and goes */

static void a_late_worker_is_brought_to_the_current_version(void **state)
{
    (void)state;
    for (int shm = 0; shm < 2; shm++) {
        theatre play;
        begin_play(&play, "tcp://127.0.0.1:0", shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF, 2);
        hire(&play, CREW_ACCEPT);
        (void)publish(&play, 1);
        uint64_t digest = publish(&play, 2);
        crew_member *late = hire(&play, CREW_ACCEPT);
        assert_int_equal(crew_wait(late, 2, 1), digest);
        assert_int_equal(crew_count(late, 1), 0);
        digest = publish(&play, 3);
        assert_int_equal(crew_wait(&play.crew[0], 3, 1), digest);
        assert_int_equal(crew_wait(late, 3, 1), digest);
        end_play(&play);
    }
}

static void a_worker_that_comes_while_a_version_is_written_gets_it(void **state)
{
    (void)state;
    theatre play;
    begin_play(&play, "tcp://127.0.0.1:0", REFIT_SHM_OFF, 2);
    hire(&play, CREW_ACCEPT);
    uint64_t digest = change_model(&play, 1, 0);
    begin_and_write(&play, 1);
    crew_member *late = hire(&play, CREW_ACCEPT);
    commit(&play);
    assert_int_equal(crew_wait(&play.crew[0], 1, 1), digest);
    assert_int_equal(crew_wait(late, 1, 1), digest);
    end_play(&play);
}

static void a_worker_that_leaves_in_the_middle_fails_the_version_for_all(void **state)
{
    (void)state;
    theatre play;
    refit_error error;
    begin_play(&play, "tcp://127.0.0.1:0", REFIT_SHM_OFF, 2);
    hire(&play, CREW_ACCEPT);
    uint64_t first = publish(&play, 1);
    hire(&play, CREW_ACCEPT);
    (void)change_model(&play, 2, 0);
    begin_and_write(&play, 2);
    crew_stop(&play.crew[1]);
    play.crew_count = 1;
    assert_int_equal(refit_publisher_commit(play.publisher, &error), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(play.publisher), 1);
    assert_int_equal(crew_wait(&play.crew[0], 1, 1), first);
    uint64_t digest = publish(&play, 3);
    assert_int_equal(crew_wait(&play.crew[0], 3, 1), digest);
    assert_int_equal(crew_count(&play.crew[0], 2), 0);
    end_play(&play);
}

static void a_worker_that_cannot_stage_fails_the_version_or_is_outvoted(void **state)
{
    (void)state;
    for (int quorum = 0; quorum < 2; quorum++) {
        theatre play;
        refit_error error;
        memset(&play, 0, sizeof play);
        play.config = quick_config();
        play.config.broadcast_shm = REFIT_SHM_OFF;
        play.config.broadcast_commit = quorum ? REFIT_COMMIT_QUORUM : REFIT_COMMIT_ALL;
        play.config.broadcast_quorum = quorum ? 2 : 0;
        add_usual_tensors(&play);
        open_publisher(&play, "tcp://127.0.0.1:0");
        hire(&play, CREW_ACCEPT);
        hire(&play, CREW_ACCEPT);
        play.config.limits_version_bytes = 300000; /* for the third alone */
        hire(&play, CREW_ACCEPT);
        uint64_t digest = change_model(&play, 1, 0);
        begin_and_write(&play, 1);
        refit_status status = refit_publisher_commit(play.publisher, &error);
        assert_int_equal(status, quorum ? REFIT_OK : REFIT_ERR_PEER);
        refit_worker_info info = worker_named(&play, &play.crew[2]);
        assert_int_equal(info.status, REFIT_ERR_LIMIT);
        if (quorum) {
            assert_int_equal(crew_wait(&play.crew[0], 1, 1), digest);
            assert_int_equal(crew_wait(&play.crew[1], 1, 1), digest);
        }
        for (uint32_t i = 0; i < 3; i++) {
            assert_int_equal(crew_count(&play.crew[i], 1), quorum && i < 2 ? 1 : 0);
        }
        end_play(&play);
    }
}

static void a_worker_that_refuses_is_named_and_comes_back(void **state)
{
    (void)state;
    const crew_habit habits[] = {CREW_REFUSE_KEPT, CREW_REFUSE_LOST, CREW_CLOSE};
    for (uint32_t trial = 0; trial < 6; trial++) {
        theatre play;
        refit_error error;
        begin_play(&play, "tcp://127.0.0.1:0", trial % 2 ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF, 2);
        hire(&play, CREW_ACCEPT);
        crew_member *stubborn = hire(&play, CREW_ACCEPT);
        (void)publish(&play, 1);
        crew_set_habit(stubborn, habits[trial / 2]);
        uint64_t digest = change_model(&play, 2, 0);
        begin_and_write(&play, 2);
        assert_int_equal(refit_publisher_commit(play.publisher, &error), REFIT_ERR_PEER);
        assert_int_equal(refit_publisher_version(play.publisher), 2);
        assert_int_equal(crew_wait(&play.crew[0], 2, 1), digest);
        refit_worker_info info = worker_named(&play, stubborn);
        assert_int_not_equal(info.status, REFIT_OK);
        assert_int_equal(info.committed, 0);
        assert_int_equal(info.version, habits[trial / 2] == CREW_REFUSE_KEPT ? 1 : 0);
        crew_set_habit(stubborn, CREW_ACCEPT);
        if (info.version == 0) assert_int_equal(crew_wait(stubborn, 2, 2), digest);
        wait_workers(&play, 2);
        digest = publish(&play, 3);
        assert_int_equal(crew_wait(stubborn, 3, 1), digest);
        end_play(&play);
    }
}

static void an_aborted_version_is_never_seen(void **state)
{
    (void)state;
    for (uint32_t trial = 0; trial < 4; trial++) {
        theatre play;
        begin_play(&play, "tcp://127.0.0.1:0", trial % 2 ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF,
                   1 + trial / 2);
        crew_member *member = hire(&play, CREW_ACCEPT);
        (void)publish(&play, 1);
        (void)change_model(&play, 2, 0);
        begin_and_write(&play, 2);
        assert_int_equal(refit_publisher_abort(play.publisher, NULL), REFIT_OK);
        uint64_t digest = change_model(&play, 3, 1);
        begin_and_write(&play, 3);
        commit(&play);
        assert_int_equal(crew_wait(member, 3, 1), digest);
        assert_int_equal(crew_count(member, 2), 0);
        end_play(&play);
    }
}

static void a_trainer_that_closes_and_opens_again_is_found(void **state)
{
    (void)state;
    for (int shm = 0; shm < 2; shm++) {
        theatre play;
        char endpoint[128];
        begin_play(&play, "tcp://127.0.0.1:0", shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF, 2);
        hire(&play, CREW_ACCEPT);
        hire(&play, CREW_ACCEPT);
        (void)publish(&play, 1);
        memcpy(endpoint, play.endpoint, sizeof endpoint);
        refit_publisher_close(play.publisher);
        open_publisher(&play, endpoint);
        wait_workers(&play, 2);
        uint64_t digest = change_model(&play, 77, 0);
        begin_and_write(&play, 1);
        commit(&play);
        assert_int_equal(crew_wait(&play.crew[0], 1, 2), digest);
        assert_int_equal(crew_wait(&play.crew[1], 1, 2), digest);
        end_play(&play);
    }
}

static void a_changed_manifest_brings_a_full_version(void **state)
{
    (void)state;
    for (int shm = 0; shm < 2; shm++) {
        theatre play;
        begin_play(&play, "tcp://127.0.0.1:0", shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF, 2);
        crew_member *member = hire(&play, CREW_ACCEPT);
        (void)publish(&play, 1);
        add_tensor(&play, REFIT_F32, 100000, REFIT_NO_ALIAS);
        assert_int_equal(refit_publisher_declare(play.publisher, play.tensors, play.count, NULL),
                         REFIT_OK);
        uint64_t digest = publish(&play, 2);
        assert_int_equal(crew_wait(member, 2, 1), digest);
        end_play(&play);
    }
}

/* ---- Updates that stay open */

static void an_open_update_stays_whole_while_the_next_version_is_written(void **state)
{
    (void)state;
    for (int shm = 0; shm < 2; shm++) {
        theatre play;
        begin_play(&play, "tcp://127.0.0.1:0", shm ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF, 2);
        crew_member *member = hire(&play, CREW_KEEP);
        (void)publish(&play, 1);
        (void)crew_wait(member, 1, 1);
        uint64_t digest = change_model(&play, 2, 0);
        begin_and_write(&play, 2);
        crew_let_go(member);
        commit(&play);
        assert_int_equal(crew_wait(member, 2, 1), digest);
        assert_false(member->torn);
        end_play(&play);
    }
}

static void with_one_slot_an_update_that_stays_open_costs_its_worker_the_place(void **state)
{
    (void)state;
    theatre play;
    memset(&play, 0, sizeof play);
    play.config = quick_config();
    play.config.broadcast_shm = REFIT_SHM_REQUIRE;
    play.config.broadcast_stage_timeout_ms = 300;
    add_usual_tensors(&play);
    open_publisher(&play, "tcp://127.0.0.1:0");
    crew_member *member = hire(&play, CREW_KEEP);
    (void)publish(&play, 1);
    (void)crew_wait(member, 1, 1);
    uint64_t digest = change_model(&play, 2, 0);
    begin_and_write(&play, 2); /* waits, then turns the reader out */
    commit(&play);
    crew_let_go(member);
    assert_int_equal(crew_wait(member, 2, 1), digest);
    assert_false(member->torn);
    end_play(&play);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_path_brings_every_version_to_every_worker),
        cmocka_unit_test(every_element_type_passes_through),
        cmocka_unit_test(a_version_of_empty_tensors_passes_through),
        cmocka_unit_test(blocks_that_did_not_change_do_not_travel),
        cmocka_unit_test(a_late_worker_is_brought_to_the_current_version),
        cmocka_unit_test(a_worker_that_comes_while_a_version_is_written_gets_it),
        cmocka_unit_test(a_worker_that_leaves_in_the_middle_fails_the_version_for_all),
        cmocka_unit_test(a_worker_that_cannot_stage_fails_the_version_or_is_outvoted),
        cmocka_unit_test(a_worker_that_refuses_is_named_and_comes_back),
        cmocka_unit_test(an_aborted_version_is_never_seen),
        cmocka_unit_test(a_trainer_that_closes_and_opens_again_is_found),
        cmocka_unit_test(a_changed_manifest_brings_a_full_version),
        cmocka_unit_test(an_open_update_stays_whole_while_the_next_version_is_written),
        cmocka_unit_test(with_one_slot_an_update_that_stays_open_costs_its_worker_the_place),
    };
    return cmocka_run_group_tests_name("endtoend", tests, NULL, NULL);
}
