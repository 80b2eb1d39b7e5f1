/*
 * bench offload: states leave the device and come back.
 *
 * In every round all of these are timed in turn, on the same tensors: refit's offload and restore,
 * the machine's best large copy (the ceiling), and what trainers use today: the per-tensor pageable
 * path, and on a GPU the others of bench_baseline_cuda.c. Once with the device memory kept (copies
 * alone), once with it given back and taken again ("reclaim": what that costs is part of what a
 * user waits for). The first round is cold and told apart.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "bench_baseline.h"
#include "bench_case.h"
#include "cli.h"

enum { ROUNDS = 9 };
static const uint64_t host_bytes = UINT64_C(2000000000);

/* ---- What of the restore shows after a training step that is twice as long ---- */

/*
 * After a pause: the CPU is idle meanwhile; blocked is the time for which refit's calls held the
 * caller. After work (a GPU only): the caller's stream is busy writing device memory all the
 * while, and joins the restore at its end; blocked is by how much that made it later. The work is a
 * row of writes to a scratch buffer, whose number is found by timing a few. Both begin and end with
 * the tensors on the device; `back` is the time of a restore by itself.
 */
enum { LONGER = 2, TRIAL = 8 };
static const uint64_t scratch_most = UINT64_C(1) << 30;

static refit_status after_pause(bench_case *it, double back, double *blocked, refit_error *error)
{
    double step = LONGER * back;
    struct timespec pause = {.tv_sec = (time_t)step,
                             .tv_nsec = (long)((step - (double)(time_t)step) * 1e9)};
    BENCH_TRY(bench_case_out(it, error));
    double start = bench_now();
    BENCH_TRY(refit_offloader_restore(it->offloader, REFIT_STREAM_NONE, NULL, error));
    double waited = bench_now() - start;
    nanosleep(&pause, NULL);
    start = bench_now();
    BENCH_TRY(refit_offloader_wait(it->offloader, BENCH_WAIT_MS, error));
    *blocked = waited + bench_now() - start;
    return REFIT_OK;
}

typedef struct work {
    bench_cuda *cuda;
    void *scratch;
    uint64_t bytes;
} work;

static bool put(const work *on, uint32_t writes)
{
    for (uint32_t i = 0; i < writes; i++)
        if (!bench_cuda_fill(on->cuda, on->scratch, (int)i, on->bytes)) return false;
    return true;
}

/* Seconds of a step by itself; negative: the driver refused. */
static double alone(const work *on, uint32_t writes)
{
    double start = bench_now();
    if (!put(on, writes) || !bench_cuda_wait(on->cuda)) return -1.0;
    return bench_now() - start;
}

/* Seconds of a step with a restore after it; negative: the driver refused. */
static refit_status together(bench_case *it, const work *on, uint32_t writes, double *seconds,
                             refit_error *error)
{
    refit_stream_ref stream = {bench_cuda_stream(on->cuda)};
    refit_future *future;
    double start = bench_now();
    BENCH_TRY(refit_offloader_restore(it->offloader, stream, &future, error));
    bool queued = put(on, writes);
    refit_status status = refit_future_join(future, stream, error);
    refit_future_close(future);
    bool done = bench_cuda_wait(on->cuda) && queued;
    *seconds = done ? bench_now() - start : -1.0;
    BENCH_TRY(status);
    return refit_offloader_wait(it->offloader, BENCH_WAIT_MS, error);
}

static refit_status compare(bench_case *it, const work *on, double back, double *blocked,
                            refit_error *error)
{
    double with = -1.0;
    double trial = alone(on, TRIAL);
    uint32_t writes = trial > 0.0 ? (uint32_t)(LONGER * back * TRIAL / trial) + 1 : 1;
    double without = alone(on, writes);
    BENCH_TRY(bench_case_out(it, error));
    BENCH_TRY(together(it, on, writes, &with, error));
    if (trial < 0.0 || with < 0.0 || without < 0.0)
        return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(on->cuda));
    *blocked = with - without;
    return REFIT_OK;
}

static refit_status after_work(bench_case *it, bench_cuda *cuda, double back, double *blocked,
                               refit_error *error)
{
    work on = {.cuda = cuda};
    on.bytes = it->list->bytes < scratch_most ? it->list->bytes : scratch_most;
    on.scratch = bench_cuda_alloc(cuda, on.bytes);
    if (on.scratch == NULL)
        return cli_refuse(error, REFIT_ERR_DEVICE_MEMORY, 0, "%s", bench_cuda_why(cuda));
    refit_status status = compare(it, &on, back, blocked, error);
    if (!bench_cuda_free(cuda, on.scratch) && status == REFIT_OK)
        status = cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(cuda));
    return status;
}

/* ---- The rounds ---- */

typedef struct result {
    bench_times times;
    bench_series blocked; /* after a pause */
    bench_series busy;    /* after work; empty on the host */
    uint64_t allocations;
    refit_stats stats;
} result;

/* One round: every way once, next to each other. */
static refit_status run_round(bench_case *ours, bench_baselines *baselines, uint32_t round,
                              result *out, refit_error *error)
{
    uint64_t before = bench_allocations();
    BENCH_TRY(bench_time_both(ours, bench_case_out, bench_case_back, round, &out->times, error));
    out->allocations = bench_allocations() - before;
    bench_baselines_round(baselines, round);
    if (round == 0) return REFIT_OK;
    double blocked, back = out->times.back.seconds[out->times.back.count - 1];
    BENCH_TRY(after_pause(ours, back, &blocked, error));
    bench_add(&out->blocked, round, blocked);
    if (baselines->cuda == NULL) return REFIT_OK;
    BENCH_TRY(after_work(ours, baselines->cuda, back, &blocked, error));
    bench_add(&out->busy, round, blocked);
    return REFIT_OK;
}

static refit_status run_rounds(const bench_options *options, bench_case *ours,
                               bench_baselines *baselines, result *out, refit_error *error)
{
    uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    for (uint32_t i = 0; i <= rounds; i++)
        BENCH_TRY(run_round(ours, baselines, i, out, error));
    out->times.out.cold += ours->seal_seconds;
    refit_stats_init(&out->stats, sizeof out->stats);
    BENCH_TRY(refit_offloader_stats(ours->offloader, &out->stats, error));
    return bench_case_check(ours, error);
}

static json_t *describe(const bench_case *ours, const bench_baselines *baselines, const result *it)
{
    uint64_t bytes = ours->list->bytes;
    const bench_times *limit = &baselines->all[0].times;
    const bench_times *pageable = &baselines->all[1].times;
    json_t *object =
        json_pack("{s:s, s:b, s:i, s:I}", "bench", "offload", "reclaim", ours->arena != NULL,
                  "tensors", (int)ours->list->count, "bytes", (json_int_t)bytes);
    json_t *figures = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:I}", "offload_gbps",
        bench_gbps(bytes, &it->times.out), "restore_gbps", bench_gbps(bytes, &it->times.back),
        "limit_gbps", bench_gbps(2 * bytes, &limit->both), "pageable_gbps",
        bench_gbps(2 * bytes, &pageable->both), "ratio_to_limit",
        bench_ratio(&limit->both, &it->times.both), "speedup_over_pageable",
        bench_ratio(&pageable->both, &it->times.both), "allocations_per_cycle",
        (json_int_t)it->allocations, "host_bytes_over_payload",
        (double)it->stats.host_bytes / (double)it->stats.host_payload_bytes - 1.0,
        "blocked_restore_ratio", bench_ratio(&it->blocked, &it->times.back), "host_pinned_bytes",
        (json_int_t)it->stats.host_pinned_bytes);
    bench_extend(object, figures);
    bench_set_seconds(object, "cycle_", &it->times.both);
    json_object_set_new(object, "limit_loop", json_string(baselines->ceiling));
    return object;
}

/* Figures of a GPU alone: each direction apart, and the step that keeps it busy. */
static void describe_gpu(json_t *object, const bench_case *ours, const bench_baselines *baselines,
                         const result *it)
{
    const bench_times *limit = &baselines->all[0].times;
    json_t *figures = json_pack("{s:s, s:f, s:f, s:f}", "list", ours->list->name,
                                "ratio_to_limit_out", bench_ratio(&limit->out, &it->times.out),
                                "ratio_to_limit_back", bench_ratio(&limit->back, &it->times.back),
                                "blocked_busy_ratio", bench_ratio(&it->busy, &it->times.back));
    bench_extend(object, figures);
    bench_set_cold(object, "out_", &it->times.out);
    bench_set_cold(object, "back_", &it->times.back);
}

static json_t *describe_baseline(const bench_case *ours, const bench_baseline *baseline,
                                 const bench_times *it)
{
    const bench_times *times = &baseline->times;
    uint64_t bytes = ours->list->bytes;
    json_t *object =
        json_pack("{s:s, s:s, s:b, s:s, s:i, s:f, s:f}", "bench", "offload baseline", "list",
                  ours->list->name, "reclaim", ours->arena != NULL, "way", baseline->name, "rounds",
                  (int)times->both.count, "offload_gbps", bench_gbps(bytes, &times->out),
                  "restore_gbps", bench_gbps(bytes, &times->back));
    bench_set_seconds(object, "out_", &times->out);
    bench_set_seconds(object, "back_", &times->back);
    bench_set_cold(object, "out_", &times->out);
    bench_set_cold(object, "back_", &times->back);
    bench_extend(object,
                 json_pack("{s:f, s:f}", "refit_speedup_out", bench_ratio(&times->out, &it->out),
                           "refit_speedup_back", bench_ratio(&times->back, &it->back)));
    return object;
}

static void report(const bench_options *options, const bench_case *ours,
                   const bench_baselines *baselines, const result *it)
{
    json_t *object = describe(ours, baselines, it);
    if (baselines->cuda != NULL) describe_gpu(object, ours, baselines, it);
    bench_device(object, options, ours->device);
    bench_machine(object);
    bench_print(options, object);
    for (uint32_t i = 0; baselines->cuda != NULL && i < baselines->count; i++)
        if (!baselines->all[i].failed)
            bench_print(options, describe_baseline(ours, &baselines->all[i], &it->times));
}

static uint32_t copy_threads(const bench_options *options)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = cores < 1 ? 1 : cores > 8 ? 8 : (uint32_t)cores;
    return options->config.offload_copy_threads > 0 ? options->config.offload_copy_threads
                                                    : threads;
}

static refit_status run_mode(const bench_options *options, const bench_list *list, bool reclaim,
                             refit_error *error)
{
    bench_case ours = {0};
    bench_baselines baselines = {0};
    refit_error closing;
    bench_case_kind kind = {.pinned = true, .reclaim = reclaim};
    result *out = calloc(1, sizeof *out);
    if (out == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for results");
    refit_status status = bench_case_open(&ours, options, list, kind, error);
    if (status == REFIT_OK)
        status = bench_baselines_open(&baselines, options, &ours, copy_threads(options), error);
    if (status == REFIT_OK) status = run_rounds(options, &ours, &baselines, out, error);
    if (status == REFIT_OK) report(options, &ours, &baselines, out);
    if (status == REFIT_OK) status = bench_written(error);
    if (status == REFIT_OK && baselines.failures > 0)
        status = cli_refuse(error, REFIT_ERR_DEVICE, 0, "not every baseline could be run");
    bench_baselines_close(&baselines);
    refit_status closed = bench_case_close(&ours, status == REFIT_OK ? error : &closing);
    free(out);
    return status == REFIT_OK ? closed : status;
}

/* Host memory that is taken at once, in copies of the list. On a GPU: refit's arena and four ways
 * of bench_baseline_cuda.c. On the host: the states, refit's arena, two buffers of one large copy,
 * and the states of the pageable path and what it copies them to; where other memory lies between
 * the tensors, as much again for both states. */
static uint64_t copies_of(const bench_options *options, const char *which)
{
    if (bench_cuda_ordinal(options->device) >= 0) return 5;
    return strcmp(which, "small") == 0 ? 8 : 6;
}

/* The bytes of a GPU run: every way has host memory of its own, and where device memory is given
 * back, four have device memory too, in granules. The ceiling takes 4 GiB. */
static uint64_t gpu_room(int ordinal, uint64_t wanted, uint64_t copies)
{
    char why[160];
    uint64_t room = bench_memory_for(UINT64_MAX, copies);
    bench_cuda *cuda = bench_cuda_open(ordinal, why, sizeof why);
    if (cuda == NULL) return wanted; /* opening the device will say why */
    if (room > bench_cuda_free_bytes(cuda) / 6) room = bench_cuda_free_bytes(cuda) / 6;
    bench_cuda_close(cuda);
    return wanted != 0 && wanted < room ? wanted : room;
}

/* On a GPU the whole of a model of today, where memory allows it; on the host a smaller one. */
static refit_status open_list(const bench_options *options, bench_list *list, refit_error *error)
{
    int ordinal = bench_cuda_ordinal(options->device);
    const char *which = options->tensors;
    if (which == NULL) which = ordinal >= 0 ? "qwen2.5-1.5b" : "qwen3-0.6b";
    const uint64_t copies = copies_of(options, which);
    /* A list from a file cannot be made smaller, and one that cannot be read takes no memory. */
    refit_status status = bench_list_open(which, options->bytes, list, error);
    if (status != REFIT_OK || list->from_file) return status;
    bench_list_close(list);
    uint64_t bytes =
        ordinal >= 0 ? gpu_room(ordinal, options->bytes, copies)
                     : bench_memory_for(options->bytes != 0 ? options->bytes : host_bytes, copies);
    return bench_list_open(which, bytes, list, error);
}

int bench_show_list(const bench_options *options)
{
    bench_list list;
    refit_error error;
    if (open_list(options, &list, &error) != REFIT_OK) return cli_complain_error(&error);
    for (uint32_t i = 0; i < list.count; i++)
        printf("%s %" PRIu64 "\n", list.all[i].name, list.all[i].bytes);
    bench_list_close(&list);
    return 0;
}

int bench_offload(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    bench_list list;
    if (!bench_count_allocations()) return 1;
    if (open_list(options, &list, &error) != REFIT_OK) return cli_complain_error(&error);
    int failed = 0;
    bool goes_on =
        bench_memory_check(list.bytes, copies_of(options, list.name), &error) == REFIT_OK;
    if (!goes_on) failed = cli_complain_error(&error);
    for (int reclaim = 0; reclaim < 2 && goes_on; reclaim++) {
        if (reclaim == 1 && list.apart) continue;
        if (run_mode(options, &list, reclaim == 1, &error) != REFIT_OK)
            failed = cli_complain_error(&error);
        goes_on = bench_written(&error) == REFIT_OK;
    }
    bench_list_close(&list);
    return failed;
}
