/*
 * bench remap: device memory given back and taken again while its addresses stay: the regions are
 * REFIT_DISCARD, so that an offload and a restore copy nothing.
 */
#include <stdlib.h>

#include "bench.h"
#include "bench_baseline.h"
#include "bench_case.h"
#include "cli.h"

enum { ROUNDS = 9 };
static const uint64_t default_bytes = UINT64_C(8) << 30;

static refit_status run_rounds(const bench_options *options, bench_case *tested, bench_times *times,
                               uint64_t *reclaimed, refit_error *error)
{
    refit_stats stats;
    uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    for (uint32_t i = 0; i <= rounds; i++)
        BENCH_TRY(bench_time_both(tested, bench_case_out, bench_case_back, i, times, error));
    refit_stats_init(&stats, sizeof stats);
    BENCH_TRY(refit_offloader_stats(tested->offloader, &stats, error));
    *reclaimed = stats.offload_reclaimed_bytes_last;
    return REFIT_OK;
}

static void report(const bench_options *options, const bench_case *tested, const bench_times *times,
                   uint64_t reclaimed)
{
    double gib = (double)reclaimed / (double)(UINT64_C(1) << 30);
    json_t *object = json_pack(
        "{s:s, s:i, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", "remap", "tensors",
        (int)tested->list->count, "bytes", (json_int_t)tested->list->bytes, "reclaimed_bytes",
        (json_int_t)reclaimed, "unmap_ms_per_gib", bench_median(&times->out) * 1e3 / gib,
        "map_ms_per_gib", bench_median(&times->back) * 1e3 / gib, "unmap_seconds_p95",
        bench_p95(&times->out), "map_seconds_p95", bench_p95(&times->back), "unmap_seconds_median",
        bench_median(&times->out), "map_seconds_median", bench_median(&times->back));
    bench_device(object, options, tested->device);
    bench_machine(object);
    bench_print(options, object);
}

int bench_remap(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    refit_error closing;
    bench_list list;
    bench_case tested = {0};
    bench_times times = {0};
    uint64_t reclaimed = 0;
    bench_case_kind kind = {.pinned = true, .reclaim = true, .policy = REFIT_DISCARD};
    uint64_t bytes = bench_memory_for(options->bytes ? options->bytes : default_bytes, 1);
    const char *which = options->tensors != NULL ? options->tensors : "qwen2.5-1.5b";
    refit_status status = bench_list_open(which, bytes, &list, &error);
    if (status != REFIT_OK) return cli_complain_error(&error);
    status = bench_case_open(&tested, options, &list, kind, &error);
    if (status == REFIT_OK) status = run_rounds(options, &tested, &times, &reclaimed, &error);
    if (status == REFIT_OK) report(options, &tested, &times, reclaimed);
    refit_status closed = bench_case_close(&tested, status == REFIT_OK ? &error : &closing);
    bench_list_close(&list);
    return status == REFIT_OK && closed == REFIT_OK ? 0 : cli_complain_error(&error);
}
