/*
 * Memory of cuMemAlloc: a heap per device, four times as long in addresses as the device has
 * memory, so that what ends it is the memory and not where it lies. The search for a gap goes on
 * where the last one ended: addresses come back late, and late users of freed memory are found.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "fake_stream.h"

#define ALIGNMENT UINT64_C(512)
#define SPACE     UINT64_C(4)
#define POISON    (UINT64_C(1) << 20)

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Addresses, and a file as long mapped to them. */
static bool heap_open(fake_device *device)
{
    if (device->heap != 0) return true;
    uint64_t size = (device->total * SPACE + 0x1FFFFF) / 0x200000 * 0x200000;
    device->heap = fake_space_open(size, 0x200000, 0);
    if (device->heap == 0) return false;
    device->heap_size = size;
    device->heap_next = device->heap;
    device->heap_file = fake_space_file(size);
    return fake_space_back(device->heap, size, size, device->heap_file, 0);
}

/* A gap in [from, to), or 0. */
static uint64_t gap_in(uint64_t from, uint64_t to, uint64_t bytes)
{
    while (from + bytes <= to) {
        fake_node *next = fake_tree_overlap(&fake.spans, from, bytes);
        if (next == NULL) return from;
        from = next->base + rounded(next->size);
    }
    return 0;
}

static uint64_t gap(const fake_device *device, uint64_t bytes)
{
    uint64_t odd = fake.skew ? ALIGNMENT / 2 : 0;
    uint64_t next = device->heap_next / ALIGNMENT * ALIGNMENT + odd;
    uint64_t at = gap_in(next, device->heap + device->heap_size, bytes);
    return at != 0 ? at : gap_in(device->heap + odd, next, bytes);
}

static rft_cu_result allocate(fake_device *device, size_t bytes, fake_span **out)
{
    uint64_t size = rounded(bytes);
    if (size < bytes || size > device->total) return RFT_CU_OUT_OF_MEMORY;
    if (device->used + device->taken + size > device->total) return RFT_CU_OUT_OF_MEMORY;
    uint64_t at = heap_open(device) ? gap(device, size) : 0;
    if (at == 0) return RFT_CU_OUT_OF_MEMORY;
    device->heap_next = at + size;
    device->used += size;
    *out = fake_span_put(FAKE_MEMORY, at, bytes, device->ordinal);
    (*out)->shift = device->heap_size;
    /* Fresh memory is not zero. */
    memset((void *)(uintptr_t)(at + device->heap_size), 0xA5, size < POISON ? size : POISON);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_memory_alloc(rft_cu_ptr *memory, size_t bytes)
{
    fake_call call;
    fake_span *span = NULL;
    rft_cu_result result = fake_begin(&call, FAKE_memory_alloc, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(memory == NULL || bytes == 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = allocate(call.context->device, bytes, &span);
    if (result == RFT_CU_SUCCESS) *memory = span->node.base;
    return fake_end(&call, result);
}

/* The whole pages go back to the operating system. */
static void punch(const fake_device *device, uint64_t at, uint64_t bytes)
{
    uint64_t from = (at - device->heap + 4095) / 4096 * 4096;
    uint64_t to = (at - device->heap + bytes) / 4096 * 4096;
    if (to <= from) return;
    int code = fallocate(device->heap_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                         (off_t)(to - from));
    (void)code; /* the pages stay, then */
}

static rft_cu_result give_back(rft_cu_ptr memory)
{
    fake_span *span = fake_span_at(memory);
    if (span == NULL || span->kind != FAKE_MEMORY || span->node.base != memory) {
        fake_violation("cuMemFree of 0x%llx, which is not an allocation", memory);
        return RFT_CU_INVALID_VALUE;
    }
    fake_device *device = &fake.devices[span->device];
    if (fake_ipc_imported(device->heap_file, memory - device->heap, span->node.size))
        fake_violation("0x%llx is freed while another process has it open", memory);
    fake_span_drop(span, "freed");
    punch(device, memory, span->node.size);
    device->used -= rounded(span->node.size);
    free(span);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_memory_free(rft_cu_ptr memory)
{
    FAKE_CALL(memory_free, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result) && memory != 0) {
        rft_cu_result given = give_back(memory);
        if (result == RFT_CU_SUCCESS) result = given;
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_memory_info(size_t *free_bytes, size_t *total)
{
    FAKE_CALL(memory_info, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(free_bytes == NULL || total == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        const fake_device *device = call.context->device;
        uint64_t gone = device->used + device->taken;
        *free_bytes = gone < device->total ? device->total - gone : 0;
        *total = device->total;
    }
    return fake_end(&call, result);
}

static rft_cu_result range_of(rft_cu_ptr *base, size_t *bytes, rft_cu_ptr memory)
{
    const fake_span *span = fake_span_at(memory);
    if (span == NULL || span->kind == FAKE_REGISTERED) return RFT_CU_NOT_FOUND;
    if (base != NULL) *base = span->node.base;
    if (bytes != NULL) *bytes = span->node.size;
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_memory_range(rft_cu_ptr *base, size_t *bytes, rft_cu_ptr memory)
{
    FAKE_CALL(memory_range, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS) result = range_of(base, bytes, memory);
    return fake_end(&call, result);
}

void fake_memory_reset(void)
{
    while (fake.spans.root != NULL) {
        fake_span *span = (fake_span *)fake.spans.root;
        fake_tree_take(&fake.spans, &span->node);
        free(span);
    }
    memset(fake.kinds, 0, sizeof fake.kinds);
}

FAKE_EXPORTED rft_cu_ptr fake_cuda_memory(int device, size_t bytes)
{
    fake_span *span = NULL;
    fake_lock();
    if (allocate(&fake.devices[device], bytes, &span) == RFT_CU_SUCCESS) {
        span->foreign = true;
        span->context = fake.devices[device].primary;
        fake.kinds[FAKE_MEMORY]--;
    }
    fake_unlock();
    return span != NULL ? span->node.base : 0;
}

FAKE_EXPORTED void fake_cuda_memory_free(rft_cu_ptr memory)
{
    fake_lock();
    give_back(memory);
    fake_unlock();
}
