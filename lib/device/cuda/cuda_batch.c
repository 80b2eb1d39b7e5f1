/*
 * Batches of copies, for whichever call the driver has: cuMemcpyBatchAsync as of 13.0, as of 12.8
 * with its other signature, or cuMemcpyAsync for each.
 *
 * One set of attributes serves a whole batch, since drivers disagree about how several are counted.
 * Order ANY relaxes the reading of sources only; it is passed on if all of them are host memory, as
 * the memory of a device may still be written by the work before.
 *
 * A batch takes addresses as they are, where a copy by itself translates them: where the GPU has
 * registered memory at other addresses than the host (WSL2), a batch would lose the context. One
 * that the driver refuses is copied one by one: copies may be repeated, and the one that is at
 * fault is then the one that fails.
 */
#include "device/cuda/cuda_batch.h"

#include "base/log.h"

refit_status rft_cuda_copy_one(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                               rft_cu_ptr from, uint64_t bytes, refit_error *error)
{
    return rft_cuda_check_copy(&cuda->driver, cuda->driver.copy(to, from, bytes, stream), error,
                               "a copy could not be queued");
}

void rft_cuda_batch_begin(rft_cuda_batch *batch, rft_cu_stream stream, rft_copy_order order)
{
    batch->stream = stream;
    batch->order = order;
    batch->count = 0;
    batch->from_host = true;
}

refit_status rft_cuda_batch_add(rft_cuda_device *cuda, rft_cuda_batch *batch, rft_cu_ptr to,
                                rft_cu_ptr from, uint64_t bytes, bool from_host, refit_error *error)
{
    if (batch->count == RFT_CUDA_DESCRIPTORS) RFT_TRY(rft_cuda_batch_flush(cuda, batch, error));
    batch->to[batch->count] = to;
    batch->from[batch->count] = from;
    batch->bytes[batch->count] = bytes;
    batch->count++;
    batch->from_host = batch->from_host && from_host;
    return REFIT_OK;
}

static refit_status put_singly(rft_cuda_device *cuda, const rft_cuda_batch *batch,
                               refit_error *error)
{
    for (uint32_t i = 0; i < batch->count; i++) {
        RFT_TRY(rft_cuda_copy_one(cuda, batch->stream, batch->to[i], batch->from[i],
                                  batch->bytes[i], error));
    }
    return REFIT_OK;
}

static rft_cu_result call_batch(rft_cuda_device *cuda, rft_cuda_batch *batch)
{
    bool any = batch->order == RFT_COPY_ANY && batch->from_host;
    rft_cu_copy_attributes attributes = {.source_order =
                                             any ? RFT_CU_SOURCE_ANY : RFT_CU_SOURCE_STREAM};
    size_t start = 0, failed = 0;
    if (cuda->driver.copy_batch != NULL) {
        return cuda->driver.copy_batch(batch->to, batch->from, batch->bytes, batch->count,
                                       &attributes, &start, 1, batch->stream);
    }
    return cuda->driver.copy_batch_12080(batch->to, batch->from, batch->bytes, batch->count,
                                         &attributes, &start, 1, &failed, batch->stream);
}

static bool takes_batches(const rft_cuda_device *cuda)
{
    const rft_cuda_driver *driver = &cuda->driver;
    bool known = driver->copy_batch != NULL || driver->copy_batch_12080 != NULL;
    return known && cuda->facts.host_pointers;
}

static void tell_refused(rft_cuda_device *cuda, rft_cu_result result)
{
    if (atomic_exchange(&cuda->batch_refused, true)) return;
    rft_log(REFIT_LOG_WARNING,
            "cuda:%d: the driver refuses a batch of copies (%s), which are queued one by one",
            cuda->ordinal, rft_cuda_name(&cuda->driver, result));
}

static refit_status put(rft_cuda_device *cuda, rft_cuda_batch *batch, refit_error *error)
{
    if (batch->count <= 1 || !takes_batches(cuda)) return put_singly(cuda, batch, error);
    rft_cu_result result = call_batch(cuda, batch);
    if (result != RFT_CU_NOT_SUPPORTED && result != RFT_CU_INVALID_VALUE) {
        return rft_cuda_check(&cuda->driver, result, error,
                              "a batch of copies could not be queued");
    }
    refit_status status = put_singly(cuda, batch, error);
    if (status == REFIT_OK) tell_refused(cuda, result);
    return status;
}

refit_status rft_cuda_batch_flush(rft_cuda_device *cuda, rft_cuda_batch *batch, refit_error *error)
{
    refit_status status = put(cuda, batch, error);
    batch->count = 0;
    batch->from_host = true;
    return status;
}
