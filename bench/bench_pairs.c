/* bench_pairs: made up, or read from files. All images are written before anything is timed. */
#include "bench_pairs.h"

#include <stdlib.h>
#include <string.h>

#include <refit/broadcast.h>

#include "bench.h"
#include "bench_updates.h"
#include "cli.h"
#include "safetensors.h"

enum { ALIGNMENT = 64 };

void bench_pairs_close(bench_pairs *pairs)
{
    free(pairs->all);
    free(pairs->before);
    free(pairs->after);
    free(pairs->into);
    *pairs = (bench_pairs){0};
}

static void add_pair(bench_pairs *pairs, uint64_t bytes, uint32_t width, bool half)
{
    pairs->all[pairs->count++] = (bench_pair){pairs->image_bytes, bytes / width, width, half};
    pairs->image_bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    pairs->bytes += bytes;
    pairs->elements += bytes / width;
}

static refit_status take_images(bench_pairs *pairs, refit_error *error)
{
    unsigned char **images[] = {&pairs->before, &pairs->after, &pairs->into};
    for (int i = 0; i < 3; i++) {
        *images[i] = aligned_alloc(ALIGNMENT, pairs->image_bytes + ALIGNMENT);
        if (*images[i] == NULL)
            return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the two versions");
        memset(*images[i], 0, pairs->image_bytes + ALIGNMENT);
    }
    return REFIT_OK;
}

refit_status bench_pairs_open(uint64_t bytes, bench_pairs *out, refit_error *error)
{
    *out = (bench_pairs){.all = calloc(1, sizeof *out->all)};
    if (out->all == NULL)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the two versions");
    add_pair(out, bytes / 2 * 2, 2, true);
    refit_status status = take_images(out, error);
    if (status != REFIT_OK) bench_pairs_close(out);
    return status;
}

void bench_pairs_make(const bench_pairs *pairs, double density)
{
    (void)bench_updates_make(1, density, (uint16_t *)(void *)pairs->before,
                             (uint16_t *)(void *)pairs->after, (size_t)pairs->elements);
}

/* As versions are cut: of what is smaller than a byte, bytes. */
static void add_tensor(bench_pairs *pairs, const refit_tensor *tensor)
{
    uint32_t bits = refit_dtype_bits(tensor->dtype);
    bool half = tensor->dtype == REFIT_BF16 || tensor->dtype == REFIT_F16;
    if (tensor->bytes > 0) add_pair(pairs, tensor->bytes, bits % 8 == 0 ? bits / 8 : 1, half);
}

/* A failure, with the file that it is about. */
static refit_status name_file(refit_status status, const char *path, refit_error *error)
{
    const refit_error unnamed = *error;
    if (status == REFIT_OK) return REFIT_OK;
    return cli_refuse(error, status, unnamed.subsystem, "%s: %s", path, unnamed.text);
}

static refit_status load_image(const char *path, const cli_weights *weights,
                               const bench_pairs *pairs, unsigned char *image, refit_error *error)
{
    const bench_pair *pair = pairs->all;
    for (uint32_t i = 0; i < weights->count; i++) {
        if (weights->tensors[i].bytes == 0) continue;
        refit_status status = cli_weights_load(weights, i, image + pair->offset, error);
        BENCH_TRY(name_file(status, path, error));
        pair++;
    }
    return REFIT_OK;
}

/* Two files that are open. */
typedef struct files {
    const char *from_path, *to_path;
    cli_weights from, to;
} files;

static refit_status load_both(const files *both, bench_pairs *out, refit_error *error)
{
    if (!cli_weights_alike(&both->from, &both->to))
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "the two files have not the same tensors");
    *out = (bench_pairs){.all = calloc((size_t)both->from.count + 1, sizeof *out->all)};
    if (out->all == NULL)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the two versions");
    for (uint32_t i = 0; i < both->from.count; i++)
        add_tensor(out, &both->from.tensors[i]);
    refit_status status = take_images(out, error);
    if (status == REFIT_OK)
        status = load_image(both->from_path, &both->from, out, out->before, error);
    if (status == REFIT_OK) status = load_image(both->to_path, &both->to, out, out->after, error);
    if (status != REFIT_OK) bench_pairs_close(out);
    return status;
}

refit_status bench_pairs_load(const char *from, const char *to, bench_pairs *out,
                              refit_error *error)
{
    files both = {.from_path = from, .to_path = to};
    BENCH_TRY(name_file(cli_weights_open(from, &both.from, error), from, error));
    refit_status status = name_file(cli_weights_open(to, &both.to, error), to, error);
    if (status == REFIT_OK) {
        status = load_both(&both, out, error);
        cli_weights_close(&both.to);
    }
    cli_weights_close(&both.from);
    return status;
}
