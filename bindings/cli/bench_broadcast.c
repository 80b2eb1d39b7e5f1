/*
 * bench broadcast: one version to 1, 2, 4 and 8 worker processes, through shared memory and through
 * TCP.
 *
 * `seconds` runs from begin until all workers have staged the version: complete, verified, ready to
 * switch. Ceilings, measured in turn in the same run: for shared memory one streaming copy and one
 * pass of a fast hash over the bytes; for TCP a raw ZeroMQ socket with the same frames to as many
 * workers. Beside them what many trainers do on one host: a copy of the weights for every worker.
 * Last, the empty cycle of bench_empty.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_crew.h"
#include "bench_cuda.h"
#include "bench_raw.h"
#include "cli.h"

enum { ROUNDS = 7, WAIT_MS = 60000 };
static const uint64_t default_bytes = UINT64_C(256) << 20;
static const uint32_t worker_counts[] = {1, 2, 4, 8};

#define TRY(call)                                                                                  \
    do {                                                                                           \
        refit_status status_ = (call);                                                             \
        if (status_ != REFIT_OK) return status_;                                                   \
    } while (0)

typedef struct source {
    char *memory; /* BENCH_TENSORS pieces, one behind the other */
    uint64_t bytes;
} source;

/* ---- the workers' side ---- */

static refit_status take_versions(refit_subscriber *subscriber, refit_error *error)
{
    refit_update *update;
    for (;;) {
        refit_status status = refit_subscriber_next(subscriber, 200, &update, error);
        if (status == REFIT_ERR_TIMEOUT && bench_input_ended()) return REFIT_OK;
        if (status == REFIT_ERR_TIMEOUT) continue;
        if (status != REFIT_OK) return status;
        TRY(refit_update_accept(update, error));
        refit_update_close(update);
    }
}

static int work(const char *endpoint, const bench_options *options)
{
    refit_error error;
    refit_subscriber *subscriber = NULL;
    refit_device *device = NULL;
    refit_status status = refit_subscriber_open(endpoint, &options->config, &subscriber, &error);
    if (status == REFIT_OK && options->device != NULL)
        status = refit_device_open(options->device, &options->config, &device, &error);
    if (status == REFIT_OK && device != NULL)
        status = refit_subscriber_use_device(subscriber, device, &error);
    if (status == REFIT_OK) status = take_versions(subscriber, &error);
    if (status != REFIT_OK) cli_complain_error(&error);
    refit_subscriber_close(subscriber);
    if (refit_device_close(device, &error) != REFIT_OK) return cli_complain_error(&error);
    return status == REFIT_OK ? 0 : 1;
}

int bench_worker(const char *kind, const char *endpoint, const char *bytes,
                 const bench_options *options)
{
    bench_options mine = *options;
    mine.bytes = strtoull(bytes, NULL, 10);
    if (strcmp(kind, "raw") == 0)
        return bench_raw_receive(endpoint, mine.bytes, mine.config.broadcast_window);
    mine.config.broadcast_shm = strcmp(kind, "shm") == 0 ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF;
    mine.device = bench_cuda_ordinal(kind) >= 0 ? kind : NULL;
    if (mine.device != NULL) {
        mine.config.broadcast_gpu = REFIT_GPU_REQUIRE;
        mine.config.broadcast_shm = options->config.broadcast_shm;
    }
    return work(endpoint, &mine);
}

/* ---- the trainer's side ---- */

/* Every round publishes other bytes, so that no block is like the one before. */
static void change(const source *from, uint32_t round)
{
    uint64_t *words = (uint64_t *)(void *)from->memory;
    for (uint64_t i = 0; i < from->bytes / sizeof *words; i++)
        words[i] = (i + 1) * UINT64_C(0x9E3779B97F4A7C15) + round;
}

static refit_status publish(refit_publisher *publisher, const source *from, refit_stats *stats,
                            refit_error *error)
{
    uint64_t part = from->bytes / BENCH_TENSORS;
    TRY(refit_publisher_begin(publisher, 0, error));
    for (uint32_t i = 0; i < BENCH_TENSORS; i++)
        TRY(refit_publisher_write(publisher, i, from->memory + i * part, part, NULL,
                                  REFIT_STREAM_NONE, error));
    TRY(refit_publisher_commit(publisher, error));
    refit_stats_init(stats, sizeof *stats);
    return refit_publisher_stats(publisher, stats, error);
}

typedef struct row {
    bench_series stage;
    bench_series limit;
    bench_series copies; /* a copy of the bytes for every worker */
} row;

static double shm_limit(bench_limit *limit)
{
    return bench_limit_copy(limit) + bench_limit_digest(limit);
}

static double copy_per_worker(bench_limit *limit, uint32_t workers)
{
    double seconds = 0.0;
    for (uint32_t i = 0; i < workers; i++)
        seconds += bench_limit_copy(limit);
    return seconds;
}

static refit_status run_rounds(refit_publisher *publisher, const source *from, bench_limit *limit,
                               bench_raw *raw, uint32_t workers, uint32_t rounds, row *out,
                               refit_error *error)
{
    refit_stats stats;
    for (uint32_t i = 0; i <= rounds; i++) {
        change(from, i);
        TRY(publish(publisher, from, &stats, error));
        double ceiling = raw != NULL ? bench_raw_send(raw, workers) : shm_limit(limit);
        if (i == 0) continue; /* the first one touches fresh memory */
        bench_add(&out->stage, stats.publish_stage_seconds_last);
        bench_add(&out->limit, ceiling);
        bench_add(&out->copies, copy_per_worker(limit, workers));
    }
    return REFIT_OK;
}

static json_t *describe(const char *transport, uint32_t workers, uint64_t bytes, const row *it)
{
    uint64_t moved = strcmp(transport, "tcp") == 0 ? bytes * workers : bytes;
    json_t *object = json_pack(
        "{s:s, s:s, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", "broadcast", "transport",
        transport, "workers", (int)workers, "bytes", (json_int_t)bytes, "seconds_median",
        bench_median(&it->stage), "seconds_p95", bench_p95(&it->stage), "gbps",
        bench_gbps(moved, &it->stage), "limit_gbps", bench_gbps(moved, &it->limit),
        "ratio_to_limit", bench_ratio(&it->limit, &it->stage), "speedup_over_copy_per_worker",
        bench_ratio(&it->copies, &it->stage));
    bench_machine(object);
    return object;
}

/* The raw socket and its workers, for as long as one row is measured. */
typedef struct ceiling {
    bench_raw *raw;
    bench_crew crew;
} ceiling;

static bool ceiling_open(ceiling *it, const bench_options *options, uint64_t bytes,
                         uint32_t workers)
{
    const refit_config *config = &options->config;
    it->raw = bench_raw_open(bytes, config->broadcast_frame_bytes, config->broadcast_window);
    return it->raw != NULL &&
           bench_crew_start(&it->crew, workers, "raw", bench_raw_endpoint(it->raw), bytes) &&
           bench_raw_wait(it->raw, workers);
}

static void ceiling_close(ceiling *it)
{
    bench_crew_stop(&it->crew);
    bench_raw_close(it->raw);
}

static refit_status run_row(const bench_options *options, const char *transport, uint32_t workers,
                            const source *from, bench_limit *limit, refit_error *error)
{
    bool tcp = strcmp(transport, "tcp") == 0;
    refit_config config = options->config;
    refit_publisher *publisher = NULL;
    bench_crew crew = {0};
    ceiling raw = {0};
    row out = {0};
    config.broadcast_shm = tcp ? REFIT_SHM_OFF : REFIT_SHM_REQUIRE;
    refit_status status = refit_publisher_open("tcp://127.0.0.1:0", &config, &publisher, error);
    if (status == REFIT_OK) status = bench_declare(publisher, from->bytes, error);
    bool started = status == REFIT_OK &&
                   bench_crew_start(&crew, workers, transport, refit_publisher_endpoint(publisher),
                                    from->bytes) &&
                   (!tcp || ceiling_open(&raw, options, from->bytes, workers));
    if (status == REFIT_OK && !started) status = REFIT_ERR_SYSTEM;
    if (status == REFIT_OK)
        status = refit_publisher_wait_workers(publisher, workers, WAIT_MS, error);
    uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    if (status == REFIT_OK)
        status = run_rounds(publisher, from, limit, raw.raw, workers, rounds, &out, error);
    if (status == REFIT_OK) bench_print(options, describe(transport, workers, from->bytes, &out));
    bench_crew_stop(&crew);
    refit_publisher_close(publisher);
    ceiling_close(&raw);
    return status;
}

static refit_status run_all(const bench_options *options, const source *from, bench_limit *limit,
                            refit_error *error)
{
    static const char *const transports[] = {"shm", "tcp"};
    for (int t = 0; t < 2; t++)
        for (size_t w = 0; w < sizeof worker_counts / sizeof worker_counts[0]; w++)
            TRY(run_row(options, transports[t], worker_counts[w], from, limit, error));
    return bench_empty_cycle(options, error);
}

int bench_broadcast(const bench_options *options)
{
    refit_error error = {.text = "out of memory, or a worker process could not be started"};
    uint64_t wanted = options->bytes ? options->bytes : default_bytes;
    source from = {.bytes = bench_memory(wanted * 20) / 20 / (BENCH_TENSORS * 64) *
                            (BENCH_TENSORS * 64)};
    from.memory = malloc(from.bytes);
    bench_limit *limit = bench_limit_open(from.bytes, 1);
    refit_status status = from.memory == NULL || limit == NULL ? REFIT_ERR_HOST_MEMORY : REFIT_OK;
    if (status == REFIT_OK) status = run_all(options, &from, limit, &error);
    bench_limit_close(limit);
    free(from.memory);
    return status == REFIT_OK ? 0 : cli_complain_error(&error);
}
