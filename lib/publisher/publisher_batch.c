/*
 * Writing many tensors of a version in one call.
 *
 * All of the list is checked before the first byte moves. A device that takes digests itself then
 * brings tensors in batches: their copies and digests are put on the stream, the batch before is
 * settled by the CPU meanwhile, and there is one wait for all of them. A batch ends where the tally
 * of digests is full, or with so many bytes that a wait costs next to nothing and workers can fetch
 * what is there while more comes. Everything else goes one by one, as with refit_publisher_write.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "base/log.h"
#include "publisher/publisher_write.h"

#define BATCH_BYTES (UINT64_C(64) << 20)

/* What one call writes. */
typedef struct write_list {
    const refit_weight *weights;
    uint32_t count;
    refit_device *device;
    refit_stream_ref after;
} write_list;

static const char *name_of(const refit_publisher *publisher, uint32_t tensor)
{
    return publisher->store->manifest->tensors[tensor].name;
}

/* The failure, with the tensor that it met. */
static refit_status blame(const refit_publisher *publisher, uint32_t tensor, refit_status status,
                          const refit_error *why, refit_error *error)
{
    return rft_fail_sub(error, status, why->subsystem, "tensor \"%s\" could not be written: %s",
                        name_of(publisher, tensor), why->text);
}

/* ---- Before anything is written */

static bool is_from_device(const write_list *list)
{
    return list->device != NULL && !rft_device_get_caps(list->device).host_addressable;
}

static refit_status check_one(const refit_publisher *publisher, const write_list *list,
                              const refit_weight *weight, refit_error *error)
{
    refit_error why;
    RFT_TRY(
        rft_store_check(publisher->store, weight->tensor, weight->memory, weight->bytes, error));
    if (weight->bytes == 0 || !is_from_device(list)) return REFIT_OK;
    rft_write_job job = rft_write_make_job(publisher, weight, list->device, list->after);
    refit_status status = rft_write_check_source(publisher, &job, &why);
    return status == REFIT_OK ? REFIT_OK : blame(publisher, weight->tensor, status, &why, error);
}

/* While it looks, tensors that were seen count as written, so that one that comes twice is. */
static refit_status check_list(const refit_publisher *publisher, const write_list *list,
                               refit_error *error)
{
    unsigned char *written = publisher->store->written;
    refit_status status = REFIT_OK;
    uint32_t seen = 0;
    for (; seen < list->count && status == REFIT_OK; seen++) {
        status = check_one(publisher, list, &list->weights[seen], error);
        if (status == REFIT_OK) written[list->weights[seen].tensor] = 1;
    }
    if (status != REFIT_OK) seen--;
    for (uint32_t i = 0; i < seen; i++) {
        written[list->weights[i].tensor] = 0;
    }
    return status;
}

/* ---- One by one */

static refit_status write_singly(refit_publisher *publisher, const write_list *list, uint32_t first,
                                 refit_error *error)
{
    refit_error why = {0};
    for (uint32_t i = first; i < list->count; i++) {
        const refit_weight *weight = &list->weights[i];
        refit_status status = rft_write_one(publisher, weight, list->device, list->after, &why);
        if (status != REFIT_OK) return blame(publisher, weight->tensor, status, &why, error);
    }
    return REFIT_OK;
}

/* ---- In batches */

/* Tensors that come behind one wait. */
typedef struct batch {
    const refit_weight *weights;
    uint32_t count;
    rft_copy_queue *copy_queue;
    rft_buffer *buffer;   /* NULL: the store keeps no bytes */
    rft_gpu_block *block; /* NULL: they go to no GPU's memory */
} batch;

/* At least one. */
static uint32_t batch_length(const write_list *list, uint32_t first)
{
    uint64_t bytes = 0;
    uint32_t length = 0;
    while (length < RFT_DIGEST_BATCH_MOST && first + length < list->count && bytes < BATCH_BYTES) {
        bytes += list->weights[first + length++].bytes;
    }
    return length;
}

/* Likewise, of what the tensors have in common. */
static refit_status blame_all(const refit_publisher *publisher, const batch *on,
                              refit_status status, const refit_error *why, refit_error *error)
{
    return rft_fail_sub(error, status, why->subsystem,
                        "%" PRIu32 " tensors from \"%s\" on could not be written: %s", on->count,
                        name_of(publisher, on->weights[0].tensor), why->text);
}

/* Copied down, and within the GPU with the digest on the way, or only digested. */
static refit_status issue_one(refit_publisher *publisher, const batch *on, uint32_t index,
                              const write_list *list, refit_error *error)
{
    const refit_weight *weight = &on->weights[index];
    if (weight->bytes == 0) return REFIT_OK;
    rft_write_job job = rft_write_make_job(publisher, weight, list->device, list->after);
    unsigned char *image = rft_store_prepare(publisher->store, weight->tensor);
    if (image != NULL) {
        RFT_TRY(rft_copy_queue_copy(on->copy_queue, image, weight->memory, weight->bytes,
                                    &on->buffer->pinning, error));
    }
    return rft_copy_queue_batch_add(on->copy_queue, index, on->block != NULL ? job.shared : NULL,
                                    weight->memory, weight->bytes, error);
}

static refit_status issue_all(refit_publisher *publisher, const batch *on, const write_list *list,
                              refit_error *error)
{
    refit_error why = {0};
    for (uint32_t i = 0; i < on->count; i++) {
        refit_status status = issue_one(publisher, on, i, list, &why);
        if (status != REFIT_OK) return blame(publisher, on->weights[i].tensor, status, &why, error);
    }
    refit_status status = rft_copy_queue_batch_end(on->copy_queue, on->count, &why);
    return status == REFIT_OK ? REFIT_OK : blame_all(publisher, on, status, &why, error);
}

static void land_all(refit_publisher *publisher, const batch *on)
{
    rft_unsettled *last = &publisher->unsettled;
    const uint64_t *sums = rft_copy_queue_batch_sums(on->copy_queue);
    for (uint32_t i = 0; i < on->count; i++) {
        rft_store_land(publisher->store, on->weights[i].tensor);
        last->tensors[i] = on->weights[i].tensor;
        last->sums[i] = sums[i];
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
    rft_publisher_settle(publisher);
    refit_status status =
        rft_write_finish(publisher, on->copy_queue, issued, issued == REFIT_OK ? &why : error);
    if (status == REFIT_OK) {
        land_all(publisher, on);
    } else if (issued == REFIT_OK) {
        (void)blame_all(publisher, on, status, &why, error);
    }
    return status;
}

/* Whether the device can bring them in batches; then `*carrier` is idle and has its tally. */
static bool can_batch(refit_publisher *publisher, const write_list *list, bool same_gpu,
                      rft_copy_queue **copy_queue)
{
    refit_error why;
    rft_copy_queue **place = same_gpu ? &publisher->gpu_copy_queue : &publisher->copy_queue;
    refit_status status = rft_write_get_copy_queue(publisher, list->device, place, &why);
    if (status == REFIT_OK) status = rft_copy_queue_batch_open(*place, &why);
    *copy_queue = *place;
    if (status == REFIT_OK) return true;
    rft_log(REFIT_LOG_INFO, "tensors are written one by one: %s", why.text);
    return false;
}

static refit_status write_batches(refit_publisher *publisher, const write_list *list,
                                  refit_error *error)
{
    bool same_gpu = rft_write_is_gpu(publisher, list->device);
    rft_gpu_block *block = rft_gpu_store_writing(publisher->gpu);
    if (block != NULL && !same_gpu) return write_singly(publisher, list, 0, error);
    if (publisher->store->hosted) rft_write_pin_slot(publisher, list->device);
    for (uint32_t at = 0; at < list->count;) {
        batch on = {&list->weights[at], batch_length(list, at), NULL, NULL, block};
        RFT_TRY(rft_write_await_earlier(publisher, block, error));
        if (!can_batch(publisher, list, block != NULL, &on.copy_queue)) {
            return write_singly(publisher, list, at, error);
        }
        on.buffer = rft_write_buffer(publisher);
        RFT_TRY(batch_write(publisher, &on, list, error));
        at += on.count;
    }
    return REFIT_OK;
}

refit_status refit_publisher_write_all(refit_publisher *publisher, const refit_weight *weights,
                                       uint32_t count, refit_device *device, refit_stream_ref after,
                                       refit_error *error)
{
    const write_list list = {weights, count, device, after};
    RFT_REFUSE_IF(publisher == NULL || (weights == NULL && count > 0), error, REFIT_ERR_INVALID,
                  "write_all needs a publisher and the list of weights");
    RFT_TRY(rft_publisher_check_writing(publisher, "write to", error));
    RFT_TRY(check_list(publisher, &list, error));
    int64_t began = rft_now();
    bool batches = is_from_device(&list) && rft_device_get_caps(device).digests;
    refit_status status =
        batches ? write_batches(publisher, &list, error) : write_singly(publisher, &list, 0, error);
    rft_write_count(publisher, began);
    return status;
}
