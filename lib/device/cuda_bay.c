/*
 * A bay's portions: gathered copy by copy, put on two streams step by step.
 *
 * Who waits for whom: the first step for the half to be free (an event that the second step of the
 * portion before last left on the caller's stream), the second for the first. On the way out the
 * first step reads what the caller's stream has made, so it follows that stream too; on the way
 * back the source may be allowed to be read at once. None of this holds up the CPU. Only entries
 * do, which the CPU writes: a section is written again when the GPU has left it.
 *
 * A failure half-way leaves work on either stream. The half gets its events nevertheless (settle),
 * so that it is used again only behind that work; where even that fails, the bay is broken.
 */
#include "device/cuda_bay.h"

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
static bool turn_section(rft_cuda_device *cuda, rft_cuda_bay *bay)
{
    if (record(cuda, bay->sections[bay->section].done, bay->caller, NULL) != REFIT_OK) {
        bay->broken = true;
        return false;
    }
    uint32_t next = (bay->section + 1) % RFT_CUDA_SECTIONS;
    int64_t deadline = bay->behind ? rft_now() : rft_deadline(PATIENCE_MS);
    refit_status status = rft_cuda_event_poll_wait(cuda, bay->sections[next].done, deadline, NULL);
    bay->behind = status != REFIT_OK;
    if (bay->behind) return false;
    bay->section = next;
    bay->first = 0;
    return true;
}

static bool begin_portion(rft_cuda_device *cuda, rft_cuda_bay *bay, rft_cuda_way way)
{
    if (bay->first > RFT_CUDA_ENTRIES - LEAST_ENTRIES && !turn_section(cuda, bay)) return false;
    bay->way = way;
    bay->used = 0;
    bay->payload = 0;
    rft_copy_order order = way == RFT_CUDA_BACK ? bay->order : RFT_COPY_STREAM;
    rft_cuda_batch_begin(bay->stretches, way == RFT_CUDA_OUT ? bay->caller : bay->own, order);
    return true;
}

/* Where in the half a copy lies that begins `ahead` bytes behind the one before, or a stretch. */
static uint64_t place(const rft_cuda_bay *bay, uintptr_t host, bool joined)
{
    if (joined) return bay->used + (host - bay->reached);
    return ((bay->used + ALIGNMENT - 1) & ~(ALIGNMENT - 1)) + host % ALIGNMENT;
}

static bool has_room(const rft_cuda_bay *bay, rft_cuda_way way, uint64_t at, uint64_t bytes)
{
    return bay->way == way && at + bytes <= bay->half_bytes &&
           bay->first + bay->entries < RFT_CUDA_ENTRIES &&
           bay->stretches->count < RFT_CUDA_DESCRIPTORS;
}

static refit_status add_stretch(rft_cuda_device *cuda, rft_cuda_bay *bay, uintptr_t host,
                                rft_cu_ptr there, uint64_t bytes, refit_error *error)
{
    bool out = bay->way == RFT_CUDA_OUT;
    return rft_cuda_batch_add(cuda, bay->stretches, out ? host : there, out ? there : host, bytes,
                              !out, error);
}

static refit_status put_in(rft_cuda_device *cuda, rft_cuda_bay *bay, const rft_copy *copy,
                           bool joined, refit_error *error)
{
    bool out = bay->way == RFT_CUDA_OUT;
    uintptr_t host = (uintptr_t)(out ? copy->to : copy->from);
    uintptr_t memory = (uintptr_t)(out ? copy->from : copy->to);
    uint64_t at = place(bay, host, joined);
    rft_cu_ptr there = bay->halves[bay->half].memory + at;
    if (joined) {
        size_t *last = &bay->stretches->bytes[bay->stretches->count - 1];
        *last += (host - bay->reached) + copy->bytes;
    } else {
        RFT_TRY(add_stretch(cuda, bay, host, there, copy->bytes, error));
    }
    bay->sections[bay->section].entries[bay->first + bay->entries++] = (rft_pack_entry){
        .to = out ? there : memory, .from = out ? memory : there, .bytes = copy->bytes};
    bay->used = at + copy->bytes;
    bay->payload += copy->bytes;
    bay->reached = host + copy->bytes;
    return REFIT_OK;
}

refit_status rft_cuda_bay_add(rft_cuda_device *cuda, rft_cuda_bay *bay, const rft_copy *copy,
                              rft_cuda_way way, bool joined, bool *taken, refit_error *error)
{
    uintptr_t host = (uintptr_t)(way == RFT_CUDA_OUT ? copy->to : copy->from);
    *taken = true;
    joined = joined && bay->entries > 0;
    if (bay->entries > 0 && !has_room(bay, way, place(bay, host, joined), copy->bytes)) {
        RFT_TRY(rft_cuda_bay_flush(cuda, bay, error));
        joined = false;
    }
    if (bay->entries == 0) *taken = begin_portion(cuda, bay, way);
    return *taken ? put_in(cuda, bay, copy, joined, error) : REFIT_OK;
}

/* ---- Putting it on the streams ----------------------------------------------------------- */

static refit_status launch(rft_cuda_device *cuda, rft_cuda_bay *bay, rft_cu_stream stream,
                           refit_error *error)
{
    rft_cu_ptr table =
        bay->sections[bay->section].table + (uint64_t)bay->first * sizeof(rft_pack_entry);
    return rft_cuda_launch_pack(cuda, stream, table, bay->entries, bay->payload, error);
}

/* The stretches know their stream: it is that of their step. */
static refit_status do_step(rft_cuda_device *cuda, rft_cuda_bay *bay, bool packs,
                            rft_cu_stream stream, refit_error *error)
{
    return packs ? launch(cuda, bay, stream, error)
                 : rft_cuda_batch_flush(cuda, bay->stretches, error);
}

/* Behind what the caller's stream had before the batch, where the first step reads that. */
static refit_status follow_caller(rft_cuda_device *cuda, rft_cuda_bay *bay, refit_error *error)
{
    bool free_source = bay->way == RFT_CUDA_BACK && bay->order == RFT_COPY_ANY;
    if (bay->follows || free_source) return REFIT_OK;
    RFT_TRY(follow(cuda, bay->own, bay->before, error));
    bay->follows = true;
    return REFIT_OK;
}

static refit_status put_steps(rft_cuda_device *cuda, rft_cuda_bay *bay, refit_error *error)
{
    rft_cuda_half *half = &bay->halves[bay->half];
    bool out = bay->way == RFT_CUDA_OUT;
    RFT_TRY(follow_caller(cuda, bay, error));
    RFT_TRY(follow(cuda, bay->own, half->free, error));
    RFT_TRY(do_step(cuda, bay, out, bay->own, error));
    RFT_TRY(record(cuda, half->filled, bay->own, error));
    RFT_TRY(follow(cuda, bay->caller, half->filled, error));
    RFT_TRY(do_step(cuda, bay, !out, bay->caller, error));
    return record(cuda, half->free, bay->caller, error);
}

/* After a failure: the half is free once all that may use it is done. */
static refit_status settle(rft_cuda_device *cuda, rft_cuda_bay *bay)
{
    rft_cuda_half *half = &bay->halves[bay->half];
    RFT_TRY(record(cuda, half->filled, bay->own, NULL));
    RFT_TRY(follow(cuda, bay->caller, half->filled, NULL));
    return record(cuda, half->free, bay->caller, NULL);
}

refit_status rft_cuda_bay_flush(rft_cuda_device *cuda, rft_cuda_bay *bay, refit_error *error)
{
    if (bay->entries == 0) return REFIT_OK;
    refit_status status = put_steps(cuda, bay, error);
    if (status != REFIT_OK && settle(cuda, bay) != REFIT_OK) bay->broken = true;
    bay->half = (bay->half + 1) % RFT_CUDA_HALVES;
    bay->first += bay->entries;
    bay->entries = 0;
    return status;
}

refit_status rft_cuda_bay_begin(rft_cuda_device *cuda, rft_cuda_bay *bay, rft_copy_order order,
                                refit_error *error)
{
    bay->order = order;
    bay->follows = false;
    bay->entries = 0; /* of a batch that failed */
    return record(cuda, bay->before, bay->caller, error);
}
