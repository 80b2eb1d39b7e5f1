/* Workers that fail, lie, fall silent or vanish in each phase: which worker is blamed, what is
 * committed, and that others do not notice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/file_size_limit.h"
#include "tests/support/trainer.h"

/* One trainer, a worker that does as it should, and one that does not. */
typedef struct fault_scene {
    test_trainer trainer;
    raw_worker good;
    raw_worker bad;
} fault_scene;

static void scene_open(fault_scene *scene, const refit_config *config, bool shm)
{
    trainer_open(&scene->trainer, config);
    const char *endpoint = refit_publisher_endpoint(scene->trainer.publisher);
    raw_worker_open(&scene->good, endpoint, "good", shm);
    raw_worker_open(&scene->bad, endpoint, "bad", shm);
    raw_worker_join(&scene->good);
    raw_worker_join(&scene->bad);
    trainer_wait_workers(&scene->trainer, 2);
}

static void scene_close(fault_scene *scene)
{
    raw_worker_close(&scene->good);
    raw_worker_close(&scene->bad);
    trainer_close(&scene->trainer);
}

/* The first version, which the good one has staged. */
static void scene_offer(fault_scene *scene, const refit_config *config, bool shm)
{
    scene_open(scene, config, shm);
    trainer_offer(&scene->trainer, 1);
    raw_worker_stage(&scene->good);
}

static void expect_abort(raw_worker *worker, uint64_t version)
{
    const rft_message *abort = raw_worker_expect(worker, RFT_ABORT);
    assert_int_equal(abort->as.failed.version, version);
}

static void expect_next_version(fault_scene *scene)
{
    trainer_offer(&scene->trainer, 2);
    raw_worker_stage(&scene->good);
    trainer_check_bytes(&scene->good, 2);
    raw_worker_apply(&scene->good);
    assert_int_equal(trainer_join(&scene->trainer), REFIT_OK);
}

static void leave(fault_scene *scene)
{
    raw_worker_say_bye(&scene->bad);
    while (trainer_worker(&scene->trainer, "bad").subscribed) {
        raw_worker_beat(&scene->good, 0);
        (void)raw_worker_expect(&scene->good, RFT_BEAT);
    }
}

/* ---- While staging: the version is aborted */

static void fails(raw_worker *bad)
{
    raw_worker_offer(bad);
    raw_worker_say_failed(bad, REFIT_ERR_HOST_MEMORY, true);
}

static void lies_about_its_digest(raw_worker *bad)
{
    raw_worker_offer(bad);
    raw_worker_fetch(bad);
    bad->digest.bytes[0] ^= 1;
    raw_worker_say_staged(bad);
}

static void leaves(raw_worker *bad)
{
    raw_worker_offer(bad);
    raw_worker_say_bye(bad);
}

static void falls_silent(raw_worker *bad)
{
    raw_worker_offer(bad);
    raw_worker_pull(bad, 2);
}

static void is_late(raw_worker *bad)
{
    (void)bad;
}

static void reason_is_reported(fault_scene *scene)
{
    assert_string_equal(trainer_worker(&scene->trainer, "bad").reason, "the test wants it so");
    leave(scene);
}

static void is_told_and_leaves(fault_scene *scene)
{
    expect_abort(&scene->bad, 1);
    leave(scene);
}

static void was_evicted(fault_scene *scene)
{
    assert_int_equal(trainer_stats(&scene->trainer).workers_evicted, 1);
}

/* It comes back, and counts from then on. */
static void has_to_join_again(fault_scene *scene)
{
    raw_worker_offer(&scene->bad);
    (void)raw_worker_expect(&scene->bad, RFT_BYE);
    raw_worker_beat(&scene->bad, 0);
    const rft_message *refuse = raw_worker_expect(&scene->bad, RFT_REFUSE);
    assert_int_equal(refuse->as.refuse.code, REFIT_ERR_STALE);
    assert_false(refuse->as.refuse.final);
    raw_worker_join(&scene->bad);
    trainer_wait_workers(&scene->trainer, 2);
    leave(scene);
}

static const struct staging_fault {
    const char *name;
    void (*happens)(raw_worker *bad);
    bool shm;
    uint32_t silence_ms;                 /* the heartbeat timeout; 0: as in trainer_config */
    uint32_t staging_ms;                 /* the staging timeout; 0: as in trainer_config */
    refit_status commit;                 /* what commit returns */
    refit_status blamed;                 /* the worker's status in the report */
    bool subscribed;                     /* afterwards */
    void (*follows)(fault_scene *scene); /* NULL: no more to check */
} STAGING_FAULTS[] = {
    {"fails", fails, .commit = REFIT_ERR_PEER, .blamed = REFIT_ERR_HOST_MEMORY, .subscribed = true,
     .follows = reason_is_reported},
    {"lies about its digest", lies_about_its_digest, .shm = true, .commit = REFIT_ERR_PEER,
     .blamed = REFIT_ERR_CORRUPT, .subscribed = true, .follows = is_told_and_leaves},
    {"leaves", leaves, .commit = REFIT_ERR_PEER, .blamed = REFIT_ERR_CLOSED},
    {"falls silent", falls_silent, .silence_ms = 2500, .commit = REFIT_ERR_PEER,
     .blamed = REFIT_ERR_PEER, .follows = was_evicted},
    {"is late", is_late, .staging_ms = 2500, .commit = REFIT_ERR_TIMEOUT,
     .blamed = REFIT_ERR_TIMEOUT, .follows = has_to_join_again},
};

static void check_blame(const fault_scene *scene, const struct staging_fault *fault,
                        const refit_worker_info *bad)
{
    if (bad->status != fault->blamed || bad->subscribed != fault->subscribed) {
        fail_msg("a worker that %s: %s, %s", fault->name, refit_status_name(bad->status),
                 bad->subscribed ? "subscribed" : "gone");
    }
    if (strstr(scene->trainer.error.text, "bad") == NULL) {
        fail_msg("a worker that %s is not named: %s", fault->name, scene->trainer.error.text);
    }
}

/* The good worker is told, and the next version is committed with it alone. It beats while the
 * other one's silence is waited for. */
static void worker_that_cannot_be_counted_on_aborts_the_version(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof STAGING_FAULTS / sizeof STAGING_FAULTS[0]; i++) {
        const struct staging_fault *fault = &STAGING_FAULTS[i];
        fault_scene scene;
        refit_config config = trainer_config();
        if (fault->silence_ms != 0) config.broadcast_heartbeat_timeout_ms = fault->silence_ms;
        if (fault->staging_ms != 0) config.broadcast_stage_timeout_ms = fault->staging_ms;
        scene_offer(&scene, &config, fault->shm);
        fault->happens(&scene.bad);
        expect_abort(&scene.good, 1);
        refit_status status = trainer_join(&scene.trainer);
        if (status != fault->commit) {
            fail_msg("with a worker that %s commit returns %s", fault->name,
                     refit_status_name(status));
        }
        refit_worker_info bad = trainer_worker(&scene.trainer, "bad");
        check_blame(&scene, fault, &bad);
        assert_int_equal(refit_publisher_version(scene.trainer.publisher), 0);
        assert_int_equal(trainer_stats(&scene.trainer).publish_aborts, 1);
        assert_int_equal(trainer_worker(&scene.trainer, "good").status, REFIT_OK);
        if (fault->follows != NULL) fault->follows(&scene);
        expect_next_version(&scene);
        scene_close(&scene);
    }
}

/* ---- After the decision: the version stays */

static void worker_that_fails_to_apply_does_not_undo_the_version(void **state)
{
    (void)state;
    fault_scene scene;
    refit_config config = trainer_config();
    scene_offer(&scene, &config, false);
    raw_worker_stage(&scene.bad);
    raw_worker_apply(&scene.good);
    (void)raw_worker_expect(&scene.bad, RFT_COMMIT);
    raw_worker_say_failed(&scene.bad, REFIT_ERR_CALLBACK, false);
    assert_int_equal(trainer_join(&scene.trainer), REFIT_ERR_PEER);
    assert_non_null(strstr(scene.trainer.error.text, "bad"));
    assert_int_equal(refit_publisher_version(scene.trainer.publisher), 1);
    refit_worker_info info = trainer_worker(&scene.trainer, "bad");
    assert_true(info.subscribed && !info.committed);
    assert_int_equal(info.version, 0);
    assert_int_equal(trainer_stats(&scene.trainer).workers_committed_last, 1);

    trainer_offer(&scene.trainer, 2);
    raw_worker_stage(&scene.good);
    raw_worker_stage(&scene.bad);
    assert_int_equal(scene.bad.offer.as.offer.base, 0);
    raw_worker_apply(&scene.good);
    raw_worker_apply(&scene.bad);
    assert_int_equal(trainer_join(&scene.trainer), REFIT_OK);
    scene_close(&scene);
}

static void worker_that_never_applies_is_evicted(void **state)
{
    (void)state;
    fault_scene scene;
    refit_config config = trainer_config();
    config.broadcast_commit_timeout_ms = 2500;
    scene_offer(&scene, &config, true);
    raw_worker_stage(&scene.bad);
    raw_worker_apply(&scene.good);
    assert_int_equal(trainer_join(&scene.trainer), REFIT_ERR_PEER);
    assert_int_equal(refit_publisher_version(scene.trainer.publisher), 1);
    assert_int_equal(trainer_worker(&scene.trainer, "bad").status, REFIT_ERR_TIMEOUT);
    assert_false(trainer_worker(&scene.trainer, "bad").subscribed);
    scene_close(&scene);
}

/* With one slot begin evicts a worker that does not let go; with two the worker goes by itself.
 * What it has mapped never changes, however long it stays. */
static void bytes_that_a_lost_worker_maps_never_change(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        fault_scene scene;
        refit_config config = trainer_config();
        config.broadcast_slots = slots;
        config.broadcast_stage_timeout_ms = 2500;
        scene_offer(&scene, &config, true);
        raw_worker_stage(&scene.bad);
        raw_worker_apply(&scene.good);
        raw_worker_apply(&scene.bad);
        assert_int_equal(trainer_join(&scene.trainer), REFIT_OK);
        raw_worker_say_released(&scene.good, 1);
        if (slots == 2) leave(&scene);
        for (uint64_t version = 2; version <= 4; version++) {
            trainer_start(&scene.trainer, TRAINER_PUBLISH, version);
            raw_worker_stage(&scene.good);
            raw_worker_apply(&scene.good);
            assert_int_equal(trainer_join(&scene.trainer), REFIT_OK);
            raw_worker_say_released(&scene.good, version);
            trainer_check_bytes(&scene.bad, 1);
        }
        scene_close(&scene);
    }
}

/* The slot that the lost worker maps is to be replaced while no shared memory can be had. */
static void lost_reader_and_no_shared_memory(fault_scene *scene, uint32_t slots, int32_t shm)
{
    refit_config config = trainer_config();
    config.broadcast_slots = slots;
    config.broadcast_shm = shm;
    scene_offer(scene, &config, true);
    raw_worker_stage(&scene->bad);
    raw_worker_apply(&scene->good);
    raw_worker_apply(&scene->bad);
    assert_int_equal(trainer_join(&scene->trainer), REFIT_OK);
    raw_worker_say_released(&scene->good, 1);
    leave(scene);
}

static void publish_to_good(fault_scene *scene, uint64_t version)
{
    trainer_start(&scene->trainer, TRAINER_PUBLISH, version);
    raw_worker_stage(&scene->good);
    trainer_check_bytes(&scene->good, version);
    raw_worker_apply(&scene->good);
    assert_int_equal(trainer_join(&scene->trainer), REFIT_OK);
    raw_worker_say_released(&scene->good, version);
}

static void sockets_take_over_where_shared_memory_has_run_out(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        fault_scene scene;
        lost_reader_and_no_shared_memory(&scene, slots, REFIT_SHM_AUTO);
        if (slots == 2) publish_to_good(&scene, 2);
        assert_int_equal(trainer_worker(&scene.trainer, "good").path, REFIT_PATH_SHM);
        struct rlimit before = file_size_limit_to(0);
        for (uint64_t version = 3; version <= 5; version++) {
            publish_to_good(&scene, version);
            assert_int_equal(trainer_worker(&scene.trainer, "good").path, REFIT_PATH_SOCKET);
            trainer_check_bytes(&scene.bad, 1);
        }
        file_size_limit_back(&before);
        scene_close(&scene);
    }
}

static void required_shared_memory_that_is_missing_stops_only_this_begin(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        fault_scene scene;
        lost_reader_and_no_shared_memory(&scene, slots, REFIT_SHM_REQUIRE);
        if (slots == 2) publish_to_good(&scene, 2);
        struct rlimit before = file_size_limit_to(0);
        for (int i = 0; i < 2; i++) {
            refit_status status = refit_publisher_begin(scene.trainer.publisher, 3, NULL);
            assert_int_equal(status, REFIT_ERR_SYSTEM);
        }
        file_size_limit_back(&before);
        publish_to_good(&scene, 3);
        assert_int_equal(trainer_worker(&scene.trainer, "good").path, REFIT_PATH_SHM);
        scene_close(&scene);
    }
}

static void what_is_said_twice_is_answered_twice(void **state)
{
    (void)state;
    fault_scene scene;
    refit_config config = trainer_config();
    scene_open(&scene, &config, false);
    raw_worker *worker = &scene.good;
    trainer_offer(&scene.trainer, 1);
    raw_worker_stage(worker);
    raw_worker_say_staged(worker);
    raw_worker_stage(&scene.bad);
    (void)raw_worker_expect(worker, RFT_COMMIT);
    raw_worker_beat(worker, 1);
    (void)raw_worker_expect(worker, RFT_COMMIT);
    raw_worker_say_staged(worker);
    raw_worker_apply(worker);
    raw_worker_say_committed(worker);
    raw_worker_apply(&scene.bad);
    assert_int_equal(trainer_join(&scene.trainer), REFIT_OK);
    raw_worker_say_committed(worker);
    raw_worker_beat(worker, 9);
    expect_abort(worker, 9);
    assert_int_equal(trainer_worker(&scene.trainer, "good").version, 1);
    scene_close(&scene);
}

/* COMMITTED was lost: the next beat says it. */
static void beat_makes_up_for_a_lost_answer(void **state)
{
    (void)state;
    fault_scene scene;
    refit_config config = trainer_config();
    scene_offer(&scene, &config, false);
    raw_worker_stage(&scene.bad);
    raw_worker_apply(&scene.good);
    (void)raw_worker_expect(&scene.bad, RFT_COMMIT);
    scene.bad.held = (rft_held){scene.bad.epoch, 1, scene.bad.digest};
    raw_worker_beat(&scene.bad, 0);
    assert_int_equal(trainer_join(&scene.trainer), REFIT_OK);
    scene_close(&scene);
}

static void garbage_costs_only_its_sender(void **state)
{
    (void)state;
    static const char *const garbage[] = {"", "x", "\x81\xa1k\xa5hello", "\x81\xa1k\xa7welcome",
                                          "\xdd\xff\xff\xff\xff"};
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
        fault_scene scene;
        refit_config config = trainer_config();
        scene_open(&scene, &config, false);
        trainer_begin(&scene.trainer, 1);
        raw_worker_offer(&scene.bad);
        raw_worker_send_bytes(&scene.bad, garbage[i], strlen(garbage[i]));
        (void)raw_worker_expect(&scene.bad, RFT_BYE);
        raw_worker_send_bytes(&scene.bad, garbage[i], strlen(garbage[i]));
        (void)raw_worker_expect(&scene.bad, RFT_REFUSE);
        assert_int_equal(trainer_stats(&scene.trainer).messages_refused, 2);
        assert_true(trainer_worker(&scene.trainer, "good").subscribed);
        assert_int_equal(refit_publisher_abort(scene.trainer.publisher, NULL), REFIT_OK);
        raw_worker_offer(&scene.good);
        expect_abort(&scene.good, 1);
        expect_next_version(&scene);
        scene_close(&scene);
    }
}

static void worker_that_asks_for_the_impossible_is_evicted(void **state)
{
    (void)state;
    fault_scene scene;
    refit_config config = trainer_config();
    scene_open(&scene, &config, false);
    trainer_begin(&scene.trainer, 1);
    raw_worker_offer(&scene.bad);
    unsigned char beyond[4] = {0xff, 0xff, 0xff, 0x7f};
    rft_message message = {.kind = RFT_RESEND};
    message.as.resend.version = 1;
    message.as.resend.sequences = (rft_view){beyond, sizeof beyond};
    raw_worker_send(&scene.bad, &message);
    (void)raw_worker_expect(&scene.bad, RFT_BYE);
    raw_worker_join(&scene.bad);
    raw_worker_offer(&scene.bad);
    raw_worker_say_staged(&scene.bad); /* before it is written */
    (void)raw_worker_expect(&scene.bad, RFT_BYE);
    scene_close(&scene);
}

/* Through inproc, which keeps the messages that a worker has not read when the trainer closes: over
 * TCP ZeroMQ drops them once the connection has ended (channel.c). */
static void close_in_every_phase_tells_the_workers(void **state)
{
    (void)state;
    for (int phase = 0; phase < 3; phase++) {
        fault_scene scene;
        refit_config config = trainer_config();
        config.broadcast_stage_timeout_ms = 2500;
        (void)snprintf(config.broadcast_endpoint, sizeof config.broadcast_endpoint,
                       "inproc://close-in-phase-%d", phase);
        scene_open(&scene, &config, false);
        if (phase > 0) trainer_begin(&scene.trainer, 1);
        if (phase > 0) raw_worker_offer(&scene.good);
        if (phase > 0) raw_worker_offer(&scene.bad);
        if (phase > 1) trainer_write(&scene.trainer);
        refit_publisher_close(scene.trainer.publisher);
        scene.trainer.publisher = NULL;
        if (phase > 0) expect_abort(&scene.good, 1);
        if (phase > 0) expect_abort(&scene.bad, 1);
        (void)raw_worker_expect(&scene.good, RFT_BYE);
        (void)raw_worker_expect(&scene.bad, RFT_BYE);
        scene_close(&scene);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worker_that_cannot_be_counted_on_aborts_the_version),
        cmocka_unit_test(worker_that_fails_to_apply_does_not_undo_the_version),
        cmocka_unit_test(worker_that_never_applies_is_evicted),
        cmocka_unit_test(bytes_that_a_lost_worker_maps_never_change),
        cmocka_unit_test(sockets_take_over_where_shared_memory_has_run_out),
        cmocka_unit_test(required_shared_memory_that_is_missing_stops_only_this_begin),
        cmocka_unit_test(what_is_said_twice_is_answered_twice),
        cmocka_unit_test(beat_makes_up_for_a_lost_answer),
        cmocka_unit_test(garbage_costs_only_its_sender),
        cmocka_unit_test(worker_that_asks_for_the_impossible_is_evicted),
        cmocka_unit_test(close_in_every_phase_tells_the_workers),
    };
    return cmocka_run_group_tests_name("publish_faults", tests, NULL, NULL);
}
