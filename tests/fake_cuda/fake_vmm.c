/*
 * Virtual memory: addresses are reserved, physical memory is created, and one is mapped at the
 * other. Physical memory is a file of its own, which is also what is exported. Mappings of one
 * reservation lie side by side behind it, so that a range over several of them is one of bytes.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_stream.h"

#define POISON (UINT64_C(1) << 20)

typedef struct fake_physical {
    fake_node node; /* in fake.physicals, while its handle is not released */
    fake_device *device;
    uint64_t bytes;
    uint64_t charged; /* to the device; 0 for what was imported */
    int file;
    int types;      /* in which it may be exported */
    unsigned users; /* its handle and its mappings */
} fake_physical;

static bool granular(uint64_t number)
{
    return number % fake.granule == 0;
}

static rft_cu_result reserve(rft_cu_ptr *out, uint64_t bytes, uint64_t alignment, rft_cu_ptr wish)
{
    if (bytes == 0 || bytes % 4096 != 0 || (alignment & (alignment - 1)) != 0)
        return RFT_CU_INVALID_VALUE;
    if (bytes > UINT64_C(1) << 46) return RFT_CU_OUT_OF_MEMORY;
    if (alignment < fake.granule) alignment = fake.granule;
    uint64_t base = fake_space_open(bytes, alignment, wish);
    if (base == 0) return RFT_CU_OUT_OF_MEMORY;
    fake_node *node = fake_new(sizeof *node);
    node->base = base;
    node->size = bytes;
    fake_tree_put(&fake.reservations, node);
    *out = base;
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_address_reserve(rft_cu_ptr *base, size_t bytes, size_t alignment,
                                      rft_cu_ptr wish, unsigned long long flags)
{
    fake_call call;
    rft_cu_result result =
        fake_begin(&call, FAKE_address_reserve, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS && (base == NULL || flags != 0)) result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) result = reserve(base, bytes, alignment, wish);
    return fake_end(&call, result);
}

static rft_cu_result unreserve(rft_cu_ptr base, uint64_t bytes)
{
    fake_node *node = fake_tree_at(&fake.reservations, base);
    if (node == NULL || node->base != base || node->size != bytes) {
        fake_violation("cuMemAddressFree of 0x%llx, which is no reservation", base);
        return RFT_CU_INVALID_VALUE;
    }
    if (fake_tree_overlap(&fake.spans, base, bytes) != NULL) {
        fake_violation("cuMemAddressFree of 0x%llx, where memory is mapped", base);
        return RFT_CU_INVALID_VALUE;
    }
    fake_tree_take(&fake.reservations, node);
    free(node);
    fake_space_close(base, bytes);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_address_free(rft_cu_ptr base, size_t bytes)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_address_free, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        rft_cu_result freed = unreserve(base, bytes);
        if (result == RFT_CU_SUCCESS) result = freed;
    }
    return fake_end(&call, result);
}

static bool fits(const rft_cu_allocation *properties)
{
    return properties != NULL && properties->type == RFT_CU_ALLOCATION_PINNED &&
           properties->location.type == RFT_CU_LOCATION_DEVICE &&
           fake_device_of(properties->location.id) != NULL;
}

rft_cu_result fake_cu_granularity(size_t *bytes, const rft_cu_allocation *properties, int option)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_granularity, FAKE_NEEDS_INIT);
    if (result == RFT_CU_SUCCESS && (!fits(properties) || option < 0 || option > 1))
        result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) *bytes = fake.granule;
    return fake_end(&call, result);
}

static fake_physical *physical_of(rft_cu_handle handle)
{
    return fake_object(&fake.physicals, handle, "physical memory");
}

static rft_cu_handle keep(fake_device *device, uint64_t bytes, uint64_t charged, int file,
                          int types)
{
    fake_physical *physical = fake_new(sizeof *physical);
    physical->device = device;
    physical->bytes = bytes;
    physical->charged = charged;
    physical->file = file;
    physical->types = types;
    physical->users = 1;
    device->used += charged;
    return fake_handle(&fake.physicals, &physical->node);
}

/* Fresh memory is not zero. */
static void poison(int file, uint64_t bytes)
{
    uint64_t length = bytes < POISON ? bytes : POISON;
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return;
    memset(memory, 0xA5, length);
    munmap(memory, length);
}

static rft_cu_result create(rft_cu_handle *handle, uint64_t bytes,
                            const rft_cu_allocation *properties)
{
    if (!fits(properties) || bytes == 0 || !granular(bytes)) return RFT_CU_INVALID_VALUE;
    fake_device *device = fake_device_of(properties->location.id);
    int types = properties->requested_handle_types;
    if ((types & ~RFT_CU_SHARE_POSIX_FD) != 0) return RFT_CU_NOT_SUPPORTED;
    if (bytes > device->total || device->used + device->taken + bytes > device->total)
        return RFT_CU_OUT_OF_MEMORY;
    int file = fake_space_file(bytes);
    poison(file, bytes);
    *handle = keep(device, bytes, bytes, file, types);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_physical_create(rft_cu_handle *handle, size_t bytes,
                                      const rft_cu_allocation *properties, unsigned long long flags)
{
    fake_call call;
    rft_cu_result result =
        fake_begin(&call, FAKE_physical_create, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS && (handle == NULL || flags != 0)) result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) result = create(handle, bytes, properties);
    return fake_end(&call, result);
}

static void leave(fake_physical *physical)
{
    if (--physical->users > 0) return;
    physical->device->used -= physical->charged;
    close(physical->file);
    free(physical);
}

rft_cu_result fake_cu_physical_release(rft_cu_handle handle)
{
    fake_call call;
    rft_cu_result result =
        fake_begin(&call, FAKE_physical_release, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        fake_physical *physical = physical_of(handle);
        if (physical != NULL) {
            fake_tree_take(&fake.physicals, &physical->node);
            leave(physical);
        } else if (result == RFT_CU_SUCCESS) {
            result = RFT_CU_INVALID_VALUE;
        }
    }
    return fake_end(&call, result);
}

static rft_cu_result map(rft_cu_ptr at, uint64_t bytes, fake_physical *physical)
{
    const fake_node *home = fake_tree_at(&fake.reservations, at);
    if (physical == NULL || bytes == 0 || !granular(at) || !granular(bytes) ||
        bytes > physical->bytes)
        return RFT_CU_INVALID_VALUE;
    if (home == NULL || at + bytes > home->base + home->size) return RFT_CU_INVALID_VALUE;
    if (fake_tree_overlap(&fake.spans, at, bytes) != NULL) return RFT_CU_INVALID_VALUE;
    if (!fake_space_back(at, home->size, bytes, physical->file, 0)) return RFT_CU_OUT_OF_MEMORY;
    fake_span *span = fake_span_put(FAKE_MAPPING, at, bytes, physical->device->ordinal);
    span->shift = home->size;
    span->physical = physical;
    physical->users++;
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_map(rft_cu_ptr at, size_t bytes, size_t offset, rft_cu_handle handle,
                          unsigned long long flags)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_map, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS && (offset != 0 || flags != 0)) result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) result = map(at, bytes, physical_of(handle));
    return fake_end(&call, result);
}

/* [at, at + bytes) is mappings from end to end, each of them whole. */
static bool whole_mappings(uint64_t at, uint64_t bytes)
{
    uint64_t end = at + bytes;
    while (at < end) {
        const fake_span *span = fake_span_at(at);
        if (span == NULL || span->kind != FAKE_MAPPING || span->node.base != at) return false;
        at += span->node.size;
    }
    return bytes > 0 && at == end;
}

static rft_cu_result unmap(uint64_t at, uint64_t bytes)
{
    if (!whole_mappings(at, bytes)) {
        fake_violation("cuMemUnmap of 0x%llx, which is not whole mappings", (unsigned long long)at);
        return RFT_CU_INVALID_VALUE;
    }
    for (uint64_t end = at + bytes; at < end;) {
        fake_span *span = fake_span_at(at);
        at += span->node.size;
        fake_span_drop(span, "unmapped");
        fake_space_bare(span->node.base, span->shift, span->node.size);
        leave(span->physical);
        free(span);
    }
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_unmap(rft_cu_ptr at, size_t bytes)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_unmap, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        rft_cu_result unmapped = unmap(at, bytes);
        if (result == RFT_CU_SUCCESS) result = unmapped;
    }
    return fake_end(&call, result);
}

static rft_cu_result set_access(uint64_t at, uint64_t bytes, const rft_cu_access *access)
{
    if (access->location.type != RFT_CU_LOCATION_DEVICE || !whole_mappings(at, bytes))
        return RFT_CU_INVALID_VALUE;
    if (fake_device_of(access->location.id) == NULL) return RFT_CU_INVALID_DEVICE;
    for (uint64_t end = at + bytes; at < end;) {
        fake_span *span = fake_span_at(at);
        at += span->node.size;
        if (access->location.id != span->device) continue; /* a peer's */
        span->access = access->flags != 0;
        span->read_only = access->flags == RFT_CU_ACCESS_READ;
    }
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_set_access(rft_cu_ptr at, size_t bytes, const rft_cu_access *access,
                                 size_t count)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_set_access, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS && (access == NULL || count == 0)) result = RFT_CU_INVALID_VALUE;
    for (size_t i = 0; i < count && result == RFT_CU_SUCCESS; i++)
        result = set_access(at, bytes, &access[i]);
    return fake_end(&call, result);
}

rft_cu_result fake_cu_physical_export(void *shareable, rft_cu_handle handle, int type,
                                      unsigned long long flags)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_physical_export, FAKE_NEEDS_INIT);
    if (result == RFT_CU_SUCCESS && (shareable == NULL || flags != 0))
        result = RFT_CU_INVALID_VALUE;
    const fake_physical *physical = result == RFT_CU_SUCCESS ? physical_of(handle) : NULL;
    if (result == RFT_CU_SUCCESS &&
        (physical == NULL || type != RFT_CU_SHARE_POSIX_FD || (physical->types & type) == 0))
        result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) {
        int file = fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
        if (file < 0) result = RFT_CU_OPERATING_SYSTEM;
        if (file >= 0) memcpy(shareable, &file, sizeof file);
    }
    return fake_end(&call, result);
}

/* The descriptor itself, not its address, travels in the pointer. */
static rft_cu_result import(rft_cu_handle *handle, int from, fake_device *device)
{
    struct stat about;
    int file = fcntl(from, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return RFT_CU_INVALID_VALUE;
    if (fstat(file, &about) != 0 || about.st_size <= 0 || !granular((uint64_t)about.st_size)) {
        close(file);
        return RFT_CU_INVALID_VALUE;
    }
    *handle = keep(device, (uint64_t)about.st_size, 0, file, RFT_CU_SHARE_POSIX_FD);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_physical_import(rft_cu_handle *handle, void *shareable, int type)
{
    fake_call call;
    rft_cu_result result =
        fake_begin(&call, FAKE_physical_import, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS && (handle == NULL || type != RFT_CU_SHARE_POSIX_FD))
        result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS)
        result = import(handle, (int)(uintptr_t)shareable, call.context->device);
    return fake_end(&call, result);
}

void fake_vmm_reset(void)
{
    fake_node *node = fake_tree_from(&fake.spans, 0);
    while (node != NULL) {
        fake_span *span = (fake_span *)node;
        node = fake_tree_from(&fake.spans, node->base + node->size);
        if (span->kind == FAKE_MAPPING) leave(span->physical);
    }
    while (fake.physicals.root != NULL) {
        fake_physical *physical = (fake_physical *)fake.physicals.root;
        fake_tree_take(&fake.physicals, &physical->node);
        leave(physical);
    }
    while (fake.reservations.root != NULL) {
        node = fake.reservations.root;
        fake_tree_take(&fake.reservations, node);
        free(node);
    }
}
