/* AdamW (Loshchilov and Hutter 2019) on one flat array of parameters. */
#ifndef GRPO_ADAMW_H
#define GRPO_ADAMW_H

#include <stddef.h>
#include <stdint.h>

typedef struct adamw_options {
    float rate;
    float beta1;
    float beta2;
    float epsilon;
    float decay;
} adamw_options;

/* What one step reads and writes, `count` floats each. `step` counts from 1. */
typedef struct adamw_states {
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    const float *grads;
    size_t count;
    uint64_t step;
} adamw_states;

void adamw_step(const adamw_options *options, const adamw_states *states);

#endif
