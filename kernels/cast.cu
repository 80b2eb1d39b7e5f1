/*
 * cast: fp32 to bf16 in integers, as the C twin does it, so that neither the GPU's own conversion
 * nor a compiler's flag decides what a NaN or a subnormal becomes.
 *
 * A thread takes eight elements at once where a vector of results and the two vectors that it comes
 * from lie on their boundaries; what is left at both ends, and arrays that never come to such a
 * place, go element by element.
 */
#include "kernels/gpu.h"

RFT_GPU_PART unsigned cast_round(unsigned bits)
{
    unsigned rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded;
}

RFT_GPU_PART unsigned cast_pair(unsigned low, unsigned high)
{
    return cast_round(low) | cast_round(high) << 16;
}

RFT_GPU_PART uint4 cast_eight(uint4 low, uint4 high)
{
    uint4 results;
    results.x = cast_pair(low.x, low.y);
    results.y = cast_pair(low.z, low.w);
    results.z = cast_pair(high.x, high.y);
    results.w = cast_pair(high.z, high.w);
    return results;
}

/* Four loads are under way before the first store. */
RFT_GPU_PART void cast_eights(uint4 *to, const uint4 *from, uint64_t count)
{
    uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + threads < count; i += 2 * threads) {
        uint64_t j = i + threads;
        uint4 a = __ldcs(from + 2 * i), b = __ldcs(from + 2 * i + 1);
        uint4 c = __ldcs(from + 2 * j), d = __ldcs(from + 2 * j + 1);
        __stcs(to + i, cast_eight(a, b));
        __stcs(to + j, cast_eight(c, d));
    }
    if (i < count) __stcs(to + i, cast_eight(__ldcs(from + 2 * i), __ldcs(from + 2 * i + 1)));
}

RFT_GPU_PART unsigned cast_load(const unsigned char *from)
{
    if ((uintptr_t)from % 4 == 0) return *(const unsigned *)from;
    return from[0] | (unsigned)from[1] << 8 | (unsigned)from[2] << 16 | (unsigned)from[3] << 24;
}

RFT_GPU_PART void cast_store(unsigned char *to, unsigned result)
{
    if ((uintptr_t)to % 2 == 0) {
        *(uint16_t *)to = (uint16_t)result;
    } else {
        to[0] = (unsigned char)result;
        to[1] = (unsigned char)(result >> 8);
    }
}

RFT_GPU_PART void cast_singles(unsigned char *to, const unsigned char *from, uint64_t count)
{
    uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
        cast_store(to + 2 * i, cast_round(cast_load(from + 4 * i)));
    }
}

RFT_GPU_KERNEL void rft_cast_kernel(uint16_t *results, const float *elements, uint64_t count)
{
    unsigned char *to = (unsigned char *)results;
    const unsigned char *from = (const unsigned char *)elements;
    uint64_t head = -(uintptr_t)to % 16 / 2;
    bool wide = (uintptr_t)to % 2 == 0 && ((uintptr_t)from + 4 * head) % 16 == 0;
    if (!wide || count < head + 8) {
        cast_singles(to, from, count);
        return;
    }
    uint64_t eights = (count - head) / 8;
    uint64_t done = head + 8 * eights;
    cast_eights((uint4 *)(to + 2 * head), (const uint4 *)(from + 4 * head), eights);
    cast_singles(to, from, head);
    cast_singles(to + 2 * done, from + 4 * done, count - done);
}
