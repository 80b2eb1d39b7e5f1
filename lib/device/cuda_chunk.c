/*
 * Physical memory of a GPU comes to reserved addresses and goes, one large handle at a time: what
 * these calls cost grows with their number, hardly with the bytes. Knows one chunk and the books;
 * who lives in it is cuda_reserve.c's business.
 *
 * Such memory is accessible to those GPUs that are named when it is mapped, whatever
 * cuCtxEnablePeerAccess has allowed: its own, and every other one that this process uses by then
 * (its primary context is active) and that the machine lets reach it. A process with one GPU, as
 * trainers have, names that one.
 */
#include "device/cuda_chunk.h"

#include "base/log.h"
#include "device/cuda_memory.h"

#define REACHED_MOST 32u

static rft_cu_access access_for(int ordinal)
{
    return (rft_cu_access){.location = {RFT_CU_LOCATION_DEVICE, ordinal},
                           .flags = RFT_CU_ACCESS_READWRITE};
}

/* This process works on the GPU, and it can reach memory of ours. What cannot be asked is no. */
static bool is_peer(const rft_cuda_device *cuda, int ordinal)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_device other;
    unsigned flags;
    int active = 0, reaches = 0;
    if (ordinal == cuda->ordinal || driver->device_get(&other, ordinal) != RFT_CU_SUCCESS) {
        return false;
    }
    if (driver->context_state(other, &flags, &active) != RFT_CU_SUCCESS || active == 0) {
        return false;
    }
    return driver->peer_reaches(&reaches, other, cuda->handle) == RFT_CU_SUCCESS && reaches != 0;
}

/* Ourselves first. Returns how many there are. */
static size_t list_reachers(const rft_cuda_device *cuda, rft_cu_access *list)
{
    const rft_cuda_driver *driver = &cuda->driver;
    int devices = 0;
    size_t count = 1;
    list[0] = access_for(cuda->ordinal);
    if (driver->context_state == NULL || driver->peer_reaches == NULL) return count;
    if (driver->device_count(&devices) != RFT_CU_SUCCESS) return count;
    for (int ordinal = 0; ordinal < devices && count < REACHED_MOST; ordinal++) {
        if (is_peer(cuda, ordinal)) list[count++] = access_for(ordinal);
    }
    return count;
}

static rft_cu_result open_access(rft_cuda_device *cuda, rft_cu_ptr at, uint64_t bytes)
{
    rft_cu_access list[REACHED_MOST];
    size_t count = list_reachers(cuda, list);
    rft_cu_result result = cuda->driver.set_access(at, bytes, list, count);
    if (result == RFT_CU_SUCCESS || count == 1) return result;
    rft_cu_result own = cuda->driver.set_access(at, bytes, list, 1);
    if (own == RFT_CU_SUCCESS) {
        rft_log(REFIT_LOG_WARNING, "memory of an arena on cuda:%d is closed to other GPUs: %s",
                cuda->ordinal, rft_cuda_name(&cuda->driver, result));
    }
    return own;
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
