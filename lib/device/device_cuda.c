/*
 * The CUDA device: a GPU through its driver, in the primary context that PyTorch uses too.
 *
 * The parts do the work, a file each: memory, pins, streams, events, copies, kernels. This file
 * opens and closes them and puts them behind the slots of device.h; every slot is one visit to the
 * context (cuda_device.h). A part that this GPU or driver cannot have stays NULL.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "device/cuda_compute.h"
#include "device/cuda_context.h"
#include "device/cuda_copy.h"
#include "device/cuda_event.h"
#include "device/cuda_kernels.h"
#include "device/cuda_memory.h"
#include "device/cuda_pin.h"
#include "device/cuda_pointer.h"
#include "device/cuda_reserve.h"
#include "device/cuda_share.h"
#include "device/cuda_stream.h"
#include "device/device_spec.h"
#include "device/device_uuid.h"

static void close_parts(rft_cuda_device *cuda)
{
    rft_cuda_shares_close(cuda, cuda->shares);
    rft_cuda_copier_close(cuda, cuda->copier);
    rft_cuda_compute_close(cuda, cuda->compute);
    rft_cuda_kernels_close(cuda, cuda->kernels);
    rft_cuda_streams_close(cuda, cuda->streams);
    rft_cuda_pins_close(cuda, cuda->pins);
    rft_cuda_ranges_close(cuda, cuda->ranges);
    rft_cuda_memory_close(cuda, cuda->memory);
}

/* Inside a visit. On failure close_parts closes what is there. */
static refit_status open_parts(rft_cuda_device *cuda, uint64_t capacity, refit_error *error)
{
    RFT_TRY(rft_cuda_memory_open(cuda, capacity, &cuda->memory, error));
    RFT_TRY(rft_cuda_ranges_open(cuda, &cuda->ranges, error));
    RFT_TRY(rft_cuda_pins_open(cuda, &cuda->pins, error));
    RFT_TRY(rft_cuda_streams_open(cuda, &cuda->streams, error));
    RFT_TRY(rft_cuda_kernels_open(cuda, &cuda->kernels, error));
    RFT_TRY(rft_cuda_compute_open(cuda, &cuda->compute, error));
    RFT_TRY(rft_cuda_copier_open(cuda, &cuda->copier, error));
    RFT_TRY(rft_cuda_shares_open(cuda, &cuda->shares, error));
    return REFIT_OK;
}

static void cuda_close(void *self)
{
    rft_cuda_device *cuda = self;
    close_parts(cuda);
    rft_cuda_context_close(cuda);
    rft_cuda_driver_close(&cuda->driver);
    rft_free(cuda);
}

static void cuda_describe(void *self, refit_device_info *info)
{
    rft_cuda_device *cuda = self;
    snprintf(info->name, sizeof info->name, "%s", cuda->facts.name);
    info->capacity_bytes = rft_cuda_memory_capacity(cuda->memory);
    info->used_bytes = rft_cuda_memory_used(cuda->memory);
    info->stable_arena = cuda->ranges != NULL;
    info->kernels = cuda->kernels != NULL;
    info->numa_node = cuda->facts.numa_node;
    info->driver_version = cuda->driver.version;
    info->small_bytes = rft_cuda_copier_small_bytes(cuda);
    rft_uuid_print(cuda->facts.uuid.bytes, info->uuid);
}

static void cuda_caps(void *self, rft_device_caps *caps)
{
    const rft_cuda_device *cuda = self;
    *caps = (rft_device_caps){.stable_arena = cuda->ranges != NULL,
                              .chunk_bytes = rft_cuda_ranges_chunk(cuda->ranges),
                              .needs_pinned = true,
                              .digests = cuda->kernels != NULL,
                              .shares = rft_cuda_can_share(cuda),
                              .batch_most = RFT_CUDA_BATCH_MOST,
                              .numa_node = cuda->facts.numa_node,
                              .ordinal = cuda->ordinal};
    memcpy(caps->uuid, cuda->facts.uuid.bytes, sizeof caps->uuid);
}

static refit_status cuda_memory_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_memory_alloc(cuda, bytes, out, error));
}

static refit_status cuda_memory_free(void *self, void *memory, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_memory_free(cuda, memory, error));
}

static refit_status cuda_memory_check(void *self, const void *memory, uint64_t bytes,
                                      const void **whole, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_pointer_check(cuda, memory, bytes, whole, error));
}

static refit_status cuda_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                                 refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_reserve(cuda, bytes, out, granule, error));
}

static refit_status cuda_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_commit(cuda, base, bytes, error));
}

static refit_status cuda_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                  refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_decommit(cuda, base, bytes, freed, error));
}

static void cuda_unreserve(void *self, void *base, uint64_t bytes)
{
    (void)bytes;
    rft_cuda_unreserve(self, base);
}

static refit_status cuda_host_pin(void *self, void *memory, uint64_t bytes, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_pin(cuda, memory, bytes, error));
}

static void cuda_host_unpin(void *self, void *memory, uint64_t bytes)
{
    (void)bytes;
    rft_cuda_unpin(self, memory);
}

static refit_status cuda_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_stream_open(cuda, out, error));
}

static refit_status cuda_stream_close(void *self, refit_stream_ref stream, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_stream_close(cuda, stream, error));
}

static refit_status cuda_stream_call(void *self, refit_stream_ref stream, refit_stream_fn function,
                                     void *user, refit_error *error)
{
    rft_cuda_device *cuda = self;
    if (stream.native == NULL) {
        function(user);
        return REFIT_OK;
    }
    RFT_CUDA_VISIT(cuda, error, rft_cuda_stream_call(cuda, stream, function, user, error));
}

static refit_status copy_batch(rft_cuda_device *cuda, refit_stream_ref stream,
                               const rft_copy *copies, uint32_t count, rft_copy_order order,
                               refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status = rft_cuda_copy_batch(cuda, work.stream, copies, count, order, error);
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status cuda_copy_batch(void *self, refit_stream_ref stream, const rft_copy *copies,
                                    uint32_t count, rft_copy_order order, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, copy_batch(cuda, stream, copies, count, order, error));
}

static refit_status zero(rft_cuda_device *cuda, refit_stream_ref stream, void *memory,
                         uint64_t bytes, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    rft_cu_result result = cuda->driver.fill((uintptr_t)memory, 0, bytes, work.stream);
    refit_status status =
        rft_cuda_check(&cuda->driver, result, error, "memory could not be zeroed");
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status cuda_zero(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                              refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, zero(cuda, stream, memory, bytes, error));
}

static refit_status cuda_digest(void *self, refit_stream_ref stream, const void *memory,
                                uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_digest(cuda, stream, memory, bytes, offset, sum, error));
}

static refit_status cuda_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                   const float *from, uint64_t count, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_cast_bf16(cuda, stream, to, from, count, error));
}

static refit_status cuda_share_export(void *self, const void *memory, uint64_t bytes,
                                      rft_share *out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_share_export(cuda, memory, bytes, out, error));
}

static refit_status cuda_share_map(void *self, const rft_share *share, void **out,
                                   refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_share_map(cuda, share, out, error));
}

static void cuda_share_unmap(void *self, void *memory)
{
    rft_cuda_share_unmap(self, memory);
}

static refit_status cuda_event_open(void *self, rft_event **out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_event_open(cuda, out, error));
}

static void cuda_event_close(void *self, rft_event *event)
{
    rft_cuda_event_close(self, event);
}

static refit_status cuda_event_record(void *self, rft_event *event, refit_stream_ref stream,
                                      refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_event_record(cuda, event, stream, error));
}

static refit_status cuda_event_join(void *self, rft_event *event, refit_stream_ref stream,
                                    refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_event_join(cuda, event, stream, error));
}

static refit_status cuda_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                    refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_VISIT(cuda, error, rft_cuda_event_wait(cuda, event, timeout_ms, error));
}

static const rft_device_ops cuda_ops = {
    .version = RFT_DEVICE_OPS_VERSION,
    .size = sizeof(rft_device_ops),
    .kind = "cuda",
    .close = cuda_close,
    .describe = cuda_describe,
    .caps = cuda_caps,
    .memory_alloc = cuda_memory_alloc,
    .memory_free = cuda_memory_free,
    .memory_check = cuda_memory_check,
    .reserve = cuda_reserve,
    .commit = cuda_commit,
    .decommit = cuda_decommit,
    .unreserve = cuda_unreserve,
    .host_pin = cuda_host_pin,
    .host_unpin = cuda_host_unpin,
    .stream_open = cuda_stream_open,
    .stream_close = cuda_stream_close,
    .stream_call = cuda_stream_call,
    .copy_batch = cuda_copy_batch,
    .zero = cuda_zero,
    .digest = cuda_digest,
    .cast_bf16 = cuda_cast_bf16,
    .share_export = cuda_share_export,
    .share_map = cuda_share_map,
    .share_unmap = cuda_share_unmap,
    .event_open = cuda_event_open,
    .event_close = cuda_event_close,
    .event_record = cuda_event_record,
    .event_join = cuda_event_join,
    .event_wait = cuda_event_wait,
};

/* "", "3", "3:capacity=2GiB". */
static refit_status read_rest(const char *rest, int *ordinal, uint64_t *capacity,
                              refit_error *error)
{
    size_t digits = strspn(rest, "0123456789");
    bool more = digits > 0 && rest[digits] == ':' && rest[digits + 1] != '\0';
    bool known = digits < 6 && (more || rest[digits] == '\0');
    const char *options = more ? rest + digits + 1 : "";
    RFT_REFUSE_IF(!known || !rft_device_spec_capacity(options, capacity), error, REFIT_ERR_INVALID,
                  "\"cuda:%.64s\" cannot be read: say \"cuda\", \"cuda:0\" or "
                  "\"cuda:0:capacity=2GiB\"",
                  rest);
    *ordinal = atoi(rest);
    return REFIT_OK;
}

static refit_status open_inside(rft_cuda_device *cuda, uint64_t capacity, refit_error *error)
{
    RFT_CUDA_VISIT(cuda, error, open_parts(cuda, capacity, error));
}

static refit_status open_all(rft_cuda_device *cuda, int ordinal, uint64_t capacity,
                             refit_device **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    RFT_TRY(rft_cuda_driver_open(&cuda->driver, error));
    RFT_TRY_GOTO(rft_cuda_context_open(cuda, ordinal, error), close_driver);
    RFT_TRY_GOTO(open_inside(cuda, capacity, error), close_parts);
    RFT_TRY_GOTO(rft_device_make(&cuda_ops, cuda, out, error), close_parts);
    return REFIT_OK;

close_parts:
    close_parts(cuda);
    rft_cuda_context_close(cuda);
close_driver:
    rft_cuda_driver_close(&cuda->driver);
    return status;
}

refit_status rft_device_cuda_open(const char *rest, const refit_config *config, refit_device **out,
                                  refit_error *error)
{
    int ordinal = 0;
    uint64_t capacity = UINT64_MAX;
    RFT_TRY(read_rest(rest, &ordinal, &capacity, error));
    rft_cuda_device *cuda = rft_calloc(1, sizeof *cuda);
    RFT_REFUSE_IF(cuda == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a device");
    cuda->config = *config;
    refit_status status = open_all(cuda, ordinal, capacity, out, error);
    if (status != REFIT_OK) rft_free(cuda);
    return status;
}
