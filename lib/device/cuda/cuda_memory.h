/* cuda_memory: allocations on a GPU, and the accounting of what refit has there. */
#ifndef RFT_CUDA_MEMORY_H
#define RFT_CUDA_MEMORY_H

#include "device/cuda/cuda_device.h"

/* ---- Allocations -------------------------------------------------------------------------- */

/* `capacity`: refit takes no more than that; UINT64_MAX: what the GPU has. Close takes NULL; all
 * was freed before. */
refit_status rft_cuda_memory_open(rft_cuda_device *cuda, uint64_t capacity, rft_cuda_memory **out,
                                  refit_error *error);
void rft_cuda_memory_close(rft_cuda_device *cuda, rft_cuda_memory *memory);

/* What can be allocated in all, and what refit has: allocations and committed ranges. */
uint64_t rft_cuda_memory_capacity(const rft_cuda_memory *memory);
uint64_t rft_cuda_memory_used(rft_cuda_memory *memory);

/* The accounting, for all that takes memory of the GPU: reserved before it is taken, given back
 * after it is gone. REFIT_ERR_DEVICE_MEMORY beyond the capacity. */
refit_status rft_cuda_memory_reserve(rft_cuda_device *cuda, uint64_t bytes, refit_error *error);
void rft_cuda_memory_unreserve(rft_cuda_device *cuda, uint64_t bytes);

/* The sentence for a driver that has no memory left: how much is free, and what helps. Other
 * answers are told as rft_cuda_check tells them. Inside a context guard. */
refit_status rft_cuda_memory_full(rft_cuda_device *cuda, rft_cu_result result, uint64_t bytes,
                                  refit_error *error);

/* The slots of device.h: alloc inside a context guard, free enters the context by itself. */
refit_status rft_cuda_memory_alloc(rft_cuda_device *cuda, uint64_t bytes, void **out,
                                   refit_error *error);
refit_status rft_cuda_memory_free(rft_cuda_device *cuda, void *block, refit_error *error);

/* ---- What an address is ----------------------------------------------------------------------
 * The driver tells what memory an address is. */

/* The slot memory_check of device.h, inside a context guard. */
refit_status rft_cuda_pointer_check(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                    rft_memory_range *allocation, refit_error *error);

/* ---- Registered host memory ------------------------------------------------------------------
 * Host memory registered with the driver, so that copies run at full speed. */

/* Close takes NULL, enters the context by itself and takes back every registration that is left. */
refit_status rft_cuda_pins_open(rft_cuda_device *cuda, rft_cuda_pins **out, refit_error *error);
void rft_cuda_pins_close(rft_cuda_device *cuda, rft_cuda_pins *pins);

/* The addresses of one registration: [start, end). */
typedef struct rft_cuda_pinned {
    uintptr_t start;
    uintptr_t end;
} rft_cuda_pinned;

/* The registration made here that holds `memory`; an empty one if there is none. Cheap: it is asked
 * for every other copy. No context guard is needed. */
rft_cuda_pinned rft_cuda_pins_find(rft_cuda_device *cuda, const void *memory);

/* Do the bytes lie inside it? */
static inline bool rft_cuda_pinned_holds(rft_cuda_pinned pinned, const void *memory, uint64_t bytes)
{
    uintptr_t at = (uintptr_t)memory;
    return at >= pinned.start && at < pinned.end && bytes <= pinned.end - at;
}

/* Fills the slots that this file has. */
void rft_cuda_memory_slots(rft_device_ops *ops);

#endif
