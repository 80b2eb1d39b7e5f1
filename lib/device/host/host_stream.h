/*
 * host_stream: a thread and a FIFO.
 */
#ifndef RFT_HOST_STREAM_H
#define RFT_HOST_STREAM_H

#include "device/host/host_copy.h"
#include "device/host/host_event.h"
#include "device/host/host_memory.h"

/* ---- The queue -------------------------------------------------------------------------------
 * What a stream still has to do, first in first out. Not thread-safe.
 */

/* Most copies in one command. */
#define RFT_HOST_BATCH_MOST 1024u

typedef enum rft_host_verb {
    RFT_HOST_COPY,        /* `count` copies follow; one without a source is zeroed */
    RFT_HOST_DIGEST,      /* one copy follows: the sum, the memory, its bytes */
    RFT_HOST_DIGEST_COPY, /* one copy follows */
    RFT_HOST_CAST,        /* one copy follows: the results, the numbers, the numbers' bytes */
    RFT_HOST_CALL,
    RFT_HOST_RECORD,
    RFT_HOST_JOIN,
} rft_host_verb;

typedef struct rft_host_command {
    rft_host_verb verb;
    uint32_t count; /* of copies */
    union {
        struct {
            refit_stream_fn function;
            void *user;
        } call;
        struct {
            uint64_t offset;
            uint64_t *sum; /* of DIGEST_COPY */
        } digest;
        struct {
            rft_host_event *event; /* held */
            uint64_t place;
        } record;
        struct {
            rft_host_line *line; /* retained */
            uint64_t place;
        } join;
    };
} rft_host_command;

typedef struct rft_host_chunk rft_host_chunk;

/* All zero is an empty queue. */
typedef struct rft_host_queue {
    rft_host_chunk *first; /* where commands are taken */
    rft_host_chunk *last;  /* where they are put */
    rft_host_chunk *spare;
    uint32_t head; /* in first */
    uint32_t tail; /* in last */
    uint32_t chunks;
} rft_host_queue;

/* ---- The stream --------------------------------------------------------------------------- */

typedef struct rft_host_stream rft_host_stream;

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
refit_status rft_host_copy_now(rft_host_memory *memory, rft_pool *pool, const rft_copy *copies,
                               uint32_t count, refit_error *error);

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

/* REFIT_ERR_INVALID for what is no open stream. */
refit_status rft_host_streams_check(rft_host_streams *streams, refit_stream_ref stream,
                                    refit_error *error);

/* Opens a stream and lists it. */
refit_status rft_host_streams_start(rft_host_streams *streams, rft_host_memory *memory,
                                    rft_pool *pool, refit_stream_ref *out, refit_error *error);

/* Ends a stream that has nothing to do. REFIT_ERR_TIMEOUT: it has, and stays. */
refit_status rft_host_streams_end(rft_host_streams *streams, refit_stream_ref stream,
                                  refit_error *error);

#endif
