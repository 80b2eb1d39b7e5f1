/* One element at a time, with integers: no instruction of the CPU is asked for. */
#include "kernels/floats.h"

#include <string.h>

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void rft_floats_from_bf16(float *to, const uint16_t *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = float_of((uint32_t)from[i] << 16);
}

/* What is below the normal numbers of fp16 is a multiple of 2^-24, and normal in fp32. */
static uint32_t widened(uint32_t half)
{
    uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1Fu;
    uint32_t fraction = half & 0x3FFu;
    if (exponent == 0x1Fu) return sign | 0x7F800000u | fraction << 13;
    if (exponent != 0) return sign | (exponent + 112u) << 23 | fraction << 13;
    if (fraction == 0) return sign;
    uint32_t top = 0;
    while (fraction >> (top + 1) != 0)
        top++;
    return sign | (top + 103u) << 23 | (fraction << (23 - top) & 0x7FFFFFu);
}

void rft_floats_from_half(float *to, const uint16_t *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = float_of(widened(from[i]));
}

/* Of a value below 2^-14: as many steps of 2^-24, rounded. */
static uint32_t small_half(uint32_t magnitude)
{
    if (magnitude < 0x33000000u) return 0; /* below half a step */
    uint32_t shift = 126u - (magnitude >> 23);
    uint32_t whole = (magnitude & 0x7FFFFFu) | 0x800000u;
    uint32_t steps = whole >> shift, rest = whole & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return rest > half || (rest == half && (steps & 1u) != 0) ? steps + 1u : steps;
}

static uint16_t narrowed(uint32_t bits)
{
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFFu;
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); /* from 65,520 on */
    if (magnitude < 0x38800000u) return (uint16_t)(sign | small_half(magnitude));
    magnitude += 0xFFFu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (magnitude - 0x38000000u) >> 13);
}

void rft_floats_to_half(uint16_t *to, const float *from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], sizeof bits);
        to[i] = narrowed(bits);
    }
}
