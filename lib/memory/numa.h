/*
 * numa: which node the host image is placed on. By system call, without libnuma; where the kernel
 * or a container's filter refuses, the answer says so, and the threads that touch the memory can go
 * to the node instead.
 */
#ifndef RFT_NUMA_H
#define RFT_NUMA_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/config.h>

#include "base/error.h"

/* Resolves `wanted` (offload.numa) for `bytes` on a device close to `device_node` (-1: none): to a
 * node, REFIT_NUMA_INTERLEAVE or REFIT_NUMA_OFF. `root` is where sys/devices and proc are looked
 * for: "" in life. */
int rft_numa_choose(const char *root, int wanted, int device_node, uint64_t bytes);

/* Places whole pages that were not touched yet on `choice`; a full node overflows to others (a
 * strict binding would call the kernel's OOM killer instead). REFIT_NUMA_INTERLEAVE takes the nodes
 * that have CPUs: the others are memory of GPUs, or slow. Writes what came of it: `choice`, or
 * REFIT_NUMA_OFF, with a line in the log. REFIT_ERR_CONFIG for a node that this process may not
 * use.
 */
refit_status rft_numa_place(void *base, uint64_t bytes, int choice, int *placed,
                            refit_error *error);

/* Moves the calling thread to those CPUs of `node` that it may use; what it touches from now on
 * lies there. False if there is none. `root` as above. */
bool rft_numa_go(const char *root, int node);

#endif
