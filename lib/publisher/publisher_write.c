/*
 * Writing a tensor of a version: from wherever it lies to wherever workers read it.
 *
 *     from \ to            the store's slot               the GPU's slot, if there is one
 *     host memory          by the CPU, digest on the way  copied up by the device
 *     the same GPU         copied down, page-locked       copied within the device
 *     another device       copied down                    and up again from there
 *
 * Copies of a device go on a stream of the publisher's own, behind the caller's; nothing waits for
 * the caller's work before they are put there, and write returns when the caller's memory may
 * change. What is then still to be done for a tensor by the CPU (its digest where the device takes
 * none, the comparison with the version before) is done while the next one is being copied.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "base/log.h"
#include "device/device_uuid.h"
#include "kernels/digest.h"
#include "net/wake_fd.h"
#include "publisher/publisher_write.h"

refit_status rft_publisher_check_writing(refit_publisher *publisher, const char *verb,
                                         refit_error *error)
{
    rft_lock(&publisher->lock);
    bool writing = publisher->server.transaction.state == RFT_TRANSACTION_WRITING;
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(!writing, error, REFIT_ERR_STATE,
                  "there is no version to %s: call refit_publisher_begin first", verb);
    return REFIT_OK;
}

static void frame_ready(void *user, uint32_t frame)
{
    refit_publisher *publisher = user;
    rft_lock(&publisher->lock);
    rft_store_add_ready(publisher->store, frame);
    bool wanted = rft_server_wants_frames(&publisher->server);
    rft_unlock(&publisher->lock);
    if (wanted) rft_wake_fd_set(publisher->wake);
}

void rft_publisher_settle(refit_publisher *publisher)
{
    rft_unsettled *last = &publisher->unsettled;
    for (uint32_t i = 0; i < last->count; i++) {
        rft_store_settle(publisher->store, last->tensors[i], last->digested ? &last->sums[i] : NULL,
                         frame_ready, publisher);
    }
    last->count = 0;
}

/* ---- Carriers */

/* Idle, or not: then what was under way in an earlier call still is. */
static refit_status await_idle(const refit_publisher *publisher, rft_copy_queue *copy_queue,
                               refit_error *error)
{
    if (!rft_copy_queue_is_busy(copy_queue)) return REFIT_OK;
    refit_error earlier;
    refit_status status =
        rft_copy_queue_wait(copy_queue, publisher->config.broadcast_stage_timeout_ms, &earlier);
    if (!rft_copy_queue_is_busy(copy_queue)) return REFIT_OK; /* its failure was that call's */
    return rft_fail_sub(error, status, earlier.subsystem, "an earlier write is still under way: %s",
                        earlier.text);
}

rft_buffer *rft_write_buffer(const refit_publisher *publisher)
{
    const rft_store *store = publisher->store;
    return store->hosted ? store->slots[store->writing_slot].buffer : NULL;
}

/* Whatever brings a tensor now, and from wherever: a late copy of an earlier call would write over
 * it. */
refit_status rft_write_await_earlier(const refit_publisher *publisher, const rft_gpu_block *block,
                                     refit_error *error)
{
    rft_copy_queue *copy_queues[] = {publisher->copy_queue, publisher->gpu_copy_queue};
    const rft_buffer *buffer = rft_write_buffer(publisher);
    for (size_t i = 0; i < sizeof copy_queues / sizeof *copy_queues; i++) {
        bool here = (buffer != NULL && rft_copy_queue_holds(copy_queues[i], &buffer->pending)) ||
                    (block != NULL && rft_copy_queue_holds(copy_queues[i], &block->pending));
        if (here) RFT_TRY(await_idle(publisher, copy_queues[i], error));
    }
    return REFIT_OK;
}

/* The carrier of `device` in `*place`, which may hold another device's. */
refit_status rft_write_get_copy_queue(const refit_publisher *publisher, refit_device *device,
                                      rft_copy_queue **place, refit_error *error)
{
    RFT_TRY(await_idle(publisher, *place, error));
    if (*place != NULL && rft_copy_queue_device(*place) == device) return REFIT_OK;
    (void)rft_copy_queue_close(*place, 0);
    *place = NULL;
    return rft_copy_queue_open(device, &publisher->config, place, error);
}

bool rft_write_is_gpu(const refit_publisher *publisher, refit_device *device)
{
    rft_device_caps caps = rft_device_get_caps(device);
    return publisher->gpu != NULL && rft_uuid_equal(caps.uuid, publisher->gpu->uuid);
}

/* ---- Page-locks */

/* Where the memory cannot be locked, copies are slower and the figures say so. */
void rft_write_pin_slot(refit_publisher *publisher, refit_device *device)
{
    refit_error why;
    rft_store *store = publisher->store;
    rft_buffer *buffer = store->slots[store->writing_slot].buffer;
    if (buffer->pin_tried || !rft_device_get_caps(device).needs_pinned) return;
    buffer->pin_tried = true;
    refit_status status =
        rft_pinning_open(&buffer->pinning, device, buffer->segment.memory, buffer->segment.bytes,
                         publisher->config.offload_slab_bytes, &why);
    if (status != REFIT_OK) {
        rft_log(REFIT_LOG_WARNING, "the store cannot be page-locked, copies to it are slow: %s",
                why.text);
    }
    rft_publisher_count_pinned(publisher);
}

void rft_publisher_count_pinned(refit_publisher *publisher)
{
    const rft_store *store = publisher->store;
    uint64_t bytes = 0;
    for (uint32_t i = 0; store->hosted && i < store->slot_count; i++) {
        if (store->slots[i].buffer != NULL) bytes += store->slots[i].buffer->pinning.bytes;
    }
    rft_lock(&publisher->lock);
    publisher->pinned_bytes = bytes;
    rft_unlock(&publisher->lock);
}

/* ---- From a device */

/* The block is of the device that the carrier works on. */
static refit_status issue(rft_copy_queue *copy_queue, const rft_write_job *job,
                          const rft_buffer *buffer, bool same_gpu, refit_error *error)
{
    RFT_TRY(rft_copy_queue_follow(copy_queue, job->after, error));
    if (job->image != NULL) {
        RFT_TRY(rft_copy_queue_copy(copy_queue, job->image, job->memory, job->bytes,
                                    &buffer->pinning, error));
    }
    if (same_gpu) {
        RFT_TRY(
            rft_copy_queue_copy_within(copy_queue, job->shared, job->memory, job->bytes, error));
    }
    bool needed = rft_copy_queue_digests(copy_queue) || job->image == NULL;
    return needed ? rft_copy_queue_digest(copy_queue, job->memory, job->bytes, 0, error) : REFIT_OK;
}

/* The first failure is the story, but what was put on the stream before it is waited for. */
refit_status rft_write_finish(const refit_publisher *publisher, rft_copy_queue *copy_queue,
                              refit_status issued, refit_error *error)
{
    refit_error later;
    uint32_t timeout_ms = publisher->config.broadcast_stage_timeout_ms;
    refit_status status =
        rft_copy_queue_wait(copy_queue, timeout_ms, issued == REFIT_OK ? error : &later);
    return rft_keep_first(issued, status);
}

/* Between host memory (the store's own, or the caller's) and the GPU's block. */
static refit_status carry_up(refit_publisher *publisher, const rft_write_job *job, const void *from,
                             refit_error *error)
{
    rft_copy_queue **place = &publisher->gpu_copy_queue;
    rft_buffer *buffer = rft_write_buffer(publisher);
    RFT_TRY(rft_write_get_copy_queue(publisher, publisher->gpu->device, place, error));
    rft_copy_queue_hold(*place, &job->block->pending);
    if (from == job->image) rft_copy_queue_hold(*place, &buffer->pending);
    refit_status status = rft_copy_queue_copy(*place, job->shared, from, job->bytes,
                                              buffer == NULL ? NULL : &buffer->pinning, error);
    return rft_write_finish(publisher, *place, status, error);
}

static refit_status bring(refit_publisher *publisher, const rft_write_job *job, uint64_t *sum,
                          bool *digested, refit_error *error)
{
    bool same_gpu = job->block != NULL && rft_write_is_gpu(publisher, job->device);
    rft_copy_queue **place = same_gpu ? &publisher->gpu_copy_queue : &publisher->copy_queue;
    rft_buffer *buffer = rft_write_buffer(publisher);
    RFT_TRY(rft_write_get_copy_queue(publisher, job->device, place, error));
    if (buffer != NULL) rft_copy_queue_hold(*place, &buffer->pending);
    if (same_gpu) rft_copy_queue_hold(*place, &job->block->pending);
    refit_status status = issue(*place, job, buffer, same_gpu, error);
    rft_publisher_settle(publisher);
    RFT_TRY(rft_write_finish(publisher, *place, status, error));
    *digested = rft_copy_queue_digests(*place) || job->image == NULL;
    *sum = rft_copy_queue_sum(*place);
    bool further = job->block != NULL && !same_gpu;
    return further ? carry_up(publisher, job, job->image, error) : REFIT_OK;
}

refit_status rft_write_check_source(const refit_publisher *publisher, const rft_write_job *job,
                                    refit_error *error)
{
    const void *whole;
    char theirs[RFT_UUID_TEXT_BYTES], ours[RFT_UUID_TEXT_BYTES];
    RFT_TRY(rft_device_memory_check(job->device, job->memory, job->bytes, &whole, error));
    if (publisher->store->hosted || rft_write_is_gpu(publisher, job->device)) return REFIT_OK;
    rft_uuid_print(rft_device_get_caps(job->device).uuid, theirs);
    rft_uuid_print(publisher->gpu->uuid, ours);
    return rft_fail(error, REFIT_ERR_INVALID,
                    "the tensor lies on %s, but broadcast.gpu is require and the workers are on "
                    "%s: copy it there first",
                    theirs, ours);
}

static refit_status write_from_device(refit_publisher *publisher, rft_write_job *job,
                                      refit_error *error)
{
    uint64_t sum = 0;
    bool digested = false;
    if (job->bytes > 0) {
        RFT_TRY(rft_write_check_source(publisher, job, error));
        if (publisher->store->hosted) rft_write_pin_slot(publisher, job->device);
        job->image = rft_store_prepare(publisher->store, job->tensor);
        RFT_TRY(bring(publisher, job, &sum, &digested, error));
    } else {
        rft_publisher_settle(publisher);
    }
    rft_store_land(publisher->store, job->tensor);
    publisher->unsettled.count = 1;
    publisher->unsettled.digested = digested;
    publisher->unsettled.tensors[0] = job->tensor;
    publisher->unsettled.sums[0] = sum;
    return REFIT_OK;
}

/* ---- From the host */

/* Waits until what the caller has put on the stream is done. */
static refit_status await_stream(const refit_publisher *publisher, const rft_write_job *job,
                                 refit_error *error)
{
    rft_event *event = NULL;
    if (job->after.native == NULL) return REFIT_OK;
    RFT_REFUSE_IF(job->device == NULL, error, REFIT_ERR_INVALID, "a stream needs its device");
    RFT_TRY(rft_device_event_open(job->device, &event, error));
    refit_status status = rft_device_event_record(job->device, event, job->after, error);
    if (status == REFIT_OK) {
        status = rft_device_event_wait(job->device, event,
                                       publisher->config.broadcast_stage_timeout_ms, error);
    }
    rft_device_event_close(job->device, event);
    return status;
}

static refit_status write_from_host(refit_publisher *publisher, const rft_write_job *job,
                                    refit_error *error)
{
    rft_store *store = publisher->store;
    rft_publisher_settle(publisher);
    RFT_TRY(await_stream(publisher, job, error));
    if (job->block != NULL && job->bytes > 0) {
        RFT_TRY(carry_up(publisher, job, job->memory, error));
    }
    if (store->hosted) {
        return rft_store_write(store, job->tensor, job->memory, job->bytes, frame_ready, publisher,
                               error);
    }
    uint64_t sum = rft_digest_part(job->memory, job->bytes, 0);
    rft_store_land(store, job->tensor);
    rft_store_settle(store, job->tensor, &sum, frame_ready, publisher);
    return REFIT_OK;
}

/* ---- From either */

rft_write_job rft_write_make_job(const refit_publisher *publisher, const refit_weight *weight,
                                 refit_device *device, refit_stream_ref after)
{
    rft_write_job job = {weight->tensor, weight->memory, weight->bytes, device,
                         after,          NULL,           NULL,          NULL};
    job.block = rft_gpu_store_writing(publisher->gpu);
    if (job.block != NULL) {
        job.shared = job.block->memory + publisher->store->manifest->tensors[job.tensor].offset;
    }
    return job;
}

refit_status rft_write_one(refit_publisher *publisher, const refit_weight *weight,
                           refit_device *device, refit_stream_ref after, refit_error *error)
{
    bool here = device == NULL || rft_device_get_caps(device).host_addressable;
    rft_write_job job = rft_write_make_job(publisher, weight, device, after);
    RFT_TRY(rft_write_await_earlier(publisher, job.block, error));
    return here ? write_from_host(publisher, &job, error)
                : write_from_device(publisher, &job, error);
}

void rft_write_count(refit_publisher *publisher, int64_t began)
{
    rft_lock(&publisher->lock);
    publisher->write_seconds += rft_seconds(rft_now() - began);
    rft_unlock(&publisher->lock);
}

refit_status refit_publisher_write(refit_publisher *publisher, uint32_t tensor, const void *memory,
                                   uint64_t bytes, refit_device *device, refit_stream_ref after,
                                   refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "write needs a publisher");
    RFT_TRY(rft_publisher_check_writing(publisher, "write to", error));
    RFT_TRY(rft_store_check(publisher->store, tensor, memory, bytes, error));
    int64_t began = rft_now();
    const refit_weight weight = {tensor, memory, bytes};
    refit_status status = rft_write_one(publisher, &weight, device, after, error);
    rft_write_count(publisher, began);
    return status;
}

void rft_publisher_await_copies(refit_publisher *publisher, int64_t deadline)
{
    rft_copy_queue *copy_queues[] = {publisher->copy_queue, publisher->gpu_copy_queue};
    for (size_t i = 0; i < sizeof copy_queues / sizeof *copy_queues; i++) {
        if (!rft_copy_queue_is_busy(copy_queues[i])) continue;
        (void)rft_copy_queue_wait(copy_queues[i], (uint32_t)rft_ms_until(deadline), NULL);
    }
}
