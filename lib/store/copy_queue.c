/*
 * A stream, an event in the caller's stream and one in the own.
 *
 * A copy from or to the host is cut where a page-lock registration ends and at offload.piece_bytes,
 * so that copies of other streams are not held up behind it on the link. What has been put on the
 * stream counts as under way until an event behind it says otherwise; an event that could not be
 * recorded says nothing.
 */
#include "store/copy_queue.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "kernels/digest.h"

#define HELD_MOST    2u
#define BATCH_MOST   16u
#define WINDOW_BYTES (UINT64_C(4) << 20) /* a whole number of words */

struct rft_copy_queue {
    refit_device *device; /* retained */
    rft_device_caps caps;
    uint64_t piece_bytes;
    refit_stream_ref stream;
    rft_event *before; /* in the caller's stream */
    rft_event *behind; /* in ours */
    rft_pending *held[HELD_MOST];
    uint32_t held_count;
    bool busy;
    uint64_t sum;
    unsigned char *window; /* of the host, to digest through; NULL: not needed so far */
    uint32_t timeout_ms;   /* for a window */
    rft_digest_batch batch;
};

static refit_status parts_open(rft_copy_queue *copy_queue, refit_error *error)
{
    refit_status status;
    RFT_TRY(rft_device_event_open(copy_queue->device, &copy_queue->before, error));
    RFT_TRY_GOTO(rft_device_event_open(copy_queue->device, &copy_queue->behind, error),
                 undo_before);
    RFT_TRY_GOTO(refit_stream_open(copy_queue->device, &copy_queue->stream, error), undo_behind);
    return REFIT_OK;

undo_behind:
    rft_device_event_close(copy_queue->device, copy_queue->behind);
undo_before:
    rft_device_event_close(copy_queue->device, copy_queue->before);
    return status;
}

refit_status rft_copy_queue_open(refit_device *device, const refit_config *config,
                                 rft_copy_queue **out, refit_error *error)
{
    rft_copy_queue *copy_queue = rft_calloc(1, sizeof *copy_queue);
    RFT_REFUSE_IF(copy_queue == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to copy from a device");
    copy_queue->device = device;
    copy_queue->caps = rft_device_get_caps(device);
    copy_queue->piece_bytes = config->offload_piece_bytes;
    copy_queue->timeout_ms = config->broadcast_stage_timeout_ms;
    refit_status status = parts_open(copy_queue, error);
    if (status == REFIT_OK) {
        rft_device_retain(device);
        *out = copy_queue;
    } else {
        rft_free(copy_queue);
    }
    return status;
}

static void finish(rft_copy_queue *copy_queue)
{
    while (copy_queue->held_count > 0) {
        rft_pending_lower(copy_queue->held[--copy_queue->held_count]);
    }
    copy_queue->busy = false;
}

/* It is idle; and who closes a publisher cannot ask again, so a refusal is not taken at once. */
static bool stream_close(rft_copy_queue *copy_queue)
{
    refit_status status = refit_stream_close(copy_queue->device, copy_queue->stream, NULL);
    if (status != REFIT_OK)
        status = refit_stream_close(copy_queue->device, copy_queue->stream, NULL);
    return status == REFIT_OK;
}

bool rft_copy_queue_close(rft_copy_queue *copy_queue, int64_t deadline)
{
    if (copy_queue == NULL) return true;
    if (copy_queue->busy)
        (void)rft_copy_queue_wait(copy_queue, (uint32_t)rft_ms_until(deadline), NULL);
    if (copy_queue->busy) return false;
    refit_device *device = copy_queue->device;
    rft_device_event_close(device, copy_queue->before);
    rft_device_event_close(device, copy_queue->behind);
    rft_digest_batch_close(&copy_queue->batch, device);
    bool closed = stream_close(copy_queue);
    rft_device_release(device);
    rft_free(copy_queue->window);
    rft_free(copy_queue);
    return closed;
}

refit_device *rft_copy_queue_device(const rft_copy_queue *copy_queue)
{
    return copy_queue->device;
}

refit_status rft_copy_queue_follow(rft_copy_queue *copy_queue, refit_stream_ref after,
                                   refit_error *error)
{
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(copy_queue->device, copy_queue->before, after, error));
    return rft_device_event_join(copy_queue->device, copy_queue->before, copy_queue->stream, error);
}

void rft_copy_queue_hold(rft_copy_queue *copy_queue, rft_pending *pending)
{
    rft_pending_raise(pending);
    copy_queue->held[copy_queue->held_count++] = pending;
    copy_queue->busy = true;
}

/* How many bytes may be one copy. */
static uint64_t reach(const rft_copy_queue *copy_queue, const void *to, const void *from,
                      uint64_t bytes, const rft_pinning *pinning)
{
    bytes = rft_pinning_reach(pinning, to, bytes);
    bytes = rft_pinning_reach(pinning, from, bytes);
    return rft_min_u64(bytes, copy_queue->piece_bytes);
}

refit_status rft_copy_queue_copy(rft_copy_queue *copy_queue, void *to, const void *from,
                                 uint64_t bytes, const rft_pinning *pinning, refit_error *error)
{
    uint32_t most =
        copy_queue->caps.batch_most < BATCH_MOST ? copy_queue->caps.batch_most : BATCH_MOST;
    unsigned char *target = to;
    const unsigned char *source = from;
    copy_queue->busy = true;
    while (bytes > 0) {
        rft_copy copies[BATCH_MOST];
        uint32_t count = 0;
        for (; bytes > 0 && count < most; count++) {
            uint64_t step = reach(copy_queue, target, source, bytes, pinning);
            copies[count] =
                (rft_copy){.to = target, .from = source, .bytes = step, .checked = true};
            target += step;
            source += step;
            bytes -= step;
        }
        RFT_TRY(rft_device_copy_batch(copy_queue->device, copy_queue->stream, copies, count,
                                      RFT_COPY_STREAM, error));
    }
    return REFIT_OK;
}

refit_status rft_copy_queue_copy_within(rft_copy_queue *copy_queue, void *to, const void *from,
                                        uint64_t bytes, refit_error *error)
{
    copy_queue->busy = true;
    return refit_stream_copy(copy_queue->device, copy_queue->stream, to, from, bytes, error);
}

bool rft_copy_queue_digests(const rft_copy_queue *copy_queue)
{
    return copy_queue->caps.digests;
}

/* By the CPU, from a copy of each piece. */
static refit_status digest_here(rft_copy_queue *copy_queue, const unsigned char *memory,
                                uint64_t bytes, uint64_t offset, refit_error *error)
{
    uint64_t sum = 0;
    if (copy_queue->window == NULL) copy_queue->window = rft_calloc(1, WINDOW_BYTES);
    RFT_REFUSE_IF(copy_queue->window == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to digest what lies on a device");
    for (uint64_t at = 0; at < bytes; at += WINDOW_BYTES) {
        uint64_t step = rft_min_u64(bytes - at, WINDOW_BYTES);
        RFT_TRY(
            rft_copy_queue_copy(copy_queue, copy_queue->window, memory + at, step, NULL, error));
        RFT_TRY(rft_copy_queue_wait(copy_queue, copy_queue->timeout_ms, error));
        sum += rft_digest_part(copy_queue->window, step, offset + at);
    }
    copy_queue->sum = sum;
    return REFIT_OK;
}

refit_status rft_copy_queue_digest(rft_copy_queue *copy_queue, const void *memory, uint64_t bytes,
                                   uint64_t offset, refit_error *error)
{
    if (!copy_queue->caps.digests) return digest_here(copy_queue, memory, bytes, offset, error);
    copy_queue->busy = true;
    return rft_device_digest(copy_queue->device, copy_queue->stream, memory, bytes, offset,
                             &copy_queue->sum, error);
}

uint64_t rft_copy_queue_sum(const rft_copy_queue *copy_queue)
{
    return copy_queue->sum;
}

/* ---- Many digests */

refit_status rft_copy_queue_batch_open(rft_copy_queue *copy_queue, refit_error *error)
{
    if (copy_queue->batch.sums != NULL) return REFIT_OK;
    return rft_digest_batch_open(&copy_queue->batch, copy_queue->device, error);
}

refit_status rft_copy_queue_batch_begin(rft_copy_queue *copy_queue, refit_error *error)
{
    copy_queue->busy = true;
    return rft_device_zero(copy_queue->device, copy_queue->stream, copy_queue->batch.sums,
                           RFT_DIGEST_BATCH_MOST * sizeof(uint64_t), error);
}

refit_status rft_copy_queue_batch_add(rft_copy_queue *copy_queue, uint32_t index, void *to,
                                      const void *from, uint64_t bytes, refit_error *error)
{
    return rft_device_digest_copy(copy_queue->device, copy_queue->stream, to, from, bytes, 0,
                                  rft_digest_batch_sum(&copy_queue->batch, index), error);
}

refit_status rft_copy_queue_batch_end(rft_copy_queue *copy_queue, uint32_t count,
                                      refit_error *error)
{
    rft_digest_batch *batch = &copy_queue->batch;
    return rft_copy_queue_copy(copy_queue, batch->twins, batch->sums, count * sizeof(uint64_t),
                               &batch->pinning, error);
}

const uint64_t *rft_copy_queue_batch_sums(const rft_copy_queue *copy_queue)
{
    return copy_queue->batch.twins;
}

/* ---- The end of work */

refit_status rft_copy_queue_wait(rft_copy_queue *copy_queue, uint32_t timeout_ms,
                                 refit_error *error)
{
    refit_device *device = copy_queue->device;
    refit_status status =
        rft_device_event_record(device, copy_queue->behind, copy_queue->stream, error);
    if (status != REFIT_OK) {
        /* A lost device fails this, too, and does nothing any more. */
        refit_status last = rft_device_event_wait(device, copy_queue->behind, 0, NULL);
        if (last != REFIT_OK && last != REFIT_ERR_TIMEOUT) finish(copy_queue);
        return status;
    }
    status = rft_device_event_wait(device, copy_queue->behind, timeout_ms, error);
    if (status != REFIT_ERR_TIMEOUT) finish(copy_queue);
    return status;
}

bool rft_copy_queue_is_busy(const rft_copy_queue *copy_queue)
{
    return copy_queue != NULL && copy_queue->busy;
}

bool rft_copy_queue_holds(const rft_copy_queue *copy_queue, const rft_pending *pending)
{
    for (uint32_t i = 0; copy_queue != NULL && i < copy_queue->held_count; i++) {
        if (copy_queue->held[i] == pending) return true;
    }
    return false;
}
