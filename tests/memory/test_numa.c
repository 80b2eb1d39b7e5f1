/* NUMA: which node is chosen, what the kernel is asked for, and what it refuses. */
#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "memory/numa.h"
#include "memory/procfile.h"
#include "tests/support/file_tree.h"
#include "tests/support/test.h"

#define WORDS 16 /* of a set of 1024 nodes */

/* ---- A kernel with nodes 0, 1 and 70, and what it was asked for */

typedef struct placement {
    void *base;
    unsigned long bytes;
    unsigned long mode;
    unsigned long nodes[WORDS];
    unsigned long bits;
    int calls;
} placement;

static bool made_up; /* else the machine's own kernel answers */
static const char *has_cpu;
static int allowed_fails; /* errno of get_mempolicy; 0: it answers */
static int mbind_fails;
static placement asked;

bool __real_rft_procfile_read(const char *path, char *text, size_t room);
bool __wrap_rft_procfile_read(const char *path, char *text, size_t room);

bool __wrap_rft_procfile_read(const char *path, char *text, size_t room)
{
    if (!made_up) return __real_rft_procfile_read(path, text, room);
    assert_string_equal(path, "/sys/devices/system/node/has_cpu");
    if (has_cpu == NULL) return false;
    (void)snprintf(text, room, "%s", has_cpu);
    return true;
}

static long fail_with(int code)
{
    if (code == 0) return 0;
    errno = code;
    return -1;
}

/* Of a page: its node is what lies there. */
static long tell_node(int *node, const unsigned char *address)
{
    if (*address == 255) return fail_with(EPERM);
    *node = *address;
    return 0;
}

static long tell_nodes(unsigned long *nodes, unsigned long bits, unsigned long flags)
{
    assert_int_equal(flags, MPOL_F_MEMS_ALLOWED);
    assert_int_equal(bits, 1024);
    memset(nodes, 0, WORDS * sizeof *nodes);
    nodes[0] = 3;
    nodes[1] = 1UL << 6;
    return fail_with(allowed_fails);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

long __wrap_syscall(long number, ...)
{
    unsigned long arguments[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        arguments[i] = va_arg(list, unsigned long);
    va_end(list);
    if (made_up && number == SYS_get_mempolicy && arguments[4] == (MPOL_F_NODE | MPOL_F_ADDR)) {
        return tell_node((int *)arguments[0], (const unsigned char *)arguments[3]);
    }
    if (made_up && number == SYS_get_mempolicy) {
        return tell_nodes((unsigned long *)arguments[1], arguments[2], arguments[4]);
    }
    if (made_up && number == SYS_mbind) {
        asked.base = (void *)arguments[0];
        asked.bytes = arguments[1];
        asked.mode = arguments[2];
        memcpy(asked.nodes, (void *)arguments[3], sizeof asked.nodes);
        asked.bits = arguments[4];
        asked.calls++;
        return fail_with(mbind_fails);
    }
    return __real_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3],
                          arguments[4], arguments[5]);
}

static int make_kernel(void **state)
{
    made_up = true;
    has_cpu = NULL;
    allowed_fails = mbind_fails = 0;
    asked = (placement){0};
    return 0;
}

static int leave_kernel(void **state)
{
    made_up = false;
    return 0;
}

#define KERNEL_TEST(name) TEST_WITH(name, make_kernel, leave_kernel)

static char page[64];

/* `first`, `second`: the words of the nodes that are expected. */
static void assert_asked(unsigned long mode, unsigned long first, unsigned long second)
{
    assert_int_equal(asked.calls, 1);
    assert_ptr_equal(asked.base, page);
    assert_int_equal(asked.bytes, sizeof page);
    assert_int_equal(asked.mode, mode);
    assert_int_equal(asked.nodes[0], first);
    assert_int_equal(asked.nodes[1], second);
    for (int i = 2; i < WORDS; i++)
        assert_int_equal(asked.nodes[i], 0);
    assert_int_equal(asked.bits, 1025); /* the kernel counts one bit less than it is told */
}

KERNEL_TEST(a_node_that_is_named_is_preferred)
{
    int placed = 77;
    assert_ok(rft_numa_place(page, sizeof page, 1, &placed, NULL));
    assert_int_equal(placed, 1);
    assert_asked(MPOL_PREFERRED, 2, 0);
    asked.calls = 0;
    assert_ok(rft_numa_place(page, sizeof page, 70, &placed, NULL));
    assert_int_equal(placed, 70);
    assert_asked(MPOL_PREFERRED, 0, 1UL << 6);
}

KERNEL_TEST(memory_is_interleaved_over_the_nodes_with_cpus)
{
    static const struct {
        const char *has_cpu;
        unsigned long first, second;
    } rows[] = {{NULL, 3, 1UL << 6}, {"0-1\n", 3, 0}, {"1\n", 2, 0}, {"5\n", 3, 1UL << 6}};
    for (int i = 0; i < 4; i++) {
        int placed = 77;
        asked.calls = 0;
        has_cpu = rows[i].has_cpu;
        assert_ok(rft_numa_place(page, sizeof page, REFIT_NUMA_INTERLEAVE, &placed, NULL));
        assert_int_equal(placed, REFIT_NUMA_INTERLEAVE);
        assert_asked(MPOL_INTERLEAVE, rows[i].first, rows[i].second);
    }
}

KERNEL_TEST(a_kernel_that_does_not_place_is_no_error)
{
    for (int i = 0; i < 2; i++) {
        int placed = 77;
        allowed_fails = i == 0 ? ENOSYS : 0;
        mbind_fails = i == 1 ? EPERM : 0;
        assert_ok(rft_numa_place(page, sizeof page, 1, &placed, NULL));
        assert_int_equal(placed, REFIT_NUMA_OFF);
        assert_int_equal(asked.calls, i);
    }
    asked.calls = 0;
    allowed_fails = mbind_fails = 0;
    int placed = 77;
    assert_ok(rft_numa_place(page, sizeof page, REFIT_NUMA_OFF, &placed, NULL));
    assert_int_equal(placed, REFIT_NUMA_OFF);
    assert_int_equal(asked.calls, 0);
}

KERNEL_TEST(a_node_that_may_not_be_used_is_refused)
{
    const int nodes[] = {2, 64, 1000, 1024, 1 << 30};
    for (size_t i = 0; i < COUNT_OF(nodes); i++) {
        int placed;
        refit_error error;
        assert_int_equal(rft_numa_place(page, sizeof page, nodes[i], &placed, &error),
                         REFIT_ERR_CONFIG);
        assert_non_null(strstr(error.text, "set offload.numa"));
        assert_int_equal(placed, REFIT_NUMA_OFF);
        assert_int_equal(asked.calls, 0);
    }
}

KERNEL_TEST(the_node_of_more_than_half_the_pages_is_elected)
{
    static const struct {
        unsigned char pages[7]; /* 255: the kernel refuses */
        int elected;
    } rows[] = {{{1, 1, 1, 1, 0, 0, 0}, 1},        {{0, 1, 0, 1, 0, 1, 2}, -1},
                {{3, 1, 3, 1, 3, 1, 3}, 3},        {{1, 1, 1, 255, 255, 255, 255}, -1},
                {{255, 255, 255, 2, 2, 2, 2}, 2},  {{255, 255, 255, 255, 255, 255, 255}, -1},
                {{70, 70, 70, 70, 70, 70, 70}, 70}};
    for (size_t row = 0; row < COUNT_OF(rows); row++) {
        rft_numa_votes votes = {0};
        assert_int_equal(rft_numa_elected(&votes), -1);
        for (int i = 0; i < 7; i++)
            rft_numa_vote(&votes, &rows[row].pages[i]);
        assert_int_equal(votes.count, 7);
        assert_int_equal(rft_numa_elected(&votes), rows[row].elected);
    }
    rft_numa_votes votes = {0};
    for (uint32_t i = 0; i < RFT_NUMA_VOTES + 9; i++)
        rft_numa_vote(&votes, &rows[6].pages[0]);
    assert_int_equal(votes.count, RFT_NUMA_VOTES);
    assert_int_equal(rft_numa_elected(&votes), 70);
}

/* ---- Which node, on made-up machines */

static file_tree tree;

static int open_tree(void **state)
{
    tree = file_tree_open();
    return 0;
}

static int close_tree(void **state)
{
    file_tree_close(&tree);
    return 0;
}

#define TREE_TEST(name) TEST_WITH(name, open_tree, close_tree)

TREE_TEST(nodes_and_their_cpus_are_counted)
{
    char list[32];
    assert_false(rft_numa_has_several(tree.root));
    file_tree_write(&tree, "/sys/devices/system/node/online", "0\n");
    assert_false(rft_numa_has_several(tree.root));
    file_tree_write(&tree, "/sys/devices/system/node/online", "0,2\n");
    assert_true(rft_numa_has_several(tree.root));
    assert_int_equal(rft_numa_cpus(tree.root, 2), 0); /* nothing known of it */
    assert_int_equal(rft_numa_cpus(tree.root, -1), 0);
    snprintf(list, sizeof list, "%d,8000-8191\n", sched_getcpu());
    file_tree_write(&tree, "/sys/devices/system/node/node2/cpulist", list);
    assert_int_equal(rft_numa_cpus(tree.root, 2), 1); /* the others, it may not use */
}

TREE_TEST(automatic_node_is_the_device_s_while_it_has_room)
{
    file_tree_write(&tree, "/sys/devices/system/node/node1/meminfo",
                    "Node 1 MemTotal:       9999999 kB\nNode 1 MemFree:        1024 kB\n"
                    "Node 1 Inactive(file): 1024 kB\n");
    assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_AUTO, 1, 2 * MIB), 1);
    assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_AUTO, 1, 2 * MIB + 1),
                     REFIT_NUMA_INTERLEAVE);
    assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_AUTO, -1, 1), REFIT_NUMA_OFF);
    assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_AUTO, 0, MIB),
                     0); /* nothing known of it */
    assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_OFF, 1, 1), REFIT_NUMA_OFF);
    assert_int_equal(rft_numa_choose(tree.root, 1, 0, UINT64_MAX), 1);
}

/* A container may be kept from the node that its GPU is on. */
TREE_TEST(automatic_node_is_one_that_the_process_may_use)
{
    static const char *const lists[] = {"0", "0,2-3", "1", "0-1", "0,1,5"};
    for (int i = 0; i < 5; i++) {
        char status[128];
        snprintf(status, sizeof status,
                 "Name:\tx\nMems_allowed:\t00000003\nMems_allowed_list:\t%s\nswitches:\t1,1-1\n",
                 lists[i]);
        file_tree_write(&tree, "/proc/self/status", status);
        int expected = i < 2 ? REFIT_NUMA_OFF : 1;
        assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_AUTO, 1, 1), expected);
        assert_int_equal(rft_numa_choose(tree.root, 1, 0, 1), 1); /* an order is an order */
    }
    file_tree_write(&tree, "/proc/self/status", "Name:\tx\n");
    assert_int_equal(rft_numa_choose(tree.root, REFIT_NUMA_AUTO, 1, 1), 1);
}

TREE_TEST(a_thread_goes_to_the_cpus_of_a_node_that_it_may_use)
{
    cpu_set_t before, after;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    assert_false(rft_numa_go(tree.root, 3)); /* nothing known of it */
    file_tree_write(&tree, "/sys/devices/system/node/node3/cpulist", "8000-8191\n");
    assert_false(rft_numa_go(tree.root, 3));
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    assert_true(CPU_EQUAL(&before, &after));
    char list[32];
    int own = sched_getcpu();
    snprintf(list, sizeof list, "%d,8000-8191\n", own);
    file_tree_write(&tree, "/sys/devices/system/node/node3/cpulist", list);
    assert_true(rft_numa_go(tree.root, 3));
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    assert_int_equal(CPU_COUNT(&after), 1);
    assert_true(CPU_ISSET((size_t)own, &after));
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

/* Where this machine's kernel refuses placement as such, the answer is "off". */
TEST(placement_is_done_or_said_to_be_off)
{
    char *base = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED);
    const int choices[] = {REFIT_NUMA_OFF, REFIT_NUMA_INTERLEAVE};
    for (size_t i = 0; i < 2; i++) {
        int placed = 77;
        assert_ok(rft_numa_place(base, MIB, choices[i], &placed, NULL));
        assert_true(placed == choices[i] || placed == REFIT_NUMA_OFF);
    }
    memset(base, 1, MIB);
    munmap(base, MIB);
}

int main(void)
{
    return test_run("numa");
}
