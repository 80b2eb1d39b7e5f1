/*
 * delta_job: what the GPU's delta kernels (delta_encode.cu, delta_apply.cu) take: a table of
 * blocks, in memory that the kernels can reach. A block of threads takes a job at a time.
 *
 *     rft_delta_encode_kernel(rft_delta_job *jobs, uint32_t count)
 *     rft_delta_apply_kernel(rft_delta_job *jobs, uint32_t count)
 *
 * Both give what rft_delta_encode and rft_delta_apply give, bit for bit. Blocks and coded bytes may
 * lie at any address; that of a job's coded bytes is a multiple of 4 where it is encoded.
 */
#ifndef RFT_KERNEL_DELTA_JOB_H
#define RFT_KERNEL_DELTA_JOB_H

#include "kernels/delta.h"

typedef struct rft_delta_job {
    uint64_t before; /* addresses; not used for applying */
    uint64_t after;  /* applying: the block itself */
    uint64_t coded;  /* encoding: rft_delta_bound bytes of room */
    rft_delta_shape shape;
    rft_delta_entry entry; /* encoding: made, if `good`, else only `changed` */
    uint32_t good;         /* made: what the twin returns, 0 or 1 */
} rft_delta_job;

#endif
