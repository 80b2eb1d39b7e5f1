/*
 * cuda_range: one stretch of addresses of a GPU, whose memory comes and goes in chunks
 * (cuda_chunk.h). All but open is called inside a context guard.
 */
#ifndef RFT_CUDA_RANGE_H
#define RFT_CUDA_RANGE_H

#include "device/cuda_chunk.h"

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

/* Reserves `bytes`, whole granules, not none. REFIT_ERR_DEVICE_MEMORY: no such stretch of
 * addresses. */
refit_status rft_cuda_range_open(rft_cuda_device *cuda, const rft_cuda_pages *pages, uint64_t bytes,
                                 rft_cuda_range **out, refit_error *error);

/* Memory and addresses back to the driver; if not all of it can be unmapped, the addresses stay
 * with it, and on the books. Close frees our side. */
rft_cu_result rft_cuda_range_give_back(rft_cuda_device *cuda, rft_cuda_range *range);
void rft_cuda_range_close(rft_cuda_range *range);

/* See device.h; `part` is not empty. */
refit_status rft_cuda_range_commit(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part part,
                                   refit_error *error);
refit_status rft_cuda_range_decommit(rft_cuda_device *cuda, rft_cuda_range *range,
                                     rft_cuda_part part, uint64_t *freed, refit_error *error);

#endif
