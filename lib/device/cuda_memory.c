/*
 * Memory of a GPU. Bytes are booked before they are taken and given back after they are gone, so
 * that an ordered capacity holds; arenas (cuda_reserve.c) share the books.
 *
 * The driver promises alignment to 256 bytes and this room to 512, so an allocation that comes out
 * odd is taken again with slack; its first byte is then found through the driver. What an address
 * is, is asked of the driver too, piece by piece: memory of many mappings (PyTorch's
 * expandable_segments) is one range to its owner.
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

refit_status rft_cuda_memory_free(rft_cuda_device *cuda, void *block, refit_error *error)
{
    rft_cuda_memory *memory = cuda->memory;
    rft_lock(&memory->lock);
    uint64_t bytes = rft_blocks_take(&memory->blocks, block);
    rft_unlock(&memory->lock);
    RFT_REFUSE_IF(bytes == 0, error, REFIT_ERR_INVALID,
                  "%p was not given by refit_memory_alloc of this device, or was freed before",
                  block);
    rft_cu_result result = give_block(cuda, (rft_cu_ptr)(uintptr_t)block);
    /* A lost GPU has taken its memory along: the books are what is left to free. */
    if (result == RFT_CU_SUCCESS || rft_cuda_is_lost(result)) {
        rft_cuda_memory_unbook(cuda, bytes);
        return REFIT_OK;
    }
    RFT_TRY(list_block(memory, block, bytes, error)); /* it had a place: there is room */
    return rft_cuda_check(&cuda->driver, result, error, "memory of the GPU could not be freed");
}

/* What the driver knows of an address. The range is the reservation where there is one, not what
 * is mapped in it. */
typedef struct pointer_facts {
    unsigned type; /* RFT_CU_MEMORY_*; 0: nothing */
    int managed;
    int mapped;
    int ordinal;
    rft_cu_ptr range_start;
    size_t range_bytes;
} pointer_facts;

static refit_status ask_pointer(rft_cuda_device *cuda, uint64_t at, pointer_facts *facts,
                                refit_error *error)
{
    int asked[] = {RFT_CU_PTR_MEMORY_TYPE, RFT_CU_PTR_IS_MANAGED,  RFT_CU_PTR_MAPPED,
                   RFT_CU_PTR_ORDINAL,     RFT_CU_PTR_RANGE_START, RFT_CU_PTR_RANGE_SIZE};
    void *values[] = {&facts->type,    &facts->managed,     &facts->mapped,
                      &facts->ordinal, &facts->range_start, &facts->range_bytes};
    *facts = (pointer_facts){.ordinal = -2};
    rft_cu_result result = cuda->driver.pointer_attributes(
        (unsigned)(sizeof asked / sizeof asked[0]), asked, values, at);
    /* Some drivers refuse to speak of memory that is not theirs. */
    if (result == RFT_CU_INVALID_VALUE) return REFIT_OK;
    return rft_cuda_check(&cuda->driver, result, error,
                          "the driver did not say what memory this is");
}

static refit_status check_piece(const rft_cuda_device *cuda, uint64_t at,
                                const pointer_facts *facts, refit_error *error)
{
    RFT_REFUSE_IF(facts->managed != 0, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is managed memory (cudaMallocManaged), which moves by itself: "
                  "bring memory of cuda:%d",
                  at, cuda->ordinal);
    RFT_REFUSE_IF(facts->type == RFT_CU_MEMORY_HOST, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is page-locked host memory, not memory of cuda:%d", at,
                  cuda->ordinal);
    RFT_REFUSE_IF(facts->type == 0 && facts->range_bytes == 0, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is not memory of cuda:%d: it is ordinary host memory, was freed, "
                  "or never was allocated",
                  at, cuda->ordinal);
    RFT_REFUSE_IF(facts->mapped == 0, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is a reserved address of cuda:%d with no memory mapped behind it",
                  at, cuda->ordinal);
    RFT_REFUSE_IF(facts->ordinal != cuda->ordinal, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is memory of cuda:%d, and this device is cuda:%d", at,
                  facts->ordinal, cuda->ordinal);
    return REFIT_OK;
}

refit_status rft_cuda_memory_check(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                   const void **whole, refit_error *error)
{
    uint64_t at = (uintptr_t)memory, end;
    const void *first = NULL;
    RFT_REFUSE_IF(!rft_add_u64(at, bytes, &end), error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes from %p on are more than there are addresses", bytes, memory);
    while (at < end) {
        pointer_facts facts;
        rft_cu_ptr base = 0;
        size_t piece = 0;
        RFT_TRY(ask_pointer(cuda, at, &facts, error));
        RFT_TRY(check_piece(cuda, at, &facts, error));
        if (at == (uintptr_t)memory) first = (const void *)(uintptr_t)facts.range_start;
        RFT_TRY(rft_cuda_check(&cuda->driver, cuda->driver.memory_range(&base, &piece, at), error,
                               "the driver did not say how far this memory goes"));
        uint64_t next;
        RFT_REFUSE_IF(!rft_add_u64(base, piece, &next) || next <= at, error, REFIT_ERR_DEVICE,
                      "the driver says that the memory at 0x%" PRIx64 " ends before it", at);
        at = next;
    }
    *whole = first;
    return REFIT_OK;
}
