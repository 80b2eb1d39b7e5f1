/*
 * delta_exchange: blocks made as others, and what they were noted, as kernels/delta_exchange.h
 * says, each by the threads of one block.
 *
 * How much a note takes is known once its block has been compared; thread 0 then takes so much of
 * the memory for notes. A thread notes and writes the elements of its own chunk, in this order, so
 * that no other thread writes an element before it is noted.
 */
#include "kernels/delta_encode.cu"

#define DELTA_NOTE_ALIGN 16u

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
    if (delta_is_smaller(made.shape, &made.entry)) return made;
    made.entry = none;
    made.entry.changed = changed;
    made.whole = 1;
    return made;
}

RFT_GPU_PART void delta_exchange(rft_delta_job *job, const rft_delta_notes *notes,
                                 delta_shared *shared)
{
    uint64_t changed;
    delta_cursor next = {0, 0, 0, 0};
    delta_compare(job, shared);
    __syncthreads();
    uint32_t bytes = job->shape.elements * job->shape.width;
    delta_share share = delta_share_of((job->shape.elements + 7) / 8);
    next.done = (uint32_t)delta_scan(shared, delta_count_bits(shared, share), &changed);
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
        if (note != NULL) delta_put_share(&made, &made.entry, shared, share, next);
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
