/*
 * Device memory of the host device, and the books that make its capacity real.
 *
 * Allocations of a megabyte and more are mappings of their own: when they are freed the pages go
 * back to the operating system at once, as they do on a GPU. Smaller ones come from the C library.
 * Bytes are booked before they are taken and given back after they are gone, so that the sum of
 * what exists never exceeds the capacity. Arenas (host_reserve.c) share the books.
 */
#include "device/host_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "device/host_map.h"

#define BLOCK_ALIGNMENT UINT64_C(512)
#define MAP_LEAST       (UINT64_C(1) << 20)

refit_status rft_host_memory_open(rft_host_memory *memory, uint64_t capacity, refit_error *error)
{
    *memory = (rft_host_memory){.capacity = capacity, .granule = (uint64_t)sysconf(_SC_PAGESIZE)};
    return rft_mutex_open(&memory->lock, error);
}

void rft_host_memory_close(rft_host_memory *memory)
{
    rft_blocks_close(&memory->blocks);
    rft_mutex_close(&memory->lock);
}

uint64_t rft_host_memory_used(rft_host_memory *memory)
{
    rft_lock(&memory->lock);
    uint64_t used = memory->used;
    rft_unlock(&memory->lock);
    return used;
}

refit_status rft_host_memory_take(rft_host_memory *memory, uint64_t bytes, refit_error *error)
{
    RFT_REFUSE_IF(bytes > memory->capacity - memory->used, error, REFIT_ERR_DEVICE_MEMORY,
                  "the device is full: %" PRIu64 " bytes were asked for, %" PRIu64 " of %" PRIu64
                  " are free; free or offload something first",
                  bytes, memory->capacity - memory->used, memory->capacity);
    memory->used += bytes;
    return REFIT_OK;
}

void rft_host_memory_give(rft_host_memory *memory, uint64_t bytes)
{
    memory->used -= bytes;
}

static void *take_block(uint64_t bytes)
{
    void *block = NULL;
    if (bytes < MAP_LEAST) {
        errno = posix_memalign(&block, BLOCK_ALIGNMENT, bytes);
        return errno == 0 ? block : NULL;
    }
    return rft_host_map(bytes, false);
}

static void give_block(void *block, uint64_t bytes)
{
    if (bytes < MAP_LEAST) {
        free(block);
    } else {
        munmap(block, bytes);
    }
}

static refit_status book_block(rft_host_memory *memory, void *block, uint64_t bytes,
                               refit_error *error)
{
    rft_lock(&memory->lock);
    refit_status status = rft_blocks_add(&memory->blocks, block, bytes, error);
    rft_unlock(&memory->lock);
    return status;
}

static void unbook(rft_host_memory *memory, uint64_t bytes)
{
    rft_lock(&memory->lock);
    rft_host_memory_give(memory, bytes);
    rft_unlock(&memory->lock);
}

/* The block, once its bytes are booked. */
static refit_status place_block(rft_host_memory *memory, uint64_t bytes, void **out,
                                refit_error *error)
{
    void *block = take_block(bytes);
    RFT_REFUSE_IF(block == NULL, error, REFIT_ERR_DEVICE_MEMORY,
                  "the machine has no %" PRIu64 " bytes for the host device: %s", bytes,
                  strerror(errno));
    refit_status status = book_block(memory, block, bytes, error);
    if (status != REFIT_OK) {
        give_block(block, bytes);
        return status;
    }
    *out = block;
    return REFIT_OK;
}

refit_status rft_host_memory_alloc(rft_host_memory *memory, uint64_t bytes, void **out,
                                   refit_error *error)
{
    uint64_t unit = bytes < MAP_LEAST ? BLOCK_ALIGNMENT : memory->granule;
    RFT_REFUSE_IF(!rft_align_u64(bytes, unit, &bytes), error, REFIT_ERR_DEVICE_MEMORY,
                  "%" PRIu64 " bytes are more than there are addresses", bytes);
    rft_lock(&memory->lock);
    refit_status status = rft_host_memory_take(memory, bytes, error);
    rft_unlock(&memory->lock);
    if (status != REFIT_OK) return status;
    status = place_block(memory, bytes, out, error);
    if (status != REFIT_OK) unbook(memory, bytes);
    return status;
}

refit_status rft_host_memory_free(rft_host_memory *memory, void *block, refit_error *error)
{
    rft_lock(&memory->lock);
    uint64_t bytes = rft_blocks_take(&memory->blocks, block);
    rft_unlock(&memory->lock);
    RFT_REFUSE_IF(bytes == 0, error, REFIT_ERR_INVALID,
                  "%p was not given by refit_memory_alloc of this device, or was freed before",
                  block);
    give_block(block, bytes);
    unbook(memory, bytes);
    return REFIT_OK;
}
