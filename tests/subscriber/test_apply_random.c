/* Random versions, decisions and failing devices: the engine has the trainer's bytes or its old
 * ones, never a mix. */
#include "base/clock.h"
#include "base/thread.h"
#include "tests/support/bound_engine.h"
#include "tests/support/faulty_device.h"
#include "tests/support/quick_config.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"
#include "tests/support/unit.h"

#define TENSORS 6u
#define WAIT_MS 30000u
#ifndef VERSIONS /* fewer, where all takes many times as long */
#define VERSIONS 14u
#endif

/* A trainer with its model, and a worker on a thread of its own. */
typedef struct theatre {
    refit_config config;
    refit_publisher *publisher;
    refit_tensor tensors[TENSORS];
    char names[TENSORS][32];
    unsigned char *bytes[TENSORS];
    uint64_t seed;
    refit_device *device; /* of the engine; NULL: it is on the host */
    engine engine;
    refit_subscriber *subscriber;
    rft_thread thread;
    uint64_t worker_seed;
    rft_mutex lock;
    rft_cond changed;
    bool obedient;     /* guarded by lock, like all below: it accepts every version */
    uint64_t accepted; /* the last version */
    uint32_t failed;   /* applies */
    const char *wrong; /* a violation that the worker found; NULL: none */
} theatre;

static void set_tensor(theatre *play, uint32_t index, refit_dtype dtype, uint64_t elements,
                       uint32_t alias_of)
{
    snprintf(play->names[index], sizeof play->names[index], "tensor.%u", index);
    play->tensors[index] = (refit_tensor){
        .size = sizeof(refit_tensor),
        .name = play->names[index],
        .dtype = dtype,
        .rank = 1,
        .shape = {elements},
        .bytes = (elements * refit_dtype_bits(dtype) + 7) / 8,
        .alias_of = alias_of,
    };
    play->bytes[index] = calloc(play->tensors[index].bytes + 1, 1);
    assert_non_null(play->bytes[index]);
}

/* Mostly to the next value: sparse blocks, dense ones, and those that stay. */
static void change_tensor(theatre *play, uint32_t index, uint64_t every)
{
    const refit_tensor *tensor = &play->tensors[index];
    uint32_t bits = refit_dtype_bits(tensor->dtype), width = bits % 8 == 0 ? bits / 8 : 1;
    for (uint64_t at = 0; every != 0 && at + width <= tensor->bytes; at += width) {
        if (seeded_below(&play->seed, every) != 0) continue;
        unsigned char *element = play->bytes[index] + at;
        element[seeded_below(&play->seed, 8) == 0 ? width - 1 : 0] += 1;
    }
}

static void change_model(theatre *play)
{
    static const uint64_t densities[] = {0, 1, 3, 20, 100, 1000, 20000};
    for (uint32_t i = 0; i < TENSORS; i++) {
        if (play->tensors[i].alias_of == REFIT_NO_ALIAS)
            change_tensor(play, i, densities[seeded_below(&play->seed, 7)]);
    }
    memcpy(play->bytes[5], play->bytes[1], play->tensors[1].bytes);
}

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
    if (seeded_below(&play->worker_seed, 2) == 0) {
        faulty_device_fail(play->device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
    } else {
        faulty_device_fail_later(play->device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
    }
}

static bool apply(theatre *play, refit_update *update)
{
    refit_status status = refit_update_apply(update, NULL, NULL);
    if (play->device != NULL) faulty_device_reset(play->device);
    if (status == REFIT_OK) {
        check(play, engine_is_like(&play->engine, update), "an applied version is not there");
        return true;
    }
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
        refit_status status = refit_subscriber_next(play->subscriber, WAIT_MS, &update, NULL);
        if (status == REFIT_ERR_TIMEOUT) continue;
        if (status != REFIT_OK) return NULL;
        rft_lock(&play->lock);
        bool obedient = play->obedient;
        rft_unlock(&play->lock);
        decide(play, update, obedient);
        refit_update_close(update);
        check(play, engine_is_as_saved(&play->engine), "the engine has a mix");
    }
}

static void await_version(theatre *play, uint64_t version)
{
    int64_t deadline = rft_deadline(WAIT_MS);
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
    assert_ok(refit_publisher_wait_workers(play->publisher, 1, WAIT_MS, NULL));
    assert_ok(refit_publisher_begin(play->publisher, 0, NULL));
    for (uint32_t i = 0; i < TENSORS; i++) {
        if (play->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        assert_ok(refit_publisher_write(play->publisher, i, play->bytes[i], play->tensors[i].bytes,
                                        NULL, REFIT_STREAM_NONE, NULL));
    }
    refit_status status = refit_publisher_commit(play->publisher, NULL);
    assert_true(status == REFIT_OK || status == REFIT_ERR_PEER);
    return refit_publisher_version(play->publisher);
}

static void begin_play(theatre *play, uint64_t seed, bool shm, bool device)
{
    memset(play, 0, sizeof *play);
    play->seed = seed * 77 + 1;
    play->worker_seed = seed * 91 + 5;
    play->config = quick_config();
    play->config.broadcast_shm = shm ? REFIT_SHM_AUTO : REFIT_SHM_OFF;
    play->config.broadcast_slots = 1 + seed % 2;
    play->config.broadcast_heartbeat_timeout_ms = 30000;
    play->config.broadcast_verify = seed % 3 == 0 ? REFIT_VERIFY_ALWAYS : REFIT_VERIFY_AUTO;
    set_tensor(play, 0, REFIT_BF16, 300001, REFIT_NO_ALIAS);
    set_tensor(play, 1, REFIT_F32, 70000, REFIT_NO_ALIAS);
    set_tensor(play, 2, REFIT_F64, 300000, REFIT_NO_ALIAS);
    set_tensor(play, 3, REFIT_F6_E2M3, 70001, REFIT_NO_ALIAS);
    set_tensor(play, 4, REFIT_I64, 3, REFIT_NO_ALIAS);
    set_tensor(play, 5, REFIT_F32, 70000, 1);
    change_model(play);
    if (device) assert_ok(faulty_device_open(test_device_spec("host"), &play->device, NULL));
    engine_open(&play->engine, play->device, play->tensors, TENSORS, seed % 2 == 0, 0x11);
}

static void open_play(theatre *play)
{
    refit_publisher *publisher;
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &play->config, &publisher, NULL));
    play->publisher = publisher;
    assert_ok(refit_publisher_declare(publisher, play->tensors, TENSORS, NULL));
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(publisher), &play->config,
                                    &play->subscriber, NULL));
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
    refit_publisher_close(play->publisher);
    rft_cond_close(&play->changed);
    rft_mutex_close(&play->lock);
    engine_close(&play->engine);
    if (play->device != NULL) assert_ok(refit_device_close(play->device, NULL));
    for (uint32_t i = 0; i < TENSORS; i++)
        free(play->bytes[i]);
}

static void check_engine(const theatre *play)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        unsigned char *now = malloc(play->tensors[i].bytes);
        assert_non_null(now);
        engine_read(&play->engine, i, now);
        assert_memory_equal(now, play->bytes[i], play->tensors[i].bytes);
        free(now);
    }
}

static uint32_t run_play(uint64_t seed, bool shm, bool device)
{
    theatre play;
    begin_play(&play, seed, shm, device);
    open_play(&play);
    for (uint32_t i = 0; i < VERSIONS; i++) {
        (void)publish(&play);
        change_model(&play);
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

static void random_versions_are_there_or_were_never_there(void **state)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        for (int shm = 0; shm <= 1; shm++)
            (void)run_play(seed, shm == 1, false);
    }
}

static void so_they_are_on_a_device_that_fails_now_and_then(void **state)
{
    uint32_t failed = 0;
    for (uint64_t seed = 4; seed <= 6; seed++) {
        for (int shm = 0; shm <= 1; shm++)
            failed += run_play(seed, shm == 1, true);
    }
    assert_true(failed > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_versions_are_there_or_were_never_there),
        cmocka_unit_test(so_they_are_on_a_device_that_fails_now_and_then),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
