/*
 * bench offload: states leave the device and come back.
 *
 * Four things are timed in turn in every round, on the same tensors: refit's offload and restore,
 * the machine's best large copy with as many threads (the ceiling), and the per-tensor pageable
 * path that trainers use today (use_pinned_optimizer_offload: false). Once with the device memory
 * kept (copies alone), once with it given back and taken again ("reclaim": page faults are part of
 * what a user waits for).
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "cli.h"

enum { WAIT_MS = 120000, ROUNDS = 9 };
static const uint64_t default_bytes = UINT64_C(2000000000);

/* What refit asks its allocator for, counted: installed before the first refit object is opened. */
static atomic_uint_fast64_t allocations;

static void *count_allocate(void *user, size_t bytes)
{
    (void)user;
    atomic_fetch_add(&allocations, 1);
    return malloc(bytes);
}

static void *count_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    atomic_fetch_add(&allocations, 1);
    return realloc(block, bytes);
}

static void count_release(void *user, void *block)
{
    (void)user;
    free(block);
}

/* The tensors on one device, known to one offloader. */
typedef struct arm {
    refit_device *device;
    refit_arena *arena; /* reclaim only */
    refit_offloader *offloader;
    void **memory; /* kept only */
    uint32_t count;
} arm;

typedef struct result {
    bench_series out;
    bench_series back;
    bench_series both;
    bench_series limit; /* one copy each way */
    bench_series pageable_out;
    bench_series pageable_both;
    bench_series exposed;
    uint64_t allocations;
    refit_stats stats;
} result;

static refit_status take_memory(arm *it, uint64_t bytes, void **out, refit_error *error)
{
    return it->arena != NULL ? refit_arena_alloc(it->arena, bytes, out, error)
                             : refit_memory_alloc(it->device, bytes, out, error);
}

static refit_status add_regions(arm *it, const bench_tensor *tensors, refit_error *error)
{
    for (uint32_t i = 0; i < it->count; i++) {
        refit_region_id id;
        refit_region_desc region = {
            .size = sizeof region, .name = tensors[i].name, .bytes = tensors[i].bytes};
        refit_status status = take_memory(it, tensors[i].bytes, &it->memory[i], error);
        if (status != REFIT_OK) return status;
        memset(it->memory[i], (int)(i % 251), tensors[i].bytes);
        region.memory = it->memory[i];
        status = refit_offloader_add(it->offloader, &region, &id, error);
        if (status != REFIT_OK) return status;
    }
    return refit_offloader_seal(it->offloader, error);
}

static refit_status arm_open(arm *it, const bench_options *options, const bench_tensor *tensors,
                             uint32_t count, bool pinned, bool reclaim, refit_error *error)
{
    refit_config config = options->config;
    uint64_t reservation = 0;
    *it = (arm){.count = count};
    config.use_pinned_optimizer_offload = pinned;
    it->memory = calloc(count, sizeof *it->memory);
    if (it->memory == NULL) return REFIT_ERR_HOST_MEMORY;
    for (uint32_t i = 0; i < count; i++)
        reservation +=
            tensors[i].bytes + (UINT64_C(4) << 20); /* a piece is rounded up to the page */
    refit_status status = refit_device_open("host", &config, &it->device, error);
    if (status == REFIT_OK && reclaim)
        status = refit_arena_open(it->device, reservation, &it->arena, error);
    if (status == REFIT_OK)
        status = refit_offloader_open(it->device, &config, &it->offloader, error);
    return status == REFIT_OK ? add_regions(it, tensors, error) : status;
}

static refit_status arm_close(arm *it, refit_error *error)
{
    refit_status status = refit_offloader_close(it->offloader, error);
    for (uint32_t i = 0; status == REFIT_OK && it->arena == NULL && i < it->count; i++)
        status = refit_memory_free(it->device, it->memory[i], error);
    if (status == REFIT_OK) status = refit_arena_close(it->arena, error);
    if (status == REFIT_OK) status = refit_device_close(it->device, error);
    free(it->memory);
    return status;
}

static refit_status move_out(arm *it, bench_series *series, refit_error *error)
{
    double start = bench_now();
    refit_status status = refit_offloader_offload(it->offloader, REFIT_STREAM_NONE, NULL, error);
    if (status == REFIT_OK) status = refit_offloader_finish(it->offloader, WAIT_MS, error);
    bench_add(series, bench_now() - start);
    return status;
}

static refit_status move_back(arm *it, bench_series *series, refit_error *error)
{
    double start = bench_now();
    refit_status status = refit_offloader_restore(it->offloader, REFIT_STREAM_NONE, NULL, error);
    if (status == REFIT_OK) status = refit_offloader_finish(it->offloader, WAIT_MS, error);
    bench_add(series, bench_now() - start);
    return status;
}

static double last(const bench_series *series)
{
    return series->seconds[series->count - 1];
}

/* The step that hides the way back runs on the accelerator and leaves the CPU idle: a pause of
 * twice its length. */
static refit_status move_behind_step(arm *it, double step, bench_series *exposed,
                                     refit_error *error)
{
    struct timespec pause = {.tv_sec = (time_t)step,
                             .tv_nsec = (long)((step - (double)(time_t)step) * 1e9)};
    double start = bench_now();
    refit_status status = refit_offloader_restore(it->offloader, REFIT_STREAM_NONE, NULL, error);
    double waited = bench_now() - start;
    nanosleep(&pause, NULL);
    start = bench_now();
    if (status == REFIT_OK) status = refit_offloader_finish(it->offloader, WAIT_MS, error);
    bench_add(exposed, waited + bench_now() - start);
    return status;
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        refit_status status_ = (call);                                                             \
        if (status_ != REFIT_OK) return status_;                                                   \
    } while (0)

/* One round: every arm once, next to each other. */
static refit_status run_round(arm *pinned, arm *pageable, bench_limit *limit, result *out,
                              refit_error *error)
{
    uint64_t before = atomic_load(&allocations);
    TRY(move_out(pinned, &out->out, error));
    TRY(move_back(pinned, &out->back, error));
    out->allocations = atomic_load(&allocations) - before;
    bench_add(&out->both, last(&out->out) + last(&out->back));
    bench_add(&out->limit, bench_limit_copy(limit) + bench_limit_copy(limit));
    TRY(move_out(pinned, &(bench_series){0}, error));
    TRY(move_behind_step(pinned, 2.0 * last(&out->back), &out->exposed, error));
    bench_series back = {0};
    TRY(move_out(pageable, &out->pageable_out, error));
    TRY(move_back(pageable, &back, error));
    bench_add(&out->pageable_both, last(&out->pageable_out) + last(&back));
    return REFIT_OK;
}

static json_t *describe(const result *it, uint32_t tensors, uint64_t bytes, bool reclaim,
                        const bench_limit *limit)
{
    json_t *object = json_pack("{s:s, s:b, s:i, s:I}", "bench", "offload", "reclaim", reclaim,
                               "tensors", (int)tensors, "bytes", (json_int_t)bytes);
    double payload = (double)it->stats.host_payload_bytes;
    json_t *figures = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:I, s:f, s:f, s:s}", "offload_gbps",
        bench_gbps(bytes, &it->out), "restore_gbps", bench_gbps(bytes, &it->back), "limit_gbps",
        bench_gbps(2 * bytes, &it->limit), "pageable_gbps",
        bench_gbps(2 * bytes, &it->pageable_both), "ratio_to_limit",
        bench_ratio(&it->limit, &it->both), "speedup_over_pageable",
        bench_ratio(&it->pageable_both, &it->both), "allocations_per_cycle",
        (json_int_t)it->allocations, "host_bytes_over_payload",
        (double)it->stats.host_bytes / payload - 1.0, "exposed_restore_ratio",
        bench_ratio(&it->exposed, &it->back), "host_pinned_bytes",
        (json_int_t)it->stats.host_pinned_bytes, "cycle_seconds_median", bench_median(&it->both),
        "cycle_seconds_p95", bench_p95(&it->both), "limit_loop", bench_limit_loop(limit));
    json_object_update(object, figures);
    json_decref(figures);
    bench_machine(object);
    return object;
}

static refit_status run_rounds(const bench_options *options, arm *pinned, arm *pageable,
                               bench_limit *limit, result *out, refit_error *error)
{
    result warm_up = {0};
    uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    TRY(run_round(pinned, pageable, limit, &warm_up, error));
    for (uint32_t i = 0; i < rounds; i++)
        TRY(run_round(pinned, pageable, limit, out, error));
    refit_stats_init(&out->stats, sizeof out->stats);
    return refit_offloader_stats(pinned->offloader, &out->stats, error);
}

static refit_status run_mode(const bench_options *options, const bench_tensor *tensors,
                             uint32_t count, uint64_t bytes, bool reclaim, bench_limit *limit,
                             refit_error *error)
{
    arm pinned = {0};
    arm pageable = {0};
    result *out = calloc(1, sizeof *out);
    if (out == NULL) return REFIT_ERR_HOST_MEMORY;
    refit_status status = arm_open(&pinned, options, tensors, count, true, reclaim, error);
    if (status == REFIT_OK)
        status = arm_open(&pageable, options, tensors, count, false, reclaim, error);
    if (status == REFIT_OK) status = run_rounds(options, &pinned, &pageable, limit, out, error);
    if (status == REFIT_OK) bench_print(options, describe(out, count, bytes, reclaim, limit));
    if (status == REFIT_OK) status = arm_close(&pinned, error);
    if (status == REFIT_OK) status = arm_close(&pageable, error);
    free(out);
    return status;
}

static uint32_t copy_threads(const bench_options *options)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = cores < 1 ? 1 : cores > 8 ? 8 : (uint32_t)cores;
    return options->config.offload_copy_threads > 0 ? options->config.offload_copy_threads
                                                    : threads;
}

int bench_offload(const bench_options *options)
{
    static const refit_allocator counting = {sizeof counting, count_allocate, count_reallocate,
                                             count_release, NULL};
    refit_error error = {.text = "out of memory"};
    uint32_t count;
    uint64_t bytes = 0;
    if (refit_set_allocator(&counting) != REFIT_OK) return 1;
    bench_tensor *tensors =
        bench_tensors(bench_memory(options->bytes ? options->bytes : default_bytes), &count);
    for (uint32_t i = 0; tensors != NULL && i < count; i++)
        bytes += tensors[i].bytes;
    bench_limit *limit = bench_limit_open(bytes / 64 * 64, copy_threads(options));
    refit_status status = tensors == NULL || limit == NULL ? REFIT_ERR_HOST_MEMORY : REFIT_OK;
    if (status == REFIT_OK) status = run_mode(options, tensors, count, bytes, false, limit, &error);
    if (status == REFIT_OK) status = run_mode(options, tensors, count, bytes, true, limit, &error);
    bench_limit_close(limit);
    free(tensors);
    return status == REFIT_OK ? 0 : cli_complain_error(&error);
}
