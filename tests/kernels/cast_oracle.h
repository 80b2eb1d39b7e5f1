/* What a float becomes as bf16, found without the trick that is under test: of the two neighbours
 * the nearer one by their distances, which a double holds exactly, and the even one between. */
#ifndef CAST_ORACLE_H
#define CAST_ORACLE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline double cast_value(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static inline uint16_t cast_oracle(uint32_t bits)
{
    double value = fabs(cast_value(bits));
    if (isnan(value)) return 0x7FFF;
    uint32_t below = bits & 0x7FFF0000u, above = below + 0x10000u;
    uint32_t sign = bits & 0x80000000u;
    if (isinf(value)) return (uint16_t)((sign | 0x7F800000u) >> 16);
    /* Beyond the largest bf16 the next one would be 2^128. */
    double high = above == 0x7F800000u ? ldexp(1.0, 128) : cast_value(above);
    double down = value - cast_value(below), up = high - value;
    uint32_t nearest = down < up ? below : above;
    if (down == up) nearest = (below >> 16 & 1u) == 0 ? below : above;
    return (uint16_t)((sign | nearest) >> 16);
}

#endif
