/* noise: random numbers that are the same on every machine for the same (seed, stream, index). */
#ifndef GRPO_NOISE_H
#define GRPO_NOISE_H

#include <stdint.h>

typedef struct noise {
    uint64_t state;
} noise;

noise noise_start(uint64_t seed, uint64_t stream, uint64_t index);
uint64_t noise_bits(noise *source);
float noise_uniform(noise *source); /* in [0, 1) */
float noise_normal(noise *source);  /* close to a normal one: the sum of twelve uniform ones */

#endif
