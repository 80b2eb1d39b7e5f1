/*
 * Events: a place in a stream is the number of times that the event was recorded, and it is done
 * when the stream has passed that recording. Queued work keeps an event after its handle is gone.
 */
#include <stdlib.h>
#include <time.h>

#include "fake_stream.h"

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static fake_event *found(rft_cu_event event)
{
    return fake_object(&fake.events, (uint64_t)(uintptr_t)event, "event");
}

static void mark_release(fake_mark *mark)
{
    if (mark != NULL && --mark->users == 0) free(mark);
}

static void finish(fake_event *event)
{
    fake_tree_take(&fake.events, &event->node);
    mark_release(event->latest);
    free(event);
}

void fake_events_reset(void)
{
    while (fake.events.root != NULL)
        finish((fake_event *)fake.events.root);
}

rft_cu_result fake_cu_event_open(rft_cu_event *out, unsigned flags)
{
    FAKE_CALL(event_open, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(out == NULL || flags > 3, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        fake_event *event = fake_new(sizeof *event);
        event->context = call.context;
        event->flags = flags;
        *out = (rft_cu_event)(uintptr_t)fake_handle(&fake.events, &event->node);
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_event_close(rft_cu_event event)
{
    FAKE_CALL(event_close, FAKE_NEEDS_CONTEXT);
    if (fake_ends(&call, result)) {
        fake_event *it = found(event);
        if (it == NULL) result = RFT_CU_INVALID_HANDLE;
        if (it != NULL) finish(it);
    }
    return fake_end(&call, result);
}

static void drop(fake_op *op)
{
    mark_release(op->mark);
}

static rft_cu_result pass(fake_op *op)
{
    op->mark->done = true;
    op->mark->time = now();
    return RFT_CU_SUCCESS;
}

static void record(fake_call *call, fake_stream *stream, fake_event *event)
{
    fake_op *op = fake_op_new(pass);
    op->drop = drop;
    op->always = true;
    mark_release(event->latest);
    event->latest = op->mark = fake_new(sizeof *op->mark);
    op->mark->users = 2;
    op->mark->context = stream->context;
    fake_stream_put(stream, op, call);
}

rft_cu_result fake_cu_event_record(rft_cu_event event, rft_cu_stream stream)
{
    FAKE_CALL(event_record, FAKE_NEEDS_CONTEXT);
    fake_event *it = NULL;
    if (result == RFT_CU_SUCCESS) {
        it = found(event);
        if (it == NULL || it->context != call.context) result = RFT_CU_INVALID_HANDLE;
    }
    if (result == RFT_CU_SUCCESS) {
        fake_stream *target = fake_stream_for(&call, stream, &result);
        it->captured = target == NULL && result == RFT_CU_SUCCESS;
        if (target != NULL) record(&call, target, it);
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_event_query(rft_cu_event event)
{
    FAKE_CALL(event_query, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    fake_event *it = result == RFT_CU_SUCCESS ? found(event) : NULL;
    FAKE_REFUSE_IF(it == NULL, RFT_CU_INVALID_HANDLE);
    FAKE_REFUSE_IF(it->captured, RFT_CU_CAPTURED_EVENT);
    if (result == RFT_CU_SUCCESS && it->context->lost != 0) result = it->context->lost;
    FAKE_REFUSE_IF(it->latest != NULL && !it->latest->done, RFT_CU_NOT_READY);
    return fake_end(&call, result);
}

static bool arrived(const fake_op *op)
{
    return op->mark->done || op->mark->context->lost != RFT_CU_SUCCESS;
}

static rft_cu_result nothing(fake_op *op)
{
    (void)op;
    return RFT_CU_SUCCESS;
}

static void wait_for(fake_call *call, fake_stream *stream, fake_event *event)
{
    if (event->latest == NULL) return;
    fake_op *op = fake_op_new(nothing);
    op->drop = drop;
    op->ready = arrived;
    op->mark = event->latest;
    op->mark->users++;
    fake_stream_put(stream, op, call);
}

rft_cu_result fake_cu_stream_wait_event(rft_cu_stream stream, rft_cu_event event, unsigned flags)
{
    FAKE_CALL(stream_wait_event, FAKE_NEEDS_CONTEXT);
    fake_event *it = result == RFT_CU_SUCCESS ? found(event) : NULL;
    FAKE_REFUSE_IF(it == NULL, RFT_CU_INVALID_HANDLE);
    FAKE_REFUSE_IF(flags != 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        fake_stream *target = fake_stream_for(&call, stream, &result);
        /* A captured event belongs to its graph. */
        if (target != NULL && it->captured) result = RFT_CU_STREAM_CAPTURE_ISOLATION;
        if (target != NULL && !it->captured) wait_for(&call, target, it);
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_event_elapsed(float *milliseconds, rft_cu_event start, rft_cu_event end)
{
    FAKE_CALL(event_elapsed, FAKE_NEEDS_CONTEXT);
    if (result != RFT_CU_SUCCESS) return fake_end(&call, result);
    fake_event *from = found(start), *to = found(end);
    if (from == NULL || to == NULL || from->latest == NULL || to->latest == NULL ||
        ((from->flags | to->flags) & RFT_CU_EVENT_NO_TIMING) != 0)
        return fake_end(&call, RFT_CU_INVALID_HANDLE);
    if (!from->latest->done || !to->latest->done) return fake_end(&call, RFT_CU_NOT_READY);
    *milliseconds = (float)(to->latest->time - from->latest->time) / 1e6f;
    return fake_end(&call, RFT_CU_SUCCESS);
}
