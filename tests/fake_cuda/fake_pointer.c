/*
 * What the fake driver knows about an address: cuPointerGetAttributes, which answers SUCCESS for
 * any address and says with zeros that it does not know it; and memory of kinds that refit never
 * makes itself, for tests to pass in.
 */
#include <stdlib.h>
#include <string.h>

#include "fake_stream.h"

static unsigned type_of(const fake_span *span)
{
    if (span == NULL) return 0;
    if (span->kind == FAKE_REGISTERED || span->kind == FAKE_HOST) return RFT_CU_MEMORY_HOST;
    return RFT_CU_MEMORY_DEVICE; /* managed memory, too, says so */
}

static void set_bool(void *value, bool answer)
{
    *(unsigned char *)value = answer ? 1 : 0;
}

static uint64_t context_of(const fake_span *span)
{
    /* Mapped memory belongs to no context. */
    if (span == NULL || span->kind == FAKE_MAPPING || span->context == NULL) return 0;
    return span->context->node.base;
}

/* The addresses that it is one of: what was reserved, where something was, mapped or not. */
static fake_node range_of(const fake_span *span, rft_cu_ptr memory)
{
    const fake_node *reserved = fake_tree_at(&fake.reservations, memory);
    if (reserved != NULL) return *reserved;
    return span != NULL ? span->node : (fake_node){0};
}

static rft_cu_result answer(int attribute, void *value, const fake_span *span, int ordinal,
                            fake_node range)
{
    switch (attribute) {
    case RFT_CU_PTR_CONTEXT: {
        rft_cu_context context = (rft_cu_context)(uintptr_t)context_of(span);
        memcpy(value, &context, sizeof context);
        return RFT_CU_SUCCESS;
    }
    case RFT_CU_PTR_MEMORY_TYPE: {
        unsigned type = type_of(span);
        memcpy(value, &type, sizeof type);
        return RFT_CU_SUCCESS;
    }
    case RFT_CU_PTR_SYNC_MEMOPS:
        set_bool(value, span != NULL && span->sync_memops);
        return RFT_CU_SUCCESS;
    case RFT_CU_PTR_IS_MANAGED:
        set_bool(value, span != NULL && span->kind == FAKE_MANAGED);
        return RFT_CU_SUCCESS;
    case RFT_CU_PTR_ORDINAL: memcpy(value, &ordinal, sizeof ordinal); return RFT_CU_SUCCESS;
    case RFT_CU_PTR_IPC_CAPABLE:
        set_bool(value, span != NULL && span->kind == FAKE_MEMORY);
        return RFT_CU_SUCCESS;
    case RFT_CU_PTR_RANGE_START: {
        rft_cu_ptr base = range.base;
        memcpy(value, &base, sizeof base);
        return RFT_CU_SUCCESS;
    }
    case RFT_CU_PTR_RANGE_SIZE: {
        size_t size = range.size;
        memcpy(value, &size, sizeof size);
        return RFT_CU_SUCCESS;
    }
    case RFT_CU_PTR_MAPPED: set_bool(value, span != NULL); return RFT_CU_SUCCESS;
    case RFT_CU_PTR_HANDLE_TYPES: {
        uint64_t types = span != NULL && span->kind == FAKE_MAPPING ? RFT_CU_SHARE_POSIX_FD : 0;
        memcpy(value, &types, sizeof types);
        return RFT_CU_SUCCESS;
    }
    default: return RFT_CU_INVALID_VALUE;
    }
}

static int ordinal_of(const fake_call *call, const fake_span *span)
{
    if (span == NULL) return -2;
    return span->device >= 0 ? span->device : call->context->device->ordinal;
}

rft_cu_result fake_cu_pointer_attributes(unsigned count, int *attributes, void **values,
                                         rft_cu_ptr memory)
{
    fake_call call;
    rft_cu_result result = fake_begin(&call, FAKE_pointer_attributes, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS && (count == 0 || attributes == NULL || values == NULL))
        result = RFT_CU_INVALID_VALUE;
    const fake_span *span = fake_span_at(memory);
    for (unsigned i = 0; i < count && result == RFT_CU_SUCCESS; i++)
        result =
            answer(attributes[i], values[i], span, ordinal_of(&call, span), range_of(span, memory));
    return fake_end(&call, result);
}

FAKE_EXPORTED void fake_cuda_set_sync_memops(rft_cu_ptr memory, bool on)
{
    fake_lock();
    fake_span *span = fake_span_at(memory);
    if (span != NULL) span->sync_memops = on;
    fake_unlock();
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
