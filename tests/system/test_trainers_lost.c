/* A trainer in a process of its own, killed or stopped at every point of a version: its workers
 * notice, keep what they have, find the next trainer, and nothing of the old one is left in shared
 * memory. */
#include <unistd.h>

#include "children.h"
#include "scenes.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

/* Where the trainer is when it happens. */
typedef enum point {
    AT_IDLE,
    AT_BEGUN,
    AT_WRITTEN,
    AT_STAGING,   /* in commit, held up by a stopped worker */
    AT_COMMITTED, /* in commit, the version not yet taken by a worker's user */
    AT_TAKEN,     /* in commit, the version taken by a worker's user and undecided */
    POINTS,
} point;

static const char *const points[POINTS] = {"idle",    "begun",     "written",
                                           "staging", "committed", "taken"};

typedef struct scene {
    bool shm;
    unsigned slots;
    char endpoint[128];
    child trainer;
    child workers[2];
    bool waiting; /* the trainer is in commit */
} scene;

static void publish_to_all(scene *the, unsigned seed)
{
    child *const all[] = {&the->workers[0], &the->workers[1]};
    trainer_publish(&the->trainer, seed, all, 2);
}

static void open_scene(scene *the, bool shm, unsigned slots)
{
    memset(the, 0, sizeof *the);
    the->shm = shm;
    the->slots = slots;
    own_tcp(the->endpoint);
    trainer_open(&the->trainer, the->endpoint, shm, slots, "");
    worker_open(&the->workers[0], the->endpoint, shm);
    worker_open(&the->workers[1], the->endpoint, shm);
    publish_to_all(the, 1);
}

static void reach(scene *the, point at)
{
    if (at == AT_IDLE) return;
    if (at == AT_BEGUN) (void)child_ask(&the->trainer, "begin");
    if (at >= AT_WRITTEN) trainer_write(&the->trainer, 2);
    if (at <= AT_WRITTEN) {
        worker_await(&the->workers[0], "staging");
        return;
    }
    if (at == AT_STAGING) child_stop(&the->workers[1]);
    child_say(&the->trainer, "commit");
    the->waiting = true;
    worker_await(&the->workers[0], at == AT_STAGING ? "staged" : "applying");
    if (at == AT_TAKEN) assert_true(worker_take(&the->workers[0], TAKE_MS));
}

static void close_scene(scene *the)
{
    child_end(&the->workers[0]);
    child_end(&the->workers[1]);
    child_end(&the->trainer);
}

static void a_trainer_killed_is_replaced(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, shm, slots);
    reach(&the, at);
    assert_true(shm == (process_segments(the.trainer.pid) > 0));
    child_kill(&the.trainer);
    worker_await(&the.workers[0], "connecting");
    if (the.workers[1].stopped) child_continue(&the.workers[1]);
    trainer_open(&the.trainer, the.endpoint, shm, slots, "");
    publish_to_all(&the, 9);
    assert_int_equal(the.workers[0].version, trainer_version(&the.trainer));
    close_scene(&the);
}

static void a_trainer_stopped_is_found_again(unsigned at, bool shm, unsigned slots)
{
    scene the;
    child *const all[] = {&the.workers[0], &the.workers[1]};
    open_scene(&the, shm, slots);
    reach(&the, at);
    child_stop(&the.trainer);
    worker_await(&the.workers[0], "connecting");
    child_continue(&the.trainer);
    if (the.workers[1].stopped) child_continue(&the.workers[1]);
    if (at == AT_BEGUN) (void)child_ask(&the.trainer, "write 2");
    if (at == AT_BEGUN || at == AT_WRITTEN) child_say(&the.trainer, "commit");
    if (at != AT_IDLE) (void)trainer_finish(&the.trainer, all, 2);
    publish_to_all(&the, 3);
    close_scene(&the);
}

int main(void)
{
    static const scene_kind kinds[] = {
        {"killed", a_trainer_killed_is_replaced, false, 2, 0, POINTS},
        {"killed", a_trainer_killed_is_replaced, true, 2, 0, POINTS},
        {"killed", a_trainer_killed_is_replaced, true, 1, 0, POINTS},
        {"stopped", a_trainer_stopped_is_found_again, false, 2, 0, POINTS},
        {"stopped", a_trainer_stopped_is_found_again, true, 2, 0, POINTS},
    };
    return scenes_play(kinds, COUNT_OF(kinds), points);
}
