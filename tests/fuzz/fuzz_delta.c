/*
 * Coded blocks. The input is a header of nine bytes and what follows:
 *
 *     what | elements - 1 (u16) | changed - 1 (u16) | escapes (u16) | seed | period | bytes…
 *
 * The bytes are the planes of a block that lies over made-up elements; or, with one bit of `what`,
 * a block before and after, by halves. Scalar and wide forms must agree in every answer.
 */
#include <string.h>

#include "fuzz.h"
#include "kernels/cpu.h"
#include "kernels/delta.h"
#include "kernels/delta_exchange.h"

#define HEADER  9u
#define MOST    4096u /* elements: enough for several chunks of the wide forms */
#define ENCODES 128u

static const rft_delta_shape kinds[] = {
    {0, 2, RFT_DELTA_HALF}, {0, 1, RFT_DELTA_RAW}, {0, 2, RFT_DELTA_RAW},
    {0, 4, RFT_DELTA_RAW},  {0, 8, RFT_DELTA_RAW},
};

static uint32_t get_u16(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

/* What is in memory at once, each at its place. */
enum {
    CODED,
    BLOCK,
    BEFORE,
    AFTER,
    OUT,
    OUT_SCALAR,
    PLANES,
    WIDE,
    SCALAR,
    EXCHANGED,
    KEPT,
    PLACES
};

static unsigned char *copy_of(unsigned place, const void *from, size_t bytes)
{
    static fuzz_room rooms[PLACES];
    return fuzz_room_take(&rooms[place], from, bytes);
}

static bool apply_at(rft_cpu_level level, rft_delta_shape shape, const rft_delta_entry *entry,
                     const unsigned char *planes, unsigned char *block)
{
    rft_cpu_limit(level);
    return rft_delta_apply(shape, entry, planes, block);
}

/* Whether it is good; then `block` is changed. */
static bool apply(rft_delta_shape shape, const rft_delta_entry *entry, const unsigned char *coded,
                  unsigned char *block)
{
    size_t bytes = (size_t)shape.elements * shape.width;
    unsigned char *planes = copy_of(PLANES, coded, entry->total);
    unsigned char *wide = copy_of(WIDE, block, bytes), *scalar = copy_of(SCALAR, block, bytes);
    bool good = apply_at(RFT_CPU_BASE, shape, entry, planes, scalar);
    FUZZ_REQUIRE(apply_at(RFT_CPU_AVX512, shape, entry, planes, wide) == good);
    if (good) {
        FUZZ_REQUIRE(memcmp(wide, scalar, bytes) == 0);
        FUZZ_REQUIRE(apply_at(RFT_CPU_AVX512, shape, entry, planes, wide));
        FUZZ_REQUIRE(memcmp(wide, scalar, bytes) == 0);
        memcpy(block, wide, bytes);
        fuzz_taken++;
    }
    return good;
}

/* Of a period, which is written once and then copied: byte for byte would cost more than the rest.
 */
static void make_up(unsigned char *block, size_t bytes, unsigned char seed, size_t period)
{
    for (size_t i = 0; i < period && i < bytes; i++)
        block[i] = (unsigned char)(seed + i * 37);
    for (size_t done = period; done < bytes; done += period)
        memcpy(block + done, block, bytes - done < period ? bytes - done : period);
}

static void apply_planes(rft_delta_shape shape, const uint8_t *data, size_t size)
{
    size_t bytes = (size_t)shape.elements * shape.width, left = size - HEADER;
    unsigned char *coded = copy_of(CODED, data + HEADER, left);
    unsigned char *block = copy_of(BLOCK, NULL, bytes);
    rft_delta_entry entry;
    make_up(block, bytes, data[7], 1 + (size_t)data[8]);
    if (rft_delta_measure(shape, get_u16(data + 3) + 1, get_u16(data + 5), coded, left, &entry)) {
        FUZZ_REQUIRE(entry.total <= left);
        (void)apply(shape, &entry, coded, block);
    }
}

static bool encode_at(rft_cpu_level level, rft_delta_shape shape, const unsigned char *before,
                      const unsigned char *after, unsigned char *out, rft_delta_entry *entry)
{
    rft_cpu_limit(level);
    FUZZ_REQUIRE((rft_delta_count(shape, before, after) == 0) ==
                 (memcmp(before, after, (size_t)shape.elements * shape.width) == 0));
    return rft_delta_encode(shape, before, after, out, entry);
}

static void encode(rft_delta_shape shape, const unsigned char *before, const unsigned char *after)
{
    size_t bound = rft_delta_bound(shape), bytes = (size_t)shape.elements * shape.width;
    unsigned char *out = copy_of(OUT, NULL, bound), *scalar = copy_of(OUT_SCALAR, NULL, bound);
    unsigned char *block = copy_of(BLOCK, before, bytes);
    rft_delta_entry entry, as_scalar, measured;
    bool coded = encode_at(RFT_CPU_AVX512, shape, before, after, out, &entry);
    FUZZ_REQUIRE(encode_at(RFT_CPU_BASE, shape, before, after, scalar, &as_scalar) == coded);
    FUZZ_REQUIRE(memcmp(&entry, &as_scalar, sizeof entry) == 0);
    if (coded) {
        FUZZ_REQUIRE(memcmp(out, scalar, entry.total) == 0);
        FUZZ_REQUIRE(
            rft_delta_measure(shape, entry.changed, entry.escapes, out, entry.total, &measured));
        FUZZ_REQUIRE(memcmp(&entry, &measured, sizeof entry) == 0);
        FUZZ_REQUIRE(apply(shape, &entry, out, block));
        FUZZ_REQUIRE(memcmp(block, after, bytes) == 0);
    }
}

/* In place, and back by what was kept. */
static void exchange_at(rft_cpu_level level, rft_delta_shape shape, const unsigned char *before,
                        const unsigned char *after)
{
    size_t bytes = (size_t)shape.elements * shape.width;
    unsigned char *block = copy_of(EXCHANGED, before, bytes);
    unsigned char *kept = copy_of(KEPT, NULL, rft_delta_bound(shape));
    rft_delta_entry entry;
    rft_cpu_limit(level);
    bool coded = rft_delta_exchange(shape, block, after, kept, &entry);
    FUZZ_REQUIRE(memcmp(block, after, bytes) == 0);
    FUZZ_REQUIRE((entry.changed == 0) == (memcmp(before, after, bytes) == 0));
    if (entry.changed == 0) return;
    if (coded) {
        shape.kind = RFT_DELTA_RAW;
        FUZZ_REQUIRE(apply(shape, &entry, kept, block));
    } else {
        memcpy(block, kept, bytes);
    }
    FUZZ_REQUIRE(memcmp(block, before, bytes) == 0);
}

static void encode_halves(rft_delta_shape shape, const uint8_t *data, size_t size)
{
    uint32_t there = (uint32_t)((size - HEADER) / (2 * shape.width));
    if (shape.elements > there) shape.elements = there;
    if (shape.elements == 0) return;
    size_t bytes = (size_t)shape.elements * shape.width;
    unsigned char *before = copy_of(BEFORE, data + HEADER, bytes);
    unsigned char *after = copy_of(AFTER, data + HEADER + bytes, bytes);
    /* Mostly alike, as blocks are. */
    size_t run = (size_t)data[8] * shape.width;
    for (size_t at = 0; at < bytes && run != 0; at += run) {
        size_t from = at + shape.width, end = at + run < bytes ? at + run : bytes;
        if (from < end) memcpy(after + from, before + from, end - from);
    }
    encode(shape, before, after);
    exchange_at(RFT_CPU_AVX512, shape, before, after);
    exchange_at(RFT_CPU_BASE, shape, before, after);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < HEADER) return 0;
    rft_delta_shape shape = kinds[data[0] % (sizeof kinds / sizeof kinds[0])];
    shape.elements = 1 + get_u16(data + 1) % MOST;
    if ((data[0] & ENCODES) != 0)
        encode_halves(shape, data, size);
    else
        apply_planes(shape, data, size);
    return 0;
}
