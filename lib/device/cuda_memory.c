/*
 * Memory of a GPU. Bytes are booked before they are taken and given back after they are gone, so
 * that an ordered capacity holds; arenas (cuda_reserve.c) share the books.
 *
 * The driver promises alignment to 256 bytes and this room to 512, so an allocation that comes out
 * odd is taken again with slack; its first byte is then found through the driver.
 */
#include "device/cuda_memory.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "device/blocks.h"

#define BLOCK_ALIGNMENT UINT64_C(512)
#define DRIVER_PROMISES UINT64_C(256)

struct rft_cuda_memory {
    uint64_t capacity;
    rft_mutex lock;
    uint64_t used; /* guarded by lock, like the rest */
    rft_blocks blocks;
};

refit_status rft_cuda_memory_open(rft_cuda_device *cuda, uint64_t capacity, rft_cuda_memory **out,
                                  refit_error *error)
{
    rft_cuda_memory *memory = rft_calloc(1, sizeof *memory);
    RFT_REFUSE_IF(memory == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the books of a GPU");
    refit_status status = rft_mutex_open(&memory->lock, error);
    if (status != REFIT_OK) {
        rft_free(memory);
        return status;
    }
    memory->capacity = rft_min_u64(capacity, cuda->facts.total_bytes);
    *out = memory;
    return REFIT_OK;
}

void rft_cuda_memory_close(rft_cuda_device *cuda, rft_cuda_memory *memory)
{
    (void)cuda;
    if (memory == NULL) return;
    rft_blocks_close(&memory->blocks);
    rft_mutex_close(&memory->lock);
    rft_free(memory);
}

uint64_t rft_cuda_memory_capacity(const rft_cuda_memory *memory)
{
    return memory->capacity;
}

uint64_t rft_cuda_memory_used(rft_cuda_memory *memory)
{
    rft_lock(&memory->lock);
    uint64_t used = memory->used;
    rft_unlock(&memory->lock);
    return used;
}

refit_status rft_cuda_memory_book(rft_cuda_device *cuda, uint64_t bytes, refit_error *error)
{
    rft_cuda_memory *memory = cuda->memory;
    rft_lock(&memory->lock);
    uint64_t left = memory->capacity - memory->used;
    if (bytes <= left) memory->used += bytes;
    rft_unlock(&memory->lock);
    RFT_REFUSE_IF(bytes > left, error, REFIT_ERR_DEVICE_MEMORY,
                  "the device is full: %" PRIu64 " bytes were asked for, %" PRIu64 " of %" PRIu64
                  " are free; free or offload something first",
                  bytes, left, memory->capacity);
    return REFIT_OK;
}

void rft_cuda_memory_unbook(rft_cuda_device *cuda, uint64_t bytes)
{
    rft_cuda_memory *memory = cuda->memory;
    rft_lock(&memory->lock);
    memory->used -= bytes;
    rft_unlock(&memory->lock);
}

refit_status rft_cuda_memory_full(rft_cuda_device *cuda, rft_cu_result result, uint64_t bytes,
                                  refit_error *error)
{
    size_t left = 0, total = 0;
    if (result != RFT_CU_OUT_OF_MEMORY || cuda->driver.memory_info(&left, &total) != 0) {
        return rft_cuda_check(&cuda->driver, result, error, "memory of the GPU was not to be had");
    }
    return rft_fail_sub(error, REFIT_ERR_DEVICE_MEMORY, result,
                        "the GPU is full: %" PRIu64 " bytes were asked for, %zu of %zu are free; "
                        "free or offload something first (torch.cuda.empty_cache() gives back what "
                        "PyTorch keeps)",
                        bytes, left, total);
}

/* Aligned as this room promises, or with slack enough to become so. */
static rft_cu_result take_block(rft_cuda_device *cuda, uint64_t bytes, rft_cu_ptr *out)
{
    rft_cu_ptr block = 0;
    rft_cu_result result = cuda->driver.memory_alloc(&block, bytes);
    if (result != RFT_CU_SUCCESS || block % BLOCK_ALIGNMENT == 0) {
        *out = block;
        return result;
    }
    (void)cuda->driver.memory_free(block);
    result = cuda->driver.memory_alloc(&block, bytes + BLOCK_ALIGNMENT - DRIVER_PROMISES);
    *out = (block + BLOCK_ALIGNMENT - 1) & ~(rft_cu_ptr)(BLOCK_ALIGNMENT - 1);
    return result;
}

/* The driver knows the block by its first byte there, which a lost GPU does not tell any more. */
static rft_cu_result give_block(rft_cuda_device *cuda, rft_cu_ptr block)
{
    rft_cu_ptr base = block;
    size_t bytes = 0;
    rft_cu_result result = cuda->driver.memory_range(&base, &bytes, block);
    if (result != RFT_CU_SUCCESS && !rft_cuda_is_lost(result)) return result;
    return cuda->driver.memory_free(base);
}

static refit_status list_block(rft_cuda_memory *memory, void *block, uint64_t bytes,
                               refit_error *error)
{
    rft_lock(&memory->lock);
    refit_status status = rft_blocks_add(&memory->blocks, block, bytes, error);
    rft_unlock(&memory->lock);
    return status;
}

/* The block, once its bytes are booked. */
static refit_status place_block(rft_cuda_device *cuda, uint64_t bytes, void **out,
                                refit_error *error)
{
    rft_cu_ptr block;
    rft_cu_result result = take_block(cuda, bytes, &block);
    if (result != RFT_CU_SUCCESS) return rft_cuda_memory_full(cuda, result, bytes, error);
    refit_status status = list_block(cuda->memory, (void *)(uintptr_t)block, bytes, error);
    if (status != REFIT_OK) {
        (void)give_block(cuda, block);
        return status;
    }
    *out = (void *)(uintptr_t)block;
    return REFIT_OK;
}

refit_status rft_cuda_memory_alloc(rft_cuda_device *cuda, uint64_t bytes, void **out,
                                   refit_error *error)
{
    RFT_REFUSE_IF(!rft_align_u64(bytes, BLOCK_ALIGNMENT, &bytes), error, REFIT_ERR_DEVICE_MEMORY,
                  "%" PRIu64 " bytes are more than there are addresses", bytes);
    RFT_TRY(rft_cuda_memory_book(cuda, bytes, error));
    refit_status status = place_block(cuda, bytes, out, error);
    if (status != REFIT_OK) rft_cuda_memory_unbook(cuda, bytes);
    return status;
}

static refit_status free_block(rft_cuda_device *cuda, void *block, bool inside, refit_error *error)
{
    rft_cuda_memory *memory = cuda->memory;
    rft_lock(&memory->lock);
    uint64_t bytes = rft_blocks_take(&memory->blocks, block);
    rft_unlock(&memory->lock);
    RFT_REFUSE_IF(bytes == 0, error, REFIT_ERR_INVALID,
                  "%p was not given by refit_memory_alloc of this device, or was freed before",
                  block);
    rft_cu_result result = RFT_CU_SUCCESS;
    if (inside) result = give_block(cuda, (rft_cu_ptr)(uintptr_t)block);
    /* A lost GPU has taken its memory along: the books are what is left to free. */
    if (result == RFT_CU_SUCCESS || rft_cuda_is_lost(result)) {
        rft_cuda_memory_unbook(cuda, bytes);
        return REFIT_OK;
    }
    RFT_TRY(list_block(memory, block, bytes, error)); /* it had a place: there is room */
    return rft_cuda_check(&cuda->driver, result, error, "memory of the GPU could not be freed");
}

refit_status rft_cuda_memory_free(rft_cuda_device *cuda, void *block, refit_error *error)
{
    bool inside;
    rft_cuda_guard guard;
    RFT_TRY(rft_cuda_enter_to_free(cuda, &guard, &inside, error));
    refit_status status = free_block(cuda, block, inside, error);
    if (inside) rft_cuda_leave(cuda, &guard);
    return status;
}
