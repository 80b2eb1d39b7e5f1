/* Budget: the least of what machine and cgroups have free, whatever of their files there is. */
#include "memory/budget.h"
#include "memory/procfile.h"
#include "tests/support/file_tree.h"
#include "tests/support/test.h"

static file_tree tree;

static rft_budget read_budget(double share, uint64_t bytes)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.offload_budget_share = share;
    config.offload_budget_bytes = bytes;
    rft_budget budget;
    assert_ok(rft_budget_read(tree.root, &config, 0, 0, &budget, NULL));
    return budget;
}

static int open_empty(void **state)
{
    tree = file_tree_open();
    return 0;
}

static int open_machine(void **state)
{
    tree = file_tree_open();
    file_tree_write(&tree, "/proc/meminfo",
                    "MemTotal:       4194304 kB\nMemFree:         100000 kB\n"
                    "MemAvailable:   2097152 kB\nBuffers: 0 kB\n");
    return 0;
}

static int close_tree(void **state)
{
    file_tree_close(&tree);
    return 0;
}

#define EMPTY(name) TEST_WITH(name, open_empty, close_tree)

#define MACHINE(name) TEST_WITH(name, open_machine, close_tree)

MACHINE(without_cgroups_memavailable_counts)
{
    rft_budget budget = read_budget(0.5, 0);
    assert_int_equal(budget.free_bytes, 2048 * MIB);
    assert_int_equal(budget.bytes, 1024 * MIB);
    assert_string_equal(budget.source, "MemAvailable");
    assert_int_equal(read_budget(1.0, 0).bytes, 2048 * MIB);
}

/* The files of a machine with 2 GiB available, beside /proc/meminfo, and what they leave. */
typedef struct machine_case {
    const char *name;
    uint64_t bytes;
    struct {
        const char *path;
        const char *text;
    } files[6];
} machine_case;

#define CGROUP "/sys/fs/cgroup"

static const machine_case machines[] = {
    {"the limit of cgroup v2 less what cannot be reclaimed",
     640 * MIB,
     {{"/proc/self/cgroup", "0::/user/job\n"},
      {CGROUP "/user/job/memory.max", "1073741824\n"},
      {CGROUP "/user/job/memory.current", "536870912\n"},
      {CGROUP "/user/job/memory.stat",
       "anon 402653184\nfile 134217728\nactive_file 0\ninactive_file 134217728\n"}}},
    {"a level above is the bound",
     100 * MIB,
     {{"/proc/self/cgroup", "0::/pod/job\n"},
      {CGROUP "/pod/job/memory.max", "max\n"},
      {CGROUP "/pod/job/memory.current", "1\n"},
      {CGROUP "/pod/memory.max", "209715200\n"},
      {CGROUP "/pod/memory.current", "104857600\n"}}},
    {"memory.high of a level above is the bound",
     50 * MIB,
     {{"/proc/self/cgroup", "0::/pod/job\n"},
      {CGROUP "/pod/job/memory.max", "max\n"},
      {CGROUP "/pod/job/memory.current", "1\n"},
      {CGROUP "/pod/memory.max", "209715200\n"},
      {CGROUP "/pod/memory.current", "104857600\n"},
      {CGROUP "/pod/memory.high", "157286400\n"}}},
    {"cgroup v1 has names of its own",
     200 * MIB,
     {{"/proc/self/cgroup",
       "12:cpu,cpuacct:/other\n4:hugetlb,memory:/a/b\n1:name=systemd:/x\n0::/\n"},
      {CGROUP "/memory/a/b/memory.limit_in_bytes", "314572800\n"},
      {CGROUP "/memory/a/b/memory.usage_in_bytes", "209715200\n"},
      {CGROUP "/memory/a/b/memory.stat", "inactive_file 5\ntotal_inactive_file 104857600\n"},
      {CGROUP "/memory/memory.limit_in_bytes", "9223372036854771712\n"},
      {CGROUP "/memory/memory.usage_in_bytes", "1\n"}}},
    /* Docker with cgroup v1: the path is the host's, the container sees its own at the root. */
    {"a path that is not visible ends at the root",
     100 * MIB,
     {{"/proc/self/cgroup", "4:memory:/docker/0123456789ab\n"},
      {CGROUP "/memory/memory.limit_in_bytes", "104857600\n"},
      {CGROUP "/memory/memory.usage_in_bytes", "0\n"}}},
    {"a hybrid hierarchy",
     100 * MIB,
     {{"/proc/self/cgroup", "0::/job\n"},
      {CGROUP "/unified/job/memory.max", "104857600"},
      {CGROUP "/unified/job/memory.current", "0"}}},
    {"a full cgroup leaves nothing",
     0,
     {{"/proc/self/cgroup", "0::/\n"},
      {CGROUP "/memory.max", "1000\n"},
      {CGROUP "/memory.current", "2000\n"}}},
    /* A limit whose usage cannot be read holds; what the process has itself is surely used. */
    {"a limit without a usage",
     200 * MIB,
     {{"/proc/self/cgroup", "0::/job\n"}, {CGROUP "/job/memory.max", "209715200\n"}}},
    {"a limit without a usage, less the process's own",
     150 * MIB,
     {{"/proc/self/cgroup", "0::/job\n"},
      {CGROUP "/job/memory.max", "209715200\n"},
      {"/proc/self/status", "Name:\tx\nVmRSS:\t 99999 kB\nRssAnon:\t 51200 kB\n"}}},
    {"a limit without a usage, less the process's own, of which the arena is shared memory",
     100 * MIB,
     {{"/proc/self/cgroup", "0::/job\n"},
      {CGROUP "/job/memory.max", "209715200\n"},
      {"/proc/self/status", "VmRSS:\t 99999 kB\nRssAnon:\t 51200 kB\nRssShmem:\t 51200 kB\n"}}},
    {"a usage that is not a number",
     150 * MIB,
     {{"/proc/self/cgroup", "0::/job\n"},
      {CGROUP "/job/memory.max", "209715200\n"},
      {"/proc/self/status", "Name:\tx\nVmRSS:\t 99999 kB\nRssAnon:\t 51200 kB\n"},
      {CGROUP "/job/memory.current", "not a number\n"}}},
    {"a usage beside the process's own",
     100 * MIB,
     {{"/proc/self/cgroup", "0::/job\n"},
      {CGROUP "/job/memory.max", "209715200\n"},
      {"/proc/self/status", "Name:\tx\nVmRSS:\t 99999 kB\nRssAnon:\t 51200 kB\n"},
      {CGROUP "/job/memory.current", "104857600\n"}}},
};

MACHINE(the_least_of_machine_and_cgroups_counts)
{
    for (size_t i = 0; i < COUNT_OF(machines); i++) {
        const machine_case *it = &machines[i];
        (void)close_tree(state);
        (void)open_machine(state);
        for (size_t at = 0; at < 6 && it->files[at].path != NULL; at++)
            file_tree_write(&tree, it->files[at].path, it->files[at].text);
        rft_budget budget = read_budget(1.0, 0);
        if (budget.bytes != it->bytes || strcmp(budget.source, "cgroup memory limit") != 0)
            fail_msg("%s: %llu bytes, by %s", it->name, (unsigned long long)budget.bytes,
                     budget.source);
    }
}

MACHINE(asker_s_own_memory_counts_as_free)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.offload_budget_share = 0.5;
    rft_budget budget;
    assert_ok(rft_budget_read(tree.root, &config, 512 * MIB, 0, &budget, NULL));
    assert_int_equal(budget.free_bytes, 2560 * MIB);
    assert_int_equal(budget.bytes, 1280 * MIB);
    assert_ok(rft_budget_read(tree.root, &config, UINT64_MAX, 0, &budget, NULL));
    assert_true(budget.free_bytes == UINT64_MAX);
}

MACHINE(what_others_claim_counts_as_used)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.offload_budget_share = 0.5;
    rft_budget budget;
    assert_ok(rft_budget_read(tree.root, &config, 0, 512 * MIB, &budget, NULL));
    assert_int_equal(budget.free_bytes, 1536 * MIB);
    assert_int_equal(budget.bytes, 768 * MIB);
    assert_string_equal(budget.source, "MemAvailable");
    assert_ok(rft_budget_read(tree.root, &config, 0, UINT64_MAX, &budget, NULL));
    assert_int_equal(budget.free_bytes, 0);
    config.offload_budget_bytes = 1600 * MIB;
    assert_ok(rft_budget_read(tree.root, &config, 0, 448 * MIB, &budget, NULL));
    assert_int_equal(budget.bytes, 1600 * MIB);
    assert_string_equal(budget.source, "offload.budget_bytes");
    assert_ok(rft_budget_read(tree.root, &config, 0, 449 * MIB, &budget, NULL));
    assert_int_equal(budget.bytes, 1599 * MIB);
    assert_string_equal(budget.source, "MemAvailable");
}

MACHINE(nonsense_bounds_nothing)
{
    char longest[6000];
    memset(longest, 'a', sizeof longest - 1);
    memcpy(longest, "0::/", 4);
    longest[sizeof longest - 1] = '\0';
    file_tree_write(&tree, "/proc/self/cgroup", longest);
    file_tree_write(&tree, "/sys/fs/cgroup/memory.max", "99999999999999999999999999\n");
    file_tree_write(&tree, "/sys/fs/cgroup/memory.current", "-5\n");
    assert_int_equal(read_budget(1.0, 0).bytes, 2048 * MIB);
    const char *const lines[] = {
        "", "\n\n", "0", "0:", "0::", "::::", ":memory:", "4:memoryx:/a\n0:"};
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        file_tree_write(&tree, "/proc/self/cgroup", lines[i]);
        assert_int_equal(read_budget(1.0, 0).bytes, 2048 * MIB);
    }
}

MACHINE(budget_in_bytes_counts_up_to_what_is_free)
{
    rft_budget budget = read_budget(0.1, 1500 * MIB);
    assert_int_equal(budget.bytes, 1500 * MIB);
    assert_string_equal(budget.source, "offload.budget_bytes");
    budget = read_budget(0.1, 3000 * MIB);
    assert_int_equal(budget.bytes, 2048 * MIB);
    assert_string_equal(budget.source, "MemAvailable");
}

EMPTY(without_any_file_only_a_budget_in_bytes_is_left)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    rft_budget budget = {7, 7, NULL};
    refit_error error;
    assert_int_equal(rft_budget_read(tree.root, &config, 0, 0, &budget, &error), REFIT_ERR_SYSTEM);
    assert_int_equal(budget.bytes, 7);
    assert_non_null(strstr(error.text, "offload.budget_bytes"));
    budget = read_budget(0.5, 5 * MIB);
    assert_int_equal(budget.bytes, 5 * MIB);
    config.offload_budget_bytes = 5 * MIB; /* nothing tells of what the claims are a part */
    assert_ok(rft_budget_read(tree.root, &config, 0, GIB, &budget, NULL));
    assert_int_equal(budget.bytes, 5 * MIB);
}

TEST(this_machine_has_a_budget)
{
    refit_config config;
    rft_budget budget;
    refit_config_init(&config, sizeof config);
    assert_ok(rft_budget_read("", &config, 0, 0, &budget, NULL));
    assert_true(budget.bytes > 0);
    assert_true(budget.bytes < budget.free_bytes);
}

TEST(numbers_are_taken_whole_or_not_at_all)
{
    uint64_t number = 7;
    assert_false(rft_procfile_number("max", &number));
    assert_false(rft_procfile_number("", &number));
    assert_false(rft_procfile_number("-1", &number));
    assert_false(rft_procfile_number("18446744073709551616", &number));
    assert_int_equal(number, 7);
    assert_true(rft_procfile_number("\t 18446744073709551615\n", &number));
    assert_true(number == UINT64_MAX);
    assert_false(rft_procfile_find("inactive_file_x 3\nfile 4\n", "inactive_file", &number));
    assert_false(rft_procfile_find("inactive_file", "inactive_file", &number));
    assert_true(rft_procfile_find("a 1\ninactive_file 3", "inactive_file", &number));
    assert_int_equal(number, 3);
}

TEST(lists_hold_their_ranges)
{
    assert_true(rft_procfile_lists("0", 0));
    assert_true(rft_procfile_lists("0-3,8,10-11\n", 2));
    assert_true(rft_procfile_lists("0-3,8,10-11\n", 8));
    assert_true(rft_procfile_lists("0-3,8,10-11\n", 11));
    assert_false(rft_procfile_lists("0-3,8,10-11\n", 9));
    assert_false(rft_procfile_lists("0-3,8,10-11\n", 12));
    assert_false(rft_procfile_lists("", 0));
    assert_false(rft_procfile_lists("\n", 0));
    assert_false(rft_procfile_lists("3-1", 2));
    assert_false(rft_procfile_lists("-,-", 0));
    assert_true(rft_procfile_lists("4-", 4));
}

EMPTY(long_files_are_cut)
{
    char text[8];
    char path[128];
    file_tree_write(&tree, "/long", "0123456789");
    strcpy(path, tree.root);
    strcat(path, "/long");
    assert_true(rft_procfile_read(path, text, sizeof text));
    assert_string_equal(text, "0123456");
    assert_false(rft_procfile_read(tree.root, text, sizeof text)); /* a folder */
}

int main(void)
{
    return test_run("budget");
}
