/*
 * Captures in global mode, as tests begin them on a stream: work put there is not run; calls that
 * are not allowed beside one are refused and break it, unless the calling thread has said (mode
 * relaxed) that it knows what it does.
 */
#include "fake_stream.h"

static __thread int thread_mode = RFT_CU_CAPTURE_MODE_GLOBAL;

rft_cu_result fake_cu_capture_mode(int *mode)
{
    FAKE_CALL(capture_mode, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(mode == NULL || *mode < 0 || *mode > 2, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        int before = thread_mode;
        thread_mode = *mode;
        *mode = before;
    }
    return fake_end(&call, result);
}

static unsigned broken(bool blocking_only)
{
    unsigned count = 0;
    for (fake_stream *stream = fake_streams_first(); stream != NULL; stream = stream->next) {
        if (stream->capture != RFT_CU_CAPTURE_ACTIVE) continue;
        if (blocking_only && (stream->flags & RFT_CU_STREAM_NON_BLOCKING) != 0) continue;
        stream->capture = RFT_CU_CAPTURE_INVALIDATED;
        count++;
    }
    return count;
}

rft_cu_result fake_capture_check(void)
{
    if (thread_mode == RFT_CU_CAPTURE_MODE_RELAXED) return RFT_CU_SUCCESS;
    bool any = false;
    for (fake_stream *stream = fake_streams_first(); stream != NULL; stream = stream->next)
        any = any || stream->capture != RFT_CU_CAPTURE_NONE;
    broken(false);
    return any ? RFT_CU_STREAM_CAPTURE_UNSUPPORTED : RFT_CU_SUCCESS;
}

bool fake_capture_takes(fake_stream *stream, rft_cu_result *result)
{
    /* The legacy stream waits for every blocking stream, those in a capture among them. */
    if (stream->legacy && broken(true) > 0) *result = RFT_CU_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture == RFT_CU_CAPTURE_INVALIDATED) *result = RFT_CU_STREAM_CAPTURE_INVALIDATED;
    return *result == RFT_CU_SUCCESS && stream->capture == RFT_CU_CAPTURE_NONE;
}

static fake_stream *at(rft_cu_stream stream)
{
    return fake_object(&fake.streams, (uint64_t)(uintptr_t)stream, "stream");
}

FAKE_EXPORTED void fake_cuda_capture_begin(rft_cu_stream stream)
{
    fake_lock();
    fake_stream *found = at(stream);
    if (found != NULL) found->capture = RFT_CU_CAPTURE_ACTIVE;
    fake_unlock();
}

FAKE_EXPORTED bool fake_cuda_capture_end(rft_cu_stream stream)
{
    fake_lock();
    fake_stream *found = at(stream);
    bool whole = found != NULL && found->capture == RFT_CU_CAPTURE_ACTIVE;
    if (found != NULL) found->capture = RFT_CU_CAPTURE_NONE;
    fake_unlock();
    return whole;
}

FAKE_EXPORTED int fake_cuda_capture_mode(void)
{
    return thread_mode;
}
