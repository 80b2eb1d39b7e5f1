/*
 * delta: blocks coded and applied as kernels/delta.h says, each by the threads of one block.
 *
 * A bit an element, or the plane HIGH, lies in shared memory. Every thread takes a stretch of it,
 * and so of the elements; scans over the threads say which element, escape and far byte is its
 * first. So the threads go over their stretches several times, counting first, and write once all
 * is known: the coder, how long the planes are; the other one, that they do not contradict
 * themselves.
 */
#include "kernels/delta_job.h"
#include "kernels/gpu.h"

#define DELTA_MAP (RFT_DELTA_ELEMENTS / 8)

/* A count of escapes, far bytes and values as one number, so that one scan adds all three. */
#define DELTA_FAR    21
#define DELTA_VALUES 42
#define DELTA_COUNT  ((UINT64_C(1) << DELTA_FAR) - 1)

/* What the threads of a block share. */
typedef struct delta_shared {
    unsigned char map[DELTA_MAP];
    uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
} delta_shared;

/* Where each plane begins in the coded bytes. */
typedef struct delta_starts {
    uint32_t of[RFT_DELTA_PLANES];
} delta_starts;

/* A thread's stretch of a plane in shared memory, in bytes. */
typedef struct delta_share {
    uint32_t from, to;
} delta_share;

/* The sum of what the threads before this one have; `total`: of all. */
RFT_GPU_PART uint64_t delta_scan(delta_shared *shared, uint64_t value, uint64_t *total)
{
    unsigned lane = threadIdx.x % RFT_GPU_WARP, warp = threadIdx.x / RFT_GPU_WARP;
    uint64_t sum = value, before = 0;
    for (unsigned apart = 1; apart < RFT_GPU_WARP; apart *= 2) {
        uint64_t below = __shfl_up_sync(0xFFFFFFFFu, sum, apart);
        if (lane >= apart) sum += below;
    }
    __syncthreads(); /* all have read what the scan before this one left */
    if (lane == RFT_GPU_WARP - 1) shared->of_warps[warp] = sum;
    __syncthreads();
    *total = 0;
    RFT_GPU_ROLLED
    for (unsigned i = 0; i < blockDim.x / RFT_GPU_WARP; i++) {
        if (i < warp) before += shared->of_warps[i];
        *total += shared->of_warps[i];
    }
    return before + sum - value;
}

RFT_GPU_PART delta_share delta_share_of(uint32_t bytes)
{
    uint32_t each = (bytes + blockDim.x - 1) / blockDim.x;
    delta_share share;
    share.from = threadIdx.x * each < bytes ? threadIdx.x * each : bytes;
    share.to = share.from + each < bytes ? share.from + each : bytes;
    return share;
}

RFT_GPU_PART uint32_t delta_count_bits(const delta_shared *shared, delta_share share)
{
    uint32_t count = 0;
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        count += (uint32_t)__popc(shared->map[i]);
    }
    return count;
}

RFT_GPU_PART uint32_t delta_low_bits(uint32_t elements, uint32_t changed)
{
    uint32_t bits = 0;
    RFT_GPU_ROLLED
    for (uint32_t each = elements / changed; each > 1 && bits < 15; each /= 2) {
        bits++;
    }
    return bits == 1 ? 0 : bits;
}

RFT_GPU_PART uint32_t delta_high_bits(uint32_t elements, uint32_t changed)
{
    uint32_t low = delta_low_bits(elements, changed);
    return low == 0 ? elements : ((elements - 1) >> low) + changed;
}

/* As the twin's. */
RFT_GPU_PART void delta_lay_out(rft_delta_shape shape, rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    uint32_t changed = entry->changed;
    entry->bytes[RFT_DELTA_LOW] = (changed * delta_low_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_HIGH] = (delta_high_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_SYMBOLS] = half ? (changed + 3) / 4 : 0;
    entry->bytes[RFT_DELTA_ESCAPES] = (entry->escapes + 1) / 2;
    entry->bytes[RFT_DELTA_FAR] = entry->far;
    entry->bytes[RFT_DELTA_VALUES] = entry->values * shape.width;
    entry->total = 0;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        entry->total += entry->bytes[i];
    }
}

RFT_GPU_PART delta_starts delta_find_starts(const rft_delta_entry *entry)
{
    delta_starts starts;
    uint32_t at = 0;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        starts.of[i] = at;
        at += entry->bytes[i];
    }
    return starts;
}

RFT_GPU_PART uint32_t delta_load_half(const unsigned char *at)
{
    if ((uintptr_t)at % 2 == 0) return *(const uint16_t *)at;
    return at[0] | (uint32_t)at[1] << 8;
}

RFT_GPU_PART void delta_store_half(unsigned char *at, uint32_t bits)
{
    if ((uintptr_t)at % 2 == 0) {
        *(uint16_t *)at = (uint16_t)bits;
    } else {
        at[0] = (unsigned char)bits;
        at[1] = (unsigned char)(bits >> 8);
    }
}

/* u of delta.h from the bits, and back. */
RFT_GPU_PART uint32_t delta_number(uint32_t bits)
{
    return (bits & 0x8000u) != 0 ? ~bits & 0xFFFFu : bits | 0x8000u;
}

RFT_GPU_PART uint32_t delta_bits(uint32_t number)
{
    return (number & 0x8000u) != 0 ? number & 0x7FFFu : ~number & 0xFFFFu;
}

/* ---- Encoding */

/* 8 bytes from anywhere. */
RFT_GPU_PART uint64_t delta_load_word(const unsigned char *at)
{
    if ((uintptr_t)at % 8 == 0) return *(const uint64_t *)at;
    uint64_t word = 0;
    for (unsigned i = 0; i < 8; i++) {
        word |= (uint64_t)at[i] << 8 * i;
    }
    return word;
}

/* A bit for each element of a word whose bytes are not all 0. */
RFT_GPU_PART uint32_t delta_fold(uint64_t word, uint32_t width)
{
    uint64_t element = width == 8 ? UINT64_MAX : (UINT64_C(1) << 8 * width) - 1;
    uint32_t bits = 0;
    RFT_GPU_ROLLED
    for (uint32_t i = 0; i < 8 / width; i++, word >>= 8 * width % 64) {
        bits |= (uint32_t)((word & element) != 0) << i;
    }
    return bits;
}

/* Which of eight elements differ: as many words as an element has bytes. */
RFT_GPU_PART uint32_t delta_compare_eight(const unsigned char *a, const unsigned char *b,
                                          uint32_t width)
{
    uint32_t bits = 0;
    RFT_GPU_ROLLED
    for (uint32_t i = 0; i < width; i++) {
        uint64_t word = delta_load_word(a + 8 * i) ^ delta_load_word(b + 8 * i);
        bits |= delta_fold(word, width) << 8 / width * i;
    }
    return bits;
}

RFT_GPU_PART uint32_t delta_compare_last(const unsigned char *a, const unsigned char *b,
                                         uint32_t count, uint32_t width)
{
    uint32_t bits = 0;
    RFT_GPU_ROLLED
    for (uint32_t i = 0; i < count * width; i++) {
        bits |= (uint32_t)(a[i] != b[i]) << i / width;
    }
    return bits;
}

/* Threads take eights of elements by turns. */
RFT_GPU_PART void delta_compare(const rft_delta_job *job, delta_shared *shared)
{
    const unsigned char *a = (const unsigned char *)job->before;
    const unsigned char *b = (const unsigned char *)job->after;
    uint32_t elements = job->shape.elements, width = job->shape.width;
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; i < (elements + 7) / 8; i += blockDim.x) {
        uint64_t at = (uint64_t)i * 8 * width;
        uint32_t left = elements - 8 * i;
        uint32_t bits = left >= 8 ? delta_compare_eight(a + at, b + at, width)
                                  : delta_compare_last(a + at, b + at, left, width);
        shared->map[i] = (unsigned char)bits;
    }
}

/* How far a half moved, and what it is now. */
typedef struct delta_move {
    uint32_t bits, number, distance;
} delta_move;

RFT_GPU_PART delta_move delta_move_of(const rft_delta_job *job, uint32_t position)
{
    const unsigned char *a = (const unsigned char *)job->before + 2 * position;
    const unsigned char *b = (const unsigned char *)job->after + 2 * position;
    uint32_t old = delta_number(delta_load_half(a));
    delta_move move;
    move.bits = delta_load_half(b);
    move.number = delta_number(move.bits);
    move.distance = move.number > old ? move.number - old : old - move.number;
    return move;
}

/* What the elements of a stretch need, as one number. */
RFT_GPU_PART uint64_t delta_tally(const rft_delta_job *job, const delta_shared *shared,
                                  delta_share share)
{
    uint64_t tally = 0;
    if (job->shape.kind != RFT_DELTA_HALF) return 0;
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        RFT_GPU_ROLLED
        for (uint32_t bits = shared->map[i]; bits != 0; bits &= bits - 1) {
            delta_move move = delta_move_of(job, 8 * i + (uint32_t)__ffs((int)bits) - 1);
            if (move.distance > 1) tally += 1;
            if (move.distance > 7) tally += UINT64_C(1) << DELTA_FAR;
            if (move.distance > 127) tally += UINT64_C(1) << DELTA_VALUES;
        }
    }
    return tally;
}

/* Bits of the coded bytes, at most 16; others of the same word may be set by other threads. */
RFT_GPU_PART void delta_put(unsigned *coded, uint32_t at, uint32_t bits)
{
    uint64_t placed = (uint64_t)bits << at % 32;
    if ((uint32_t)placed != 0) atomicOr(coded + at / 32, (unsigned)placed);
    if (placed >> 32 != 0) atomicOr(coded + at / 32 + 1, (unsigned)(placed >> 32));
}

/* Where a thread writes next: counts of what comes before. */
typedef struct delta_cursor {
    uint32_t done, escapes, far, values;
} delta_cursor;

RFT_GPU_PART void delta_put_half(unsigned *coded, const delta_starts *starts, delta_cursor *next,
                                 delta_move move)
{
    uint32_t symbol = move.distance <= 1 ? move.number % 3 : 3;
    uint32_t escape = move.distance <= 7 ? move.number % 15 : 15;
    uint32_t far = move.distance <= 127 ? move.number % 255 : 255;
    delta_put(coded, 8 * starts->of[RFT_DELTA_SYMBOLS] + 2 * next->done, symbol);
    if (symbol != 3) return;
    delta_put(coded, 8 * starts->of[RFT_DELTA_ESCAPES] + 4 * next->escapes++, escape);
    if (escape != 15) return;
    delta_put(coded, 8 * (starts->of[RFT_DELTA_FAR] + next->far++), far);
    if (far != 255) return;
    delta_put(coded, 8 * (starts->of[RFT_DELTA_VALUES] + 2 * next->values++), move.bits);
}

RFT_GPU_PART void delta_put_raw(unsigned *coded, const delta_starts *starts, uint32_t done,
                                const unsigned char *element, uint32_t width)
{
    uint32_t at = 8 * (starts->of[RFT_DELTA_VALUES] + done * width);
    RFT_GPU_ROLLED
    for (uint32_t i = 0; i < width; i++) {
        delta_put(coded, at + 8 * i, element[i]);
    }
}

/* All of a stretch's elements. */
RFT_GPU_PART void delta_put_share(const rft_delta_job *job, const rft_delta_entry *entry,
                                  const delta_shared *shared, delta_share share, delta_cursor next)
{
    unsigned *coded = (unsigned *)job->coded;
    uint32_t low = delta_low_bits(job->shape.elements, entry->changed);
    delta_starts starts = delta_find_starts(entry);
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        RFT_GPU_ROLLED
        for (uint32_t bits = shared->map[i]; bits != 0; bits &= bits - 1, next.done++) {
            uint32_t position = 8 * i + (uint32_t)__ffs((int)bits) - 1;
            uint32_t bit = (position >> low) + (low == 0 ? 0 : next.done);
            delta_put(coded, next.done * low, position & ((1u << low) - 1));
            delta_put(coded, 8 * starts.of[RFT_DELTA_HIGH] + bit, 1);
            if (job->shape.kind == RFT_DELTA_HALF) {
                delta_put_half(coded, &starts, &next, delta_move_of(job, position));
            } else {
                uint32_t width = job->shape.width;
                const unsigned char *all = (const unsigned char *)job->after;
                delta_put_raw(coded, &starts, next.done, all + (uint64_t)position * width, width);
            }
        }
    }
}

RFT_GPU_PART bool delta_is_smaller(rft_delta_shape shape, const rft_delta_entry *entry)
{
    return entry->total + RFT_DELTA_ENTRY_BYTES < shape.elements * shape.width &&
           entry->escapes <= UINT16_MAX;
}

RFT_GPU_PART void delta_encode(rft_delta_job *job, delta_shared *shared)
{
    uint64_t changed, total = 0;
    rft_delta_entry entry = {0};
    delta_cursor next = {0, 0, 0, 0};
    delta_compare(job, shared);
    __syncthreads();
    delta_share share = delta_share_of((job->shape.elements + 7) / 8);
    next.done = (uint32_t)delta_scan(shared, delta_count_bits(shared, share), &changed);
    entry.changed = (uint32_t)changed;
    bool good = changed != 0;
    if (good) {
        uint64_t before = delta_scan(shared, delta_tally(job, shared, share), &total);
        next.escapes = (uint32_t)(before & DELTA_COUNT);
        next.far = (uint32_t)(before >> DELTA_FAR & DELTA_COUNT);
        next.values = (uint32_t)(before >> DELTA_VALUES);
        entry.escapes = (uint32_t)(total & DELTA_COUNT);
        entry.far = (uint32_t)(total >> DELTA_FAR & DELTA_COUNT);
        entry.values =
            job->shape.kind == RFT_DELTA_HALF ? (uint32_t)(total >> DELTA_VALUES) : entry.changed;
        delta_lay_out(job->shape, &entry);
        good = delta_is_smaller(job->shape, &entry);
    }
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; good && i < (entry.total + 3) / 4; i += blockDim.x) {
        ((unsigned *)job->coded)[i] = 0;
    }
    __syncthreads();
    if (good) delta_put_share(job, &entry, shared, share, next);
    if (threadIdx.x == 0) {
        job->entry = entry;
        job->good = good;
    }
}

RFT_GPU_KERNEL void rft_delta_encode_kernel(rft_delta_job *jobs, uint32_t count)
{
    __shared__ delta_shared shared;
    RFT_GPU_ROLLED
    for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
        delta_encode(&jobs[i], &shared);
        __syncthreads();
    }
}

/* ---- Applying */

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
    planes.low = delta_low_bits(job->shape.elements, job->entry.changed);
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        planes.at[i] = (const unsigned char *)job->coded + starts.of[i];
    }
    return planes;
}

/* Unused bits at the end of a plane are 0. */
RFT_GPU_PART bool delta_is_clean(const unsigned char *plane, uint32_t bits)
{
    return bits % 8 == 0 || plane[bits / 8] >> bits % 8 == 0;
}

/* The counts agree with each other and with the lengths. */
RFT_GPU_PART bool delta_is_laid_out(rft_delta_shape shape, const rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    rft_delta_entry expected = *entry;
    if (entry->changed == 0 || entry->changed > shape.elements) return false;
    if (entry->escapes > (half ? entry->changed : 0) || entry->far > entry->escapes) return false;
    if (half ? entry->values > entry->far : entry->values != entry->changed) return false;
    delta_lay_out(shape, &expected);
    bool same = expected.total == entry->total;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        same = same && expected.bytes[i] == entry->bytes[i];
    }
    return same;
}

RFT_GPU_PART bool delta_is_well_formed(const rft_delta_job *job)
{
    if (!delta_is_laid_out(job->shape, &job->entry)) return false;
    delta_planes planes = delta_find_planes(job);
    uint32_t changed = job->entry.changed;
    uint32_t symbols = job->shape.kind == RFT_DELTA_HALF ? 2 * changed : 0;
    return delta_is_clean(planes.at[RFT_DELTA_LOW], changed * planes.low) &&
           delta_is_clean(planes.at[RFT_DELTA_HIGH],
                          delta_high_bits(job->shape.elements, changed)) &&
           delta_is_clean(planes.at[RFT_DELTA_SYMBOLS], symbols) &&
           delta_is_clean(planes.at[RFT_DELTA_ESCAPES], 4 * job->entry.escapes);
}

RFT_GPU_PART uint32_t delta_position(const delta_planes *planes, uint32_t bit, uint32_t rank)
{
    uint32_t low = planes->low;
    if (low == 0) return bit;
    return (bit - rank) << low | delta_get(planes->at[RFT_DELTA_LOW], rank * low, low);
}

/* The element lies in the block and behind the one before it, which shares its high part if its bit
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
RFT_GPU_PART uint64_t delta_judge(const rft_delta_job *job, const delta_planes *planes,
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

/* The number nearest to `own` that leaves `rest` when divided by `by`, which is odd. */
RFT_GPU_PART uint32_t delta_nearest(uint32_t own, uint32_t rest, uint32_t by)
{
    int32_t apart = (int32_t)rest - (int32_t)(own % by), most = (int32_t)by / 2;
    if (apart > most) apart -= (int32_t)by;
    if (apart < -most) apart += (int32_t)by;
    int32_t number = (int32_t)own + apart;
    if (number < 0) number += (int32_t)by;
    if (number > UINT16_MAX) number -= (int32_t)by;
    return (uint32_t)number;
}

RFT_GPU_PART void delta_apply_half(unsigned char *element, const delta_planes *planes,
                                   delta_cursor *next)
{
    uint32_t own = delta_number(delta_load_half(element)), by = 3;
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
        delta_store_half(element, delta_bits(delta_nearest(own, rest, by)));
    }
}

/* All of a stretch's elements. */
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

/* Returns, to all threads alike, whether the planes were good. */
RFT_GPU_PART bool delta_apply(const rft_delta_job *job, delta_shared *shared)
{
    uint64_t changed, found;
    delta_cursor next = {0, 0, 0, 0};
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
    uint64_t own = delta_judge(job, &planes, shared, share, next.done);
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
