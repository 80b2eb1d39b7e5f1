/*
 * Coded blocks. The input is a header of nine bytes and what follows:
 *
 *     what | elements - 1 (u16) | changed - 1 (u16) | escapes (u16) | seed | period | bytes…
 *
 * The bytes are the planes of a block that lies over made-up elements; or, with one bit of `what`,
 * a block before and after, by halves. Scalar and wide forms must agree in every answer.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "kernels/cpu.h"
#include "kernels/delta.h"

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

/* Memory of exactly its size, so that a sanitizer sees every step beyond it. */
static unsigned char *copy_of(const void *from, size_t bytes)
{
    unsigned char *copy = malloc(bytes == 0 ? 1 : bytes);
    FUZZ_REQUIRE(copy != NULL);
    if (from != NULL) memcpy(copy, from, bytes);
    return copy;
}

static bool apply_at(rft_cpu_level level, rft_delta_shape shape, const rft_delta_entry *entry,
                     const unsigned char *planes, unsigned char *block)
{
    rft_cpu_limit(level);
    return rft_delta_apply(shape, entry, planes, block);
}

/* Returns the verdict; `block` is changed if it is good. */
static bool apply(rft_delta_shape shape, const rft_delta_entry *entry, const unsigned char *coded,
                  unsigned char *block)
{
    size_t bytes = (size_t)shape.elements * shape.width;
    unsigned char *planes = copy_of(coded, entry->total);
    unsigned char *wide = copy_of(block, bytes), *scalar = copy_of(block, bytes);
    bool good = apply_at(RFT_CPU_BASE, shape, entry, planes, scalar);
    FUZZ_REQUIRE(apply_at(RFT_CPU_AVX512, shape, entry, planes, wide) == good);
    if (good) {
        FUZZ_REQUIRE(memcmp(wide, scalar, bytes) == 0);
        FUZZ_REQUIRE(apply_at(RFT_CPU_AVX512, shape, entry, planes, wide));
        FUZZ_REQUIRE(memcmp(wide, scalar, bytes) == 0);
        memcpy(block, wide, bytes);
    }
    free(planes);
    free(wide);
    free(scalar);
    return good;
}

static void apply_planes(rft_delta_shape shape, const uint8_t *data, size_t size)
{
    size_t bytes = (size_t)shape.elements * shape.width, left = size - HEADER;
    unsigned char *coded = copy_of(data + HEADER, left), *block = copy_of(NULL, bytes);
    rft_delta_entry entry;
    for (size_t i = 0; i < bytes; i++) {
        block[i] = (unsigned char)(data[7] + i % (1 + (size_t)data[8]) * 37);
    }
    if (rft_delta_measure(shape, get_u16(data + 3) + 1, get_u16(data + 5), coded, left, &entry)) {
        FUZZ_REQUIRE(entry.total <= left);
        (void)apply(shape, &entry, coded, block);
    }
    free(coded);
    free(block);
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
    unsigned char *out = copy_of(NULL, bound), *scalar = copy_of(NULL, bound);
    unsigned char *block = copy_of(before, bytes);
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
    free(out);
    free(scalar);
    free(block);
}

static void encode_halves(rft_delta_shape shape, const uint8_t *data, size_t size)
{
    uint32_t there = (uint32_t)((size - HEADER) / (2 * shape.width));
    if (shape.elements > there) shape.elements = there;
    if (shape.elements == 0) return;
    size_t bytes = (size_t)shape.elements * shape.width;
    unsigned char *before = copy_of(data + HEADER, bytes);
    unsigned char *after = copy_of(data + HEADER + bytes, bytes);
    /* Mostly alike, as blocks are. */
    for (size_t i = 0; i < shape.elements && data[8] != 0; i++) {
        size_t at = i * shape.width;
        if (i % data[8] != 0) memcpy(after + at, before + at, shape.width);
    }
    encode(shape, before, after);
    free(before);
    free(after);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < HEADER) return 0;
    rft_delta_shape shape = kinds[data[0] % (sizeof kinds / sizeof kinds[0])];
    shape.elements = 1 + get_u16(data + 1) % MOST;
    if ((data[0] & ENCODES) != 0) {
        encode_halves(shape, data, size);
    } else {
        apply_planes(shape, data, size);
    }
    return 0;
}
