/*
 * bench_tensors: a realistic list of optimizer states: both Adam moments, in float, of a 0.6
 * B-parameter transformer with the shapes of Qwen3-0.6B (28 layers, width 1024, vocabulary
 * 151,936). Small tensors (norms, 512 B) keep their size; large ones are scaled to the bytes that
 * were asked for.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

enum { LAYERS = 28, STATES = 2, FLOAT_BYTES = 4, SMALL = 1024, ALIGNMENT = 512 };

typedef struct shape {
    const char *name;
    uint64_t elements;
} shape;

static const shape layer_shapes[] = {
    {"self_attn.q_proj", 2048 * 1024},  {"self_attn.k_proj", 1024 * 1024},
    {"self_attn.v_proj", 1024 * 1024},  {"self_attn.o_proj", 1024 * 2048},
    {"self_attn.q_norm", 128},          {"self_attn.k_norm", 128},
    {"mlp.gate_proj", 3072 * 1024},     {"mlp.up_proj", 3072 * 1024},
    {"mlp.down_proj", 1024 * 3072},     {"input_layernorm", 1024},
    {"post_attention_layernorm", 1024},
};
static const shape model_shapes[] = {{"embed_tokens", UINT64_C(151936) * 1024}, {"norm", 1024}};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static uint64_t model_bytes(void)
{
    uint64_t elements = 0;
    for (size_t i = 0; i < COUNT(layer_shapes); i++)
        elements += LAYERS * layer_shapes[i].elements;
    for (size_t i = 0; i < COUNT(model_shapes); i++)
        elements += model_shapes[i].elements;
    return elements * STATES * FLOAT_BYTES;
}

static void add(bench_tensor *list, uint32_t *count, const char *prefix, const shape *of,
                double scale)
{
    static const char *const states[STATES] = {"exp_avg", "exp_avg_sq"};
    uint64_t bytes = of->elements * FLOAT_BYTES;
    if (of->elements > SMALL) bytes = (uint64_t)((double)bytes * scale) / ALIGNMENT * ALIGNMENT;
    for (int i = 0; i < STATES; i++) {
        bench_tensor *tensor = &list[(*count)++];
        snprintf(tensor->name, sizeof tensor->name, "%s%s.%s", prefix, of->name, states[i]);
        tensor->bytes = bytes < ALIGNMENT ? ALIGNMENT : bytes;
    }
}

bench_tensor *bench_tensors(uint64_t bytes, uint32_t *count)
{
    double scale = (double)bytes / (double)model_bytes();
    if (scale > 1.0) scale = 1.0;
    size_t room = STATES * (LAYERS * COUNT(layer_shapes) + COUNT(model_shapes));
    bench_tensor *list = calloc(room, sizeof *list);
    *count = 0;
    if (list == NULL) return NULL;
    for (size_t i = 0; i < COUNT(model_shapes); i++)
        add(list, count, "", &model_shapes[i], scale);
    for (int layer = 0; layer < LAYERS; layer++) {
        char prefix[24];
        snprintf(prefix, sizeof prefix, "layers.%d.", layer);
        for (size_t i = 0; i < COUNT(layer_shapes); i++)
            add(list, count, prefix, &layer_shapes[i], scale);
    }
    return list;
}
