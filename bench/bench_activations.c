/*
 * bench activations: the layers of a decoder, whose saved tensors leave in the forward pass and
 * return in the backward pass.
 *
 * In every round all ways run the same step in turn: forward through all layers, and back. A layer
 * writes what it saves and computes; on its way back it computes, and reads what it saved. Each way
 * has a store of blocks, one for a layer, that are used again in stream order, as PyTorch's
 * allocator does; it takes them in its cold step. The arithmetic of a layer takes as long as the
 * copies of its tensors alone, unless --set activations.* and the machine make it otherwise: then
 * the figures say so.
 *
 *     none       nothing leaves
 *     leave      refit/activations.h: in_flight, prefetch and keep_last of the configuration
 *     pageable   each tensor into a fresh malloc, on the caller's thread, as
 *                torch.autograd.graph.save_on_cpu does it
 *
 * On the host device the arithmetic is a loop in stream order. Elsewhere C cannot launch any: there
 * it is copies on the device. Behind the last round each way runs once more, and every byte that a
 * layer reads on its way back is compared.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_case.h"
#include "bench_cuda.h"
#include "cli.h"

enum { ROUNDS = 9, LAYERS = 28, SAVED = 9, GRANULE = 512, TRIALS = 5 };

/* Elements that a layer of Qwen3-0.6B saves for a token, tensor by tensor, in bf16: the input of
 * the attention, queries, keys, values, its output, the input of the MLP, gate, up, their product.
 */
static const uint32_t saved_elements[SAVED] = {1024, 2048, 1024, 1024, 2048,
                                               1024, 3072, 3072, 3072};
enum { ELEMENTS = 17408, BF16_BYTES = 2 };

/* What a step leaves on the host device is there about three times: blocks, arena, mallocs. */
enum { COPIES = 3, COPIES_ON_GPU = 2 };
static const uint64_t host_bytes = UINT64_C(500000000);

typedef struct work {
    uint64_t turns; /* of the loop, or copies on the device */
    double value;
} work;

typedef struct saved_layer {
    char *memory;        /* its block, or NULL: away */
    char *copies[SAVED]; /* pageable */
    refit_activation_group group;
    bool left;
} saved_layer;

typedef struct bench_steps bench_steps;
typedef struct bench_way bench_way;

struct bench_way {
    const char *name;
    refit_status (*forward)(bench_steps *on, uint32_t layer, refit_error *error);
    refit_status (*backward)(bench_steps *on, uint32_t layer, refit_error *error);
    char *blocks[LAYERS]; /* all that it has taken */
    char *spare[LAYERS];
    uint32_t made, spares;
    uint64_t peak_bytes, out_bytes, back_bytes, allocations;
    bench_series seconds;
    double waited; /* what the library says that its caller waited, in all counted rounds */
};

enum { NONE, LEAVE, PAGEABLE, WAYS };

struct bench_steps {
    const refit_config *config;
    refit_device *device;
    refit_activations *activations;
    refit_stream_ref stream;
    uint32_t tokens;
    uint64_t at[SAVED + 1]; /* of the tensors in a block; the last is its size */
    uint64_t bytes[SAVED];
    uint64_t layer_bytes; /* of the tensors */
    bool arithmetic;
    work work;
    char *samples; /* a block on the device that the tensors are made of */
    char *sample;  /* the same on the host */
    char *scratch; /* a block on the device */
    char *seen;    /* one on the host, while `compares` */
    bool compares;
    saved_layer layers[LAYERS];
    bench_way all[WAYS];
    bench_way *now;
    bench_series copies_out, compute; /* of one layer, alone */
};

static refit_status no_memory(refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the benchmark itself");
}

static refit_status finish(const bench_steps *on, refit_error *error)
{
    return refit_stream_wait(on->device, on->stream, BENCH_WAIT_MS, error);
}

/* ---- Blocks ---- */

static refit_status take_block(bench_steps *on, char **out, refit_error *error)
{
    bench_way *way = on->now;
    void *memory;
    if (way->spares == 0) {
        BENCH_TRY(refit_memory_alloc(on->device, on->at[SAVED], &memory, error));
        way->blocks[way->made++] = memory;
        way->spare[way->spares++] = memory;
    }
    *out = way->spare[--way->spares];
    const uint64_t used = (way->made - way->spares) * on->at[SAVED];
    if (used > way->peak_bytes) way->peak_bytes = used;
    return REFIT_OK;
}

static void give_block(bench_steps *on, saved_layer *of)
{
    on->now->spare[on->now->spares++] = of->memory;
    of->memory = NULL;
}

/* ---- What a layer does ---- */

/* On the stream's thread. */
static void compute_turns(void *user)
{
    work *of = user;
    double a = of->value, b = a + 1.0, c = a + 2.0, d = a + 3.0;
    for (uint64_t turn = 0; turn < of->turns; turn++) {
        a = a * 0.999999 + 1e-6;
        b = b * 0.999998 + 2e-6;
        c = c * 0.999997 + 3e-6;
        d = d * 0.999996 + 4e-6;
    }
    of->value = a + b + c + d > 1e6 ? 1.0 : 0.5; /* so that the loop is not left out */
}

static refit_status compute(bench_steps *on, refit_error *error)
{
    if (on->arithmetic)
        return refit_stream_call(on->device, on->stream, compute_turns, &on->work, error);
    for (uint64_t turn = 0; turn < on->work.turns; turn++)
        BENCH_TRY(refit_stream_copy(on->device, on->stream, on->scratch, on->samples, on->at[SAVED],
                                    error));
    return REFIT_OK;
}

/* Tensors of one layer differ from those of another: it begins elsewhere in the sample. */
static uint64_t turn_of(const bench_steps *on, uint32_t layer)
{
    return on->at[SAVED] / LAYERS / GRANULE * GRANULE * layer;
}

/* The block is the sample, turned. */
static refit_status write_saved(bench_steps *on, uint32_t layer, refit_error *error)
{
    char *to = on->layers[layer].memory;
    const uint64_t turn = turn_of(on, layer), rest = on->at[SAVED] - turn;
    BENCH_TRY(refit_stream_copy(on->device, on->stream, to, on->samples + turn, rest, error));
    if (turn == 0) return REFIT_OK;
    return refit_stream_copy(on->device, on->stream, to + rest, on->samples, turn, error);
}

static refit_status compare(bench_steps *on, uint32_t layer, refit_error *error)
{
    const uint64_t turn = turn_of(on, layer), rest = on->at[SAVED] - turn;
    BENCH_TRY(finish(on, error));
    BENCH_TRY(refit_stream_copy(on->device, REFIT_STREAM_NONE, on->seen, on->layers[layer].memory,
                                on->at[SAVED], error));
    for (uint32_t i = 0; i < SAVED; i++) {
        for (uint64_t at = on->at[i]; at < on->at[i] + on->bytes[i]; at++) {
            if (on->seen[at] == on->sample[at < rest ? at + turn : at - rest]) continue;
            return cli_refuse(error, REFIT_ERR_CORRUPT, 0,
                              "%s: tensor %" PRIu32 " of layer %" PRIu32 " has other bytes",
                              on->now->name, i, layer);
        }
    }
    return REFIT_OK;
}

static refit_status read_saved(bench_steps *on, uint32_t layer, refit_error *error)
{
    if (on->compares) return compare(on, layer, error);
    return refit_stream_copy(on->device, on->stream, on->scratch, on->layers[layer].memory,
                             on->at[SAVED], error);
}

/* ---- Nothing leaves ---- */

static refit_status keep(bench_steps *on, uint32_t layer, refit_error *error)
{
    (void)on;
    (void)layer;
    (void)error;
    return REFIT_OK;
}

/* ---- refit ---- */

static refit_status drop(bench_steps *on, saved_layer *of, refit_error *error)
{
    BENCH_TRY(refit_activations_join(on->activations, of->group, on->stream, error));
    give_block(on, of);
    return REFIT_OK;
}

static refit_status leave_layer(bench_steps *on, uint32_t layer, refit_error *error)
{
    saved_layer *of = &on->layers[layer];
    const uint32_t in_flight = on->config->activations_in_flight;
    const uint32_t last = on->config->activations_keep_last;
    if (layer + last < LAYERS) {
        BENCH_TRY(refit_activations_begin(on->activations, &of->group, error));
        for (uint32_t i = 0; i < SAVED; i++) {
            uint32_t place;
            BENCH_TRY(refit_activations_add(on->activations, of->group, of->memory + on->at[i],
                                            on->bytes[i], &place, error));
            if (place == REFIT_ACTIVATION_STAYS)
                return cli_refuse(error, REFIT_ERR_BUDGET, 0,
                                  "activations.host_bytes is too little for what leaves");
        }
        BENCH_TRY(refit_activations_commit(on->activations, of->group, on->stream, error));
        of->left = true;
        on->now->out_bytes += on->layer_bytes;
    }
    for (uint32_t i = 0; i + in_flight <= layer; i++)
        if (on->layers[i].left && on->layers[i].memory != NULL)
            BENCH_TRY(drop(on, &on->layers[i], error));
    return REFIT_OK;
}

static refit_status fetch_layer(bench_steps *on, uint32_t layer, refit_error *error)
{
    saved_layer *of = &on->layers[layer];
    void *memories[SAVED];
    if (of->memory != NULL) return REFIT_OK;
    BENCH_TRY(take_block(on, &of->memory, error));
    for (uint32_t i = 0; i < SAVED; i++)
        memories[i] = of->memory + on->at[i];
    on->now->back_bytes += on->layer_bytes;
    return refit_activations_fetch(on->activations, of->group, memories, SAVED, on->stream, error);
}

static refit_status return_layer(bench_steps *on, uint32_t layer, refit_error *error)
{
    saved_layer *of = &on->layers[layer];
    const uint32_t ahead = on->config->activations_prefetch;
    for (uint32_t i = 0; i <= ahead && i <= layer; i++)
        if (on->layers[layer - i].left) BENCH_TRY(fetch_layer(on, layer - i, error));
    if (!of->left) return REFIT_OK;
    BENCH_TRY(refit_activations_join(on->activations, of->group, on->stream, error));
    of->left = false;
    return refit_activations_release(on->activations, of->group, on->stream, error);
}

/* ---- torch.autograd.graph.save_on_cpu ---- */

static refit_status save_on_cpu(bench_steps *on, uint32_t layer, refit_error *error)
{
    saved_layer *of = &on->layers[layer];
    BENCH_TRY(finish(on, error));
    for (uint32_t i = 0; i < SAVED; i++) {
        of->copies[i] = malloc(on->bytes[i]);
        if (of->copies[i] == NULL) return no_memory(error);
        BENCH_TRY(refit_stream_copy(on->device, REFIT_STREAM_NONE, of->copies[i],
                                    of->memory + on->at[i], on->bytes[i], error));
    }
    on->now->out_bytes += on->layer_bytes;
    give_block(on, of);
    return REFIT_OK;
}

static refit_status bring_from_cpu(bench_steps *on, uint32_t layer, refit_error *error)
{
    saved_layer *of = &on->layers[layer];
    BENCH_TRY(finish(on, error)); /* the block may still be in use */
    BENCH_TRY(take_block(on, &of->memory, error));
    for (uint32_t i = 0; i < SAVED; i++) {
        BENCH_TRY(refit_stream_copy(on->device, REFIT_STREAM_NONE, of->memory + on->at[i],
                                    of->copies[i], on->bytes[i], error));
        free(of->copies[i]);
        of->copies[i] = NULL;
    }
    on->now->back_bytes += on->layer_bytes;
    return REFIT_OK;
}

/* ---- A step ---- */

static refit_status step(bench_steps *on, bench_way *way, refit_error *error)
{
    on->now = way;
    way->peak_bytes = way->out_bytes = way->back_bytes = 0;
    for (uint32_t i = 0; i < LAYERS; i++) {
        BENCH_TRY(take_block(on, &on->layers[i].memory, error));
        BENCH_TRY(compute(on, error));
        BENCH_TRY(write_saved(on, i, error));
        BENCH_TRY(way->forward(on, i, error));
    }
    for (uint32_t i = LAYERS; i-- > 0;) {
        BENCH_TRY(way->backward(on, i, error));
        BENCH_TRY(compute(on, error));
        BENCH_TRY(compute(on, error)); /* a backward pass is twice a forward pass */
        BENCH_TRY(read_saved(on, i, error));
        give_block(on, &on->layers[i]);
    }
    return finish(on, error);
}

static refit_status read_waited(const bench_steps *on, double *out, refit_error *error)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    BENCH_TRY(refit_activations_stats(on->activations, &stats, error));
    *out = stats.activation_exposed_seconds_total;
    return REFIT_OK;
}

static refit_status time_step(bench_steps *on, bench_way *way, uint32_t round, refit_error *error)
{
    double before, after;
    const uint64_t allocations = bench_allocations();
    BENCH_TRY(read_waited(on, &before, error));
    const double start = bench_now();
    BENCH_TRY(step(on, way, error));
    bench_add(&way->seconds, round, bench_now() - start);
    way->allocations = bench_allocations() - allocations;
    BENCH_TRY(read_waited(on, &after, error));
    if (round > 0) way->waited += after - before;
    return REFIT_OK;
}

/* ---- How long a layer takes ---- */

static refit_status time_copies(bench_steps *on, uint32_t round, refit_error *error)
{
    refit_activation_group group;
    uint32_t place;
    double start = bench_now();
    BENCH_TRY(refit_activations_begin(on->activations, &group, error));
    for (uint32_t i = 0; i < SAVED; i++)
        BENCH_TRY(refit_activations_add(on->activations, group, on->samples + on->at[i],
                                        on->bytes[i], &place, error));
    BENCH_TRY(refit_activations_commit(on->activations, group, REFIT_STREAM_NONE, error));
    BENCH_TRY(refit_activations_wait(on->activations, group, BENCH_WAIT_MS, error));
    bench_add(&on->copies_out, round, bench_now() - start);
    return refit_activations_release(on->activations, group, REFIT_STREAM_NONE, error);
}

static refit_status time_compute(bench_steps *on, bench_series *series, uint32_t round,
                                 refit_error *error)
{
    double start = bench_now();
    BENCH_TRY(compute(on, error));
    BENCH_TRY(finish(on, error));
    bench_add(series, round, bench_now() - start);
    return REFIT_OK;
}

/* As many turns as the copies of a layer take. */
static refit_status choose_work(bench_steps *on, refit_error *error)
{
    bench_series trial = {0};
    on->work = (work){.turns = on->arithmetic ? 1 << 20 : 4, .value = 0.5};
    for (uint32_t round = 0; round <= TRIALS; round++) {
        BENCH_TRY(time_copies(on, round, error));
        BENCH_TRY(time_compute(on, &trial, round, error));
    }
    double turns = (double)on->work.turns * bench_median(&on->copies_out) / bench_median(&trial);
    on->work.turns = turns < 1.0 ? 1 : (uint64_t)(turns + 0.5);
    for (uint32_t round = 0; round <= TRIALS; round++)
        BENCH_TRY(time_compute(on, &on->compute, round, error));
    return REFIT_OK;
}

/* ---- Open and close ---- */

static void lay_out(bench_steps *on, uint64_t bytes)
{
    const uint64_t token = (uint64_t)ELEMENTS * BF16_BYTES * LAYERS;
    on->tokens = (uint32_t)(bytes / token > 0 ? bytes / token : 1);
    for (uint32_t i = 0; i < SAVED; i++) {
        on->bytes[i] = (uint64_t)saved_elements[i] * BF16_BYTES * on->tokens;
        on->at[i + 1] = on->at[i] + (on->bytes[i] + GRANULE - 1) / GRANULE * GRANULE;
        on->layer_bytes += on->bytes[i];
    }
}

static refit_status take_memory(bench_steps *on, refit_error *error)
{
    void *memory;
    uint64_t random = 1;
    refit_device_info info = {.size = sizeof info};
    BENCH_TRY(refit_device_describe(on->device, &info, error));
    on->arithmetic = info.host_addressable != 0 && strcmp(info.kind, "host") == 0;
    on->sample = malloc(on->at[SAVED]);
    on->seen = malloc(on->at[SAVED]);
    if (on->sample == NULL || on->seen == NULL) return no_memory(error);
    for (uint64_t at = 0; at < on->at[SAVED]; at++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        on->sample[at] = (char)(random >> 56);
    }
    BENCH_TRY(refit_memory_alloc(on->device, on->at[SAVED], &memory, error));
    on->samples = memory;
    BENCH_TRY(refit_memory_alloc(on->device, on->at[SAVED], &memory, error));
    on->scratch = memory;
    return refit_stream_copy(on->device, REFIT_STREAM_NONE, on->samples, on->sample, on->at[SAVED],
                             error);
}

static void name_ways(bench_steps *on)
{
    on->all[NONE] = (bench_way){.name = "none", .forward = keep, .backward = keep};
    on->all[LEAVE] = (bench_way){.name = "leave", .forward = leave_layer, .backward = return_layer};
    on->all[PAGEABLE] =
        (bench_way){.name = "pageable", .forward = save_on_cpu, .backward = bring_from_cpu};
    on->now = &on->all[NONE];
}

/* The arena is as large as what leaves, unless it was set. On failure, too, close_steps gives back
 * what there is. */
static refit_status open_steps(bench_steps *on, bench_options *options, uint64_t bytes,
                               refit_error *error)
{
    refit_config *config = &options->config;
    *on = (bench_steps){.config = config};
    lay_out(on, bytes);
    name_ways(on);
    if (config->activations_host_bytes == 0)
        config->activations_host_bytes = on->at[SAVED] * LAYERS;
    BENCH_TRY(refit_device_open(options->device, config, &on->device, error));
    BENCH_TRY(refit_activations_open(on->device, config, &on->activations, error));
    BENCH_TRY(refit_stream_open(on->device, &on->stream, error));
    BENCH_TRY(take_memory(on, error));
    return choose_work(on, error);
}

static refit_status close_steps(bench_steps *on, refit_error *error)
{
    for (uint32_t i = 0; i < LAYERS; i++)
        for (uint32_t tensor = 0; tensor < SAVED; tensor++)
            free(on->layers[i].copies[tensor]);
    free(on->sample);
    free(on->seen);
    if (on->device == NULL) return REFIT_OK;
    if (on->stream.native != NULL) BENCH_TRY(finish(on, error));
    BENCH_TRY(refit_activations_close(on->activations, error));
    if (on->stream.native != NULL) BENCH_TRY(refit_stream_close(on->device, on->stream, error));
    for (uint32_t way = 0; way < WAYS; way++)
        for (uint32_t i = 0; i < on->all[way].made; i++)
            BENCH_TRY(refit_memory_free(on->device, on->all[way].blocks[i], error));
    BENCH_TRY(refit_memory_free(on->device, on->samples, error));
    BENCH_TRY(refit_memory_free(on->device, on->scratch, error));
    return refit_device_close(on->device, error);
}

/* ---- The rounds ---- */

static refit_status run_rounds(const bench_options *options, bench_steps *on, refit_error *error)
{
    const uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    for (uint32_t round = 0; round <= rounds; round++)
        for (uint32_t way = 0; way < WAYS; way++)
            BENCH_TRY(time_step(on, &on->all[way], round, error));
    on->compares = true;
    for (uint32_t way = 0; way < WAYS; way++)
        BENCH_TRY(step(on, &on->all[way], error));
    return REFIT_OK;
}

/* By how much each round of a way was longer than the one without. */
static double exposed(const bench_series *way, const bench_series *without)
{
    bench_series longer = {.cold = way->cold - without->cold};
    for (uint32_t i = 0; i < way->count; i++)
        bench_add(&longer, i + 1, way->seconds[i] - without->seconds[i]);
    return bench_median(&longer);
}

static void report(const bench_options *options, const bench_steps *on)
{
    const bench_series *without = &on->all[NONE].seconds;
    char shape[96];
    snprintf(shape, sizeof shape, "%d layers, %d tensors each, %" PRIu32 " tokens", LAYERS, SAVED,
             on->tokens);
    for (uint32_t i = 0; i < WAYS; i++) {
        const bench_way *way = &on->all[i];
        json_t *object = json_pack(
            "{s:s, s:s, s:s, s:I, s:f, s:f, s:f, s:I, s:I, s:I, s:f}", "bench", "activations",
            "way", way->name, "shape", shape, "saved_bytes", (json_int_t)(on->layer_bytes * LAYERS),
            "step_s_median", bench_median(&way->seconds), "step_s_p95", bench_p95(&way->seconds),
            "cold_step_s", way->seconds.cold, "peak_bytes", (json_int_t)way->peak_bytes,
            "out_bytes", (json_int_t)way->out_bytes, "back_bytes", (json_int_t)way->back_bytes,
            "exposed_s", exposed(&way->seconds, without));
        bench_extend(object,
                     json_pack("{s:f, s:f, s:f, s:I, s:f, s:f, s:s}", "times_as_long",
                               bench_ratio(&way->seconds, without), "cold_times_as_long",
                               way->seconds.cold / without->cold, "waited_s",
                               way->waited / (way->seconds.count > 0 ? way->seconds.count : 1),
                               "allocations_per_step", (json_int_t)way->allocations,
                               "layer_copies_s", bench_median(&on->copies_out), "layer_compute_s",
                               bench_median(&on->compute), "arithmetic",
                               on->arithmetic ? "a loop" : "copies on the device"));
        bench_device(object, options, on->device);
        bench_machine(object);
        bench_print(options, object);
    }
}

static uint64_t choose_bytes(const bench_options *options)
{
    char why[160];
    const int ordinal = bench_cuda_ordinal(options->device);
    const bool on_gpu = ordinal >= 0;
    uint64_t bytes = options->bytes != 0 ? options->bytes : host_bytes;
    bytes = bench_memory_for(bytes, on_gpu ? COPIES_ON_GPU : COPIES);
    bench_cuda *cuda = on_gpu ? bench_cuda_open(ordinal, why, sizeof why) : NULL;
    if (cuda != NULL && bytes > bench_cuda_free_bytes(cuda) / 2)
        bytes = bench_cuda_free_bytes(cuda) / 2;
    bench_cuda_close(cuda);
    return bytes;
}

int bench_activations(const bench_options *given)
{
    bench_options options = *given;
    refit_error error = {.text = "out of memory"}, closing;
    bench_steps *on = calloc(1, sizeof *on);
    if (on == NULL) return cli_complain(CLI_FAILED, "no memory for the benchmark itself");
    if (!bench_count_allocations()) {
        free(on);
        return CLI_FAILED;
    }
    refit_status status = open_steps(on, &options, choose_bytes(&options), &error);
    if (status == REFIT_OK) status = run_rounds(&options, on, &error);
    if (status == REFIT_OK) report(&options, on);
    if (status == REFIT_OK) status = bench_written(&error);
    refit_status closed = close_steps(on, status == REFIT_OK ? &error : &closing);
    if (status == REFIT_OK) status = closed;
    free(on);
    return status == REFIT_OK ? CLI_DONE : cli_complain_error(&error);
}
