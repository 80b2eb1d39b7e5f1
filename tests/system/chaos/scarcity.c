/* A worker's process for which the system has no more memory, by limits that the conductor sets and
 * takes away. */
#include "run.h"

#include <inttypes.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#define SCARCE_BYTES (UINT64_C(128) << 10) /* that a process may map yet: no version has so few */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LIMITS_ALL false /* a sanitizer takes memory as it likes */
#else
#define LIMITS_ALL true
#endif

/* Shared memory is a file, and private memory is mapped: the system has no more of one, or of
 * either. What the process has it keeps. */
static void limit_memory(pid_t pid, rlim_t file, rlim_t mapped)
{
    struct rlimit limit;
    if (prlimit(pid, RLIMIT_FSIZE, NULL, &limit) != 0) return;
    limit.rlim_cur = file < limit.rlim_max ? file : limit.rlim_max;
    (void)prlimit(pid, RLIMIT_FSIZE, &limit, NULL);
    if (prlimit(pid, RLIMIT_AS, NULL, &limit) != 0) return;
    limit.rlim_cur = mapped < limit.rlim_max ? mapped : limit.rlim_max;
    (void)prlimit(pid, RLIMIT_AS, &limit, NULL);
}

static uint64_t mapped_bytes(pid_t pid)
{
    char path[64];
    uint64_t pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    if (fscanf(file, "%" SCNu64, &pages) != 1) pages = 0;
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

bool scarcity_begin(chaos_run *run, uint32_t at, bool all)
{
    run_worker *one = &run->worker[at];
    if (one->process.pid == 0 || !one->ready || one->scarce) return false;
    run->totals.scarce++;
    one->scarce = all && LIMITS_ALL;
    one->was_scarce = one->was_scarce || one->scarce;
    uint64_t most = mapped_bytes(one->process.pid) + SCARCE_BYTES;
    limit_memory(one->process.pid, 0, one->scarce ? most : RLIM_INFINITY);
    return true;
}

/* What it could not receive it is not offered again. */
void scarcity_end(chaos_run *run, uint32_t at)
{
    run_worker *one = &run->worker[at];
    if (one->scarce) one->lost = run->next;
    one->scarce = false;
    if (one->process.pid != 0) limit_memory(one->process.pid, RLIM_INFINITY, RLIM_INFINITY);
}
