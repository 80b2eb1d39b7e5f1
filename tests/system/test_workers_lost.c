/* Workers in processes of their own, killed, stopped or deaf at every point of a version: the
 * trainer is not held up, and all surviving workers end with the trainer's bytes. */
#include <stdio.h>
#include <unistd.h>

#include "children.h"
#include "scenes.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

/* Where the victim is when it happens. */
typedef enum point {
    AT_CONNECTING, /* no trainer is there yet */
    AT_CURRENT,
    AT_STAGING,  /* the version has begun, nothing is written */
    AT_STAGED,   /* all is written; another worker, stopped, holds it up */
    AT_READY,    /* committed; its user has not asked for it */
    AT_TAKEN,    /* its user has it and has not decided */
    AT_ACCEPTED, /* its update is still open */
    POINTS,
} point;

static const char *const points[POINTS] = {"connecting", "current", "staging", "staged",
                                           "ready",      "taken",   "accepted"};

typedef struct scene {
    bool shm;
    char endpoint[128];
    child trainer;
    child survivor;
    child victim;
    child brake;     /* for AT_STAGED */
    uint64_t before; /* the version committed before the one under way */
    bool waiting;    /* the trainer is in commit */
} scene;

static void open_scene(scene *the, point at, bool shm, unsigned slots, const char *setting)
{
    memset(the, 0, sizeof *the);
    the->shm = shm;
    own_tcp(the->endpoint);
    trainer_open(&the->trainer, the->endpoint, shm, slots, setting);
    worker_open(&the->survivor, the->endpoint, shm);
    if (at == AT_CONNECTING) {
        worker_open(&the->victim, "ipc:///nowhere/refit.sock", shm);
        trainer_publish(&the->trainer, 1, (child *const[]){&the->survivor}, 1);
        return;
    }
    worker_open(&the->victim, the->endpoint, shm);
    if (at == AT_STAGED) worker_open(&the->brake, the->endpoint, shm);
    child *const all[] = {&the->survivor, &the->victim, &the->brake};
    trainer_publish(&the->trainer, 1, all, at == AT_STAGED ? 3 : 2);
}

/* Brings the victim to the point, the trainer where it must be for that. */
static void reach(scene *the, point at)
{
    if (at == AT_CONNECTING) worker_await(&the->victim, "connecting");
    if (at == AT_CURRENT) worker_await(&the->victim, "current");
    if (at < AT_STAGING) return;
    the->before = trainer_version(&the->trainer);
    if (at == AT_STAGED) child_stop(&the->brake);
    if (at == AT_STAGING) {
        (void)child_ask(&the->trainer, "begin");
        worker_await(&the->victim, "staging");
        return;
    }
    trainer_write(&the->trainer, 2);
    child_say(&the->trainer, "commit");
    the->waiting = true;
    worker_await(&the->victim, at == AT_STAGED ? "staged" : "applying");
    if (at >= AT_TAKEN) assert_true(worker_take(&the->victim, TAKE_MS));
    if (at == AT_ACCEPTED) (void)child_ask(&the->victim, "accept");
}

/* The version is committed or aborted; it is whole for each worker that sees it. */
static void finish_version(scene *the, point at)
{
    child *const left[] = {&the->survivor};
    if (at == AT_STAGING) {
        snprintf(the->trainer.digest, sizeof the->trainer.digest, "%s",
                 child_ask(&the->trainer, "write 2"));
        child_say(&the->trainer, "commit");
        the->waiting = true;
    }
    if (the->waiting) (void)trainer_finish(&the->trainer, left, 1);
    uint64_t version = trainer_version(&the->trainer);
    if (at >= AT_STAGING && version > the->before)
        worker_follow(&the->survivor, version, the->trainer.digest);
}

/* All workers that are to survive take the next version. */
static void meet_again(scene *the, point at)
{
    child *const all[] = {&the->survivor, &the->victim, &the->brake};
    if (the->brake.stopped) child_continue(&the->brake);
    trainer_publish(&the->trainer, 3, all, at == AT_STAGED ? 3 : 2);
}

static void close_scene(scene *the)
{
    assert_true(the->shm == (process_segments(the->trainer.pid) > 0));
    child_end(&the->survivor);
    child_end(&the->victim);
    child_end(&the->brake);
    child_end(&the->trainer);
}

static void a_killed_worker_holds_up_no_other(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, at, shm, slots, "");
    reach(&the, at);
    child_kill(&the.victim);
    finish_version(&the, at);
    worker_open(&the.victim, the.endpoint, shm);
    meet_again(&the, at);
    close_scene(&the);
}

static void a_stopped_worker_holds_up_no_other_and_returns(unsigned at, bool shm, unsigned slots)
{
    scene the;
    open_scene(&the, at, shm, slots, "");
    reach(&the, at);
    child_stop(&the.victim);
    finish_version(&the, at);
    child_continue(&the.victim);
    if (at == AT_CONNECTING) {
        child_end(&the.victim);
        worker_open(&the.victim, the.endpoint, shm);
    }
    if (at == AT_ACCEPTED) {
        (void)child_ask(&the.victim, "release");
        the.victim.open_update = false;
    }
    meet_again(&the, at);
    close_scene(&the);
}

/* Its service thread lives and beats; its user never takes, or never decides. */
static void a_worker_that_never_answers_is_evicted_and_may_return(unsigned at, bool shm,
                                                                  unsigned slots)
{
    scene the;
    open_scene(&the, at, shm, slots, "broadcast.commit_timeout_ms=12s");
    reach(&the, at);
    finish_version(&the, at);
    assert_true(trainer_version(&the.trainer) > the.before); /* committed all the same */
    meet_again(&the, at);
    close_scene(&the);
}

int main(void)
{
    static const scene_kind kinds[] = {
        {"killed", a_killed_worker_holds_up_no_other, false, 2, 0, POINTS},
        {"killed", a_killed_worker_holds_up_no_other, true, 2, 0, POINTS},
        {"stopped", a_stopped_worker_holds_up_no_other_and_returns, false, 2, 0, POINTS},
        {"stopped", a_stopped_worker_holds_up_no_other_and_returns, true, 2, 0, POINTS},
        {"deaf", a_worker_that_never_answers_is_evicted_and_may_return, false, 2, AT_READY,
         AT_TAKEN + 1},
        {"deaf", a_worker_that_never_answers_is_evicted_and_may_return, true, 2, AT_READY,
         AT_TAKEN + 1},
    };
    return scenes_play(kinds, COUNT_OF(kinds), points);
}
