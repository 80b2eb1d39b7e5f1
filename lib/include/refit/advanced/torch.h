/*
 * refit/advanced/torch.h: PyTorch allocates from an arena, so that optimizer states have addresses
 * that never change.
 *
 *     allocator = torch.cuda.memory.CUDAPluggableAllocator(
 *         "librefit.so", "refit_torch_alloc", "refit_torch_free").allocator()    # kept for good
 *     pool = torch.cuda.MemPool(allocator)
 *     with torch.cuda.use_mem_pool(pool):
 *         ...                                        # what is allocated here comes from the arena
 *
 * PyTorch calls these two without a user pointer, so one arena is attached for each device: that is
 * state of the process, like the allocator and the log of refit/host.h. Each piece of the arena is
 * one segment of PyTorch's; list them with refit_arena_piece and give each to the offloader as a
 * region. Segments that come later are regions of the next refit_offloader_unseal and seal.
 *
 * PyTorch's rules for such allocators:
 *  - PyTorch 2.8 or later. The allocator lives until the process ends, because before 2.11 the
 *    MemPool keeps a bare pointer to it.
 *  - The MemPool is made while its device is the current one, and outlives its tensors; the arena
 *    stays attached until the pool is gone and torch.cuda.empty_cache() was called.
 *  - expandable_segments is off for the pool: with it PyTorch maps memory by itself.
 *  - If a tensor is used on another stream than the one it was made on, name that stream with
 *    refit_arena_add_stream.
 *  - PyTorch's own streams live as long as the process. Before a stream of another library
 *    (torch.cuda.ExternalStream) is destroyed that was current when memory was allocated, call
 *    refit_arena_remove_stream.
 *  - A pool in use gives no memory back, and neither does PyTorch's cache meanwhile: call
 *    torch.cuda.empty_cache() before. All that is allocated in the pool stays there, the
 *    temporaries of an optimizer step too: allocate only states in it.
 */
#ifndef REFIT_ADVANCED_TORCH_H
#define REFIT_ADVANCED_TORCH_H

#include <refit/advanced/arena.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * From now on refit_torch_alloc takes memory for the arena's device from it. The arena cannot close
 * meanwhile. Does not block. Any thread.
 *
 * Errors:
 * - REFIT_ERR_EXISTS: the device has one
 * - REFIT_ERR_LIMIT: device 64 and above
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_torch_attach(refit_arena *arena, refit_error *error);

/*
 * Detaches the arena. Call it before the process ends: PyTorch may free at exit, when the driver is
 * gone. Does not block. Any thread.
 *
 * Errors:
 * - REFIT_ERR_BUSY: PyTorch has pieces of it or is allocating one
 * - REFIT_ERR_NOT_FOUND: it is not attached
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_torch_detach(refit_arena *arena, refit_error *error);

/*
 * Called by PyTorch: a piece of `size` bytes of the arena attached for `device`, by PyTorch's
 * number; `stream` (0: the default stream) uses the arena from now on. NULL for a size of 0, and
 * for every failure, which PyTorch reports as out of memory; the reason is in the log. May block
 * for the driver, and for streams as refit_torch_free does while pieces are still to go. Any
 * thread.
 */
REFIT_API void *refit_torch_alloc(ptrdiff_t size, int device, void *stream);

/*
 * Called by PyTorch: gives a piece back, once the streams that use the arena have done what is
 * queued. NULL is allowed; `size` is not looked at. A piece that cannot go now (an offloader has it
 * as a region, it is held, a graph is being captured) goes with the call that ends that, or with
 * PyTorch's next one, which then waits for it, and the log says so. Blocks for streams, at most
 * offload.timeout_ms of the device's configuration. Any thread.
 */
REFIT_API void refit_torch_free(void *memory, ptrdiff_t size, int device, void *stream);

#ifdef __cplusplus
}
#endif
#endif
