/* Numbers that look random and are the same in every run (xorshift64). The seed is not 0. */
#ifndef SEEDED_H
#define SEEDED_H

#include <stdint.h>

static inline uint64_t seeded_next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

/* 0 to bound - 1. */
static inline uint64_t seeded_below(uint64_t *seed, uint64_t bound)
{
    return seeded_next(seed) % bound;
}

#endif
