/*
 * cuda_batch: descriptors of copies, gathered and handed to the copy engines in as few calls as the
 * driver takes: batches from 12.8 on, one by one before that and where a batch cannot be.
 */
#ifndef RFT_CUDA_BATCH_H
#define RFT_CUDA_BATCH_H

#include "device/cuda/cuda_device.h"

/* Of one call of the driver: some crash on tens of thousands. */
#define RFT_CUDA_DESCRIPTORS 1024u

/* A side is host memory that is pinned here, or the device's. */
typedef struct rft_cuda_batch {
    struct rft_cuda_batch *next; /* in a list of its owner's */
    rft_cu_stream stream;
    rft_copy_order order;
    uint32_t count;
    bool from_host; /* all sources so far */
    rft_cu_ptr to[RFT_CUDA_DESCRIPTORS];
    rft_cu_ptr from[RFT_CUDA_DESCRIPTORS];
    size_t bytes[RFT_CUDA_DESCRIPTORS];
} rft_cuda_batch;

/* All that follows is called inside a context guard, and puts work on a stream that was created:
 * neither the legacy nor the per-thread one, which take no batches. */

/* One copy, by a call of its own: anything to anything that the driver reaches. */
refit_status rft_cuda_copy_one(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                               rft_cu_ptr from, uint64_t bytes, refit_error *error);

/* Nothing is gathered yet. RFT_COPY_ANY reaches the driver only where it is right: for batches in
 * which every source is host memory. */
void rft_cuda_batch_begin(rft_cuda_batch *batch, rft_cu_stream stream, rft_copy_order order);

/* One more copy of `bytes` > 0; what has been gathered goes out first if it is full. */
refit_status rft_cuda_batch_add(rft_cuda_device *cuda, rft_cuda_batch *batch, rft_cu_ptr to,
                                rft_cu_ptr from, uint64_t bytes, bool from_host,
                                refit_error *error);

/* Puts all that was gathered on the stream. It is empty afterwards, whatever happens. */
refit_status rft_cuda_batch_flush(rft_cuda_device *cuda, rft_cuda_batch *batch, refit_error *error);

#endif
