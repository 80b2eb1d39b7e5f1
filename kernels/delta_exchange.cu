/*
 * delta_exchange: blocks made as others, and what they were noted, as kernels/delta_exchange.h
 * says, each by the threads of one block.
 *
 * How much a note takes is known once its block has been compared; thread 0 then takes so much of
 * the memory for notes. A thread notes and writes the elements of its own chunk, in this order, so
 * that no other thread writes an element before it is noted.
 */
#include "kernels/delta_threads.h"

#define DELTA_NOTE_ALIGN 16u

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

/* Bits of the coded bytes, at most 16; others of the same word may be set by other threads. */
RFT_GPU_PART void delta_put(unsigned *coded, uint32_t at, uint32_t bits)
{
    uint64_t placed = (uint64_t)bits << at % 32;
    if ((uint32_t)placed != 0) atomicOr(coded + at / 32, (unsigned)placed);
    if (placed >> 32 != 0) atomicOr(coded + at / 32 + 1, (unsigned)(placed >> 32));
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

/* Notes a chunk's elements that differ, as they are in the block; `done` come before them. */
RFT_GPU_PART void delta_put_share(const rft_delta_job *job, const delta_shared *shared,
                                  delta_share share, uint32_t done)
{
    unsigned *coded = (unsigned *)job->coded;
    const unsigned char *all = (const unsigned char *)job->after;
    uint32_t width = job->shape.width;
    uint32_t low = rft_delta_low_bits(job->shape.elements, job->entry.changed);
    delta_starts starts = delta_find_starts(&job->entry);
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        RFT_GPU_ROLLED
        for (uint32_t bits = shared->map[i]; bits != 0; bits &= bits - 1, done++) {
            uint32_t position = 8 * i + (uint32_t)__ffs((int)bits) - 1;
            uint32_t bit = (position >> low) + (low == 0 ? 0 : done);
            delta_put(coded, done * low, position & ((1u << low) - 1));
            delta_put(coded, 8 * starts.of[RFT_DELTA_HIGH] + bit, 1);
            delta_put_raw(coded, &starts, done, all + (uint64_t)position * width, width);
        }
    }
}

/* An element, or a word. */
RFT_GPU_PART void delta_store(unsigned char *to, uint64_t bits, uint32_t bytes)
{
    if (bytes == 8 && (uintptr_t)to % 8 == 0) {
        *(uint64_t *)to = bits;
    } else if (bytes == 4 && (uintptr_t)to % 4 == 0) {
        *(uint32_t *)to = (uint32_t)bits;
    } else if (bytes == 2 && (uintptr_t)to % 2 == 0) {
        *(uint16_t *)to = (uint16_t)bits;
    } else {
        RFT_GPU_ROLLED
        for (uint32_t i = 0; i < bytes; i++) {
            to[i] = (unsigned char)(bits >> 8 * i);
        }
    }
}

RFT_GPU_PART uint64_t delta_load_bytes(const unsigned char *at, uint32_t bytes)
{
    uint64_t bits = 0;
    if (bytes == 8) return delta_load_word(at);
    if (bytes == 2) return delta_load_half(at);
    RFT_GPU_ROLLED
    for (uint32_t i = 0; i < bytes; i++) {
        bits |= (uint64_t)at[i] << 8 * i;
    }
    return bits;
}

/* Notes the whole block, if `note` is not NULL, and makes it as `from`. */
RFT_GPU_PART void delta_exchange_whole(unsigned char *note, unsigned char *block,
                                       const unsigned char *from, uint32_t bytes)
{
    RFT_GPU_ROLLED
    for (uint32_t at = 8 * threadIdx.x; at < bytes; at += 8 * blockDim.x) {
        uint32_t some = bytes - at < 8 ? bytes - at : 8;
        if (some == 8) {
            if (note != NULL) *(uint64_t *)(note + at) = delta_load_word(block + at);
            delta_store(block + at, delta_load_word(from + at), 8);
            continue;
        }
        RFT_GPU_ROLLED
        for (uint32_t i = at; i < bytes; i++) {
            if (note != NULL) note[i] = block[i];
            block[i] = from[i];
        }
    }
}

/* The elements of a chunk that differ. */
RFT_GPU_PART void delta_overwrite_share(const rft_delta_job *job, const delta_shared *shared,
                                        delta_share share)
{
    uint32_t width = job->shape.width;
    unsigned char *block = (unsigned char *)job->after;
    const unsigned char *from = (const unsigned char *)job->before;
    RFT_GPU_ROLLED
    for (uint32_t i = share.from; i < share.to; i++) {
        RFT_GPU_ROLLED
        for (uint32_t bits = shared->map[i]; bits != 0; bits &= bits - 1) {
            uint64_t at = (uint64_t)(8 * i + (uint32_t)__ffs((int)bits) - 1) * width;
            delta_store(block + at, delta_load_bytes(from + at, width), width);
        }
    }
}

/* Memory for a note of so many bytes, by all threads; NULL: there is not so much left. */
RFT_GPU_PART unsigned char *delta_take_note(const rft_delta_notes *notes, delta_shared *shared,
                                            uint32_t bytes)
{
    uint64_t whole = (bytes + DELTA_NOTE_ALIGN - 1) / DELTA_NOTE_ALIGN * DELTA_NOTE_ALIGN;
    if (threadIdx.x == 0) {
        shared->note = (uint64_t)atomicAdd((unsigned long long *)notes->used, whole);
    }
    __syncthreads();
    uint64_t at = shared->note;
    return at + whole <= notes->room ? notes->memory + at : NULL;
}

/* What the job becomes; only its note and its counts are made here. */
RFT_GPU_PART rft_delta_job delta_measure_change(const rft_delta_job *job, uint32_t changed)
{
    rft_delta_job made = *job;
    rft_delta_entry none = {0};
    made.shape.kind = RFT_DELTA_RAW;
    made.entry = none;
    made.entry.changed = changed;
    made.whole = 0;
    made.good = 1;
    if (changed == 0) return made;
    made.entry.values = changed;
    rft_delta_lay_out(made.shape, &made.entry);
    if (made.entry.total + RFT_DELTA_ENTRY_BYTES < made.shape.elements * made.shape.width)
        return made;
    made.entry = none;
    made.entry.changed = changed;
    made.whole = 1;
    return made;
}

RFT_GPU_PART void delta_exchange(rft_delta_job *job, const rft_delta_notes *notes,
                                 delta_shared *shared)
{
    uint64_t changed;
    delta_compare(job, shared);
    __syncthreads();
    uint32_t bytes = job->shape.elements * job->shape.width;
    delta_share share = delta_share_of((job->shape.elements + 7) / 8);
    uint32_t done = (uint32_t)delta_scan(shared, delta_count_bits(shared, share), &changed);
    rft_delta_job made = delta_measure_change(job, (uint32_t)changed);
    unsigned char *note = NULL;
    if (changed != 0 && notes->memory != NULL) {
        note = delta_take_note(notes, shared, made.whole != 0 ? bytes : made.entry.total);
        made.coded = (uint64_t)(uintptr_t)note;
        made.good = note != NULL;
    }
    if (made.good == 0) {
        rft_delta_entry none = {0};
        made.entry = none;
        made.whole = 0;
    } else if (made.whole != 0) {
        delta_exchange_whole(note, (unsigned char *)job->after, (const unsigned char *)job->before,
                             bytes);
    } else if (changed != 0) {
        RFT_GPU_ROLLED
        for (uint32_t i = threadIdx.x; note != NULL && i < (made.entry.total + 3) / 4;
             i += blockDim.x) {
            ((unsigned *)note)[i] = 0;
        }
        __syncthreads();
        if (note != NULL) delta_put_share(&made, shared, share, done);
        delta_overwrite_share(job, shared, share);
    }
    __syncthreads(); /* all have read the job */
    if (threadIdx.x == 0) *job = made;
}

RFT_GPU_KERNEL void rft_delta_exchange_kernel(rft_delta_job *jobs, uint32_t count,
                                              unsigned char *memory, uint64_t room, uint64_t *used)
{
    __shared__ delta_shared shared;
    rft_delta_notes notes;
    notes.memory = memory;
    notes.room = room;
    notes.used = used;
    RFT_GPU_ROLLED
    for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
        delta_exchange(&jobs[i], &notes, &shared);
        __syncthreads();
    }
}
