/*
 * bench_empty: what a refit costs when there is next to nothing to move: a page of states, a KiB of
 * weights, four workers through shared memory; from clear to join.
 */
#include "bench.h"
#include "bench_workers.h"
#include "cli.h"

enum { ROUNDS = 50, WORKERS = 4, PART = 64, WAIT_MS = 60000 };

static refit_status cycle(refit_controller *controller, const refit_weight *weights,
                          refit_error *error)
{
    BENCH_TRY(refit_controller_clear(controller, REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_controller_publish(controller, 0, weights, BENCH_TENSORS, NULL,
                                       REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_controller_return(controller, REFIT_STREAM_NONE, error));
    return refit_controller_join(controller, REFIT_STREAM_NONE, error);
}

static refit_status time_cycles(refit_controller *controller, bench_series *series,
                                refit_error *error)
{
    static const char bytes[BENCH_TENSORS][PART];
    refit_weight weights[BENCH_TENSORS];
    for (uint32_t i = 0; i < BENCH_TENSORS; i++)
        weights[i] = (refit_weight){.tensor = i, .memory = bytes[i], .bytes = PART};
    for (uint32_t i = 0; i <= ROUNDS; i++) {
        double start = bench_now();
        BENCH_TRY(cycle(controller, weights, error));
        if (i > 0) bench_add(series, bench_now() - start);
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
    uint64_t bytes = BENCH_TENSORS * PART;
    refit_status status = refit_publisher_open("user://*", config, &publisher, error);
    if (status == REFIT_OK) status = bench_declare(publisher, bytes, error);
    bench_duty duty = {.kind = "shm", .bytes = bytes, .settings = options->settings};
    if (status == REFIT_OK) duty.endpoint = refit_publisher_endpoint(publisher);
    if (status == REFIT_OK && !bench_workers_start(&workers, WORKERS, &duty))
        status = cli_refuse(error, REFIT_ERR_SYSTEM, 0, "a worker process could not be started");
    if (status == REFIT_OK)
        status = refit_publisher_wait_workers(publisher, WORKERS, WAIT_MS, error);
    if (status == REFIT_OK)
        status = refit_controller_open(offloader, publisher, config, &controller, error);
    if (status == REFIT_OK) status = time_cycles(controller, series, error);
    refit_controller_close(controller);
    bench_workers_stop(&workers);
    refit_publisher_close(publisher);
    return status;
}

refit_status bench_empty_cycle(const bench_options *options, refit_error *error)
{
    refit_device *device;
    refit_offloader *offloader;
    void *states;
    bench_series series = {0};
    BENCH_TRY(states_open(&device, &offloader, &states, error));
    BENCH_TRY(run_cycles(options, offloader, &series, error));
    json_t *object = json_pack("{s:s, s:s, s:i, s:f, s:f}", "bench", "broadcast", "transport",
                               "empty cycle", "workers", WORKERS, "seconds_median",
                               bench_median(&series), "seconds_p95", bench_p95(&series));
    bench_print(options, object);
    BENCH_TRY(refit_offloader_close(offloader, error));
    BENCH_TRY(refit_memory_free(device, states, error));
    return refit_device_close(device, error);
}
