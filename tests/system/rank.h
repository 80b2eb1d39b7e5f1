/*
 * rank: a training rank on one GPU of the fake driver: an arena of optimizer states, weights, and a
 * controller over both halves. Any thread, one at a time; it asserts nothing, so that it can run on
 * a thread or in a process of its own.
 */
#ifndef RANK_H
#define RANK_H

#include <refit.h>

#include "node.h"

#define RANK_REGIONS 3u
#define RANK_REGION  (2u << 20)
#define RANK_IMAGE   ((long long)RANK_REGIONS * RANK_REGION)
#define RANK_WEIGHT  (64u << 10)

typedef struct test_rank {
    int gpu;
    test_node *node;
    unsigned self; /* its number on the node */
    refit_device *device;
    refit_config config;
    refit_arena *arena;
    refit_offloader *offloader;
    refit_publisher *publisher;
    refit_controller *controller; /* NULL until it has its host memory */
    void *states[RANK_REGIONS];
    void *weight;
    unsigned char *bytes; /* RANK_REGION, to compare with */
    uint64_t cycles;
    refit_error error;
} test_rank;

/* `settings`: "key=value" strings, ended by NULL. States are filled in; no host memory is taken. */
refit_status rank_open(test_rank *rank, test_node *node, unsigned self, int gpu,
                       const char *const *settings);
/* Opens the controller, which takes the host memory. It may be called again when it failed. */
refit_status rank_seal(test_rank *rank);
/* One whole cycle: new states and weights, and the same states again after it; while they are away
 * the memory is given back on this GPU. REFIT_ERR_CORRUPT where one of these is not so. */
refit_status rank_cycle(test_rank *rank);
/* Whether the states are what was filled in last. */
refit_status rank_check(test_rank *rank);
refit_status rank_close(test_rank *rank);

#endif
