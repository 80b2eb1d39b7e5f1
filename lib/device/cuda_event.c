/*
 * Events on a GPU: the driver's, without timing.
 *
 * The driver can wait for an event only without a deadline, so an event is looked at, with naps
 * between the looks. An event recorded on the calling thread itself is done at once: the driver's
 * event then stays where it was, and `here` says that it is not asked. A failure of queued work
 * loses the whole context, so that every event, this one among them, tells it from then on.
 */
#include "device/cuda_event.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "device/cuda_stream.h"

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
    while (result == RFT_CU_NOT_READY && rft_look_again(&looks)) {
        result = cuda->driver.event_query(event);
    }
    RFT_REFUSE_IF(result == RFT_CU_NOT_READY, error, REFIT_ERR_TIMEOUT,
                  "the GPU's work was not done in time and goes on");
    return rft_cuda_check(&cuda->driver, result, error, "work on the GPU failed");
}

refit_status rft_cuda_event_open(rft_cuda_device *cuda, rft_event **out, refit_error *error)
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

void rft_cuda_event_close(rft_cuda_device *cuda, rft_event *event)
{
    rft_cuda_guard guard;
    if (rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        (void)cuda->driver.event_close(event_of(event)->handle);
        rft_cuda_leave(cuda, &guard);
    }
    rft_free(event);
}

refit_status rft_cuda_event_record(rft_cuda_device *cuda, rft_event *event, refit_stream_ref stream,
                                   refit_error *error)
{
    bool here = stream.native == NULL;
    if (!here) {
        RFT_TRY(rft_cuda_stream_check_joinable(cuda, stream, error));
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

refit_status rft_cuda_event_join(rft_cuda_device *cuda, rft_event *event, refit_stream_ref stream,
                                 refit_error *error)
{
    if (stream.native == NULL) return join_here(cuda, event_of(event), error);
    RFT_TRY(rft_cuda_stream_check_joinable(cuda, stream, error));
    if (atomic_load(&event_of(event)->here)) return REFIT_OK;
    return rft_cuda_check(&cuda->driver,
                          cuda->driver.stream_wait_event(stream.native, event_of(event)->handle, 0),
                          error, "a stream could not be made to wait for an event");
}

refit_status rft_cuda_event_wait(rft_cuda_device *cuda, rft_event *event, uint32_t timeout_ms,
                                 refit_error *error)
{
    if (atomic_load(&event_of(event)->here)) return REFIT_OK;
    return rft_cuda_event_poll_wait(cuda, event_of(event)->handle, rft_deadline(timeout_ms), error);
}
