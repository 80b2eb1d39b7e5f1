/* delta_chunk_neon: the vectors of delta_chunk.h with NEON, which has vectors of 8 lanes, and none
 * of the instructions that pack and spread bits. */
#ifndef RFT_KERNEL_DELTA_CHUNK_NEON_H
#define RFT_KERNEL_DELTA_CHUNK_NEON_H

#include <arm_neon.h>

#include "kernels/delta_plan.h"

#define RFT_DELTA_TARGET

typedef uint16x8x2_t rft_delta_lanes;

/* Writes `base` plus the place of each set bit; returns how many there are. It writes `step` at a
 * time, at least once: where most words have about as many, no branch is hard to foresee. What it
 * writes after the last means nothing; the highest bit is set so that there always is one. */
static RFT_DELTA_INLINE uint32_t rft_delta_places(uint64_t word, uint32_t base, uint16_t *to,
                                                  uint32_t step)
{
    uint32_t count = (uint32_t)__builtin_popcountll(word), i = 0;
    do {
        for (uint32_t k = 0; k < step; k++, word &= word - 1) {
            uint64_t some = word | UINT64_C(1) << 63;
            to[i + k] = (uint16_t)(base + (uint32_t)__builtin_ctzll(some));
        }
        i += step;
    } while (i < count);
    return count;
}

/* The low `bits`, at most 15, of four elements, one after the other, and back: first in pairs. */
static RFT_DELTA_INLINE uint64_t rft_delta_pack4(uint64_t four, uint32_t bits)
{
    const uint64_t even = UINT64_C(0x0000FFFF0000FFFF);
    four &= rft_delta_four(bits);
    uint64_t pairs = (four & even) | (four >> 16 & even) << bits;
    return (pairs & UINT32_MAX) | pairs >> 32 << 2 * bits;
}

static RFT_DELTA_INLINE uint64_t rft_delta_spread4(uint64_t packed, uint32_t bits)
{
    const uint64_t pair = (UINT64_C(1) << 2 * bits) - 1;
    const uint64_t each = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0000000100000001);
    uint64_t pairs = (packed & pair) | (packed >> 2 * bits & pair) << 32;
    return (pairs & each) | (pairs >> bits & each) << 16;
}

static RFT_DELTA_INLINE rft_delta_lanes rft_delta_get16(const uint16_t *from)
{
    return (rft_delta_lanes){{vld1q_u16(from), vld1q_u16(from + 8)}};
}

static RFT_DELTA_INLINE void rft_delta_put16(uint16_t *to, rft_delta_lanes lanes)
{
    vst1q_u16(to, lanes.val[0]);
    vst1q_u16(to + 8, lanes.val[1]);
}

/* u of delta.h from the bits of 8 halves, and back. */
static RFT_DELTA_INLINE uint16x8_t rft_delta_number8(uint16x8_t bits)
{
    uint16x8_t sign = vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(bits), 15));
    return veorq_u16(bits, vorrq_u16(sign, vdupq_n_u16(0x8000)));
}

static RFT_DELTA_INLINE uint16x8_t rft_delta_bits8(uint16x8_t number)
{
    uint16x8_t high = vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(number), 15));
    return veorq_u16(number, vorrq_u16(vmvnq_u16(high), vdupq_n_u16(0x8000)));
}

/* Modulo `by`, 3 or 15: a multiplication by 2^17 / 3 or 2^19 / 15, rounded up, divides 16 bits. */
static RFT_DELTA_INLINE uint16x8_t rft_delta_rest8(uint16x8_t number, uint16_t by)
{
    const uint16_t times = by == 3 ? 0xAAAB : 0x8889;
    uint32x4_t low = vmull_n_u16(vget_low_u16(number), times);
    uint32x4_t high = vmull_high_n_u16(number, times);
    uint16x8_t upper = vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
    uint16x8_t part = by == 3 ? vshrq_n_u16(upper, 1) : vshrq_n_u16(upper, 3);
    return vmlsq_n_u16(number, part, by);
}

static RFT_DELTA_INLINE uint16x8_t rft_delta_code8(const uint16_t *old_bits, const uint16_t *bits,
                                                   uint16_t by, uint16_t full)
{
    uint16x8_t old = rft_delta_number8(vld1q_u16(old_bits));
    uint16x8_t now = rft_delta_number8(vld1q_u16(bits));
    uint16x8_t near = vcleq_u16(vabdq_u16(now, old), vdupq_n_u16(by / 2));
    return vbslq_u16(near, rft_delta_rest8(now, by), vdupq_n_u16(full));
}

/* The remainders by `by` of elements that moved by at most half of it; `full` for the others. */
static RFT_DELTA_INLINE rft_delta_lanes rft_delta_code16(const uint16_t *old_bits,
                                                         const uint16_t *bits, uint16_t by,
                                                         uint16_t full)
{
    return (rft_delta_lanes){{rft_delta_code8(old_bits, bits, by, full),
                              rft_delta_code8(old_bits + 8, bits + 8, by, full)}};
}

static RFT_DELTA_INLINE uint16x8_t rft_delta_nearest8(uint16x8_t bits, uint16x8_t rest, uint16_t by)
{
    const int16x8_t zero = vdupq_n_s16(0), most = vdupq_n_s16((int16_t)(by / 2));
    const uint16x8_t whole = vdupq_n_u16(by);
    uint16x8_t own = rft_delta_number8(bits);
    uint16x8_t apart = vsubq_u16(rest, rft_delta_rest8(own, by));
    uint16x8_t beyond = vcgtq_s16(vreinterpretq_s16_u16(apart), most);
    uint16x8_t below = vcgtq_s16(vnegq_s16(most), vreinterpretq_s16_u16(apart));
    apart = vsubq_u16(apart, vandq_u16(beyond, whole));
    apart = vaddq_u16(apart, vandq_u16(below, whole));
    uint16x8_t number = vaddq_u16(own, apart);
    /* Beyond an end of the range, and so round to the other one: the next one back. */
    uint16x8_t up = vcgtq_s16(vreinterpretq_s16_u16(apart), zero);
    uint16x8_t down = vcltq_s16(vreinterpretq_s16_u16(apart), zero);
    uint16x8_t over = vandq_u16(up, vcltq_u16(number, own));
    uint16x8_t under = vandq_u16(down, vcgtq_u16(number, own));
    number = vsubq_u16(number, vandq_u16(over, whole));
    return rft_delta_bits8(vaddq_u16(number, vandq_u16(under, whole)));
}

/* The bits of the numbers nearest to those of `bits` that leave `rest` when divided by `by`. */
static RFT_DELTA_INLINE rft_delta_lanes rft_delta_nearest16(rft_delta_lanes bits,
                                                            rft_delta_lanes rest, uint16_t by)
{
    return (rft_delta_lanes){{rft_delta_nearest8(bits.val[0], rest.val[0], by),
                              rft_delta_nearest8(bits.val[1], rest.val[1], by)}};
}

/* `own` where `lanes` hold `value`, else `made`. */
static RFT_DELTA_INLINE rft_delta_lanes rft_delta_keep16(rft_delta_lanes made, rft_delta_lanes own,
                                                         rft_delta_lanes lanes, uint16_t value)
{
    for (size_t i = 0; i < 2; i++) {
        uint16x8_t kept = vceqq_u16(lanes.val[i], vdupq_n_u16(value));
        made.val[i] = vbslq_u16(kept, own.val[i], made.val[i]);
    }
    return made;
}

/* Of all ones in a byte one bit, that of its place: sums of eight neighbours are bytes of bits. */
static RFT_DELTA_INLINE uint8x16_t rft_delta_own_bits(uint8x16_t mask)
{
    return vandq_u8(mask, vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201))));
}

/* Which of 16 lanes hold `value`, a bit each; only the first `count`. */
static RFT_DELTA_INLINE uint32_t rft_delta_find16(rft_delta_lanes lanes, uint16_t value,
                                                  uint32_t count)
{
    uint16x8_t low = vceqq_u16(lanes.val[0], vdupq_n_u16(value));
    uint16x8_t high = vceqq_u16(lanes.val[1], vdupq_n_u16(value));
    uint8x16_t bits = rft_delta_own_bits(vmovn_high_u16(vmovn_u16(low), high));
    for (size_t i = 0; i < 3; i++)
        bits = vpaddq_u8(bits, bits);
    uint32_t found = vgetq_lane_u16(vreinterpretq_u16_u8(bits), 0);
    return count < 16 ? found & ((1u << count) - 1) : found;
}

static RFT_DELTA_INLINE rft_delta_lanes rft_delta_zero16(void)
{
    return (rft_delta_lanes){{vdupq_n_u16(0), vdupq_n_u16(0)}};
}

/* `falls`, and what is not above the place before it. */
static RFT_DELTA_INLINE rft_delta_lanes rft_delta_falls16(rft_delta_lanes falls,
                                                          const uint16_t *place)
{
    for (size_t i = 0; i < 2; i++, place += 8) {
        uint16x8_t here = vcleq_u16(vld1q_u16(place), vld1q_u16(place - 1));
        falls.val[i] = vorrq_u16(falls.val[i], here);
    }
    return falls;
}

static RFT_DELTA_INLINE bool rft_delta_none16(rft_delta_lanes lanes)
{
    return vmaxvq_u16(vorrq_u16(lanes.val[0], lanes.val[1])) == 0;
}

/* The high parts from their bits, of which the first has the rank `rank`, above the low ones. */
static RFT_DELTA_INLINE void rft_delta_join16(uint16_t *place, const uint16_t *bit, uint32_t rank,
                                              uint32_t low)
{
    const uint16x8_t lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const int16x8_t shift = vdupq_n_s16((int16_t)low);
    for (uint32_t i = 0; i < 16; i += 8) {
        uint16x8_t ranks = vaddq_u16(vdupq_n_u16((uint16_t)(rank + i)), lanes);
        uint16x8_t high = vshlq_u16(vsubq_u16(vld1q_u16(bit + i), ranks), shift);
        vst1q_u16(place + i, vorrq_u16(high, vld1q_u16(place + i)));
    }
}

/* Four symbols to a byte: 8 bytes. `escapes` gets a bit for each that is 3. */
static RFT_DELTA_INLINE uint64_t rft_delta_symbols32(rft_delta_lanes first, rft_delta_lanes second,
                                                     uint32_t *escapes)
{
    const int8x16_t shift = vreinterpretq_s8_u32(vdupq_n_u32(0x06040200));
    uint8x16_t a = vmovn_high_u16(vmovn_u16(first.val[0]), first.val[1]);
    uint8x16_t b = vmovn_high_u16(vmovn_u16(second.val[0]), second.val[1]);
    uint8x16_t set = vpaddq_u8(rft_delta_own_bits(vceqq_u8(a, vdupq_n_u8(3))),
                               rft_delta_own_bits(vceqq_u8(b, vdupq_n_u8(3))));
    uint8x16_t four = vpaddq_u8(vshlq_u8(a, shift), vshlq_u8(b, shift));
    for (size_t i = 0; i < 2; i++)
        set = vpaddq_u8(set, set);
    *escapes = vgetq_lane_u32(vreinterpretq_u32_u8(set), 0);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(four, four)), 0);
}

#endif
