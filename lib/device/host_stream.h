/*
 * host_stream: a thread and a FIFO.
 */
#ifndef RFT_HOST_STREAM_H
#define RFT_HOST_STREAM_H

#include "device/host_memory.h"
#include "device/host_pool.h"
#include "device/host_queue.h"

typedef struct rft_host_stream rft_host_stream;

/* `memory` and `pool` are borrowed and outlive the stream. */
refit_status rft_host_stream_open(rft_host_memory *memory, rft_host_pool *pool,
                                  rft_host_stream **out, refit_error *error);

/* Is all done that was queued? */
bool rft_host_stream_is_idle(rft_host_stream *stream);

/* Does what is queued, then ends the thread. */
void rft_host_stream_close(rft_host_stream *stream);

refit_status rft_host_stream_call(rft_host_stream *stream, refit_stream_fn function, void *user,
                                  refit_error *error);
refit_status rft_host_stream_copy(rft_host_stream *stream, const rft_copy *copies, uint32_t count,
                                  refit_error *error);
refit_status rft_host_stream_digest(rft_host_stream *stream, const void *memory, uint64_t bytes,
                                    uint64_t offset, uint64_t *sum, refit_error *error);
refit_status rft_host_stream_digest_copy(rft_host_stream *stream, void *to, const void *from,
                                         uint64_t bytes, uint64_t offset, uint64_t *sum,
                                         refit_error *error);
refit_status rft_host_stream_cast(rft_host_stream *stream, uint16_t *to, const float *from,
                                  uint64_t count, refit_error *error);
refit_status rft_host_stream_record(rft_host_stream *stream, rft_host_event *event,
                                    refit_error *error);
refit_status rft_host_stream_join(rft_host_stream *stream, rft_host_event *event,
                                  refit_error *error);

/* Does copies (one without a source is zeroed) on the calling thread. REFIT_ERR_COPY, nothing
 * copied, if one of them touches memory of an arena that is not committed. */
refit_status rft_host_copy_now(rft_host_memory *memory, rft_host_pool *pool, const rft_copy *copies,
                               uint32_t count, refit_error *error);

#endif
