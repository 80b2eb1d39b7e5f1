/*
 * Streams as handles: opened, closed, asked about, found by their handle. The legacy stream and the
 * per-thread one of a context come into being when they are first used.
 */
#include "fake_stream.h"

#include "fake_queue.h"

static fake_stream *make(fake_context *context, unsigned flags)
{
    fake_stream *stream = fake_new(sizeof *stream);
    stream->context = context;
    stream->flags = flags;
    fake_queue_add(stream);
    fake_handle(&fake.streams, &stream->node);
    return stream;
}

static uint64_t number_of(rft_cu_stream stream)
{
    return (uint64_t)(uintptr_t)stream;
}

static rft_cu_stream handle_of(const fake_stream *stream)
{
    return (rft_cu_stream)(uintptr_t)stream->node.base;
}

static bool is_legacy(rft_cu_stream handle)
{
    return handle == NULL || handle == RFT_CU_STREAM_LEGACY;
}

static fake_stream *special(fake_context *context, bool legacy)
{
    rft_cu_stream *place = &context->special[legacy ? 0 : 1];
    if (*place == NULL) {
        fake_stream *stream = make(context, 0);
        stream->foreign = true;
        stream->legacy = legacy;
        *place = handle_of(stream);
    }
    return (fake_stream *)fake_tree_at(&fake.streams, number_of(*place));
}

fake_stream *fake_stream_find(fake_call *call, rft_cu_stream handle)
{
    if (is_legacy(handle)) fake_count_legacy(call);
    if (is_legacy(handle) || handle == RFT_CU_STREAM_PER_THREAD)
        return special(call->context, is_legacy(handle));
    return fake_object(&fake.streams, number_of(handle), "stream");
}

fake_stream *fake_stream_for(fake_call *call, rft_cu_stream handle, rft_cu_result *result)
{
    *result = RFT_CU_SUCCESS;
    fake_stream *stream = fake_stream_find(call, handle);
    if (stream == NULL || stream->context != call->context) *result = RFT_CU_INVALID_HANDLE;
    if (*result == RFT_CU_SUCCESS && fake_capture_takes(stream, result)) return stream;
    return NULL;
}

static void end(fake_stream *stream)
{
    fake_tree_take(&fake.streams, &stream->node);
    if (!stream->foreign) fake.own_streams--;
    fake_queue_close(stream);
}

rft_cu_result fake_cu_stream_open(rft_cu_stream *stream, unsigned flags, int priority)
{
    FAKE_CALL(stream_open, FAKE_NEEDS_CONTEXT);
    (void)priority; /* any: the driver brings it into its range */
    FAKE_REFUSE_IF(stream == NULL || flags > RFT_CU_STREAM_NON_BLOCKING, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        *stream = handle_of(make(call.context, flags));
        fake.own_streams++;
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_stream_close(rft_cu_stream stream)
{
    FAKE_CALL(stream_close, FAKE_NEEDS_CONTEXT);
    if (fake_ends(&call, result)) {
        fake_stream *found = fake_object(&fake.streams, number_of(stream), "stream");
        if (found == NULL) result = RFT_CU_INVALID_HANDLE;
        if (found != NULL) end(found);
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_stream_query(rft_cu_stream stream)
{
    FAKE_CALL(stream_query, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    fake_stream *found = result == RFT_CU_SUCCESS ? fake_stream_find(&call, stream) : NULL;
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_HANDLE);
    FAKE_REFUSE_IF(found->first != NULL, RFT_CU_NOT_READY);
    return fake_end(&call, result);
}

rft_cu_result fake_cu_stream_context(rft_cu_stream stream, rft_cu_context *context)
{
    FAKE_CALL(stream_context, FAKE_NEEDS_CONTEXT);
    fake_stream *found = result == RFT_CU_SUCCESS ? fake_stream_find(&call, stream) : NULL;
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_HANDLE);
    if (result == RFT_CU_SUCCESS) *context = (rft_cu_context)(uintptr_t)found->context->node.base;
    return fake_end(&call, result);
}

/* The legacy stream waits for blocking streams, so one that captures is in its way. Asking breaks
 * nothing. */
static bool capture_in_the_way(const fake_stream *of)
{
    for (fake_stream *it = fake_streams_first(); it != NULL && of->legacy; it = it->next) {
        bool blocking = (it->flags & RFT_CU_STREAM_NON_BLOCKING) == 0;
        if (blocking && it->capture == RFT_CU_CAPTURE_ACTIVE) return true;
    }
    return false;
}

rft_cu_result fake_cu_stream_capturing(rft_cu_stream stream, int *status)
{
    FAKE_CALL(stream_capturing, FAKE_NEEDS_CONTEXT);
    fake_stream *found = result == RFT_CU_SUCCESS ? fake_stream_find(&call, stream) : NULL;
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_HANDLE);
    FAKE_REFUSE_IF(capture_in_the_way(found), RFT_CU_STREAM_CAPTURE_IMPLICIT);
    if (result == RFT_CU_SUCCESS) *status = found->capture;
    return fake_end(&call, result);
}

FAKE_EXPORTED rft_cu_stream fake_cuda_stream(rft_cu_context context, unsigned flags)
{
    fake_lock();
    uint64_t number = (uint64_t)(uintptr_t)context;
    fake_stream *stream = make((fake_context *)fake_tree_at(&fake.contexts, number), flags);
    stream->foreign = true;
    fake_unlock();
    return handle_of(stream);
}

FAKE_EXPORTED void fake_cuda_stream_free(rft_cu_stream stream)
{
    fake_lock();
    fake_stream *found = fake_object(&fake.streams, number_of(stream), "stream");
    if (found != NULL) end(found);
    fake_unlock();
}

static void set_stopped(rft_cu_stream stream, bool stopped)
{
    fake_lock();
    fake_stream *found = fake_object(&fake.streams, number_of(stream), "stream");
    if (found != NULL) found->stopped = stopped;
    fake_wake();
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_stop_stream(rft_cu_stream stream)
{
    set_stopped(stream, true);
}

FAKE_EXPORTED void fake_cuda_go_stream(rft_cu_stream stream)
{
    set_stopped(stream, false);
}
