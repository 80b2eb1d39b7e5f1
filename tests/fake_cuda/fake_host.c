/*
 * Host memory that the fake driver knows: registered by its owner, or allocated here. Its bytes lie
 * where its addresses say.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "fake_stream.h"

/* Whether the process may write at `base`, as the kernel has it. Unknown memory is taken for it. */
static bool is_writable(uint64_t base)
{
    char line[512], mode[5];
    unsigned long long from, to;
    bool writable = true, found = false;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps != NULL && !found && fgets(line, sizeof line, maps) != NULL) {
        found = sscanf(line, "%llx-%llx %4s", &from, &to, mode) == 3 && base >= from && base < to;
        if (found) writable = mode[1] == 'w';
    }
    if (maps != NULL) (void)fclose(maps);
    return writable;
}

static rft_cu_result register_range(uint64_t base, uint64_t bytes, unsigned flags)
{
    if (base == 0 || bytes == 0 || base + bytes < base || flags > 15) return RFT_CU_INVALID_VALUE;
    if (fake_space_has(base)) return RFT_CU_INVALID_VALUE;
    bool read_only = (flags & RFT_CU_HOST_REGISTER_READ_ONLY) != 0;
    if (!read_only && !is_writable(base)) return RFT_CU_INVALID_VALUE;
    if (fake_tree_overlap(&fake.spans, base, bytes) != NULL)
        return RFT_CU_HOST_MEMORY_ALREADY_REGISTERED;
    if (bytes > fake.register_cap) return RFT_CU_INVALID_VALUE;
    fake_span *span = fake_span_put(FAKE_REGISTERED, base, bytes, -1);
    span->read_only = read_only;
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_host_register(void *memory, size_t bytes, unsigned flags)
{
    FAKE_CALL(host_register, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS)
        result = register_range((uint64_t)(uintptr_t)memory, bytes, flags);
    return fake_end(&call, result);
}

/* The addresses by which kernels find registered memory are not those of the host. On the real
 * driver they are, where an attribute of all devices says so. */
static fake_span *alias_of(fake_span *span)
{
    if (span->alias != NULL) return span->alias;
    uint64_t bytes = (span->node.size + 8191) / 4096 * 4096;
    uint64_t base = fake_space_open(bytes, 0x200000, 0);
    if (base == 0) return NULL;
    base += span->node.base % 4096;
    span->alias = fake_span_put(FAKE_ALIAS, base, span->node.size, -1);
    span->alias->shift = span->node.base - base;
    span->alias->read_only = span->read_only;
    return span->alias;
}

static void drop_alias(fake_span *alias)
{
    uint64_t bytes = (alias->node.size + 8191) / 4096 * 4096;
    fake_span_drop(alias, "unregistered");
    fake_space_close(alias->node.base / 4096 * 4096, bytes);
    free(alias);
}

static fake_span *beginning_at(const void *memory, fake_kind kind)
{
    uint64_t base = (uint64_t)(uintptr_t)memory;
    fake_span *span = fake_span_at(base);
    return span != NULL && span->kind == kind && span->node.base == base ? span : NULL;
}

rft_cu_result fake_cu_host_unregister(void *memory)
{
    FAKE_CALL(host_unregister, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        fake_span *span = beginning_at(memory, FAKE_REGISTERED);
        if (span == NULL) {
            fake_violation("%p is unregistered, but was not registered", memory);
            result = RFT_CU_HOST_MEMORY_NOT_REGISTERED;
        } else {
            fake_span_drop(span, "unregistered");
            if (span->alias != NULL) drop_alias(span->alias);
            free(span);
        }
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_host_alloc(void **memory, size_t bytes, unsigned flags)
{
    FAKE_CALL(host_alloc, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(memory == NULL || bytes == 0 || flags > 7, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        void *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block == MAP_FAILED) {
            result = RFT_CU_OUT_OF_MEMORY;
        } else {
            fake_span_put(FAKE_HOST, (uint64_t)(uintptr_t)block, bytes, -1);
            *memory = block;
        }
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_host_free(void *memory)
{
    FAKE_CALL(host_free, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result) && memory != NULL) {
        fake_span *span = beginning_at(memory, FAKE_HOST);
        if (span == NULL) {
            fake_violation("cuMemFreeHost of %p, which is not an allocation", memory);
            result = RFT_CU_INVALID_VALUE;
        } else {
            fake_span_drop(span, "freed");
            munmap(memory, span->node.size);
            free(span);
        }
    }
    return fake_end(&call, result);
}

static rft_cu_result host_pointer(rft_cu_ptr *mapped, uint64_t at)
{
    fake_span *span = fake_span_at(at);
    if (span == NULL || (span->kind != FAKE_REGISTERED && span->kind != FAKE_HOST))
        return RFT_CU_INVALID_VALUE;
    *mapped = at;
    if (span->kind == FAKE_HOST) return RFT_CU_SUCCESS;
    const fake_span *alias = alias_of(span);
    if (alias == NULL) return RFT_CU_OUT_OF_MEMORY;
    *mapped = alias->node.base + (at - span->node.base);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_host_pointer(rft_cu_ptr *mapped, void *memory, unsigned flags)
{
    FAKE_CALL(host_pointer, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(mapped == NULL || flags != 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = host_pointer(mapped, (uint64_t)(uintptr_t)memory);
    return fake_end(&call, result);
}

void fake_host_reset(void)
{
    fake_node *node = fake_tree_from(&fake.spans, 0);
    while (node != NULL) {
        fake_span *span = (fake_span *)node;
        node = fake_tree_from(&fake.spans, node->base + node->size);
        if (span->kind != FAKE_HOST) continue;
        munmap((void *)(uintptr_t)span->node.base, span->node.size);
        fake_tree_take(&fake.spans, &span->node);
        free(span);
    }
}
