/* bench_step: the step is a pause, or a row of writes to a scratch buffer on the caller's stream,
 * whose number is found by timing a few. */
#include "bench_step.h"

#include <time.h>

#include "cli.h"

enum { LONGER = 2, TRIAL = 8 };
static const uint64_t scratch_most = UINT64_C(1) << 30;

refit_status bench_behind_pause(bench_case *it, double back, bench_series *exposed,
                                refit_error *error)
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
    BENCH_TRY(refit_offloader_finish(it->offloader, BENCH_WAIT_MS, error));
    bench_add(exposed, waited + bench_now() - start);
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

/* Seconds of a step that the way back runs behind; negative: the driver refused. */
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
    return refit_offloader_finish(it->offloader, BENCH_WAIT_MS, error);
}

static refit_status compare(bench_case *it, const work *on, double back, bench_series *exposed,
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
    bench_add(exposed, with - without);
    return REFIT_OK;
}

refit_status bench_behind_work(bench_case *it, bench_cuda *cuda, double back, bench_series *exposed,
                               refit_error *error)
{
    work on = {.cuda = cuda};
    on.bytes = it->list->bytes < scratch_most ? it->list->bytes : scratch_most;
    on.scratch = bench_cuda_alloc(cuda, on.bytes);
    if (on.scratch == NULL)
        return cli_refuse(error, REFIT_ERR_DEVICE_MEMORY, 0, "%s", bench_cuda_why(cuda));
    refit_status status = compare(it, &on, back, exposed, error);
    if (!bench_cuda_free(cuda, on.scratch) && status == REFIT_OK)
        status = cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(cuda));
    return status;
}
