/*
 * delta_threads: what the GPU's delta kernels share: how the threads of a block divide the
 * work.
 *
 * A bit an element, or the plane HIGH, lies in shared memory. Every thread takes a chunk of it,
 * and so of the elements; scans over the threads say which element, escape and far byte is its
 * first. So the threads go over their chunks several times, counting first, and write once all
 * is known: an exchange, how long the planes are; applying, that they do not contradict
 * themselves.
 */
#ifndef RFT_KERNEL_DELTA_THREADS_H
#define RFT_KERNEL_DELTA_THREADS_H

#include "kernels/delta_job.h"
#include "kernels/delta_rules.h"
#include "kernels/gpu_scan.h"

#define DELTA_MAP (RFT_DELTA_ELEMENTS / 8)

/* What the threads of a block share. */
typedef struct delta_shared {
    unsigned char map[DELTA_MAP];
    uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
    uint64_t note; /* where a block's note begins */
} delta_shared;

/* Where each plane begins in the coded bytes. */
typedef struct delta_starts {
    uint32_t of[RFT_DELTA_PLANES];
} delta_starts;

/* A thread's chunk of a plane in shared memory, in bytes. */
typedef struct delta_share {
    uint32_t from, to;
} delta_share;

/* The sum of what the threads before this one have; `total`: of all. */
RFT_GPU_PART uint64_t delta_scan(delta_shared *shared, uint64_t value, uint64_t *total)
{
    return gpu_scan(shared->of_warps, value, total);
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

/* Where a thread reads or writes next: counts of what comes before. */
typedef struct delta_cursor {
    uint32_t done, escapes, far, values;
} delta_cursor;

#endif
