/* Masters of every kind, and weights that belong to them or do not. */
#ifndef MASTER_DATA_H
#define MASTER_DATA_H

#include <stdlib.h>

#include "kernels/cast.h"
#include "kernels/master.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define MASTER_MOST ((uint64_t)(2 * RFT_MASTER_UNIT + 5 * RFT_MASTER_BLOCK + 123))

typedef enum master_weights {
    MASTER_ROUNDED,         /* of any bits, NaNs and middles too */
    MASTER_ROUNDED_EXACTLY, /* of numbers that have no exceptions */
    MASTER_TRUNCATED,
    MASTER_RANDOM,
    MASTER_OFF_BY_ONE,
    MASTER_MIXED, /* each block in a way of its own, some with a few exceptions */
    MASTER_KINDS,
} master_weights;

typedef struct master_data {
    uint32_t *masters; /* on a boundary of 4 */
    uint16_t *weights; /* on a boundary of 2 */
    unsigned char *all;
} master_data;

static inline uint32_t master_make(uint64_t *seed, master_weights kind)
{
    static const uint32_t lows[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    uint32_t bits = (uint32_t)(seeded_next(seed) >> 20);
    if (kind == MASTER_ROUNDED_EXACTLY) {
        bits &= 0xBFFFFFFFu;
        return (bits & 0xFFFFu) == 0x8000u ? bits + 1 : bits;
    }
    if (seeded_below(seed, 16) == 0) bits = (bits & 0xFFFF0000u) | lows[seeded_below(seed, 6)];
    if (kind == MASTER_ROUNDED && seeded_below(seed, 16) != 0) bits &= 0xBFFFFFFFu;
    return bits;
}

static inline uint16_t master_weigh(uint64_t *seed, uint32_t master, master_weights kind)
{
    float value;
    uint16_t rounded;
    memcpy(&value, &master, sizeof value);
    rft_cast_bf16(&rounded, &value, 1);
    switch (kind) {
    case MASTER_TRUNCATED: return (uint16_t)(master >> 16);
    case MASTER_RANDOM: return (uint16_t)(seeded_next(seed) >> 30);
    case MASTER_OFF_BY_ONE: return (uint16_t)(rounded + 1);
    default: return rounded;
    }
}

/* `aside`: elements that masters and weights lie off a boundary of 64. The memory ends where the
 * weights do. */
static inline void master_data_fill(master_data *data, uint64_t elements, master_weights kind,
                                    size_t aside)
{
    uint64_t seed = elements * 31 + (uint64_t)kind;
    size_t masters = 4 * ((size_t)elements + aside), weights = 2 * ((size_t)elements + aside);
    size_t gap = (masters + 63) / 64 * 64;
    data->all = aligned_alloc(64, (gap + weights + 63) / 64 * 64);
    assert_non_null(data->all);
    data->masters = (uint32_t *)(void *)data->all + aside;
    data->weights = (uint16_t *)(void *)(data->all + gap) + aside;
    for (uint64_t i = 0; i < elements; i++) {
        master_weights own = kind;
        if (kind == MASTER_MIXED) {
            own = (master_weights)(i / RFT_MASTER_BLOCK % MASTER_MIXED);
            if (seeded_below(&seed, 100) == 0) own = MASTER_RANDOM;
        }
        data->masters[i] = master_make(&seed, own);
        data->weights[i] = master_weigh(&seed, data->masters[i], own);
    }
}

static inline void master_data_free(master_data *data)
{
    free(data->all);
    data->all = NULL;
}

#endif
