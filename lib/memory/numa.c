/*
 * NUMA placement by mbind(2).
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
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "memory/procfile.h"

#define NODES     1024 /* the most that Linux can be built for */
#define WORD_BITS (sizeof(unsigned long) * CHAR_BIT)

typedef struct node_set {
    unsigned long words[NODES / WORD_BITS];
} node_set;

static bool has_node(const node_set *set, int node)
{
    size_t at = (size_t)node;
    return node >= 0 && at < NODES && (set->words[at / WORD_BITS] >> (at % WORD_BITS) & 1) != 0;
}

/* Free, or soon to be: clean file pages that were not used lately. */
static bool read_node_free(const char *root, int node, uint64_t *bytes)
{
    char text[RFT_PROCFILE_ROOM];
    char file[512];
    char key[64];
    uint64_t free_kib, inactive_kib = 0;
    int length =
        snprintf(file, sizeof file, "%s/sys/devices/system/node/node%d/meminfo", root, node);
    if (length < 0 || (size_t)length >= sizeof file ||
        !rft_procfile_read(file, text, sizeof text)) {
        return false;
    }
    (void)snprintf(key, sizeof key, "Node %d MemFree", node);
    if (!rft_procfile_find(text, key, &free_kib)) return false;
    (void)snprintf(key, sizeof key, "Node %d Inactive(file)", node);
    (void)rft_procfile_find(text, key, &inactive_kib);
    return rft_add_u64(free_kib, inactive_kib, bytes) && rft_mul_u64(*bytes, 1024, bytes);
}

int rft_numa_choose(const char *root, int wanted, int device_node, uint64_t bytes)
{
    uint64_t free_bytes;
    if (wanted != REFIT_NUMA_AUTO) return wanted;
    if (device_node < 0) return REFIT_NUMA_OFF;
    if (read_node_free(root, device_node, &free_bytes) && free_bytes < bytes) {
        rft_log(REFIT_LOG_INFO,
                "node %d has %" PRIu64 " bytes free, the host image needs %" PRIu64
                ": it is interleaved over all nodes",
                device_node, free_bytes, bytes);
        return REFIT_NUMA_INTERLEAVE;
    }
    return device_node;
}

static refit_status say_off(int code, int *placed)
{
    rft_log(REFIT_LOG_WARNING,
            "the host image could not be placed on a NUMA node: %s; in a container allow mbind "
            "(CAP_SYS_NICE), or set offload.numa: off",
            strerror(code));
    *placed = REFIT_NUMA_OFF;
    return REFIT_OK;
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
    if (choice != REFIT_NUMA_INTERLEAVE) {
        RFT_REFUSE_IF(
            !has_node(&nodes, choice), error, REFIT_ERR_CONFIG,
            "this process may not use NUMA node %d: set offload.numa to one that `numactl "
            "--show` lists, or to auto",
            choice);
        mode = MPOL_PREFERRED;
        nodes = (node_set){{0}};
        nodes.words[(size_t)choice / WORD_BITS] = 1UL << ((size_t)choice % WORD_BITS);
    }
    /* The kernel counts one bit less than it is told. */
    if (syscall(SYS_mbind, base, bytes, mode, nodes.words, NODES + 1, 0) != 0) {
        return say_off(errno, placed);
    }
    *placed = choice;
    return REFIT_OK;
}
