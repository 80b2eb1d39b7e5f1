/*
 * bench worker: a process that takes versions until its standard input ends, for the benchmarks
 * that start it (bench_workers).
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_cuda.h"
#include "bench_raw.h"
#include "cli.h"

static refit_status take_versions(refit_subscriber *subscriber, refit_error *error)
{
    refit_update *update;
    for (;;) {
        refit_status status = refit_subscriber_next(subscriber, 200, &update, error);
        if (status == REFIT_ERR_TIMEOUT && bench_input_ended()) return REFIT_OK;
        if (status == REFIT_ERR_TIMEOUT) continue;
        if (status != REFIT_OK) return status;
        BENCH_TRY(refit_update_accept(update, error));
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
