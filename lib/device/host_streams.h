/* host_streams: the open streams of one host device, so that a handle which is none is refused. */
#ifndef RFT_HOST_STREAMS_H
#define RFT_HOST_STREAMS_H

#include "device/host_stream.h"

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
                                    rft_host_pool *pool, refit_stream_ref *out, refit_error *error);

/* Ends a stream that has nothing to do. REFIT_ERR_TIMEOUT: it has, and stays. */
refit_status rft_host_streams_end(rft_host_streams *streams, refit_stream_ref stream,
                                  refit_error *error);

#endif
