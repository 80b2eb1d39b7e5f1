/*
 * Virtual memory: addresses are reserved, and physical memory is mapped there. Mappings of one
 * reservation lie side by side after it, so that a range over several of them is one of bytes.
 */
#include <stdlib.h>

#include "fake_physical.h"

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
    FAKE_CALL(address_reserve, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(base == NULL || flags != 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = reserve(base, bytes, alignment, wish);
    return fake_end(&call, result);
}

static rft_cu_result unreserve(rft_cu_ptr base, uint64_t bytes)
{
    fake_node *node = fake_tree_at(&fake.reservations, base);
    if (node == NULL || node->base != base || node->size != bytes) {
        fake_violation("cuMemAddressFree of 0x%llx, which is not a reservation", base);
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
    FAKE_CALL(address_free, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        rft_cu_result freed = unreserve(base, bytes);
        if (result == RFT_CU_SUCCESS) result = freed;
    }
    return fake_end(&call, result);
}

static rft_cu_result map(rft_cu_ptr at, uint64_t bytes, fake_physical *physical)
{
    const fake_node *home = fake_tree_at(&fake.reservations, at);
    if (physical == NULL || bytes == 0 || !fake_granular(at) || !fake_granular(bytes) ||
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
    FAKE_CALL(map, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(offset != 0 || flags != 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = map(at, bytes, fake_physical_find(handle));
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
        fake_physical_leave(span->physical);
        free(span);
    }
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_unmap(rft_cu_ptr at, size_t bytes)
{
    FAKE_CALL(unmap, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
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
    const fake_span *first = fake_span_at(at);
    if (access->location.id != first->device &&
        (fake.no_peers || fake.devices[access->location.id].primary == NULL))
        return RFT_CU_INVALID_VALUE;
    for (uint64_t end = at + bytes; at < end;) {
        fake_span *span = fake_span_at(at);
        at += span->node.size;
        if (access->location.id != span->device) { /* a peer's */
            if (access->flags == RFT_CU_ACCESS_READWRITE) span->peers |= 1u << access->location.id;
            continue;
        }
        span->access = access->flags != 0;
        span->read_only = access->flags == RFT_CU_ACCESS_READ;
    }
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_set_access(rft_cu_ptr at, size_t bytes, const rft_cu_access *access,
                                 size_t count)
{
    FAKE_CALL(set_access, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(access == NULL || count == 0, RFT_CU_INVALID_VALUE);
    for (size_t i = 0; i < count && result == RFT_CU_SUCCESS; i++)
        result = set_access(at, bytes, &access[i]);
    return fake_end(&call, result);
}

void fake_vmm_reset(void)
{
    fake_node *node = fake_tree_from(&fake.spans, 0);
    while (node != NULL) {
        fake_span *span = (fake_span *)node;
        node = fake_tree_from(&fake.spans, node->base + node->size);
        if (span->kind == FAKE_MAPPING) fake_physical_leave(span->physical);
    }
    while (fake.reservations.root != NULL) {
        node = fake.reservations.root;
        fake_tree_take(&fake.reservations, node);
        free(node);
    }
}
