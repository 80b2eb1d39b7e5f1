/*
 * A bounce buffer's portions: gathered copy by copy, put on two streams step by step.
 *
 * Who waits for whom: the first step for the half to be free (an event that the second step of the
 * portion before last left on the caller's stream), the second for the first. On the way to the
 * host the first step reads what the caller's stream has made, so it follows that stream too; on
 * the way to the device the source may be allowed to be read at once. None of this holds up the
 * CPU. Only entries do, which the CPU writes: a section is written again when the GPU has left it.
 *
 * A failure half-way leaves work on either stream. The half gets its events nevertheless (settle),
 * so that it is used again only behind that work; where even that fails, the bounce buffer is
 * broken.
 */
#include "device/cuda_bounce.h"

#include "base/checked.h"
#include "base/clock.h"
#include "device/cuda_event.h"
#include "device/cuda_kernels.h"

#define ALIGNMENT     UINT64_C(512) /* of a stretch, in the half as on the host */
#define PATIENCE_MS   250u          /* with a GPU that is behind by all sections */
#define LEAST_ENTRIES 256u          /* what is left of a section is not begun for fewer */

static refit_status record(rft_cuda_device *cuda, rft_cu_event event, rft_cu_stream stream,
                           refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.event_record(event, stream), error,
                          "an event of small copies could not be recorded");
}

static refit_status follow(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_event event,
                           refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.stream_wait_event(stream, event, 0), error,
                          "a stream of small copies could not be made to wait");
}

/* ---- Gathering --------------------------------------------------------------------------- */

/* The next section begins, once the GPU has left it. Who found that it does not is not kept
 * waiting again before it has. */
static bool next_section(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    if (record(cuda, bounce->sections[bounce->section].done, bounce->caller, NULL) != REFIT_OK) {
        bounce->broken = true;
        return false;
    }
    uint32_t next = (bounce->section + 1) % RFT_CUDA_SECTIONS;
    int64_t deadline = bounce->behind ? rft_now() : rft_deadline(PATIENCE_MS);
    refit_status status =
        rft_cuda_event_poll_wait(cuda, bounce->sections[next].done, deadline, NULL);
    bounce->behind = status != REFIT_OK;
    if (bounce->behind) return false;
    bounce->section = next;
    bounce->first = 0;
    return true;
}

static bool begin_portion(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                          rft_cuda_direction direction)
{
    if (bounce->first > RFT_CUDA_ENTRIES - LEAST_ENTRIES && !next_section(cuda, bounce))
        return false;
    bounce->direction = direction;
    bounce->used = 0;
    bounce->payload = 0;
    rft_copy_order order = direction == RFT_CUDA_TO_DEVICE ? bounce->order : RFT_COPY_STREAM;
    rft_cuda_batch_begin(bounce->stretches,
                         direction == RFT_CUDA_TO_HOST ? bounce->caller : bounce->own, order);
    return true;
}

/* Where in the half a copy lies that begins `ahead` bytes behind the one before, or a stretch. */
static uint64_t place(const rft_cuda_bounce *bounce, uintptr_t host, bool joined)
{
    if (joined) return bounce->used + (host - bounce->reached);
    return ((bounce->used + ALIGNMENT - 1) & ~(ALIGNMENT - 1)) + host % ALIGNMENT;
}

static bool has_room(const rft_cuda_bounce *bounce, rft_cuda_direction direction, uint64_t at,
                     uint64_t bytes)
{
    return bounce->direction == direction && at + bytes <= bounce->half_bytes &&
           bounce->first + bounce->entries < RFT_CUDA_ENTRIES &&
           bounce->stretches->count < RFT_CUDA_DESCRIPTORS;
}

static refit_status add_stretch(rft_cuda_device *cuda, rft_cuda_bounce *bounce, uintptr_t host,
                                rft_cu_ptr there, uint64_t bytes, refit_error *error)
{
    bool out = bounce->direction == RFT_CUDA_TO_HOST;
    return rft_cuda_batch_add(cuda, bounce->stretches, out ? host : there, out ? there : host,
                              bytes, !out, error);
}

static refit_status put_in(rft_cuda_device *cuda, rft_cuda_bounce *bounce, const rft_copy *copy,
                           bool joined, refit_error *error)
{
    bool out = bounce->direction == RFT_CUDA_TO_HOST;
    uintptr_t host = (uintptr_t)(out ? copy->to : copy->from);
    uintptr_t memory = (uintptr_t)(out ? copy->from : copy->to);
    uint64_t at = place(bounce, host, joined);
    rft_cu_ptr there = bounce->halves[bounce->half].memory + at;
    if (joined) {
        size_t *last = &bounce->stretches->bytes[bounce->stretches->count - 1];
        *last += (host - bounce->reached) + copy->bytes;
    } else {
        RFT_TRY(add_stretch(cuda, bounce, host, there, copy->bytes, error));
    }
    bounce->sections[bounce->section].entries[bounce->first + bounce->entries++] = (rft_pack_entry){
        .to = out ? there : memory, .from = out ? memory : there, .bytes = copy->bytes};
    bounce->used = at + copy->bytes;
    bounce->payload += copy->bytes;
    bounce->reached = host + copy->bytes;
    return REFIT_OK;
}

refit_status rft_cuda_bounce_add(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                 const rft_copy *copy, rft_cuda_direction direction, bool joined,
                                 bool *taken, refit_error *error)
{
    uintptr_t host = (uintptr_t)(direction == RFT_CUDA_TO_HOST ? copy->to : copy->from);
    *taken = true;
    joined = joined && bounce->entries > 0;
    if (bounce->entries > 0 &&
        !has_room(bounce, direction, place(bounce, host, joined), copy->bytes)) {
        RFT_TRY(rft_cuda_bounce_flush(cuda, bounce, error));
        joined = false;
    }
    if (bounce->entries == 0) *taken = begin_portion(cuda, bounce, direction);
    return *taken ? put_in(cuda, bounce, copy, joined, error) : REFIT_OK;
}

/* ---- Putting it on the streams ----------------------------------------------------------- */

static refit_status launch(rft_cuda_device *cuda, rft_cuda_bounce *bounce, rft_cu_stream stream,
                           refit_error *error)
{
    rft_cu_ptr table =
        bounce->sections[bounce->section].table + (uint64_t)bounce->first * sizeof(rft_pack_entry);
    return rft_cuda_launch_pack(cuda, stream, table, bounce->entries, bounce->payload, error);
}

/* The stretches know their stream: it is that of their step. */
static refit_status do_step(rft_cuda_device *cuda, rft_cuda_bounce *bounce, bool packs,
                            rft_cu_stream stream, refit_error *error)
{
    return packs ? launch(cuda, bounce, stream, error)
                 : rft_cuda_batch_flush(cuda, bounce->stretches, error);
}

/* Behind what the caller's stream had before the batch, where the first step reads that. */
static refit_status follow_caller(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                  refit_error *error)
{
    bool free_source = bounce->direction == RFT_CUDA_TO_DEVICE && bounce->order == RFT_COPY_ANY;
    if (bounce->follows || free_source) return REFIT_OK;
    RFT_TRY(follow(cuda, bounce->own, bounce->before, error));
    bounce->follows = true;
    return REFIT_OK;
}

static refit_status put_steps(rft_cuda_device *cuda, rft_cuda_bounce *bounce, refit_error *error)
{
    rft_cuda_half *half = &bounce->halves[bounce->half];
    bool out = bounce->direction == RFT_CUDA_TO_HOST;
    RFT_TRY(follow_caller(cuda, bounce, error));
    RFT_TRY(follow(cuda, bounce->own, half->free, error));
    RFT_TRY(do_step(cuda, bounce, out, bounce->own, error));
    RFT_TRY(record(cuda, half->filled, bounce->own, error));
    RFT_TRY(follow(cuda, bounce->caller, half->filled, error));
    RFT_TRY(do_step(cuda, bounce, !out, bounce->caller, error));
    return record(cuda, half->free, bounce->caller, error);
}

/* After a failure: the half is free once all that may use it is done. */
static refit_status settle(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    rft_cuda_half *half = &bounce->halves[bounce->half];
    RFT_TRY(record(cuda, half->filled, bounce->own, NULL));
    RFT_TRY(follow(cuda, bounce->caller, half->filled, NULL));
    return record(cuda, half->free, bounce->caller, NULL);
}

refit_status rft_cuda_bounce_flush(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                   refit_error *error)
{
    if (bounce->entries == 0) return REFIT_OK;
    refit_status status = put_steps(cuda, bounce, error);
    if (status != REFIT_OK && settle(cuda, bounce) != REFIT_OK) bounce->broken = true;
    bounce->half = (bounce->half + 1) % RFT_CUDA_HALVES;
    bounce->first += bounce->entries;
    bounce->entries = 0;
    return status;
}

refit_status rft_cuda_bounce_begin(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                   rft_copy_order order, refit_error *error)
{
    bounce->order = order;
    bounce->follows = false;
    bounce->entries = 0; /* of a batch that failed */
    return record(cuda, bounce->before, bounce->caller, error);
}
