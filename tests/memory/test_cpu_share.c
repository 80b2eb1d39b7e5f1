/* The share of the CPUs: never none, never more than there are, divided once between ranks. */
#include <stdlib.h>

#include "memory/cpu_share.h"
#include "memory/procfile.h"
#include "tests/support/file_tree.h"
#include "tests/support/test.h"

static uint32_t usable; /* CPUs by affinity */

uint32_t __wrap_rft_cpu_count(void);

uint32_t __wrap_rft_cpu_count(void)
{
    return usable;
}

typedef struct machine {
    const char *name;
    struct {
        uint32_t share, usable;
        const char *ranks; /* NULL: not set */
    } has;
    struct {
        const char *path;
        const char *text;
    } files[5];
} machine;

#define ONLINE "/sys/devices/system/cpu/online"
#define CGROUP "/sys/fs/cgroup"

static const machine machines[] = {
    {"nothing can be read", {6, 6, NULL}, {{NULL, NULL}}},
    {"one rank has all", {64, 64, "1"}, {{ONLINE, "0-63\n"}}},
    {"ranks divide the machine", {8, 64, "8"}, {{ONLINE, "0-63\n"}}},
    {"ranks that are bound to their own CPUs have divided it", {8, 8, "8"}, {{ONLINE, "0-63\n"}}},
    {"ranks of one NUMA node divide it", {8, 32, "8"}, {{ONLINE, "0-63\n"}}},
    {"more ranks than CPUs", {1, 2, "8"}, {{ONLINE, "0-1\n"}}},
    {"no number of ranks", {4, 4, "many"}, {{ONLINE, "0-3\n"}}},
    {"zero ranks", {4, 4, "0"}, {{ONLINE, "0-3\n"}}},
    {"a negative number of ranks", {4, 4, "-2"}, {{ONLINE, "0-3\n"}}},
    {"more ranks than numbers go", {4, 4, "99999999999999999999999"}, {{ONLINE, "0-3\n"}}},
    {"ranks divide the CPUs of their container",
     {4, 16, "4"},
     {{ONLINE, "0-63\n"},
      {"/proc/self/cgroup", "0::/pod\n"},
      {CGROUP "/pod/cpuset.cpus.effective", "0-7,16-23\n"}}},
    {"a quota, rounded down",
     {6, 64, NULL},
     {{ONLINE, "0-63\n"},
      {"/proc/self/cgroup", "0::/pod\n"},
      {CGROUP "/pod/cpu.max", "650000 100000\n"}}},
    {"a quota of a level above, for two ranks",
     {4, 64, "2"},
     {{ONLINE, "0-63\n"},
      {"/proc/self/cgroup", "0::/pod/job\n"},
      {CGROUP "/pod/job/cpu.max", "max 100000\n"},
      {CGROUP "/pod/cpu.max", "800000 100000\n"}}},
    {"a quota of less than one CPU",
     {1, 64, NULL},
     {{ONLINE, "0-63\n"}, {"/proc/self/cgroup", "0::/\n"}, {CGROUP "/cpu.max", "50000 100000\n"}}},
    {"a period of zero", {4, 4, NULL}, {{CGROUP "/cpu.max", "50000 0\n"}}},
    {"a quota of cgroup v1",
     {3, 64, NULL},
     {{"/proc/self/cgroup", "3:cpu,cpuacct:/job\n"},
      {CGROUP "/cpu/job/cpu.cfs_quota_us", "300000\n"},
      {CGROUP "/cpu/job/cpu.cfs_period_us", "100000\n"}}},
    {"no quota of cgroup v1",
     {5, 5, NULL},
     {{"/proc/self/cgroup", "3:cpu,cpuacct:/job\n"},
      {CGROUP "/cpu/job/cpu.cfs_quota_us", "-1\n"},
      {CGROUP "/cpu/job/cpu.cfs_period_us", "100000\n"}}},
    {"fewer CPUs online than may be used", {8, 8, NULL}, {{ONLINE, "0-3\n"}}},
};

TEST(each_machine_has_its_share)
{
    for (size_t at = 0; at < COUNT_OF(machines); at++) {
        const machine *it = &machines[at];
        file_tree tree = file_tree_open();
        for (size_t file = 0; file < 5 && it->files[file].path != NULL; file++)
            file_tree_write(&tree, it->files[file].path, it->files[file].text);
        usable = it->has.usable;
        if (it->has.ranks == NULL) {
            unsetenv("LOCAL_WORLD_SIZE");
        } else {
            setenv("LOCAL_WORLD_SIZE", it->has.ranks, 1);
        }
        uint32_t share = rft_cpu_share(tree.root);
        if (share != it->has.share) print_error("%s\n", it->name);
        assert_int_equal(share, it->has.share);
        file_tree_close(&tree);
    }
}

TEST(this_machine_has_a_share)
{
    unsetenv("LOCAL_WORLD_SIZE");
    usable = 2;
    uint32_t share = rft_cpu_share("");
    assert_true(share == 1 || share == 2);
}

TEST(numbers_of_a_list_are_counted)
{
    assert_int_equal(rft_procfile_count("0-3,8,10-11\n"), 7);
    assert_int_equal(rft_procfile_count("5"), 1);
    assert_int_equal(rft_procfile_count(""), 0);
    assert_int_equal(rft_procfile_count("\n"), 0);
    assert_int_equal(rft_procfile_count("3-1,4"), 1);
}

int main(void)
{
    return test_run("cpu_share");
}
