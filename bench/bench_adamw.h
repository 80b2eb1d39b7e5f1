/*
 * bench_adamw: one step of AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
 * 2019) over slices of parameters, in one pass, as the fused optimizers of trainers do it.
 *
 * The arithmetic is element by element: any division into slices gives the same bits.
 */
#ifndef BENCH_ADAMW_H
#define BENCH_ADAMW_H

#include <stdint.h>

enum { BENCH_STATES_MOST = 3 };

/* Elements of one parameter. With two states (exp_avg, exp_avg_sq) the weight is float; with three
 * (the master too) it is bf16, the rounded master; one state is the momentum of SGD. */
typedef struct bench_slice {
    float *states[BENCH_STATES_MOST];
    uint32_t state_count;
    void *weight;
    const float *gradient;
    uint64_t elements;
} bench_slice;

/* Step number `step`, from 1 on. */
void bench_adamw_step(uint32_t step, const bench_slice *slices, uint32_t count);

#endif
