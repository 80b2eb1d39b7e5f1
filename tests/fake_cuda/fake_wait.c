/*
 * The waits: a thread stands until a stream, or a whole context, has done what is queued. refit
 * calls neither; what is compared with it does.
 */
#include "fake_queue.h"

static rft_cu_result until_done(fake_call *call, rft_cu_stream handle)
{
    fake_stream *stream = fake_stream_find(call, handle);
    while (stream != NULL && stream->first != NULL) {
        fake_wait();
        stream = fake_stream_find(call, handle);
    }
    if (stream == NULL) return RFT_CU_INVALID_HANDLE;
    return call->context->lost;
}

rft_cu_result fake_cu_stream_wait(rft_cu_stream stream)
{
    FAKE_CALL(stream_wait, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (result == RFT_CU_SUCCESS) result = until_done(&call, stream);
    return fake_end(&call, result);
}

rft_cu_result fake_cu_context_wait(void)
{
    FAKE_CALL(context_wait, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    while (result == RFT_CU_SUCCESS && !fake_queue_empty(call.context))
        fake_wait();
    if (result == RFT_CU_SUCCESS) result = call.context->lost;
    return fake_end(&call, result);
}
