/* delta_apply: coded blocks applied as kernels/delta.h says, each by the threads of one block. */
#include "kernels/delta_threads.h"

/* Of a plane that begins at `plane`; bytes that have none of them are not read. */
RFT_GPU_PART uint32_t delta_get(const unsigned char *plane, uint32_t at, uint32_t count)
{
    uint32_t bits = 0;
    RFT_GPU_ROLLED
    for (uint32_t i = 0; 8 * i < at % 8 + count && count != 0; i++) {
        bits |= (uint32_t)plane[at / 8 + i] << 8 * i;
    }
    return bits >> at % 8 & ((1u << count) - 1);
}

/* A job that is applied, its planes found. */
typedef struct delta_planes {
    const unsigned char *at[RFT_DELTA_PLANES];
    uint32_t low;
} delta_planes;

RFT_GPU_PART delta_planes delta_find_planes(const rft_delta_job *job)
{
    delta_starts starts = delta_find_starts(&job->entry);
    delta_planes planes;
    planes.low = rft_delta_low_bits(job->shape.elements, job->entry.changed);
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        planes.at[i] = (const unsigned char *)job->coded + starts.of[i];
    }
    return planes;
}

RFT_GPU_PART bool delta_is_well_formed(const rft_delta_job *job)
{
    if (!rft_delta_is_laid_out(job->shape, &job->entry)) return false;
    delta_planes planes = delta_find_planes(job);
    uint32_t changed = job->entry.changed;
    uint32_t symbols = job->shape.kind == RFT_DELTA_HALF ? 2 * changed : 0;
    return rft_delta_is_clean(planes.at[RFT_DELTA_LOW], changed * planes.low) &&
           rft_delta_is_clean(planes.at[RFT_DELTA_HIGH],
                              rft_delta_high_bits(job->shape.elements, changed)) &&
           rft_delta_is_clean(planes.at[RFT_DELTA_SYMBOLS], symbols) &&
           rft_delta_is_clean(planes.at[RFT_DELTA_ESCAPES], 4 * job->entry.escapes);
}

RFT_GPU_PART uint32_t delta_position(const delta_planes *planes, uint32_t bit, uint32_t rank)
{
    uint32_t low = planes->low;
    if (low == 0) return bit;
    return (bit - rank) << low | delta_get(planes->at[RFT_DELTA_LOW], rank * low, low);
}

/* The element lies in the block and after the one before it, which shares its high part if its bit
 * stands right before. */
RFT_GPU_PART bool delta_is_placed(const rft_delta_job *job, const delta_planes *planes,
                                  const delta_shared *shared, uint32_t bit, uint32_t rank)
{
    uint32_t position = delta_position(planes, bit, rank);
    if (position >= job->shape.elements) return false;
    if (planes->low == 0 || bit == 0) return true;
    if ((shared->map[(bit - 1) / 8] >> (bit - 1) % 8 & 1) == 0) return true;
    return position > delta_position(planes, bit - 1, rank - 1);
}

/* Elements that are not where one may be, in the upper half; escapes in the lower one. */
RFT_GPU_PART uint64_t delta_check(const rft_delta_job *job, const delta_planes *planes,
                                  const delta_shared *shared, delta_share share, uint32_t rank)
{
    uint64_t found = 0;
    bool half = job->shape.kind == RFT_DELTA_HALF;
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        RFT_GPU_ROLLED
        for (uint32_t bits = shared->map[i]; bits != 0; bits &= bits - 1, rank++) {
            uint32_t bit = 8 * i + (uint32_t)__ffs((int)bits) - 1;
            if (!delta_is_placed(job, planes, shared, bit, rank)) found += UINT64_C(1) << 32;
            if (half && delta_get(planes->at[RFT_DELTA_SYMBOLS], 2 * rank, 2) == 3) found++;
        }
    }
    return found;
}

/* Of `count` numbers of `bits` bits, from the `first` on: those with all bits set. */
RFT_GPU_PART uint32_t delta_count_full(const unsigned char *plane, uint32_t bits, uint32_t first,
                                       uint32_t count)
{
    uint32_t full = 0;
    RFT_GPU_ROLLED
    for (uint32_t i = first; i < first + count; i++) {
        full += delta_get(plane, i * bits, bits) == (1u << bits) - 1;
    }
    return full;
}

/* Where this thread's escapes, far bytes and values begin. False: there are not as many of them as
 * the entry says. By all threads. */
RFT_GPU_PART bool delta_find_escapes(const rft_delta_job *job, const delta_planes *planes,
                                     delta_shared *shared, uint32_t count, delta_cursor *next)
{
    uint64_t escapes, far, values;
    next->escapes = (uint32_t)delta_scan(shared, count, &escapes);
    if (escapes != job->entry.escapes) return false;
    count = delta_count_full(planes->at[RFT_DELTA_ESCAPES], 4, next->escapes, count);
    next->far = (uint32_t)delta_scan(shared, count, &far);
    if (far != job->entry.far) return false;
    count = delta_count_full(planes->at[RFT_DELTA_FAR], 8, next->far, count);
    next->values = (uint32_t)delta_scan(shared, count, &values);
    return job->shape.kind != RFT_DELTA_HALF || values == job->entry.values;
}

RFT_GPU_PART void delta_apply_half(unsigned char *element, const delta_planes *planes,
                                   delta_cursor *next)
{
    uint32_t own = rft_delta_number(delta_load_half(element)), by = 3;
    uint32_t rest = delta_get(planes->at[RFT_DELTA_SYMBOLS], 2 * next->done, 2);
    if (rest == by) {
        by = 15;
        rest = delta_get(planes->at[RFT_DELTA_ESCAPES], 4 * next->escapes++, 4);
    }
    if (rest == 15) {
        by = 255;
        rest = planes->at[RFT_DELTA_FAR][next->far++];
    }
    if (rest == 255) {
        delta_store_half(element, delta_get(planes->at[RFT_DELTA_VALUES], 16 * next->values++, 16));
    } else {
        delta_store_half(element, rft_delta_bits(rft_delta_nearest(own, rest, by)));
    }
}

/* All of a chunk's elements. */
RFT_GPU_PART void delta_apply_share(const rft_delta_job *job, const delta_planes *planes,
                                    const delta_shared *shared, delta_share share,
                                    delta_cursor next)
{
    uint32_t width = job->shape.width;
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        RFT_GPU_ROLLED
        for (uint32_t bits = shared->map[i]; bits != 0; bits &= bits - 1, next.done++) {
            uint32_t bit = 8 * i + (uint32_t)__ffs((int)bits) - 1;
            uint32_t position = delta_position(planes, bit, next.done);
            unsigned char *element = (unsigned char *)job->after + (uint64_t)position * width;
            if (job->shape.kind == RFT_DELTA_HALF) {
                delta_apply_half(element, planes, &next);
                continue;
            }
            const unsigned char *value = planes->at[RFT_DELTA_VALUES] + next.done * width;
            RFT_GPU_ROLLED
            for (uint32_t k = 0; k < width; k++) {
                element[k] = value[k];
            }
        }
    }
}

/* A block that was noted whole. */
RFT_GPU_PART void delta_apply_whole(const rft_delta_job *job)
{
    unsigned char *block = (unsigned char *)job->after;
    const unsigned char *from = (const unsigned char *)job->coded;
    uint32_t bytes = job->shape.elements * job->shape.width;
    bool even = ((uintptr_t)block | (uintptr_t)from) % 8 == 0;
    uint32_t words = even ? bytes / 8 : 0;
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
        ((uint64_t *)block)[i] = ((const uint64_t *)from)[i];
    }
    RFT_GPU_ROLLED
    for (uint32_t i = 8 * words + threadIdx.x; i < bytes; i += blockDim.x) {
        block[i] = from[i];
    }
}

/* Returns, to all threads alike, whether the planes were good. */
RFT_GPU_PART bool delta_apply(const rft_delta_job *job, delta_shared *shared)
{
    uint64_t changed, found;
    delta_cursor next = {0, 0, 0, 0};
    if (job->whole != 0) {
        delta_apply_whole(job);
        return true;
    }
    if (!delta_is_well_formed(job)) return false;
    delta_planes planes = delta_find_planes(job);
    uint32_t bytes = job->entry.bytes[RFT_DELTA_HIGH];
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; i < bytes; i += blockDim.x) {
        shared->map[i] = planes.at[RFT_DELTA_HIGH][i];
    }
    __syncthreads();
    delta_share share = delta_share_of(bytes);
    next.done = (uint32_t)delta_scan(shared, delta_count_bits(shared, share), &changed);
    if (changed != job->entry.changed) return false;
    uint64_t own = delta_check(job, &planes, shared, share, next.done);
    (void)delta_scan(shared, own, &found);
    if (found >> 32 != 0) return false;
    if (!delta_find_escapes(job, &planes, shared, (uint32_t)own, &next)) return false;
    delta_apply_share(job, &planes, shared, share, next);
    return true;
}

RFT_GPU_KERNEL void rft_delta_apply_kernel(rft_delta_job *jobs, uint32_t count)
{
    __shared__ delta_shared shared;
    RFT_GPU_ROLLED
    for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
        bool good = delta_apply(&jobs[i], &shared);
        __syncthreads();
        if (threadIdx.x == 0) jobs[i].good = good;
    }
}
