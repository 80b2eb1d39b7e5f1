/*
 * delta_rules: what delta.h says of counts, lengths and numbers, as code: one text for the C forms
 * and for the GPU's.
 */
#ifndef RFT_KERNEL_DELTA_RULES_H
#define RFT_KERNEL_DELTA_RULES_H

#include "kernels/delta.h"

#ifdef __CUDACC__
#include "kernels/gpu.h"
#define RFT_DELTA_RULE          RFT_GPU_PART
#define RFT_DELTA_HIGHEST(word) (31 - (uint32_t)__clz((int)(word)))
#else
#define RFT_DELTA_RULE          static inline
#define RFT_DELTA_HIGHEST(word) (31 - (uint32_t)__builtin_clz(word)) /* the number of its bit */
#endif

/* l of delta.h. */
RFT_DELTA_RULE uint32_t rft_delta_low_bits(uint32_t elements, uint32_t changed)
{
    uint32_t bits = RFT_DELTA_HIGHEST(elements / changed);
    return bits < 2 ? 0 : bits < 15 ? bits : 15;
}

RFT_DELTA_RULE uint32_t rft_delta_high_bits(uint32_t elements, uint32_t changed)
{
    uint32_t low = rft_delta_low_bits(elements, changed);
    return low == 0 ? elements : ((elements - 1) >> low) + changed;
}

/* Fills the lengths from the counts, which are taken as they are. */
RFT_DELTA_RULE void rft_delta_lay_out(rft_delta_shape shape, rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    uint32_t changed = entry->changed;
    entry->bytes[RFT_DELTA_LOW] = (changed * rft_delta_low_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_HIGH] = (rft_delta_high_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_SYMBOLS] = half ? (changed + 3) / 4 : 0;
    entry->bytes[RFT_DELTA_ESCAPES] = (entry->escapes + 1) / 2;
    entry->bytes[RFT_DELTA_FAR] = entry->far;
    entry->bytes[RFT_DELTA_VALUES] = entry->values * shape.width;
    entry->total = 0;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        entry->total += entry->bytes[i];
    }
}

/* The counts agree with each other, and the lengths with the counts. */
RFT_DELTA_RULE bool rft_delta_is_laid_out(rft_delta_shape shape, const rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    rft_delta_entry expected = *entry;
    if (entry->changed == 0 || entry->changed > shape.elements) return false;
    if (entry->escapes > (half ? entry->changed : 0) || entry->far > entry->escapes) return false;
    if (half ? entry->values > entry->far : entry->values != entry->changed) return false;
    rft_delta_lay_out(shape, &expected);
    bool same = expected.total == entry->total;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        same = same && expected.bytes[i] == entry->bytes[i];
    }
    return same;
}

/* Unused bits at the end of a plane are 0. */
RFT_DELTA_RULE bool rft_delta_is_clean(const unsigned char *plane, uint32_t bits)
{
    return bits % 8 == 0 || plane[bits / 8] >> bits % 8 == 0;
}

/* u of delta.h from the bits, and back. */
RFT_DELTA_RULE uint32_t rft_delta_number(uint32_t bits)
{
    return (bits & 0x8000u) != 0 ? ~bits & 0xFFFFu : bits | 0x8000u;
}

RFT_DELTA_RULE uint32_t rft_delta_bits(uint32_t number)
{
    return (number & 0x8000u) != 0 ? number & 0x7FFFu : ~number & 0xFFFFu;
}

/* The number nearest to `own` that leaves `rest` when divided by `by`, which is odd. */
RFT_DELTA_RULE uint32_t rft_delta_nearest(uint32_t own, uint32_t rest, uint32_t by)
{
    int32_t apart = (int32_t)rest - (int32_t)(own % by), most = (int32_t)by / 2;
    if (apart > most) apart -= (int32_t)by;
    if (apart < -most) apart += (int32_t)by;
    int32_t number = (int32_t)own + apart;
    if (number < 0) number += (int32_t)by;
    if (number > UINT16_MAX) number -= (int32_t)by;
    return (uint32_t)number;
}

#endif
