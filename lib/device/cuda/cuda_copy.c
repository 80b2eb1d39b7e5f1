/*
 * Batches of copies: one walk over a batch sorts its copies.
 *
 * - Copies between host memory that is pinned here and any other memory are gathered into batches
 *   for the copy engines (cuda_batch.c).
 * - Of these, two or more small ones whose host sides follow each other are a chunk, which goes
 *   through a bounce buffer (cuda_bounce.c). A single small copy would gain nothing.
 * - All other copies (pageable memory, device to device) take a call each, since the driver may do
 *   such a copy while the caller waits, or refuse it in a batch.
 *
 * The list of pinned memory says which side is host memory. The other side is not looked up: copy
 * engines refuse memory that they cannot reach, but a kernel that touches it loses the context. So
 * only copies whose memory was checked go through a bounce buffer.
 */
#include "device/cuda/cuda_device.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "device/cuda/cuda_bounce.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_stream.h"

/* ---- Batches ------------------------------------------------------------------------------ */

#define GAP_MOST    8192u     /* padding that is copied rather than parting a chunk */
#define PITCH_MOST  INT32_MAX /* that every GPU takes */
#define SMALL_LEAST 16u       /* small copies of a batch that are worth a kernel */

struct rft_cuda_copier {
    rft_cuda_staging *staging;
    rft_mutex lock;
    rft_cuda_batch *spare; /* guarded by lock; one for each thread that was ever here at once */
};

typedef struct copy_walk {
    rft_cuda_device *cuda;
    rft_cu_stream stream;
    const rft_copy *copies;
    uint32_t count;
    uint32_t at;
    rft_cuda_pinned pinned; /* that held the last host side */
    rft_cuda_batch *batch;
    rft_cuda_bounce *bounce; /* NULL: none is small */
    uint64_t small;
} copy_walk;

/* ---- The copier -------------------------------------------------------------------------- */

refit_status rft_cuda_copier_open(rft_cuda_device *cuda, rft_cuda_copier **out, refit_error *error)
{
    rft_cuda_copier *copier = rft_calloc(1, sizeof *copier);
    RFT_REFUSE_IF(copier == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a copier");
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(rft_mutex_open(&copier->lock, error), free_copier);
    RFT_TRY_GOTO(rft_cuda_staging_open(cuda, &copier->staging, error), close_lock);
    *out = copier;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&copier->lock);
free_copier:
    rft_free(copier);
    return status;
}

void rft_cuda_copier_close(rft_cuda_device *cuda, rft_cuda_copier *copier)
{
    if (copier == NULL) return;
    rft_cuda_staging_close(cuda, copier->staging);
    while (copier->spare != NULL) {
        rft_cuda_batch *batch = copier->spare;
        copier->spare = batch->next;
        rft_free(batch);
    }
    rft_mutex_close(&copier->lock);
    rft_free(copier);
}

uint64_t rft_cuda_copier_small_bytes(const rft_cuda_device *cuda)
{
    return rft_cuda_staging_small_bytes(cuda->copier->staging);
}

static refit_status take_batch(rft_cuda_copier *copier, rft_cuda_batch **out, refit_error *error)
{
    rft_lock(&copier->lock);
    *out = copier->spare;
    if (*out != NULL) copier->spare = (*out)->next;
    rft_unlock(&copier->lock);
    if (*out == NULL) *out = rft_calloc(1, sizeof **out);
    RFT_REFUSE_IF(*out == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a batch");
    return REFIT_OK;
}

static void give_batch(rft_cuda_copier *copier, rft_cuda_batch *batch)
{
    rft_lock(&copier->lock);
    batch->next = copier->spare;
    copier->spare = batch;
    rft_unlock(&copier->lock);
}

/* ---- What a copy is ---------------------------------------------------------------------- */

static bool is_pinned(copy_walk *walk, const void *memory, uint64_t bytes)
{
    if (rft_cuda_pinned_holds(walk->pinned, memory, bytes)) return true;
    rft_cuda_pinned pinned = rft_cuda_pins_find(walk->cuda, memory);
    if (!rft_cuda_pinned_holds(pinned, memory, bytes)) return false;
    walk->pinned = pinned;
    return true;
}

/* One side is pinned: of a copy of known memory the other is known not to be. */
static rft_cuda_direction find_direction(copy_walk *walk, const rft_copy *copy)
{
    if (copy->known_memory && rft_cuda_pinned_holds(walk->pinned, copy->from, copy->bytes)) {
        return RFT_CUDA_TO_DEVICE;
    }
    bool out = is_pinned(walk, copy->to, copy->bytes);
    if (out && copy->known_memory) return RFT_CUDA_TO_HOST;
    bool back = is_pinned(walk, copy->from, copy->bytes);
    if (out == back) return RFT_CUDA_NEITHER;
    return out ? RFT_CUDA_TO_HOST : RFT_CUDA_TO_DEVICE;
}

static const void *host_side(const rft_copy *copy, rft_cuda_direction direction)
{
    return direction == RFT_CUDA_TO_HOST ? copy->to : copy->from;
}

static bool is_small(const copy_walk *walk, const rft_copy *copy)
{
    return copy->known_memory && copy->bytes > 0 && copy->bytes < walk->small;
}

/* Does `next` go on from `copy` on the host, in the same registration? */
static bool follows(const copy_walk *walk, const rft_copy *copy, const rft_copy *next,
                    rft_cuda_direction direction)
{
    const void *host = host_side(next, direction);
    uintptr_t end = (uintptr_t)host_side(copy, direction) + copy->bytes;
    uint64_t most = rft_min_u64(copy->slack, GAP_MOST);
    return is_small(walk, next) && (uintptr_t)host >= end && (uintptr_t)host - end <= most &&
           rft_cuda_pinned_holds(walk->pinned, host, next->bytes);
}

/* The end of the chunk that begins where the walk is. */
static uint32_t find_end(const copy_walk *walk, rft_cuda_direction direction)
{
    uint32_t end = walk->at + 1;
    if (walk->bounce == NULL || direction == RFT_CUDA_NEITHER) return end;
    if (!is_small(walk, &walk->copies[walk->at])) return end;
    while (end < walk->count &&
           follows(walk, &walk->copies[end - 1], &walk->copies[end], direction)) {
        end++;
    }
    return end;
}

/* ---- The walk ---------------------------------------------------------------------------- */

static refit_status put_one(copy_walk *walk, const rft_copy *copy, rft_cuda_direction direction,
                            refit_error *error)
{
    rft_cu_ptr to = (uintptr_t)copy->to, from = (uintptr_t)copy->from;
    if (direction == RFT_CUDA_NEITHER) {
        return rft_cuda_copy_one(walk->cuda, walk->stream, to, from, copy->bytes, error);
    }
    return rft_cuda_batch_add(walk->cuda, walk->batch, to, from, copy->bytes,
                              direction == RFT_CUDA_TO_DEVICE, error);
}

/* Once the bounce buffer has no room, the copy engines take the copies from there to the end of the
 * batch. */
static refit_status put_chunk(copy_walk *walk, uint32_t end, rft_cuda_direction direction,
                              bool *full, refit_error *error)
{
    bool joined = false;
    while (walk->at < end) {
        const rft_copy *copy = &walk->copies[walk->at++];
        bool taken = false;
        if (!*full) {
            RFT_TRY(rft_cuda_bounce_add(walk->cuda, walk->bounce, copy, direction, joined, &taken,
                                        error));
        }
        *full = !taken;
        if (!taken) RFT_TRY(put_one(walk, copy, direction, error));
        joined = true;
    }
    return REFIT_OK;
}

static refit_status put_all(copy_walk *walk, refit_error *error)
{
    bool full = walk->bounce == NULL;
    while (walk->at < walk->count) {
        const rft_copy *copy = &walk->copies[walk->at];
        rft_cuda_direction direction =
            copy->bytes == 0 ? RFT_CUDA_NEITHER : find_direction(walk, copy);
        uint32_t end = full ? walk->at + 1 : find_end(walk, direction);
        if (end - walk->at > 1) {
            RFT_TRY(put_chunk(walk, end, direction, &full, error));
        } else if (copy->bytes > 0) {
            RFT_TRY(put_one(walk, copy, direction, error));
        }
        walk->at = end;
    }
    if (walk->bounce != NULL) RFT_TRY(rft_cuda_bounce_flush(walk->cuda, walk->bounce, error));
    return rft_cuda_batch_flush(walk->cuda, walk->batch, error);
}

/* Are there so many copies that may turn out to be small? */
static bool wants_bounce(const copy_walk *walk)
{
    uint64_t bound = rft_cuda_staging_bound(walk->cuda);
    uint32_t small = 0;
    for (uint32_t i = 0; i < walk->count && small < SMALL_LEAST; i++) {
        if (walk->copies[i].known_memory && walk->copies[i].bytes < bound) small++;
    }
    return small == SMALL_LEAST;
}

static refit_status put_with_bounce(copy_walk *walk, rft_copy_order order, refit_error *error)
{
    rft_cuda_staging *staging = walk->cuda->copier->staging;
    if (wants_bounce(walk)) {
        walk->bounce = rft_cuda_staging_take(walk->cuda, staging, walk->stream, &walk->small);
    }
    refit_status status = REFIT_OK;
    if (walk->bounce != NULL)
        status = rft_cuda_bounce_begin(walk->cuda, walk->bounce, order, error);
    if (status == REFIT_OK) status = put_all(walk, error);
    if (walk->bounce != NULL) rft_cuda_staging_give(staging, walk->bounce);
    return status;
}

/* Queues the copies on a stream that takes work (rft_cuda_work_begin). Inside a context guard.
 */
static refit_status rft_cuda_copy_batch(rft_cuda_device *cuda, rft_cu_stream stream,
                                        const rft_copy *copies, uint32_t count,
                                        rft_copy_order order, refit_error *error)
{
    copy_walk walk = {.cuda = cuda, .stream = stream, .copies = copies, .count = count};
    if (count == 1) {
        return copies->bytes == 0 ? REFIT_OK : put_one(&walk, copies, RFT_CUDA_NEITHER, error);
    }
    RFT_TRY(take_batch(cuda->copier, &walk.batch, error));
    rft_cuda_batch_begin(walk.batch, stream, order);
    refit_status status = put_with_bounce(&walk, order, error);
    give_batch(cuda->copier, walk.batch);
    return status;
}

/* ---- Slots -----------------------------------------------------------------------------------
 * Each enters the context; the work is done above. */

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

static refit_status copy_rows(rft_cuda_device *cuda, refit_stream_ref stream, const rft_rows *rows,
                              refit_error *error)
{
    rft_cuda_work work;
    rft_cu_copy_2d copy = {.from_type = rows->from_host ? RFT_CU_MEMORY_HOST : RFT_CU_MEMORY_DEVICE,
                           .from_host = rows->from_host ? rows->from : NULL,
                           .from_device = rows->from_host ? 0 : (uintptr_t)rows->from,
                           .from_pitch = rows->from_step,
                           .to_type = RFT_CU_MEMORY_DEVICE,
                           .to_device = (uintptr_t)rows->to,
                           .to_pitch = rows->to_step,
                           .width = rows->bytes,
                           .height = rows->count};
    RFT_REFUSE_IF(rows->from_step > PITCH_MOST || rows->to_step > PITCH_MOST, error,
                  REFIT_ERR_UNSUPPORTED, "rows lie further apart than the driver copies them");
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    rft_cu_result result = cuda->driver.copy_2d(&copy, work.stream);
    refit_status status =
        rft_cuda_check_copy(&cuda->driver, result, error, "a copy of rows could not be queued");
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status cuda_copy_rows(void *self, refit_stream_ref stream, const rft_rows *rows,
                                   refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, copy_rows(cuda, stream, rows, error));
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

void rft_cuda_copy_slots(rft_device_ops *ops)
{
    ops->copy_batch = cuda_copy_batch;
    ops->copy_rows = cuda_copy_rows;
    ops->zero = cuda_zero;
}
