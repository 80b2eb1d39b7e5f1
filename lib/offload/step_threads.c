/*
 * A thread of the pool binds itself as it starts, to those CPUs of the node that it may use: it has
 * inherited the affinity of the thread that opened the host step.
 *
 * It is not bound where it would be slower: where there is one node, where no node holds more than
 * half of the states, and where more threads are asked for than the node has CPUs.
 *
 * Independent of: what is computed.
 */
#include "offload/step_threads.h"

#include "base/checked.h"
#include "base/log.h"
#include "memory/cpu_share.h"

static const rft_pool_kind threads_are = {"refit-step", "steps on the CPU"};

static void bind_thread(void *user)
{
    rft_step_threads *threads = user;
    if (rft_numa_go(threads->root, threads->node)) return;
    if (atomic_exchange(&threads->has_said, true)) return;
    rft_log(REFIT_LOG_WARNING,
            "threads that step on the CPU cannot be bound to NUMA node %d, which holds the states: "
            "they compute on any CPU; in a container allow sched_setaffinity, or set "
            "offload.host_step_bind: none",
            threads->node);
}

/* The node for `helpers` threads beside the caller's, or -1. */
static int choose_node(const rft_step_threads *threads, const rft_numa_votes *votes,
                       uint32_t helpers)
{
    int node = rft_numa_elected(votes);
    if (node < 0) {
        rft_log(REFIT_LOG_INFO, "no NUMA node holds most of the states: threads that step on the "
                                "CPU compute on any CPU");
        return -1;
    }
    uint32_t cpus = rft_numa_cpus(threads->root, node);
    if (cpus >= helpers) return node;
    rft_log(REFIT_LOG_WARNING,
            "NUMA node %d holds the states and has %u CPUs that this process may use: %u threads "
            "that step on the CPU compute on any CPU",
            node, cpus, helpers + 1);
    return -1;
}

/* 0: as many as this rank is to have, and the node has; where the process may not use its CPUs, the
 * threads compute elsewhere. */
static uint32_t count_threads(const refit_config *config, const rft_numa_votes *votes, bool binds,
                              const char *root)
{
    uint32_t count = config->offload_host_step_threads;
    if (count != 0) return count;
    count = rft_cpu_share(root);
    if (!binds) return count;
    uint32_t cpus = rft_numa_cpus(root, rft_numa_elected(votes));
    return cpus == 0 ? count : (uint32_t)rft_min_u64(count, cpus);
}

refit_status rft_step_threads_open(rft_step_threads *threads, const refit_config *config,
                                   const rft_numa_votes *votes, const char *root,
                                   refit_error *error)
{
    bool binds =
        config->offload_host_step_bind == REFIT_HOST_STEP_BIND_NODE && rft_numa_has_several(root);
    uint32_t count = count_threads(config, votes, binds, root);
    RFT_TRY(rft_pool_open(&threads->pool, &threads_are, count, error));
    threads->root = root;
    atomic_init(&threads->has_said, false);
    count = threads->pool.threads;
    threads->node = binds && count > 1 ? choose_node(threads, votes, count - 1) : -1;
    rft_pool_start(&threads->pool, threads->node < 0 ? NULL : bind_thread, threads);
    return REFIT_OK;
}

void rft_step_threads_close(rft_step_threads *threads)
{
    rft_pool_close(&threads->pool);
}
