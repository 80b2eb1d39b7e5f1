/* A trainer in a process of its own, killed or stopped at every point of a version: its workers
 * notice, keep what they have, find the next trainer, and nothing of the old one is left in shared
 * memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <stdio.h>
#include <unistd.h>

#include "puppets.h"

/* Where the trainer is when it happens. */
typedef enum point {
    AT_IDLE,
    AT_BEGUN,
    AT_WRITTEN,
    AT_STAGING,   /* in commit, held up by a stopped worker */
    AT_COMMITTED, /* in commit, the version not yet taken by a worker's user */
    AT_TAKEN,     /* likewise, taken and undecided */
    POINTS,
} point;

typedef struct scene {
    bool shm;
    unsigned slots;
    char endpoint[128];
    puppet trainer;
    puppet workers[2];
    bool waiting; /* the trainer is in commit */
} scene;

static void publish_to_all(scene *the, unsigned seed)
{
    puppet *const all[] = {&the->workers[0], &the->workers[1]};
    trainer_publish(&the->trainer, seed, all, 2);
}

static void open_scene(scene *the, bool shm, unsigned slots)
{
    memset(the, 0, sizeof *the);
    the->shm = shm;
    the->slots = slots;
    snprintf(the->endpoint, sizeof the->endpoint, "tcp://127.0.0.1:0");
    trainer_open(&the->trainer, the->endpoint, shm, slots);
    worker_open(&the->workers[0], the->endpoint, shm);
    worker_open(&the->workers[1], the->endpoint, shm);
    publish_to_all(the, 1);
}

static void reach(scene *the, point at)
{
    if (at == AT_IDLE) return;
    if (at == AT_BEGUN) (void)puppet_ask(&the->trainer, "begin");
    if (at >= AT_WRITTEN) trainer_write(&the->trainer, 2);
    if (at <= AT_WRITTEN) {
        worker_await(&the->workers[0], "staging");
        return;
    }
    if (at == AT_STAGING) puppet_stop(&the->workers[1]);
    puppet_say(&the->trainer, "commit");
    the->waiting = true;
    worker_await(&the->workers[0], at == AT_STAGING ? "staged" : "applying");
    if (at == AT_TAKEN) assert_true(worker_take(&the->workers[0], 10000));
}

static void close_scene(scene *the)
{
    puppet_end(&the->workers[0]);
    puppet_end(&the->workers[1]);
    puppet_end(&the->trainer);
}

static void killed_at(point at, bool shm, unsigned slots)
{
    scene the;
    char names[SEGMENTS_MOST][64];
    open_scene(&the, shm, slots);
    reach(&the, at);
    unsigned count = process_segments(the.trainer.pid, names);
    assert_true(shm == (count > 0));
    puppet_kill(&the.trainer);
    worker_await(&the.workers[0], "connecting");
    if (the.workers[1].stopped) puppet_continue(&the.workers[1]);
    trainer_open(&the.trainer, the.endpoint, shm, slots);
    for (unsigned i = 0; i < count; i++) {
        assert_int_not_equal(access(names[i], F_OK), 0);
    }
    publish_to_all(&the, 9);
    assert_int_equal(the.workers[0].version, trainer_version(&the.trainer));
    close_scene(&the);
}

static void stopped_at(point at, bool shm, unsigned slots)
{
    scene the;
    puppet *const all[] = {&the.workers[0], &the.workers[1]};
    open_scene(&the, shm, slots);
    reach(&the, at);
    puppet_stop(&the.trainer);
    worker_await(&the.workers[0], "connecting");
    puppet_continue(&the.trainer);
    if (the.workers[1].stopped) puppet_continue(&the.workers[1]);
    if (at == AT_BEGUN) (void)puppet_ask(&the.trainer, "write 2");
    if (at == AT_BEGUN || at == AT_WRITTEN) puppet_say(&the.trainer, "commit");
    if (at != AT_IDLE) (void)trainer_finish(&the.trainer, all, 2);
    publish_to_all(&the, 3);
    close_scene(&the);
}

static void a_trainer_killed_at_any_point_is_replaced(void **state)
{
    (void)state;
    for (point at = 0; at < POINTS; at++) {
        killed_at(at, false, 2);
        killed_at(at, true, 2);
    }
}

static void a_trainer_with_one_slot_killed_at_any_point_is_replaced(void **state)
{
    (void)state;
    for (point at = 0; at < POINTS; at++) {
        killed_at(at, true, 1);
    }
}

static void a_trainer_stopped_at_any_point_is_found_again(void **state)
{
    (void)state;
    for (point at = 0; at < POINTS; at++) {
        stopped_at(at, false, 2);
        stopped_at(at, true, 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trainer_killed_at_any_point_is_replaced),
        cmocka_unit_test(a_trainer_with_one_slot_killed_at_any_point_is_replaced),
        cmocka_unit_test(a_trainer_stopped_at_any_point_is_found_again),
    };
    return cmocka_run_group_tests_name("trainers_lost", tests, NULL, NULL);
}
