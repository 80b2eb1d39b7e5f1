/*
 * The cast's scalar form, which every other form equals bit for bit, and the choice between them at
 * run time.
 *
 * All forms round with integers: half of the last kept bit, less one if that bit is even, is added
 * and the low half dropped; a carry goes into the exponent, up to infinity. The floating-point
 * modes of the caller's thread make no difference. Elements are read and written as bytes, so they
 * may lie anywhere.
 */
#include "kernels/cast.h"

#include <stdbool.h>
#include <string.h>

#include "kernels/cast_wide.h"
#include "kernels/cpu.h"

/* From this many bytes on the result is streamed, as in copy.c. */
#define STREAM_LEAST ((size_t)1 << 20)

static uint16_t round_bits(uint32_t bits)
{
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static void scalar_cast(char *to, const char *from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + 4 * i, sizeof bits);
        uint16_t rounded = round_bits(bits);
        memcpy(to + 2 * i, &rounded, sizeof rounded);
    }
}

/* Whole blocks; false where the CPU has no wide form. */
static bool wide_cast(char *to, const char *from, size_t count, bool streams)
{
#if defined(__x86_64__)
    switch (rft_cpu_get_level()) {
    case RFT_CPU_AVX512: rft_cast_avx512(to, from, count, streams); return true;
    case RFT_CPU_AVX2: rft_cast_avx2(to, from, count, streams); return true;
    case RFT_CPU_BASE: break;
    }
#elif defined(__aarch64__)
    if (rft_cpu_get_level() == RFT_CPU_NEON) {
        rft_cast_neon(to, from, count);
        return true;
    }
#endif
    (void)to;
    (void)from;
    (void)count;
    (void)streams;
    return false;
}

/* Elements before the wide form may begin: streaming writes whole lines, and elements at an odd
 * `to` never begin one. */
static size_t head_of(const char *to, size_t count, bool *streams)
{
    *streams = 2 * count >= STREAM_LEAST && (uintptr_t)to % 2 == 0;
    return *streams ? -(uintptr_t)to % 64 / 2 : 0;
}

void rft_cast_bf16(uint16_t *to, const float *from, size_t count)
{
    char *target = (char *)to;
    const char *source = (const char *)from;
    bool streams;
    size_t head = head_of(target, count, &streams);
    size_t body = (count - head) / RFT_CAST_BLOCK * RFT_CAST_BLOCK;
    if (body == 0 || !wide_cast(target + 2 * head, source + 4 * head, body, streams)) {
        scalar_cast(target, source, count);
        return;
    }
    size_t done = head + body;
    scalar_cast(target, source, head);
    scalar_cast(target + 2 * done, source + 4 * done, count - done);
}
