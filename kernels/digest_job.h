/*
 * digest_job: what the GPU's kernel for many digests (digest.cu) takes: a table in memory that the
 * kernel can reach, in which the sums are found as well.
 *
 *     rft_digest_list_kernel(rft_digest_job *jobs, uint32_t count)
 *
 * The kernel and the C twin do the same: each job is an rft_digest_part, or an
 * rft_digest_copy_part, whose result is added to `sum`. What is read may lie at any address. The
 * jobs are done in any order, and at once: none reads what another one writes.
 */
#ifndef RFT_KERNEL_DIGEST_JOB_H
#define RFT_KERNEL_DIGEST_JOB_H

#include <stdint.h>

/* What one warp digests in one go, a multiple of 16: long jobs and short ones keep all warps busy.
 */
#define RFT_DIGEST_CHUNK         8192u
#define RFT_DIGEST_CHUNKS(bytes) (((bytes) + RFT_DIGEST_CHUNK - 1) / RFT_DIGEST_CHUNK)

/* The layout is the kernel's too. */
typedef struct rft_digest_job {
    uint64_t to;   /* an address, a multiple of 8; 0: the bytes are not copied */
    uint64_t from; /* an address */
    uint64_t bytes;
    uint64_t offset; /* into the whole, a multiple of 8 */
    uint64_t end;    /* chunks of this job and of all before it, each begun with a new one */
    uint64_t sum;
} rft_digest_job;

void rft_digest_list(rft_digest_job *jobs, uint32_t count);

#endif
