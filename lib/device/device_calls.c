/*
 * The calls on a device: arguments are checked here, once for all implementations, then the slot
 * does the work.
 *
 * What is open (memory, streams) is counted on the way, so that refit_device_close can refuse.
 */
#include <inttypes.h>

#include "base/checked.h"
#include "base/clock.h"
#include "device/device_reserve.h"

#define NEED(condition, error, text)                                                               \
    RFT_REFUSE_IF(!(condition), (error), REFIT_ERR_INVALID, "%s", (text))

#define NEED_SPAN(memory, bytes, error)                                                            \
    NEED(rft_span_exists((memory), (bytes)), (error),                                              \
         "the memory would end beyond the addresses that there are: its size is wrong")

#define NEED_DEVICE(device, error) NEED((device) != NULL, (error), "the device is NULL")

refit_status refit_memory_alloc(refit_device *device, uint64_t bytes, void **out,
                                refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(out != NULL, error, "no place to put the memory: out is NULL");
    NEED(bytes != 0, error, "0 bytes of device memory were asked for: ask for at least 1");
    RFT_TRY(device->ops.memory_alloc(device->self, bytes, out, error));
    atomic_fetch_add(&device->memories, 1);
    return REFIT_OK;
}

refit_status refit_memory_free(refit_device *device, void *memory, refit_error *error)
{
    NEED_DEVICE(device, error);
    if (memory == NULL) return REFIT_OK;
    RFT_TRY(device->ops.memory_free(device->self, memory, error));
    atomic_fetch_sub(&device->memories, 1);
    return REFIT_OK;
}

refit_status rft_device_memory_check(refit_device *device, const void *memory, uint64_t bytes,
                                     const void **whole, refit_error *error)
{
    NEED(memory != NULL && bytes != 0, error, "there is no memory to look at: NULL or 0 bytes");
    NEED_SPAN(memory, bytes, error);
    return device->ops.memory_check(device->self, memory, bytes, whole, error);
}

refit_status rft_device_host_pin(refit_device *device, void *memory, uint64_t bytes,
                                 refit_error *error)
{
    NEED(memory != NULL && bytes != 0, error, "there is no memory to page-lock: NULL or 0 bytes");
    NEED_SPAN(memory, bytes, error);
    return device->ops.host_pin(device->self, memory, bytes, error);
}

void rft_device_host_unpin(refit_device *device, void *memory, uint64_t bytes)
{
    device->ops.host_unpin(device->self, memory, bytes);
}

refit_status refit_stream_open(refit_device *device, refit_stream_ref *out, refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(out != NULL, error, "no place to put the stream: out is NULL");
    RFT_TRY(device->ops.stream_open(device->self, out, error));
    atomic_fetch_add(&device->streams, 1);
    return REFIT_OK;
}

refit_status refit_stream_close(refit_device *device, refit_stream_ref stream, refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(stream.native != NULL, error, "REFIT_STREAM_NONE was not opened and cannot be closed");
    RFT_TRY(rft_device_end_stream(device, stream, error));
    atomic_fetch_sub(&device->streams, 1);
    return REFIT_OK;
}

static refit_status spare_take(refit_device *device, rft_event **out, refit_error *error)
{
    rft_lock(&device->lock);
    rft_event *event = device->spare;
    device->spare = NULL;
    rft_unlock(&device->lock);
    if (event == NULL) return device->ops.event_open(device->self, out, error);
    *out = event;
    return REFIT_OK;
}

static void spare_give(refit_device *device, rft_event *event)
{
    rft_lock(&device->lock);
    rft_event *extra = device->spare;
    device->spare = event;
    rft_unlock(&device->lock);
    if (extra != NULL) device->ops.event_close(device->self, extra);
}

/* An event that is still under way is closed, not kept: then a failure of the work before it stays
 * with the stream and is reported by the next wait. */
refit_status refit_stream_wait(refit_device *device, refit_stream_ref stream, uint32_t timeout_ms,
                               refit_error *error)
{
    NEED_DEVICE(device, error);
    rft_event *event;
    RFT_TRY(spare_take(device, &event, error));
    refit_status status = device->ops.event_record(device->self, event, stream, error);
    if (status == REFIT_OK) {
        status = device->ops.event_wait(device->self, event, timeout_ms, error);
    }
    if (status == REFIT_ERR_TIMEOUT) {
        device->ops.event_close(device->self, event);
    } else {
        spare_give(device, event);
    }
    return status;
}

refit_status refit_stream_call(refit_device *device, refit_stream_ref stream,
                               refit_stream_fn function, void *user, refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(function != NULL, error, "there is no function to call: it is NULL");
    return device->ops.stream_call(device->self, stream, function, user, error);
}

refit_status refit_stream_copy(refit_device *device, refit_stream_ref stream, void *to,
                               const void *from, uint64_t bytes, refit_error *error)
{
    NEED_DEVICE(device, error);
    rft_copy copy = {.to = to, .from = from, .bytes = bytes};
    return rft_device_copy_batch(device, stream, &copy, 1, RFT_COPY_STREAM, error);
}

refit_status rft_device_copy_batch(refit_device *device, refit_stream_ref stream,
                                   const rft_copy *copies, uint32_t count, rft_copy_order order,
                                   refit_error *error)
{
    if (count == 0) return REFIT_OK;
    uint32_t most = rft_device_get_caps(device).batch_most;
    RFT_REFUSE_IF(count > most, error, REFIT_ERR_INVALID,
                  "%u copies in one batch: the device takes at most %u", count, most);
    for (uint32_t i = 0; i < count; i++) {
        RFT_REFUSE_IF((copies[i].to == NULL || copies[i].from == NULL) && copies[i].bytes != 0,
                      error, REFIT_ERR_INVALID, "copy %u of %u has no source or no destination", i,
                      count);
        RFT_REFUSE_IF(!rft_span_exists(copies[i].to, copies[i].bytes) ||
                          !rft_span_exists(copies[i].from, copies[i].bytes),
                      error, REFIT_ERR_INVALID,
                      "copy %u of %u has %" PRIu64
                      " bytes and would end beyond the addresses that there are: its size is wrong",
                      i, count, copies[i].bytes);
    }
    return device->ops.copy_batch(device->self, stream, copies, count, order, error);
}

refit_status rft_device_zero(refit_device *device, refit_stream_ref stream, void *memory,
                             uint64_t bytes, refit_error *error)
{
    if (bytes == 0) return REFIT_OK;
    NEED(memory != NULL, error, "there is no memory to zero: it is NULL");
    NEED_SPAN(memory, bytes, error);
    return device->ops.zero(device->self, stream, memory, bytes, error);
}

refit_status rft_device_digest(refit_device *device, refit_stream_ref stream, const void *memory,
                               uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    NEED(memory != NULL && sum != NULL, error, "a digest needs memory and a place for its sum");
    NEED_SPAN(memory, bytes, error);
    NEED(offset % 8 == 0, error, "the part of a digest begins at a multiple of 8 bytes");
    return device->ops.digest(device->self, stream, memory, bytes, offset, sum, error);
}

refit_status rft_device_digest_copy(refit_device *device, refit_stream_ref stream, void *to,
                                    const void *from, uint64_t bytes, uint64_t offset, void *sum,
                                    refit_error *error)
{
    NEED(from != NULL && sum != NULL, error, "a digest needs memory and a place for its sum");
    NEED_SPAN(from, bytes, error);
    NEED_SPAN(to, bytes, error);
    NEED(offset % 8 == 0, error, "the part of a digest begins at a multiple of 8 bytes");
    NEED((uintptr_t)to % 8 == 0, error, "a digest is copied to a boundary of 8 bytes");
    return device->ops.digest_copy(device->self, stream, to, from, bytes, offset, sum, error);
}

refit_status refit_stream_cast_bf16(refit_device *device, refit_stream_ref stream, uint16_t *to,
                                    const float *from, uint64_t count, refit_error *error)
{
    uint64_t bytes;
    NEED_DEVICE(device, error);
    if (count == 0) return REFIT_OK;
    NEED(to != NULL && from != NULL, error, "a cast needs a source and a destination: one is NULL");
    NEED(rft_mul_u64(count, sizeof *from, &bytes), error,
         "so many numbers are more than there are addresses");
    NEED_SPAN(from, bytes, error);
    NEED_SPAN(to, count * sizeof *to, error);
    return device->ops.cast_bf16(device->self, stream, to, from, count, error);
}

refit_status rft_device_share_export(refit_device *device, const void *memory, uint64_t bytes,
                                     rft_share *out, refit_error *error)
{
    NEED(memory != NULL && bytes != 0, error, "there is no memory to share: NULL or 0 bytes");
    NEED_SPAN(memory, bytes, error);
    return device->ops.share_export(device->self, memory, bytes, out, error);
}

refit_status rft_device_share_map(refit_device *device, const rft_share *share, void **out,
                                  refit_error *error)
{
    return device->ops.share_map(device->self, share, out, error);
}

void rft_device_share_unmap(refit_device *device, void *memory)
{
    if (memory != NULL) device->ops.share_unmap(device->self, memory);
}

refit_status rft_device_event_open(refit_device *device, rft_event **out, refit_error *error)
{
    return device->ops.event_open(device->self, out, error);
}

void rft_device_event_close(refit_device *device, rft_event *event)
{
    if (event != NULL) device->ops.event_close(device->self, event);
}

refit_status rft_device_event_record(refit_device *device, rft_event *event,
                                     refit_stream_ref stream, refit_error *error)
{
    return device->ops.event_record(device->self, event, stream, error);
}

refit_status rft_device_event_join(refit_device *device, rft_event *event, refit_stream_ref stream,
                                   refit_error *error)
{
    return device->ops.event_join(device->self, event, stream, error);
}

refit_status rft_device_event_wait(refit_device *device, rft_event *event, uint32_t timeout_ms,
                                   refit_error *error)
{
    return device->ops.event_wait(device->self, event, timeout_ms, error);
}
