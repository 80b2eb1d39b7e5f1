/*
 * refit/advanced/window.h: states that live on the host visit the device while the optimizer steps.
 *
 *     IDLE ──begin──► STEPPING ──next──► IN_USE ──done──► STEPPING ──next──► … ──end──► IDLE
 *
 * The regions of an OFFLOADED offloader are in its host image; those that were added without device
 * memory live there. A window brings the regions that a step uses to the device, some at a time,
 * and takes them back:
 *
 *     refit_window_begin(window, parts, count, stream, &error);      the first copies in start
 *     for (;;) {
 *         refit_window_next(window, &view, &error);                  these parts have arrived
 *         if (view.count == 0) break;
 *         step(view.memory, stream);                                 the optimizer's arithmetic
 *         refit_window_done(window, stream, &error);                 copies out follow it
 *     }
 *     refit_window_end(window, &error);                              the last copies are under way
 *
 * While one window is stepped, the parts of the next arrive and those of the one before leave. The
 * device memory is offload.windows times offload.window_bytes and nothing else. A step allocates
 * nothing, unless its list of parts is longer than any before, or needs larger windows.
 *
 * The image stays authoritative for every part until its bytes are back in it. `next` waits for the
 * bytes of its window, so that arithmetic is only ever started on bytes that have arrived. After a
 * failure it is therefore known which parts were stepped: those of each window that
 * refit_window_done was called for, the first refit_window_progress of the list. A call that failed
 * can be repeated, or the step ended; the other parts are as they were before it. If the device is
 * lost (refit/device.h), parts that were stepped and have not reached the image are lost with it.
 *
 * fp32 masters whose bf16 weights were named (refit/offload.h, "Masters") travel as what the
 * weights lack, about 2.04 of 4 bytes, and lie whole in the memory of the window. Their weights are
 * part of what a step makes:
 * - When a window arrives, the weights on the device are those that its masters left by; else
 *   REFIT_ERR_CORRUPT, and the window is not handed out.
 * - The caller's work rounds the new weights from the new masters before refit_window_done, on the
 *   stream that it names. Then they stay as they are until the masters come in again.
 * - The copies out read the weights. Those of the last window are over before what the stream of
 *   its refit_window_done gets after that call; where the stream is REFIT_STREAM_NONE, or the step
 *   ends before all parts were stepped, refit_window_end waits for them. So weights may be written
 *   after the step, and the next window detects that.
 * - Parts of such a region are all of it, or begin and end at multiples of 1048576 bytes, or with
 *   the region.
 * - They begin as zeros, and get their first bytes, and any that are not from a step, as
 *   REFIT_PART_NEW, with their weights on the device before done. Between steps
 *   refit_read_lock_read shows them; refit_window_host does not.
 * - Weights need not be the roundings of their masters. Where too many are not, those masters go
 *   whole, 262144 at a time, into host memory of their own; until that is done their bytes are in
 *   the window. Each later step tries whether they fit again, and less often where they do not.
 * - Both directions have device memory of their own for it, together offload.staging_bytes or a
 *   little over 1 MiB, which seal takes. The statistic window_bytes counts it.
 *
 * A window is used by the thread that uses its offloader. It has no thread of its own: the next
 * copies start in the calls below.
 */
#ifndef REFIT_ADVANCED_WINDOW_H
#define REFIT_ADVANCED_WINDOW_H

#include <refit/offload.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_window refit_window;

#define REFIT_WINDOWS 4 /* most windows in device memory at once */

typedef enum refit_part_flag {
    REFIT_PART_SAME_WINDOW = 1, /* in the same window as the part before it */
    REFIT_PART_NEW = 2, /* the step makes its bytes, in memory of the caller: nothing comes in,
                            and it has no place in the memory of the windows. It counts towards
                            offload.window_bytes all the same. See refit_window_place */
} refit_part_flag;

/* Bytes of one region that a step uses. */
typedef struct refit_window_part {
    size_t size; /* sizeof(refit_window_part) */
    refit_region_id region;
    uint32_t flags;  /* of refit_part_flag, or 0 */
    uint64_t offset; /* of the first byte, in the region */
    uint64_t bytes;  /* > 0 */
} refit_window_part;

/* The parts of one window: [first, first + count) of the list. */
typedef struct refit_window_view {
    size_t size; /* sizeof(refit_window_view), set by the caller */
    uint32_t first;
    uint32_t count;      /* 0: every part was stepped */
    void *const *memory; /* the device address of each of them, aligned to 64 bytes where offset is
                            0; NULL for REFIT_PART_NEW. Borrowed until done or end */
} refit_window_view;

/*
 * Opens a window on an offloader, which must outlive it; one window each. Takes no device memory
 * yet. Does not block.
 *
 * Errors:
 * - REFIT_ERR_BUSY: the offloader has a window
 * - REFIT_ERR_UNSUPPORTED: use_pinned_optimizer_offload: false, which has no streams to copy on
 * - REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_open(refit_offloader *offloader,
                                                          refit_window **out, refit_error *error);

/*
 * Closes it in any state and frees its memory; NULL is allowed. A step that has not ended is ended
 * (see refit_window_end). Waits for copies, at most offload.timeout_ms. On a lost device stepped
 * parts that have not reached the image are lost: then no read lock begins any more.
 *
 * Errors, with nothing closed:
 * - REFIT_ERR_TIMEOUT: copies are still under way
 * - REFIT_ERR_COPY, REFIT_ERR_HOST_MEMORY (see wait) and others: copies out of a stepped part could
 *   not be started; close tries again
 * - those of refit_memory_free
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_close(refit_window *window,
                                                           refit_error *error);

/*
 * Makes the window use memory of the caller: `windows` (1 to REFIT_WINDOWS) of `window_bytes` each,
 * one after the other, at an address that is a multiple of 512. It is borrowed until the next
 * set_memory, or until the window is closed; memory of the window's own is freed. NULL: the window
 * takes its own again. Does not wait for copies.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way
 * - REFIT_ERR_BUSY: the last copies are under way: call refit_window_wait first
 * - REFIT_ERR_INVALID: not device memory, or not aligned
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_set_memory(refit_window *window, void *memory,
                                                                uint64_t window_bytes,
                                                                uint32_t windows,
                                                                refit_error *error);

/*
 * The least window_bytes with which these parts can be stepped: those of the largest run of parts
 * that stay together, with alignment. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way, or the offloader is not sealed
 * - REFIT_ERR_BUSY: the last copies are under way: call refit_window_wait first
 * - those of refit_window_begin for a list
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_measure(refit_window *window,
                                                             const refit_window_part *parts,
                                                             uint32_t count, uint64_t *window_bytes,
                                                             refit_error *error);

/*
 * Starts a step over these parts, in this order; the list is copied. `size` is the same in all
 * elements, and is the distance between them. The first copies in start after what `after` has
 * queued, which is where the memory of the windows was used last. The call may come long before the
 * first next: during the backward pass, say.
 *
 * Blocks only for the copies out of the step before, and, the first time, for the driver and, with
 * offload.background, for the host memory. Where there is too little device memory the window takes
 * fewer windows, then smaller ones; it keeps what it has until refit_window_trim. For parts that
 * stay together and are larger than offload.window_bytes its windows grow to them.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way, or the offloader is not OFFLOADED
 * - REFIT_ERR_BUSY: a read lock reads the image
 * - REFIT_ERR_INVALID, REFIT_ERR_NOT_FOUND: a part that cannot be: of no region, of a region that
 *   is not kept, of bytes after its end, of bytes that an earlier part has, or of masters and not
 *   of whole units
 * - REFIT_ERR_UNSUPPORTED: masters that have left the device by their weights (offload.masters);
 *   those with REFIT_PLACEMENT_HOST visit it
 * - REFIT_ERR_LIMIT: parts that stay together are larger than the windows of set_memory
 * - REFIT_ERR_DEVICE_MEMORY: none of these sizes is to be had
 * - REFIT_ERR_COPY and others: copies could not be started; begin tries again
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_begin(refit_window *window,
                                                           const refit_window_part *parts,
                                                           uint32_t count, refit_stream_ref after,
                                                           refit_error *error);

/*
 * Waits until the parts of the next window have arrived, at most offload.timeout_ms, and starts the
 * copies in of the one after it where memory is free. In IN_USE it answers the same window again.
 *
 * Errors:
 * - REFIT_ERR_STATE: no step is under way
 * - REFIT_ERR_COPY and others: copies could not be started; next tries again
 * - REFIT_ERR_CORRUPT: weights of a part that comes in were changed since its masters left. Nothing
 *   was written over the masters that are in the image: make the weights what they were and call
 *   next again, or end the step
 * - REFIT_ERR_TIMEOUT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_next(refit_window *window,
                                                          refit_window_view *view,
                                                          refit_error *error);

/*
 * Says where the bytes of a REFIT_PART_NEW of the window in use are; `part` is its number in the
 * list. The memory must stay until refit_window_done of the next window, or refit_window_wait, has
 * returned REFIT_OK. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: no window is in use
 * - REFIT_ERR_INVALID: not such a part of this window, or not device memory; for masters that
 *   travel by their weights also an address that is not a multiple of 4
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_place(refit_window *window, uint32_t part,
                                                           void *memory, refit_error *error);

/*
 * The parts of the window in use were stepped by work that `stream` has queued: copies out follow
 * it. After an error the stream stays open until a later call has returned REFIT_OK. First waits
 * for the copies out of the window before, at most offload.timeout_ms. If it fails, the parts count
 * as stepped; their bytes are safe on the device, and the next call of done, next, end or wait
 * tries again.
 *
 * Errors:
 * - REFIT_ERR_STATE: no window is in use
 * - REFIT_ERR_INVALID: a REFIT_PART_NEW has no memory; the window stays in use
 * - REFIT_ERR_COPY and others
 * - REFIT_ERR_TIMEOUT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_done(refit_window *window,
                                                          refit_stream_ref stream,
                                                          refit_error *error);

/*
 * Ends the step. Windows that were not stepped, that in use too, keep the bytes that the image has;
 * of masters that travel by their weights, those weights have to be as they were. Waits for copies
 * in that are under way, which there are only then; not for the last copies out, unless they read
 * weights and no stream waits for them. In IDLE it does nothing.
 *
 * Errors:
 * - REFIT_ERR_COPY and others: copies out could not be started; end tries again
 * - REFIT_ERR_TIMEOUT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_end(refit_window *window, refit_error *error);

/*
 * Waits until every stepped part is back in the image, at most `timeout_ms` (0: only looks). Starts
 * copies out that could not be started before.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT
 * - REFIT_ERR_HOST_MEMORY: none for masters that do not fit into the image. done, next and end
 *   answer it too, when they try
 * - REFIT_ERR_COPY and others: copies could not be started; their bytes are safe on the device
 * - REFIT_ERR_DEVICE: the device is lost, and the parts that are not back
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_wait(refit_window *window, uint32_t timeout_ms,
                                                          refit_error *error);

/*
 * How many parts of the last list were stepped, from the first on. 0 for NULL. Does not block.
 */
REFIT_API uint32_t refit_window_progress(const refit_window *window);

/*
 * The bytes of a region in the image, for the caller to read and write between steps: what a
 * checkpoint brings is written here. The address stays the same until the offloader gives its image
 * back; the bytes may be used until the next begin, and again after refit_window_wait. Does not
 * block.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way, or the offloader is not OFFLOADED
 * - REFIT_ERR_BUSY: the last copies are under way (call refit_window_wait first), or a read lock is
 *   open
 * - REFIT_ERR_NOT_FOUND: no such region, or one that is not kept
 * - REFIT_ERR_INVALID: a region that a host step steps: see refit_host_step_region
 * - REFIT_ERR_UNSUPPORTED: masters that travel by their weights: read them by refit_read_lock_read,
 *   write them as REFIT_PART_NEW
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_host(refit_window *window,
                                                          refit_region_id region, void **bytes,
                                                          uint64_t *count, refit_error *error);

/*
 * Waits for copies, at most offload.timeout_ms, then frees the memory of the windows, and host
 * memory that masters once went whole into and left again; memory of set_memory is not used any
 * more. The next begin takes memory again.
 *
 * Errors:
 * - REFIT_ERR_STATE: a step is under way
 * - those of refit_window_wait and refit_memory_free
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_window_trim(refit_window *window, refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
