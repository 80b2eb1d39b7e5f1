/*
 * bench handover: a model's weights to a worker process on the same GPU, by its memory, beside one
 * copy of as many bytes on the device (which is the least that such a hand-over does).
 *
 * `seconds` runs from begin until the worker has copied the version to memory of its own, verified
 * it and switched to it, with tensors that are lent. `copied_seconds` is with tensors that the
 * publisher copies first. The first version, for which memory is taken and mapped, is apart.
 */
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "bench_cuda.h"
#include "bench_workers.h"
#include "cli.h"

enum { ROUNDS = 15, WAIT_MS = 60000 };

typedef struct handover {
    const bench_options *options;
    bench_list list;
    refit_device *device;
    refit_publisher *publisher;
    bench_cuda *cuda;
    bench_workers workers;
    char *weights;       /* all tensors, one after the other, on the device */
    char *copied;        /* what the copy is made to, on the device */
    refit_weight *calls; /* what is written of each tensor */
    bench_series lent;   /* from begin to the end of the commit */
    bench_series copied_ways;
    bench_series copies;
    double first;
    double gpu_bytes; /* that the publisher has taken, while versions are lent */
    double pinned_bytes;
} handover;

static refit_status refused(const handover *it, refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(it->cuda));
}

static refit_status declare(handover *it, refit_error *error)
{
    refit_tensor *tensors = calloc(it->list.count, sizeof *tensors);
    if (tensors == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory");
    for (uint32_t i = 0; i < it->list.count; i++)
        tensors[i] = (refit_tensor){.size = sizeof tensors[i],
                                    .name = it->list.all[i].name,
                                    .dtype = REFIT_U8,
                                    .rank = 1,
                                    .shape = {it->list.all[i].bytes},
                                    .bytes = it->list.all[i].bytes,
                                    .alias_of = REFIT_NO_ALIAS};
    refit_status status = refit_publisher_declare(it->publisher, tensors, it->list.count, error);
    free(tensors);
    return status;
}

static refit_status place_weights(handover *it, refit_error *error)
{
    char *place = it->weights;
    it->calls = calloc(it->list.count, sizeof *it->calls);
    if (it->calls == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory");
    for (uint32_t i = 0; i < it->list.count; i++) {
        uint64_t bytes = it->list.all[i].bytes;
        it->calls[i] = (refit_weight){.tensor = i, .memory = place, .bytes = bytes};
        place += bytes;
    }
    return REFIT_OK;
}

static refit_status take_memory(handover *it, refit_error *error)
{
    char why[160];
    it->cuda = bench_cuda_open(bench_cuda_ordinal(it->options->device), why, sizeof why);
    if (it->cuda == NULL) return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", why);
    it->weights = bench_cuda_alloc(it->cuda, it->list.bytes);
    if (it->weights != NULL) it->copied = bench_cuda_alloc(it->cuda, it->list.bytes);
    return it->copied != NULL ? REFIT_OK : refused(it, error);
}

static refit_status open_all(handover *it, refit_error *error)
{
    refit_config config = it->options->config;
    const char *spec = it->options->device;
    config.broadcast_gpu = REFIT_GPU_REQUIRE;
    BENCH_TRY(take_memory(it, error));
    BENCH_TRY(refit_device_open(spec, &config, &it->device, error));
    BENCH_TRY(refit_publisher_open("user://*", &config, &it->publisher, error));
    BENCH_TRY(refit_publisher_use_device(it->publisher, it->device, error));
    BENCH_TRY(declare(it, error));
    BENCH_TRY(place_weights(it, error));
    bench_duty duty = {.kind = spec,
                       .endpoint = refit_publisher_endpoint(it->publisher),
                       .settings = it->options->settings};
    if (!bench_workers_start(&it->workers, 1, &duty))
        return cli_refuse(error, REFIT_ERR_SYSTEM, 0, "no worker process could be started");
    return refit_publisher_wait_workers(it->publisher, 1, WAIT_MS, error);
}

static refit_status close_all(handover *it, refit_error *error)
{
    bench_workers_stop(&it->workers);
    refit_publisher_close(it->publisher);
    if (it->weights != NULL) bench_cuda_free(it->cuda, it->weights);
    if (it->copied != NULL) bench_cuda_free(it->cuda, it->copied);
    bench_cuda_close(it->cuda);
    free(it->calls);
    bench_list_close(&it->list);
    return refit_device_close(it->device, error);
}

/* A version; `seconds` gets the time until the worker runs on it. */
static refit_status publish(handover *it, bool lends, double *seconds, refit_error *error)
{
    double start = bench_now();
    BENCH_TRY(refit_publisher_begin(it->publisher, 0, error));
    BENCH_TRY(lends ? refit_publisher_lend(it->publisher, it->calls, it->list.count, it->device,
                                           REFIT_STREAM_NONE, error)
                    : refit_publisher_write_all(it->publisher, it->calls, it->list.count,
                                                it->device, REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_publisher_commit(it->publisher, error));
    *seconds = bench_now() - start;
    return REFIT_OK;
}

/* Weights as after another step. */
static refit_status change(handover *it, int value, refit_error *error)
{
    bool changed =
        bench_cuda_fill(it->cuda, it->weights, value, it->list.bytes) && bench_cuda_wait(it->cuda);
    return changed ? REFIT_OK : refused(it, error);
}

/* Seconds of one copy of all; negative: the driver refused. */
static double copy_once(const handover *it)
{
    double start = bench_now();
    bool done = bench_cuda_copy(it->cuda, it->copied, it->weights, it->list.bytes) &&
                bench_cuda_wait(it->cuda);
    return done ? bench_now() - start : -1.0;
}

static refit_status note_memory(handover *it, refit_error *error)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    BENCH_TRY(refit_publisher_stats(it->publisher, &stats, error));
    it->gpu_bytes = (double)stats.publish_gpu_bytes;
    it->pinned_bytes = (double)stats.publish_pinned_bytes;
    return REFIT_OK;
}

/* All rounds of one way, then of the other: a block of the publisher's own is taken for that. */
static refit_status run_way(handover *it, bool lends, bench_series *series, refit_error *error)
{
    uint32_t rounds = it->options->rounds > 0 ? it->options->rounds : ROUNDS;
    for (uint32_t i = 0; i <= rounds; i++) {
        double seconds;
        BENCH_TRY(change(it, (int)(2 * i) + lends, error));
        BENCH_TRY(publish(it, lends, &seconds, error));
        double copied = copy_once(it);
        if (copied < 0.0) return refused(it, error);
        if (i == 0 && lends) it->first = seconds;
        bench_add(series, i, seconds);
        if (lends) bench_add(&it->copies, i, copied);
    }
    return REFIT_OK;
}

static refit_status run_rounds(handover *it, refit_error *error)
{
    BENCH_TRY(run_way(it, true, &it->lent, error));
    BENCH_TRY(note_memory(it, error));
    return run_way(it, false, &it->copied_ways, error);
}

static void report(const handover *it)
{
    json_t *object = json_pack(
        "{s:s, s:s, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", "handover",
        "list", it->list.name, "tensors", (int)it->list.count, "bytes", (json_int_t)it->list.bytes,
        "seconds_median", bench_median(&it->lent), "seconds_p95", bench_p95(&it->lent),
        "first_seconds", it->first, "copied_seconds_median", bench_median(&it->copied_ways),
        "device_copy_seconds_median", bench_median(&it->copies), "ratio_to_device_copy",
        bench_ratio(&it->copies, &it->lent), "gbps", bench_gbps(it->list.bytes, &it->lent),
        "gpu_bytes", it->gpu_bytes, "pinned_bytes", it->pinned_bytes);
    bench_device(object, it->options, it->device);
    bench_machine(object);
    bench_print(it->options, object);
}

int bench_handover(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    refit_error closing;
    handover it = {.options = options};
    const char *which = options->tensors != NULL ? options->tensors : "qwen2.5-1.5b-weights";
    if (bench_cuda_ordinal(options->device) < 0)
        return cli_complain(CLI_USAGE, "handover is between processes on one GPU: --device cuda:N");
    refit_status status = bench_list_open(which, options->bytes, &it.list, &error);
    if (status == REFIT_OK) status = open_all(&it, &error);
    if (status == REFIT_OK) status = run_rounds(&it, &error);
    if (status == REFIT_OK) report(&it);
    refit_status closed = close_all(&it, status == REFIT_OK ? &error : &closing);
    return status == REFIT_OK && closed == REFIT_OK ? 0 : cli_complain_error(&error);
}
