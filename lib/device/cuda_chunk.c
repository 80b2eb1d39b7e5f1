/*
 * Physical memory of a GPU comes to reserved addresses and goes, one large handle at a time: what
 * these calls cost grows with their number, hardly with the bytes. Knows one chunk and the books;
 * who lives in it is cuda_reserve.c's business.
 */
#include "device/cuda_chunk.h"

#include "device/cuda_memory.h"

static rft_cu_result open_access(rft_cuda_device *cuda, rft_cu_ptr at, uint64_t bytes)
{
    const rft_cu_access access = {.location = {RFT_CU_LOCATION_DEVICE, cuda->ordinal},
                                  .flags = RFT_CU_ACCESS_READWRITE};
    return cuda->driver.set_access(at, bytes, &access, 1);
}

rft_cu_result rft_cuda_chunk_raise(rft_cuda_device *cuda, rft_cuda_chunk *chunk,
                                   const rft_cu_allocation *properties, rft_cu_ptr at,
                                   uint64_t bytes, const char **what)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_result result = RFT_CU_SUCCESS;
    if (chunk->state == RFT_CHUNK_EMPTY) {
        *what = "memory for an arena was not to be had";
        result = driver->physical_create(&chunk->handle, bytes, properties, 0);
        if (result != RFT_CU_SUCCESS) return result;
        chunk->state = RFT_CHUNK_HELD;
    }
    if (chunk->state == RFT_CHUNK_HELD) {
        *what = "memory of an arena could not be mapped";
        result = driver->map(at, bytes, 0, chunk->handle, 0);
        if (result != RFT_CU_SUCCESS) return result;
        chunk->state = RFT_CHUNK_MAPPED;
    }
    if (chunk->state == RFT_CHUNK_MAPPED) {
        *what = "memory of an arena could not be made accessible";
        result = open_access(cuda, at, bytes);
        if (result == RFT_CU_SUCCESS) chunk->state = RFT_CHUNK_OPEN;
    }
    return result;
}

/* A lost GPU says so at every call, and has taken the memory along: that goes on too. */
static bool is_gone(rft_cu_result result)
{
    return result == RFT_CU_SUCCESS || rft_cuda_is_lost(result);
}

rft_cu_result rft_cuda_chunk_lower(rft_cuda_device *cuda, rft_cuda_chunk *chunk, rft_cu_ptr at,
                                   uint64_t bytes, const char **what)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_result result = RFT_CU_SUCCESS;
    if (chunk->state >= RFT_CHUNK_MAPPED) {
        *what = "memory of an arena could not be unmapped";
        result = driver->unmap(at, bytes);
        if (!is_gone(result)) return result;
        chunk->state = RFT_CHUNK_HELD;
    }
    if (chunk->state == RFT_CHUNK_HELD) {
        *what = "memory of an arena could not be released";
        result = driver->physical_release(chunk->handle);
        if (!is_gone(result)) return result;
        chunk->state = RFT_CHUNK_EMPTY;
        rft_cuda_memory_unbook(cuda, bytes);
    }
    return result;
}
