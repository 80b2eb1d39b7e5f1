/*
 * The host memory that is really free.
 *
 * Each place that knows a bound is asked (meminfo, and every visible level of the cgroup
 * hierarchies from the process's own up to the root); the least wins. A file that is missing bounds
 * nothing.
 */
#include "memory/budget.h"

#include "base/checked.h"
#include "memory/cgroup.h"
#include "memory/procfile.h"

/* One flavour of the memory controller: where it is mounted and what its files are called. */
typedef struct cgroup_kind {
    const char *controller; /* as /proc/self/cgroup lists it; v2 lists none */
    const char *mount;
    const char *limits[2];
    const char *used;
    const char *reclaimable; /* the key in memory.stat */
} cgroup_kind;

static const cgroup_kind kinds[] = {
    {"memory",
     "/sys/fs/cgroup/memory",
     {"memory.limit_in_bytes", NULL},
     "memory.usage_in_bytes",
     "total_inactive_file"},
    {"", "/sys/fs/cgroup", {"memory.max", "memory.high"}, "memory.current", "inactive_file"},
    {"",
     "/sys/fs/cgroup/unified",
     {"memory.max", "memory.high"},
     "memory.current",
     "inactive_file"},
};

static void lower_bound(rft_budget *budget, uint64_t free_bytes, const char *source)
{
    if (budget->source != NULL && budget->free_bytes <= free_bytes) return;
    budget->free_bytes = free_bytes;
    budget->source = source;
}

static bool read_limit(const rft_cgroup_level *level, const cgroup_kind *kind, uint64_t *out)
{
    char text[RFT_PROCFILE_ROOM];
    bool limited = false;
    for (size_t i = 0; i < 2 && kind->limits[i] != NULL; i++) {
        uint64_t limit;
        if (!rft_cgroup_read(level, kind->limits[i], text) || !rft_procfile_number(text, &limit)) {
            continue;
        }
        *out = limited ? rft_min_u64(*out, limit) : limit;
        limited = true;
    }
    return limited;
}

/* Kernel files count in KiB. */
static uint64_t from_kib(uint64_t kib)
{
    return kib > UINT64_MAX / 1024 ? UINT64_MAX : kib * 1024;
}

/* Memory of this process that no file on a disk has: a host arena is shared memory. */
static uint64_t read_resident(const char *root)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t kib, shared = 0;
    bool found = rft_cgroup_read_below(root, "/proc/self/status", text) &&
                 rft_procfile_find(text, "RssAnon", &kib);
    if (!found) return 0;
    (void)rft_procfile_find(text, "RssShmem", &shared);
    return from_kib(kib > UINT64_MAX - shared ? UINT64_MAX : kib + shared);
}

/* What is used and cannot be reclaimed. */
static uint64_t read_used(const rft_cgroup_level *level, const cgroup_kind *kind)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t used, reclaimable = 0;
    if (!rft_cgroup_read(level, kind->used, text) || !rft_procfile_number(text, &used)) {
        return read_resident(level->root);
    }
    if (rft_cgroup_read(level, "memory.stat", text)) {
        (void)rft_procfile_find(text, kind->reclaimable, &reclaimable);
    }
    return used - rft_min_u64(used, reclaimable);
}

/* A budget on its way down the levels of one kind. */
typedef struct bounding {
    rft_budget *budget;
    const cgroup_kind *kind;
} bounding;

static void bound_by_level(const rft_cgroup_level *level, void *user)
{
    const bounding *it = user;
    uint64_t limit;
    if (!read_limit(level, it->kind, &limit)) return;
    uint64_t used = read_used(level, it->kind);
    lower_bound(it->budget, limit - rft_min_u64(limit, used), "cgroup memory limit");
}

static void bound_by_machine(rft_budget *budget, const char *root)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t kib;
    if (!rft_cgroup_read_below(root, "/proc/meminfo", text) ||
        !rft_procfile_find(text, "MemAvailable", &kib)) {
        return;
    }
    lower_bound(budget, from_kib(kib), "MemAvailable");
}

static void bound_by_cgroups(rft_budget *budget, const char *root)
{
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        bounding it = {budget, &kinds[i]};
        rft_cgroup_each(root, kinds[i].mount, kinds[i].controller, bound_by_level, &it);
    }
}

void rft_budget_free(const char *root, rft_budget *out)
{
    *out = (rft_budget){0, UINT64_MAX, NULL};
    bound_by_machine(out, root);
    bound_by_cgroups(out, root);
}

refit_status rft_budget_read(const char *root, const refit_config *config, uint64_t own,
                             uint64_t claimed, rft_budget *out, refit_error *error)
{
    rft_budget budget;
    rft_budget_free(root, &budget);
    if (!rft_add_u64(budget.free_bytes, own, &budget.free_bytes)) budget.free_bytes = UINT64_MAX;
    if (budget.source != NULL) budget.free_bytes -= rft_min_u64(claimed, budget.free_bytes);
    uint64_t wanted = config->offload_budget_bytes;
    RFT_REFUSE_IF(budget.source == NULL && wanted == 0, error, REFIT_ERR_SYSTEM,
                  "neither /proc/meminfo nor a cgroup tells how much memory is free: set "
                  "offload.budget_bytes");
    if (wanted != 0 && wanted <= budget.free_bytes) {
        budget.bytes = wanted;
        budget.source = "offload.budget_bytes";
    } else if (wanted != 0) {
        budget.bytes = budget.free_bytes;
    } else {
        double share = (double)budget.free_bytes * config->offload_budget_share;
        budget.bytes = share < (double)budget.free_bytes ? (uint64_t)share : budget.free_bytes;
    }
    *out = budget;
    return REFIT_OK;
}
