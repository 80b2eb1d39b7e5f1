/*
 * One stream, an event in the caller's stream and an event in the queue's own.
 *
 * A copy from or to the host is cut where a page-lock registration ends and at offload.piece_bytes,
 * so that copies of other streams are not held up by it on the link. What has been put on the
 * stream counts as under way until an event after it says otherwise; an event that could not be
 * recorded says nothing.
 */
#include "store/copy_queue.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/pool.h"
#include "kernels/digest.h"
#include "store/device_memory.h"

#define HELD_MOST    2u
#define BATCH_MOST   16u
#define TABLE_BYTES  (RFT_DIGEST_BATCH_MOST * sizeof(rft_digest_job))
#define WINDOW_BYTES (UINT64_C(4) << 20) /* a whole number of words */

#define STAGING_ALIGNMENT 64u
#define STAGING_AGAIN_NS  (INT64_C(30) * 1000 * 1000 * 1000)

/* ---- Many digests of a device's memory
 *
 * They are jobs in a table, in host memory, which is page-locked where the device wants that, so
 * that copies from and to it wait for nothing. The table is copied to the device, all is done
 * there at once, and it comes back with the sums.
 */

/* {0} is not open: closing it is harmless. */
typedef struct digest_batch {
    rft_device_memory *room; /* the table on the device; NULL: not open */
    rft_segment segment;     /* and here */
    rft_pinning pinning;
    uint32_t count; /* of the jobs in it */
    bool under_way; /* no wait has seen its end: nothing is written here */
    bool wrong;     /* one that was added cannot be taken */
} digest_batch;

static rft_digest_job *jobs_of(const digest_batch *batch)
{
    return (rft_digest_job *)(void *)batch->segment.memory;
}

static refit_status table_open(digest_batch *batch, refit_device *device, refit_error *error)
{
    RFT_TRY(rft_segment_create_private(&batch->segment, TABLE_BYTES, error));
    if (!rft_device_get_caps(device).needs_pinned) return REFIT_OK;
    refit_status status = rft_pinning_open(&batch->pinning, device, batch->segment.memory,
                                           TABLE_BYTES, TABLE_BYTES, false, error);
    if (status != REFIT_OK) rft_segment_close(&batch->segment);
    return status;
}

/* All of it or nothing. REFIT_ERR_DEVICE_MEMORY, and what the page-lock meets with. */
static refit_status digest_batch_open(digest_batch *batch, refit_device *device, refit_error *error)
{
    rft_device_memory *room = NULL;
    *batch = (digest_batch){.segment.fd = -1};
    RFT_TRY(rft_device_memory_open(device, TABLE_BYTES, &room, error));
    refit_status status = table_open(batch, device, error);
    if (status == REFIT_OK) {
        batch->room = room;
    } else {
        rft_device_memory_close(room, device);
    }
    return status;
}

/* With nothing under way that uses it. */
static void digest_batch_close(digest_batch *batch, refit_device *device)
{
    if (batch->room == NULL) return;
    rft_pinning_close(&batch->pinning);
    rft_segment_close(&batch->segment);
    rft_device_memory_close(batch->room, device);
    *batch = (digest_batch){0};
}

/* ---- Host memory that is not page-locked, on its way to the device
 *
 * It goes through two halves of memory that is: threads fill one while the device reads the other.
 */

#define FILL_PART (UINT64_C(512) << 10)

/* Bytes on their way into a half. */
typedef struct half_fill {
    unsigned char *to;
    const unsigned char *from;
    uint64_t bytes;
} half_fill;

typedef struct staging {
    unsigned char *memory; /* two halves; NULL: not open */
    rft_segment segment;   /* that holds them */
    rft_pinning pinning;
    rft_pool fillers;
    rft_event *read[2]; /* the device has read a half, */
    bool used[2];       /* which it was given */
    uint32_t half;      /* that is being filled, */
    uint64_t filled;    /* so far */
    int64_t deadline;   /* of the work under way */
    int64_t open_at;    /* when an open that failed is tried again */
} staging;

static void fill_part(void *user, uint32_t part, uint32_t worker)
{
    const half_fill *fill = user;
    uint64_t at = part * FILL_PART;
    (void)worker;
    memcpy(fill->to + at, fill->from + at, rft_min_u64(FILL_PART, fill->bytes - at));
}

static void staging_fill(staging *stage, unsigned char *to, const unsigned char *from,
                         uint64_t bytes)
{
    half_fill fill = {to, from, bytes};
    rft_pool_items(&stage->fillers, (uint32_t)((bytes + FILL_PART - 1) / FILL_PART), fill_part,
                   &fill);
}

static refit_status staging_pin(staging *stage, refit_device *device, refit_error *error)
{
    RFT_TRY(rft_segment_create_private(&stage->segment, 2 * RFT_STAGING_BYTES, error));
    refit_status status =
        rft_pinning_open(&stage->pinning, device, stage->segment.memory, 2 * RFT_STAGING_BYTES,
                         2 * RFT_STAGING_BYTES, false, error);
    if (status != REFIT_OK) rft_segment_close(&stage->segment);
    return status;
}

/* All of it or nothing. */
static refit_status staging_open(staging *stage, refit_device *device, refit_error *error)
{
    static const rft_pool_kind fillers = {.thread = "refit-stage", .work = "copies to a GPU"};
    refit_status status;
    *stage = (staging){.segment.fd = -1};
    RFT_TRY(rft_pool_open(&stage->fillers, &fillers, 0, error));
    RFT_TRY_GOTO(rft_device_event_open(device, &stage->read[0], error), undo_pool);
    RFT_TRY_GOTO(rft_device_event_open(device, &stage->read[1], error), undo_first);
    RFT_TRY_GOTO(staging_pin(stage, device, error), undo_second);
    stage->memory = stage->segment.memory;
    return REFIT_OK;

undo_second:
    rft_device_event_close(device, stage->read[1]);
undo_first:
    rft_device_event_close(device, stage->read[0]);
undo_pool:
    rft_pool_close(&stage->fillers);
    return status;
}

/* With nothing under way that uses it. */
static void staging_close(staging *stage, refit_device *device)
{
    if (stage->memory == NULL) return;
    rft_pinning_close(&stage->pinning);
    rft_segment_close(&stage->segment);
    rft_device_event_close(device, stage->read[0]);
    rft_device_event_close(device, stage->read[1]);
    rft_pool_close(&stage->fillers);
    *stage = (staging){0};
}

/* ---- The queue */

struct rft_copy_queue {
    refit_device *device; /* retained */
    rft_device_caps caps;
    uint64_t piece_bytes;
    refit_stream_ref stream;
    rft_event *before; /* in the caller's stream */
    rft_event *latest; /* in the queue's own stream */
    rft_pending *held[HELD_MOST];
    uint32_t held_count;
    bool busy;
    uint64_t sum;
    unsigned char *window; /* of the host, to digest through; NULL: not needed so far */
    uint32_t timeout_ms;   /* for a window, and for the halves */
    digest_batch batch;
    staging stage;
};

static refit_status parts_open(rft_copy_queue *queue, refit_error *error)
{
    refit_status status;
    RFT_TRY(rft_device_event_open(queue->device, &queue->before, error));
    RFT_TRY_GOTO(rft_device_event_open(queue->device, &queue->latest, error), undo_before);
    RFT_TRY_GOTO(refit_stream_open(queue->device, &queue->stream, error), undo_after);
    return REFIT_OK;

undo_after:
    rft_device_event_close(queue->device, queue->latest);
undo_before:
    rft_device_event_close(queue->device, queue->before);
    return status;
}

refit_status rft_copy_queue_open(refit_device *device, const refit_config *config,
                                 rft_copy_queue **out, refit_error *error)
{
    rft_copy_queue *queue = rft_calloc(1, sizeof *queue);
    RFT_REFUSE_IF(queue == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to copy from a device");
    queue->device = device;
    queue->caps = rft_device_get_caps(device);
    queue->piece_bytes = config->offload_piece_bytes;
    queue->timeout_ms = config->broadcast_stage_timeout_ms;
    refit_status status = parts_open(queue, error);
    if (status == REFIT_OK) {
        rft_device_retain(device);
        *out = queue;
    } else {
        rft_free(queue);
    }
    return status;
}

static void finish(rft_copy_queue *queue)
{
    while (queue->held_count > 0) {
        rft_pending_lower(queue->held[--queue->held_count]);
    }
    queue->batch.under_way = false;
    queue->busy = false;
}

/* Of an idle queue. The caller that closes a publisher cannot try again, so this tries twice. */
static bool stream_close(rft_copy_queue *queue)
{
    refit_status status = refit_stream_close(queue->device, queue->stream, NULL);
    if (status != REFIT_OK) status = refit_stream_close(queue->device, queue->stream, NULL);
    return status == REFIT_OK;
}

bool rft_copy_queue_close(rft_copy_queue *queue, int64_t deadline)
{
    if (queue == NULL) return true;
    if (queue->busy) (void)rft_copy_queue_wait(queue, (uint32_t)rft_ms_until(deadline), NULL);
    if (queue->busy) return false;
    refit_device *device = queue->device;
    rft_device_event_close(device, queue->before);
    rft_device_event_close(device, queue->latest);
    digest_batch_close(&queue->batch, device);
    staging_close(&queue->stage, device);
    bool closed = stream_close(queue);
    rft_device_release(device);
    rft_free(queue->window);
    rft_free(queue);
    return closed;
}

refit_device *rft_copy_queue_device(const rft_copy_queue *queue)
{
    return queue->device;
}

refit_status rft_copy_queue_follow(rft_copy_queue *queue, refit_stream_ref after,
                                   refit_error *error)
{
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(queue->device, queue->before, after, error));
    return rft_device_event_join(queue->device, queue->before, queue->stream, error);
}

void rft_copy_queue_hold(rft_copy_queue *queue, rft_pending *pending)
{
    rft_pending_raise(pending);
    queue->held[queue->held_count++] = pending;
    queue->busy = true;
}

/* How many bytes may be one copy. */
static uint64_t reach(const rft_copy_queue *queue, const void *to, const void *from, uint64_t bytes,
                      const rft_pinning *pinning)
{
    bytes = rft_pinning_reach(pinning, to, bytes);
    bytes = rft_pinning_reach(pinning, from, bytes);
    return rft_min_u64(bytes, queue->piece_bytes);
}

refit_status rft_copy_queue_copy(rft_copy_queue *queue, void *to, const void *from, uint64_t bytes,
                                 const rft_pinning *pinning, refit_error *error)
{
    uint32_t most = queue->caps.batch_most < BATCH_MOST ? queue->caps.batch_most : BATCH_MOST;
    unsigned char *target = to;
    const unsigned char *source = from;
    queue->busy = true;
    while (bytes > 0) {
        rft_copy copies[BATCH_MOST];
        uint32_t count = 0;
        for (; bytes > 0 && count < most; count++) {
            uint64_t step = reach(queue, target, source, bytes, pinning);
            copies[count] =
                (rft_copy){.to = target, .from = source, .bytes = step, .known_memory = true};
            target += step;
            source += step;
            bytes -= step;
        }
        RFT_TRY(rft_device_copy_batch(queue->device, queue->stream, copies, count, RFT_COPY_STREAM,
                                      error));
    }
    return REFIT_OK;
}

void rft_copy_queue_open_staging(rft_copy_queue *queue)
{
    refit_error ignored;
    staging *stage = &queue->stage;
    if (stage->memory != NULL || !queue->caps.needs_pinned || rft_now() < stage->open_at) return;
    if (staging_open(stage, queue->device, &ignored) != REFIT_OK)
        *stage = (staging){.open_at = rft_now() + STAGING_AGAIN_NS};
}

/* The other half, once the device has read it. */
static refit_status turn(rft_copy_queue *queue, refit_error *error)
{
    staging *stage = &queue->stage;
    rft_event *read = stage->read[stage->half], *other = stage->read[1 - stage->half];
    RFT_TRY(rft_device_event_record(queue->device, read, queue->stream, error));
    stage->used[stage->half] = true;
    if (stage->used[1 - stage->half])
        RFT_TRY(rft_device_event_wait(queue->device, other, (uint32_t)rft_ms_until(stage->deadline),
                                      error));
    stage->half = 1 - stage->half;
    stage->filled = 0;
    return REFIT_OK;
}

/* Room for at least `least` bytes, which a half has, and at most `most`. */
static refit_status make_room(rft_copy_queue *queue, uint64_t least, uint64_t most,
                              unsigned char **room, uint64_t *bytes, refit_error *error)
{
    staging *stage = &queue->stage;
    if (!queue->busy) stage->deadline = rft_deadline(queue->timeout_ms);
    if (RFT_STAGING_BYTES - stage->filled < least) RFT_TRY(turn(queue, error));
    *room = stage->memory + stage->half * RFT_STAGING_BYTES + stage->filled;
    *bytes = rft_min_u64(most, RFT_STAGING_BYTES - stage->filled);
    (void)rft_align_u64(stage->filled + *bytes, STAGING_ALIGNMENT, &stage->filled);
    return REFIT_OK;
}

refit_status rft_copy_queue_copy_up(rft_copy_queue *queue, void *to, const void *from,
                                    uint64_t bytes, const rft_pinning *pinning, refit_error *error)
{
    unsigned char *target = to, *room;
    const unsigned char *source = from;
    if (pinning != NULL || queue->stage.memory == NULL)
        return rft_copy_queue_copy(queue, to, from, bytes, pinning, error);
    for (uint64_t at = 0, step; at < bytes; at += step) {
        RFT_TRY(make_room(queue, 1, bytes - at, &room, &step, error));
        staging_fill(&queue->stage, room, source + at, step);
        RFT_TRY(rft_copy_queue_copy(queue, target + at, room, step, &queue->stage.pinning, error));
    }
    return REFIT_OK;
}

/* Packed, as many at once as there is room for; one that a half has no room for by itself. */
static refit_status copy_rows_up(rft_copy_queue *queue, const rft_rows *rows, refit_error *error)
{
    for (uint64_t at = 0, some; at < rows->count; at += some) {
        uint64_t bytes, left = rows->count - at, most = RFT_STAGING_BYTES / rows->bytes;
        rft_rows packed = *rows;
        unsigned char *room;
        const unsigned char *from = (const unsigned char *)rows->from + at * rows->from_step;
        packed.to = (unsigned char *)rows->to + at * rows->to_step;
        some = 1;
        if (most == 0) {
            RFT_TRY(rft_copy_queue_copy_up(queue, packed.to, from, rows->bytes, NULL, error));
            continue;
        }
        RFT_TRY(make_room(queue, rows->bytes, rft_min_u64(left, most) * rows->bytes, &room, &bytes,
                          error));
        some = bytes / rows->bytes;
        for (uint64_t i = 0; i < some; i++)
            memcpy(room + i * rows->bytes, from + i * rows->from_step, rows->bytes);
        packed.from = room;
        packed.from_step = rows->bytes;
        packed.count = some;
        queue->busy = true;
        RFT_TRY(rft_device_copy_rows(queue->device, queue->stream, &packed, error));
    }
    return REFIT_OK;
}

refit_status rft_copy_queue_copy_within(rft_copy_queue *queue, void *to, const void *from,
                                        uint64_t bytes, refit_error *error)
{
    queue->busy = true;
    return refit_stream_copy(queue->device, queue->stream, to, from, bytes, error);
}

refit_stream_ref rft_copy_queue_stream(rft_copy_queue *queue)
{
    queue->busy = true;
    return queue->stream;
}

/* How many rows one copy takes; 0: the first lies across two registrations. */
static uint64_t rows_at_once(const rft_copy_queue *queue, const rft_rows *rows,
                             const rft_pinning *pinning)
{
    if (!rows->from_host) return rows->count;
    uint64_t all = (rows->count - 1) * rows->from_step + rows->bytes;
    uint64_t there = rft_pinning_reach(pinning, rows->from, all);
    if (there < rows->bytes) return 0;
    uint64_t most = queue->piece_bytes / rows->bytes;
    return rft_min_u64((there - rows->bytes) / rows->from_step + 1, most > 0 ? most : 1);
}

refit_status rft_copy_queue_copy_rows(rft_copy_queue *queue, const rft_rows *rows,
                                      const rft_pinning *pinning, refit_error *error)
{
    rft_rows left = *rows;
    if (rows->from_host && pinning == NULL && queue->stage.memory != NULL)
        return copy_rows_up(queue, rows, error);
    queue->busy = true;
    while (left.count > 0) {
        rft_rows some = left;
        some.count = rows_at_once(queue, &left, pinning);
        if (some.count == 0) {
            some.count = 1;
            RFT_TRY(rft_copy_queue_copy(queue, left.to, left.from, left.bytes, pinning, error));
        } else {
            RFT_TRY(rft_device_copy_rows(queue->device, queue->stream, &some, error));
        }
        left.count -= some.count;
        left.to = (unsigned char *)left.to + some.count * left.to_step;
        left.from = (const unsigned char *)left.from + some.count * left.from_step;
    }
    return REFIT_OK;
}

refit_status rft_copy_queue_cast(rft_copy_queue *queue, uint16_t *to, const float *from,
                                 uint64_t count, refit_error *error)
{
    queue->busy = true;
    return refit_stream_cast_bf16(queue->device, queue->stream, to, from, count, error);
}

bool rft_copy_queue_digests(const rft_copy_queue *queue)
{
    return queue->caps.digests;
}

/* By the CPU, from a copy of each piece. */
static refit_status digest_here(rft_copy_queue *queue, const unsigned char *memory, uint64_t bytes,
                                uint64_t offset, refit_error *error)
{
    uint64_t sum = 0;
    if (queue->window == NULL) queue->window = rft_calloc(1, WINDOW_BYTES);
    RFT_REFUSE_IF(queue->window == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to digest what lies on a device");
    for (uint64_t at = 0; at < bytes; at += WINDOW_BYTES) {
        uint64_t step = rft_min_u64(bytes - at, WINDOW_BYTES);
        RFT_TRY(rft_copy_queue_copy(queue, queue->window, memory + at, step, NULL, error));
        RFT_TRY(rft_copy_queue_wait(queue, queue->timeout_ms, error));
        sum += rft_digest_part(queue->window, step, offset + at);
    }
    queue->sum = sum;
    return REFIT_OK;
}

refit_status rft_copy_queue_digest(rft_copy_queue *queue, const void *memory, uint64_t bytes,
                                   uint64_t offset, refit_error *error)
{
    if (!queue->caps.digests) return digest_here(queue, memory, bytes, offset, error);
    queue->busy = true;
    return rft_device_digest(queue->device, queue->stream, memory, bytes, offset, &queue->sum,
                             error);
}

uint64_t rft_copy_queue_sum(const rft_copy_queue *queue)
{
    return queue->sum;
}

/* ---- Many digests */

refit_status rft_copy_queue_batch_open(rft_copy_queue *queue, refit_error *error)
{
    if (queue->batch.room != NULL) return REFIT_OK;
    return digest_batch_open(&queue->batch, queue->device, error);
}

refit_status rft_copy_queue_batch_begin(rft_copy_queue *queue, refit_error *error)
{
    RFT_REFUSE_IF(queue->batch.under_way, error, REFIT_ERR_TIMEOUT,
                  "digests of an earlier call are still under way");
    queue->batch.count = 0;
    queue->batch.wrong = false;
    return REFIT_OK;
}

void rft_copy_queue_batch_add(rft_copy_queue *queue, void *to, const void *from, uint64_t bytes,
                              uint64_t offset)
{
    digest_batch *batch = &queue->batch;
    bool fits = batch->count < RFT_DIGEST_BATCH_MOST;
    if (!fits || (uintptr_t)to % 8 != 0 || offset % 8 != 0) {
        batch->wrong = true; /* the kernel would lose the device's context */
        return;
    }
    rft_digest_job *job = &jobs_of(batch)[batch->count];
    uint64_t before = batch->count == 0 ? 0 : job[-1].end;
    *job = (rft_digest_job){.to = (uintptr_t)to,
                            .from = (uintptr_t)from,
                            .bytes = bytes,
                            .offset = offset,
                            .end = before + RFT_DIGEST_CHUNKS(bytes)};
    batch->count++;
}

refit_status rft_copy_queue_batch_end(rft_copy_queue *queue, refit_error *error)
{
    digest_batch *batch = &queue->batch;
    rft_digest_job *here = jobs_of(batch), *there = (rft_digest_job *)(void *)batch->room->memory;
    uint64_t bytes = batch->count * sizeof *here;
    RFT_REFUSE_IF(batch->wrong, error, REFIT_ERR_INVALID,
                  "a batch of digests has one too many, or one that is not on a boundary of 8");
    batch->under_way = batch->count > 0;
    RFT_TRY(rft_copy_queue_copy(queue, there, here, bytes, &batch->pinning, error));
    RFT_TRY(rft_device_digest_list(queue->device, queue->stream, there, batch->count, error));
    return rft_copy_queue_copy(queue, here, there, bytes, &batch->pinning, error);
}

uint64_t rft_copy_queue_batch_sum(const rft_copy_queue *queue, uint32_t index)
{
    return jobs_of(&queue->batch)[index].sum;
}

/* ---- The end of work */

refit_status rft_copy_queue_wait(rft_copy_queue *queue, uint32_t timeout_ms, refit_error *error)
{
    refit_device *device = queue->device;
    refit_status status = rft_device_event_record(device, queue->latest, queue->stream, error);
    if (status == REFIT_OK) {
        status = rft_device_event_wait(device, queue->latest, timeout_ms, error);
    }
    /* A lost device does nothing any more. */
    bool lost = status == REFIT_ERR_DEVICE && rft_device_is_lost(device);
    if (status == REFIT_OK || lost) finish(queue);
    return status;
}

bool rft_copy_queue_is_busy(const rft_copy_queue *queue)
{
    return queue != NULL && queue->busy;
}

bool rft_copy_queue_holds(const rft_copy_queue *queue, const rft_pending *pending)
{
    for (uint32_t i = 0; queue != NULL && i < queue->held_count; i++) {
        if (queue->held[i] == pending) return true;
    }
    return false;
}
