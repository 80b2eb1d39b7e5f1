/*
 * The host device: this machine's memory driven like a device, with the asynchrony, the capacity
 * and the failures of one. It is the oracle for every other device.
 *
 * Memory, page locks, copies and arithmetic are in host_memory.c, streams and events in
 * host_stream.c. This file puts them after the slots of device.h.
 */
#include <stdio.h>

#include "base/alloc.h"
#include "device/host/host_memory.h"
#include "device/host/host_stream.h"

typedef struct host_device {
    rft_host_memory memory;
    rft_pool pool;
    rft_host_streams streams;
    uint32_t wait_most_ms; /* the limit of each wait */
} host_device;

static void host_close(void *self)
{
    host_device *host = self;
    rft_pool_close(&host->pool);
    rft_host_memory_close(&host->memory);
    rft_host_streams_close(&host->streams);
    rft_free(host);
}

static void host_describe(void *self, refit_device_info *info)
{
    host_device *host = self;
    snprintf(info->name, sizeof info->name, "host memory, %u copy threads", host->pool.threads);
    info->capacity_bytes = host->memory.capacity;
    info->used_bytes = rft_host_memory_used(&host->memory);
    info->host_addressable = 1;
    info->stable_arena = 1;
}

static void host_caps(void *self, rft_device_caps *caps)
{
    const host_device *host = self;
    *caps = (rft_device_caps){.host_addressable = true,
                              .stable_arena = true,
                              .digests = true,
                              .masters = true,
                              .batch_most = RFT_HOST_BATCH_MOST,
                              .numa_node = -1,
                              .chunk_bytes = host->memory.granule};
}

static bool host_is_lost(void *self)
{
    host_device *host = self;
    return rft_host_check_lost(&host->memory, NULL) != REFIT_OK;
}

/* May work be put on this stream? REFIT_STREAM_NONE is the calling thread. */
static refit_status check(host_device *host, refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    if (stream.native == NULL) return REFIT_OK;
    return rft_host_streams_check(&host->streams, stream, error);
}

static refit_status host_memory_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    return rft_host_memory_alloc(&host->memory, bytes, out, error);
}

static refit_status host_memory_free(void *self, void *memory, refit_error *error)
{
    host_device *host = self;
    return rft_host_memory_free(&host->memory, memory, error);
}

static refit_status host_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                                 refit_error *error)
{
    host_device *host = self;
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    return rft_host_memory_reserve(&host->memory, bytes, out, granule, error);
}

static refit_status host_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    return rft_host_memory_commit(&host->memory, base, bytes, error);
}

static refit_status host_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                  refit_error *error)
{
    host_device *host = self;
    return rft_host_memory_decommit(&host->memory, base, bytes, freed, error);
}

static void host_unreserve(void *self, void *base, uint64_t bytes)
{
    host_device *host = self;
    (void)bytes;
    rft_host_memory_unreserve(&host->memory, base);
}

static refit_status host_pin(void *self, void *memory, uint64_t bytes, bool read_only,
                             refit_error *error)
{
    host_device *host = self;
    (void)read_only; /* mlock asks nothing else of either */
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    return rft_host_pin(memory, bytes, error);
}

static void host_unpin(void *self, void *memory, uint64_t bytes)
{
    (void)self;
    rft_host_unpin(memory, bytes);
}

static refit_status host_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    return rft_host_streams_start(&host->streams, &host->memory, &host->pool, out, error);
}

static refit_status host_stream_close(void *self, refit_stream_ref stream, refit_error *error)
{
    host_device *host = self;
    return rft_host_streams_end(&host->streams, stream, error);
}

static refit_status host_stream_call(void *self, refit_stream_ref stream, refit_stream_fn function,
                                     void *user, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) {
        function(user);
        return REFIT_OK;
    }
    return rft_host_stream_call(stream.native, function, user, error);
}

/* The stream's order is always kept, so RFT_COPY_ANY allows nothing more. */
static refit_status host_copy_batch(void *self, refit_stream_ref stream, const rft_copy *copies,
                                    uint32_t count, rft_copy_order order, refit_error *error)
{
    host_device *host = self;
    (void)order;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) {
        return rft_host_copy_now(&host->memory, &host->pool, copies, count, error);
    }
    RFT_TRY(rft_host_check_copies(&host->memory, copies, count, error));
    return rft_host_stream_copy(stream.native, copies, count, error);
}

static refit_status host_zero(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                              refit_error *error)
{
    rft_copy zeroed = {.to = memory, .bytes = bytes};
    return host_copy_batch(self, stream, &zeroed, 1, RFT_COPY_STREAM, error);
}

static refit_status host_digest(void *self, refit_stream_ref stream, const void *memory,
                                uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) {
        return rft_host_digest_now(&host->memory, memory, bytes, offset, sum, error);
    }
    return rft_host_stream_digest(stream.native, memory, bytes, offset, sum, error);
}

static refit_status host_digest_list(void *self, refit_stream_ref stream, rft_digest_job *jobs,
                                     uint32_t count, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) return rft_host_digest_list_now(&host->memory, jobs, count, error);
    return rft_host_stream_digest_list(stream.native, jobs, count, error);
}

static refit_status host_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                   const float *from, uint64_t count, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) {
        return rft_host_cast_now(&host->memory, to, from, count, error);
    }
    return rft_host_stream_cast(stream.native, to, from, count, error);
}

static refit_status host_master_encode(void *self, refit_stream_ref stream,
                                       const rft_master_job *job, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) return rft_host_encode_now(&host->memory, &host->pool, job, error);
    return rft_host_stream_encode(stream.native, job, error);
}

static refit_status host_master_decode(void *self, refit_stream_ref stream,
                                       const rft_master_job *job, refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) return rft_host_decode_now(&host->memory, &host->pool, job, error);
    return rft_host_stream_decode(stream.native, job, error);
}

static refit_status host_event_open(void *self, rft_event **out, refit_error *error)
{
    host_device *host = self;
    rft_host_event *event;
    RFT_TRY(rft_host_check_lost(&host->memory, error));
    RFT_TRY(rft_host_event_open(&event, error));
    *out = (rft_event *)event;
    return REFIT_OK;
}

static void host_event_close(void *self, rft_event *event)
{
    (void)self;
    rft_host_event_close((rft_host_event *)event);
}

static refit_status host_event_record(void *self, rft_event *event, refit_stream_ref stream,
                                      refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) {
        rft_host_event_pass((rft_host_event *)event);
        return REFIT_OK;
    }
    return rft_host_stream_record(stream.native, (rft_host_event *)event, error);
}

static refit_status host_event_join(void *self, rft_event *event, refit_stream_ref stream,
                                    refit_error *error)
{
    host_device *host = self;
    RFT_TRY(check(host, stream, error));
    if (stream.native == NULL) {
        return rft_host_event_wait((rft_host_event *)event, host->wait_most_ms, error);
    }
    return rft_host_stream_join(stream.native, (rft_host_event *)event, error);
}

static refit_status host_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                    refit_error *error)
{
    host_device *host = self;
    RFT_TRY(rft_host_event_wait((rft_host_event *)event, timeout_ms, error));
    return rft_host_check_lost(&host->memory, error);
}

static const rft_device_ops host_ops = {
    .version = RFT_DEVICE_OPS_VERSION,
    .size = sizeof(rft_device_ops),
    .kind = "host",
    .close = host_close,
    .describe = host_describe,
    .caps = host_caps,
    .is_lost = host_is_lost,
    .memory_alloc = host_memory_alloc,
    .memory_free = host_memory_free,
    .reserve = host_reserve,
    .commit = host_commit,
    .decommit = host_decommit,
    .unreserve = host_unreserve,
    .host_pin = host_pin,
    .host_unpin = host_unpin,
    .stream_open = host_stream_open,
    .stream_close = host_stream_close,
    .stream_call = host_stream_call,
    .copy_batch = host_copy_batch,
    .zero = host_zero,
    .digest = host_digest,
    .digest_list = host_digest_list,
    .cast_bf16 = host_cast_bf16,
    .master_encode = host_master_encode,
    .master_decode = host_master_decode,
    .event_open = host_event_open,
    .event_close = host_event_close,
    .event_record = host_event_record,
    .event_join = host_event_join,
    .event_wait = host_event_wait,
};

static refit_status open_parts(host_device *host, uint64_t capacity, const refit_config *config,
                               refit_error *error)
{
    refit_status status = REFIT_OK;
    RFT_TRY(rft_host_streams_open(&host->streams, error));
    RFT_TRY_GOTO(rft_host_memory_open(&host->memory, capacity, error), close_streams);
    RFT_TRY_GOTO(rft_host_copy_open(&host->pool, config->offload_copy_threads, error),
                 close_memory);
    return REFIT_OK;

close_memory:
    rft_host_memory_close(&host->memory);
close_streams:
    rft_host_streams_close(&host->streams);
    return status;
}

refit_status rft_device_host_open(const char *rest, const refit_config *config, refit_device **out,
                                  refit_error *error)
{
    uint64_t capacity;
    RFT_REFUSE_IF(!rft_device_read_capacity(rest, &capacity), error, REFIT_ERR_INVALID,
                  "\"host:%.64s\" cannot be read: say \"host\" or \"host:capacity=2GiB\", a whole "
                  "number > 0 of bytes, KiB, MiB, GiB or TiB",
                  rest);
    host_device *host = rft_calloc(1, sizeof *host);
    RFT_REFUSE_IF(host == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a device");
    refit_status status = REFIT_OK;
    host->wait_most_ms = config->offload_timeout_ms;
    RFT_TRY_GOTO(open_parts(host, capacity, config, error), free_host);
    RFT_TRY_GOTO(rft_device_make(&host_ops, host, out, error), close_host);
    return REFIT_OK;

close_host:
    host_close(host);
    return status;
free_host:
    rft_free(host);
    return status;
}
