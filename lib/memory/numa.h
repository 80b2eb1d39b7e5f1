/*
 * numa: which node the host image is placed on. By system call, without libnuma; where the kernel
 * or a container's filter refuses, the memory lies wherever the kernel puts it, and the answer says
 * so.
 */
#ifndef RFT_NUMA_H
#define RFT_NUMA_H

#include <stdint.h>

#include <refit/config.h>

#include "base/error.h"

/* What `wanted` (offload.numa) comes to for `bytes` on a device close to `device_node` (-1: none):
 * a node, REFIT_NUMA_INTERLEAVE or REFIT_NUMA_OFF. `root` is where sys/devices is looked for: "" in
 * life. */
int rft_numa_choose(const char *root, int wanted, int device_node, uint64_t bytes);

/* Places whole pages that nobody has touched yet on `choice`; a full node overflows to others (a
 * strict binding would call the kernel's OOM killer instead). Writes what came of it: `choice`, or
 * REFIT_NUMA_OFF, with a line in the log. REFIT_ERR_CONFIG for a node that this process may not
 * use.
 */
refit_status rft_numa_place(void *base, uint64_t bytes, int choice, int *placed,
                            refit_error *error);

#endif
