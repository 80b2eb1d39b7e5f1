/* bench_rival: the rounds of all rivals, and those on the host: one large copy, and the per-tensor
 * pageable path, which there is refit's own with use_pinned_optimizer_offload: false. */
#include "bench_rival.h"

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
    if (round == 0) {
        times->cold_out = between - start;
        times->cold_back = end - between;
        return REFIT_OK;
    }
    bench_add(&times->out, between - start);
    bench_add(&times->back, end - between);
    bench_add(&times->both, end - start);
    return REFIT_OK;
}

/* A slow way is not run in every round. */
static bool has_had_its_time(const bench_times *times)
{
    double seconds = times->cold_out + times->cold_back;
    for (uint32_t i = 0; i < times->both.count; i++)
        seconds += times->both.seconds[i];
    return times->both.count >= ROUNDS_LEAST && seconds > SECONDS_MOST;
}

void bench_rival_fails(bench_rivals *rivals, bench_rival *rival, const refit_error *error)
{
    cli_complain(CLI_FAILED, "%s: %s", rival->name, error->text);
    rival->failed = true;
    rivals->failures++;
}

void bench_rivals_round(bench_rivals *rivals, uint32_t round)
{
    refit_error error;
    for (uint32_t i = 0; i < rivals->count; i++) {
        bench_rival *it = &rivals->all[i];
        if (it->failed || has_had_its_time(&it->times)) continue;
        if (bench_time_both(it->self, it->out, it->back, round, &it->times, &error) != REFIT_OK)
            bench_rival_fails(rivals, it, &error);
    }
}

refit_status bench_rivals_open(bench_rivals *rivals, const bench_options *options,
                               const bench_arm *arm, uint32_t threads, refit_error *error)
{
    char why[160];
    int ordinal = bench_cuda_ordinal(options->device);
    *rivals = (bench_rivals){0};
    if (ordinal < 0) return bench_rivals_on_host(rivals, options, arm, threads, error);
    rivals->cuda = bench_cuda_open(ordinal, why, sizeof why);
    if (rivals->cuda == NULL) return cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", why);
    return bench_rivals_on_cuda(rivals, arm, error);
}

void bench_rivals_close(bench_rivals *rivals)
{
    for (uint32_t i = 0; i < rivals->count; i++)
        rivals->all[i].close(rivals->all[i].self);
    bench_cuda_close(rivals->cuda);
    *rivals = (bench_rivals){0};
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

static void close_arm(void *self)
{
    refit_error error;
    if (bench_arm_close(self, &error) != REFIT_OK) cli_complain_error(&error);
    free(self);
}

refit_status bench_rivals_on_host(bench_rivals *rivals, const bench_options *options,
                                  const bench_arm *arm, uint32_t threads, refit_error *error)
{
    bench_limit *limit = bench_limit_open(arm->list->bytes / 64 * 64, threads);
    bench_arm *pageable = calloc(1, sizeof *pageable);
    if (limit == NULL || pageable == NULL) {
        bench_limit_close(limit);
        free(pageable);
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for one large copy");
    }
    rivals->ceiling = bench_limit_loop(limit);
    rivals->all[0] = (bench_rival){.name = "one large copy",
                                   .self = limit,
                                   .out = copy_once,
                                   .back = copy_once,
                                   .close = close_limit};
    rivals->all[1] = (bench_rival){.name = "per-tensor pageable",
                                   .self = pageable,
                                   .out = bench_arm_out,
                                   .back = bench_arm_back,
                                   .close = close_arm};
    rivals->count = 2;
    bench_arm_kind kind = {.reclaim = arm->arena != NULL};
    return bench_arm_open(pageable, options, arm->list, kind, error);
}
