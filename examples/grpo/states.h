/*
 * states: what the trainer keeps on the device, and which of it leaves during the refit.
 *
 *   master, exp_avg, exp_avg_sq   float, one per parameter; KEEP: they return bit for bit
 *   grads                         float; DISCARD: nothing is copied, since each backward pass
 * zeroes them first weights                       bf16; stay: they are what is published, and the
 * engine runs on them
 *
 * All but the weights live in a refit arena, so their addresses never change although their memory
 * comes and goes.
 */
#ifndef GRPO_STATES_H
#define GRPO_STATES_H

#include <refit.h>

#include "policy.h"

/* A device that holds all states, or all but those that leave plus the engine's cache; never both.
 */
extern const char states_small_device[];
/* One that holds everything at once. */
extern const char states_large_device[];

typedef struct train_states {
    refit_device *device;
    refit_arena *arena;
    refit_offloader *offloader;
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    float *grads;
    uint16_t *weights;
} train_states;

void states_open(train_states *out, const char *device, const refit_config *config);
void states_close(train_states *it);

#endif
