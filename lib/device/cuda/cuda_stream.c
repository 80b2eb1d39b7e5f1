/*
 * Streams on a GPU. Those of refit are non-blocking, so that the legacy stream, on which PyTorch
 * works by default, neither waits for them nor is waited for by them.
 *
 * The list of own streams is short and searched for each piece of work: what is on it needs no
 * further check. Other handles are a caller's; the driver says whose they are. A handle that was
 * closed, or never was a stream, cannot be told from a caller's: the driver may crash on it.
 *
 * Work on REFIT_STREAM_NONE goes through an internal stream. An internal stream whose work was not
 * done in time is dropped, not lent again; the driver keeps the stream until the work on it ends.
 */
#include "device/cuda/cuda_stream.h"

#include "base/alloc.h"
#include "base/clock.h"

/* ---- Streams ------------------------------------------------------------------------------ */

#define ROOM_FIRST 8u

struct rft_cuda_streams {
    rft_mutex lock;
    void **own; /* guarded by lock, like the rest */
    uint32_t count;
    uint32_t room;
    rft_cuda_internal_stream *internal_streams; /* those that are free */
};

refit_status rft_cuda_streams_open(rft_cuda_device *cuda, rft_cuda_streams **out,
                                   refit_error *error)
{
    (void)cuda;
    rft_cuda_streams *streams = rft_calloc(1, sizeof *streams);
    RFT_REFUSE_IF(streams == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the streams of a GPU");
    refit_status status = rft_mutex_open(&streams->lock, error);
    if (status != REFIT_OK) {
        rft_free(streams);
        return status;
    }
    *out = streams;
    return REFIT_OK;
}

static void drop_internal(rft_cuda_device *cuda, rft_cuda_internal_stream *internal)
{
    if (internal->end != NULL) (void)cuda->driver.event_close(internal->end);
    if (internal->stream != NULL) (void)cuda->driver.stream_close(internal->stream);
    rft_free(internal);
}

static void drop_internal_streams(rft_cuda_device *cuda, rft_cuda_streams *streams, bool inside)
{
    while (streams->internal_streams != NULL) {
        rft_cuda_internal_stream *internal = streams->internal_streams;
        streams->internal_streams = internal->next;
        if (inside) {
            drop_internal(cuda, internal);
        } else {
            rft_free(internal);
        }
    }
}

void rft_cuda_streams_close(rft_cuda_device *cuda, rft_cuda_streams *streams)
{
    if (streams == NULL) return;
    rft_cuda_guard guard;
    bool inside = rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK;
    drop_internal_streams(cuda, streams, inside);
    if (inside) rft_cuda_leave(cuda, &guard);
    rft_free(streams->own);
    rft_mutex_close(&streams->lock);
    rft_free(streams);
}

/* The lock is held; `count` if it is not ours. */
static uint32_t find_own(const rft_cuda_streams *streams, refit_stream_ref stream)
{
    uint32_t at = 0;
    while (at < streams->count && streams->own[at] != stream.native) {
        at++;
    }
    return at;
}

static bool is_own(rft_cuda_streams *streams, refit_stream_ref stream)
{
    rft_lock(&streams->lock);
    bool own = find_own(streams, stream) != streams->count;
    rft_unlock(&streams->lock);
    return own;
}

static refit_status check_context(rft_cuda_device *cuda, rft_cu_stream stream, refit_error *error)
{
    rft_cu_context context = NULL;
    RFT_TRY(rft_cuda_check(&cuda->driver, cuda->driver.stream_context(stream, &context), error,
                           "the handle is not a stream that the driver knows"));
    RFT_REFUSE_IF(context != cuda->context, error, REFIT_ERR_INVALID,
                  "stream %p belongs to another GPU or context than cuda:%d: bring one of the "
                  "primary context of this GPU, as PyTorch's are",
                  (void *)stream, cuda->ordinal);
    return REFIT_OK;
}

static refit_status check_capture(rft_cuda_device *cuda, rft_cu_stream stream, refit_error *error)
{
    int capturing = RFT_CU_CAPTURE_NONE;
    rft_cu_result result = cuda->driver.stream_capturing(stream, &capturing);
    RFT_REFUSE_IF(result == RFT_CU_STREAM_CAPTURE_IMPLICIT || capturing != RFT_CU_CAPTURE_NONE,
                  error, REFIT_ERR_STATE,
                  "a CUDA graph is being captured from stream %p: refit's work cannot be part of "
                  "it; end the capture first",
                  (void *)stream);
    return rft_cuda_check(&cuda->driver, result, error, "a stream's state could not be read");
}

static refit_status check_callers(rft_cuda_device *cuda, rft_cu_stream stream, refit_error *error)
{
    RFT_REFUSE_IF(stream == RFT_CU_STREAM_PER_THREAD, error, REFIT_ERR_INVALID,
                  "the per-thread default stream (2) is another one on each thread: bring a "
                  "stream that was created");
    if (stream != RFT_CU_STREAM_LEGACY) RFT_TRY(check_context(cuda, stream, error));
    return check_capture(cuda, stream, error);
}

/* For recording and joining events only: the legacy stream (PyTorch's default) takes these too. */
static refit_status stream_check_joinable(rft_cuda_device *cuda, refit_stream_ref stream,
                                          refit_error *error)
{
    if (is_own(cuda->streams, stream)) return REFIT_OK;
    return check_callers(cuda, stream.native, error);
}

/* All that follows is called inside a context guard. */

/* May work be put on the stream, an open one of refit's or a caller's? REFIT_ERR_INVALID: the
 * legacy or the per-thread default stream, a stream of another context; REFIT_ERR_STATE: a CUDA
 * graph is being captured from it. REFIT_STREAM_NONE is not for here. */
static refit_status stream_check(rft_cuda_device *cuda, refit_stream_ref stream, refit_error *error)
{
    if (is_own(cuda->streams, stream)) return REFIT_OK;
    RFT_REFUSE_IF(stream.native == RFT_CU_STREAM_LEGACY, error, REFIT_ERR_INVALID,
                  "the legacy default stream (1) takes no work of refit's, since all other streams "
                  "wait for it: bring a stream that was created (torch.cuda.Stream)");
    return check_callers(cuda, stream.native, error);
}

static refit_status open_native(rft_cuda_device *cuda, rft_cu_stream *out, refit_error *error)
{
    return rft_cuda_check(&cuda->driver,
                          cuda->driver.stream_open(out, RFT_CU_STREAM_NON_BLOCKING, 0), error,
                          "a stream could not be opened");
}

static refit_status open_internal(rft_cuda_device *cuda, rft_cuda_internal_stream **out,
                                  refit_error *error)
{
    rft_cuda_internal_stream *internal = rft_calloc(1, sizeof *internal);
    RFT_REFUSE_IF(internal == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a stream");
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(open_native(cuda, &internal->stream, error), drop);
    RFT_TRY_GOTO(rft_cuda_check(&cuda->driver,
                                cuda->driver.event_open(&internal->end, RFT_CU_EVENT_NO_TIMING),
                                error, "an event could not be opened"),
                 drop);
    *out = internal;
    return REFIT_OK;

drop:
    drop_internal(cuda, internal);
    return status;
}

static refit_status stream_borrow(rft_cuda_device *cuda, rft_cuda_internal_stream **out,
                                  refit_error *error)
{
    rft_cuda_streams *streams = cuda->streams;
    rft_lock(&streams->lock);
    rft_cuda_internal_stream *internal = streams->internal_streams;
    if (internal != NULL) streams->internal_streams = internal->next;
    rft_unlock(&streams->lock);
    if (internal == NULL) return open_internal(cuda, out, error);
    *out = internal;
    return REFIT_OK;
}

static refit_status finish_internal(rft_cuda_device *cuda, rft_cuda_internal_stream *internal,
                                    refit_error *error)
{
    RFT_TRY(rft_cuda_check(&cuda->driver,
                           cuda->driver.event_record(internal->end, internal->stream), error,
                           "an event could not be recorded"));
    return rft_cuda_event_poll_wait(cuda, internal->end,
                                    rft_deadline(cuda->config.offload_timeout_ms), error);
}

/* Waits until the work put on the internal stream is done, at most offload.timeout_ms, and takes it
 * back. REFIT_ERR_TIMEOUT: the work goes on and its memory must stay. */
static refit_status stream_return(rft_cuda_device *cuda, rft_cuda_internal_stream *internal,
                                  refit_error *error)
{
    rft_cuda_streams *streams = cuda->streams;
    refit_status status = finish_internal(cuda, internal, error);
    if (status != REFIT_OK) {
        drop_internal(cuda, internal);
        return status;
    }
    rft_lock(&streams->lock);
    internal->next = streams->internal_streams;
    streams->internal_streams = internal;
    rft_unlock(&streams->lock);
    return REFIT_OK;
}

refit_status rft_cuda_work_begin(rft_cuda_device *cuda, refit_stream_ref stream,
                                 rft_cuda_work *work, refit_error *error)
{
    *work = (rft_cuda_work){.stream = stream.native};
    if (stream.native != NULL) return stream_check(cuda, stream, error);
    RFT_TRY(stream_borrow(cuda, &work->internal, error));
    work->stream = work->internal->stream;
    return REFIT_OK;
}

refit_status rft_cuda_work_end(rft_cuda_device *cuda, const rft_cuda_work *work,
                               refit_status status, refit_error *error)
{
    if (work->internal == NULL) return status;
    refit_status ended = stream_return(cuda, work->internal, status == REFIT_OK ? error : NULL);
    return rft_keep_first(status, ended);
}

/* Room for one more, the lock held. */
static refit_status grow(rft_cuda_streams *streams, refit_error *error)
{
    if (streams->count < streams->room) return REFIT_OK;
    uint32_t room = streams->room == 0 ? ROOM_FIRST : streams->room * 2;
    void **own = rft_realloc(streams->own, room, sizeof *own);
    RFT_REFUSE_IF(own == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for %u streams", room);
    streams->own = own;
    streams->room = room;
    return REFIT_OK;
}

/* The slots of device.h; close enters the context by itself. */
static refit_status stream_open(rft_cuda_device *cuda, refit_stream_ref *out, refit_error *error)
{
    rft_cuda_streams *streams = cuda->streams;
    rft_cu_stream stream = NULL;
    rft_lock(&streams->lock);
    refit_status status = grow(streams, error);
    if (status == REFIT_OK) status = open_native(cuda, &stream, error);
    if (status == REFIT_OK) streams->own[streams->count++] = stream;
    rft_unlock(&streams->lock);
    if (status == REFIT_OK) out->native = stream;
    return status;
}

static refit_status check_idle(rft_cuda_device *cuda, rft_cu_stream stream, refit_error *error)
{
    rft_cu_result result = cuda->driver.stream_query(stream);
    RFT_REFUSE_IF(result == RFT_CU_NOT_READY, error, REFIT_ERR_TIMEOUT,
                  "the stream still has work");
    /* On a lost GPU there is nothing to wait for, and our side must be freed all the same. */
    if (rft_cuda_is_lost(result)) return REFIT_OK;
    return rft_cuda_check(&cuda->driver, result, error, "a stream's state could not be read");
}

static void unlist(rft_cuda_streams *streams, refit_stream_ref stream)
{
    rft_lock(&streams->lock);
    streams->own[find_own(streams, stream)] = streams->own[streams->count - 1];
    streams->count--;
    rft_unlock(&streams->lock);
}

static refit_status stream_close(rft_cuda_device *cuda, refit_stream_ref stream, refit_error *error)
{
    rft_cuda_streams *streams = cuda->streams;
    RFT_REFUSE_IF(!is_own(streams, stream), error, REFIT_ERR_INVALID,
                  "%p is not a stream that refit_stream_open gave: its creator destroys it",
                  stream.native);
    bool inside;
    rft_cuda_guard guard;
    RFT_TRY(rft_cuda_enter_to_free(cuda, &guard, &inside, error));
    refit_status status = inside ? check_idle(cuda, stream.native, error) : REFIT_OK;
    if (status == REFIT_OK) unlist(streams, stream);
    if (status == REFIT_OK && inside) (void)cuda->driver.stream_close(stream.native);
    if (inside) rft_cuda_leave(cuda, &guard);
    return status;
}

static refit_status stream_call(rft_cuda_device *cuda, refit_stream_ref stream,
                                refit_stream_fn function, void *user, refit_error *error)
{
    RFT_TRY(stream_check(cuda, stream, error));
    return rft_cuda_check(&cuda->driver, cuda->driver.stream_call(stream.native, function, user),
                          error, "a call could not be put on a stream");
}

/* ---- Events ----------------------------------------------------------------------------------
 * Events on a GPU: the driver's, without timing.
 *
 * The driver can wait for an event only without a deadline, so an event is looked at, with naps
 * between the looks. An event recorded on the calling thread itself is done at once: the driver's
 * event then stays where it was, and `here` says that it is not asked. A failure of queued work
 * loses the whole context, so that every event, this one among them, tells it from then on.
 */

typedef struct cuda_event {
    rft_cu_event handle;
    atomic_bool here; /* recorded last on the calling thread: nothing to wait for */
} cuda_event;

static cuda_event *event_of(rft_event *event)
{
    return (cuda_event *)event;
}

refit_status rft_cuda_event_poll_wait(rft_cuda_device *cuda, rft_cu_event event, int64_t deadline,
                                      refit_error *error)
{
    rft_looks looks = rft_looks_until(deadline);
    rft_cu_result result = cuda->driver.event_query(event);
    while (result == RFT_CU_NOT_READY && rft_poll_again(&looks)) {
        result = cuda->driver.event_query(event);
    }
    RFT_REFUSE_IF(result == RFT_CU_NOT_READY, error, REFIT_ERR_TIMEOUT,
                  "the GPU's work was not done in time and goes on");
    return rft_cuda_check(&cuda->driver, result, error, "work on the GPU failed");
}

/* The slots of device.h, inside a context guard. */
static refit_status event_open(rft_cuda_device *cuda, rft_event **out, refit_error *error)
{
    cuda_event *event = rft_calloc(1, sizeof *event);
    RFT_REFUSE_IF(event == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for an event");
    refit_status status = rft_cuda_check(
        &cuda->driver, cuda->driver.event_open(&event->handle, RFT_CU_EVENT_NO_TIMING), error,
        "an event could not be opened");
    if (status != REFIT_OK) {
        rft_free(event);
        return status;
    }
    *out = (rft_event *)event;
    return REFIT_OK;
}

static void event_close(rft_cuda_device *cuda, rft_event *event)
{
    rft_cuda_guard guard;
    if (rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        (void)cuda->driver.event_close(event_of(event)->handle);
        rft_cuda_leave(cuda, &guard);
    }
    rft_free(event);
}

static refit_status event_record(rft_cuda_device *cuda, rft_event *event, refit_stream_ref stream,
                                 refit_error *error)
{
    bool here = stream.native == NULL;
    if (!here) {
        RFT_TRY(stream_check_joinable(cuda, stream, error));
        RFT_TRY(rft_cuda_check(&cuda->driver,
                               cuda->driver.event_record(event_of(event)->handle, stream.native),
                               error, "an event could not be recorded"));
    }
    atomic_store(&event_of(event)->here, here);
    return REFIT_OK;
}

static refit_status join_here(rft_cuda_device *cuda, cuda_event *event, refit_error *error)
{
    if (atomic_load(&event->here)) return REFIT_OK;
    return rft_cuda_event_poll_wait(cuda, event->handle,
                                    rft_deadline(cuda->config.offload_timeout_ms), error);
}

static refit_status event_join(rft_cuda_device *cuda, rft_event *event, refit_stream_ref stream,
                               refit_error *error)
{
    if (stream.native == NULL) return join_here(cuda, event_of(event), error);
    RFT_TRY(stream_check_joinable(cuda, stream, error));
    if (atomic_load(&event_of(event)->here)) return REFIT_OK;
    return rft_cuda_check(&cuda->driver,
                          cuda->driver.stream_wait_event(stream.native, event_of(event)->handle, 0),
                          error, "a stream could not be made to wait for an event");
}

static refit_status event_wait(rft_cuda_device *cuda, rft_event *event, uint32_t timeout_ms,
                               refit_error *error)
{
    if (atomic_load(&event_of(event)->here)) return REFIT_OK;
    return rft_cuda_event_poll_wait(cuda, event_of(event)->handle, rft_deadline(timeout_ms), error);
}

/* ---- Slots -----------------------------------------------------------------------------------
 * Each enters the context; the work is done above. */

static refit_status cuda_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, stream_open(cuda, out, error));
}

static refit_status cuda_stream_close(void *self, refit_stream_ref stream, refit_error *error)
{
    return stream_close(self, stream, error);
}

static refit_status cuda_stream_call(void *self, refit_stream_ref stream, refit_stream_fn function,
                                     void *user, refit_error *error)
{
    rft_cuda_device *cuda = self;
    if (stream.native == NULL) {
        function(user);
        return REFIT_OK;
    }
    RFT_CUDA_GUARDED(cuda, error, stream_call(cuda, stream, function, user, error));
}

static refit_status cuda_event_open(void *self, rft_event **out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, event_open(cuda, out, error));
}

static void cuda_event_close(void *self, rft_event *event)
{
    event_close(self, event);
}

static refit_status cuda_event_record(void *self, rft_event *event, refit_stream_ref stream,
                                      refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, event_record(cuda, event, stream, error));
}

static refit_status cuda_event_join(void *self, rft_event *event, refit_stream_ref stream,
                                    refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, event_join(cuda, event, stream, error));
}

static refit_status cuda_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                    refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, event_wait(cuda, event, timeout_ms, error));
}

void rft_cuda_stream_slots(rft_device_ops *ops)
{
    ops->stream_open = cuda_stream_open;
    ops->stream_close = cuda_stream_close;
    ops->stream_call = cuda_stream_call;
    ops->event_open = cuda_event_open;
    ops->event_close = cuda_event_close;
    ops->event_record = cuda_event_record;
    ops->event_join = cuda_event_join;
    ops->event_wait = cuda_event_wait;
}
