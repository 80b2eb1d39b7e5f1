/*
 * The slots of the CUDA device: each enters the context, and a part does the work there.
 * Work on the calling thread goes through an internal stream (cuda_stream.h).
 */
#include "device/cuda_slots.h"

#include "device/cuda_compute.h"
#include "device/cuda_copy.h"
#include "device/cuda_event.h"
#include "device/cuda_memory.h"
#include "device/cuda_pin.h"
#include "device/cuda_pointer.h"
#include "device/cuda_reserve.h"
#include "device/cuda_share.h"
#include "device/cuda_stream.h"

static refit_status cuda_memory_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_memory_alloc(cuda, bytes, out, error));
}

static refit_status cuda_memory_free(void *self, void *memory, refit_error *error)
{
    return rft_cuda_memory_free(self, memory, error);
}

static refit_status cuda_memory_check(void *self, const void *memory, uint64_t bytes,
                                      const void **whole, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_pointer_check(cuda, memory, bytes, whole, error));
}

static refit_status cuda_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                                 refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_reserve(cuda, bytes, out, granule, error));
}

static refit_status cuda_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_commit(cuda, base, bytes, error));
}

static refit_status cuda_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                  refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_decommit(cuda, base, bytes, freed, error));
}

static void cuda_unreserve(void *self, void *base, uint64_t bytes)
{
    (void)bytes;
    rft_cuda_unreserve(self, base);
}

static refit_status cuda_host_pin(void *self, void *memory, uint64_t bytes, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_pin(cuda, memory, bytes, error));
}

static void cuda_host_unpin(void *self, void *memory, uint64_t bytes)
{
    (void)bytes;
    rft_cuda_unpin(self, memory);
}

static refit_status cuda_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_stream_open(cuda, out, error));
}

static refit_status cuda_stream_close(void *self, refit_stream_ref stream, refit_error *error)
{
    return rft_cuda_stream_close(self, stream, error);
}

static refit_status cuda_stream_call(void *self, refit_stream_ref stream, refit_stream_fn function,
                                     void *user, refit_error *error)
{
    rft_cuda_device *cuda = self;
    if (stream.native == NULL) {
        function(user);
        return REFIT_OK;
    }
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_stream_call(cuda, stream, function, user, error));
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
    RFT_CUDA_GUARDED(cuda, error, copy_batch(cuda, stream, copies, count, order, error));
}

static refit_status zero(rft_cuda_device *cuda, refit_stream_ref stream, void *memory,
                         uint64_t bytes, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    rft_cu_result result = cuda->driver.fill((uintptr_t)memory, 0, bytes, work.stream);
    refit_status status =
        rft_cuda_check_copy(&cuda->driver, result, error, "memory could not be zeroed");
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status cuda_zero(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                              refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, zero(cuda, stream, memory, bytes, error));
}

static refit_status cuda_digest(void *self, refit_stream_ref stream, const void *memory,
                                uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_digest(cuda, stream, memory, bytes, offset, sum, error));
}

static refit_status cuda_digest_copy(void *self, refit_stream_ref stream, void *to,
                                     const void *from, uint64_t bytes, uint64_t offset, void *sum,
                                     refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error,
                     rft_cuda_digest_copy(cuda, stream, to, from, bytes, offset, sum, error));
}

static refit_status cuda_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                   const float *from, uint64_t count, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_cast_bf16(cuda, stream, to, from, count, error));
}

static refit_status cuda_share_export(void *self, const void *memory, uint64_t bytes,
                                      rft_share *out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_share_export(cuda, memory, bytes, out, error));
}

static refit_status cuda_share_map(void *self, const rft_share *share, void **out,
                                   refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_share_map(cuda, share, out, error));
}

static void cuda_share_unmap(void *self, void *memory)
{
    rft_cuda_share_unmap(self, memory);
}

static refit_status cuda_event_open(void *self, rft_event **out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_event_open(cuda, out, error));
}

static void cuda_event_close(void *self, rft_event *event)
{
    rft_cuda_event_close(self, event);
}

static refit_status cuda_event_record(void *self, rft_event *event, refit_stream_ref stream,
                                      refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_event_record(cuda, event, stream, error));
}

static refit_status cuda_event_join(void *self, rft_event *event, refit_stream_ref stream,
                                    refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_event_join(cuda, event, stream, error));
}

static refit_status cuda_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                    refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_event_wait(cuda, event, timeout_ms, error));
}

void rft_cuda_slots_fill(rft_device_ops *ops)
{
    ops->memory_alloc = cuda_memory_alloc;
    ops->memory_free = cuda_memory_free;
    ops->memory_check = cuda_memory_check;
    ops->reserve = cuda_reserve;
    ops->commit = cuda_commit;
    ops->decommit = cuda_decommit;
    ops->unreserve = cuda_unreserve;
    ops->host_pin = cuda_host_pin;
    ops->host_unpin = cuda_host_unpin;
    ops->stream_open = cuda_stream_open;
    ops->stream_close = cuda_stream_close;
    ops->stream_call = cuda_stream_call;
    ops->copy_batch = cuda_copy_batch;
    ops->zero = cuda_zero;
    ops->digest = cuda_digest;
    ops->digest_copy = cuda_digest_copy;
    ops->cast_bf16 = cuda_cast_bf16;
    ops->share_export = cuda_share_export;
    ops->share_map = cuda_share_map;
    ops->share_unmap = cuda_share_unmap;
    ops->event_open = cuda_event_open;
    ops->event_close = cuda_event_close;
    ops->event_record = cuda_event_record;
    ops->event_join = cuda_event_join;
    ops->event_wait = cuda_event_wait;
}
