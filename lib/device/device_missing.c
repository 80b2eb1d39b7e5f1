/*
 * Stand-ins for the slots of a device that it does not implement, so that no caller ever tests a
 * slot for NULL. They know neither the device nor its state.
 */
#include "device/device_missing.h"

static refit_status refuse(refit_error *error, const char *what)
{
    return rft_fail(error, REFIT_ERR_UNSUPPORTED, "this kind of device has no %s", what);
}

static void no_close(void *self)
{
    (void)self;
}

static void no_describe(void *self, refit_device_info *info)
{
    (void)self;
    (void)info;
}

static void no_caps(void *self, rft_device_caps *caps)
{
    (void)self;
    (void)caps;
}

static refit_status no_memory_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    (void)self;
    (void)bytes;
    (void)out;
    return refuse(error, "memory");
}

static refit_status no_memory_free(void *self, void *memory, refit_error *error)
{
    (void)self;
    (void)memory;
    return refuse(error, "memory");
}

static refit_status no_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                               refit_error *error)
{
    (void)self;
    (void)bytes;
    (void)out;
    (void)granule;
    return refuse(error, "arenas with stable addresses");
}

static refit_status no_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    (void)self;
    (void)base;
    (void)bytes;
    return refuse(error, "arenas with stable addresses");
}

static refit_status no_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                refit_error *error)
{
    (void)freed;
    return no_commit(self, base, bytes, error);
}

/* Without a way to look, what the caller says is believed. Such a device copies across whatever
 * lies side by side. */
static refit_status no_memory_check(void *self, const void *memory, uint64_t bytes,
                                    const void **whole, refit_error *error)
{
    (void)self;
    (void)memory;
    (void)bytes;
    (void)error;
    *whole = NULL;
    return REFIT_OK;
}

static refit_status no_digest(void *self, refit_stream_ref stream, const void *memory,
                              uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)memory;
    (void)bytes;
    (void)offset;
    (void)sum;
    return refuse(error, "digests of its own");
}

static refit_status no_digest_copy(void *self, refit_stream_ref stream, void *to, const void *from,
                                   uint64_t bytes, uint64_t offset, void *sum, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)to;
    (void)from;
    (void)bytes;
    (void)offset;
    (void)sum;
    return refuse(error, "digests of its own");
}

static refit_status no_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                 const float *from, uint64_t count, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)to;
    (void)from;
    (void)count;
    return refuse(error, "casts");
}

static refit_status no_share_export(void *self, const void *memory, uint64_t bytes, rft_share *out,
                                    refit_error *error)
{
    (void)self;
    (void)memory;
    (void)bytes;
    (void)out;
    return refuse(error, "memory that other processes can map");
}

static refit_status no_share_map(void *self, const rft_share *share, void **out, refit_error *error)
{
    (void)self;
    (void)share;
    (void)out;
    return refuse(error, "memory that other processes can map");
}

static void no_share_unmap(void *self, void *memory)
{
    (void)self;
    (void)memory;
}

static void no_range(void *self, void *base, uint64_t bytes)
{
    (void)self;
    (void)base;
    (void)bytes;
}

static refit_status no_host_pin(void *self, void *memory, uint64_t bytes, refit_error *error)
{
    (void)self;
    (void)memory;
    (void)bytes;
    return refuse(error, "page-locked host memory");
}

static refit_status no_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    (void)self;
    (void)out;
    return refuse(error, "streams");
}

static refit_status no_stream_close(void *self, refit_stream_ref stream, refit_error *error)
{
    (void)self;
    (void)stream;
    return refuse(error, "streams");
}

static refit_status no_stream_call(void *self, refit_stream_ref stream, refit_stream_fn function,
                                   void *user, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)function;
    (void)user;
    return refuse(error, "calls in stream order");
}

static refit_status no_copy_batch(void *self, refit_stream_ref stream, const rft_copy *copies,
                                  uint32_t count, rft_copy_order order, refit_error *error)
{
    (void)self;
    (void)stream;
    (void)copies;
    (void)count;
    (void)order;
    return refuse(error, "copies");
}

static refit_status no_zero(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                            refit_error *error)
{
    (void)self;
    (void)stream;
    (void)memory;
    (void)bytes;
    return refuse(error, "zeroing");
}

static refit_status no_event_open(void *self, rft_event **out, refit_error *error)
{
    (void)self;
    (void)out;
    return refuse(error, "events");
}

static void no_event_close(void *self, rft_event *event)
{
    (void)self;
    (void)event;
}

static refit_status no_event_place(void *self, rft_event *event, refit_stream_ref stream,
                                   refit_error *error)
{
    (void)self;
    (void)event;
    (void)stream;
    return refuse(error, "events");
}

static refit_status no_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                  refit_error *error)
{
    (void)self;
    (void)event;
    (void)timeout_ms;
    return refuse(error, "events");
}

#define FILL(slot, stand_in)                                                                       \
    if (ops->slot == NULL) ops->slot = (stand_in)

void rft_device_fill_missing(rft_device_ops *ops)
{
    FILL(close, no_close);
    FILL(describe, no_describe);
    FILL(caps, no_caps);
    FILL(memory_alloc, no_memory_alloc);
    FILL(memory_free, no_memory_free);
    FILL(memory_check, no_memory_check);
    FILL(reserve, no_reserve);
    FILL(commit, no_commit);
    FILL(decommit, no_decommit);
    FILL(unreserve, no_range);
    FILL(host_pin, no_host_pin);
    FILL(host_unpin, no_range);
    FILL(stream_open, no_stream_open);
    FILL(stream_close, no_stream_close);
    FILL(stream_call, no_stream_call);
    FILL(copy_batch, no_copy_batch);
    FILL(zero, no_zero);
    FILL(digest, no_digest);
    FILL(digest_copy, no_digest_copy);
    FILL(cast_bf16, no_cast_bf16);
    FILL(share_export, no_share_export);
    FILL(share_map, no_share_map);
    FILL(share_unmap, no_share_unmap);
    FILL(event_open, no_event_open);
    FILL(event_close, no_event_close);
    FILL(event_record, no_event_place);
    FILL(event_join, no_event_place);
    FILL(event_wait, no_event_wait);
}
