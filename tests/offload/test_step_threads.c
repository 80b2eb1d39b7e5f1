/* The threads of a host step on made-up machines: how many, on which CPUs, and what the log says.
 */
#include "tests/offload/step_tasks.h"

#include <stdatomic.h>
#include <stdio.h>

#include "base/clock.h"
#include "offload/step_threads.h"
#include "tests/offload/offload.h"
#include "tests/support/file_tree.h"

static int cpus[2];         /* that this process may use; the same one twice where there is one */
static atomic_bool refuses; /* the kernel binds no thread */

bool __real_rft_numa_go(const char *root, int node);
bool __wrap_rft_numa_go(const char *root, int node);

bool __wrap_rft_numa_go(const char *root, int node)
{
    return !atomic_load(&refuses) && __real_rft_numa_go(root, node);
}

/* ---- A machine of two nodes with a CPU each, and what the log says of it --------------------- */

typedef struct machine {
    file_tree tree;
    rft_step_threads threads;
    atomic_uint lines;
    char said[512]; /* the last line; read when no thread writes any more */
} machine;

static void keep_line(void *user, refit_log_level level, const char *line)
{
    machine *on = user;
    if (strstr(line, "step on the CPU") == NULL) return;
    snprintf(on->said, sizeof on->said, "%d %s", level == REFIT_LOG_WARNING, line);
    atomic_fetch_add(&on->lines, 1);
}

static void make_machine(machine *on, const char *nodes)
{
    memset(on, 0, sizeof *on);
    on->tree = file_tree_open();
    file_tree_write(&on->tree, "/sys/devices/system/node/online", nodes);
    for (int node = 0; node < 2; node++) {
        char path[64], list[32];
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
        snprintf(list, sizeof list, "%d,8000-8100\n", cpus[node]);
        file_tree_write(&on->tree, path, list);
    }
    refit_set_log(keep_line, on, REFIT_LOG_INFO);
}

/* `node`: which holds the states, or -1: no one alone does. */
static void open_threads(machine *on, const char *count, const char *bind, int node)
{
    refit_config config;
    refit_error error;
    rft_numa_votes votes = {.count = 4, .known = 4, .nodes = {node, node, node, node}};
    if (node < 0) memcpy(votes.nodes, (int[]){0, 1, 0, 1}, 4 * sizeof(int));
    refit_config_init(&config, sizeof config);
    assert_ok(refit_config_set(&config, "offload.host_step_threads", count, &error));
    assert_ok(refit_config_set(&config, "offload.host_step_bind", bind, &error));
    assert_ok(rft_step_threads_open(&on->threads, &config, &votes, on->tree.root, &error));
}

static void close_machine(machine *on)
{
    rft_step_threads_close(&on->threads);
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
    file_tree_close(&on->tree);
}

static cpu_set_t own_set(void)
{
    cpu_set_t set;
    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    return set;
}

static cpu_set_t one_cpu(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    return set;
}

static int find_cpus(void **state)
{
    cpu_set_t set = own_set();
    int found = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++) {
        if (CPU_ISSET((size_t)cpu, &set)) cpus[found++] = cpu;
    }
    if (found == 1) cpus[1] = cpus[0];
    return found == 0;
}

/* ---- What holds ------------------------------------------------------------------------------ */

#define ALL 0u /* as many as this process has CPUs, or 64 */

static const struct {
    const char *nodes, *threads, *bind;
    int node;
    uint32_t pool;
    bool bound; /* the helpers, to the node */
    const char *said;
} rows[] = {
    /* Threads go to the node of the states. */
    {"0-1\n", "2", "node", 0, 2, true, ""},
    {"0-1\n", "2", "node", 1, 2, true, ""},
    /* They stay on one node, without a node that holds most, where it is not wanted, and where
     * there are more threads than the node has CPUs. */
    {"0\n", "3", "node", 0, 3, false, ""},
    {"0-1\n", "3", "none", 1, 3, false, ""},
    {"0-1\n", "3", "node", -1, 3, false, "0 no NUMA node holds most"},
    {"0-1\n", "3", "node", 1, 3, false, "1 NUMA node 1 holds the states and has 1 CPUs"},
    {"0-5\n", "3", "node", 5, 3, false, "1 NUMA node 5 holds the states and has 0 CPUs"},
    {"0-1\n", "1", "node", 1, 1, false, ""},
    /* The share of a rank is bounded by the node that its threads are bound to. */
    {"0-1\n", "0", "node", 1, 1, true, ""},
    {"0-1\n", "0", "node", -1, ALL, false, NULL},
    {"0-1\n", "0", "none", 1, ALL, false, NULL},
    {"0\n", "0", "node", 1, ALL, false, NULL},
    {"0-5\n", "0", "node", 5, ALL, false, NULL},
};

TEST(threads_go_to_the_node_of_the_states)
{
    for (size_t row = 0; row < COUNT_OF(rows); row++) {
        machine on;
        cpu_set_t own = own_set();
        uint32_t all = CPU_COUNT(&own) < 64 ? (uint32_t)CPU_COUNT(&own) : 64;
        uint32_t pool = rows[row].pool == ALL ? all : rows[row].pool;
        const char *said = rows[row].said;
        make_machine(&on, rows[row].nodes);
        open_threads(&on, rows[row].threads, rows[row].bind, rows[row].node);
        if (on.threads.pool.threads != pool) print_error("row %zu\n", row);
        assert_int_equal(on.threads.pool.threads, pool);
        cpu_set_t expected = rows[row].bound ? one_cpu(cpus[rows[row].node]) : own;
        await_step_threads(pool - 1, &expected);
        cpu_set_t after = own_set();
        assert_true(CPU_EQUAL(&own, &after)); /* the caller's thread is the caller's */
        close_machine(&on);
        if (said == NULL) continue;
        if (strncmp(on.said, said, strlen(said)) != 0) print_error("row %zu: %s\n", row, on.said);
        assert_memory_equal(on.said, said, strlen(said));
        assert_int_equal(atomic_load(&on.lines), said[0] != '\0');
    }
}

static void nothing(void *user, uint32_t item, uint32_t worker)
{
    (void)item;
    (void)worker;
    atomic_fetch_add((atomic_uint *)user, 1);
}

/* A thread that cannot be bound computes all the same, and the log says so once. */
TEST(a_thread_that_cannot_be_bound_is_told)
{
    machine on;
    atomic_uint done = 0;
    cpu_set_t expected = own_set();
    make_machine(&on, "0-1\n");
    atomic_store(&refuses, true);
    open_threads(&on, "2", "node", 1);
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (atomic_load(&on.lines) == 0 && rft_now() < deadline)
        sched_yield();
    await_step_threads(1, &expected);
    rft_pool_items(&on.threads.pool, 100, nothing, &done);
    assert_int_equal(atomic_load(&done), 100);
    close_machine(&on);
    atomic_store(&refuses, false);
    assert_int_equal(atomic_load(&on.lines), 1);
    assert_non_null(strstr(on.said, "cannot be bound to NUMA node 1"));
    assert_non_null(strstr(on.said, "offload.host_step_bind"));
}

int main(void)
{
    return test_run_within("step_threads", find_cpus, NULL);
}
