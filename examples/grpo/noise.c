/* splitmix64 (Steele, Lea and Flood 2014), seeded by mixing its three numbers. */
#include "noise.h"

static uint64_t mix(uint64_t bits)
{
    bits = (bits ^ (bits >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    bits = (bits ^ (bits >> 27)) * UINT64_C(0x94D049BB133111EB);
    return bits ^ (bits >> 31);
}

noise noise_start(uint64_t seed, uint64_t stream, uint64_t index)
{
    return (noise){mix(mix(mix(seed + 1) + stream + 1) + index + 1)};
}

uint64_t noise_bits(noise *source)
{
    source->state += UINT64_C(0x9E3779B97F4A7C15);
    return mix(source->state);
}

float noise_uniform(noise *source)
{
    return (float)(noise_bits(source) >> 40) * 0x1p-24f;
}

float noise_normal(noise *source)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++)
        sum += noise_uniform(source);
    return sum;
}
