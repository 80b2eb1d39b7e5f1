/*
 * pack: many small copies in one launch, at the speed of the memory.
 *
 * Blocks that lie in a row of the grid (y) share a run of entries: each reads it once, which may be
 * from host memory, into shared memory, and counts the chunks of every entry. Their warps then take
 * chunks in turn, so that short and long entries give every warp the same work. A chunk whose two
 * ends agree modulo 16 is moved by vectors; any other is written by vectors that are put together
 * from words. What is left at both ends goes byte by byte. Nothing after an entry is read.
 */
#include "kernels/gpu.h"
#include "kernels/pack.h"

#define RUN_MOST RFT_GPU_WARP /* entries that one warp reads at once */

RFT_GPU_PART void pack_bytes(unsigned char *to, const unsigned char *from, unsigned bytes,
                             unsigned lane)
{
    for (unsigned i = lane; i < bytes; i += RFT_GPU_WARP) {
        to[i] = from[i];
    }
}

/* Four loads are under way before the first store. */
RFT_GPU_PART void pack_vectors(uint4 *to, const uint4 *from, unsigned count, unsigned lane)
{
    unsigned i = lane;
    for (; i + 3 * RFT_GPU_WARP < count; i += 4 * RFT_GPU_WARP) {
        uint4 a = __ldcs(from + i);
        uint4 b = __ldcs(from + i + RFT_GPU_WARP);
        uint4 c = __ldcs(from + i + 2 * RFT_GPU_WARP);
        uint4 d = __ldcs(from + i + 3 * RFT_GPU_WARP);
        __stcs(to + i, a);
        __stcs(to + i + RFT_GPU_WARP, b);
        __stcs(to + i + 2 * RFT_GPU_WARP, c);
        __stcs(to + i + 3 * RFT_GPU_WARP, d);
    }
    for (; i < count; i += RFT_GPU_WARP) {
        __stcs(to + i, __ldcs(from + i));
    }
}

/* The 16 bytes that begin `shift` bits into the words. */
RFT_GPU_PART uint4 pack_funnel(const unsigned *words, unsigned shift)
{
    unsigned a = words[0], b = words[1], c = words[2], d = words[3], e = words[4];
    uint4 vector;
    vector.x = __funnelshift_r(a, b, shift);
    vector.y = __funnelshift_r(b, c, shift);
    vector.z = __funnelshift_r(c, d, shift);
    vector.w = __funnelshift_r(d, e, shift);
    return vector;
}

/* Likewise where the source lies anywhere. It is read in whole words: the first may begin before
 * it, and up to 4 bytes after it are read. */
RFT_GPU_PART void pack_funnels(uint4 *to, const unsigned char *from, unsigned count, unsigned lane)
{
    unsigned aside = (unsigned)((uintptr_t)from % 4);
    const unsigned *words = (const unsigned *)(from - aside);
    unsigned i = lane;
    for (; i + RFT_GPU_WARP < count; i += 2 * RFT_GPU_WARP) {
        uint4 a = pack_funnel(words + 4 * i, 8 * aside);
        uint4 b = pack_funnel(words + 4 * (i + RFT_GPU_WARP), 8 * aside);
        __stcs(to + i, a);
        __stcs(to + i + RFT_GPU_WARP, b);
    }
    if (i < count) __stcs(to + i, pack_funnel(words + 4 * i, 8 * aside));
}

/* By a whole warp. A funnelled body keeps off the end by what it reads after itself. */
RFT_GPU_PART void pack_chunk(unsigned char *to, const unsigned char *from, unsigned bytes,
                             unsigned lane)
{
    bool alike = (uintptr_t)to % 16 == (uintptr_t)from % 16;
    unsigned head = (unsigned)(-(uintptr_t)to % 16);
    unsigned spare = alike ? 0 : 4;
    if (bytes < head + 16 + spare) {
        pack_bytes(to, from, bytes, lane);
        return;
    }
    unsigned vectors = (bytes - head - spare) / 16;
    unsigned done = head + 16 * vectors;
    if (alike) {
        pack_vectors((uint4 *)(to + head), (const uint4 *)(from + head), vectors, lane);
    } else {
        pack_funnels((uint4 *)(to + head), from + head, vectors, lane);
    }
    pack_bytes(to, from, head, lane);
    pack_bytes(to + done, from + done, bytes - done, lane);
}

/* One warp reads up to 32 entries; `ends`: how many chunks there are up to each one's end. */
RFT_GPU_PART void pack_read_run(const rft_pack_entry *entries, unsigned count, rft_pack_entry *run,
                                uint64_t *ends)
{
    unsigned lane = threadIdx.x;
    uint64_t chunks = 0;
    if (lane < count) {
        run[lane] = entries[lane];
        chunks = (run[lane].bytes + RFT_GPU_CHUNK - 1) / RFT_GPU_CHUNK;
    }
    for (unsigned apart = 1; apart < RFT_GPU_WARP; apart *= 2) {
        uint64_t before = __shfl_up_sync(0xFFFFFFFFu, chunks, apart);
        if (lane >= apart) chunks += before;
    }
    if (lane < count) ends[lane] = chunks;
}

/* This warp's share of the chunks of a run. */
RFT_GPU_PART void pack_run(const rft_pack_entry *run, const uint64_t *ends, unsigned count)
{
    unsigned lane = threadIdx.x % RFT_GPU_WARP;
    unsigned warps = blockDim.x / RFT_GPU_WARP;
    uint64_t chunk = (uint64_t)blockIdx.y * warps + threadIdx.x / RFT_GPU_WARP;
    unsigned at = 0;
    for (; chunk < ends[count - 1]; chunk += (uint64_t)gridDim.y * warps) {
        while (ends[at] <= chunk) {
            at++;
        }
        uint64_t begin = (chunk - (at == 0 ? 0 : ends[at - 1])) * RFT_GPU_CHUNK;
        uint64_t left = run[at].bytes - begin;
        pack_chunk((unsigned char *)(uintptr_t)(run[at].to + begin),
                   (const unsigned char *)(uintptr_t)(run[at].from + begin),
                   (unsigned)(left < RFT_GPU_CHUNK ? left : RFT_GPU_CHUNK), lane);
    }
}

RFT_GPU_KERNEL void rft_pack_kernel(const rft_pack_entry *entries, uint32_t count)
{
    __shared__ rft_pack_entry run[RUN_MOST];
    __shared__ uint64_t ends[RUN_MOST];
    uint64_t share = ((uint64_t)count + gridDim.x - 1) / gridDim.x;
    if (share > RUN_MOST) share = RUN_MOST;
    for (uint64_t at = blockIdx.x * share; at < count; at += gridDim.x * share) {
        unsigned here = (unsigned)(count - at < share ? count - at : share);
        if (threadIdx.x < RFT_GPU_WARP) pack_read_run(entries + at, here, run, ends);
        __syncthreads();
        pack_run(run, ends, here);
        __syncthreads(); /* before the next run takes this one's place */
    }
}
