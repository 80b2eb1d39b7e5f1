/*
 * detour: how a process comes to the ranks of a trainer through the proxy. They tell their workers
 * where they listen, and workers connect there. So each rank of a run has an address of its own,
 * and in a worker's process a connection to it leads to a port of the proxy.
 */
#ifndef CHAOS_DETOUR_H
#define CHAOS_DETOUR_H

#include <netinet/in.h>
#include <stdint.h>

#include "division.h"

/* Where a rank listens: `run` is the address of everything else, and of rank 0. */
struct in_addr detour_address(struct in_addr run, uint32_t rank);

/* From now on what this process connects to at a rank's address goes to the port of that rank at
 * the run's address. A port of 0 leads nowhere else. */
void detour_take(struct in_addr run, const uint16_t ports[RANKS_MOST]);

#endif
