/*
 * refit/device.h: where tensors live, and the streams that order work on them.
 *
 *     "host"                this machine's memory, driven like a device
 *     "host:capacity=2GiB"  the same, but no more of it (KiB, MiB, GiB, TiB)
 *     "cuda:0"              a GPU, through the driver found at run time ("cuda" is the first)
 *     "cuda:0:capacity=2GiB"  the same, but refit takes no more of its memory
 *     "auto"                the first GPU, or the host if there is no driver or no GPU
 *
 * A call that puts work on a stream and fails may be made again. Work that fails on its stream
 * loses the device, as an illegal address or an uncorrectable error of its memory loses a GPU's
 * context: from then on all calls on it, and on what was opened on it, answer REFIT_ERR_DEVICE with
 * the sentence of the first failure, but for those that close, free or describe. What was in device
 * memory is gone. What was in host memory is there: see refit_read_lock_read.
 */
#ifndef REFIT_DEVICE_H
#define REFIT_DEVICE_H

#include <refit/config.h>
#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_device refit_device;

/*
 * A caller's stream, as an opaque native handle: refit's copies wait for the work that the caller
 * has put there, and the caller's work can wait for refit's copies. On the host device it is what
 * refit_stream_open gave; on CUDA a CUstream (cudaStream_t) of the device's primary context.
 * REFIT_STREAM_NONE means: the calling thread itself; all it did before the call is done, and to
 * wait for something is to block. So CUDA's default stream, which PyTorch shows as 0, is not NULL
 * here but cudaStreamLegacy, (void *)1: it may be waited for and may wait, but takes no work.
 */
typedef struct refit_stream_ref {
    void *native;
} refit_stream_ref;

#ifdef __cplusplus
#define REFIT_STREAM_NONE (refit_stream_ref{nullptr})
#else
#define REFIT_STREAM_NONE ((refit_stream_ref){NULL})
#endif

typedef struct refit_device_info {
    size_t size;              /* sizeof(refit_device_info), set by the caller */
    char kind[16];            /* "host", "cuda" */
    char name[64];            /* for people */
    uint64_t capacity_bytes;  /* what can be allocated in all; UINT64_MAX if nothing bounds it */
    uint64_t used_bytes;      /* allocated and committed through refit */
    uint8_t host_addressable; /* 1: the CPU may read and write device pointers */
    uint8_t stable_arena;     /* 1: refit_arena_open works here */
    uint8_t kernels;          /* 1: its own kernels are there (pack, digest); 0: copy engines and
                                 the CPU do their work */
    int32_t numa_node;        /* the host memory closest to it; -1: none, or not known */
    int32_t driver_version;   /* 12040: a driver for CUDA 12.4; 0: it has none */
    char uuid[48];            /* "GPU-…" as nvidia-smi shows it, or "" */
    uint64_t small_bytes;     /* copies below that are gathered by a kernel; 0: none, or not known
                                 before the first use (see offload.small_bytes) */
} refit_device_info;

/*
 * Opens a device. `spec` as above, NULL: what `config` says; `config` may be NULL for the defaults
 * and is not kept. The device outlives everything opened on it: closing it earlier answers
 * REFIT_ERR_BUSY. Starts no thread before the first stream or the first large copy. Any thread. A
 * CUDA device belongs to the process that opened it: in a forked child its calls answer
 * REFIT_ERR_STATE.
 *
 * Errors:
 * - REFIT_ERR_INVALID: a spec that cannot be read
 * - REFIT_ERR_NOT_FOUND: no driver, no such GPU
 * - REFIT_ERR_UNSUPPORTED: the driver is too old
 * - REFIT_ERR_BUSY: another process holds the GPU in exclusive mode
 * - REFIT_ERR_DEVICE, REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_device_open(const char *spec,
                                                          const refit_config *config,
                                                          refit_device **out, refit_error *error);

/*
 * Closes a device; NULL is allowed. Joins the device's threads. Any thread, once no other uses it.
 *
 * Errors:
 * - REFIT_ERR_BUSY: memory, streams or objects on it are open, or a worker still reads memory that
 *   a publisher, closed since, showed it there. Nothing is closed; the first close after the worker
 *   has let go frees that memory
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_device_close(refit_device *device,
                                                           refit_error *error);

/*
 * Fills `info` up to the size it names. Does not block. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_device_describe(refit_device *device,
                                                              refit_device_info *info,
                                                              refit_error *error);

/*
 * Allocates `bytes` (> 0) of device memory, aligned to 512 bytes, contents undefined. The caller
 * owns it and gives it back with refit_memory_free. May block for the driver. Any thread.
 *
 * Errors:
 * - REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_memory_alloc(refit_device *device, uint64_t bytes,
                                                           void **out, refit_error *error);

/*
 * Gives memory back; NULL is allowed. No queued work may still use it. A GPU's driver may wait for
 * all work on it: let an arena (refit/advanced/arena.h) keep what comes and goes. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID: a pointer that refit_memory_alloc did not give
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_memory_free(refit_device *device, void *memory,
                                                          refit_error *error);

/*
 * Opens a stream of the device's own; the caller closes it. On the host device this is a thread and
 * a FIFO. Any thread.
 *
 * Errors:
 * - REFIT_ERR_DEVICE, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_stream_open(refit_device *device,
                                                          refit_stream_ref *out,
                                                          refit_error *error);

/*
 * Finishes the queued work, then closes the stream. Blocks, at most offload.timeout_ms of the
 * device's configuration. Any thread, once no other uses the stream.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: nothing is closed
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_stream_close(refit_device *device,
                                                           refit_stream_ref stream,
                                                           refit_error *error);

/*
 * Waits until all work that was queued so far is done, at most `timeout_ms`. Any thread.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT
 * - REFIT_ERR_DEVICE: the device is lost
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_stream_wait(refit_device *device,
                                                          refit_stream_ref stream,
                                                          uint32_t timeout_ms, refit_error *error);

/* A function to be run in stream order, on a thread of the device or of its driver. It must call
 * neither refit nor CUDA. */
typedef void (*refit_stream_fn)(void *user);

/*
 * Queues `function(user)`; `user` stays the caller's and must live until it ran; it does not run
 * once a GPU is lost. With REFIT_STREAM_NONE it is called at once. On CUDA (cuLaunchHostFunc) it
 * blocks while the driver's queue is full, elsewhere it does not: on an H100 with driver 580 a
 * stream takes 1,021 pieces of work, and 56 of these functions with other work between them. There
 * the functions of all streams run one at a time, so one that stands delays the others. Any thread.
 *
 * Errors:
 * - REFIT_ERR_LIMIT: too much is queued
 * - REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_stream_call(refit_device *device,
                                                          refit_stream_ref stream,
                                                          refit_stream_fn function, void *user,
                                                          refit_error *error);

/*
 * Queues one copy between any two of host and device memory, which do not overlap; both sides must
 * stay until it is done. With REFIT_STREAM_NONE it blocks until done. Any thread.
 *
 * Errors:
 * - REFIT_ERR_LIMIT: too much is queued
 * - REFIT_ERR_COPY, REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_stream_copy(refit_device *device,
                                                          refit_stream_ref stream, void *to,
                                                          const void *from, uint64_t bytes,
                                                          refit_error *error);

/*
 * Queues the conversion of `count` fp32 numbers to bf16, rounded to nearest even, every NaN to
 * 0x7FFF: for trainers that keep fp32 masters and publish bf16. All devices give the same bits.
 * `to` and `from` are memory of the device (on the host device any memory), do not overlap, may lie
 * at any alignment and must stay until it is done. With REFIT_STREAM_NONE it blocks until done; 0
 * numbers are no work. Any thread.
 *
 * Errors:
 * - REFIT_ERR_UNSUPPORTED: this GPU or driver could not load refit's kernels;
 *   refit_device_info.kernels tells before
 * - REFIT_ERR_COPY: memory of an arena that is not there now
 * - REFIT_ERR_LIMIT: too much is queued
 * - REFIT_ERR_INVALID, REFIT_ERR_DEVICE, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_stream_cast_bf16(refit_device *device,
                                                               refit_stream_ref stream,
                                                               uint16_t *to, const float *from,
                                                               uint64_t count, refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
