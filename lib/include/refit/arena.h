/*
 * refit/arena.h: device memory whose addresses never change.
 *
 * An arena reserves addresses once. Regions that lie in it lose their physical memory when they are
 * offloaded and get it back, at the same address, when they return: pointers, views and captured
 * graphs stay valid. (Host device: mmap and MADV_DONTNEED. CUDA: virtual memory management.)
 */
#ifndef REFIT_ARENA_H
#define REFIT_ARENA_H

#include <refit/device.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_arena refit_arena;

/*
 * Reserves `bytes` of addresses on the device; no memory is taken yet. The caller closes it before
 * the device. Any thread. REFIT_ERR_UNSUPPORTED, REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY,
 * REFIT_ERR_DEVICE_MEMORY (no such stretch of addresses). Since 0.1.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_open(refit_device *device, uint64_t bytes,
                                                         refit_arena **out, refit_error *error);

/* Gives everything back; NULL is allowed. No queued work may still use its pieces. May block for
 * the driver. Any thread, once no other uses it. REFIT_ERR_BUSY while an offloader knows a region
 * in it. Since 0.1. */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_close(refit_arena *arena, refit_error *error);

/*
 * Takes the next `bytes` of the arena, with memory behind them (zeroed on the host device,
 * undefined elsewhere), aligned so that no two pieces share a page. Single pieces are not given
 * back: the arena is closed as a whole. A region that is to leave with its memory is one whole
 * piece. One thread at a time per arena. REFIT_ERR_DEVICE_MEMORY (capacity), REFIT_ERR_LIMIT (the
 * reservation is used up), REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY. Since 0.1.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_arena_alloc(refit_arena *arena, uint64_t bytes,
                                                          void **out, refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
