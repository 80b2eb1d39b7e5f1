/*
 * Writing tensors of a version: from host memory or a device to the places that workers read.
 *
 *     from \ to            the store's slot               the GPU's slot, if there is one
 *     host memory          by the CPU, digest on the way  copied up by the device
 *     the same GPU         copied down, page-locked       copied within the device
 *     another device       copied down                    and up again from there
 *
 * What is lent on the same GPU is not copied to a slot there: workers read it where it lies.
 *
 * Copies of a device go on a stream of the publisher's own, after the caller's; nothing waits for
 * the caller's work before they are put there, and write returns when the caller's memory may
 * change. The CPU's part of a tensor that is then left (its digest where the device takes none, the
 * comparison with the version before) is done while the next one is being copied.
 *
 * Of a list, all is checked before the first byte moves. A device that takes digests itself then
 * brings tensors in batches: their copies and digests are put on the stream, the CPU compares the
 * batch before meanwhile, and there is one wait for all of them. A batch ends where the digest
 * batch is full, or with so many bytes that a wait costs almost nothing and workers can fetch the
 * first frames while more comes. Everything else goes one by one.
 *
 * The caller's thread only.
 */
#include <inttypes.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"
#include "device/device_uuid.h"
#include "kernels/digest.h"
#include "publisher/publisher.h"

#define BATCH_BYTES  (UINT64_C(64) << 20)
#define GROWTH_LEAST (UINT64_C(16) << 20) /* of the GPU's memory */

/* One tensor on its way. */
typedef struct write_job {
    uint32_t tensor;
    const void *memory;
    uint64_t bytes;
    refit_device *device;
    refit_stream_ref after;
    unsigned char *image;  /* its place in the store; NULL: the store keeps no bytes */
    rft_gpu_block *block;  /* of the GPU that it goes to; NULL: none */
    unsigned char *shared; /* its place there; NULL: it is lent */
} write_job;

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

void rft_publisher_compare_written(refit_publisher *publisher)
{
    rft_to_compare *last = &publisher->to_compare;
    for (uint32_t i = 0; i < last->count; i++) {
        rft_store_compare(publisher->store, last->tensors[i],
                          last->digested ? &last->sums[i] : NULL, frame_ready, publisher);
    }
    last->count = 0;
}

/* ---- Copy queues */

/* Waits until the copy queue is idle. A failure means that work of an earlier call is still under
 * way. */
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

/* NULL: the version has no bytes on the host. */
static rft_buffer *target_buffer(const refit_publisher *publisher)
{
    const rft_store *store = publisher->store;
    return store->slots[store->writing_slot].buffer;
}

/* Waits for late copies of an earlier call, which would write over the tensor. */
static refit_status await_earlier(const refit_publisher *publisher, const rft_gpu_block *block,
                                  refit_error *error)
{
    rft_copy_queue *copy_queues[] = {publisher->copy_queue, publisher->gpu_copy_queue};
    const rft_buffer *buffer = target_buffer(publisher);
    for (size_t i = 0; i < sizeof copy_queues / sizeof *copy_queues; i++) {
        bool here = (buffer != NULL && rft_copy_queue_holds(copy_queues[i], &buffer->pending)) ||
                    (block != NULL && rft_copy_queue_holds(copy_queues[i], &block->pending));
        if (here) RFT_TRY(await_idle(publisher, copy_queues[i], error));
    }
    return REFIT_OK;
}

/* The copy queue of `device`, idle, in `*place`, which may hold another device's. */
static refit_status get_copy_queue(const refit_publisher *publisher, refit_device *device,
                                   rft_copy_queue **place, refit_error *error)
{
    RFT_TRY(await_idle(publisher, *place, error));
    if (*place != NULL && rft_copy_queue_device(*place) == device) return REFIT_OK;
    (void)rft_copy_queue_close(*place, 0);
    *place = NULL;
    return rft_copy_queue_open(device, &publisher->config, place, error);
}

bool rft_publisher_is_gpu(const refit_publisher *publisher, refit_device *device)
{
    rft_device_caps caps = rft_device_get_caps(device);
    return publisher->gpu != NULL && rft_uuid_equal(caps.uuid, publisher->gpu->probe_share.uuid);
}

refit_status rft_publisher_gpu_queue(refit_publisher *publisher, rft_copy_queue **out,
                                     refit_error *error)
{
    RFT_TRY(get_copy_queue(publisher, publisher->gpu->device, &publisher->gpu_copy_queue, error));
    *out = publisher->gpu_copy_queue;
    return REFIT_OK;
}

void rft_publisher_hold(refit_publisher *publisher, rft_copy_queue *queue)
{
    rft_buffer *buffer = target_buffer(publisher);
    rft_gpu_block *block = rft_gpu_store_writing(publisher->gpu);
    if (buffer != NULL) rft_copy_queue_hold(queue, &buffer->pending);
    if (block != NULL) rft_copy_queue_hold(queue, &block->pending);
}

void rft_publisher_await_copies(refit_publisher *publisher, int64_t deadline)
{
    rft_copy_queue *copy_queues[] = {publisher->copy_queue, publisher->gpu_copy_queue};
    for (size_t i = 0; i < sizeof copy_queues / sizeof *copy_queues; i++) {
        if (!rft_copy_queue_is_busy(copy_queues[i])) continue;
        (void)rft_copy_queue_wait(copy_queues[i], (uint32_t)rft_ms_until(deadline), NULL);
    }
}

/* ---- Page-locks */

#define PIN_AGAIN_NS (INT64_C(30) * 1000 * 1000 * 1000)

/* Where the memory cannot be locked, copies are slower and the figures say so. A shortage passes:
 * it is tried again, but not for each tensor, as a try may take a while. */
void rft_publisher_pin_slot(refit_publisher *publisher, refit_device *device)
{
    refit_error why;
    rft_store *store = publisher->store;
    rft_buffer *buffer = store->slots[store->writing_slot].buffer;
    if (buffer == NULL || buffer->pinning.bytes > 0 || !rft_device_get_caps(device).needs_pinned)
        return;
    bool first = buffer->pin_at == 0;
    if (rft_now() < buffer->pin_at) return;
    refit_status status =
        rft_pinning_open(&buffer->pinning, device, buffer->segment.memory, buffer->segment.bytes,
                         publisher->config.offload_slab_bytes, false, &why);
    if (status != REFIT_OK) {
        buffer->pin_at = rft_now() + PIN_AGAIN_NS;
        rft_log(first ? REFIT_LOG_WARNING : REFIT_LOG_INFO,
                "the store cannot be page-locked, copies to it are slow until it can: %s",
                why.text);
    } else if (!first) {
        rft_log(REFIT_LOG_INFO, "the store is page-locked now");
    }
    rft_publisher_count_pinned(publisher);
}

void rft_publisher_count_pinned(refit_publisher *publisher)
{
    const rft_store *store = publisher->store;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < store->slot_count; i++) {
        if (store->slots[i].buffer != NULL) bytes += store->slots[i].buffer->pinning.bytes;
    }
    rft_lock(&publisher->lock);
    publisher->pinned_bytes = bytes;
    rft_unlock(&publisher->lock);
}

/* ---- From a device */

/* The block is of the device of the copy queue. */
static refit_status issue(rft_copy_queue *copy_queue, const write_job *job,
                          const rft_buffer *buffer, bool same_gpu, refit_error *error)
{
    RFT_TRY(rft_copy_queue_follow(copy_queue, job->after, error));
    if (job->image != NULL) {
        RFT_TRY(rft_copy_queue_copy(copy_queue, job->image, job->memory, job->bytes,
                                    &buffer->pinning, error));
    }
    if (same_gpu && job->shared != NULL) {
        RFT_TRY(
            rft_copy_queue_copy_within(copy_queue, job->shared, job->memory, job->bytes, error));
    }
    bool needed = rft_copy_queue_digests(copy_queue) || job->image == NULL;
    return needed ? rft_copy_queue_digest(copy_queue, job->memory, job->bytes, 0, error) : REFIT_OK;
}

/* Waits. The first failure is reported, but copies that were put on the stream before it are waited
 * for. */
static refit_status finish(const refit_publisher *publisher, rft_copy_queue *copy_queue,
                           refit_status issued, refit_error *error)
{
    refit_error later;
    uint32_t timeout_ms = publisher->config.broadcast_stage_timeout_ms;
    refit_status status =
        rft_copy_queue_wait(copy_queue, timeout_ms, issued == REFIT_OK ? error : &later);
    return rft_keep_first(issued, status);
}

/* Copies from host memory (the store's or the caller's) to the GPU's block, and waits. */
static refit_status copy_to_gpu(refit_publisher *publisher, const write_job *job, const void *from,
                                refit_error *error)
{
    rft_copy_queue **place = &publisher->gpu_copy_queue;
    rft_buffer *buffer = target_buffer(publisher);
    RFT_TRY(get_copy_queue(publisher, publisher->gpu->device, place, error));
    rft_copy_queue_hold(*place, &job->block->pending);
    if (from == job->image) rft_copy_queue_hold(*place, &buffer->pending);
    refit_status status = rft_copy_queue_copy(*place, job->shared, from, job->bytes,
                                              buffer == NULL ? NULL : &buffer->pinning, error);
    return finish(publisher, *place, status, error);
}

static refit_status copy_in(refit_publisher *publisher, const write_job *job, uint64_t *sum,
                            bool *digested, refit_error *error)
{
    bool same_gpu = job->block != NULL && rft_publisher_is_gpu(publisher, job->device);
    rft_copy_queue **place = same_gpu ? &publisher->gpu_copy_queue : &publisher->copy_queue;
    rft_buffer *buffer = target_buffer(publisher);
    RFT_TRY(get_copy_queue(publisher, job->device, place, error));
    if (buffer != NULL) rft_copy_queue_hold(*place, &buffer->pending);
    if (same_gpu) rft_copy_queue_hold(*place, &job->block->pending);
    refit_status status = issue(*place, job, buffer, same_gpu, error);
    rft_publisher_compare_written(publisher);
    RFT_TRY(finish(publisher, *place, status, error));
    *digested = rft_copy_queue_digests(*place) || job->image == NULL;
    *sum = rft_copy_queue_sum(*place);
    bool further = job->shared != NULL && !same_gpu;
    return further ? copy_to_gpu(publisher, job, job->image, error) : REFIT_OK;
}

/* Whether the tensor lies on its device, and on one that it may be written from. `last`: of the
 * tensor before it. */
static refit_status check_source(const refit_publisher *publisher, const write_job *job,
                                 rft_memory_range *last, refit_error *error)
{
    char theirs[RFT_UUID_TEXT_BYTES], ours[RFT_UUID_TEXT_BYTES];
    RFT_TRY(rft_device_memory_check_next(job->device, job->memory, job->bytes, last, error));
    if (target_buffer(publisher) != NULL || rft_publisher_is_gpu(publisher, job->device))
        return REFIT_OK;
    rft_uuid_print(rft_device_get_caps(job->device).uuid, theirs);
    rft_uuid_print(publisher->gpu->probe_share.uuid, ours);
    return rft_fail(
        error, REFIT_ERR_INVALID,
        "the tensor lies on %s, and all workers of this version are on %s: copy it there "
        "first",
        theirs, ours);
}

static refit_status write_from_device(refit_publisher *publisher, write_job *job,
                                      refit_error *error)
{
    uint64_t sum = 0;
    bool digested = false;
    rft_memory_range last = {0};
    if (job->bytes > 0) {
        RFT_TRY(check_source(publisher, job, &last, error));
        rft_publisher_pin_slot(publisher, job->device);
        job->image = rft_store_begin_device_write(publisher->store, job->tensor);
        RFT_TRY(copy_in(publisher, job, &sum, &digested, error));
    } else {
        rft_publisher_compare_written(publisher);
    }
    rft_store_end_device_write(publisher->store, job->tensor);
    publisher->to_compare.count = 1;
    publisher->to_compare.digested = digested;
    publisher->to_compare.tensors[0] = job->tensor;
    publisher->to_compare.sums[0] = sum;
    return REFIT_OK;
}

/* ---- From the host */

refit_status rft_publisher_await_stream(const refit_publisher *publisher, refit_device *device,
                                        refit_stream_ref after, refit_error *error)
{
    if (after.native == NULL) return REFIT_OK;
    RFT_REFUSE_IF(device == NULL, error, REFIT_ERR_INVALID, "a stream needs its device");
    return refit_stream_wait(device, after, publisher->config.broadcast_stage_timeout_ms, error);
}

void rft_publisher_note_written(refit_publisher *publisher, uint32_t tensor, uint64_t sum)
{
    rft_store_end_device_write(publisher->store, tensor);
    rft_store_compare(publisher->store, tensor, &sum, frame_ready, publisher);
}

refit_status rft_publisher_fetch_to_store(refit_publisher *publisher, const refit_weight *weight,
                                          refit_device *device, refit_stream_ref after,
                                          refit_error *error)
{
    write_job job = {weight->tensor, weight->memory, weight->bytes, device,
                     after,          NULL,           NULL,          NULL};
    RFT_TRY(write_from_device(publisher, &job, error));
    rft_publisher_compare_written(publisher);
    return REFIT_OK;
}

refit_status rft_publisher_write_to_store(refit_publisher *publisher, const refit_weight *weight,
                                          refit_error *error)
{
    return rft_store_write(publisher->store, weight->tensor, weight->memory, weight->bytes,
                           frame_ready, publisher, error);
}

static refit_status write_from_host(refit_publisher *publisher, const write_job *job,
                                    refit_error *error)
{
    rft_publisher_compare_written(publisher);
    RFT_TRY(rft_publisher_await_stream(publisher, job->device, job->after, error));
    if (job->shared != NULL && job->bytes > 0) {
        RFT_TRY(copy_to_gpu(publisher, job, job->memory, error));
    }
    if (target_buffer(publisher) != NULL) {
        const refit_weight weight = {job->tensor, job->memory, job->bytes};
        return rft_publisher_write_to_store(publisher, &weight, error);
    }
    rft_publisher_note_written(publisher, job->tensor, rft_digest_part(job->memory, job->bytes, 0));
    return REFIT_OK;
}

/*
 * ---- On the GPU: lent, or copied to the block
 *
 * Before the first tensor of a list is written it is decided where each of them lies for workers on
 * the GPU.
 */

/* The arguments of refit_publisher_write_all, and of lend. */
typedef struct write_list {
    const refit_weight *weights;
    uint32_t count;
    refit_device *device;
    refit_stream_ref after;
    bool lends; /* the tensors stay as they are until the version is over */
} write_list;

static bool is_from_device(const write_list *list)
{
    return list->device != NULL && !rft_device_get_caps(list->device).host_addressable;
}

/* From another GPU than that of the workers tensors come over the host. */
static refit_status prepare_source(refit_publisher *publisher, const write_list *list,
                                   refit_error *error)
{
    bool here = rft_gpu_store_writing(publisher->gpu) != NULL && !publisher->ring.on;
    if (!here || !is_from_device(list)) return REFIT_OK;
    bool direct = rft_publisher_is_gpu(publisher, list->device);
    if (direct || publisher->config.broadcast_gpu == REFIT_GPU_REQUIRE) return REFIT_OK;
    return rft_publisher_take_host(publisher, error);
}

/* False: it cannot be shown to other processes where it is. */
static refit_status lend_one(refit_publisher *publisher, const write_list *list,
                             const refit_weight *weight, rft_memory_range *last, bool *lent,
                             refit_error *error)
{
    refit_error why;
    uint32_t original = publisher->store->originals[weight->tensor];
    RFT_TRY(rft_device_memory_check_next(list->device, weight->memory, weight->bytes, last, error));
    refit_status status = rft_gpu_store_lend(publisher->gpu, original, weight->memory, last, &why);
    *lent = status == REFIT_OK;
    if (status == REFIT_OK || status == REFIT_ERR_UNSUPPORTED) return REFIT_OK;
    return rft_fail_sub(error, status, why.subsystem, "%s", why.text);
}

static refit_status lend_list(refit_publisher *publisher, const write_list *list, bool *all,
                              refit_error *error)
{
    bool shows = list->lends && !rft_publisher_keeps_copies(publisher) && list->device != NULL &&
                 rft_publisher_is_gpu(publisher, list->device);
    rft_memory_range last = {0};
    *all = true;
    for (uint32_t i = 0; i < list->count; i++) {
        bool lent = false;
        if (list->weights[i].bytes == 0) continue;
        rft_gpu_store_unlend(publisher->gpu, publisher->store->originals[list->weights[i].tensor]);
        if (shows) RFT_TRY(lend_one(publisher, list, &list->weights[i], &last, &lent, error));
        *all = *all && lent;
    }
    return REFIT_OK;
}

/* False: this one and those after it do not fit. */
static bool reserve_list(refit_publisher *publisher, const write_list *list, uint32_t *reached)
{
    for (; *reached < list->count; ++*reached) {
        const refit_weight *weight = &list->weights[*reached];
        uint32_t original = publisher->store->originals[weight->tensor];
        bool placed = weight->bytes == 0 || rft_gpu_store_source(publisher->gpu, original) != NULL;
        if (!placed && !rft_gpu_store_reserve(publisher->gpu, original, weight->bytes))
            return false;
    }
    return true;
}

static uint64_t unplaced_bytes(const refit_publisher *publisher, uint32_t tensor)
{
    const rft_store *store = publisher->store;
    const rft_manifest_tensor *of = &store->manifest->tensors[tensor];
    uint64_t bytes = 0;
    bool placed = of->alias_of != REFIT_NO_ALIAS || of->bytes == 0 ||
                  rft_gpu_store_source(publisher->gpu, store->originals[tensor]) != NULL;
    if (!placed) (void)rft_align_u64(of->bytes, RFT_TENSOR_ALIGNMENT, &bytes);
    return bytes;
}

/* What the block is to grow by: room for the rest of the list; or as much as it has, if more may
 * come and that is allowed, so that a version written tensor by tensor takes few allocations. */
static uint64_t growth(const refit_publisher *publisher, const write_list *list, uint32_t first)
{
    uint64_t needed = 0, most = 0;
    for (uint32_t i = first; i < list->count; i++)
        needed += unplaced_bytes(publisher, list->weights[i].tensor);
    for (uint32_t i = 0; i < publisher->store->manifest->count; i++)
        most += unplaced_bytes(publisher, i);
    uint64_t more = rft_max_u64(rft_gpu_store_block_bytes(publisher->gpu), GROWTH_LEAST);
    most = rft_min_u64(most, rft_publisher_block_room(publisher));
    return rft_max_u64(needed, rft_min_u64(more, most));
}

/* Lends what can be lent; takes memory for the rest. */
static refit_status place_list(refit_publisher *publisher, const write_list *list,
                               refit_error *error)
{
    bool all;
    uint32_t reached = 0;
    if (rft_gpu_store_writing(publisher->gpu) == NULL) return REFIT_OK;
    RFT_TRY(lend_list(publisher, list, &all, error));
    if (publisher->ring.on || all || reserve_list(publisher, list, &reached)) return REFIT_OK;
    RFT_TRY(rft_publisher_grow_block(publisher, growth(publisher, list, reached), error));
    bool placed = rft_gpu_store_writing(publisher->gpu) != NULL && !publisher->ring.on;
    if (placed) (void)reserve_list(publisher, list, &reached);
    return REFIT_OK;
}

/* ---- One tensor */

/* All but `image`. */
static write_job make_job(const refit_publisher *publisher, const refit_weight *weight,
                          refit_device *device, refit_stream_ref after)
{
    write_job job = {weight->tensor, weight->memory, weight->bytes, device,
                     after,          NULL,           NULL,          NULL};
    job.block = rft_gpu_store_writing(publisher->gpu);
    if (job.block == NULL) return job;
    job.shared = rft_gpu_store_target(publisher->gpu, publisher->store->originals[job.tensor]);
    return job;
}

/* Writes a tensor that the store has checked. */
static refit_status write_one(refit_publisher *publisher, const refit_weight *weight,
                              refit_device *device, refit_stream_ref after, refit_error *error)
{
    bool here = device == NULL || rft_device_get_caps(device).host_addressable;
    write_job job = make_job(publisher, weight, device, after);
    RFT_TRY(await_earlier(publisher, job.block, error));
    RFT_TRY(rft_store_afford(publisher->store, job.bytes, error));
    return here ? write_from_host(publisher, &job, error)
                : write_from_device(publisher, &job, error);
}

/* Counts the time since `began` as spent on writing. */
static void count_seconds(refit_publisher *publisher, int64_t began)
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
    const write_list list = {&weight, 1, device, after, false};
    RFT_TRY(prepare_source(publisher, &list, error));
    RFT_TRY(place_list(publisher, &list, error));
    refit_status status =
        publisher->ring.on ? rft_publisher_write_ring(publisher, &weight, 1, device, after, error)
                           : write_one(publisher, &weight, device, after, error);
    count_seconds(publisher, began);
    return status;
}

/* ---- Many tensors */

static const char *name_of(const refit_publisher *publisher, uint32_t tensor)
{
    return publisher->store->manifest->tensors[tensor].name;
}

/* The failure, with the name of its tensor. */
static refit_status blame(const refit_publisher *publisher, uint32_t tensor, refit_status status,
                          const refit_error *why, refit_error *error)
{
    return rft_fail_sub(error, status, why->subsystem, "tensor \"%s\" could not be written: %s",
                        name_of(publisher, tensor), why->text);
}

/* ---- Before anything is written */

static refit_status check_one(const refit_publisher *publisher, const write_list *list,
                              const refit_weight *weight, rft_memory_range *last,
                              refit_error *error)
{
    refit_error why;
    RFT_TRY(
        rft_store_check(publisher->store, weight->tensor, weight->memory, weight->bytes, error));
    if (weight->bytes == 0 || !is_from_device(list)) return REFIT_OK;
    write_job job = make_job(publisher, weight, list->device, list->after);
    refit_status status = check_source(publisher, &job, last, &why);
    return status == REFIT_OK ? REFIT_OK : blame(publisher, weight->tensor, status, &why, error);
}

/* During the check, tensors that were seen count as written, so that a duplicate is refused. */
static refit_status check_list(const refit_publisher *publisher, const write_list *list,
                               refit_error *error)
{
    unsigned char *written = publisher->store->written;
    refit_status status = REFIT_OK;
    rft_memory_range last = {0};
    uint32_t seen = 0;
    for (; seen < list->count && status == REFIT_OK; seen++) {
        status = check_one(publisher, list, &list->weights[seen], &last, error);
        if (status == REFIT_OK) written[list->weights[seen].tensor] = 1;
    }
    if (status != REFIT_OK) seen--;
    for (uint32_t i = 0; i < seen; i++) {
        written[list->weights[i].tensor] = 0;
    }
    return status;
}

static refit_status write_singly(refit_publisher *publisher, const write_list *list, uint32_t first,
                                 refit_error *error)
{
    refit_error why = {0};
    for (uint32_t i = first; i < list->count; i++) {
        const refit_weight *weight = &list->weights[i];
        refit_status status = write_one(publisher, weight, list->device, list->after, &why);
        if (status != REFIT_OK) return blame(publisher, weight->tensor, status, &why, error);
    }
    return REFIT_OK;
}

/* ---- In batches */

/* Tensors that come after one wait. */
typedef struct batch {
    const refit_weight *weights;
    uint32_t count;
    rft_copy_queue *copy_queue;
    rft_buffer *buffer;   /* NULL: the store keeps no bytes */
    rft_gpu_block *block; /* NULL: they go to no GPU's memory */
} batch;

static uint64_t batch_bytes(const batch *on)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < on->count; i++)
        bytes += on->weights[i].bytes;
    return bytes;
}

/* At least one. Where no bytes go to the host, no worker waits for the first of them. */
static uint32_t batch_length(const write_list *list, uint32_t first, bool hosted)
{
    uint64_t bytes = 0, most = hosted ? BATCH_BYTES : UINT64_MAX;
    uint32_t length = 0;
    while (length < RFT_DIGEST_BATCH_MOST && first + length < list->count && bytes < most) {
        bytes += list->weights[first + length++].bytes;
    }
    return length;
}

/* A failure that concerns all tensors of the batch. */
static refit_status blame_all(const refit_publisher *publisher, const batch *on,
                              refit_status status, const refit_error *why, refit_error *error)
{
    return rft_fail_sub(error, status, why->subsystem,
                        "%" PRIu32 " tensors from \"%s\" on could not be written: %s", on->count,
                        name_of(publisher, on->weights[0].tensor), why->text);
}

/* Copied down, and within the GPU with the digest on the way, or only digested. */
static refit_status issue_one(refit_publisher *publisher, const batch *on,
                              const refit_weight *weight, const write_list *list,
                              refit_error *error)
{
    unsigned char *image = NULL;
    write_job job = make_job(publisher, weight, list->device, list->after);
    if (weight->bytes > 0) image = rft_store_begin_device_write(publisher->store, weight->tensor);
    if (image != NULL) {
        RFT_TRY(rft_copy_queue_copy(on->copy_queue, image, weight->memory, weight->bytes,
                                    &on->buffer->pinning, error));
    }
    rft_copy_queue_batch_add(on->copy_queue, job.shared, weight->memory, weight->bytes, 0);
    return REFIT_OK;
}

static refit_status issue_all(refit_publisher *publisher, const batch *on, const write_list *list,
                              refit_error *error)
{
    refit_error why = {0};
    for (uint32_t i = 0; i < on->count; i++) {
        const refit_weight *weight = &on->weights[i];
        refit_status status = issue_one(publisher, on, weight, list, &why);
        if (status != REFIT_OK) return blame(publisher, weight->tensor, status, &why, error);
    }
    refit_status status = rft_copy_queue_batch_end(on->copy_queue, &why);
    return status == REFIT_OK ? REFIT_OK : blame_all(publisher, on, status, &why, error);
}

static void land_all(refit_publisher *publisher, const batch *on)
{
    rft_to_compare *last = &publisher->to_compare;
    for (uint32_t i = 0; i < on->count; i++) {
        rft_store_end_device_write(publisher->store, on->weights[i].tensor);
        last->tensors[i] = on->weights[i].tensor;
        last->sums[i] = rft_copy_queue_batch_sum(on->copy_queue, i);
    }
    last->digested = true;
    last->count = on->count;
}

static refit_status batch_write(refit_publisher *publisher, const batch *on, const write_list *list,
                                refit_error *error)
{
    refit_error why = {0};
    if (on->buffer != NULL) rft_copy_queue_hold(on->copy_queue, &on->buffer->pending);
    if (on->block != NULL) rft_copy_queue_hold(on->copy_queue, &on->block->pending);
    refit_status issued = rft_copy_queue_follow(on->copy_queue, list->after, &why);
    if (issued == REFIT_OK) issued = rft_copy_queue_batch_begin(on->copy_queue, &why);
    issued = issued == REFIT_OK ? issue_all(publisher, on, list, error)
                                : blame_all(publisher, on, issued, &why, error);
    rft_publisher_compare_written(publisher);
    refit_status status =
        finish(publisher, on->copy_queue, issued, issued == REFIT_OK ? &why : error);
    if (status == REFIT_OK) {
        land_all(publisher, on);
    } else if (issued == REFIT_OK) {
        (void)blame_all(publisher, on, status, &why, error);
    }
    return status;
}

/* Whether the device can bring them in batches; then `*copy_queue` is idle and has its digest
 * batch. */
static bool can_batch(refit_publisher *publisher, const write_list *list, bool same_gpu,
                      rft_copy_queue **copy_queue)
{
    refit_error why;
    rft_copy_queue **place = same_gpu ? &publisher->gpu_copy_queue : &publisher->copy_queue;
    refit_status status = get_copy_queue(publisher, list->device, place, &why);
    if (status == REFIT_OK) status = rft_copy_queue_batch_open(*place, &why);
    *copy_queue = *place;
    if (status == REFIT_OK) return true;
    rft_log(REFIT_LOG_INFO, "tensors are written one by one: %s", why.text);
    return false;
}

static refit_status write_batches(refit_publisher *publisher, const write_list *list,
                                  refit_error *error)
{
    bool same_gpu = rft_publisher_is_gpu(publisher, list->device);
    rft_gpu_block *block = rft_gpu_store_writing(publisher->gpu);
    if (block != NULL && !same_gpu) return write_singly(publisher, list, 0, error);
    rft_publisher_pin_slot(publisher, list->device);
    for (uint32_t at = 0; at < list->count;) {
        batch on = {&list->weights[at], batch_length(list, at, target_buffer(publisher) != NULL),
                    NULL, NULL, block};
        RFT_TRY(await_earlier(publisher, block, error));
        if (!can_batch(publisher, list, block != NULL, &on.copy_queue)) {
            return write_singly(publisher, list, at, error);
        }
        RFT_TRY(rft_store_afford(publisher->store, batch_bytes(&on), error));
        on.buffer = target_buffer(publisher);
        RFT_TRY(batch_write(publisher, &on, list, error));
        at += on.count;
    }
    return REFIT_OK;
}

/* ---- From the GPU's memory to the host, after all */

/* Tensors that are written, and lie on the GPU alone so far. */
static refit_status bring_down(refit_publisher *publisher, rft_copy_queue *copy_queue,
                               const rft_buffer *buffer, refit_error *error)
{
    rft_store *store = publisher->store;
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &store->manifest->tensors[i];
        if (!store->written[i] || tensor->bytes == 0) continue;
        const unsigned char *from = rft_gpu_store_source(publisher->gpu, store->originals[i]);
        RFT_TRY(rft_copy_queue_copy(copy_queue, rft_store_begin_device_write(store, i), from,
                                    tensor->bytes, &buffer->pinning, error));
    }
    return REFIT_OK;
}

refit_status rft_publisher_copy_to_host(refit_publisher *publisher, refit_error *error)
{
    rft_copy_queue **place = &publisher->gpu_copy_queue;
    RFT_TRY(get_copy_queue(publisher, publisher->gpu->device, place, error));
    rft_publisher_pin_slot(publisher, publisher->gpu->device);
    rft_publisher_compare_written(publisher);
    rft_buffer *buffer = target_buffer(publisher);
    rft_copy_queue_hold(*place, &buffer->pending);
    refit_status status = bring_down(publisher, *place, buffer, error);
    return finish(publisher, *place, status, error);
}

static refit_status write_list_all(refit_publisher *publisher, const write_list *list,
                                   refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || (list->weights == NULL && list->count > 0), error,
                  REFIT_ERR_INVALID, "write_all and lend need a publisher and a list of weights");
    RFT_TRY(rft_publisher_check_writing(publisher, "write to", error));
    RFT_TRY(prepare_source(publisher, list, error));
    RFT_TRY(check_list(publisher, list, error));
    int64_t began = rft_now();
    RFT_TRY(place_list(publisher, list, error));
    bool batches = is_from_device(list) && rft_device_get_caps(list->device).digests;
    refit_status status = publisher->ring.on
                              ? rft_publisher_write_ring(publisher, list->weights, list->count,
                                                         list->device, list->after, error)
                          : batches ? write_batches(publisher, list, error)
                                    : write_singly(publisher, list, 0, error);
    count_seconds(publisher, began);
    return status;
}

refit_status refit_publisher_write_all(refit_publisher *publisher, const refit_weight *weights,
                                       uint32_t count, refit_device *device, refit_stream_ref after,
                                       refit_error *error)
{
    return write_list_all(publisher, &(write_list){weights, count, device, after, false}, error);
}

refit_status refit_publisher_lend(refit_publisher *publisher, const refit_weight *weights,
                                  uint32_t count, refit_device *device, refit_stream_ref after,
                                  refit_error *error)
{
    if (publisher != NULL) publisher->outgrown = false; /* the next version may begin on the GPU */
    return write_list_all(publisher, &(write_list){weights, count, device, after, true}, error);
}
