/* delta_encode: blocks coded as kernels/delta.h says, each by the threads of one block. */
#include "kernels/delta_threads.h"

/* A count of escapes, far bytes and values as one number, so that one scan adds all three. */
#define DELTA_FAR    21
#define DELTA_VALUES 42
#define DELTA_COUNT  ((UINT64_C(1) << DELTA_FAR) - 1)

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
    uint32_t old = rft_delta_number(delta_load_half(a));
    delta_move move;
    move.bits = delta_load_half(b);
    move.number = rft_delta_number(move.bits);
    move.distance = move.number > old ? move.number - old : old - move.number;
    return move;
}

/* What the elements of a chunk need, as one number. */
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
    if (width == 1) delta_put(coded, at, element[0]);
    RFT_GPU_ROLLED
    for (uint32_t i = 0; i + 1 < width; i += 2) {
        delta_put(coded, at + 8 * i, delta_load_half(element + i));
    }
}

/* All of a chunk's elements. */
RFT_GPU_PART void delta_put_share(const rft_delta_job *job, const rft_delta_entry *entry,
                                  const delta_shared *shared, delta_share share, delta_cursor next)
{
    unsigned *coded = (unsigned *)job->coded;
    uint32_t low = rft_delta_low_bits(job->shape.elements, entry->changed);
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
        rft_delta_lay_out(job->shape, &entry);
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
