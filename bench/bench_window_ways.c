/*
 * bench_window_ways: each way in its simplest correct form, through refit's public functions, so
 * that all of them use the same copies, streams and page-locked memory, and differ only in what
 * they have under way at once.
 */
#include "bench_window_ways.h"

#include <stdlib.h>
#include <string.h>

#include "bench_case.h"
#include "cli.h"

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + 511) / 512 * 512;
}

/* ---- every byte alone: the arithmetic, the copies in, the copies out ---- */

static refit_status finish(const bench_states *it, refit_stream_ref stream, refit_error *error)
{
    return refit_stream_wait(it->device, stream, BENCH_WAIT_MS, error);
}

static refit_status queue_resident(bench_ways *on, refit_error *error)
{
    bench_states *it = on->states;
    bench_states_begin(it, BENCH_ON_DEVICE);
    return bench_states_queue(it, BENCH_ON_DEVICE, on->resident, it->parameter_count, error);
}

static refit_status step_resident(bench_ways *on, bench_way *way, refit_error *error)
{
    bench_states *it = on->states;
    BENCH_TRY(bench_states_settle(it, error));
    (void)way;
    for (uint32_t i = 0; i < it->parameter_count; i++) {
        const bench_parameter *parameter = &it->parameters[i];
        for (uint32_t state = 0; state < parameter->state_count; state++)
            on->resident[i].states[state] = (void *)it->resident[parameter->tensor + state];
    }
    BENCH_TRY(queue_resident(on, error));
    return finish(it, it->work, error);
}

/* One copy in one direction. */
typedef struct piece {
    char *host;
    char *device;
    uint64_t bytes;
} piece;

/* A row of pieces: half the ring, filled at once. */
typedef struct row {
    piece pieces[BENCH_ROW];
    uint32_t count;
} row;

/* Where the next pieces of the image begin. */
typedef struct cursor {
    uint32_t run;
    uint64_t at;
    uint32_t rows;
} cursor;

/* The next pieces; the two halves of the ring are used in turn. False: there are none left. */
static bool next_row(const bench_ways *on, cursor *from, row *out)
{
    char *device = on->ring + from->rows++ % 2 * BENCH_ROW * on->window_bytes;
    out->count = 0;
    while (from->run < on->run_count && out->count < BENCH_ROW) {
        const bench_run *run = &on->runs[from->run];
        uint64_t left = run->bytes - from->at;
        uint64_t bytes = left < on->window_bytes ? left : on->window_bytes;
        out->pieces[out->count++] = (piece){run->from + from->at, device, bytes};
        device += on->window_bytes;
        from->at += bytes;
        if (from->at < run->bytes) continue;
        from->at = 0;
        from->run++;
    }
    return out->count > 0;
}

static refit_status queue_row(const bench_states *it, const row *which, bool out,
                              refit_error *error)
{
    for (uint32_t i = 0; i < which->count; i++) {
        const piece *each = &which->pieces[i];
        BENCH_TRY(refit_stream_copy(it->device, out ? it->out : it->in,
                                    out ? each->host : each->device,
                                    out ? each->device : each->host, each->bytes, error));
    }
    return REFIT_OK;
}

/* Copies one row in, or out, or one in while another leaves; adds what that takes to `seconds`. */
static refit_status copy_rows(const bench_states *it, const row *in, const row *out,
                              double *seconds, refit_error *error)
{
    double start = bench_now();
    if (in != NULL) BENCH_TRY(queue_row(it, in, false, error));
    if (out != NULL) BENCH_TRY(queue_row(it, out, true, error));
    BENCH_TRY(finish(it, it->in, error));
    BENCH_TRY(finish(it, it->out, error));
    *seconds += bench_now() - start;
    return REFIT_OK;
}

static refit_status time_each(bench_ways *on, uint32_t round, refit_error *error)
{
    double in = 0.0, out = 0.0;
    cursor from = {0};
    for (row each; next_row(on, &from, &each);) {
        BENCH_TRY(copy_rows(on->states, &each, NULL, &in, error));
        BENCH_TRY(copy_rows(on->states, NULL, &each, &out, error));
    }
    bench_add(&on->in, round, in);
    bench_add(&on->out, round, out);
    return REFIT_OK;
}

/* One row comes in while the one before leaves. */
static refit_status copy_both(bench_ways *on, double *seconds, refit_error *error)
{
    cursor from = {0};
    row rows[2];
    uint32_t at = 0;
    if (!next_row(on, &from, &rows[0])) return REFIT_OK;
    BENCH_TRY(copy_rows(on->states, &rows[0], NULL, seconds, error));
    for (; next_row(on, &from, &rows[1 - at]); at = 1 - at)
        BENCH_TRY(copy_rows(on->states, &rows[1 - at], &rows[at], seconds, error));
    return copy_rows(on->states, NULL, &rows[at], seconds, error);
}

static refit_status time_both(bench_ways *on, uint32_t round, refit_error *error)
{
    double both = 0.0;
    BENCH_TRY(copy_both(on, &both, error));
    bench_add(&on->both, round, both);
    return REFIT_OK;
}

/* The arithmetic steps the device's own states meanwhile, so nothing waits for anything else. */
static refit_status time_at_once(bench_ways *on, uint32_t round, refit_error *error)
{
    double copies = 0.0, start = bench_now();
    BENCH_TRY(queue_resident(on, error));
    BENCH_TRY(copy_both(on, &copies, error));
    BENCH_TRY(finish(on->states, on->states->work, error));
    bench_add(&on->at_once, round, bench_now() - start);
    return REFIT_OK;
}

static double last_of(const bench_series *series, uint32_t round)
{
    return round == 0 ? series->cold : series->seconds[series->count - 1];
}

/* What leaves is what has come in, so the image stays as it is. */
refit_status bench_ways_copies(bench_ways *on, uint32_t round, refit_error *error)
{
    BENCH_TRY(time_each(on, round, error));
    BENCH_TRY(time_both(on, round, error));
    BENCH_TRY(time_at_once(on, round, error));
    double longest = last_of(&on->all[BENCH_RESIDENT].seconds, round);
    double in = last_of(&on->in, round), out = last_of(&on->out, round);
    if (in > longest) longest = in;
    if (out > longest) longest = out;
    bench_add(&on->longest, round, longest);
    return REFIT_OK;
}

/* ---- refit's windows ---- */

/* The slices of the window in use, at their addresses. */
static refit_status queue_view(bench_ways *on, const refit_window_view *view, uint32_t *portion,
                               refit_error *error)
{
    uint32_t first = *portion;
    while (*portion < on->portion_count && on->first_part[*portion] < view->first + view->count) {
        bench_slice *slice = &on->portions[*portion];
        for (uint32_t state = 0; state < slice->state_count; state++)
            slice->states[state] = view->memory[on->first_part[*portion] - view->first + state];
        (*portion)++;
    }
    return bench_states_queue(on->states, BENCH_IN_IMAGE, on->portions + first, *portion - first,
                              error);
}

static refit_status step_windows(bench_ways *on, bench_way *way, refit_error *error)
{
    (void)way;
    bench_states *it = on->states;
    refit_window_view view = {.size = sizeof view};
    uint32_t portion = 0;
    bench_states_begin(it, BENCH_IN_IMAGE);
    BENCH_TRY(refit_window_begin(it->window, on->parts, on->part_count, it->work, error));
    for (;;) {
        BENCH_TRY(refit_window_next(it->window, &view, error));
        if (view.count == 0) break;
        BENCH_TRY(queue_view(on, &view, &portion, error));
        BENCH_TRY(refit_window_done(it->window, it->work, error));
    }
    BENCH_TRY(refit_window_end(it->window, error));
    return refit_window_wait(it->window, BENCH_WAIT_MS, error);
}

/* ---- xtuner's form: each parameter's states in, the step, the states out, on one stream ---- */

/* The states of a parameter, between the image and `place`. */
static refit_status move_states(bench_ways *on, bench_way *way, uint32_t parameter, char *place,
                                bool out, refit_error *error)
{
    const bench_states *it = on->states;
    const bench_parameter *of = &it->parameters[parameter];
    refit_stream_ref stream = way->slots == 1 ? it->work : out ? it->out : it->in;
    for (uint32_t state = 0; state < of->state_count; state++) {
        char *host = it->image[of->tensor + state], *device = place + state * aligned(of->bytes);
        BENCH_TRY(refit_stream_copy(it->device, stream, out ? host : device, out ? device : host,
                                    of->bytes, error));
        on->slices[parameter].states[state] = (void *)device;
    }
    *(out ? &way->out_bytes : &way->in_bytes) += of->bytes * of->state_count;
    return REFIT_OK;
}

static refit_status step_without_overlap(bench_ways *on, bench_way *way, refit_error *error)
{
    bench_states *it = on->states;
    bench_states_begin(it, BENCH_IN_IMAGE);
    for (uint32_t i = 0; i < it->parameter_count; i++) {
        BENCH_TRY(move_states(on, way, i, way->memory, false, error));
        BENCH_TRY(bench_states_queue(it, BENCH_IN_IMAGE, &on->slices[i], 1, error));
        BENCH_TRY(move_states(on, way, i, way->memory, true, error));
    }
    return finish(it, it->work, error);
}

/* ---- Megatron's form: two slots of whole parameters; in of the next, step, out of the last ----
 */

typedef struct chunk {
    uint32_t first;
    uint32_t count;
} chunk;

/* As many parameters from `first` on as a slot has room for. */
static chunk chunk_from(const bench_ways *on, const bench_way *way, uint32_t first)
{
    const bench_states *it = on->states;
    chunk out = {.first = first};
    uint64_t bytes = 0;
    while (first + out.count < it->parameter_count) {
        const bench_parameter *next = &it->parameters[first + out.count];
        bytes += aligned(next->bytes) * next->state_count;
        if (bytes > way->slot_bytes) break;
        out.count++;
    }
    return out;
}

static refit_status move_chunk(bench_ways *on, bench_way *way, chunk which, uint32_t slot, bool out,
                               refit_error *error)
{
    char *place = way->memory + slot * way->slot_bytes;
    for (uint32_t i = which.first; i < which.first + which.count; i++) {
        const bench_parameter *parameter = &on->states->parameters[i];
        BENCH_TRY(move_states(on, way, i, place, out, error));
        place += aligned(parameter->bytes) * parameter->state_count;
    }
    return REFIT_OK;
}

/* A slot is free for the next chunk once the chunk that was in it has left. */
static refit_status step_two_slots(bench_ways *on, bench_way *way, refit_error *error)
{
    bench_states *it = on->states;
    bench_states_begin(it, BENCH_IN_IMAGE);
    chunk now = chunk_from(on, way, 0);
    BENCH_TRY(move_chunk(on, way, now, 0, false, error));
    for (uint32_t slot = 0; now.count > 0; slot = 1 - slot) {
        BENCH_TRY(finish(it, it->in, error));
        BENCH_TRY(bench_states_queue(it, BENCH_IN_IMAGE, on->slices + now.first, now.count, error));
        chunk next = chunk_from(on, way, now.first + now.count);
        BENCH_TRY(finish(it, it->out, error));
        BENCH_TRY(move_chunk(on, way, next, 1 - slot, false, error));
        BENCH_TRY(finish(it, it->work, error));
        BENCH_TRY(move_chunk(on, way, now, slot, true, error));
        now = next;
    }
    return finish(it, it->out, error);
}

/* ---- one round ---- */

/* Its slots, in its first step. */
static refit_status take_slots(bench_ways *on, bench_way *way, refit_error *error)
{
    void *memory;
    if (way->slots == 0 || way->memory != NULL) return REFIT_OK;
    BENCH_TRY(refit_memory_alloc(on->states->device, way->slots * way->slot_bytes, &memory, error));
    way->memory = memory;
    return REFIT_OK;
}

/* What the window itself has counted of its last step. */
static refit_status read_stats(bench_ways *on, bench_way *way, uint32_t round, refit_error *error)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    BENCH_TRY(refit_offloader_stats(on->states->offloader, &stats, error));
    way->in_bytes = stats.step_in_bytes_last;
    way->out_bytes = stats.step_out_bytes_last;
    bench_add(&way->waited, round, stats.step_exposed_seconds_last);
    return REFIT_OK;
}

refit_status bench_ways_step(bench_ways *on, uint32_t which, uint32_t round, refit_error *error)
{
    bench_way *way = &on->all[which];
    const bench_states *it = on->states;
    const bool windows = way->step == step_windows;
    uint64_t used = bench_states_used(it), allocations = bench_allocations();
    double start = bench_now();
    way->in_bytes = way->out_bytes = 0;
    BENCH_TRY(take_slots(on, way, error));
    if (windows)
        BENCH_TRY(
            refit_window_set_memory(it->window, way->memory, way->slot_bytes, way->slots, error));
    BENCH_TRY(way->step(on, way, error));
    bench_add(&way->seconds, round, bench_now() - start);
    way->allocations = bench_allocations() - allocations;
    way->device_bytes += bench_states_used(it) - used;
    return windows ? read_stats(on, way, round, error) : REFIT_OK;
}

/* The device's own states are stepped beside the copies, too, so those of the image may be behind.
 */
refit_status bench_ways_check(bench_ways *on, refit_error *error)
{
    const uint32_t *steps = on->states->steps;
    while (steps[BENCH_IN_IMAGE] < steps[BENCH_ON_DEVICE])
        BENCH_TRY(step_windows(on, &on->all[BENCH_WINDOWS], error));
    return bench_states_check(on->states, on->resident, error);
}

/* ---- open and close ---- */

static refit_status no_memory(refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the benchmark itself");
}

/* A slice takes a quarter of a window at most, so that windows are filled evenly. */
static uint64_t most_of(const bench_ways *on, const bench_parameter *of)
{
    uint64_t most = on->window_bytes / 4 / of->state_count / 512 * 512;
    return most < 512 ? 512 : most;
}

/* Slices and parts of all parameters; counts them only, where there is no memory for them yet. */
static void divide(bench_ways *on)
{
    const bench_states *it = on->states;
    on->portion_count = on->part_count = 0;
    for (uint32_t i = 0; i < it->parameter_count; i++) {
        const bench_parameter *of = &it->parameters[i];
        uint64_t most = most_of(on, of), bytes;
        for (uint64_t at = 0; at < of->bytes; at += bytes) {
            bytes = of->bytes - at < most ? of->bytes - at : most;
            uint32_t part = on->part_count, portion = on->portion_count++;
            on->part_count += of->state_count;
            if (on->parts == NULL) continue;
            on->first_part[portion] = part;
            on->portions[portion] = bench_states_slice(it, of, at, bytes, BENCH_IN_IMAGE);
            for (uint32_t state = 0; state < of->state_count; state++)
                on->parts[part + state] =
                    (refit_window_part){.size = sizeof(refit_window_part),
                                        .region = of->tensor + state,
                                        .flags = state > 0 ? REFIT_PART_TOGETHER : 0,
                                        .offset = at,
                                        .bytes = bytes};
        }
    }
}

static bool take_room(bench_ways *on)
{
    bench_states *it = on->states;
    divide(on);
    on->slices = calloc(it->parameter_count, sizeof *on->slices);
    on->resident = calloc(it->parameter_count, sizeof *on->resident);
    on->portions = calloc(on->portion_count, sizeof *on->portions);
    on->first_part = calloc(on->portion_count, sizeof *on->first_part);
    on->parts = calloc(on->part_count, sizeof *on->parts);
    on->runs = calloc(it->list->count, sizeof *on->runs);
    return on->slices != NULL && on->resident != NULL && on->portions != NULL &&
           on->first_part != NULL && on->parts != NULL && on->runs != NULL &&
           bench_states_batches(it, on->portion_count);
}

/* Makes the last run longer, if the bytes lie behind it. */
static bool joins_last(bench_ways *on, const char *begin, uint64_t bytes)
{
    if (on->run_count == 0) return false;
    bench_run *last = &on->runs[on->run_count - 1];
    const char *end = last->from + last->bytes;
    if (begin < end || begin - end >= 512) return false;
    last->bytes = (uint64_t)(begin - last->from) + bytes;
    return true;
}

/* Tensors that lie together in the image are one run. */
static void find_runs(bench_ways *on)
{
    const bench_states *it = on->states;
    for (uint32_t i = 0; i < it->list->count; i++) {
        uint64_t bytes = it->list->all[i].bytes;
        if (!joins_last(on, it->image[i], bytes))
            on->runs[on->run_count++] = (bench_run){it->image[i], bytes};
    }
}

static void describe_ways(bench_ways *on, uint32_t windows)
{
    const uint64_t largest = on->states->largest;
    const uint64_t slot = largest > on->window_bytes ? largest : on->window_bytes;
    const bench_way all[BENCH_WAYS] = {
        [BENCH_RESIDENT] = {.name = "resident", .step = step_resident},
        [BENCH_WINDOWS] = {.name = "window",
                           .step = step_windows,
                           .slots = windows,
                           .slot_bytes = on->window_bytes},
        [BENCH_TWO_WINDOWS] = {.name = "window, two",
                               .step = step_windows,
                               .slots = 2,
                               .slot_bytes = on->window_bytes},
        [BENCH_NO_OVERLAP] = {.name = "no overlap",
                              .step = step_without_overlap,
                              .slots = 1,
                              .slot_bytes = largest},
        [BENCH_TWO_SLOTS] = {.name = "two slots",
                             .step = step_two_slots,
                             .slots = 2,
                             .slot_bytes = slot},
    };
    memcpy(on->all, all, sizeof all);
}

refit_status bench_ways_open(bench_ways *on, bench_states *states, const refit_config *config,
                             refit_error *error)
{
    void *ring;
    *on = (bench_ways){.states = states, .window_bytes = aligned(config->offload_window_bytes)};
    if (!take_room(on)) return no_memory(error);
    divide(on);
    find_runs(on);
    for (uint32_t i = 0; i < states->parameter_count; i++) {
        const bench_parameter *of = &states->parameters[i];
        on->slices[i] = bench_states_slice(states, of, 0, of->bytes, BENCH_IN_IMAGE);
        on->resident[i] = bench_states_slice(states, of, 0, of->bytes, BENCH_ON_DEVICE);
    }
    describe_ways(on, config->offload_windows);
    BENCH_TRY(refit_memory_alloc(states->device, 2 * BENCH_ROW * on->window_bytes, &ring, error));
    on->ring = ring;
    return REFIT_OK;
}

/* Work that a failed step has left behind uses the slots until it ends, well or not. */
static refit_status let_go(bench_ways *on, refit_error *error)
{
    bench_states *it = on->states;
    const refit_stream_ref streams[] = {it->in, it->work, it->out};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        refit_status status = finish(it, streams[i], error);
        if (status == REFIT_ERR_TIMEOUT) return status;
    }
    BENCH_TRY(refit_window_close(it->window, error));
    it->window = NULL;
    for (uint32_t i = 0; i < BENCH_WAYS; i++)
        BENCH_TRY(refit_memory_free(it->device, on->all[i].memory, error));
    return refit_memory_free(it->device, on->ring, error);
}

refit_status bench_ways_close(bench_ways *on, refit_error *error)
{
    refit_status status = on->states != NULL ? let_go(on, error) : REFIT_OK;
    free(on->slices);
    free(on->resident);
    free(on->portions);
    free(on->first_part);
    free(on->parts);
    free(on->runs);
    *on = (bench_ways){0};
    return status;
}
