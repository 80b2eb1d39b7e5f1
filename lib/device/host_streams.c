/*
 * The list of open streams. It is short and searched from end to end, once for each command.
 *
 * A stream is taken off the list before it ends, so that its address, if it is used again at once,
 * is never listed twice.
 */
#include "device/host_streams.h"

#include "base/alloc.h"

#define ROOM_FIRST 8u

refit_status rft_host_streams_open(rft_host_streams *streams, refit_error *error)
{
    return rft_mutex_open(&streams->lock, error);
}

void rft_host_streams_close(rft_host_streams *streams)
{
    rft_free(streams->list);
    rft_mutex_close(&streams->lock);
}

/* The lock is held; `count` if it is not listed. */
static uint32_t find_stream(const rft_host_streams *streams, refit_stream_ref stream)
{
    uint32_t at = 0;
    while (at < streams->count && streams->list[at] != stream.native) {
        at++;
    }
    return at;
}

refit_status rft_host_streams_check(rft_host_streams *streams, refit_stream_ref stream,
                                    refit_error *error)
{
    rft_lock(&streams->lock);
    bool known = find_stream(streams, stream) != streams->count;
    rft_unlock(&streams->lock);
    RFT_REFUSE_IF(!known, error, REFIT_ERR_INVALID, "%p is no open stream of this device",
                  stream.native);
    return REFIT_OK;
}

/* Room for one more, the lock held. */
static refit_status grow(rft_host_streams *streams, refit_error *error)
{
    if (streams->count < streams->room) return REFIT_OK;
    uint32_t room = streams->room == 0 ? ROOM_FIRST : streams->room * 2;
    rft_host_stream **list = rft_realloc(streams->list, room, sizeof(*list));
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for %u streams",
                  room);
    streams->list = list;
    streams->room = room;
    return REFIT_OK;
}

refit_status rft_host_streams_start(rft_host_streams *streams, rft_host_memory *memory,
                                    rft_host_pool *pool, refit_stream_ref *out, refit_error *error)
{
    rft_host_stream *stream = NULL;
    rft_lock(&streams->lock);
    refit_status status = grow(streams, error);
    if (status == REFIT_OK) status = rft_host_stream_open(memory, pool, &stream, error);
    if (status == REFIT_OK) streams->list[streams->count++] = stream;
    rft_unlock(&streams->lock);
    if (status == REFIT_OK) out->native = stream;
    return status;
}

refit_status rft_host_streams_end(rft_host_streams *streams, refit_stream_ref stream,
                                  refit_error *error)
{
    RFT_TRY(rft_host_streams_check(streams, stream, error));
    RFT_REFUSE_IF(!rft_host_stream_is_idle(stream.native), error, REFIT_ERR_TIMEOUT,
                  "the stream still has work");
    rft_lock(&streams->lock);
    streams->list[find_stream(streams, stream)] = streams->list[streams->count - 1];
    streams->count--;
    rft_unlock(&streams->lock);
    rft_host_stream_close(stream.native);
    return REFIT_OK;
}
