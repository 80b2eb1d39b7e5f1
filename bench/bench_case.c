/* bench_case: a device, its memory and an offloader, opened in this order and closed in reverse. */
#include "bench_case.h"

#include <stdlib.h>
#include <string.h>

#include "cli.h"

static const uint64_t sample_bytes = UINT64_C(8) << 20;
static const uint64_t page_bytes = UINT64_C(4)
                                   << 20; /* an arena's piece is rounded up to its page */

/* ---- what the tensors hold ---- */

static bool make_sample(bench_case *it)
{
    uint64_t *words = malloc(2 * sample_bytes); /* and as much again to read back into */
    uint64_t random = 1;
    it->sample = (char *)words;
    for (uint64_t i = 0; words != NULL && i < sample_bytes / sizeof *words; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        words[i] = random ^ random >> 29;
    }
    return words != NULL;
}

/* A range of device memory, filled as one. */
typedef struct span {
    const char *name;
    char *memory;
    uint64_t bytes;
    uint64_t seed; /* where in the sample it begins */
} span;

/* The part of the sample at `offset` of a span; returns its length. */
static uint64_t part_of(const bench_case *it, const span *of, uint64_t offset, const char **sample)
{
    uint64_t begin = (of->seed + offset) % sample_bytes;
    uint64_t left = of->bytes - offset;
    *sample = it->sample + begin;
    return left < sample_bytes - begin ? left : sample_bytes - begin;
}

static refit_status fill_span(const bench_case *it, const span *of, refit_error *error)
{
    const char *sample;
    for (uint64_t offset = 0, bytes; offset < of->bytes; offset += bytes) {
        bytes = part_of(it, of, offset, &sample);
        BENCH_TRY(refit_stream_copy(it->device, REFIT_STREAM_NONE, of->memory + offset, sample,
                                    bytes, error));
    }
    return REFIT_OK;
}

static refit_status check_span(const bench_case *it, const span *of, refit_error *error)
{
    const char *sample;
    char *read = it->sample + sample_bytes;
    for (uint64_t offset = 0, bytes; offset < of->bytes; offset += bytes) {
        bytes = part_of(it, of, offset, &sample);
        BENCH_TRY(refit_stream_copy(it->device, REFIT_STREAM_NONE, read, of->memory + offset, bytes,
                                    error));
        if (memcmp(read, sample, bytes) != 0)
            return cli_refuse(error, REFIT_ERR_CORRUPT, 0, "%s came back with other bytes",
                              of->name);
    }
    return REFIT_OK;
}

/* Span `at`: the block, what lies between the tensors too, or a tensor. */
static bool span_at(const bench_case *it, uint32_t at, span *out)
{
    *out = (span){"a tensor or what lies between two", it->block, it->block_bytes, 0};
    if (it->block != NULL) return at == 0;
    if (at == it->list->count) return false;
    const bench_tensor *tensor = &it->list->all[at];
    *out = (span){tensor->name, it->memory[at], tensor->bytes, (uint64_t)at * 4099};
    return true;
}

static refit_status fill_all(const bench_case *it, refit_error *error)
{
    span each;
    for (uint32_t i = 0; span_at(it, i, &each); i++)
        BENCH_TRY(fill_span(it, &each, error));
    return REFIT_OK;
}

refit_status bench_case_check(const bench_case *it, refit_error *error)
{
    span each;
    for (uint32_t i = 0; span_at(it, i, &each); i++)
        BENCH_TRY(check_span(it, &each, error));
    return REFIT_OK;
}

/* ---- where they lie ---- */

/* Tensors that lie apart: as much again is between them, in pieces of every size. */
static uint64_t gap_after(const bench_list *list, uint32_t at)
{
    uint64_t bytes = list->all[list->count - 1 - at].bytes;
    return (bytes + 511) / 512 * 512;
}

static uint64_t place_after(const bench_list *list, uint32_t at)
{
    return (list->all[at].bytes + 511) / 512 * 512 + gap_after(list, at);
}

static refit_status take_block(bench_case *it, refit_error *error)
{
    for (uint32_t i = 0; i < it->list->count; i++)
        it->block_bytes += place_after(it->list, i);
    BENCH_TRY(refit_memory_alloc(it->device, it->block_bytes, &it->block, error));
    char *place = it->block;
    for (uint32_t i = 0; i < it->list->count; i++) {
        it->memory[i] = place;
        place += place_after(it->list, i);
    }
    return REFIT_OK;
}

static refit_status take_each(bench_case *it, refit_error *error)
{
    for (uint32_t i = 0; i < it->list->count; i++) {
        uint64_t bytes = it->list->all[i].bytes;
        BENCH_TRY(it->arena != NULL ? refit_arena_alloc(it->arena, bytes, &it->memory[i], error)
                                    : refit_memory_alloc(it->device, bytes, &it->memory[i], error));
    }
    return REFIT_OK;
}

static refit_status add_regions(bench_case *it, refit_policy policy, refit_error *error)
{
    BENCH_TRY(fill_all(it, error));
    for (uint32_t i = 0; i < it->list->count; i++) {
        refit_region_id id;
        refit_region_desc region = {.size = sizeof region,
                                    .name = it->list->all[i].name,
                                    .memory = it->memory[i],
                                    .bytes = it->list->all[i].bytes,
                                    .policy = policy};
        BENCH_TRY(refit_offloader_add(it->offloader, &region, &id, error));
    }
    double start = bench_now();
    BENCH_TRY(refit_offloader_seal(it->offloader, error));
    it->seal_seconds = bench_now() - start;
    return REFIT_OK;
}

static uint64_t reservation(const bench_list *list)
{
    return list->bytes + list->count * page_bytes;
}

refit_status bench_case_open(bench_case *it, const bench_options *options, const bench_list *list,
                             bench_case_kind kind, refit_error *error)
{
    refit_config config = options->config;
    config.use_pinned_optimizer_offload = kind.pinned;
    *it = (bench_case){.list = list, .memory = calloc(list->count, sizeof(void *))};
    if (it->memory == NULL || !make_sample(it))
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the benchmark itself");
    BENCH_TRY(refit_device_open(options->device, &config, &it->device, error));
    if (kind.reclaim) BENCH_TRY(refit_arena_open(it->device, reservation(list), &it->arena, error));
    BENCH_TRY(list->apart && !kind.reclaim ? take_block(it, error) : take_each(it, error));
    BENCH_TRY(refit_offloader_open(it->device, &config, &it->offloader, error));
    return add_regions(it, kind.policy, error);
}

refit_status bench_case_close(bench_case *it, refit_error *error)
{
    refit_status status = refit_offloader_close(it->offloader, error);
    bool each = it->memory != NULL && it->arena == NULL && it->block == NULL;
    for (uint32_t i = 0; status == REFIT_OK && each && i < it->list->count; i++)
        status = refit_memory_free(it->device, it->memory[i], error);
    if (status == REFIT_OK && it->block != NULL)
        status = refit_memory_free(it->device, it->block, error);
    if (status == REFIT_OK) status = refit_arena_close(it->arena, error);
    if (status == REFIT_OK) status = refit_device_close(it->device, error);
    free(it->memory);
    free(it->sample);
    *it = (bench_case){0};
    return status;
}

/* ---- the moves ---- */

refit_status bench_case_out(void *self, refit_error *error)
{
    bench_case *it = self;
    BENCH_TRY(refit_offloader_offload(it->offloader, REFIT_STREAM_NONE, NULL, error));
    return refit_offloader_wait(it->offloader, BENCH_WAIT_MS, error);
}

refit_status bench_case_back(void *self, refit_error *error)
{
    bench_case *it = self;
    BENCH_TRY(refit_offloader_restore(it->offloader, REFIT_STREAM_NONE, NULL, error));
    return refit_offloader_wait(it->offloader, BENCH_WAIT_MS, error);
}
