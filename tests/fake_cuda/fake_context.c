/*
 * Contexts: the primary one of each device, counted, others for tests, and each thread's stack of
 * current ones.
 */
#include <stdlib.h>

#include "fake_stream.h"

#define STACK_MOST 32

static __thread rft_cu_context stack[STACK_MOST];
static __thread unsigned depth;

static uint64_t number_of(rft_cu_context context)
{
    return (uint64_t)(uintptr_t)context;
}

static rft_cu_context handle_of(const fake_context *context)
{
    return (rft_cu_context)(uintptr_t)context->node.base;
}

static fake_context *make(fake_device *device)
{
    fake_context *context = fake_new(sizeof *context);
    context->device = device;
    fake_handle(&fake.contexts, &context->node);
    return context;
}

static fake_context *primary_of(fake_device *device)
{
    if (device->primary == NULL) device->primary = make(device);
    return device->primary;
}

fake_context *fake_current(void)
{
    if (depth == 0) return NULL;
    return (fake_context *)fake_tree_at(&fake.contexts, number_of(stack[depth - 1]));
}

void fake_lose(fake_context *context, rft_cu_result result)
{
    if (context->lost == RFT_CU_SUCCESS) context->lost = result;
    fake_wake();
}

void fake_contexts_reset(void)
{
    while (fake.contexts.root != NULL) {
        fake_node *node = fake.contexts.root;
        fake_tree_take(&fake.contexts, node);
        free(node);
    }
    depth = 0;
}

static rft_cu_result retain(rft_cu_context *out, fake_device *device)
{
    if (device == NULL) return RFT_CU_INVALID_DEVICE;
    if (device->attributes[RFT_CU_ATTR_COMPUTE_MODE] == RFT_CU_MODE_PROHIBITED)
        return RFT_CU_DEVICE_UNAVAILABLE;
    fake_context *context = primary_of(device);
    context->retained++;
    context->alive = true;
    *out = handle_of(context);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_context_retain(rft_cu_context *context, rft_cu_device device)
{
    FAKE_CALL(context_retain, FAKE_NEEDS_INIT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS) result = retain(context, fake_device_of(device));
    return fake_end(&call, result);
}

static unsigned spans_in(const fake_context *context)
{
    unsigned found = 0;
    for (fake_node *node = fake_tree_from(&fake.spans, 0); node != NULL;
         node = fake_tree_from(&fake.spans, node->base + node->size)) {
        const fake_span *span = (fake_span *)node;
        if (span->context == context && !span->foreign) found++;
    }
    return found;
}

/* The last holder left: what is still in the context would go with it. */
static void left(fake_context *context)
{
    unsigned objects = spans_in(context);
    for (fake_stream *stream = fake_streams_first(); stream != NULL; stream = stream->next)
        if (stream->context == context && !stream->foreign && !stream->closing) objects++;
    for (fake_node *node = fake_tree_from(&fake.events, 0); node != NULL;
         node = fake_tree_from(&fake.events, node->base + 1))
        if (((fake_event *)node)->context == context) objects++;
    if (objects > 0) fake_violation("a context ends with %u objects in it", objects);
    context->alive = false;
    context->lost = RFT_CU_SUCCESS;
}

static rft_cu_result release(fake_device *device)
{
    if (device == NULL) return RFT_CU_INVALID_DEVICE;
    if (device->primary == NULL || device->primary->retained == 0) return RFT_CU_INVALID_CONTEXT;
    if (--device->primary->retained == 0) left(device->primary);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_context_release(rft_cu_device device)
{
    FAKE_CALL(context_release, FAKE_NEEDS_INIT);
    if (result == RFT_CU_SUCCESS) result = release(fake_device_of(device));
    return fake_end(&call, result);
}

rft_cu_result fake_cu_context_state(rft_cu_device device, unsigned *flags, int *active)
{
    FAKE_CALL(context_state, FAKE_NEEDS_INIT);
    const fake_device *found = fake_device_of(device);
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_DEVICE);
    FAKE_REFUSE_IF(flags == NULL || active == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        *flags = 0;
        *active = found->primary != NULL && found->primary->retained > 0;
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_context_push(rft_cu_context context)
{
    FAKE_CALL(context_push, FAKE_NEEDS_INIT);
    if (result == RFT_CU_SUCCESS &&
        (depth == STACK_MOST || fake_tree_at(&fake.contexts, number_of(context)) == NULL))
        result = RFT_CU_INVALID_CONTEXT;
    if (result == RFT_CU_SUCCESS) stack[depth++] = context;
    return fake_end(&call, result);
}

rft_cu_result fake_cu_context_pop(rft_cu_context *context)
{
    FAKE_CALL(context_pop, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(depth == 0, RFT_CU_INVALID_CONTEXT);
    if (result == RFT_CU_SUCCESS) {
        depth--;
        if (context != NULL) *context = stack[depth];
    }
    return fake_end(&call, result);
}

FAKE_EXPORTED void fake_cuda_lose(int device, rft_cu_result result)
{
    fake_lock();
    fake_lose(primary_of(&fake.devices[device]), result);
    fake_unlock();
}

FAKE_EXPORTED rft_cu_context fake_cuda_other_context(int device)
{
    fake_lock();
    fake_context *context = make(&fake.devices[device]);
    context->alive = true;
    fake_unlock();
    return handle_of(context);
}

FAKE_EXPORTED rft_cu_context fake_cuda_primary(int device)
{
    fake_lock();
    rft_cu_context context = handle_of(primary_of(&fake.devices[device]));
    fake_unlock();
    return context;
}

FAKE_EXPORTED unsigned fake_cuda_depth(void)
{
    return depth;
}
