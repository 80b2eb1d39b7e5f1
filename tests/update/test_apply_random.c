/* Random versions, decisions and failing devices: the engine has the trainer's bytes or its old
 * ones, never a mix, from the first version that it accepted on. */
#include <stdlib.h>

#include "base/clock.h"
#include "tests/support/bound_engine.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test_device.h"
#include "training_run.h"

#ifndef VERSIONS /* fewer, where all takes many times as long */
#define VERSIONS 14u
#endif

/* A trainer with its model, and a worker on a thread of its own. */
typedef struct theatre {
    training_run run;
    refit_device *device; /* of the engine; NULL: it is on the host */
    engine engine;
    refit_subscriber *subscriber;
    rft_thread thread;
    uint64_t worker_seed;
    bool held; /* the worker's: it has accepted a version */
    rft_mutex lock;
    rft_cond changed;
    bool obedient;     /* guarded by lock, like all below: it accepts every version */
    uint64_t accepted; /* the last version */
    uint32_t failed;   /* applies */
    const char *wrong; /* a violation that the worker found; NULL: none */
} theatre;

/* ---- The worker: nothing is asserted on its thread, what is wrong is noted */

static void check(theatre *play, int right, const char *what)
{
    rft_lock(&play->lock);
    if (!right && play->wrong == NULL) play->wrong = what;
    rft_unlock(&play->lock);
}

static void order_a_fault(theatre *play)
{
    uint32_t nth = 1 + (uint32_t)seeded_below(&play->worker_seed, 14);
    if (play->device == NULL || seeded_below(&play->worker_seed, 2) == 0) return;
    faulty_kind kind = seeded_below(&play->worker_seed, 2) == 0 ? FAULTY_REFUSES : FAULTY_HALVES;
    faulty_device_order(play->device, &(faulty_order){.slot = FAULTY_COPY_BATCH,
                                                      .nth = nth,
                                                      .status = REFIT_ERR_COPY,
                                                      .kind = kind});
}

static bool apply(theatre *play, refit_update *update)
{
    refit_status status = refit_update_apply(update, NULL, NULL);
    if (play->device != NULL) faulty_device_reset(play->device);
    if (status == REFIT_OK) {
        check(play, engine_is_like(&play->engine, update), "an applied version is not there");
        return true;
    }
    if (play->held)
        check(play, engine_is_as_saved(&play->engine), "a version that failed is there in part");
    rft_lock(&play->lock);
    play->failed++;
    rft_unlock(&play->lock);
    return false;
}

static void accept(theatre *play, refit_update *update)
{
    check(play, refit_update_accept(update, NULL) == REFIT_OK, "it could not be accepted");
    engine_save(&play->engine);
    play->held = true;
    rft_lock(&play->lock);
    play->accepted = refit_update_version(update);
    rft_cond_wake_all(&play->changed);
    rft_unlock(&play->lock);
}

static void decide(theatre *play, refit_update *update, bool obedient)
{
    uint64_t chance = seeded_below(&play->worker_seed, 8);
    if (!obedient) order_a_fault(play);
    bool applied = apply(play, update);
    if (!applied && (obedient || chance < 4)) applied = apply(play, update);
    if (applied && (obedient || chance < 5)) {
        accept(play, update);
        return;
    }
    if (applied && chance == 5) (void)apply(play, update);
    if (chance < 7)
        check(play, refit_update_refuse(update, NULL, chance % 2 == 0, NULL) == REFIT_OK,
              "it could not be refused");
}

static void *work(void *user)
{
    theatre *play = user;
    for (;;) {
        refit_update *update = NULL;
        refit_status status = refit_subscriber_next(play->subscriber, RUN_WAIT_MS, &update, NULL);
        if (status == REFIT_ERR_TIMEOUT) continue;
        if (status != REFIT_OK) return NULL;
        rft_lock(&play->lock);
        bool obedient = play->obedient;
        rft_unlock(&play->lock);
        decide(play, update, obedient);
        refit_update_close(update);
        if (play->held) check(play, engine_is_as_saved(&play->engine), "the engine has a mix");
    }
}

static void await_version(theatre *play, uint64_t version)
{
    int64_t deadline = rft_deadline(RUN_WAIT_MS);
    bool in_time = true;
    rft_lock(&play->lock);
    while (in_time && play->accepted < version && play->wrong == NULL)
        in_time = rft_cond_wait(&play->changed, &play->lock, deadline);
    const char *wrong = in_time ? play->wrong : "the last version was not applied in time";
    rft_unlock(&play->lock);
    if (wrong != NULL) fail_msg("%s", wrong);
}

/* ---- The trainer */

static uint64_t publish(theatre *play)
{
    run_wait_workers(&play->run, 1);
    run_write(&play->run, 0);
    refit_status status = refit_publisher_commit(play->run.publisher, NULL);
    assert_true(status == REFIT_OK || status == REFIT_ERR_PEER);
    return refit_publisher_version(play->run.publisher);
}

static void open_play(theatre *play, uint64_t seed, bool shm, bool device)
{
    training_run *run = &play->run;
    memset(play, 0, sizeof *play);
    run_begin(run, 1 + seed % 2);
    run->seed = seed * 77 + 1;
    play->worker_seed = seed * 91 + 5;
    run->config.broadcast_shm = shm ? REFIT_SHM_AUTO : REFIT_SHM_OFF;
    run->config.broadcast_verify = seed % 3 == 0 ? REFIT_VERIFY_ALWAYS : REFIT_VERIFY_AUTO;
    run_add_tensor(run, REFIT_BF16, 300001, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F32, 70000, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F64, 300000, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F6_E2M3, 70001, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_I64, 3, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F32, 70000, 1);
    run_change(run);
    if (device) assert_ok(faulty_device_open(test_device_spec("host"), &play->device, NULL));
    engine_open(&play->engine, play->device, run->tensors, run->count, seed % 2 == 0, 0x11);
    run_open(run, "tcp://127.0.0.1:0");
    assert_ok(refit_subscriber_open(run->endpoint, &run->config, &play->subscriber, NULL));
    assert_ok(refit_subscriber_bind(play->subscriber, play->engine.list, play->engine.count, NULL));
    assert_ok(rft_mutex_open(&play->lock, NULL));
    assert_ok(rft_cond_open(&play->changed, NULL));
    assert_ok(rft_thread_start(&play->thread, "worker", work, play, NULL));
}

static void end_play(theatre *play)
{
    refit_subscriber_wake(play->subscriber);
    rft_thread_join(play->thread);
    refit_subscriber_close(play->subscriber);
    run_end(&play->run);
    rft_cond_close(&play->changed);
    rft_mutex_close(&play->lock);
    engine_close(&play->engine);
    if (play->device != NULL) assert_ok(refit_device_close(play->device, NULL));
}

static void check_engine(const theatre *play)
{
    for (uint32_t i = 0; i < play->run.count; i++) {
        unsigned char *now = malloc(play->run.tensors[i].bytes);
        assert_non_null(now);
        engine_read(&play->engine, i, now);
        assert_memory_equal(now, play->run.bytes[i], play->run.tensors[i].bytes);
        free(now);
    }
}

static uint32_t run_play(uint64_t seed, bool shm, bool device)
{
    theatre play;
    open_play(&play, seed, shm, device);
    for (uint32_t i = 0; i < VERSIONS; i++) {
        (void)publish(&play);
        run_change(&play.run);
    }
    rft_lock(&play.lock);
    play.obedient = true;
    rft_unlock(&play.lock);
    await_version(&play, publish(&play));
    check_engine(&play);
    uint32_t failed = play.failed;
    end_play(&play);
    return failed;
}

TEST(random_versions_are_there_or_were_never_there)
{
    for (uint64_t seed = 1; seed <= 3; seed++)
        for (int shm = 0; shm <= 1; shm++)
            (void)run_play(seed, shm == 1, false);
}

TEST(so_they_are_on_a_device_that_fails_now_and_then)
{
    uint32_t failed = 0;
    for (uint64_t seed = 4; seed <= 6; seed++)
        for (int shm = 0; shm <= 1; shm++)
            failed += run_play(seed, shm == 1, true);
    assert_true(failed > 0);
}

int main(void)
{
    return test_run("apply_random");
}
