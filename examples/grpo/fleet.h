/* fleet: the rollout worker processes, seen from the trainer: started, heard, replaced when they
 * die. */
#ifndef GRPO_FLEET_H
#define GRPO_FLEET_H

#include <sys/types.h>

#include "batch.h"
#include "run_options.h"

enum { FLEET_MOST = 16 };

typedef struct fleet {
    const run_options *options;
    const char *endpoint; /* of the publisher; borrowed */
    uint32_t count;
    pid_t pids[FLEET_MOST];
    int sockets[FLEET_MOST];
} fleet;

void fleet_start(fleet *it, const run_options *options, const char *endpoint);

/* Reads one batch of `version` from every worker. A worker that died is replaced: the new one is
 * late, so refit gives it the current version, and it samples the very batch that the old one owed.
 */
void fleet_gather(fleet *it, uint64_t version, batch *batches);

/* Replaces the workers that have died. Returns how many. */
uint32_t fleet_repair(fleet *it);

/* Closes their sockets, at which they end, and waits for them. */
void fleet_stop(fleet *it);

#endif
