/*
 * The scalar form of the sums, which every other form equals bit for bit, and the choice between
 * them at run time. The wide forms take what is a multiple of 16 elements of a block; the lanes of
 * the rest are added by the scalar form. A block that is copied is in the cache when it is: it is
 * streamed from there, so that memory is read once.
 */
#include "kernels/norm.h"

#include <string.h>

#include "kernels/copy.h"
#include "kernels/cpu.h"
#include "kernels/norm_wide.h"

static float load(const char *from, rft_float_type type)
{
    float value;
    uint16_t half;
    if (type == RFT_FP32) {
        memcpy(&value, from, sizeof value);
        return value;
    }
    memcpy(&half, from, sizeof half);
    if (type == RFT_BF16) {
        rft_floats_from_bf16(&value, &half, 1);
    } else {
        rft_floats_from_half(&value, &half, 1);
    }
    return value;
}

static void scalar_sum(double *lanes, const char *from, rft_float_type type, float scale,
                       size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float scaled = load(from + i * rft_float_bytes(type), type) * scale;
        lanes[i % RFT_NORM_LANES] += (double)scaled * (double)scaled;
    }
}

/* How many elements the wide form has done, from the first on. */
static size_t wide_sum(double *lanes, const char *from, rft_float_type type, float scale,
                       size_t count)
{
    size_t whole = count / RFT_NORM_LANES * RFT_NORM_LANES;
#if defined(__x86_64__)
    switch (rft_cpu_get_level()) {
    case RFT_CPU_AVX512: rft_norm_avx512(lanes, from, type, scale, whole); return whole;
    case RFT_CPU_AVX2: rft_norm_avx2(lanes, from, type, scale, whole); return whole;
    case RFT_CPU_BASE: break;
    }
#elif defined(__aarch64__)
    if (rft_cpu_get_level() == RFT_CPU_NEON) {
        rft_norm_neon(lanes, from, type, scale, whole);
        return whole;
    }
#endif
    (void)lanes;
    (void)from;
    (void)type;
    (void)scale;
    (void)whole;
    return 0;
}

static double block_sum(const char *from, rft_float_type type, float scale, size_t count)
{
    _Alignas(64) double lanes[RFT_NORM_LANES] = {0};
    size_t done = wide_sum(lanes, from, type, scale, count);
    scalar_sum(lanes, from + done * rft_float_bytes(type), type, scale, count - done);
    for (size_t half = RFT_NORM_LANES / 2; half > 0; half /= 2) {
        for (size_t j = 0; j < half; j++)
            lanes[j] += lanes[j + half];
    }
    return lanes[0];
}

size_t rft_norm_blocks(size_t count)
{
    return count / RFT_NORM_BLOCK + (count % RFT_NORM_BLOCK != 0);
}

void rft_norm_sum(const rft_norm_span *span, double *sums)
{
    const char *from = span->gradient;
    const size_t width = rft_float_bytes(span->type);
    for (size_t first = 0; first < span->count; first += RFT_NORM_BLOCK) {
        size_t left = span->count - first, count = left < RFT_NORM_BLOCK ? left : RFT_NORM_BLOCK;
        sums[first / RFT_NORM_BLOCK] =
            block_sum(from + first * width, span->type, span->scale, count);
        if (span->copy == NULL) continue;
        rft_copy_piece((char *)span->copy + first * width, from + first * width, count * width);
    }
}

double rft_norm_total(const double *sums, size_t blocks)
{
    double total = 0;
    for (size_t i = 0; i < blocks; i++)
        total += sums[i];
    return total;
}
