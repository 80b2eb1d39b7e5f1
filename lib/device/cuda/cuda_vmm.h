/*
 * cuda_reserve: addresses of a GPU that stay while memory behind them comes and goes, in chunks of
 * offload.chunk_bytes.
 */
#ifndef RFT_CUDA_VMM_H
#define RFT_CUDA_VMM_H

#include "device/cuda/cuda_device.h"

/* ---- Chunks ----------------------------------------------------------------------------------
 * One large handle of physical memory behind reserved addresses.
 *
 *     EMPTY ──create──► HELD ──map──► MAPPED ──set_access──► OPEN
 *       ▲                │ ▲                                  │
 *       └────release─────┘ └──────────────unmap───────────────┘
 *
 * Both ways stop where the driver fails, and the state says where that is: the next call goes on
 * from there.
 */

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

/* ---- Ranges ----------------------------------------------------------------------------------
 * One stretch of addresses of a GPU, whose memory comes and goes in chunks
 * (see above). All but open is called inside a context guard.
 */

/* How all ranges of a device are made. */
typedef struct rft_cuda_pages {
    uint64_t granule;             /* what addresses and bytes are multiples of; a power of two */
    uint64_t chunk_bytes;         /* likewise, and of the granule */
    rft_cu_allocation properties; /* of the physical memory */
} rft_cuda_pages;

typedef struct rft_cuda_range {
    struct rft_cuda_range *next; /* its owner's */
    const rft_cuda_pages *pages; /* borrowed */
    rft_cu_ptr base;
    uint64_t granules;
    uint64_t per_chunk; /* granules; the last chunk may have fewer */
    uint64_t chunk_count;
    rft_mutex lock;
    rft_cuda_chunk *chunks; /* owned; guarded by lock, like the rest */
    uint64_t *live;         /* owned; one bit a granule */
} rft_cuda_range;

/* Some granules of a range. */
typedef struct rft_cuda_part {
    uint64_t from;
    uint64_t to; /* the first behind them */
} rft_cuda_part;

/* ---- Reservations ------------------------------------------------------------------------- */

/* Inside a context guard. `*out` stays NULL, and it is no failure, where the GPU or its driver has
 * no virtual memory management: reserve then answers REFIT_ERR_UNSUPPORTED. */
refit_status rft_cuda_ranges_open(rft_cuda_device *cuda, rft_cuda_ranges **out, refit_error *error);

/* NULL is allowed. Gives back the ranges that are left. Enters the context by itself. */
void rft_cuda_ranges_close(rft_cuda_device *cuda, rft_cuda_ranges *ranges);

/* What caps.chunk_bytes says: 0 for NULL. */
uint64_t rft_cuda_ranges_chunk(const rft_cuda_ranges *ranges);

/* Fills the slots that this file has. */
void rft_cuda_vmm_slots(rft_device_ops *ops);

#endif
