/*
 * budget: how much host memory may be taken, from what the machine and its cgroup really have free.
 *
 * The least of MemAvailable and, for the process's cgroup and all above it (v1 and v2), the limit
 * less what is used and cannot be reclaimed; times offload.budget_share. Containers lie in
 * /proc/meminfo: the cgroup tells the truth there. Also counts the process's RLIMIT_MEMLOCK for
 * messages.
 */
#ifndef RFT_BUDGET_H
#define RFT_BUDGET_H

#include <refit/config.h>

#include "base/error.h"

typedef struct rft_budget {
    uint64_t bytes;      /* what may be taken */
    uint64_t free_bytes; /* what is free, before the share */
    const char
        *source; /* "offload.budget_bytes", "MemAvailable", "cgroup memory limit" (constants) */
} rft_budget;

/* `root` is where proc and sys/fs/cgroup are looked for: "" in life, a folder of made-up files in
 * tests. */
refit_status rft_budget_read(const char *root, const refit_config *config, rft_budget *out,
                             refit_error *error);

#endif
