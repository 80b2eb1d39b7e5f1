/*
 * delta_job: what the GPU's delta kernels (delta_exchange.cu, delta_apply.cu) take: a table of
 * blocks, in memory that the kernels can reach. A block of threads takes a job at a time.
 *
 *     rft_delta_exchange_kernel(rft_delta_job *jobs, uint32_t count, unsigned char *memory,
 *                               uint64_t room, uint64_t *used)
 *     rft_delta_apply_kernel(rft_delta_job *jobs, uint32_t count)
 *
 * They give what rft_delta_exchange and rft_delta_apply give, bit for bit. Blocks and the coded
 * bytes that are applied may lie at any address.
 *
 * An exchange makes the block `after` as `before`, which stays, and its job such that applying it
 * brings the block back. A note lies in the `room` bytes at `memory`, which lies at a multiple of
 * 16; its bytes are added to `*used` first, also where it does not fit: then the block stays as it
 * is, and its job is not good and brings back nothing. Where `memory` is 0 nothing is noted, and
 * the job tells only how many elements differed.
 */
#ifndef RFT_KERNEL_DELTA_JOB_H
#define RFT_KERNEL_DELTA_JOB_H

#include "kernels/delta.h"

typedef struct rft_delta_job {
    uint64_t before; /* addresses; not used for applying */
    uint64_t after;  /* applying: the block itself */
    uint64_t coded;  /* exchanging: made */
    rft_delta_shape shape;
    rft_delta_entry entry; /* exchanging: made */
    uint32_t good;         /* made, 0 or 1: whether it was done */
    uint32_t whole;        /* applying, and made by an exchange: `coded` is the block as it was, and
                              the entry only tells how many elements differed */
} rft_delta_job;

/* Memory of the device for the notes of exchanges. */
typedef struct rft_delta_notes {
    unsigned char *memory; /* NULL: nothing is noted */
    uint64_t room;
    uint64_t *used;
} rft_delta_notes;

#endif
