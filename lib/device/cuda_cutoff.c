/*
 * Measuring: 2 MiB of one half, with holes in between, go to host memory and back, once by the copy
 * engines alone and once through the other half of the bounce buffer; twice each, of which the
 * faster counts. The host side is the memory of the bounce buffer's own table, whose last section
 * holds the entries.
 */
#include "device/cuda_cutoff.h"

#include "base/checked.h"
#include "base/clock.h"
#include "device/cuda_event.h"
#include "device/cuda_kernels.h"

#define MEASURED    (UINT64_C(2) << 20)
#define REPEATS     2
#define PATIENCE_MS 50u

_Static_assert(MEASURED <= (RFT_CUDA_SECTIONS - 1) * RFT_CUDA_ENTRIES * sizeof(rft_pack_entry),
               "the last section is not part of the host side");
_Static_assert(2 * (MEASURED / RFT_CUDA_CUTOFF_LEAST) <= RFT_CUDA_ENTRIES, "it holds both ways");

typedef struct measure {
    rft_cuda_device *cuda;
    rft_cuda_bounce *bounce;
    int64_t deadline;
    rft_cu_event start, stop;
    uint64_t size; /* of one copy */
    uint32_t count;
} measure;

static rft_cu_ptr scattered(const measure *at, uint32_t i)
{
    return at->bounce->halves[0].memory + 2 * i * at->size;
}

static rft_cu_ptr gathered(const measure *at, uint32_t i)
{
    return at->bounce->halves[1].memory + i * at->size;
}

static rft_cu_ptr host(const measure *at, uint32_t i)
{
    return (uintptr_t)at->bounce->host + i * at->size;
}

static refit_status by_engines(const measure *at, bool out, refit_error *error)
{
    rft_cuda_batch *batch = at->bounce->stretches;
    rft_cuda_batch_begin(batch, at->bounce->own, RFT_COPY_STREAM);
    for (uint32_t i = 0; i < at->count; i++) {
        rft_cu_ptr there = scattered(at, i), here = host(at, i);
        RFT_TRY(rft_cuda_batch_add(at->cuda, batch, out ? here : there, out ? there : here,
                                   at->size, !out, error));
    }
    return rft_cuda_batch_flush(at->cuda, batch, error);
}

/* The entries of both ways, one behind the other in the last section. */
static void write_entries(const measure *at)
{
    rft_pack_entry *entries = at->bounce->sections[RFT_CUDA_SECTIONS - 1].entries;
    for (uint32_t i = 0; i < at->count; i++) {
        rft_cu_ptr apart = scattered(at, i), together = gathered(at, i);
        entries[i] = (rft_pack_entry){.to = together, .from = apart, .bytes = at->size};
        entries[at->count + i] = (rft_pack_entry){.to = apart, .from = together, .bytes = at->size};
    }
}

static refit_status pack(const measure *at, bool out, refit_error *error)
{
    uint64_t first = out ? 0 : at->count;
    rft_cu_ptr table = at->bounce->sections[RFT_CUDA_SECTIONS - 1].table;
    return rft_cuda_launch_pack(at->cuda, at->bounce->own, table + first * sizeof(rft_pack_entry),
                                at->count, at->count * at->size, error);
}

static refit_status by_gathering(const measure *at, bool out, refit_error *error)
{
    uint64_t bytes = at->count * at->size;
    if (out) {
        RFT_TRY(pack(at, out, error));
        return rft_cuda_copy_one(at->cuda, at->bounce->own, host(at, 0), gathered(at, 0), bytes,
                                 error);
    }
    RFT_TRY(
        rft_cuda_copy_one(at->cuda, at->bounce->own, gathered(at, 0), host(at, 0), bytes, error));
    return pack(at, out, error);
}

static refit_status there_and_back(const measure *at, bool engines, refit_error *error)
{
    for (int out = 1; out >= 0; out--) {
        RFT_TRY(engines ? by_engines(at, out, error) : by_gathering(at, out, error));
    }
    return REFIT_OK;
}

static refit_status record(const measure *at, rft_cu_event event, refit_error *error)
{
    return rft_cuda_check(&at->cuda->driver, at->cuda->driver.event_record(event, at->bounce->own),
                          error, "the time of small copies could not be taken");
}

/* The faster of both that were measured so far and now. */
static refit_status take_time(const measure *at, bool engines, float *best, refit_error *error)
{
    float now = 0;
    RFT_TRY(record(at, at->start, error));
    RFT_TRY(there_and_back(at, engines, error));
    RFT_TRY(record(at, at->stop, error));
    RFT_TRY(rft_cuda_event_poll_wait(at->cuda, at->stop, at->deadline, error));
    RFT_TRY(rft_cuda_check(&at->cuda->driver,
                           at->cuda->driver.event_elapsed(&now, at->start, at->stop), error,
                           "the time of small copies was not to be had"));
    if (now < *best) *best = now;
    return REFIT_OK;
}

static refit_status measure_size(measure *at, uint32_t which, rft_cuda_cutoff_times *times,
                                 refit_error *error)
{
    uint64_t bytes = rft_min_u64(MEASURED, at->bounce->half_bytes / 2);
    at->size = RFT_CUDA_CUTOFF_LEAST << which;
    at->count = (uint32_t)(bytes / at->size);
    write_entries(at);
    if (which == 0) RFT_TRY(there_and_back(at, false, error)); /* the driver loads the kernel */
    times->engines[which] = times->gathered[which] = (float)PATIENCE_MS;
    for (int i = 0; i < REPEATS; i++) {
        RFT_TRY(take_time(at, true, &times->engines[which], error));
        RFT_TRY(take_time(at, false, &times->gathered[which], error));
    }
    times->count = which + 1;
    return REFIT_OK;
}

static refit_status measure_all(measure *at, rft_cuda_cutoff_times *times, refit_error *error)
{
    for (uint32_t i = 0; i < RFT_CUDA_CUTOFF_SIZES && !rft_cuda_cutoff_is_clear(times); i++) {
        RFT_TRY(measure_size(at, i, times, error));
    }
    return REFIT_OK;
}

static refit_status open_event(rft_cuda_device *cuda, rft_cu_event *event, refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.event_open(event, RFT_CU_EVENT_TIMING), error,
                          "an event with a clock could not be opened");
}

refit_status rft_cuda_cutoff_find(rft_cuda_device *cuda, rft_cuda_bounce *bounce, uint64_t *bytes,
                                  refit_error *error)
{
    refit_status status;
    rft_cuda_cutoff_times times = {.count = 0};
    measure at = {.cuda = cuda, .bounce = bounce, .deadline = rft_deadline(PATIENCE_MS)};
    RFT_TRY(open_event(cuda, &at.start, error));
    RFT_TRY_GOTO(open_event(cuda, &at.stop, error), close_start);
    RFT_TRY_GOTO(measure_all(&at, &times, error), close_stop);
    *bytes = rft_cuda_cutoff_choose(&times);
    if (*bytes == 0) {
        status = rft_fail(error, REFIT_ERR_BUSY,
                          "the GPU was busy while it was to show how fast it gathers");
    }

close_stop:
    (void)cuda->driver.event_close(at.stop);
close_start:
    (void)cuda->driver.event_close(at.start);
    return status;
}

/* ---- What the times say ------------------------------------------------------------------ */

static bool engines_win(const rft_cuda_cutoff_times *times, uint32_t which)
{
    return which < times->count && times->engines[which] <= times->gathered[which];
}

bool rft_cuda_cutoff_is_clear(const rft_cuda_cutoff_times *times)
{
    return times->count >= 2 && engines_win(times, times->count - 1) &&
           engines_win(times, times->count - 2);
}

uint64_t rft_cuda_cutoff_choose(const rft_cuda_cutoff_times *times)
{
    for (uint32_t i = 0; i < RFT_CUDA_CUTOFF_SIZES; i++) {
        bool last = i + 1 == RFT_CUDA_CUTOFF_SIZES;
        if (!engines_win(times, i) || !(last || engines_win(times, i + 1))) continue;
        return i == 0 ? 0 : RFT_CUDA_CUTOFF_LEAST << i;
    }
    return RFT_CUDA_CUTOFF_MOST;
}
