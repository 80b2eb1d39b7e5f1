/*
 * cuda_stream: the streams that refit opens on a GPU, the check of those that callers bring, and
 * internal streams: streams lent for work on REFIT_STREAM_NONE.
 */
#ifndef RFT_CUDA_STREAM_H
#define RFT_CUDA_STREAM_H

#include "device/cuda_device.h"

/* NULL is allowed for close; it enters the context by itself. */
refit_status rft_cuda_streams_open(rft_cuda_device *cuda, rft_cuda_streams **out,
                                   refit_error *error);
void rft_cuda_streams_close(rft_cuda_device *cuda, rft_cuda_streams *streams);

/* All that follows is called inside a context guard. */

/* May work be put on the stream, an open one of refit's or a caller's? REFIT_ERR_INVALID: the
 * legacy or the per-thread default stream, a stream of another context; REFIT_ERR_STATE: a CUDA
 * graph is being captured from it. REFIT_STREAM_NONE is not for here. */
refit_status rft_cuda_stream_check(rft_cuda_device *cuda, refit_stream_ref stream,
                                   refit_error *error);

/* Likewise for recording and joining events only, which the legacy stream (PyTorch's default) may
 * take too. */
refit_status rft_cuda_stream_check_joinable(rft_cuda_device *cuda, refit_stream_ref stream,
                                            refit_error *error);

/* An internal stream is lent to one call: a non-blocking stream, and an event for its end. */
typedef struct rft_cuda_internal_stream {
    struct rft_cuda_internal_stream *next;
    rft_cu_stream stream;
    rft_cu_event end;
} rft_cuda_internal_stream;

refit_status rft_cuda_stream_borrow(rft_cuda_device *cuda, rft_cuda_internal_stream **out,
                                    refit_error *error);

/* Waits until the work put on the internal stream is done, at most offload.timeout_ms, and takes it
 * back. REFIT_ERR_TIMEOUT: the work goes on and its memory must stay. */
refit_status rft_cuda_stream_return(rft_cuda_device *cuda, rft_cuda_internal_stream *internal,
                                    refit_error *error);

/*
 * Work on a stream as a slot gets it: checked, or an internal stream for REFIT_STREAM_NONE. `end`
 * waits for a internal stream's work, keeps `status` if that is a failure, and is called once after
 * each `begin` that succeeded.
 *
 *     rft_cuda_work work;
 *     RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
 *     return rft_cuda_work_end(cuda, &work, put_it_on(cuda, work.stream, …), error);
 */
typedef struct rft_cuda_work {
    rft_cu_stream stream;
    rft_cuda_internal_stream *internal; /* NULL: a stream that was given */
} rft_cuda_work;

refit_status rft_cuda_work_begin(rft_cuda_device *cuda, refit_stream_ref stream,
                                 rft_cuda_work *work, refit_error *error);
refit_status rft_cuda_work_end(rft_cuda_device *cuda, const rft_cuda_work *work,
                               refit_status status, refit_error *error);

/* The slots of device.h; close enters the context by itself. */
refit_status rft_cuda_stream_open(rft_cuda_device *cuda, refit_stream_ref *out, refit_error *error);
refit_status rft_cuda_stream_close(rft_cuda_device *cuda, refit_stream_ref stream,
                                   refit_error *error);
refit_status rft_cuda_stream_call(rft_cuda_device *cuda, refit_stream_ref stream,
                                  refit_stream_fn function, void *user, refit_error *error);

#endif
