/*
 * numa: which node the host image is placed on, and which one holds memory that is there. By system
 * call, without libnuma; where the kernel or a container's filter refuses, the answer says so, and
 * the threads that touch the memory can go to the node instead.
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

/* Do online nodes number more than one? What cannot be read is one node. `root` as above. */
bool rft_numa_has_several(const char *root);

/* The CPUs of `node` that the calling thread may use; 0 for -1. `root` as above. */
uint32_t rft_numa_cpus(const char *root, int node);

/* Pages of some memory, and the nodes that hold them: {0} at first. */
#define RFT_NUMA_VOTES 256u
typedef struct rft_numa_votes {
    uint32_t count; /* of pages that were asked for */
    uint32_t known; /* of these, those whose node the kernel told */
    int nodes[RFT_NUMA_VOTES];
} rft_numa_votes;

/* Asks for the page at `address`, which was written to; nothing beyond RFT_NUMA_VOTES. */
void rft_numa_vote(rft_numa_votes *votes, const void *address);

/* The node that holds more than half of the pages that were asked for, or -1. */
int rft_numa_elected(const rft_numa_votes *votes);

/* Moves the calling thread to those CPUs of `node` that it may use; what it touches from now on
 * lies there. False if there is none. `root` as above. */
bool rft_numa_go(const char *root, int node);

#endif
