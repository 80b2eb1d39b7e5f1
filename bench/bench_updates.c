/*
 * Synthetic updates. Every number follows from the seed and its index alone, so that the learning
 * rate can be found on a sample before anything is written.
 */
#include "bench_updates.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define ROW    4096u
#define SAMPLE (1u << 20)
#define BINS   (1u << 16)

/* Beyond this share of weights that move by themselves the rest is moved by hand. */
#define MOVING 0.95

/* Of weights and, as a factor, of the steps of a row or a column. */
#define WEIGHT_SPREAD 0.02f
#define SCALE_SPREAD  0.4f

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 33) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ x >> 33) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ x >> 33;
}

static uint64_t random_at(uint64_t seed, uint64_t index, uint64_t what)
{
    return mix(mix(seed + what * UINT64_C(0x9E3779B97F4A7C15)) + index);
}

/* Four uniform numbers: mean 0, variance 1, and nearly normal. */
static float about_normal(uint64_t bits)
{
    uint64_t sum = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
    return ((float)sum / 65536.0f - 2.0f) * 1.7320508f;
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

typedef struct weight {
    uint16_t before;
    float master;
    float step; /* at a learning rate of 1 */
} weight;

static float step_scale(uint64_t seed, uint64_t index)
{
    return expf(SCALE_SPREAD * about_normal(random_at(seed, index, 3)));
}

static weight draw(uint64_t seed, uint64_t i, float row, float column)
{
    weight drawn;
    drawn.before = to_bf16(WEIGHT_SPREAD * about_normal(random_at(seed, i, 1)));
    uint64_t bits = random_at(seed, i, 2);
    /* All floats but the two at the ends of the cell, where the even neighbour wins. */
    uint32_t master = ((uint32_t)drawn.before << 16) - 0x7FFFu + (uint32_t)(bits % 0xFFFFu);
    if ((drawn.before & 0x7FFFu) == 0) master = (uint32_t)drawn.before << 16;
    memcpy(&drawn.master, &master, sizeof master);
    drawn.step = about_normal(mix(bits)) * row * column;
    return drawn;
}

static uint16_t after_step(const weight *drawn, double rate)
{
    return to_bf16((float)((double)drawn->master - rate * (double)drawn->step));
}

/* The learning rate from which on the master leaves its cell. */
static float leaving_rate(const weight *drawn)
{
    bool negative = drawn->before >> 15 != 0, falls = drawn->step > 0;
    bool grows = negative == falls || (drawn->before & 0x7FFFu) == 0;
    uint32_t border = ((uint32_t)drawn->before << 16) + (grows ? 0x8000u : 0u - 0x8000u);
    float edge;
    memcpy(&edge, &border, sizeof edge);
    return fabsf(edge - drawn->master) / fabsf(drawn->step);
}

/* Weights taken at random are counted by the rates at which they leave, to 1 in 256. */
static float find_rate(uint64_t seed, double density, size_t count)
{
    uint32_t leaving[BINS] = {0}, bits;
    for (uint32_t i = 0; i < SAMPLE; i++) {
        uint64_t at = random_at(seed, i, 4) % count;
        weight drawn = draw(seed, at, step_scale(seed, at / ROW), step_scale(~seed, at % ROW));
        float rate = leaving_rate(&drawn);
        memcpy(&bits, &rate, sizeof bits);
        leaving[bits >> 15]++;
    }
    double left = density * SAMPLE;
    for (bits = 0; bits < BINS - 1 && leaving[bits] < left; bits++) {
        left -= leaving[bits];
    }
    float rate;
    bits = (bits << 15) + 0x4000u;
    memcpy(&rate, &bits, sizeof rate);
    return rate;
}

double bench_updates_make(uint64_t seed, double density, uint16_t *before, uint16_t *after,
                          size_t count)
{
    float columns[ROW], row = 1;
    size_t changed = 0;
    if (count == 0) return 0;
    double rate = (double)find_rate(seed, density < MOVING ? density : MOVING, count);
    for (uint32_t i = 0; i < ROW; i++) {
        columns[i] = step_scale(~seed, i);
    }
    for (size_t i = 0; i < count; i++) {
        if (i % ROW == 0) row = step_scale(seed, i / ROW);
        weight drawn = draw(seed, i, row, columns[i % ROW]);
        before[i] = drawn.before;
        after[i] = after_step(&drawn, rate);
        if (density >= 1 && after[i] == before[i]) after[i] ^= 1;
        changed += after[i] != before[i];
    }
    return (double)changed / (double)count;
}
