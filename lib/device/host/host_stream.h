/*
 * host_stream: a stream is a thread and a FIFO; an event is a place on a stream.
 */
#ifndef RFT_HOST_STREAM_H
#define RFT_HOST_STREAM_H

#include "device/host/host_memory.h"

/* Most copies in one command. */
#define RFT_HOST_BATCH_MOST 1024u

/* ---- Events ------------------------------------------------------------------------------- */

typedef struct rft_host_event rft_host_event;

refit_status rft_host_event_open(rft_host_event **out, refit_error *error);

void rft_host_event_close(rft_host_event *event);

/* Recorded by the calling thread: its place is passed already. */
void rft_host_event_pass(rft_host_event *event);

/* Waits until its place is passed, also on a lost device, where streams come to it without doing
 * their work. REFIT_ERR_TIMEOUT. */
refit_status rft_host_event_wait(rft_host_event *event, uint32_t timeout_ms, refit_error *error);

/* ---- The stream --------------------------------------------------------------------------- */

typedef struct rft_host_stream rft_host_stream;

refit_status rft_host_stream_call(rft_host_stream *stream, refit_stream_fn function, void *user,
                                  refit_error *error);
refit_status rft_host_stream_copy(rft_host_stream *stream, const rft_copy *copies, uint32_t count,
                                  refit_error *error);
refit_status rft_host_stream_digest(rft_host_stream *stream, const void *memory, uint64_t bytes,
                                    uint64_t offset, uint64_t *sum, refit_error *error);
refit_status rft_host_stream_digest_list(rft_host_stream *stream, rft_digest_job *jobs,
                                         uint32_t count, refit_error *error);
refit_status rft_host_stream_cast(rft_host_stream *stream, uint16_t *to, const float *from,
                                  uint64_t count, refit_error *error);
refit_status rft_host_stream_encode(rft_host_stream *stream, const rft_master_job *job,
                                    refit_error *error);
refit_status rft_host_stream_decode(rft_host_stream *stream, const rft_master_job *job,
                                    refit_error *error);
refit_status rft_host_stream_record(rft_host_stream *stream, rft_host_event *event,
                                    refit_error *error);
refit_status rft_host_stream_join(rft_host_stream *stream, rft_host_event *event,
                                  refit_error *error);

/* ---- The open streams ------------------------------------------------------------------------
 * The open streams of one host device, so that a handle which is none is refused. */

typedef struct rft_host_streams {
    rft_mutex lock;
    rft_host_stream **list; /* guarded by lock, like the rest */
    uint32_t count;
    uint32_t room;
} rft_host_streams;

refit_status rft_host_streams_open(rft_host_streams *streams, refit_error *error);

/* None may be open. */
void rft_host_streams_close(rft_host_streams *streams);

/* REFIT_ERR_INVALID for what is not an open stream. */
refit_status rft_host_streams_check(rft_host_streams *streams, refit_stream_ref stream,
                                    refit_error *error);

/* Opens a stream and lists it. */
refit_status rft_host_streams_start(rft_host_streams *streams, rft_host_memory *memory,
                                    rft_pool *pool, refit_stream_ref *out, refit_error *error);

/* Ends a stream that has nothing to do. REFIT_ERR_TIMEOUT: it has, and stays. */
refit_status rft_host_streams_end(rft_host_streams *streams, refit_stream_ref stream,
                                  refit_error *error);

#endif
