/* bench_versions: one image that is filled again for each version, or two that take turns. */
#include "bench_versions.h"

#include <stdlib.h>

#include "bench.h"
#include "bench_updates.h"
#include "cli.h"

enum { ALIGNMENT = 64 };

refit_status bench_versions_open(uint64_t bytes, double density, bench_versions *out,
                                 refit_error *error)
{
    uint64_t unit = (uint64_t)BENCH_TENSORS * ALIGNMENT;
    *out = (bench_versions){.bytes = bytes / unit * unit};
    for (int i = 0; i < (density > 0 ? 2 : 1); i++) {
        out->images[i] = aligned_alloc(ALIGNMENT, out->bytes + ALIGNMENT);
        if (out->images[i] == NULL)
            return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the weights");
    }
    if (density > 0)
        out->density =
            bench_updates_make(1, density, (uint16_t *)(void *)out->images[0],
                               (uint16_t *)(void *)out->images[1], (size_t)out->bytes / 2);
    return REFIT_OK;
}

void bench_versions_close(bench_versions *versions)
{
    free(versions->images[0]);
    free(versions->images[1]);
    *versions = (bench_versions){0};
}

void bench_versions_next(bench_versions *versions)
{
    versions->turn++;
    if (versions->images[1] != NULL) return;
    uint64_t factor = versions->turn * UINT64_C(0xBF58476D1CE4E5B8); /* even, so their sum is odd */
    uint64_t *words = (uint64_t *)(void *)versions->images[0];
    for (uint64_t i = 0; i < versions->bytes / sizeof *words; i++)
        words[i] = (i + 1) * (UINT64_C(0x9E3779B97F4A7C15) + factor);
}

uint32_t bench_versions_round(uint32_t version)
{
    return version > BENCH_FRESH_VERSIONS ? version - BENCH_FRESH_VERSIONS : 0;
}

static const char *image_of(const bench_versions *versions)
{
    return versions->images[versions->images[1] == NULL ? 0 : versions->turn % 2];
}

refit_status bench_declare(refit_publisher *publisher, uint64_t bytes, refit_error *error)
{
    refit_tensor tensors[BENCH_TENSORS];
    char names[BENCH_TENSORS][16];
    for (uint32_t i = 0; i < BENCH_TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "tensor.%u", i);
        tensors[i] = (refit_tensor){.size = sizeof tensors[i],
                                    .name = names[i],
                                    .dtype = REFIT_BF16,
                                    .rank = 1,
                                    .shape = {bytes / BENCH_TENSORS / 2},
                                    .bytes = bytes / BENCH_TENSORS,
                                    .alias_of = REFIT_NO_ALIAS};
    }
    return refit_publisher_declare(publisher, tensors, BENCH_TENSORS, error);
}

refit_status bench_versions_publish(const bench_versions *versions, refit_publisher *publisher,
                                    bench_version_figures *out, refit_error *error)
{
    uint64_t part = versions->bytes / BENCH_TENSORS;
    uint64_t sent_before = out->stats.publish_sent_bytes_total;
    const char *image = image_of(versions);
    double start = bench_now();
    BENCH_TRY(refit_publisher_begin(publisher, 0, error));
    for (uint32_t i = 0; i < BENCH_TENSORS; i++)
        BENCH_TRY(refit_publisher_write(publisher, i, image + i * part, part, NULL,
                                        REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_publisher_commit(publisher, error));
    out->seconds = bench_now() - start;
    refit_stats_init(&out->stats, sizeof out->stats);
    BENCH_TRY(refit_publisher_stats(publisher, &out->stats, error));
    out->sent_bytes = out->stats.publish_sent_bytes_total - sent_before;
    return REFIT_OK;
}
