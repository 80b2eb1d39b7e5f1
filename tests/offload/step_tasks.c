/* The threads of host steps. */
#include "tests/offload/step_tasks.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "tests/offload/offload.h"

static bool is_step_thread(const char *task)
{
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task);
    FILE *file = fopen(path, "r");
    if (file == NULL) return false;
    bool is = fgets(name, sizeof name, file) != NULL && strcmp(name, "refit-step\n") == 0;
    fclose(file);
    return is;
}

uint32_t count_step_threads(const cpu_set_t *set)
{
    uint32_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *it = readdir(tasks); it != NULL; it = readdir(tasks)) {
        cpu_set_t has;
        if (!is_step_thread(it->d_name)) continue;
        if (sched_getaffinity(atoi(it->d_name), sizeof has, &has) != 0) continue;
        count += set == NULL || CPU_EQUAL(&has, set) ? 1 : 0;
    }
    closedir(tasks);
    return count;
}

void await_step_threads(uint32_t count, const cpu_set_t *set)
{
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (count_step_threads(set) != count && rft_now() < deadline)
        sched_yield();
    assert_int_equal(count_step_threads(set), count);
}
