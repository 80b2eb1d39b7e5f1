/* Slots that only stand in the table: each that can fail does. */
#include "tests/support/bare_device.h"

static void unused_void(void *self)
{
    (void)self;
}

static void unused_describe(void *self, refit_device_info *info)
{
    (void)self;
    (void)info;
}

static void unused_caps(void *self, rft_device_caps *caps)
{
    (void)self;
    (void)caps;
}

static refit_status unused_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    (void)self;
    (void)bytes;
    (void)out;
    return rft_fail(error, REFIT_ERR_DEVICE, "unused");
}

static refit_status unused_free(void *self, void *memory, refit_error *error)
{
    (void)self;
    (void)memory;
    return rft_fail(error, REFIT_ERR_DEVICE, "unused");
}

static refit_status unused_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    (void)self;
    (void)out;
    return rft_fail(error, REFIT_ERR_DEVICE, "unused");
}

static refit_status unused_stream(void *self, refit_stream_ref stream, refit_error *error)
{
    (void)self;
    (void)stream;
    return rft_fail(error, REFIT_ERR_DEVICE, "unused");
}

static refit_status unused_copy(void *self, refit_stream_ref stream, const rft_copy *copies,
                                uint32_t count, rft_copy_order order, refit_error *error)
{
    (void)copies;
    (void)count;
    (void)order;
    return unused_stream(self, stream, error);
}

static refit_status unused_zero(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                                refit_error *error)
{
    (void)memory;
    (void)bytes;
    return unused_stream(self, stream, error);
}

static refit_status unused_event_open(void *self, rft_event **out, refit_error *error)
{
    (void)self;
    (void)out;
    return rft_fail(error, REFIT_ERR_DEVICE, "unused");
}

static void unused_event_close(void *self, rft_event *event)
{
    (void)self;
    (void)event;
}

static refit_status unused_event(void *self, rft_event *event, refit_stream_ref stream,
                                 refit_error *error)
{
    (void)event;
    return unused_stream(self, stream, error);
}

static refit_status unused_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                      refit_error *error)
{
    (void)self;
    (void)event;
    (void)timeout_ms;
    return rft_fail(error, REFIT_ERR_DEVICE, "unused");
}

const rft_device_ops bare_device_ops = {
    .version = RFT_DEVICE_OPS_VERSION,
    .size = sizeof bare_device_ops,
    .kind = "bare",
    .close = unused_void,
    .describe = unused_describe,
    .caps = unused_caps,
    .memory_alloc = unused_alloc,
    .memory_free = unused_free,
    .stream_open = unused_stream_open,
    .stream_close = unused_stream,
    .copy_batch = unused_copy,
    .zero = unused_zero,
    .event_open = unused_event_open,
    .event_close = unused_event_close,
    .event_record = unused_event,
    .event_join = unused_event,
    .event_wait = unused_event_wait,
};
