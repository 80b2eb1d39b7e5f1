/*
 * bench_adamw: the arithmetic, written once and compiled twice: for any processor, and for AVX2. No
 * multiplication is fused with an addition, so that both give the same bits. This file is compiled
 * with optimisation for loops (see CMakeLists.txt).
 */
#include "bench_adamw.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct factors {
    float beta1, beta2, epsilon;
    float kept; /* of a weight, by its decay */
    float rate; /* with the correction of the first moment */
    float root; /* the correction of the root of the second moment */
} factors;

static factors factors_of(uint32_t step)
{
    const double beta1 = 0.9, beta2 = 0.999, rate = 1e-6, decay = 0.01;
    return (factors){.beta1 = (float)beta1,
                     .beta2 = (float)beta2,
                     .epsilon = 1e-8f,
                     .kept = (float)(1.0 - rate * decay),
                     .rate = (float)(rate / (1.0 - pow(beta1, step))),
                     .root = (float)(1.0 / sqrt(1.0 - pow(beta2, step)))};
}

/* The two moments, and what the weight changes by. */
INLINE float moments(const factors *by, float *first, float *second, float gradient)
{
    *first = by->beta1 * *first + (1.0f - by->beta1) * gradient;
    *second = by->beta2 * *second + (1.0f - by->beta2) * gradient * gradient;
    return by->rate * *first / (sqrtf(*second) * by->root + by->epsilon);
}

/* To the nearest, ties to even. No weight here is a NaN. */
INLINE uint16_t rounded(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

INLINE void step_float(const factors *by, const bench_slice *on)
{
    float *restrict first = on->states[0], *restrict second = on->states[1];
    float *restrict weight = on->weight;
    const float *restrict gradient = on->gradient;
    for (uint64_t i = 0; i < on->elements; i++) {
        weight[i] = weight[i] * by->kept - moments(by, &first[i], &second[i], gradient[i]);
    }
}

INLINE void step_master(const factors *by, const bench_slice *on)
{
    float *restrict first = on->states[0], *restrict second = on->states[1];
    float *restrict master = on->states[2];
    uint16_t *restrict weight = on->weight;
    const float *restrict gradient = on->gradient;
    for (uint64_t i = 0; i < on->elements; i++) {
        master[i] = master[i] * by->kept - moments(by, &first[i], &second[i], gradient[i]);
        weight[i] = rounded(master[i]);
    }
}

INLINE void step_momentum(const factors *by, const bench_slice *on)
{
    float *restrict momentum = on->states[0], *restrict weight = on->weight;
    const float *restrict gradient = on->gradient;
    for (uint64_t i = 0; i < on->elements; i++) {
        momentum[i] = by->beta1 * momentum[i] + gradient[i];
        weight[i] = weight[i] * by->kept - by->rate * momentum[i];
    }
}

INLINE void step_all(uint32_t step, const bench_slice *slices, uint32_t count)
{
    const factors by = factors_of(step);
    for (uint32_t i = 0; i < count; i++) {
        switch (slices[i].state_count) {
        case 1: step_momentum(&by, &slices[i]); break;
        case 2: step_float(&by, &slices[i]); break;
        default: step_master(&by, &slices[i]);
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void step_avx2(uint32_t step, const bench_slice *slices,
                                                      uint32_t count)
{
    step_all(step, slices, count);
}
#endif

void bench_adamw_step(uint32_t step, const bench_slice *slices, uint32_t count)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        step_avx2(step, slices, count);
        return;
    }
#endif
    step_all(step, slices, count);
}
