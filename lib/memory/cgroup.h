/*
 * cgroup: the levels of the control groups that bound this process, from its own up to the root.
 *
 * A container often does not see the path that /proc/self/cgroup names: its own group is then the
 * root of what is mounted, and the walk up ends there.
 */
#ifndef RFT_CGROUP_H
#define RFT_CGROUP_H

#include <stdbool.h>
#include <stddef.h>

/* One level of one hierarchy. */
typedef struct rft_cgroup_level {
    const char *root; /* where proc and sys/fs/cgroup are looked for: "" in life */
    const char *mount;
    const char *path; /* "" for the root of the hierarchy, "/a/b" */
} rft_cgroup_level;

/* Visits the levels of the hierarchy that is mounted at `mount`; `controller` as /proc/self/cgroup
 * lists it, "" for v2, which lists none. */
typedef void (*rft_cgroup_visit)(const rft_cgroup_level *level, void *user);
void rft_cgroup_each(const char *root, const char *mount, const char *controller,
                     rft_cgroup_visit visit, void *user);

/* Reads the file `name` of a level into RFT_PROCFILE_ROOM bytes. False if it cannot be read. */
bool rft_cgroup_read(const rft_cgroup_level *level, const char *name, char *text);

/* The same for the file `name` below `root`. */
bool rft_cgroup_read_below(const char *root, const char *name, char *text);

#endif
