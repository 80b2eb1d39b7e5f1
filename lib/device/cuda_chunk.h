/*
 * cuda_chunk: one large handle of physical memory behind reserved addresses.
 *
 *     EMPTY ──create──► HELD ──map──► MAPPED ──set_access──► OPEN
 *       ▲                │ ▲                                  │
 *       └────release─────┘ └──────────────unmap───────────────┘
 *
 * Both ways stop where the driver fails, and the state says where that is: the next call goes on
 * from there.
 */
#ifndef RFT_CUDA_CHUNK_H
#define RFT_CUDA_CHUNK_H

#include "device/cuda_device.h"

typedef enum rft_cuda_chunk_state {
    RFT_CHUNK_EMPTY = 0,
    RFT_CHUNK_HELD = 1,   /* there is memory, which nobody can reach */
    RFT_CHUNK_MAPPED = 2, /* likewise */
    RFT_CHUNK_OPEN = 3,
} rft_cuda_chunk_state;

typedef struct rft_cuda_chunk {
    rft_cu_handle handle; /* unless EMPTY */
    rft_cuda_chunk_state state;
    uint32_t live; /* granules of it that are committed */
} rft_cuda_chunk;

/* To OPEN, at the address `at`. `*what` is the sentence's beginning where it fails. The bytes of an
 * EMPTY one are booked. Both are called inside a context guard. */
rft_cu_result rft_cuda_chunk_raise(rft_cuda_device *cuda, rft_cuda_chunk *chunk,
                                   const rft_cu_allocation *properties, rft_cu_ptr at,
                                   uint64_t bytes, const char **what);

/* To EMPTY, and `bytes` off the books; also where the answer is that the GPU is lost. */
rft_cu_result rft_cuda_chunk_lower(rft_cuda_device *cuda, rft_cuda_chunk *chunk, rft_cu_ptr at,
                                   uint64_t bytes, const char **what);

#endif
