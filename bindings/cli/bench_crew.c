/* bench_crew: posix_spawn, a pipe each, and the wait for their end. */
#include "bench_crew.h"

#include <fcntl.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static bool start_one(bench_crew *crew, char *const arguments[])
{
    int ends[2];
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
    int code =
        posix_spawn(&crew->pids[crew->count], "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
    if (code != 0) {
        close(ends[1]);
        return false;
    }
    crew->inputs[crew->count++] = ends[1];
    return true;
}

bool bench_crew_start(bench_crew *crew, uint32_t count, const char *kind, const char *endpoint,
                      uint64_t bytes)
{
    char number[32];
    snprintf(number, sizeof number, "%" PRIu64, bytes);
    char *arguments[] = {
        "refit", "bench", "worker", (char *)(uintptr_t)kind, (char *)(uintptr_t)endpoint,
        number,  NULL};
    *crew = (bench_crew){0};
    while (crew->count < count && crew->count < BENCH_CREW_MOST)
        if (!start_one(crew, arguments)) return false;
    return crew->count == count;
}

void bench_crew_stop(bench_crew *crew)
{
    for (uint32_t i = 0; i < crew->count; i++)
        close(crew->inputs[i]);
    for (uint32_t i = 0; i < crew->count; i++)
        waitpid(crew->pids[i], NULL, 0);
    crew->count = 0;
}
