/*
 * NUMA placement by mbind(2), and where pages are by get_mempolicy(2).
 *
 * The nodes that the process may use are asked of the kernel (get_mempolicy), which respects
 * cpusets. A node is preferred, not bound. Containers often filter these calls (EPERM), and kernels
 * without NUMA lack them (ENOSYS): neither is an error, both are said.
 */
#include "memory/numa.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "memory/procfile.h"

#define NODES     1024 /* the most nodes that Linux can be built for */
#define CPUS      8192 /* the most CPUs */
#define WORD_BITS (sizeof(unsigned long) * CHAR_BIT)

typedef struct node_set {
    unsigned long words[NODES / WORD_BITS];
} node_set;

static bool has_node(const node_set *set, int node)
{
    size_t at = (size_t)node;
    return node >= 0 && at < NODES && (set->words[at / WORD_BITS] >> (at % WORD_BITS) & 1) != 0;
}

static void add_node(node_set *set, int node)
{
    size_t at = (size_t)node;
    set->words[at / WORD_BITS] |= 1UL << (at % WORD_BITS);
}

static bool read_node_file(const char *root, int node, const char *name, char *text)
{
    char file[512];
    int length =
        snprintf(file, sizeof file, "%s/sys/devices/system/node/node%d/%s", root, node, name);
    return length > 0 && (size_t)length < sizeof file &&
           rft_procfile_read(file, text, RFT_PROCFILE_ROOM);
}

/* Free, or soon to be: clean file pages that were not used lately. */
static bool read_node_free(const char *root, int node, uint64_t *bytes)
{
    char text[RFT_PROCFILE_ROOM];
    char key[64];
    uint64_t free_kib, inactive_kib = 0;
    if (!read_node_file(root, node, "meminfo", text)) return false;
    (void)snprintf(key, sizeof key, "Node %d MemFree", node);
    if (!rft_procfile_find(text, key, &free_kib)) return false;
    (void)snprintf(key, sizeof key, "Node %d Inactive(file)", node);
    (void)rft_procfile_find(text, key, &inactive_kib);
    return rft_add_u64(free_kib, inactive_kib, bytes) && rft_mul_u64(*bytes, 1024, bytes);
}

/* By the process's cpuset; one that is not shown bounds nothing. */
static bool may_use(const char *root, int node)
{
    char file[512];
    char text[RFT_PROCFILE_ROOM];
    static const char key[] = "\nMems_allowed_list:";
    int length = snprintf(file, sizeof file, "%s/proc/self/status", root);
    if (length < 0 || (size_t)length >= sizeof file) return true;
    if (!rft_procfile_read(file, text, sizeof text)) return true;
    char *list = strstr(text, key);
    if (list == NULL) return true;
    list += sizeof key - 1;
    list[strcspn(list, "\n")] = '\0';
    return rft_procfile_lists(list, (uint64_t)node);
}

int rft_numa_choose(const char *root, int wanted, int device_node, uint64_t bytes)
{
    uint64_t free_bytes;
    if (wanted != REFIT_NUMA_AUTO) return wanted;
    if (device_node < 0) return REFIT_NUMA_OFF;
    if (!may_use(root, device_node)) {
        rft_log(REFIT_LOG_INFO,
                "the device is close to node %d, which this process may not use: the kernel "
                "places the host image",
                device_node);
        return REFIT_NUMA_OFF;
    }
    if (read_node_free(root, device_node, &free_bytes) && free_bytes < bytes) {
        rft_log(REFIT_LOG_INFO,
                "node %d has %" PRIu64 " bytes free, the host image needs %" PRIu64
                ": it is interleaved over the nodes",
                device_node, free_bytes, bytes);
        return REFIT_NUMA_INTERLEAVE;
    }
    return device_node;
}

static refit_status say_off(int code, int *placed)
{
    rft_log(
        REFIT_LOG_WARNING,
        "the kernel does not place the host image on a NUMA node: %s; in a container allow mbind "
        "(CAP_SYS_NICE), or set offload.numa: off",
        strerror(code));
    *placed = REFIT_NUMA_OFF;
    return REFIT_OK;
}

/* Leaves out nodes without CPUs, if that can be known and leaves any. */
static void keep_near_cpus(node_set *nodes)
{
    char text[RFT_PROCFILE_ROOM];
    node_set kept = {{0}};
    bool any = false;
    if (!rft_procfile_read("/sys/devices/system/node/has_cpu", text, sizeof text)) return;
    for (int node = 0; node < NODES; node++) {
        if (!has_node(nodes, node) || !rft_procfile_lists(text, (uint64_t)node)) continue;
        add_node(&kept, node);
        any = true;
    }
    if (any) *nodes = kept;
}

refit_status rft_numa_place(void *base, uint64_t bytes, int choice, int *placed, refit_error *error)
{
    *placed = REFIT_NUMA_OFF;
    if (choice == REFIT_NUMA_OFF) return REFIT_OK;
    node_set nodes = {{0}};
    if (syscall(SYS_get_mempolicy, NULL, nodes.words, NODES, NULL, MPOL_F_MEMS_ALLOWED) != 0) {
        return say_off(errno, placed);
    }
    int mode = MPOL_INTERLEAVE;
    if (choice == REFIT_NUMA_INTERLEAVE) {
        keep_near_cpus(&nodes);
    } else {
        RFT_REFUSE_IF(
            !has_node(&nodes, choice), error, REFIT_ERR_CONFIG,
            "this process may not use NUMA node %d: set offload.numa to one that `numactl "
            "--show` lists, or to auto",
            choice);
        mode = MPOL_PREFERRED;
        nodes = (node_set){{0}};
        add_node(&nodes, choice);
    }
    /* The kernel counts one bit less than it is told. */
    if (syscall(SYS_mbind, base, bytes, mode, nodes.words, NODES + 1, 0) != 0) {
        return say_off(errno, placed);
    }
    *placed = choice;
    return REFIT_OK;
}

bool rft_numa_has_several(const char *root)
{
    char file[512];
    char text[RFT_PROCFILE_ROOM];
    int length = snprintf(file, sizeof file, "%s/sys/devices/system/node/online", root);
    return length > 0 && (size_t)length < sizeof file &&
           rft_procfile_read(file, text, sizeof text) && rft_procfile_count(text) > 1;
}

void rft_numa_vote(rft_numa_votes *votes, const void *address)
{
    int node = -1;
    if (votes->count == RFT_NUMA_VOTES) return;
    votes->count++;
    if (syscall(SYS_get_mempolicy, &node, NULL, 0, address, MPOL_F_NODE | MPOL_F_ADDR) != 0) return;
    if (node >= 0) votes->nodes[votes->known++] = node;
}

int rft_numa_elected(const rft_numa_votes *votes)
{
    for (uint32_t at = 0; at < votes->known; at++) {
        uint32_t alike = 0;
        for (uint32_t other = at; other < votes->known; other++) {
            alike += votes->nodes[other] == votes->nodes[at];
        }
        if (alike > votes->count / 2) return votes->nodes[at];
    }
    return -1;
}

/* The CPUs of a node that the calling thread may use. */
static bool read_cpus(const char *root, int node, cpu_set_t *sets, size_t bytes)
{
    char text[RFT_PROCFILE_ROOM];
    if (node < 0 || sched_getaffinity(0, bytes, sets) != 0) return false;
    if (!read_node_file(root, node, "cpulist", text)) return false;
    for (size_t cpu = 0; cpu < CPUS; cpu++) {
        if (!rft_procfile_lists(text, cpu)) CPU_CLR_S(cpu, bytes, sets);
    }
    return CPU_COUNT_S(bytes, sets) > 0;
}

uint32_t rft_numa_cpus(const char *root, int node)
{
    cpu_set_t sets[CPUS / CPU_SETSIZE];
    if (!read_cpus(root, node, sets, sizeof sets)) return 0;
    return (uint32_t)CPU_COUNT_S(sizeof sets, sets);
}

bool rft_numa_go(const char *root, int node)
{
    cpu_set_t sets[CPUS / CPU_SETSIZE];
    return read_cpus(root, node, sets, sizeof sets) && sched_setaffinity(0, sizeof sets, sets) == 0;
}
