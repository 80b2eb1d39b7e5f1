/*
 * bench broadcast: one version to 1, 2, 4, 8 and 16 worker processes, through shared memory and
 * through TCP: whole, or an update of a density to workers that hold the version before.
 *
 * `seconds` runs from begin until all workers have staged the version: complete, verified, ready to
 * switch; `version_seconds` until the publisher's commit has returned. Ceilings, measured in turn
 * in the same run: for shared memory one streaming copy and one pass of a fast hash over the bytes;
 * for TCP a raw ZeroMQ socket with the frames of a whole version to as many workers. Beside them
 * what many trainers do on one host: a copy of the weights for every worker. Last, an empty cycle.
 */
#include "bench.h"
#include "bench_raw.h"
#include "bench_versions.h"
#include "bench_workers.h"
#include "cli.h"

enum { ROUNDS = 7, WAIT_MS = 60000 };
static const uint64_t default_bytes = UINT64_C(256) << 20;
static const uint32_t worker_counts[BENCH_COUNTS_MOST] = {1, 2, 4, 8, 16};

/* Everything that one row is measured with. */
typedef struct scene {
    const bench_options *options;
    bench_versions versions;
    bench_limit *limit;
} scene;

/* The raw socket and its workers. */
typedef struct ceiling {
    bench_raw *raw;
    bench_workers processes;
} ceiling;

typedef struct row {
    bool tcp;
    uint32_t workers;
    refit_publisher *publisher;
    bench_workers processes;
    ceiling ceiling; /* with TCP */
    bench_series stage, version, limit;
    bench_series copies; /* a copy of the bytes for every worker */
    bench_version_figures last;
} row;

/* The one that the growth with more workers is counted from. */
typedef struct origin {
    uint32_t workers; /* 0: none so far */
    double seconds;
} origin;

/* ---- The rounds ---- */

static double copy_per_worker(bench_limit *limit, uint32_t workers)
{
    double seconds = 0.0;
    for (uint32_t i = 0; i < workers; i++)
        seconds += bench_limit_copy(limit);
    return seconds;
}

static double ceiling_seconds(const scene *in, const row *it)
{
    return it->tcp ? bench_raw_send(it->ceiling.raw, it->workers)
                   : bench_limit_copy(in->limit) + bench_limit_digest(in->limit);
}

/* Both slots, and both images of each worker, are touched before anything counts. */
static refit_status run_rounds(scene *in, row *it, refit_error *error)
{
    uint32_t rounds = in->options->rounds > 0 ? in->options->rounds : ROUNDS;
    for (uint32_t i = 1; i <= rounds + BENCH_FRESH_VERSIONS; i++) {
        uint32_t round = bench_versions_round(i);
        bench_versions_next(&in->versions);
        BENCH_TRY(bench_versions_publish(&in->versions, it->publisher, &it->last, error));
        double limit = ceiling_seconds(in, it);
        bench_add(&it->stage, round, it->last.stats.publish_stage_seconds_last);
        bench_add(&it->version, round, it->last.seconds);
        bench_add(&it->limit, round, limit);
        bench_add(&it->copies, round, copy_per_worker(in->limit, it->workers));
    }
    return REFIT_OK;
}

/* ---- What came of them ---- */

/* The share of the publisher's time per version that each further worker adds. */
static void add_growth(json_t *object, const row *it, const origin *from)
{
    if (from->workers == 0 || it->workers <= from->workers) return;
    double growth = bench_median(&it->version) / from->seconds - 1.0;
    json_object_set_new(object, "growth_per_added_worker",
                        json_real(growth / (double)(it->workers - from->workers)));
}

static json_t *describe(const scene *in, const row *it, const origin *from)
{
    uint64_t bytes = in->versions.bytes;
    uint64_t moved = it->tcp ? bytes * it->workers : bytes;
    json_t *object =
        json_pack("{s:s, s:s, s:i, s:I, s:f, s:I}", "bench", "broadcast", "transport",
                  it->tcp ? "tcp" : "shm", "workers", (int)it->workers, "bytes", (json_int_t)bytes,
                  "density", in->versions.density > 0 ? in->versions.density : 1.0, "sent_bytes",
                  (json_int_t)it->last.sent_bytes);
    bench_set_seconds(object, "", &it->stage);
    bench_set_seconds(object, "version_", &it->version);
    bench_extend(object,
                 json_pack("{s:f, s:f, s:f, s:f}", "gbps", bench_gbps(moved, &it->stage),
                           "limit_gbps", bench_gbps(moved, &it->limit), "ratio_to_limit",
                           bench_ratio(&it->limit, &it->stage), "speedup_over_copy_per_worker",
                           bench_ratio(&it->copies, &it->stage)));
    add_growth(object, it, from);
    bench_machine(object);
    return object;
}

/* ---- A row ---- */

static bool ceiling_open(ceiling *it, const scene *in, uint32_t workers)
{
    const refit_config *config = &in->options->config;
    it->raw = bench_raw_open("tcp://127.0.0.1:*", in->versions.bytes, config->broadcast_frame_bytes,
                             config->broadcast_window);
    if (it->raw == NULL) return false;
    bench_duty duty = {"raw", bench_raw_endpoint(it->raw), in->versions.bytes,
                       in->options->settings, NULL};
    return bench_workers_start(&it->processes, workers, &duty) && bench_raw_wait(it->raw, workers);
}

static bool start_workers(const scene *in, row *it)
{
    cli_settings settings = *in->options->settings;
    bench_duty duty = {it->tcp ? "tcp" : "shm", refit_publisher_endpoint(it->publisher),
                       in->versions.bytes, &settings, NULL};
    return cli_settings_add(&settings, "broadcast.insecure=true") &&
           bench_workers_start(&it->processes, it->workers, &duty) &&
           (!it->tcp || ceiling_open(&it->ceiling, in, it->workers));
}

static refit_status row_open(const scene *in, row *it, refit_error *error)
{
    refit_config config = in->options->config;
    config.broadcast_shm = it->tcp ? REFIT_SHM_OFF : REFIT_SHM_REQUIRE;
    if (in->versions.density <= 0) config.broadcast_delta = REFIT_DELTA_NEVER;
    config.broadcast_insecure = 1; /* made-up weights are not a secret */
    BENCH_TRY(refit_publisher_open(it->tcp ? "tcp://127.0.0.1:0" : "user://*", &config,
                                   &it->publisher, error));
    BENCH_TRY(bench_declare(it->publisher, in->versions.bytes, error));
    if (!start_workers(in, it))
        return cli_refuse(error, REFIT_ERR_SYSTEM, 0, "a worker process could not be started");
    return refit_publisher_wait_workers(it->publisher, it->workers, WAIT_MS, error);
}

static void row_close(row *it)
{
    bench_workers_stop(&it->processes);
    refit_publisher_close(it->publisher);
    bench_workers_stop(&it->ceiling.processes);
    bench_raw_close(it->ceiling.raw);
}

static refit_status run_row(scene *in, bool tcp, uint32_t workers, origin *from, refit_error *error)
{
    row it = {.tcp = tcp, .workers = workers};
    refit_status status = row_open(in, &it, error);
    if (status == REFIT_OK) status = run_rounds(in, &it, error);
    if (status == REFIT_OK) {
        bench_print(in->options, describe(in, &it, from));
        if (from->workers == 0) *from = (origin){workers, bench_median(&it.version)};
        status = bench_written(error);
    }
    row_close(&it);
    return status;
}

/* ---- The empty cycle ---- */

/* The time of a refit with almost nothing to move: a page of states and a KiB of weights
 * to workers through shared memory, from clear to join. */
enum { EMPTY_ROUNDS = 50, EMPTY_WORKERS = 4, EMPTY_PART = 64 };

static refit_status cycle(refit_controller *controller, const refit_weight *weights,
                          refit_error *error)
{
    BENCH_TRY(refit_controller_offload(controller, REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_controller_publish(controller, 0, weights, BENCH_TENSORS, NULL,
                                       REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_controller_restore(controller, REFIT_STREAM_NONE, error));
    return refit_controller_wait(controller, REFIT_STREAM_NONE, error);
}

static refit_status time_cycles(refit_controller *controller, bench_series *series,
                                refit_error *error)
{
    static const char bytes[BENCH_TENSORS][EMPTY_PART];
    refit_weight weights[BENCH_TENSORS];
    for (uint32_t i = 0; i < BENCH_TENSORS; i++)
        weights[i] = (refit_weight){.tensor = i, .memory = bytes[i], .bytes = EMPTY_PART};
    for (uint32_t i = 0; i <= EMPTY_ROUNDS; i++) {
        double start = bench_now();
        BENCH_TRY(cycle(controller, weights, error));
        bench_add(series, i, bench_now() - start);
    }
    return REFIT_OK;
}

static refit_status states_open(refit_device **device, refit_offloader **offloader, void **states,
                                refit_error *error)
{
    refit_region_id id;
    refit_region_desc region = {.size = sizeof region, .name = "states", .bytes = 4096};
    BENCH_TRY(refit_device_open("host", NULL, device, error));
    BENCH_TRY(refit_memory_alloc(*device, region.bytes, states, error));
    BENCH_TRY(refit_offloader_open(*device, NULL, offloader, error));
    region.memory = *states;
    return refit_offloader_add(*offloader, &region, &id, error);
}

/* Four workers, a publisher, and the cycles between them. */
static refit_status run_cycles(const bench_options *options, refit_offloader *offloader,
                               bench_series *series, refit_error *error)
{
    const refit_config *config = &options->config;
    refit_publisher *publisher = NULL;
    refit_controller *controller = NULL;
    bench_workers workers = {0};
    uint64_t bytes = BENCH_TENSORS * EMPTY_PART;
    refit_status status = refit_publisher_open("user://*", config, &publisher, error);
    if (status == REFIT_OK) status = bench_declare(publisher, bytes, error);
    bench_duty duty = {.kind = "shm", .bytes = bytes, .settings = options->settings};
    if (status == REFIT_OK) duty.endpoint = refit_publisher_endpoint(publisher);
    if (status == REFIT_OK && !bench_workers_start(&workers, EMPTY_WORKERS, &duty))
        status = cli_refuse(error, REFIT_ERR_SYSTEM, 0, "a worker process could not be started");
    if (status == REFIT_OK)
        status = refit_publisher_wait_workers(publisher, EMPTY_WORKERS, WAIT_MS, error);
    if (status == REFIT_OK)
        status = refit_controller_open(offloader, publisher, config, &controller, error);
    if (status == REFIT_OK) status = time_cycles(controller, series, error);
    refit_controller_close(controller);
    bench_workers_stop(&workers);
    refit_publisher_close(publisher);
    return status;
}

static refit_status empty_cycle(const bench_options *options, refit_error *error)
{
    refit_device *device;
    refit_offloader *offloader;
    void *states;
    bench_series series = {0};
    BENCH_TRY(states_open(&device, &offloader, &states, error));
    BENCH_TRY(run_cycles(options, offloader, &series, error));
    json_t *object = json_pack("{s:s, s:s, s:i}", "bench", "broadcast", "transport", "empty cycle",
                               "workers", EMPTY_WORKERS);
    bench_set_seconds(object, "", &series);
    bench_print(options, object);
    BENCH_TRY(refit_offloader_close(offloader, error));
    BENCH_TRY(refit_memory_free(device, states, error));
    return refit_device_close(device, error);
}

/* ---- All rows ---- */

static refit_status run_all(scene *in, refit_error *error)
{
    const uint32_t *counts = in->options->workers[0] > 0 ? in->options->workers : worker_counts;
    for (int tcp = 0; tcp < 2; tcp++) {
        origin from = {0};
        for (uint32_t i = 0; i < BENCH_COUNTS_MOST && counts[i] > 0; i++)
            BENCH_TRY(run_row(in, tcp != 0, counts[i], &from, error));
    }
    return empty_cycle(in->options, error);
}

static uint32_t most_workers(const bench_options *options)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < BENCH_COUNTS_MOST; i++)
        if (options->workers[i] > most) most = options->workers[i];
    return most > 0 ? most : BENCH_WORKERS_MOST;
}

int bench_broadcast(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    scene in = {.options = options};
    uint64_t wanted = options->bytes ? options->bytes : default_bytes;
    /* The weights, two slots, two buffers of the limit, one of the raw socket, and two images of
     * each worker. */
    uint64_t copies = BENCH_VERSIONS_IMAGES + 5 + 2 * (uint64_t)most_workers(options);
    refit_status status = bench_versions_open(bench_memory_for(wanted, copies), options->density,
                                              &in.versions, &error);
    if (status == REFIT_OK) in.limit = bench_limit_open(in.versions.bytes, 1);
    if (status == REFIT_OK && in.limit == NULL) status = REFIT_ERR_HOST_MEMORY;
    if (status == REFIT_OK) status = run_all(&in, &error);
    bench_limit_close(in.limit);
    bench_versions_close(&in.versions);
    return status == REFIT_OK ? CLI_DONE : cli_complain_error(&error);
}
