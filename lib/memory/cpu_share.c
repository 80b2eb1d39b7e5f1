/*
 * The share of the CPUs. What cannot be read bounds nothing; a LOCAL_WORLD_SIZE that is not a
 * number from 1 on is taken for 1.
 */
#include "memory/cpu_share.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/thread.h"
#include "memory/cgroup.h"
#include "memory/procfile.h"

/* The time that a group may take, in CPUs: "max 100000" and -1 bound nothing. */
static void lower(uint64_t *cpus, const char *quota, const char *period)
{
    uint64_t most, each;
    if (!rft_procfile_number(quota, &most) || !rft_procfile_number(period, &each)) return;
    if (each != 0) *cpus = rft_min_u64(*cpus, most / each);
}

static void bound_v2(const rft_cgroup_level *level, void *user)
{
    char text[RFT_PROCFILE_ROOM];
    if (!rft_cgroup_read(level, "cpu.max", text)) return;
    lower(user, text, text + strcspn(text, " "));
}

static void bound_v1(const rft_cgroup_level *level, void *user)
{
    char quota[RFT_PROCFILE_ROOM], period[RFT_PROCFILE_ROOM];
    if (!rft_cgroup_read(level, "cpu.cfs_quota_us", quota)) return;
    if (!rft_cgroup_read(level, "cpu.cfs_period_us", period)) return;
    lower(user, quota, period);
}

/* The CPUs of a cgroup; the level that is visited first is the process's own. */
static void count_set(const rft_cgroup_level *level, void *user)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t *cpus = user;
    if (*cpus == 0 && (rft_cgroup_read(level, "cpuset.cpus.effective", text) ||
                       rft_cgroup_read(level, "cpuset.effective_cpus", text))) {
        *cpus = rft_procfile_count(text);
    }
}

/* Of the cgroup, else of the machine; 0: not to be read. */
static uint64_t count_shared(const char *root)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t cpus = 0;
    rft_cgroup_each(root, "/sys/fs/cgroup", "", count_set, &cpus);
    rft_cgroup_each(root, "/sys/fs/cgroup/cpuset", "cpuset", count_set, &cpus);
    if (cpus == 0 && rft_cgroup_read_below(root, "/sys/devices/system/cpu/online", text)) {
        cpus = rft_procfile_count(text);
    }
    return cpus;
}

static uint64_t count_ranks(void)
{
    const char *text = getenv("LOCAL_WORLD_SIZE");
    uint64_t ranks;
    if (text == NULL || !rft_procfile_number(text, &ranks) || ranks == 0) return 1;
    return ranks;
}

uint32_t rft_cpu_share(const char *root)
{
    uint64_t own = rft_cpu_count();
    uint64_t shared = rft_max_u64(count_shared(root), own);
    rft_cgroup_each(root, "/sys/fs/cgroup", "", bound_v2, &shared);
    rft_cgroup_each(root, "/sys/fs/cgroup/unified", "", bound_v2, &shared);
    rft_cgroup_each(root, "/sys/fs/cgroup/cpu", "cpu", bound_v1, &shared);
    uint64_t share = rft_min_u64(shared / count_ranks(), own);
    return share == 0 ? 1 : (uint32_t)share;
}
