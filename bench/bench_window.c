/*
 * bench window: states live on the host, and visit the device while they are stepped.
 *
 * In every round all ways step the same states in turn, and the copies and the arithmetic are timed
 * alone, and all at once. `overlap` is a way's time over the longest of the three: 1 is all that
 * can be had where they share nothing. On the host device they share the processor and its memory:
 * `ratio_to_all_at_once` says what a way makes of that. At the end every state must have the bits
 * that a resident step gives it. Then the same bytes are divided into 10 and 100 times as many
 * tensors.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_cuda.h"
#include "bench_window_ways.h"
#include "cli.h"

enum { ROUNDS = 9, GROWTHS = 3, GROWTH_MOST = 320, WINDOW_LEAST = 64 << 10 };

/* In host memory at once: the image; on the host device the states on it, gradients and two copies
 * of the weights too, else a tensor that is compared. */
enum { COPIES = 4, COPIES_ON_GPU = 2 };
static const uint64_t host_bytes = UINT64_C(1000000000);

/* ---- Options ---- */

typedef struct given {
    bool window_bytes;
} given;

static void note_origin(void *user, const refit_option *option)
{
    given *out = user;
    if (strcmp(option->key, "offload.window_bytes") == 0)
        out->window_bytes = option->origin != REFIT_CONFIG_DEFAULT;
}

/* The default suits a model on a GPU. Of fewer bytes a step is to have 16 windows at least. */
static void choose_windows(bench_options *options, uint64_t bytes)
{
    given set = {false};
    uint64_t *window = &options->config.offload_window_bytes;
    refit_config_each(&options->config, note_origin, &set);
    if (set.window_bytes || *window <= bytes / 16) return;
    *window = (bytes / 16 + WINDOW_LEAST - 1) / WINDOW_LEAST * WINDOW_LEAST;
}

/* ---- The rounds ---- */

static uint32_t rounds_of(const bench_options *options)
{
    return options->rounds > 0 ? options->rounds : ROUNDS;
}

static refit_status run_rounds(const bench_options *options, bench_ways *on, refit_error *error)
{
    for (uint32_t round = 0; round <= rounds_of(options); round++) {
        BENCH_TRY(bench_ways_step(on, BENCH_RESIDENT, round, error));
        BENCH_TRY(bench_ways_copies(on, round, error));
        for (uint32_t way = BENCH_RESIDENT + 1; way < BENCH_WAYS; way++)
            BENCH_TRY(bench_ways_step(on, way, round, error));
    }
    return bench_ways_check(on, error);
}

/* By how much each round of a way was longer than the arithmetic alone. */
static double exposed(const bench_series *way, const bench_series *alone)
{
    bench_series longer = {.cold = way->cold - alone->cold};
    for (uint32_t i = 0; i < way->count; i++)
        bench_add(&longer, i + 1, way->seconds[i] - alone->seconds[i]);
    return bench_median(&longer);
}

static json_t *describe(const bench_ways *on, const bench_way *way)
{
    const bench_series *alone = &on->all[BENCH_RESIDENT].seconds;
    const bench_list *list = on->states->list;
    json_t *object =
        json_pack("{s:s, s:s, s:s, s:i, s:I}", "bench", "window", "way", way->name, "list",
                  list->name, "tensors", (int)list->count, "bytes", (json_int_t)list->bytes);
    json_t *figures = json_pack(
        "{s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:I}", "step_s_median",
        bench_median(&way->seconds), "step_s_p95", bench_p95(&way->seconds), "cold_step_s",
        way->seconds.cold, "exposed_s", exposed(&way->seconds, alone), "in_bytes",
        (json_int_t)way->in_bytes, "out_bytes", (json_int_t)way->out_bytes, "window_bytes",
        (json_int_t)(way->slots * way->slot_bytes), "peak_device_bytes",
        (json_int_t)way->device_bytes, "overlap", bench_ratio(&way->seconds, &on->longest),
        "ratio_to_copies_both", bench_ratio(&on->both, &way->seconds), "ratio_to_all_at_once",
        bench_ratio(&on->at_once, &way->seconds), "speedup_over_no_overlap",
        bench_ratio(&on->all[BENCH_NO_OVERLAP].seconds, &way->seconds), "allocations_per_step",
        (json_int_t)way->allocations);
    bench_extend(object, figures);
    if (way->waited.count > 0)
        json_object_set_new(object, "waited_s", json_real(bench_median(&way->waited)));
    bench_extend(object,
                 json_pack("{s:f, s:f, s:f, s:f, s:f, s:s}", "arithmetic_s", bench_median(alone),
                           "copies_in_s", bench_median(&on->in), "copies_out_s",
                           bench_median(&on->out), "copies_both_s", bench_median(&on->both),
                           "all_at_once_s", bench_median(&on->at_once), "arithmetic",
                           on->states->arithmetic ? "AdamW" : "copies on the device"));
    return object;
}

static void report(const bench_options *options, const bench_ways *on)
{
    for (uint32_t way = 0; way < BENCH_WAYS; way++) {
        json_t *object = describe(on, &on->all[way]);
        bench_device(object, options, on->states->device);
        bench_machine(object);
        bench_print(options, object);
    }
}

static refit_status run_list(const bench_options *options, const bench_list *list,
                             refit_error *error)
{
    bench_states states = {0};
    bench_ways on = {0};
    refit_error closing;
    refit_status status = bench_states_open(&states, options, list, error);
    if (status == REFIT_OK) status = bench_ways_open(&on, &states, &options->config, error);
    if (status == REFIT_OK) status = run_rounds(options, &on, error);
    if (status == REFIT_OK) report(options, &on);
    if (status == REFIT_OK) status = bench_written(error);
    refit_error *second = status == REFIT_OK ? error : &closing;
    refit_status closed = bench_ways_close(&on, second);
    if (closed == REFIT_OK) closed = bench_states_close(&states, second);
    return status == REFIT_OK ? closed : status;
}

/* ---- Growth: the same bytes in more tensors ---- */

typedef struct growth {
    bench_list list;
    bench_states states;
    bench_ways on;
} growth;

static refit_status open_growth(growth *it, const bench_options *options, uint32_t parameters,
                                uint64_t bytes, refit_error *error)
{
    BENCH_TRY(bench_list_even(parameters, bytes, &it->list, error));
    BENCH_TRY(bench_states_open(&it->states, options, &it->list, error));
    return bench_ways_open(&it->on, &it->states, &options->config, error);
}

static refit_status close_growth(growth *it, refit_error *error)
{
    refit_status status = bench_ways_close(&it->on, error);
    if (status == REFIT_OK) status = bench_states_close(&it->states, error);
    bench_list_close(&it->list);
    return status;
}

static refit_status run_growths(const bench_options *options, growth *all, refit_error *error)
{
    for (uint32_t round = 0; round <= rounds_of(options); round++) {
        for (uint32_t i = 0; i < GROWTHS; i++) {
            BENCH_TRY(bench_ways_step(&all[i].on, BENCH_RESIDENT, round, error));
            BENCH_TRY(bench_ways_copies(&all[i].on, round, error));
            BENCH_TRY(bench_ways_step(&all[i].on, BENCH_WINDOWS, round, error));
        }
    }
    for (uint32_t i = 0; i < GROWTHS; i++)
        BENCH_TRY(bench_ways_check(&all[i].on, error));
    return REFIT_OK;
}

static void report_growth(const bench_options *options, const growth *first, const growth *it)
{
    const bench_way *way = &it->on.all[BENCH_WINDOWS];
    json_t *object =
        json_pack("{s:s, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:I}", "bench", "window growth",
                  "tensors", (int)it->list.count, "bytes", (json_int_t)it->list.bytes,
                  "step_s_median", bench_median(&way->seconds), "step_s_p95",
                  bench_p95(&way->seconds), "cold_step_s", way->seconds.cold,
                  "resident_step_s_median", bench_median(&it->on.all[BENCH_RESIDENT].seconds),
                  "overlap", bench_ratio(&way->seconds, &it->on.longest), "times_as_long",
                  bench_ratio(&way->seconds, &first->on.all[BENCH_WINDOWS].seconds),
                  "allocations_per_step", (json_int_t)way->allocations);
    bench_device(object, options, it->states.device);
    bench_machine(object);
    bench_print(options, object);
}

static refit_status run_growth(const bench_options *options, uint64_t bytes, refit_error *error)
{
    refit_error closing;
    growth *all = calloc(GROWTHS, sizeof *all);
    refit_status status = REFIT_OK;
    if (all == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for results");
    /* A hundred times as many have 512 bytes each at least. */
    uint32_t parameters = (uint32_t)(bytes / (100 * 2 * 512) + 1);
    if (parameters > GROWTH_MOST) parameters = GROWTH_MOST;
    for (uint32_t i = 0; status == REFIT_OK && i < GROWTHS; i++, parameters *= 10)
        status = open_growth(&all[i], options, parameters, bytes, error);
    if (status == REFIT_OK) status = run_growths(options, all, error);
    for (uint32_t i = 0; status == REFIT_OK && i < GROWTHS; i++)
        report_growth(options, &all[0], &all[i]);
    for (uint32_t i = 0; i < GROWTHS; i++) {
        refit_status closed = close_growth(&all[i], status == REFIT_OK ? error : &closing);
        if (status == REFIT_OK) status = closed;
    }
    free(all);
    return status;
}

/* ---- The command ---- */

/* On a GPU the states are on the device once, as the resident way has them, and half its memory is
 * enough for that. */
static refit_status open_list(const bench_options *options, bench_list *list, refit_error *error)
{
    char why[160];
    const int ordinal = bench_cuda_ordinal(options->device);
    const char *which = options->tensors;
    uint64_t bytes = options->bytes != 0 ? options->bytes : ordinal >= 0 ? UINT64_MAX : host_bytes;
    if (which == NULL) which = ordinal >= 0 ? "qwen2.5-1.5b" : "qwen3-0.6b";
    const uint64_t copies = ordinal >= 0 ? COPIES_ON_GPU : COPIES;
    bytes = bench_memory_for(bytes, copies);
    bench_cuda *cuda = ordinal >= 0 ? bench_cuda_open(ordinal, why, sizeof why) : NULL;
    if (cuda != NULL && bytes > bench_cuda_free_bytes(cuda) / 2)
        bytes = bench_cuda_free_bytes(cuda) / 2;
    bench_cuda_close(cuda);
    BENCH_TRY(bench_list_open(which, bytes, list, error));
    return bench_memory_check(list->bytes, copies, error);
}

int bench_window(const bench_options *given_options)
{
    bench_options options = *given_options;
    refit_error error = {.text = "out of memory"};
    bench_list list = {0};
    if (!bench_count_allocations()) return CLI_FAILED;
    refit_status status = open_list(&options, &list, &error);
    if (status == REFIT_OK) {
        choose_windows(&options, list.bytes);
        status = run_list(&options, &list, &error);
    }
    /* Three divisions are open at once. */
    uint64_t bytes = list.bytes / GROWTHS;
    bench_list_close(&list);
    if (status == REFIT_OK) status = run_growth(&options, bytes, &error);
    if (status == REFIT_OK) status = bench_written(&error);
    return status == REFIT_OK ? CLI_DONE : cli_complain_error(&error);
}
