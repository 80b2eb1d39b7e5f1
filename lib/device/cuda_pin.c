/*
 * Registered host memory, and the list of it: ranges in the order of their addresses, none of which
 * overlap, so that whether a copy's host side is pinned is one binary search.
 *
 * A range is listed after it is registered and taken off before it is unregistered: what is on the
 * list is pinned. Into which pieces a large arena is cut is its owner's choice. Write-combined
 * memory is never asked for, since the CPU reads what is offloaded.
 */
#include "device/cuda_pin.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"

#define ROOM_FIRST 16u

struct rft_cuda_pins {
    rft_mutex lock;
    rft_cuda_pinned *list; /* sorted; guarded by lock, like the rest */
    uint32_t count;
    uint32_t room;
};

refit_status rft_cuda_pins_open(rft_cuda_device *cuda, rft_cuda_pins **out, refit_error *error)
{
    (void)cuda;
    rft_cuda_pins *pins = rft_calloc(1, sizeof *pins);
    RFT_REFUSE_IF(pins == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the list of what is page-locked");
    refit_status status = rft_mutex_open(&pins->lock, error);
    if (status != REFIT_OK) {
        rft_free(pins);
        return status;
    }
    *out = pins;
    return REFIT_OK;
}

void rft_cuda_pins_close(rft_cuda_device *cuda, rft_cuda_pins *pins)
{
    if (pins == NULL) return;
    rft_cuda_guard guard;
    if (pins->count > 0 && rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        for (uint32_t i = 0; i < pins->count; i++) {
            (void)cuda->driver.host_unregister((void *)pins->list[i].start);
        }
        rft_cuda_leave(cuda, &guard);
    }
    rft_free(pins->list);
    rft_mutex_close(&pins->lock);
    rft_free(pins);
}

/* The first range that ends behind `at`, the lock held; `count` if there is none. */
static uint32_t find_behind(const rft_cuda_pins *pins, uintptr_t at)
{
    uint32_t low = 0, high = pins->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (pins->list[middle].end > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

rft_cuda_pinned rft_cuda_pins_find(rft_cuda_device *cuda, const void *memory)
{
    rft_cuda_pins *pins = cuda->pins;
    rft_cuda_pinned found = {0, 0};
    rft_lock(&pins->lock);
    uint32_t at = find_behind(pins, (uintptr_t)memory);
    if (at < pins->count && pins->list[at].start <= (uintptr_t)memory) found = pins->list[at];
    rft_unlock(&pins->lock);
    return found;
}

/* Room for one more, the lock held. */
static refit_status grow(rft_cuda_pins *pins, refit_error *error)
{
    if (pins->count < pins->room) return REFIT_OK;
    uint32_t room = pins->room == 0 ? ROOM_FIRST : pins->room * 2;
    rft_cuda_pinned *list = rft_realloc(pins->list, room, sizeof *list);
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep track of %u page-locked ranges", room);
    pins->list = list;
    pins->room = room;
    return REFIT_OK;
}

static refit_status list_range(rft_cuda_pins *pins, rft_cuda_pinned range, refit_error *error)
{
    rft_lock(&pins->lock);
    refit_status status = grow(pins, error);
    if (status == REFIT_OK) {
        uint32_t at = find_behind(pins, range.start);
        memmove(pins->list + at + 1, pins->list + at, (pins->count - at) * sizeof *pins->list);
        pins->list[at] = range;
        pins->count++;
    }
    rft_unlock(&pins->lock);
    return status;
}

static bool unlist_range(rft_cuda_pins *pins, uintptr_t start)
{
    rft_lock(&pins->lock);
    uint32_t at = find_behind(pins, start);
    bool listed = at < pins->count && pins->list[at].start == start;
    if (listed) {
        pins->count--;
        memmove(pins->list + at, pins->list + at + 1, (pins->count - at) * sizeof *pins->list);
    }
    rft_unlock(&pins->lock);
    return listed;
}

static refit_status refused(const rft_cuda_device *cuda, rft_cu_result result, void *memory,
                            uint64_t bytes, refit_error *error)
{
    if (rft_cuda_is_lost(result)) {
        return rft_cuda_check(&cuda->driver, result, error, "host memory could not be page-locked");
    }
    if (result == RFT_CU_HOST_MEMORY_ALREADY_REGISTERED) {
        return rft_fail_sub(error, REFIT_ERR_PIN, result,
                            "%p, %" PRIu64 " bytes: part of it is page-locked already, by this "
                            "process; unpin that first, or keep to memory of its own",
                            memory, bytes);
    }
    return rft_fail_sub(error, REFIT_ERR_PIN, result,
                        "%" PRIu64
                        " bytes not page-locked: %s; too little memory in the machine or its "
                        "container (docker --memory; ulimit -l does not count here), or Linux "
                        "6.11-6.13: set offload.slab_bytes < 2GiB; or offload.pin: prefer",
                        bytes, rft_cuda_name(&cuda->driver, result));
}

refit_status rft_cuda_pin(rft_cuda_device *cuda, void *memory, uint64_t bytes, refit_error *error)
{
    rft_cu_result result = cuda->driver.host_register(memory, bytes, RFT_CU_HOST_REGISTER_PORTABLE);
    if (result != RFT_CU_SUCCESS) return refused(cuda, result, memory, bytes, error);
    rft_cuda_pinned range = {(uintptr_t)memory, (uintptr_t)memory + bytes};
    refit_status status = list_range(cuda->pins, range, error);
    if (status != REFIT_OK) (void)cuda->driver.host_unregister(memory);
    return status;
}

void rft_cuda_unpin(rft_cuda_device *cuda, void *memory)
{
    rft_cuda_guard guard;
    if (!unlist_range(cuda->pins, (uintptr_t)memory)) return;
    if (rft_cuda_enter(cuda, &guard, NULL) != REFIT_OK) return;
    (void)cuda->driver.host_unregister(memory);
    rft_cuda_leave(cuda, &guard);
}
