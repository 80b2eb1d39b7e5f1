/* bench_baseline: the rounds of all baselines, and those on the host: one large copy, and the
 * per-tensor pageable path, which there is refit's own with use_pinned_optimizer_offload: false. */
#include "bench_baseline.h"

#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { ROUNDS_LEAST = 2, SECONDS_MOST = 25 };

refit_status bench_time_both(void *self, bench_move out, bench_move back, uint32_t round,
                             bench_times *times, refit_error *error)
{
    double start = bench_now();
    BENCH_TRY(out(self, error));
    double between = bench_now();
    BENCH_TRY(back(self, error));
    double end = bench_now();
    bench_add(&times->out, round, between - start);
    bench_add(&times->back, round, end - between);
    bench_add(&times->both, round, end - start);
    return REFIT_OK;
}

/* A slow way is not run in every round. */
static bool has_had_its_time(const bench_times *times)
{
    double seconds = times->both.cold;
    for (uint32_t i = 0; i < times->both.count; i++)
        seconds += times->both.seconds[i];
    return times->both.count >= ROUNDS_LEAST && seconds > SECONDS_MOST;
}

void bench_baseline_fails(bench_baselines *baselines, bench_baseline *baseline,
                          const refit_error *error)
{
    cli_complain(CLI_FAILED, "%s: %s", baseline->name, error->text);
    baseline->failed = true;
    baselines->failures++;
}

void bench_baselines_round(bench_baselines *baselines, uint32_t round)
{
    refit_error error;
    for (uint32_t i = 0; i < baselines->count; i++) {
        bench_baseline *it = &baselines->all[i];
        if (it->failed || has_had_its_time(&it->times)) continue;
        if (bench_time_both(it->self, it->out, it->back, round, &it->times, &error) != REFIT_OK)
            bench_baseline_fails(baselines, it, &error);
    }
}

refit_status bench_baselines_open(bench_baselines *baselines, const bench_options *options,
                                  const bench_case *tested, uint32_t threads, refit_error *error)
{
    char why[160];
    int ordinal = bench_cuda_ordinal(options->device);
    *baselines = (bench_baselines){0};
    if (ordinal < 0) return bench_baselines_on_host(baselines, options, tested, threads, error);
    baselines->cuda = bench_cuda_open(ordinal, why, sizeof why);
    if (baselines->cuda == NULL) return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", why);
    return bench_baselines_on_cuda(baselines, tested, error);
}

void bench_baselines_close(bench_baselines *baselines)
{
    for (uint32_t i = 0; i < baselines->count; i++)
        baselines->all[i].close(baselines->all[i].self);
    bench_cuda_close(baselines->cuda);
    *baselines = (bench_baselines){0};
}

/* ---- on the host ---- */

static refit_status copy_once(void *self, refit_error *error)
{
    (void)error;
    bench_limit_copy(self);
    return REFIT_OK;
}

static void close_limit(void *self)
{
    bench_limit_close(self);
}

static void close_case(void *self)
{
    refit_error error;
    if (bench_case_close(self, &error) != REFIT_OK) cli_complain_error(&error);
    free(self);
}

refit_status bench_baselines_on_host(bench_baselines *baselines, const bench_options *options,
                                     const bench_case *tested, uint32_t threads, refit_error *error)
{
    bench_limit *limit = bench_limit_open(tested->list->bytes / 64 * 64, threads);
    bench_case *pageable = calloc(1, sizeof *pageable);
    if (limit == NULL || pageable == NULL) {
        bench_limit_close(limit);
        free(pageable);
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for one large copy");
    }
    baselines->ceiling = bench_limit_loop(limit);
    baselines->all[0] = (bench_baseline){.name = "one large copy",
                                         .self = limit,
                                         .out = copy_once,
                                         .back = copy_once,
                                         .close = close_limit};
    baselines->all[1] = (bench_baseline){.name = "per-tensor pageable",
                                         .self = pageable,
                                         .out = bench_case_out,
                                         .back = bench_case_back,
                                         .close = close_case};
    baselines->count = 2;
    bench_case_kind kind = {.reclaim = tested->arena != NULL};
    return bench_case_open(pageable, options, tested->list, kind, error);
}
