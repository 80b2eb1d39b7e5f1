/*
 * The host memory that is really free.
 *
 * Each place that knows a bound is asked (meminfo, and every visible level of the cgroup
 * hierarchies from the process's own up to the root); the least wins. A container often does not
 * see the path that /proc/self/cgroup names: its own cgroup is then the root of what is mounted,
 * and the walk up ends there. A file that is missing bounds nothing.
 */
#include "memory/budget.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "memory/procfile.h"

#define PATH_ROOM 4608 /* a cgroup path has at most 4096 bytes */

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

/* One level of one hierarchy. */
typedef struct cgroup_level {
    const char *root;
    const char *mount;
    const char *path;
} cgroup_level;

static void lower_bound(rft_budget *budget, uint64_t free_bytes, const char *source)
{
    if (budget->source != NULL && budget->free_bytes <= free_bytes) return;
    budget->free_bytes = free_bytes;
    budget->source = source;
}

static bool read_level(const cgroup_level *level, const char *name, char *text)
{
    char file[PATH_ROOM];
    int length =
        snprintf(file, sizeof file, "%s%s%s/%s", level->root, level->mount, level->path, name);
    return length > 0 && (size_t)length < sizeof file &&
           rft_procfile_read(file, text, RFT_PROCFILE_ROOM);
}

static bool read_limit(const cgroup_level *level, const cgroup_kind *kind, uint64_t *out)
{
    char text[RFT_PROCFILE_ROOM];
    bool limited = false;
    for (size_t i = 0; i < 2 && kind->limits[i] != NULL; i++) {
        uint64_t limit;
        if (!read_level(level, kind->limits[i], text) || !rft_procfile_number(text, &limit)) {
            continue;
        }
        *out = limited ? rft_min_u64(*out, limit) : limit;
        limited = true;
    }
    return limited;
}

static bool read_file(const char *root, const char *name, char *text)
{
    char file[PATH_ROOM];
    int length = snprintf(file, sizeof file, "%s%s", root, name);
    return length > 0 && (size_t)length < sizeof file &&
           rft_procfile_read(file, text, RFT_PROCFILE_ROOM);
}

/* Kernel files count in KiB. */
static uint64_t from_kib(uint64_t kib)
{
    return kib > UINT64_MAX / 1024 ? UINT64_MAX : kib * 1024;
}

/* Memory of this process that belongs to no file. */
static uint64_t read_resident(const char *root)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t kib;
    bool found =
        read_file(root, "/proc/self/status", text) && rft_procfile_find(text, "RssAnon", &kib);
    return found ? from_kib(kib) : 0;
}

/* What is used and cannot be reclaimed. */
static uint64_t read_used(const cgroup_level *level, const cgroup_kind *kind)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t used, reclaimable = 0;
    if (!read_level(level, kind->used, text) || !rft_procfile_number(text, &used)) {
        return read_resident(level->root);
    }
    if (read_level(level, "memory.stat", text)) {
        (void)rft_procfile_find(text, kind->reclaimable, &reclaimable);
    }
    return used - rft_min_u64(used, reclaimable);
}

static void bound_by_level(rft_budget *budget, const cgroup_level *level, const cgroup_kind *kind)
{
    uint64_t limit;
    if (!read_limit(level, kind, &limit)) return;
    uint64_t used = read_used(level, kind);
    lower_bound(budget, limit - rft_min_u64(limit, used), "cgroup memory limit");
}

static bool lists_controller(const char *list, size_t length, const char *controller)
{
    size_t wanted = strlen(controller);
    if (wanted == 0) return length == 0;
    for (const char *at = list; at < list + length; at += strcspn(at, ",:") + 1) {
        if (strcspn(at, ",:") == wanted && strncmp(at, controller, wanted) == 0) return true;
    }
    return false;
}

/* Finds the path in the line "4:memory:/a/b" or "0::/a/b"; "" if there is none, and for "/". */
static void find_path(const char *text, const char *controller, char *path, size_t room)
{
    path[0] = '\0';
    for (const char *line = text; *line != '\0'; line += strspn(line, "\n")) {
        size_t end = strcspn(line, "\n");
        const char *list = memchr(line, ':', end);
        const char *found =
            list == NULL ? NULL : memchr(list + 1, ':', end - (size_t)(list + 1 - line));
        line += end;
        if (found == NULL) continue;
        size_t length = (size_t)(line - (found + 1));
        if (!lists_controller(list + 1, (size_t)(found - list - 1), controller)) continue;
        if (length >= room || length < 2) return;
        memcpy(path, found + 1, length);
        path[length] = '\0';
        return;
    }
}

static void bound_by_hierarchy(rft_budget *budget, const char *root, const char *cgroups,
                               const cgroup_kind *kind)
{
    char path[PATH_ROOM];
    find_path(cgroups, kind->controller, path, sizeof path);
    const cgroup_level level = {root, kind->mount, path};
    for (;;) {
        bound_by_level(budget, &level, kind);
        char *slash = strrchr(path, '/');
        if (slash == NULL) return;
        *slash = '\0';
    }
}

static void bound_by_machine(rft_budget *budget, const char *root)
{
    char text[RFT_PROCFILE_ROOM];
    uint64_t kib;
    if (!read_file(root, "/proc/meminfo", text) || !rft_procfile_find(text, "MemAvailable", &kib)) {
        return;
    }
    lower_bound(budget, from_kib(kib), "MemAvailable");
}

static void bound_by_cgroups(rft_budget *budget, const char *root)
{
    char text[RFT_PROCFILE_ROOM];
    if (!read_file(root, "/proc/self/cgroup", text)) text[0] = '\0';
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        bound_by_hierarchy(budget, root, text, &kinds[i]);
    }
}

void rft_budget_free(const char *root, rft_budget *out)
{
    *out = (rft_budget){0, UINT64_MAX, NULL};
    bound_by_machine(out, root);
    bound_by_cgroups(out, root);
}

refit_status rft_budget_read(const char *root, const refit_config *config, uint64_t own,
                             rft_budget *out, refit_error *error)
{
    rft_budget budget;
    rft_budget_free(root, &budget);
    if (!rft_add_u64(budget.free_bytes, own, &budget.free_bytes)) budget.free_bytes = UINT64_MAX;
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
