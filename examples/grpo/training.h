/* training: the training loop, with refit's cycle in it. */
#ifndef GRPO_TRAINING_H
#define GRPO_TRAINING_H

#include "run_options.h"

/* What a training run leaves behind, to be compared with another one. All arrays are owned. */
typedef struct run_result {
    uint32_t cycles;
    float *rewards;    /* per cycle */
    float *losses;     /* per cycle */
    float *states;     /* master, exp_avg, exp_avg_sq, one behind the other */
    uint16_t *weights; /* bf16 */
    double seconds;
} run_result;

/* Trains from scratch. Ends the program when something goes wrong that training cannot go on with.
 */
void training_run(const run_options *options, run_result *out);
void run_result_free(run_result *it);

#endif
