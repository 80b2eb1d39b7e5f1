/*
 * Memory of a GPU. Bytes are reserved before they are taken and given back after they are gone, so
 * that the configured capacity is never exceeded; arenas (cuda_vmm.c) share the accounting.
 *
 * The driver promises alignment to 256 bytes and this module to 512, so an allocation that is not
 * aligned to 512 is made again with slack; the driver then tells where it begins.
 */
#include "device/cuda/cuda_memory.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "device/allocations.h"

/* ---- Allocations -------------------------------------------------------------------------- */

#define BLOCK_ALIGNMENT UINT64_C(512)
#define DRIVER_PROMISES UINT64_C(256)

struct rft_cuda_memory {
    uint64_t capacity;
    rft_mutex lock;
    uint64_t used; /* guarded by lock, like the rest */
    rft_allocations allocations;
};

refit_status rft_cuda_memory_open(rft_cuda_device *cuda, uint64_t capacity, rft_cuda_memory **out,
                                  refit_error *error)
{
    rft_cuda_memory *memory = rft_calloc(1, sizeof *memory);
    RFT_REFUSE_IF(memory == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the accounting of a GPU");
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
    rft_allocations_close(&memory->allocations);
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

refit_status rft_cuda_memory_reserve(rft_cuda_device *cuda, uint64_t bytes, refit_error *error)
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

void rft_cuda_memory_unreserve(rft_cuda_device *cuda, uint64_t bytes)
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
        return rft_cuda_check(&cuda->driver, result, error,
                              "memory of the GPU could not be allocated");
    }
    return rft_fail_sub(error, REFIT_ERR_DEVICE_MEMORY, result,
                        "the GPU is full: %" PRIu64 " bytes were asked for, %zu of %zu are free; "
                        "free or offload something first (torch.cuda.empty_cache() gives back what "
                        "PyTorch keeps)",
                        bytes, left, total);
}

/* Aligned as this module promises, or with slack enough to become so. */
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
    refit_status status = rft_allocations_add(&memory->allocations, block, bytes, error);
    rft_unlock(&memory->lock);
    return status;
}

/* The block, once its bytes are reserved. */
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
                  "%" PRIu64 " bytes exceed the address space", bytes);
    RFT_TRY(rft_cuda_memory_reserve(cuda, bytes, error));
    refit_status status = place_block(cuda, bytes, out, error);
    if (status != REFIT_OK) rft_cuda_memory_unreserve(cuda, bytes);
    return status;
}

static refit_status free_block(rft_cuda_device *cuda, void *block, bool inside, refit_error *error)
{
    rft_cuda_memory *memory = cuda->memory;
    rft_lock(&memory->lock);
    uint64_t bytes = rft_allocations_take(&memory->allocations, block);
    rft_unlock(&memory->lock);
    RFT_REFUSE_IF(bytes == 0, error, REFIT_ERR_INVALID,
                  "%p was not given by refit_memory_alloc of this device, or was freed before",
                  block);
    rft_cu_result result = RFT_CU_SUCCESS;
    if (inside) result = give_block(cuda, (rft_cu_ptr)(uintptr_t)block);
    /* A lost GPU has taken its memory along: the accounting is what is left to free. */
    if (result == RFT_CU_SUCCESS || rft_cuda_is_lost(result)) {
        rft_cuda_memory_unreserve(cuda, bytes);
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

/* ---- What an address is ----------------------------------------------------------------------
 * The driver is asked what an address is, piece by piece: memory of many mappings (PyTorch's
 * expandable_segments) is one range to its owner, and may have holes.
 *
 * Drivers differ in what they say of memory that they did not allocate, so that each refusal rests
 * on an answer that means one thing alone; where the pieces end is asked twice, of
 * cuMemGetAddressRange and of the attributes. Knows nothing of what refit has allocated.
 */

/* The range is the reservation where there is one, not what is mapped in it. */
typedef struct pointer_facts {
    unsigned type; /* RFT_CU_MEMORY_*; 0: nothing */
    int managed;
    int mapped;
    int ordinal;
    rft_cu_ptr range_start;
    size_t range_bytes;
    unsigned long long
        buffer; /* the driver's number of the allocation, which it never gives again */
} pointer_facts;

static refit_status ask_pointer(rft_cuda_device *cuda, uint64_t at, pointer_facts *facts,
                                refit_error *error)
{
    int asked[] = {RFT_CU_PTR_MEMORY_TYPE, RFT_CU_PTR_IS_MANAGED,  RFT_CU_PTR_MAPPED,
                   RFT_CU_PTR_ORDINAL,     RFT_CU_PTR_RANGE_START, RFT_CU_PTR_RANGE_SIZE,
                   RFT_CU_PTR_BUFFER_ID};
    void *values[] = {&facts->type,        &facts->managed,     &facts->mapped, &facts->ordinal,
                      &facts->range_start, &facts->range_bytes, &facts->buffer};
    *facts = (pointer_facts){.ordinal = -2};
    rft_cu_result result = cuda->driver.pointer_attributes(
        (unsigned)(sizeof asked / sizeof asked[0]), asked, values, at);
    /* Some drivers refuse to speak of memory that is not theirs. */
    if (result == RFT_CU_INVALID_VALUE) return REFIT_OK;
    return rft_cuda_check(&cuda->driver, result, error,
                          "the driver did not say what memory this is");
}

static refit_status check_kind(const rft_cuda_device *cuda, uint64_t at, const pointer_facts *facts,
                               refit_error *error)
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
    return REFIT_OK;
}

/* The mapping that holds `at`; false: nothing is mapped there. */
static bool find_piece(rft_cuda_device *cuda, uint64_t at, const pointer_facts *facts,
                       rft_cu_ptr *begin, size_t *bytes)
{
    if (cuda->driver.memory_range(begin, bytes, at) != RFT_CU_SUCCESS) {
        if (facts->mapped == 0) return false;
        *begin = facts->range_start;
        *bytes = facts->range_bytes;
    }
    return *begin <= at && at - *begin < *bytes && *bytes <= UINT64_MAX - *begin;
}

static refit_status check_piece(rft_cuda_device *cuda, uint64_t at, const pointer_facts *facts,
                                rft_cu_ptr *begin, size_t *bytes, refit_error *error)
{
    RFT_TRY(check_kind(cuda, at, facts, error));
    RFT_REFUSE_IF(!find_piece(cuda, at, facts, begin, bytes), error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is a reserved address of cuda:%d with no memory mapped to it", at,
                  cuda->ordinal);
    RFT_REFUSE_IF(facts->ordinal != cuda->ordinal, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is memory of cuda:%d, and this device is cuda:%d", at,
                  facts->ordinal, cuda->ordinal);
    return REFIT_OK;
}

refit_status rft_cuda_pointer_check(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                    rft_memory_range *allocation, refit_error *error)
{
    uint64_t at = (uintptr_t)memory;
    const uint64_t end = at + bytes; /* device_calls.c refuses an end beyond the last address */
    rft_memory_range first = {0};
    while (at < end) {
        pointer_facts facts;
        rft_cu_ptr begin = 0;
        size_t piece = 0;
        RFT_TRY(ask_pointer(cuda, at, &facts, error));
        RFT_TRY(check_piece(cuda, at, &facts, &begin, &piece, error));
        if (at == (uintptr_t)memory)
            first =
                (rft_memory_range){(const void *)(uintptr_t)facts.range_start, facts.range_bytes,
                                   facts.buffer, (const void *)(uintptr_t)begin, piece};
        at = begin + piece;
    }
    *allocation = first;
    return REFIT_OK;
}

/* ---- Registered host memory ------------------------------------------------------------------
 * Registered host memory, and the list of it: ranges in the order of their addresses, none of which
 * overlap, so that whether a copy's host side is pinned is one binary search.
 *
 * A range is listed after it is registered and taken off before it is unregistered: what is on the
 * list is pinned. Into which pieces a large arena is cut is its owner's choice. Write-combined
 * memory is never asked for, since the CPU reads what is offloaded.
 */

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

/* The first range that ends after `at`, the lock held; `count` if there is none. */
static uint32_t find_after(const rft_cuda_pins *pins, uintptr_t at)
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
    uint32_t at = find_after(pins, (uintptr_t)memory);
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
        uint32_t at = find_after(pins, range.start);
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
    uint32_t at = find_after(pins, start);
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

/* The slots of device.h: pin inside a context guard, unpin enters the context by itself. One
 * registration a call; REFIT_ERR_PIN says why not. Unpin takes back the registration that begins at
 * `memory`. */
static refit_status pin(rft_cuda_device *cuda, void *memory, uint64_t bytes, bool read_only,
                        refit_error *error)
{
    unsigned flags = RFT_CU_HOST_REGISTER_PORTABLE;
    if (read_only) flags |= RFT_CU_HOST_REGISTER_READ_ONLY;
    rft_cu_result result = cuda->driver.host_register(memory, bytes, flags);
    if (result != RFT_CU_SUCCESS) return refused(cuda, result, memory, bytes, error);
    rft_cuda_pinned range = {(uintptr_t)memory, (uintptr_t)memory + bytes};
    refit_status status = list_range(cuda->pins, range, error);
    if (status != REFIT_OK) (void)cuda->driver.host_unregister(memory);
    return status;
}

static void rft_cuda_unpin(rft_cuda_device *cuda, void *memory)
{
    rft_cuda_guard guard;
    if (!unlist_range(cuda->pins, (uintptr_t)memory)) return;
    if (rft_cuda_enter(cuda, &guard, NULL) != REFIT_OK) return;
    (void)cuda->driver.host_unregister(memory);
    rft_cuda_leave(cuda, &guard);
}

/* ---- Slots -----------------------------------------------------------------------------------
 * Each enters the context; the work is done above. */

static refit_status cuda_memory_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_memory_alloc(cuda, bytes, out, error));
}

static refit_status cuda_memory_free(void *self, void *memory, refit_error *error)
{
    return rft_cuda_memory_free(self, memory, error);
}

static refit_status cuda_memory_check(void *self, const void *memory, uint64_t bytes,
                                      rft_memory_range *allocation, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_pointer_check(cuda, memory, bytes, allocation, error));
}

static refit_status cuda_host_pin(void *self, void *memory, uint64_t bytes, bool read_only,
                                  refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, pin(cuda, memory, bytes, read_only, error));
}

static void cuda_host_unpin(void *self, void *memory, uint64_t bytes)
{
    (void)bytes;
    rft_cuda_unpin(self, memory);
}

void rft_cuda_memory_slots(rft_device_ops *ops)
{
    ops->memory_alloc = cuda_memory_alloc;
    ops->memory_free = cuda_memory_free;
    ops->memory_check = cuda_memory_check;
    ops->host_pin = cuda_host_pin;
    ops->host_unpin = cuda_host_unpin;
}
