/*
 * bench_list: the tensors of models. The lists are made from the dimensions of published
 * architectures: the moments of Adam in float, and for the larger models the float master of each
 * weight too, or the weights themselves in bf16. Small tensors (norms, biases) keep their size;
 * where fewer bytes are asked for than the model has, the large ones are scaled. `small` has
 * 100,000 tensors of 4 to 32 KiB, which take many copies. A file has a name and a number of
 * bytes a line.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "cli.h"
#include "file.h"

enum {
    FLOAT_BYTES = 4,
    BF16_BYTES = 2,
    NORM_ELEMENTS = 16384,
    ALIGNMENT = 512,
    SMALL_TENSORS = 100000
};

typedef struct model {
    const char *name;
    uint32_t layers;
    uint64_t width, inner, queries, keys; /* of a token, of the MLP, of all heads together */
    uint64_t head_norm;                   /* elements of the norm of queries and keys; 0: none */
    bool biases;                          /* of queries, keys and values */
    uint32_t states;                      /* of each weight; 0: the weight itself, in bf16 */
} model;

enum { VOCABULARY = 151936 }; /* one matrix, input and output tied */

static const model models[] = {
    {"qwen3-0.6b", 28, 1024, 3072, 2048, 1024, 128, false, 2},
    {"qwen2.5-1.5b", 28, 1536, 8960, 1536, 256, 0, true, 3},
    {"qwen2.5-3b", 36, 2048, 11008, 2048, 256, 0, true, 3},
};
static const char *const states[] = {"exp_avg", "exp_avg_sq", "master"};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static bool grow(bench_list *list)
{
    if (list->count < list->room) return true;
    uint32_t room = list->room == 0 ? 1024 : list->room * 2;
    bench_tensor *all = realloc(list->all, room * sizeof *all);
    if (all == NULL) return false;
    list->all = all;
    list->room = room;
    return true;
}

static bool add(bench_list *list, const char *name, uint64_t bytes)
{
    if (!grow(list)) return false;
    bench_tensor *tensor = &list->all[list->count++];
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->bytes = bytes;
    list->bytes += bytes;
    return true;
}

/* One weight's states, or the weight. */
static bool add_weight(bench_list *list, const model *of, double scale, const char *name,
                       uint64_t elements)
{
    char full[BENCH_NAME];
    uint64_t bytes = elements * (of->states > 0 ? FLOAT_BYTES : BF16_BYTES);
    if (elements > NORM_ELEMENTS) bytes = (uint64_t)((double)bytes * scale) / ALIGNMENT * ALIGNMENT;
    if (bytes < ALIGNMENT) bytes = ALIGNMENT;
    if (of->states == 0) return add(list, name, bytes);
    for (uint32_t i = 0; i < of->states && i < COUNT(states); i++) {
        snprintf(full, sizeof full, "%s.%s", name, states[i]);
        if (!add(list, full, bytes)) return false;
    }
    return true;
}

static bool add_layer(bench_list *list, const model *of, double scale, uint32_t layer)
{
    const struct {
        const char *name;
        uint64_t elements; /* 0: this architecture has none */
    } weights[] = {
        {"self_attn.q_proj", of->queries * of->width},
        {"self_attn.k_proj", of->keys * of->width},
        {"self_attn.v_proj", of->keys * of->width},
        {"self_attn.o_proj", of->width * of->queries},
        {"self_attn.q_proj.bias", of->biases ? of->queries : 0},
        {"self_attn.k_proj.bias", of->biases ? of->keys : 0},
        {"self_attn.v_proj.bias", of->biases ? of->keys : 0},
        {"self_attn.q_norm", of->head_norm},
        {"self_attn.k_norm", of->head_norm},
        {"mlp.gate_proj", of->inner * of->width},
        {"mlp.up_proj", of->inner * of->width},
        {"mlp.down_proj", of->width * of->inner},
        {"input_layernorm", of->width},
        {"post_attention_layernorm", of->width},
    };
    for (size_t i = 0; i < COUNT(weights); i++) {
        char name[48];
        snprintf(name, sizeof name, "layers.%" PRIu32 ".%s", layer, weights[i].name);
        if (weights[i].elements == 0) continue;
        if (!add_weight(list, of, scale, name, weights[i].elements)) return false;
    }
    return true;
}

static bool add_model(bench_list *list, const model *of, double scale)
{
    if (!add_weight(list, of, scale, "embed_tokens", VOCABULARY * of->width)) return false;
    if (!add_weight(list, of, scale, "norm", of->width)) return false;
    for (uint32_t layer = 0; layer < of->layers; layer++)
        if (!add_layer(list, of, scale, layer)) return false;
    return true;
}

/* The whole model, or as much of it as `bytes` allow. */
static bool fill_model(bench_list *list, const model *of, uint64_t bytes)
{
    if (!add_model(list, of, 1.0)) return false;
    if (bytes == 0 || bytes >= list->bytes) return true;
    double scale = (double)bytes / (double)list->bytes;
    list->count = 0;
    list->bytes = 0;
    return add_model(list, of, scale);
}

/* "NAME" for the states of a model, "NAME-weights" for its weights. */
static refit_status find_model(bench_list *list, const char *which, uint64_t bytes)
{
    for (size_t i = 0; i < COUNT(models); i++) {
        model of = models[i];
        size_t length = strlen(of.name);
        if (strncmp(which, of.name, length) != 0) continue;
        if (strcmp(which + length, "-weights") == 0) of.states = 0;
        if (which[length] != '\0' && of.states != 0) continue;
        return fill_model(list, &of, bytes) ? REFIT_OK : REFIT_ERR_HOST_MEMORY;
    }
    return REFIT_ERR_NOT_FOUND;
}

/* Sizes in no order, the same in every run. */
static bool fill_small(bench_list *list, uint64_t bytes)
{
    uint64_t random = UINT64_C(0x9E3779B97F4A7C15);
    list->apart = true;
    for (uint32_t i = 0; i < SMALL_TENSORS && (bytes == 0 || list->bytes < bytes); i++) {
        char name[24];
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        snprintf(name, sizeof name, "small.%" PRIu32, i);
        if (!add(list, name, (8 + (random >> 33) % 57) * ALIGNMENT)) return false;
    }
    return true;
}

static refit_status open_list(const char *path, FILE **out, refit_error *error)
{
    int opened;
    uint64_t bytes;
    refit_status status = cli_file_open(path, &opened, &bytes, error);
    if (status == REFIT_ERR_IO)
        return cli_refuse(error, REFIT_ERR_INVALID, error->subsystem,
                          "%s is neither a known list of tensors nor a file", path);
    if (status != REFIT_OK)
        return cli_refuse(error, status, 0, "%s: it is empty or not a regular file", path);
    *out = fdopen(opened, "r");
    if (*out != NULL) return REFIT_OK;
    (void)close(opened);
    return REFIT_ERR_HOST_MEMORY;
}

static refit_status fill_file(bench_list *list, const char *path, refit_error *error)
{
    char name[BENCH_NAME];
    uint64_t bytes;
    int found = EOF;
    FILE *file = NULL;
    refit_status status = open_list(path, &file, error);
    if (status != REFIT_OK) return status;
    while (status == REFIT_OK && (found = fscanf(file, "%95s %" SCNu64, name, &bytes)) == 2) {
        if (bytes == 0) break;
        if (!add(list, name, bytes)) status = REFIT_ERR_HOST_MEMORY;
    }
    fclose(file);
    if (status == REFIT_OK && (found != EOF || list->count == 0))
        status = cli_refuse(error, REFIT_ERR_INVALID, 0,
                            "%s: line %" PRIu32 " is not a tensor's name and its bytes", path,
                            list->count + 1);
    return status;
}

refit_status bench_list_open(const char *which, uint64_t bytes, bench_list *out, refit_error *error)
{
    *out = (bench_list){.name = which};
    refit_status status = find_model(out, which, bytes);
    if (strcmp(which, "small") == 0)
        status = fill_small(out, bytes) ? REFIT_OK : REFIT_ERR_HOST_MEMORY;
    if (status == REFIT_ERR_NOT_FOUND) {
        status = fill_file(out, which, error);
        out->from_file = true;
    }
    if (status == REFIT_ERR_HOST_MEMORY) cli_refuse(error, status, 0, "no memory for the list");
    if (status != REFIT_OK) bench_list_close(out);
    return status;
}

void bench_list_close(bench_list *list)
{
    free(list->all);
    *list = (bench_list){0};
}
