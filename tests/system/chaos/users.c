/* Workers of two users on one host: neither ever maps what the other has, and what a process has
 * mapped the conductor, who is root, sees in /proc. */
#include "run.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

uid_t users_of(const chaos_run *run, uint32_t worker)
{
    return run->users && run->plan.each[worker].apart ? OTHER_USER : 0;
}

/* A segment that the worker has let go since is not there any more. */
static void judge_segment(chaos_run *run, uint32_t worker, const char *range)
{
    char path[128];
    struct stat file;
    const run_worker *one = &run->worker[worker];
    snprintf(path, sizeof path, "/proc/%d/map_files/%s", (int)one->process.pid, range);
    if (stat(path, &file) != 0) return;
    run->totals.owners++;
    if (file.st_uid != users_of(run, worker))
        run_fail(run, "%s, of user %u, has memory of user %u", one->name,
                 (unsigned)users_of(run, worker), (unsigned)file.st_uid);
}

void users_judge(chaos_run *run, uint32_t worker)
{
    char path[64], line[512], range[64];
    if (!run->users) return;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)run->worker[worker].process.pid);
    FILE *lines = fopen(path, "r");
    while (lines != NULL && fgets(line, sizeof line, lines) != NULL) {
        bool segment = strstr(line, "/memfd:refit ") != NULL;
        if (segment && sscanf(line, "%63s", range) == 1) judge_segment(run, worker, range);
    }
    if (lines != NULL) fclose(lines);
}

/* The trainer is of the run's user; so are the workers that are not apart. */
void users_judge_path(chaos_run *run, uint32_t worker, refit_path path)
{
    uint32_t others = 0;
    if (!run->users) return;
    for (uint32_t i = 0; i < run->plan.workers; i++)
        others += i != worker && users_of(run, i) == users_of(run, worker);
    if (path == REFIT_PATH_NEIGHBOR && others == 0)
        run_fail(run, "%s shares with a neighbor, and no other worker is of its user",
                 run->worker[worker].name);
    if (path == REFIT_PATH_SHM && users_of(run, worker) != 0)
        run_fail(run, "%s reads the memory of a trainer of another user", run->worker[worker].name);
}
