/* Versions that lie in the trainer's memory of the GPU, applied into the engine's own memory. */
#include "tests/support/bound_engine.h"
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#define VERSIONS 4u
#define WAIT_MS  30000u

/* A worker on the trainer's GPU that applies what comes. Nothing is asserted on its thread. */
typedef struct gpu_worker {
    engine engine;
    refit_subscriber *subscriber;
    rft_thread thread;
    uint64_t refuse; /* this version, after it was applied */
    const char *wrong;
    uint64_t accepted;
} gpu_worker;

static const char *handle(gpu_worker *worker, refit_update *update)
{
    uint64_t version = refit_update_version(update);
    if (refit_update_device(update) == NULL) return "a version does not lie on the GPU";
    if (refit_update_apply(update, NULL, NULL) != REFIT_OK) return "a version was not applied";
    if (!engine_is_like(&worker->engine, update)) return "an applied version is not there";
    if (version == worker->refuse) {
        if (refit_update_refuse(update, NULL, 1, NULL) != REFIT_OK) return "it was not refused";
        return engine_is_as_saved(&worker->engine) ? NULL : "it was not taken back";
    }
    if (refit_update_accept(update, NULL) != REFIT_OK) return "a version was not accepted";
    engine_save(&worker->engine);
    worker->accepted = version;
    return NULL;
}

static void *work(void *user)
{
    gpu_worker *worker = user;
    while (worker->wrong == NULL && worker->accepted < VERSIONS) {
        refit_update *update = NULL;
        if (refit_subscriber_next(worker->subscriber, WAIT_MS, &update, NULL) != REFIT_OK) {
            worker->wrong = "no version came";
            return NULL;
        }
        worker->wrong = handle(worker, update);
        refit_update_close(update);
    }
    return NULL;
}

static void begin_worker(gpu_worker *worker, gpu_play *play, bool on_gpu)
{
    memset(worker, 0, sizeof *worker);
    worker->refuse = 3;
    engine_open(&worker->engine, on_gpu ? play->theirs : NULL, sample_tensors(), SAMPLE_TENSORS,
                on_gpu, 9);
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(play->trainer.publisher),
                                    &play->config, &worker->subscriber, NULL));
    assert_ok(refit_subscriber_use_device(worker->subscriber, play->theirs, NULL));
    assert_ok(
        refit_subscriber_bind(worker->subscriber, worker->engine.list, worker->engine.count, NULL));
    trainer_wait_workers(&play->trainer, 1);
    assert_ok(rft_thread_start(&worker->thread, "worker", work, worker, NULL));
}

static void end_worker(gpu_worker *worker)
{
    rft_thread_join(worker->thread);
    if (worker->wrong != NULL) fail_msg("%s", worker->wrong);
    assert_int_equal(worker->accepted, VERSIONS);
    refit_subscriber_close(worker->subscriber);
    engine_close(&worker->engine);
}

static void require_and_verify(refit_config *config)
{
    config->broadcast_gpu = REFIT_GPU_REQUIRE;
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

PLAY_TEST(versions_on_the_gpu_go_where_the_engine_is)
{
    for (int trial = 0; trial < 4; trial++) {
        gpu_worker worker;
        gpu_play_open(play, trial / 2 == 0 ? with_gpu_required : require_and_verify);
        begin_worker(&worker, play, trial % 2 == 0);
        for (uint64_t version = 1; version <= VERSIONS; version++) {
            trainer_begin(&play->trainer, version);
            trainer_write(&play->trainer);
            refit_status status = refit_publisher_commit(play->trainer.publisher, NULL);
            assert_int_equal(status, version == worker.refuse ? REFIT_ERR_PEER : REFIT_OK);
        }
        end_worker(&worker);
    }
}

int main(void)
{
    return test_run("apply_gpu");
}
