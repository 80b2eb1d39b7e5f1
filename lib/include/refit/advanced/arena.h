/*
 * refit/advanced/arena.h: device memory whose addresses never change.
 *
 * An arena reserves addresses once. Regions that lie in it lose their physical memory when they are
 * offloaded and get it back, at the same address, when they return: pointers, views and captured
 * graphs stay valid. (Host device: mmap and MADV_DONTNEED. CUDA: virtual memory management.)
 *
 * On a GPU pages are 2 MiB and memory comes and goes in chunks of offload.chunk_bytes, counted from
 * the arena's first byte: a chunk goes when nothing in it is needed any more. So put what leaves
 * together into one arena, and small tensors together into one piece.
 *
 * Other GPUs reach the memory if the process works on them (their primary context is active) when
 * it comes, and the machine lets them: cuCtxEnablePeerAccess means nothing for memory of this kind.
 * A GPU that comes into use later reaches it once it has been away and is back.
 *
 * Other users of the memory have to be named:
 *  - Streams whose queued work uses the arena are named once (refit_arena_add_stream): memory then
 * goes only when that work is done.
 *  - NCCL, where it registers buffers of captured graphs (its default; NCCL_GRAPH_REGISTER=0 turns
 *    that off), and network cards keep the physical pages, not the addresses. A piece that they
 *    know is held (refit_arena_pin). refit cannot see it: the driver's mark for such memory
 *    (CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) does not exist for memory of this kind.
 */
#ifndef REFIT_ADVANCED_ARENA_H
#define REFIT_ADVANCED_ARENA_H

#include <refit/device.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_arena refit_arena;

/*
 * Reserves `bytes` of addresses on the device; no memory is taken yet. The caller closes it before
 * the device. Any thread.
 *
 * Errors:
 * - REFIT_ERR_DEVICE_MEMORY: no such range of addresses
 * - REFIT_ERR_UNSUPPORTED, REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_open(refit_device *device, uint64_t bytes,
                                                         refit_arena **out, refit_error *error);

/*
 * Gives everything back; NULL is allowed. Waits, at most offload.timeout_ms of the device's
 * configuration, for the streams of refit_arena_add_stream; no other queued work may still use its
 * pieces. Any thread, once no other uses it.
 *
 * Errors:
 * - REFIT_ERR_BUSY: an offloader has a region in it, a piece is held, or torch allocates from
 *   it
 * - REFIT_ERR_STATE: a graph is being captured from such a stream: then it stays open, call
 *   again
 * - REFIT_ERR_TIMEOUT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_close(refit_arena *arena, refit_error *error);

/*
 * Gives a piece of `bytes`, backed by memory (zeroed on the host device, undefined elsewhere),
 * aligned so that no two pieces share a page: where pieces were given back, in the smallest hole
 * that is large enough, else after the last one. It never moves. A region that is to leave with
 * its memory is one whole piece. May block for the driver. Any thread.
 *
 * Errors:
 * - REFIT_ERR_DEVICE_MEMORY: capacity
 * - REFIT_ERR_LIMIT: no range of addresses that long is left
 * - REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_alloc(refit_arena *arena, uint64_t bytes,
                                                          void **out, refit_error *error);

/*
 * Gives a piece back, memory and addresses; NULL is allowed. Waits like refit_arena_close for
 * streams. On failure the piece stays. Any thread.
 *
 * Errors:
 * - REFIT_ERR_BUSY: an offloader has it as a region or it is held
 * - REFIT_ERR_INVALID: no piece of the arena
 * - REFIT_ERR_DEVICE: call again
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_STATE
 * - the failure of work on a stream that uses it, which is reported once
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_free(refit_arena *arena, void *memory,
                                                         refit_error *error);

/*
 * Piece number `index` (0, 1, 2 … in the order of addresses, as long as none comes or goes): its
 * address, and its bytes as they were asked for. Not one that was given back and is still to go
 * (refit_torch_free). Does not block. Any thread.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND: after the last
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_piece(refit_arena *arena, uint32_t index,
                                                          void **memory, uint64_t *bytes,
                                                          refit_error *error);

/*
 * Says that work on `stream` uses the arena: before memory of the arena goes
 * (refit_offloader_wait, refit_arena_free, refit_arena_close), what is queued there by then is
 * waited for, at most offload.timeout_ms of the device's configuration. Idempotent; it ends with
 * refit_arena_remove_stream, or with refit_stream_close. A stream that refit did not open must end
 * its use before it is destroyed: CUDA does not detect the handle of a destroyed stream and may
 * reuse it for a new stream. For REFIT_STREAM_NONE it does nothing. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID: no stream of this device
 * - REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_add_stream(refit_arena *arena,
                                                               refit_stream_ref stream,
                                                               refit_error *error);

/*
 * Ends the use, once the work that is queued there is done (waits as above). Any thread.
 *
 * Errors:
 * - REFIT_ERR_STATE: a graph is being captured from the stream: the use goes on; another failure is
 *   that of the work, and the use has ended
 * - REFIT_ERR_TIMEOUT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_remove_stream(refit_arena *arena,
                                                                  refit_stream_ref stream,
                                                                  refit_error *error);

/*
 * Says that the physical memory of a piece is known outside of refit: to NCCL, to a network card,
 * to the buffers of a captured graph. Its memory is there and stays until refit_arena_unpin, once
 * for each hold; an offloader that is given it as a region answers REFIT_ERR_BUSY. May block for
 * the driver. Any thread.
 *
 * Errors:
 * - REFIT_ERR_BUSY: an offloader has it as a region
 * - REFIT_ERR_INVALID: no piece of the arena
 * - REFIT_ERR_DEVICE_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_pin(refit_arena *arena, void *memory,
                                                        refit_error *error);

/*
 * Ends one hold. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID: it is not held
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_unpin(refit_arena *arena, void *memory,
                                                          refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
