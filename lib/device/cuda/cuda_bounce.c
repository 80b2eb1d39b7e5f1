/*
 * Bounce buffers: many small copies become few large ones. A bounce buffer's portions are gathered
 * copy by copy and put on two streams step by step; which copies are small is measured; a device
 * has a few bounce buffers, each lent to one stream at a time.
 *
 * The first step of a portion waits for its half to be free (an event that the second step of the
 * portion before last left on the caller's stream); the second step waits for the first. Towards
 * the host the first step reads what the caller's stream has made, so it follows that stream too;
 * towards the device the caller may allow the source to be read at once. None of this holds up the
 * CPU. Only entries do, which the CPU writes: a section is written again when the GPU has left it.
 *
 * A failure half-way leaves work on either stream. The half gets its events nevertheless
 * (release_half), so that it is used again only after that work; where even that fails, the bounce
 * buffer is broken.
 */
#include "device/cuda/cuda_bounce.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "device/cuda/cuda_kernels.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_stream.h"

/* ---- What a bounce buffer is made of ---------------------------------------------------------
 * A stream, events, two halves of device memory, and sections of pinned host memory in which the
 * CPU writes entries for the GPU to read. All of it is taken when a bounce buffer opens.
 */

#define SECTION_BYTES (RFT_CUDA_ENTRIES * sizeof(rft_pack_entry))

static refit_status open_event(rft_cuda_device *cuda, rft_cu_event *out, refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.event_open(out, RFT_CU_EVENT_NO_TIMING),
                          error, "an event for small copies could not be opened");
}

static refit_status open_order(rft_cuda_device *cuda, rft_cuda_bounce *bounce, refit_error *error)
{
    rft_cu_result result = cuda->driver.stream_open(&bounce->own, RFT_CU_STREAM_NON_BLOCKING, 0);
    RFT_TRY(rft_cuda_check(&cuda->driver, result, error,
                           "a stream for small copies could not be opened"));
    RFT_TRY(open_event(cuda, &bounce->before, error));
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        RFT_TRY(open_event(cuda, &bounce->halves[i].filled, error));
        RFT_TRY(open_event(cuda, &bounce->halves[i].free, error));
    }
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        RFT_TRY(open_event(cuda, &bounce->sections[i].done, error));
    }
    return REFIT_OK;
}

static refit_status open_halves(rft_cuda_device *cuda, rft_cuda_bounce *bounce, refit_error *error)
{
    RFT_TRY(
        rft_cuda_memory_alloc(cuda, RFT_CUDA_HALVES * bounce->half_bytes, &bounce->memory, error));
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        bounce->halves[i].memory = (uintptr_t)bounce->memory + i * bounce->half_bytes;
    }
    return REFIT_OK;
}

static refit_status open_sections(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                  refit_error *error)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_ptr table = 0;
    unsigned flags = RFT_CU_HOST_ALLOC_PORTABLE | RFT_CU_HOST_ALLOC_DEVICEMAP;
    RFT_TRY(rft_cuda_check(
        driver, driver->host_alloc(&bounce->host, RFT_CUDA_SECTIONS * SECTION_BYTES, flags), error,
        "no page-locked host memory for the table of small copies"));
    RFT_TRY(rft_cuda_check(driver, driver->host_pointer(&table, bounce->host, 0), error,
                           "the GPU does not reach the table of small copies"));
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        bounce->sections[i].entries = (rft_pack_entry *)bounce->host + (size_t)i * RFT_CUDA_ENTRIES;
        bounce->sections[i].table = table + i * SECTION_BYTES;
    }
    return REFIT_OK;
}

refit_status rft_cuda_bounce_open(rft_cuda_device *cuda, uint64_t half_bytes, rft_cuda_bounce **out,
                                  refit_error *error)
{
    refit_status status = REFIT_ERR_HOST_MEMORY;
    rft_cuda_bounce *bounce = rft_calloc(1, sizeof *bounce);
    RFT_REFUSE_IF(bounce == NULL, error, status, "no host memory for small copies");
    bounce->half_bytes = half_bytes;
    bounce->chunks = rft_calloc(1, sizeof *bounce->chunks);
    if (bounce->chunks == NULL) {
        (void)rft_fail(error, status, "no host memory for small copies");
        goto close_bounce;
    }
    RFT_TRY_GOTO(open_halves(cuda, bounce, error), close_bounce);
    RFT_TRY_GOTO(open_sections(cuda, bounce, error), close_bounce);
    RFT_TRY_GOTO(open_order(cuda, bounce, error), close_bounce);
    *out = bounce;
    return REFIT_OK;

close_bounce:
    rft_cuda_bounce_close(cuda, bounce);
    return status;
}

/* The answer of its stream or of the first half that is not free; SUCCESS if all are done. */
static rft_cu_result ask(rft_cuda_device *cuda, const rft_cuda_bounce *bounce)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    if (bounce->own != NULL) result = cuda->driver.stream_query(bounce->own);
    for (uint32_t i = 0; i < RFT_CUDA_HALVES && result == RFT_CU_SUCCESS; i++) {
        if (bounce->halves[i].free != NULL)
            result = cuda->driver.event_query(bounce->halves[i].free);
    }
    return result;
}

/* Is all work that was put on it done? */
static bool bounce_is_idle(rft_cuda_device *cuda, const rft_cuda_bounce *bounce)
{
    return ask(cuda, bounce) == RFT_CU_SUCCESS;
}

static void close_order(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    const rft_cuda_driver *driver = &cuda->driver;
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        if (bounce->sections[i].done != NULL) (void)driver->event_close(bounce->sections[i].done);
    }
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        if (bounce->halves[i].filled != NULL) (void)driver->event_close(bounce->halves[i].filled);
        if (bounce->halves[i].free != NULL) (void)driver->event_close(bounce->halves[i].free);
    }
    if (bounce->before != NULL) (void)driver->event_close(bounce->before);
    if (bounce->own != NULL) (void)driver->stream_close(bounce->own);
}

/* false: it is still at work. A lost GPU is never idle, but it does not answer NOT_READY either. */
static bool wait_idle(rft_cuda_device *cuda, const rft_cuda_bounce *bounce)
{
    rft_looks looks = rft_looks_until(rft_deadline(cuda->config.offload_timeout_ms));
    rft_cu_result result = ask(cuda, bounce);
    while (result == RFT_CU_NOT_READY && rft_poll_again(&looks)) {
        result = ask(cuda, bounce);
    }
    return result != RFT_CU_NOT_READY;
}

static void close_memory(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    if (bounce->host != NULL) (void)cuda->driver.host_free(bounce->host);
    if (bounce->memory != NULL) (void)rft_cuda_memory_free(cuda, bounce->memory, NULL);
}

/* The same where the driver must not be called: frees our side of it. Outside a context guard. */
static void bounce_forget(rft_cuda_bounce *bounce)
{
    rft_free(bounce->chunks);
    rft_free(bounce);
}

void rft_cuda_bounce_close(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    bool idle = wait_idle(cuda, bounce);
    close_order(cuda, bounce); /* the driver keeps them until the work on them ends */
    if (idle) {
        close_memory(cuda, bounce);
    } else {
        cuda->stuck = true;
    }
    bounce_forget(bounce);
}

/* ---- A bounce buffer ---------------------------------------------------------------------- */

#define ALIGNMENT     UINT64_C(512) /* of a chunk, in the half as on the host */
#define TIMEOUT_MS    250u          /* with a GPU that is behind by all sections */
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

/* The next section begins, once the GPU has left it. After one timeout, polls instead of
 * waiting until the GPU catches up. */
static bool next_section(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    if (record(cuda, bounce->sections[bounce->section].done, bounce->caller, NULL) != REFIT_OK) {
        bounce->broken = true;
        return false;
    }
    uint32_t next = (bounce->section + 1) % RFT_CUDA_SECTIONS;
    int64_t deadline = bounce->behind ? rft_now() : rft_deadline(TIMEOUT_MS);
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
    rft_cuda_batch_begin(bounce->chunks,
                         direction == RFT_CUDA_TO_HOST ? bounce->caller : bounce->own, order);
    return true;
}

/* Where in the half a copy lies that begins `ahead` bytes after the one before, or a chunk. */
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
           bounce->chunks->count < RFT_CUDA_DESCRIPTORS;
}

static refit_status add_chunk(rft_cuda_device *cuda, rft_cuda_bounce *bounce, uintptr_t host,
                              rft_cu_ptr there, uint64_t bytes, refit_error *error)
{
    bool out = bounce->direction == RFT_CUDA_TO_HOST;
    return rft_cuda_batch_add(cuda, bounce->chunks, out ? host : there, out ? there : host, bytes,
                              !out, error);
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
        size_t *last = &bounce->chunks->bytes[bounce->chunks->count - 1];
        *last += (host - bounce->reached) + copy->bytes;
    } else {
        RFT_TRY(add_chunk(cuda, bounce, host, there, copy->bytes, error));
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

/* The chunks know their stream: it is that of their step. */
static refit_status do_step(rft_cuda_device *cuda, rft_cuda_bounce *bounce, bool packs,
                            rft_cu_stream stream, refit_error *error)
{
    return packs ? launch(cuda, bounce, stream, error)
                 : rft_cuda_batch_flush(cuda, bounce->chunks, error);
}

/* After what the caller's stream had before the batch, where the first step reads that. */
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
static refit_status release_half(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
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
    if (status != REFIT_OK && release_half(cuda, bounce) != REFIT_OK) bounce->broken = true;
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

/* ---- What counts as small --------------------------------------------------------------------
 * Measuring: 2 MiB of one half, with holes in between, go to host memory and back, once by the copy
 * engines alone and once through the other half of the bounce buffer; twice each, of which the
 * faster counts. The host side is the memory of the bounce buffer's own table, whose last section
 * holds the entries.
 */

#define MEASURED   (UINT64_C(2) << 20)
#define REPEATS    2
#define MEASURE_MS 50u

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
    rft_cuda_batch *batch = at->bounce->chunks;
    rft_cuda_batch_begin(batch, at->bounce->own, RFT_COPY_STREAM);
    for (uint32_t i = 0; i < at->count; i++) {
        rft_cu_ptr there = scattered(at, i), here = host(at, i);
        RFT_TRY(rft_cuda_batch_add(at->cuda, batch, out ? here : there, out ? there : here,
                                   at->size, !out, error));
    }
    return rft_cuda_batch_flush(at->cuda, batch, error);
}

/* The entries of both ways, one after the other in the last section. */
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

static refit_status record_timing(const measure *at, rft_cu_event event, refit_error *error)
{
    return rft_cuda_check(&at->cuda->driver, at->cuda->driver.event_record(event, at->bounce->own),
                          error, "the time of small copies could not be taken");
}

/* Keeps the faster of the time so far and the time now. */
static refit_status take_time(const measure *at, bool engines, float *best, refit_error *error)
{
    float now = 0;
    RFT_TRY(record_timing(at, at->start, error));
    RFT_TRY(there_and_back(at, engines, error));
    RFT_TRY(record_timing(at, at->stop, error));
    RFT_TRY(rft_cuda_event_poll_wait(at->cuda, at->stop, at->deadline, error));
    RFT_TRY(rft_cuda_check(&at->cuda->driver,
                           at->cuda->driver.event_elapsed(&now, at->start, at->stop), error,
                           "the time of small copies could not be read"));
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
    times->engines[which] = times->gathered[which] = (float)MEASURE_MS;
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

static refit_status open_timing(rft_cuda_device *cuda, rft_cu_event *event, refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.event_open(event, RFT_CU_EVENT_TIMING), error,
                          "an event with a clock could not be opened");
}

/* Measures on an unused bounce buffer, by the GPU's own clock. Takes some milliseconds, and no more
 * than 50: REFIT_ERR_TIMEOUT, and some of it may still be under way. REFIT_ERR_BUSY: the engines
 * won throughout. Inside a context guard. */
static refit_status cutoff_find(rft_cuda_device *cuda, rft_cuda_bounce *bounce, uint64_t *bytes,
                                refit_error *error)
{
    refit_status status;
    rft_cuda_cutoff_times times = {.count = 0};
    measure at = {.cuda = cuda, .bounce = bounce, .deadline = rft_deadline(MEASURE_MS)};
    RFT_TRY(open_timing(cuda, &at.start, error));
    RFT_TRY_GOTO(open_timing(cuda, &at.stop, error), close_start);
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

/* ---- The bounce buffers of a device ----------------------------------------------------------
 * Bounce buffers, opened when a batch first wants one and kept until the device closes.
 *
 * A stream keeps its bounce buffer while its work is on it. Another stream gets an idle one, or a
 * new one, or none: no copy waits for the work of another stream, which may be held up for as long
 * as its owner likes. Two bounce buffers serve an offload and a restore at the same time.
 *
 * A failure here never fails the copies: the copy engines do them. It is logged once, and a bounce
 * buffer is tried again after a number of batches that doubles each time. Knows nothing of copies.
 */

#define BOUNCES    2u
#define REST_FIRST 16u
#define REST_MOST  4096u

struct rft_cuda_staging {
    rft_mutex lock;
    rft_cuda_bounce *bounces[BOUNCES]; /* guarded by lock, like the rest */
    uint32_t count;
    uint32_t rest;      /* batches that go without before the next try */
    uint32_t rest_next; /* what that will be after the next failure */
    bool told;          /* that something failed */
    bool finding;       /* a thread finds out `small` */
    uint64_t small;     /* 0: not known */
};

uint64_t rft_cuda_staging_bound(const rft_cuda_device *cuda)
{
    if (cuda->kernels == NULL) return 0;
    uint64_t small = cuda->config.offload_small_bytes;
    uint64_t most = cuda->config.offload_staging_bytes / 4;
    return rft_min_u64(small == 0 ? RFT_CUDA_CUTOFF_MOST : small, most);
}

refit_status rft_cuda_staging_open(rft_cuda_device *cuda, rft_cuda_staging **out,
                                   refit_error *error)
{
    rft_cuda_staging *staging = rft_calloc(1, sizeof *staging);
    RFT_REFUSE_IF(staging == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for small copies");
    staging->rest_next = REST_FIRST;
    if (cuda->config.offload_small_bytes != 0) staging->small = rft_cuda_staging_bound(cuda);
    refit_status status = rft_mutex_open(&staging->lock, error);
    if (status == REFIT_OK) {
        *out = staging;
    } else {
        rft_free(staging);
    }
    return status;
}

void rft_cuda_staging_close(rft_cuda_device *cuda, rft_cuda_staging *staging)
{
    if (staging == NULL) return;
    rft_cuda_guard guard;
    bool inside = staging->count > 0 && rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK;
    for (uint32_t i = 0; i < staging->count; i++) {
        if (inside) {
            rft_cuda_bounce_close(cuda, staging->bounces[i]);
        } else {
            bounce_forget(staging->bounces[i]);
        }
    }
    if (inside) rft_cuda_leave(cuda, &guard);
    rft_mutex_close(&staging->lock);
    rft_free(staging);
}

/* ---- With the lock held ------------------------------------------------------------------ */

static bool may_try(rft_cuda_staging *staging)
{
    if (staging->rest == 0) return true;
    staging->rest--;
    return false;
}

static void failed(rft_cuda_staging *staging, const refit_error *why)
{
    if (!staging->told) {
        rft_log(REFIT_LOG_WARNING, "small copies go through the copy engines for now: %s",
                why->text);
    }
    staging->told = true;
    staging->rest = staging->rest_next;
    staging->rest_next = staging->rest_next < REST_MOST ? staging->rest_next * 2 : REST_MOST;
}

static rft_cuda_bounce *find_callers(rft_cuda_staging *staging, rft_cu_stream stream)
{
    for (uint32_t i = 0; i < staging->count; i++) {
        rft_cuda_bounce *bounce = staging->bounces[i];
        if (bounce->caller == stream && !bounce->broken) return bounce;
    }
    return NULL;
}

static rft_cuda_bounce *find_idle(rft_cuda_device *cuda, rft_cuda_staging *staging)
{
    for (uint32_t i = 0; i < staging->count; i++) {
        rft_cuda_bounce *bounce = staging->bounces[i];
        if (!bounce->taken && !bounce->broken && bounce_is_idle(cuda, bounce)) return bounce;
    }
    return NULL;
}

static rft_cuda_bounce *open_next(rft_cuda_device *cuda, rft_cuda_staging *staging)
{
    refit_error why = {0};
    rft_cuda_bounce *bounce = NULL;
    if (staging->count == BOUNCES || !may_try(staging)) return NULL;
    if (rft_cuda_bounce_open(cuda, cuda->config.offload_staging_bytes, &bounce, &why) != REFIT_OK) {
        failed(staging, &why);
        return NULL;
    }
    staging->bounces[staging->count++] = bounce;
    return bounce;
}

static rft_cuda_bounce *choose(rft_cuda_device *cuda, rft_cuda_staging *staging,
                               rft_cu_stream stream)
{
    rft_cuda_bounce *bounce = find_callers(staging, stream);
    if (bounce == NULL) bounce = find_idle(cuda, staging);
    if (bounce == NULL) bounce = open_next(cuda, staging);
    if (bounce == NULL || bounce->taken) return NULL;
    bounce->taken = true;
    bounce->caller = stream;
    return bounce;
}

/* ---- The calls --------------------------------------------------------------------------- */

void rft_cuda_staging_give(rft_cuda_staging *staging, rft_cuda_bounce *bounce)
{
    rft_lock(&staging->lock);
    bounce->taken = false;
    rft_unlock(&staging->lock);
}

/* After a failure no caller owns it: some of it may be under way. */
static bool find_small(rft_cuda_device *cuda, rft_cuda_staging *staging, rft_cuda_bounce *bounce,
                       uint64_t *small)
{
    refit_error why = {0};
    refit_status status = cutoff_find(cuda, bounce, small, &why);
    rft_lock(&staging->lock);
    staging->finding = false;
    if (status == REFIT_OK) {
        *small = rft_min_u64(*small, rft_cuda_staging_bound(cuda));
        staging->small = *small;
        rft_log(REFIT_LOG_INFO, "cuda:%d: copies below %" PRIu64 " bytes are gathered by a kernel",
                cuda->ordinal, *small);
    } else {
        failed(staging, &why);
        bounce->caller = NULL;
        bounce->taken = false;
    }
    rft_unlock(&staging->lock);
    return status == REFIT_OK;
}

rft_cuda_bounce *rft_cuda_staging_take(rft_cuda_device *cuda, rft_cuda_staging *staging,
                                       rft_cu_stream stream, uint64_t *small)
{
    rft_cuda_bounce *bounce = NULL;
    rft_lock(&staging->lock);
    bool known = staging->small != 0;
    bool tries = known || (!staging->finding && may_try(staging));
    if (tries) bounce = choose(cuda, staging, stream);
    if (bounce != NULL && !known) staging->finding = true;
    *small = staging->small;
    rft_unlock(&staging->lock);
    if (bounce == NULL || known) return bounce;
    return find_small(cuda, staging, bounce, small) ? bounce : NULL;
}

uint64_t rft_cuda_staging_small_bytes(rft_cuda_staging *staging)
{
    rft_lock(&staging->lock);
    uint64_t small = staging->small;
    rft_unlock(&staging->lock);
    return small;
}
