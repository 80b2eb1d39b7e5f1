/*
 * bench_baseline_cuda: the baselines on a GPU: which ways are run beside a case of refit, and the
 * device memory that they move.
 */
#include <stdlib.h>

#include "bench_mover.h"
#include "cli.h"

enum { PINNED_EACH_MOST = 10000 }; /* a call of the driver for every tensor would take minutes */

static bool take_one(bench_mover *it, uint32_t at, bench_memory_kind kind)
{
    uint64_t bytes = it->list->all[at].bytes;
    if (kind == BENCH_MAPPED) {
        it->device[at] = bench_cuda_reserve(it->cuda, bench_mapped_bytes(it, at));
        if (it->device[at] == NULL) return false;
        if (!bench_cuda_map(it->cuda, it->device[at], bench_mapped_bytes(it, at))) return false;
    } else {
        it->device[at] = bench_cuda_alloc(it->cuda, bytes);
    }
    return it->device[at] != NULL && bench_cuda_fill(it->cuda, it->device[at], 0x5A, bytes);
}

static bool take_memory(bench_mover *it, const bench_case *tested, bench_memory_kind kind)
{
    it->given = kind == BENCH_GIVEN;
    for (uint32_t i = 0; i < it->list->count && kind != BENCH_NO_MEMORY; i++) {
        if (it->given) it->device[i] = tested->memory[i];
        if (!it->given && !take_one(it, i, kind)) return false;
    }
    return bench_cuda_wait(it->cuda);
}

static void close_mover(void *self)
{
    bench_mover *it = self;
    if (it->host != NULL && it->device != NULL) it->drop(it);
    free(it->host);
    free(it->device);
    free(it);
}

static refit_status add_baseline(bench_baselines *baselines, const bench_case *tested,
                                 const bench_way *way, bench_memory_kind kind, refit_error *error)
{
    bench_mover *it = calloc(1, sizeof *it);
    if (it == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a baseline");
    it->cuda = baselines->cuda;
    it->list = tested->list;
    it->retained = way->retained;
    it->drop = way->drop;
    it->host = calloc(tested->list->count, sizeof *it->host);
    it->device = calloc(tested->list->count, sizeof *it->device);
    bench_baseline *baseline = &baselines->all[baselines->count++];
    *baseline = (bench_baseline){
        .name = way->name, .self = it, .out = way->out, .back = way->back, .close = close_mover};
    if (it->host == NULL || it->device == NULL)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a baseline");
    if (take_memory(it, tested, kind)) return REFIT_OK;
    cli_refuse(error, REFIT_ERR_DEVICE, 0, "%s", bench_cuda_why(baselines->cuda));
    bench_baseline_fails(baselines, baseline, error);
    return REFIT_OK;
}

refit_status bench_baselines_on_cuda(bench_baselines *baselines, const bench_case *tested,
                                     refit_error *error)
{
    baselines->ceiling = "cuMemcpyAsync";
    for (uint32_t i = 0; i < BENCH_WAYS; i++) {
        const bench_way *way = &bench_ways[i];
        bench_memory_kind kind = tested->arena != NULL ? way->reclaim : way->stays;
        if (kind == BENCH_NOT_RUN) continue;
        if (way->pins_each && tested->list->count > PINNED_EACH_MOST) continue;
        BENCH_TRY(add_baseline(baselines, tested, way, kind, error));
    }
    return REFIT_OK;
}
