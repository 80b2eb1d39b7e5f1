/* cuda_memory: allocations on a GPU, and the books of what refit has there. */
#ifndef RFT_CUDA_MEMORY_H
#define RFT_CUDA_MEMORY_H

#include "device/cuda_device.h"

/* `capacity`: refit takes no more than that; UINT64_MAX: what the GPU has. Close takes NULL; all
 * was freed before. */
refit_status rft_cuda_memory_open(rft_cuda_device *cuda, uint64_t capacity, rft_cuda_memory **out,
                                  refit_error *error);
void rft_cuda_memory_close(rft_cuda_device *cuda, rft_cuda_memory *memory);

/* What can be allocated in all, and what refit has: allocations and committed ranges. */
uint64_t rft_cuda_memory_capacity(const rft_cuda_memory *memory);
uint64_t rft_cuda_memory_used(rft_cuda_memory *memory);

/* The books, for all that takes memory of the GPU: booked before it is taken, given back after it
 * is gone. REFIT_ERR_DEVICE_MEMORY beyond the capacity. */
refit_status rft_cuda_memory_book(rft_cuda_device *cuda, uint64_t bytes, refit_error *error);
void rft_cuda_memory_unbook(rft_cuda_device *cuda, uint64_t bytes);

/* The sentence for a driver that has no memory left: how much is free, and what helps. Other
 * answers are told as rft_cuda_check tells them. Inside a context guard. */
refit_status rft_cuda_memory_full(rft_cuda_device *cuda, rft_cu_result result, uint64_t bytes,
                                  refit_error *error);

/* The slots of device.h: alloc inside a context guard, free enters the context by itself. */
refit_status rft_cuda_memory_alloc(rft_cuda_device *cuda, uint64_t bytes, void **out,
                                   refit_error *error);
refit_status rft_cuda_memory_free(rft_cuda_device *cuda, void *block, refit_error *error);

#endif
