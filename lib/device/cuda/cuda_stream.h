/*
 * cuda_stream: the streams that refit opens on a GPU, the check of those that callers bring, and
 * internal streams: streams lent for work on REFIT_STREAM_NONE.
 */
#ifndef RFT_CUDA_STREAM_H
#define RFT_CUDA_STREAM_H

#include "device/cuda/cuda_device.h"

/* ---- Streams ------------------------------------------------------------------------------ */

/* NULL is allowed for close; it enters the context by itself. */
refit_status rft_cuda_streams_open(rft_cuda_device *cuda, rft_cuda_streams **out,
                                   refit_error *error);
void rft_cuda_streams_close(rft_cuda_device *cuda, rft_cuda_streams *streams);

/* An internal stream is lent to one call: a non-blocking stream, and an event for its end. */
typedef struct rft_cuda_internal_stream {
    struct rft_cuda_internal_stream *next;
    rft_cu_stream stream;
    rft_cu_event end;
} rft_cuda_internal_stream;

/*
 * Work on a stream as a slot gets it: checked, or an internal stream for REFIT_STREAM_NONE. `end`
 * waits for an internal stream's work, keeps `status` if that is a failure, and is called once
 * after each `begin` that succeeded.
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

/* ---- Events ----------------------------------------------------------------------------------
 * Events of the driver as events of device.h, and the wait for one. */

/* Looks at the event until it is done (rft_poll_again), at most until `deadline` (of rft_deadline);
 * a deadline that has passed looks once. REFIT_ERR_TIMEOUT, or REFIT_ERR_DEVICE if the work before
 * it has lost the GPU. Inside a context guard. */
refit_status rft_cuda_event_poll_wait(rft_cuda_device *cuda, rft_cu_event event, int64_t deadline,
                                      refit_error *error);

/* Fills the slots that this file has. */
void rft_cuda_stream_slots(rft_device_ops *ops);

#endif
