/* A process a scene: cmocka runs it there as a group of one, and the exit status says how it went.
 * One that fails takes its children with it, whose input ends. */
#include "scenes.h"
#include "tests/support/test.h"

#include <stdio.h>
#include <stdlib.h>

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct scene_setting {
    const scene_kind *kind;
    unsigned at;
} scene_setting;

static void play(void **state)
{
    const scene_setting *given = *state;
    given->kind->play(given->at, given->kind->shm, given->kind->slots);
}

static int play_here(scene_setting *setting, const char *point)
{
    char name[128];
    const scene_kind *kind = setting->kind;
    snprintf(name, sizeof name, "%s, %s, %s, %u slots", kind->name, point,
             kind->shm ? "shared memory" : "sockets", kind->slots);
    const struct CMUnitTest scene[] = {{name, play, NULL, NULL, setting}};
    return cmocka_run_group_tests_name(name, scene, NULL, NULL);
}

static void start(scene_setting setting, const char *point)
{
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) {
        perror("fork");
        exit(1);
    }
    if (pid > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    exit(play_here(&setting, point));
}

/* Waits until one ends; 1 if it has failed. */
static int await_one(void)
{
    int status = 0;
    while (wait(&status) < 0) {
        if (errno != EINTR) return 1;
    }
    if (WIFSIGNALED(status)) fprintf(stderr, "a scene was ended by signal %d\n", WTERMSIG(status));
    return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

int scenes_play(const scene_kind *kinds, size_t count, const char *const *points)
{
    unsigned played = 0;
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        for (unsigned at = kinds[i].first; at < kinds[i].end; at++, played++)
            start((scene_setting){&kinds[i], at}, points[at]);
    }
    for (unsigned i = 0; i < played; i++)
        failed += await_one();
    printf("%d of %u scenes failed\n", failed, played);
    return failed;
}
