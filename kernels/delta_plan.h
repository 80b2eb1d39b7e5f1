/*
 * delta_plan: what all C forms of the delta coder share: where planes lie, how bits are read, and
 * what is done with the few halves that move far.
 */
#ifndef RFT_KERNEL_DELTA_PLAN_H
#define RFT_KERNEL_DELTA_PLAN_H

#include <string.h>

#include "kernels/delta_rules.h"

/* A bit an element. */
#define RFT_DELTA_MAP_WORDS (RFT_DELTA_ELEMENTS / 64)

/* A block while it is coded. The counts of the entry grow as its planes do. */
typedef struct rft_delta_writer {
    rft_delta_shape shape;
    rft_delta_entry *entry;
    unsigned char *swap; /* `after`, whose coded elements become as in `before`; or NULL */
    uint32_t low_bits;
    unsigned char *plane[RFT_DELTA_PLANES];
} rft_delta_writer;

/* For an entry with `changed` (and `values`, where they follow from it). The planes whose lengths
 * are not known yet lie so far apart in `out` that they cannot meet. */
rft_delta_writer rft_delta_open_writer(rft_delta_shape shape, unsigned char *out,
                                       rft_delta_entry *entry);

/* Moves the planes together. */
void rft_delta_close_writer(rft_delta_writer *writer);

/* A block while it is applied: the counts say what has been read. */
typedef struct rft_delta_reader {
    rft_delta_shape shape;
    const rft_delta_entry *entry;
    uint32_t low_bits;
    uint32_t done, escapes, far, values;
    const unsigned char *plane[RFT_DELTA_PLANES + 1]; /* the last: where all of them end */
} rft_delta_reader;

/* False: the entry contradicts itself or the shape, or unused bits are set. */
bool rft_delta_open_reader(rft_delta_shape shape, const rft_delta_entry *entry,
                           const unsigned char *coded, rft_delta_reader *reader);

/* Whether all that the planes hold has been read. */
bool rft_delta_is_read(const rft_delta_reader *reader);

static inline uint64_t rft_delta_load(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* The 8 bytes at `at`, of which those from `end` on count as 0 and are not read. */
static inline uint64_t rft_delta_load_before(const unsigned char *at, const unsigned char *end)
{
    if (end - at >= 8) return rft_delta_load(at);
    unsigned char last[8] = {0};
    if (end > at) memcpy(last, at, (size_t)(end - at));
    return rft_delta_load(last);
}

/* The bits of the element, which is little-endian everywhere. */
static inline uint32_t rft_delta_half(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

static inline void rft_delta_put_half(unsigned char *at, uint32_t bits)
{
    at[0] = (unsigned char)bits;
    at[1] = (unsigned char)(bits >> 8);
}

/* How many of these escapes are followed by a byte in FAR, and how many of those by a value. */
static inline uint32_t rft_delta_count_far(const unsigned char *escapes, uint32_t count)
{
    uint32_t far = 0;
    for (uint32_t i = 0; i < count; i++)
        far += (escapes[i / 2] >> i % 2 * 4 & 15) == 15;
    return far;
}

static inline uint32_t rft_delta_count_values(const unsigned char *far, uint32_t count)
{
    uint32_t values = 0;
    for (uint32_t i = 0; i < count; i++)
        values += far[i] == 255;
    return values;
}

/* The element whose escape is 15. */
static inline void rft_delta_put_far(rft_delta_writer *to, uint32_t old_bits, uint32_t bits)
{
    uint32_t old = rft_delta_number(old_bits), number = rft_delta_number(bits);
    uint32_t distance = number > old ? number - old : old - number;
    uint32_t far = distance <= 127 ? number % 255 : 255;
    rft_delta_entry *entry = to->entry;
    to->plane[RFT_DELTA_FAR][entry->far++] = (unsigned char)far;
    if (far != 255) return;
    rft_delta_put_half(to->plane[RFT_DELTA_VALUES] + 2 * (size_t)entry->values++, bits);
}

/* What becomes of an element with the bits `own` whose escape is 15. */
static inline bool rft_delta_get_far(rft_delta_reader *from, uint32_t own, uint32_t *bits)
{
    if (from->far == from->entry->far) return false;
    uint32_t far = from->plane[RFT_DELTA_FAR][from->far++];
    if (far != 255) {
        *bits = rft_delta_bits(rft_delta_nearest(rft_delta_number(own), far, 255));
        return true;
    }
    if (from->values == from->entry->values) return false;
    *bits = rft_delta_half(from->plane[RFT_DELTA_VALUES] + 2 * (size_t)from->values++);
    return true;
}

#endif
