/*
 * cpu_share: how many threads of this process may compute at once without taking the CPUs of the
 * other ranks of its machine.
 *
 * What the ranks share is the CPUs of the cgroup (cpuset), or those of the machine, and no more
 * than the cgroup's quota of their time, rounded down. Each of LOCAL_WORLD_SIZE ranks gets an equal
 * part of it, but never more than the CPUs that it may use by its affinity: a launcher that binds
 * each rank to its own CPUs has divided them already, and they are not divided twice. Where a
 * launcher binds all ranks together to fewer CPUs than the cgroup has, that cannot be seen: name
 * the threads.
 */
#ifndef RFT_CPU_SHARE_H
#define RFT_CPU_SHARE_H

#include <stdint.h>

/* At least 1, and at most rft_cpu_count(). Reads the environment. `root`: "" in life, a folder of
 * made-up files in tests. */
uint32_t rft_cpu_share(const char *root);

#endif
