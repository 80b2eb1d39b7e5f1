/*
 * Made-up updates. Every number follows from the seed and its index alone, so that the learning
 * rate can be found on a sample before anything is written.
 */
#include "bench_updates.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define ROW     4096u
#define SAMPLE  65536u
#define HALVING 40u

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

static weight draw_at(uint64_t seed, uint64_t i)
{
    return draw(seed, i, step_scale(seed, i / ROW), step_scale(~seed, i % ROW));
}

static double sample_density(const weight *sample, double rate)
{
    uint32_t changed = 0;
    for (uint32_t i = 0; i < SAMPLE; i++) {
        changed += after_step(&sample[i], rate) != sample[i].before;
    }
    return (double)changed / SAMPLE;
}

static double find_rate(uint64_t seed, double density, size_t count)
{
    static weight sample[SAMPLE];
    for (uint32_t i = 0; i < SAMPLE; i++) {
        sample[i] = draw_at(seed, random_at(seed, i, 4) % count);
    }
    double low = -40, high = 4; /* powers of 2 */
    for (uint32_t i = 0; i < HALVING; i++) {
        double middle = (low + high) / 2;
        if (sample_density(sample, exp2(middle)) < density) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return exp2(high);
}

double bench_updates_make(uint64_t seed, double density, uint16_t *before, uint16_t *after,
                          size_t count)
{
    float columns[ROW], row = 1;
    size_t changed = 0;
    double rate = find_rate(seed, density < MOVING ? density : MOVING, count);
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
    return count == 0 ? 0 : (double)changed / (double)count;
}
