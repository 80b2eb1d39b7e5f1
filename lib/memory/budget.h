/*
 * budget: how much host memory may be taken, from what the machine and its cgroup really have free.
 *
 * Free is the least of MemAvailable and, for the process's cgroup and all above it (v1 and v2), the
 * limit less what is used and cannot be reclaimed: in a container /proc/meminfo shows the machine,
 * only the cgroup knows the limit. Where a limit can be read and its usage cannot, what this
 * process has itself stands in for the usage: less than the truth, but never a limit that is passed
 * over. The budget is offload.budget_share of what is free, or offload.budget_bytes, but never more
 * than what is free.
 */
#ifndef RFT_BUDGET_H
#define RFT_BUDGET_H

#include <refit/config.h>

#include "base/error.h"

typedef struct rft_budget {
    uint64_t bytes;      /* what may be taken */
    uint64_t free_bytes; /* what is free, before the share; UINT64_MAX if nothing told */
    const char *source;  /* what bounds it: "offload.budget_bytes", "MemAvailable" or "cgroup memory
                            limit" (constants) */
} rft_budget;

/* What is free alone: `bytes` is 0, and `source` NULL if nothing told. `root` as below. Any thread.
 */
void rft_budget_free(const char *root, rft_budget *out);

/* `root` is where proc and sys/fs/cgroup are looked for: "" in life, a folder of made-up files in
 * tests. `own` bytes of what is used are the asker's and count as free: it would give them back
 * first. `claimed` bytes of what is free are other processes' and count as used: they are about to
 * touch them. REFIT_ERR_SYSTEM if nothing can be read and no offload.budget_bytes is set. Any
 * thread. */
refit_status rft_budget_read(const char *root, const refit_config *config, uint64_t own,
                             uint64_t claimed, rft_budget *out, refit_error *error);

#endif
