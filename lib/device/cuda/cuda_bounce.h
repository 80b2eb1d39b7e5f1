/*
 * cuda_bounce: where many small copies between pinned host memory and the device become few large
 * ones.
 *
 *     to the host    device ──pack──► half of the bounce buffer ──copy engine──► host
 *     to the device  host ──copy engine──► half of the bounce buffer ──pack──► device
 *
 * The first step of a portion is put on a stream of the bounce buffer's own, the second on the
 * caller's, so that the packing of one half goes on beside the copies of the other. One caller's
 * stream at a time uses a bounce buffer, so no copy waits for the work of another stream.
 *
 * A portion is what one half takes at once: entries for the pack kernel, in host memory that the
 * GPU reads, and chunks of host memory, each one copy. A chunk joins small copies whose host
 * sides follow each other; padding between them is copied too.
 */
#ifndef RFT_CUDA_BOUNCE_H
#define RFT_CUDA_BOUNCE_H

#include "device/cuda/cuda_batch.h"
#include "kernels/pack.h"

/* ---- A bounce buffer ---------------------------------------------------------------------- */

#define RFT_CUDA_HALVES   2u
#define RFT_CUDA_SECTIONS 8u
#define RFT_CUDA_ENTRIES  16384u /* of a section */

/* The direction of a copy. */
typedef enum rft_cuda_direction {
    RFT_CUDA_NEITHER,
    RFT_CUDA_TO_HOST,
    RFT_CUDA_TO_DEVICE
} rft_cuda_direction;

typedef struct rft_cuda_half {
    rft_cu_ptr memory;
    rft_cu_event filled; /* on the bounce buffer's stream: the first step is done */
    rft_cu_event free;   /* on the caller's: the second is */
} rft_cuda_half;

typedef struct rft_cuda_section {
    rft_pack_entry *entries;
    rft_cu_ptr table;  /* where the GPU finds them */
    rft_cu_event done; /* nothing on the GPU reads them any more */
} rft_cuda_section;

/* Used by one thread at a time; its owner (rft_cuda_staging) knows by which. */
typedef struct rft_cuda_bounce {
    bool taken;           /* by a thread: the owner's, and guarded by its lock */
    rft_cu_stream caller; /* whose work is on it, or was last: written by the owner */
    bool broken;          /* what is under way cannot be told any more: it is not used again */
    bool behind;          /* the GPU was, by all sections, when last looked */

    rft_cu_stream own;
    rft_cu_event before; /* on the caller's stream, before a batch */
    void *memory;        /* both halves */
    void *host;          /* all sections */
    uint64_t half_bytes;
    rft_cuda_half halves[RFT_CUDA_HALVES];
    rft_cuda_section sections[RFT_CUDA_SECTIONS];
    rft_cuda_batch *chunks; /* of the portion that is gathered */

    /* The batch under way. */
    rft_copy_order order;
    bool follows; /* the bounce buffer's stream is after `before` */

    /* The portion that is gathered. */
    rft_cuda_direction direction;
    uint32_t half;    /* the one that it will take */
    uint32_t section; /* where its entries lie, from `first` on */
    uint32_t first;
    uint32_t entries;
    uint64_t used;     /* bytes of the half, with what chunks are aligned by */
    uint64_t payload;  /* bytes of its copies */
    uintptr_t reached; /* end of the host side of its last copy */
} rft_cuda_bounce;

/* All that follows is called inside a context guard. Opens all parts, so that use takes no memory.
 * REFIT_ERR_DEVICE_MEMORY, …; on failure nothing is held. */
refit_status rft_cuda_bounce_open(rft_cuda_device *cuda, uint64_t half_bytes, rft_cuda_bounce **out,
                                  refit_error *error);

/* Waits for what is under way (at most offload.timeout_ms), then frees it; what is in use even then
 * stays with the driver, and cuda->stuck says so. */
void rft_cuda_bounce_close(rft_cuda_device *cuda, rft_cuda_bounce *bounce);

/* A batch of its caller's stream begins; `order` as in copy_batch. */
refit_status rft_cuda_bounce_begin(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                   rft_copy_order order, refit_error *error);

/* One more small copy, of at most a quarter of a half. `joined`: it goes on from the one before,
 * with no more than padding between their host sides. `*taken` says whether there was room; there
 * is none while the GPU is behind by as many entries as the sections hold. */
refit_status rft_cuda_bounce_add(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                 const rft_copy *copy, rft_cuda_direction direction, bool joined,
                                 bool *taken, refit_error *error);

/* Puts what has been gathered on the streams. Ends a batch, too. */
refit_status rft_cuda_bounce_flush(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                   refit_error *error);

/* ---- What counts as small --------------------------------------------------------------------
 * From which size on copies are as fast by the copy engines alone as gathered for them, on this GPU
 * and driver. Published figures differ by a factor of eight.
 */

/* Sizes that are tried: 4, 8, … 128 KiB. */
#define RFT_CUDA_CUTOFF_SIZES 6u
#define RFT_CUDA_CUTOFF_LEAST (UINT64_C(4) << 10)
#define RFT_CUDA_CUTOFF_MOST  (RFT_CUDA_CUTOFF_LEAST << (RFT_CUDA_CUTOFF_SIZES - 1))

/* Milliseconds for the same bytes, out and back, in copies of each size. */
typedef struct rft_cuda_cutoff_times {
    float engines[RFT_CUDA_CUTOFF_SIZES];
    float gathered[RFT_CUDA_CUTOFF_SIZES];
    uint32_t count; /* of sizes that were measured, from the smallest on */
} rft_cuda_cutoff_times;

/* Have the engines won twice in a row? Then larger sizes need not be measured. */
bool rft_cuda_cutoff_is_clear(const rft_cuda_cutoff_times *times);

/* The size from which on the engines win, a single lucky one aside; the largest if they never do;
 * 0: they win throughout, which only a GPU that is busy lets them. */
uint64_t rft_cuda_cutoff_choose(const rft_cuda_cutoff_times *times);

/* ---- The bounce buffers of a device ----------------------------------------------------------
 * Lends them to streams, and knows the size from which on a copy is left to the copy engines.
 */

typedef struct rft_cuda_staging rft_cuda_staging;

/* Open takes nothing of the device. Close takes NULL and enters the context by itself; no bounce
 * buffer may be in use.
 */
refit_status rft_cuda_staging_open(rft_cuda_device *cuda, rft_cuda_staging **out,
                                   refit_error *error);
void rft_cuda_staging_close(rft_cuda_device *cuda, rft_cuda_staging *staging);

/* Copies of so many bytes or more are never small. 0: none is, there are no kernels. Any thread. */
uint64_t rft_cuda_staging_bound(const rft_cuda_device *cuda);

/* A bounce buffer for this thread and stream until it is given back, and in `*small` the size below
 * which copies are for it. NULL: the copy engines do all the work this time, because the device has
 * no memory left (tried again later), or because all bounce buffers are at work for other streams.
 * The first call measures the size, unless offload.small_bytes says it, and takes some milliseconds
 * for that. Inside a context guard. */
rft_cuda_bounce *rft_cuda_staging_take(rft_cuda_device *cuda, rft_cuda_staging *staging,
                                       rft_cu_stream stream, uint64_t *small);
void rft_cuda_staging_give(rft_cuda_staging *staging, rft_cuda_bounce *bounce);

/* The size, once it is known; 0 before. Any thread. */
uint64_t rft_cuda_staging_small_bytes(rft_cuda_staging *staging);

#endif
