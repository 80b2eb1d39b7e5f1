/*
 * step_threads: the threads of a host step, how many they are and on which CPUs they compute.
 *
 * A step reads and writes each state once, so its speed is that of the memory, and memory of
 * another node is slower. So the threads go to the node that holds most of the states
 * (offload.host_step_bind). The thread that calls refit_host_step_run computes too: it is the
 * caller's, and stays where it is.
 */
#ifndef RFT_STEP_THREADS_H
#define RFT_STEP_THREADS_H

#include <stdatomic.h>

#include <refit/config.h>

#include "base/pool.h"
#include "memory/numa.h"

typedef struct rft_step_threads {
    rft_pool pool;
    const char *root;     /* borrowed */
    int node;             /* that the threads go to, or -1 */
    atomic_bool has_said; /* that one could not go */
} rft_step_threads;

/* Starts them. `votes`: where the states lie. offload.host_step_threads: 0 is this rank's share of
 * the CPUs, and no more than the node has that this process may use. Threads that cannot be started
 * or bound are a line in the log. `root`: "" in life, a folder of made-up files in tests; borrowed
 * until close. REFIT_ERR_SYSTEM. */
refit_status rft_step_threads_open(rft_step_threads *threads, const refit_config *config,
                                   const rft_numa_votes *votes, const char *root,
                                   refit_error *error);

/* Nothing is being computed. {0} is allowed. */
void rft_step_threads_close(rft_step_threads *threads);

#endif
