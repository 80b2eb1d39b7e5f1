/*
 * What the fake driver knows about an address: cuPointerGetAttributes, which answers SUCCESS for
 * any address and says with zeros that it does not know it; and memory of kinds that refit never
 * makes itself, for tests to pass in.
 */
#include <string.h>

#include "fake_stream.h"

/* What is at an address, in the driver's words; all zero: nothing that it knows. */
typedef struct fake_facts {
    rft_cu_context context;
    unsigned type;
    int ordinal;
    bool managed;
    bool ipc;
    bool mapped;
    rft_cu_ptr start; /* of mapped memory: of its reservation */
    size_t size;
    uint64_t handles;
    uint64_t buffer;
} fake_facts;

static bool is_host(const fake_span *span)
{
    return span->kind == FAKE_REGISTERED || span->kind == FAKE_HOST || span->kind == FAKE_ALIAS;
}

static fake_facts facts_of(const fake_call *call, uint64_t at)
{
    fake_facts facts = {.ordinal = -2};
    const fake_span *span = fake_span_at(at);
    const fake_node *home = fake_tree_at(&fake.reservations, at);
    if (span != NULL) {
        /* Mapped memory belongs to no context. */
        if (span->kind != FAKE_MAPPING && span->context != NULL)
            facts.context = (rft_cu_context)(uintptr_t)span->context->node.base;
        facts.type = is_host(span) ? RFT_CU_MEMORY_HOST : RFT_CU_MEMORY_DEVICE;
        facts.ordinal = span->device >= 0 ? span->device : call->context->device->ordinal;
        facts.managed = span->kind == FAKE_MANAGED;
        facts.ipc = span->kind == FAKE_MEMORY;
        facts.mapped = true;
        facts.buffer = span->serial;
        facts.handles = span->kind == FAKE_MAPPING ? RFT_CU_SHARE_POSIX_FD : RFT_CU_SHARE_NONE;
        home = home != NULL ? home : &span->node;
    }
    if (home != NULL) {
        facts.start = home->base;
        facts.size = home->size;
    }
    return facts;
}

static void set_bool(void *value, bool answer)
{
    *(unsigned char *)value = answer ? 1 : 0;
}

static rft_cu_result answer(int attribute, void *value, const fake_facts *facts)
{
    switch (attribute) {
    case RFT_CU_PTR_CONTEXT: memcpy(value, &facts->context, sizeof facts->context); break;
    case RFT_CU_PTR_MEMORY_TYPE: memcpy(value, &facts->type, sizeof facts->type); break;
    case RFT_CU_PTR_SYNC_MEMOPS: set_bool(value, false); break;
    case RFT_CU_PTR_BUFFER_ID: memcpy(value, &facts->buffer, sizeof facts->buffer); break;
    case RFT_CU_PTR_IS_MANAGED: set_bool(value, facts->managed); break;
    case RFT_CU_PTR_ORDINAL: memcpy(value, &facts->ordinal, sizeof facts->ordinal); break;
    case RFT_CU_PTR_IPC_CAPABLE: set_bool(value, facts->ipc); break;
    case RFT_CU_PTR_RANGE_START: memcpy(value, &facts->start, sizeof facts->start); break;
    case RFT_CU_PTR_RANGE_SIZE: memcpy(value, &facts->size, sizeof facts->size); break;
    case RFT_CU_PTR_MAPPED: set_bool(value, facts->mapped); break;
    case RFT_CU_PTR_HANDLE_TYPES: memcpy(value, &facts->handles, sizeof facts->handles); break;
    default: return RFT_CU_INVALID_VALUE;
    }
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_pointer_attributes(unsigned count, int *attributes, void **values,
                                         rft_cu_ptr memory)
{
    FAKE_CALL(pointer_attributes, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(count == 0 || attributes == NULL || values == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        fake_facts facts = facts_of(&call, memory);
        for (unsigned i = 0; i < count && result == RFT_CU_SUCCESS; i++)
            result = answer(attributes[i], values[i], &facts);
    }
    return fake_end(&call, result);
}

FAKE_EXPORTED rft_cu_ptr fake_cuda_managed(int device, size_t bytes)
{
    rft_cu_ptr memory = fake_cuda_memory(device, bytes);
    fake_lock();
    fake_span *span = fake_span_at(memory);
    if (span != NULL) span->kind = FAKE_MANAGED;
    fake_unlock();
    return memory;
}

FAKE_EXPORTED void fake_cuda_managed_free(rft_cu_ptr memory)
{
    fake_lock();
    fake_span *span = fake_span_at(memory);
    if (span != NULL) span->kind = FAKE_MEMORY;
    fake_unlock();
    fake_cuda_memory_free(memory);
}
