/* A trainer and its workers in processes of their own on one GPU: versions are read across the
 * process boundary where they lie, and memory that another process has mapped is neither written
 * nor freed, however that process ends. (Every process looks at its end whether the driver had
 * something to complain of.) */
#include <poll.h>
#include <refit/broadcast.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "children.h"
#include "scenes.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

typedef struct scene {
    char endpoint[128];
    child trainer;
    child workers[2];
} scene;

static refit_path path_of(child *worker)
{
    return (refit_path)atoi(strrchr(child_ask(worker, "describe"), ' ') + 1);
}

/* A worker that has just been told its device joins on it soon after. */
static void await_gpu(child *worker)
{
    int64_t deadline = rft_deadline(TAKE_MS);
    while (path_of(worker) != REFIT_PATH_CUDA_IPC) {
        if (rft_ms_until(deadline) == 0) fail_msg("a worker does not join on its GPU");
        (void)poll(NULL, 0, 2);
    }
}

static void worker_join(scene *the, uint32_t index)
{
    worker_open(&the->workers[index], the->endpoint, true);
    await_gpu(&the->workers[index]);
}

/* The trainer counts on so many with its next version: they are on its GPU a message earlier. */
static void await_workers(scene *the, unsigned count)
{
    (void)child_ask(&the->trainer, "wait %u %d", count, TAKE_MS);
}

/* As a number of slots: the trainer lends its tensors, and keeps no copy. */
#define LENDS 0u

static void open_trainer(scene *the, unsigned slots, const char *setting)
{
    trainer_open(&the->trainer, the->endpoint, true, slots == LENDS ? 2 : slots, setting);
    the->trainer.lends = slots == LENDS;
}

static void open_scene(scene *the, unsigned slots, const char *setting)
{
    memset(the, 0, sizeof *the);
    own_tcp(the->endpoint);
    open_trainer(the, slots, setting);
    worker_join(the, 0);
    worker_join(the, 1);
}

static void publish(scene *the, unsigned seed, unsigned workers)
{
    child *const all[] = {&the->workers[0], &the->workers[1]};
    await_workers(the, workers);
    trainer_publish(&the->trainer, seed, all, workers);
}

static void close_scene(scene *the)
{
    child_end(&the->workers[0]);
    child_end(&the->workers[1]);
    child_end(&the->trainer);
}

static void versions_are_read_across_processes(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, slots, "");
    for (unsigned seed = 1; seed <= 4; seed++) {
        publish(&the, seed, 2);
        assert_int_equal(path_of(&the.workers[0]), REFIT_PATH_CUDA_IPC);
        assert_int_equal(path_of(&the.workers[1]), REFIT_PATH_CUDA_IPC);
    }
    close_scene(&the);
}

/* The second worker has version 1 open. A version waits less long for its memory. */
static void open_scene_with_a_reader(scene *the, unsigned slots)
{
    open_scene(the, slots, "broadcast.stage_timeout_ms=15s");
    trainer_write(&the->trainer, 1);
    child_say(&the->trainer, "commit");
    assert_true(worker_take(&the->workers[1], TAKE_MS));
    assert_string_equal(the->workers[1].digest, the->trainer.digest);
}

/* And is lost; the first goes on. */
static void go_on_without_it(scene *the)
{
    child *const left[] = {&the->workers[0]};
    (void)trainer_finish(&the->trainer, left, 1);
    publish(the, 2, 1);
    publish(the, 3, 1);
}

/* The second worker's block is free the moment it is dead. */
static void a_worker_killed_while_it_reads_leaves_the_memory_free(unsigned at, bool shm,
                                                                  unsigned slots)
{
    scene the;
    open_scene_with_a_reader(&the, slots);
    child_kill(&the.workers[1]);
    go_on_without_it(&the);
    worker_join(&the, 1);
    publish(&the, 4, 2);
    assert_int_equal(path_of(&the.workers[1]), REFIT_PATH_CUDA_IPC);
    close_scene(&the);
}

/* It is evicted meanwhile: it must drop what it read, unless that was whole. */
static void a_worker_stopped_while_it_reads_sees_nothing_torn(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene_with_a_reader(&the, slots);
    child_stop(&the.workers[1]);
    go_on_without_it(&the);
    child_continue(&the.workers[1]);
    assert_false(worker_accept(&the.workers[1])); /* REFIT_ERR_STALE */
    publish(&the, 4, 2);
    close_scene(&the);
}

/* The trainer leaves first, and waits for its workers to unmap, or is killed. */
static void a_trainer_that_goes_frees_nothing_under_its_workers(unsigned killed, bool shm,
                                                                unsigned slots)
{
    scene the;
    open_scene(&the, slots, "");
    publish(&the, 1, 2);
    publish(&the, 2, 2);
    if (killed) {
        child_kill(&the.trainer);
    } else {
        child_end(&the.trainer);
    }
    worker_await(&the.workers[0], "connecting");
    worker_await(&the.workers[1], "connecting");
    open_trainer(&the, slots, "");
    await_gpu(&the.workers[0]);
    await_gpu(&the.workers[1]);
    publish(&the, 3, 2);
    assert_int_equal(path_of(&the.workers[0]), REFIT_PATH_CUDA_IPC);
    close_scene(&the);
}

/* ---- Piece by piece */

#define SMALL_BUCKET "broadcast.gpu_bucket_bytes=64KiB"

/* Version under way, and with both workers; nothing of it is read. */
static void begin_streaming(scene *the, unsigned seed)
{
    await_workers(the, 2);
    (void)child_ask(&the->trainer, "begin");
    child_say(&the->trainer, "write %u", seed);
    (void)child_ask(&the->workers[0], "arrive %d", TAKE_MS);
    (void)child_ask(&the->workers[1], "arrive %d", TAKE_MS);
}

static bool answers_ok(child *one)
{
    return strncmp(child_hear(one), "OK", 2) == 0;
}

/* All of it is read by both, and committed. */
static void stream_to_both(scene *the, unsigned seed)
{
    char digest[17];
    begin_streaming(the, seed);
    child_say(&the->workers[0], "fetch");
    child_say(&the->workers[1], "fetch");
    snprintf(digest, sizeof digest, "%s", strrchr(child_hear(&the->trainer), ' ') + 1);
    child_say(&the->trainer, "commit");
    for (unsigned i = 0; i < 2; i++)
        assert_string_equal(strrchr(child_hear(&the->workers[i]), ' ') + 1, digest);
    child_say(&the->workers[0], "accept");
    child_say(&the->workers[1], "accept");
    assert_true(answers_ok(&the->workers[0]));
    assert_true(answers_ok(&the->workers[1]));
    assert_true(answers_ok(&the->trainer));
    (void)child_ask(&the->workers[0], "release");
    (void)child_ask(&the->workers[1], "release");
}

static void streamed_versions_cross_processes(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, slots, SMALL_BUCKET);
    for (unsigned seed = 1; seed <= 3; seed++)
        stream_to_both(&the, seed);
    close_scene(&the);
}

/* The other one has read all of it, and has to wait for the next. */
static void a_worker_killed_between_pieces_costs_a_version(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, slots, SMALL_BUCKET);
    stream_to_both(&the, 1);
    begin_streaming(&the, 2);
    child_kill(&the.workers[1]);
    child_say(&the.workers[0], "fetch");
    assert_true(answers_ok(&the.trainer)); /* it goes on without the dead one */
    child_say(&the.trainer, "commit");
    (void)child_hear(&the.workers[0]); /* it may have ended before its last piece, or after it */
    assert_false(answers_ok(&the.trainer));
    child_say(&the.workers[0], "accept");
    assert_false(answers_ok(&the.workers[0]));
    (void)child_ask(&the.workers[0], "release");
    worker_join(&the, 1);
    await_gpu(&the.workers[0]);
    stream_to_both(&the, 3);
    close_scene(&the);
}

static void a_trainer_killed_between_pieces_is_noticed(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, slots, SMALL_BUCKET);
    begin_streaming(&the, 1);
    child_kill(&the.trainer);
    for (unsigned i = 0; i < 2; i++) {
        child_say(&the.workers[i], "fetch");
        assert_false(answers_ok(&the.workers[i]));
        (void)child_ask(&the.workers[i], "release");
    }
    open_trainer(&the, slots, SMALL_BUCKET);
    await_gpu(&the.workers[0]);
    await_gpu(&the.workers[1]);
    stream_to_both(&the, 2);
    close_scene(&the);
}

int main(void)
{
    static const char *const points[] = {"leaves", "is killed"};
    static const scene_kind kinds[] = {
        {"versions are read", versions_are_read_across_processes, true, 1, 0, 1},
        {"versions are read", versions_are_read_across_processes, true, 2, 0, 1},
        {"a reader", a_worker_killed_while_it_reads_leaves_the_memory_free, true, 1, 1, 2},
        {"a reader", a_worker_killed_while_it_reads_leaves_the_memory_free, true, 2, 1, 2},
        {"a reader, stopped", a_worker_stopped_while_it_reads_sees_nothing_torn, true, 1, 0, 1},
        {"a reader, stopped", a_worker_stopped_while_it_reads_sees_nothing_torn, true, 2, 0, 1},
        {"the trainer", a_trainer_that_goes_frees_nothing_under_its_workers, true, 2, 0, 2},
        {"lent versions are read", versions_are_read_across_processes, true, LENDS, 0, 1},
        {"a reader of what is lent", a_worker_killed_while_it_reads_leaves_the_memory_free, true,
         LENDS, 1, 2},
        {"a reader of what is lent, stopped", a_worker_stopped_while_it_reads_sees_nothing_torn,
         true, LENDS, 0, 1},
        {"a trainer that lends", a_trainer_that_goes_frees_nothing_under_its_workers, true, LENDS,
         0, 2},
        {"streamed versions", streamed_versions_cross_processes, true, 2, 0, 1},
        {"a worker between pieces", a_worker_killed_between_pieces_costs_a_version, true, 2, 1, 2},
        {"a trainer between pieces", a_trainer_killed_between_pieces_is_noticed, true, 2, 1, 2},
    };
    return scenes_play(kinds, COUNT_OF(kinds), points);
}
