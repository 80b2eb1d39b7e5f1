/*
 * bench host-step: parameters are stepped by AdamW on the CPU, their states on the host.
 *
 * In every round, in turn and with the same threads: a loop that reads and writes the bytes of a
 * step with one addition an array, which is what the memory gives; the kernel alone, on plain
 * arrays; and whole steps of a host step, from the first gradient to the last parameter back on the
 * device, without the norm of the gradients and with it. Gradients are ready when a step begins: no
 * backward pass hides the copies. At the end the kernel's arrays must hold the bits that its scalar
 * form gives, which tests hold against PyTorch's, and the host step those of the kernel's arrays.
 * The scalar form steps a sample: elements do not depend on each other.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/pool.h"
#include "bench.h"
#include "cli.h"
#include "kernels/adam.h"
#include "kernels/cpu.h"
#include "memory/cpu_share.h"

enum { PARAMETERS = 48, CHUNK = 16384, ROUNDS = 9, COPIES = 4, WAIT_MS = 60000 };
enum { SAMPLED = 64 }; /* a chunk of so many is in the sample */
static const uint64_t default_bytes = (uint64_t)28 << 24;

enum { WAY_LIMIT, WAY_KERNEL, WAY_STEP, WAY_NORM, WAYS };
static const char *const way_names[WAYS] = {"memory limit", "kernel", "host step",
                                            "host step with norm"};

/* What a parameter is made of. */
typedef struct format {
    const char *name;
    int32_t type; /* of gradients and parameters */
    int32_t beside;
    uint64_t moved; /* bytes read and written an element */
} format;

static const format formats[] = {
    {"fp32", REFIT_NUMBER_FP32, REFIT_BESIDE_NONE, 28},
    {"bf16 with remainders", REFIT_NUMBER_BF16, REFIT_BESIDE_REMAINDER, 26},
};

/* Plain arrays of all elements, parameter behind parameter. */
enum { GRADIENT, WEIGHT, BESIDE, FIRST, SECOND, ARRAYS };

typedef struct arrays {
    void *all[ARRAYS];
} arrays;

typedef struct bed {
    const bench_options *options;
    const format *kind;
    uint64_t elements; /* of each parameter */
    uint64_t count;    /* of all */
    arrays plain;      /* what the kernel steps */
    arrays limit;      /* what the loop goes over */
    arrays sample;     /* chunks of `plain` as they begin, one behind the other */
    refit_device *device;
    refit_offloader *offloader;
    refit_host_step *step;
    refit_stream_ref stream;
    void *memory[PARAMETERS], *gradients[PARAMETERS];
    refit_host_parameter list[PARAMETERS];
    refit_optimizer_options groups;
    rft_adam_rule rule;
    uint64_t number; /* of the step */
    uint32_t threads;
    rft_pool pool;
    bench_series series[WAYS];
} bed;

static uint64_t width_of(const bed *on, int array)
{
    if (array == FIRST || array == SECOND) return 4;
    if (array == BESIDE) return on->kind->beside == REFIT_BESIDE_NONE ? 0 : 2;
    return on->kind->type == REFIT_NUMBER_FP32 ? 4 : 2;
}

/* ---- Open and close ---- */

static void fill(const bed *on, int array, void *to)
{
    const uint64_t bytes = width_of(on, array) * on->count;
    if (array != GRADIENT && array != WEIGHT) return;
    uint32_t state = 2463534242u + (uint32_t)array;
    for (uint64_t i = 0; i < on->count; i++) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        const float value = (float)(int32_t)state * 1e-10f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t half = (uint16_t)(bits >> 16);
        if (bytes == 4 * on->count) memcpy((char *)to + 4 * i, &value, sizeof value);
        if (bytes == 2 * on->count) memcpy((char *)to + 2 * i, &half, sizeof half);
    }
}

static refit_status map_arrays(const bed *on, arrays *out, refit_error *error)
{
    for (int array = 0; array < ARRAYS; array++) {
        const uint64_t bytes = width_of(on, array) * on->count;
        if (bytes == 0) continue;
        void *memory =
            mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for plain arrays");
        (void)madvise(memory, bytes, MADV_HUGEPAGE);
        memset(memory, 0, bytes);
        fill(on, array, memory);
        out->all[array] = memory;
    }
    return REFIT_OK;
}

static void unmap_arrays(const bed *on, arrays *of)
{
    for (int array = 0; array < ARRAYS; array++) {
        if (of->all[array] != NULL) munmap(of->all[array], width_of(on, array) * on->count);
    }
}

static uint64_t chunk_at(const bed *on, uint32_t item, uint64_t *from)
{
    *from = (uint64_t)item * CHUNK;
    return on->count - *from < CHUNK ? on->count - *from : CHUNK;
}

static uint32_t chunks(const bed *on)
{
    return (uint32_t)((on->count + CHUNK - 1) / CHUNK);
}

static uint32_t sampled(const bed *on)
{
    return (chunks(on) + SAMPLED - 1) / SAMPLED;
}

static refit_status take_sample(bed *on, refit_error *error)
{
    for (int array = 0; array < ARRAYS; array++) {
        const uint64_t width = width_of(on, array);
        if (width == 0) continue;
        char *to = on->sample.all[array] = calloc(sampled(on), CHUNK * width);
        if (to == NULL)
            return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a sample");
        for (uint32_t i = 0; i < sampled(on); i++) {
            uint64_t from, count = chunk_at(on, i * SAMPLED, &from);
            const char *all = on->plain.all[array];
            memcpy(to + i * CHUNK * width, all + from * width, count * width);
        }
    }
    return REFIT_OK;
}

static refit_status add_region(bed *on, uint32_t at, const char *what, uint64_t bytes,
                               refit_region_id *out, refit_error *error)
{
    char name[32];
    snprintf(name, sizeof name, "%" PRIu32 ".%s", at, what);
    const refit_region_desc desc = {
        .size = sizeof desc, .name = name, .bytes = bytes, .home = REFIT_HOME_HOST};
    return refit_offloader_add(on->offloader, &desc, out, error);
}

static refit_status open_parameter(bed *on, uint32_t at, refit_error *error)
{
    refit_host_parameter *it = &on->list[at];
    *it = (refit_host_parameter){.size = sizeof *it,
                                 .name = "parameter",
                                 .elements = on->elements,
                                 .type = on->kind->type,
                                 .gradient_type = on->kind->type,
                                 .beside = on->kind->beside,
                                 .state_count = 2};
    const uint64_t bytes = width_of(on, WEIGHT) * on->elements;
    BENCH_TRY(refit_memory_alloc(on->device, bytes, &on->memory[at], error));
    BENCH_TRY(refit_memory_alloc(on->device, bytes, &on->gradients[at], error));
    it->memory = on->memory[at];
    const char *weights = (const char *)on->plain.all[WEIGHT] + at * bytes;
    const char *gradients = (const char *)on->plain.all[GRADIENT] + at * bytes;
    BENCH_TRY(
        refit_stream_copy(on->device, REFIT_STREAM_NONE, on->memory[at], weights, bytes, error));
    BENCH_TRY(refit_stream_copy(on->device, REFIT_STREAM_NONE, on->gradients[at], gradients, bytes,
                                error));
    BENCH_TRY(add_region(on, at, "exp_avg", 4 * on->elements, &it->states[0], error));
    BENCH_TRY(add_region(on, at, "exp_avg_sq", 4 * on->elements, &it->states[1], error));
    if (it->beside == REFIT_BESIDE_NONE) return REFIT_OK;
    return add_region(on, at, "remainder", 2 * on->elements, &it->beside_region, error);
}

/* The library stays: MKL may have started threads. */
static refit_status find_roots(bed *on, refit_error *error)
{
    const char *path = on->options->roots;
    if (path == NULL) return REFIT_OK;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL)
        return cli_refuse(error, REFIT_ERR_UNSUPPORTED, 0, "--roots: %s", dlerror());
    on->groups.root = dlsym(library, "vmsSqrt");
    on->groups.root_threads = dlsym(library, "MKL_Set_Num_Threads_Local");
    dlclose(library);
    if (on->groups.root != NULL && on->groups.root_threads != NULL) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_UNSUPPORTED, 0, "--roots: %s has no MKL", path);
}

static refit_status open_bed(bed *on, refit_error *error)
{
    static const rft_pool_kind kind = {"bench-step", "steps of the bench"};
    const refit_config *config = &on->options->config;
    on->groups = (refit_optimizer_options){.size = sizeof on->groups,
                                           .decoupled = 1,
                                           .lr = 1e-3,
                                           .weight_decay = 0.01,
                                           .beta1 = 0.9,
                                           .beta2 = 0.999,
                                           .eps = 1e-8};
    BENCH_TRY(find_roots(on, error));
    on->threads = config->offload_host_step_threads;
    if (on->threads == 0) on->threads = rft_cpu_share("");
    BENCH_TRY(rft_pool_open(&on->pool, &kind, on->threads, error));
    BENCH_TRY(map_arrays(on, &on->plain, error));
    BENCH_TRY(map_arrays(on, &on->limit, error));
    BENCH_TRY(take_sample(on, error));
    BENCH_TRY(refit_device_open(on->options->device, config, &on->device, error));
    BENCH_TRY(refit_stream_open(on->device, &on->stream, error));
    BENCH_TRY(refit_offloader_open(on->device, config, &on->offloader, error));
    for (uint32_t at = 0; at < PARAMETERS; at++)
        BENCH_TRY(open_parameter(on, at, error));
    BENCH_TRY(refit_offloader_seal(on->offloader, error));
    BENCH_TRY(refit_host_step_open(on->offloader, on->list, PARAMETERS, &on->step, error));
    return refit_host_step_load(on->step, 1, on->stream, error);
}

static refit_status close_bed(bed *on, refit_error *error)
{
    rft_pool_close(&on->pool);
    unmap_arrays(on, &on->plain);
    unmap_arrays(on, &on->limit);
    for (int array = 0; array < ARRAYS; array++)
        free(on->sample.all[array]);
    if (on->device == NULL) return REFIT_OK; /* it could not be opened */
    BENCH_TRY(refit_host_step_close(on->step, error));
    BENCH_TRY(refit_offloader_close(on->offloader, error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        BENCH_TRY(refit_memory_free(on->device, on->memory[at], error));
        BENCH_TRY(refit_memory_free(on->device, on->gradients[at], error));
    }
    if (on->stream.native != NULL) BENCH_TRY(refit_stream_close(on->device, on->stream, error));
    return refit_device_close(on->device, error);
}

/* ---- The ways ---- */

/* One element of each array at a time, so that the compiler makes vectors of it. */
static void add_all(float *restrict first, float *restrict second, float *restrict weight,
                    const float *restrict gradient, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        first[i] += gradient[i];
        second[i] += gradient[i];
        weight[i] += gradient[i];
    }
}

static void add_halves(float *restrict first, float *restrict second, uint16_t *restrict weight,
                       uint16_t *restrict beside, const uint16_t *restrict gradient, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        const float value = (float)gradient[i];
        first[i] += value;
        second[i] += value;
        weight[i] = (uint16_t)(weight[i] + gradient[i]);
        beside[i] = (uint16_t)(beside[i] + gradient[i]);
    }
}

static void limit_chunk(void *user, uint32_t item, uint32_t worker)
{
    const bed *on = user;
    uint64_t from, count = chunk_at(on, item, &from);
    void *const *all = on->limit.all;
    (void)worker;
    if (on->kind->type == REFIT_NUMBER_FP32) {
        add_all((float *)all[FIRST] + from, (float *)all[SECOND] + from,
                (float *)all[WEIGHT] + from, (const float *)all[GRADIENT] + from, count);
        return;
    }
    add_halves((float *)all[FIRST] + from, (float *)all[SECOND] + from,
               (uint16_t *)all[WEIGHT] + from, (uint16_t *)all[BESIDE] + from,
               (const uint16_t *)all[GRADIENT] + from, count);
}

static void step_arrays(const bed *on, const arrays *of, uint64_t from, uint64_t count)
{
    char *at[ARRAYS];
    for (int array = 0; array < ARRAYS; array++) {
        at[array] = of->all[array];
        if (at[array] != NULL) at[array] += width_of(on, array) * from;
    }
    const rft_adam_span span = {.count = count,
                                .gradient = at[GRADIENT],
                                .weights = at[WEIGHT],
                                .beside = at[BESIDE],
                                .states = {at[FIRST], at[SECOND], NULL},
                                .gradient_type = (rft_float_type)on->kind->type,
                                .weights_type = (rft_float_type)on->kind->type,
                                .beside_is = (rft_adam_beside)on->kind->beside};
    rft_adam_step(&on->rule, &span);
}

static void kernel_chunk(void *user, uint32_t item, uint32_t worker)
{
    const bed *on = user;
    uint64_t from, count = chunk_at(on, item, &from);
    (void)worker;
    step_arrays(on, &on->plain, from, count);
}

static void set_rule(bed *on, uint64_t number)
{
    rft_adam_options options = {.kind = RFT_ADAM,
                                .lr = on->groups.lr,
                                .weight_decay = on->groups.weight_decay,
                                .beta1 = on->groups.beta1,
                                .beta2 = on->groups.beta2,
                                .eps = on->groups.eps,
                                .decoupled = true};
    memcpy(&options.root, &on->groups.root, sizeof options.root);
    memcpy(&options.root_threads, &on->groups.root_threads, sizeof options.root_threads);
    on->rule = rft_adam_rule_at(&options, (double)number);
}

static refit_status host_step(bed *on, bool with_norm, refit_error *error)
{
    double squared;
    int found_inf;
    on->number++;
    BENCH_TRY(refit_host_step_begin(on->step, &on->groups, 1, error));
    for (uint32_t at = PARAMETERS; at-- > 0;)
        BENCH_TRY(refit_host_step_gradient(on->step, at, on->gradients[at], on->number, on->stream,
                                           error));
    if (with_norm) BENCH_TRY(refit_host_step_norm(on->step, &squared, &found_inf, error));
    BENCH_TRY(refit_host_step_run(on->step, 1, 1, on->stream, error));
    return refit_host_step_wait(on->step, WAIT_MS, error);
}

static refit_status run_way(bed *on, int way, refit_error *error)
{
    if (way == WAY_LIMIT) rft_pool_items(&on->pool, chunks(on), limit_chunk, on);
    if (way == WAY_KERNEL) rft_pool_items(&on->pool, chunks(on), kernel_chunk, on);
    return way >= WAY_STEP ? host_step(on, way == WAY_NORM, error) : REFIT_OK;
}

/* The kernel steps as often as the host step, once of it untimed. */
static refit_status run_rounds(bed *on, refit_error *error)
{
    const uint32_t rounds = on->options->rounds > 0 ? on->options->rounds : ROUNDS;
    for (uint32_t round = 0; round <= rounds; round++) {
        set_rule(on, 2 * (uint64_t)round + 1);
        for (int way = 0; way < WAYS; way++) {
            const double start = bench_now();
            BENCH_TRY(run_way(on, way, error));
            bench_add(&on->series[way], round, bench_now() - start);
        }
        set_rule(on, 2 * (uint64_t)round + 2);
        BENCH_TRY(run_way(on, WAY_KERNEL, error));
    }
    return REFIT_OK;
}

/* ---- Results ---- */

/* As many steps of the sample by the scalar form. */
static void step_sample(bed *on)
{
    rft_cpu_limit(RFT_CPU_BASE);
    for (uint64_t number = 1; number <= on->number; number++) {
        set_rule(on, number);
        for (uint32_t i = 0; i < sampled(on); i++) {
            uint64_t from, count = chunk_at(on, i * SAMPLED, &from);
            step_arrays(on, &on->sample, (uint64_t)i * CHUNK, count);
        }
    }
    rft_cpu_limit(RFT_CPU_AVX512);
}

static bool same_as_sample(const bed *on)
{
    bool same = true;
    for (int array = 0; array < ARRAYS; array++) {
        const uint64_t width = width_of(on, array);
        for (uint32_t i = 0; width > 0 && i < sampled(on); i++) {
            uint64_t from, count = chunk_at(on, i * SAMPLED, &from);
            const char *sample = on->sample.all[array], *all = on->plain.all[array];
            same =
                same && memcmp(sample + i * CHUNK * width, all + from * width, count * width) == 0;
        }
    }
    return same;
}

static refit_status same_region(const bed *on, refit_region_id region, const void *plain,
                                bool *same, refit_error *error)
{
    void *bytes;
    uint64_t count;
    BENCH_TRY(refit_host_step_region(on->step, region, &bytes, &count, error));
    *same = *same && memcmp(bytes, plain, count) == 0;
    return REFIT_OK;
}

static refit_status compare(const bed *on, bool *same, refit_error *error)
{
    const uint64_t bytes = width_of(on, WEIGHT) * on->elements;
    char *back = malloc(bytes);
    if (back == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory to compare");
    refit_status status = REFIT_OK;
    *same = true;
    for (uint32_t at = 0; at < PARAMETERS && status == REFIT_OK; at++) {
        const refit_host_parameter *it = &on->list[at];
        const uint64_t from = at * on->elements;
        void *const *all = on->plain.all;
        status = refit_stream_copy(on->device, REFIT_STREAM_NONE, back, it->memory, bytes, error);
        if (status != REFIT_OK) break;
        *same = *same && memcmp(back, (const char *)all[WEIGHT] + at * bytes, bytes) == 0;
        status = same_region(on, it->states[0], (const float *)all[FIRST] + from, same, error);
        if (status == REFIT_OK)
            status = same_region(on, it->states[1], (const float *)all[SECOND] + from, same, error);
        if (status == REFIT_OK && it->beside != REFIT_BESIDE_NONE)
            status = same_region(on, it->beside_region, (const uint16_t *)all[BESIDE] + from, same,
                                 error);
    }
    free(back);
    return status;
}

/* `same`: of a way. */
static void report(const bed *on, int way, const bool *same)
{
    const bench_series *series = &on->series[way];
    json_t *object = json_pack(
        "{s:s, s:s, s:s, s:I, s:i, s:I, s:f, s:f, s:f, s:f, s:f}", "bench", "host step", "way",
        way_names[way], "format", on->kind->name, "parameters", (json_int_t)on->count, "threads",
        (int)on->threads, "bytes_per_parameter", (json_int_t)on->kind->moved, "step_s_median",
        bench_median(series), "step_s_p95", bench_p95(series), "cold_step_s", series->cold,
        "parameters_per_s", (double)on->count / bench_median(series), "share_of_limit",
        bench_ratio(&on->series[WAY_LIMIT], series));
    if (way != WAY_LIMIT)
        json_object_set_new(
            object, "roots",
            json_string(on->options->roots == NULL ? "to nearest" : on->options->roots));
    if (way != WAY_LIMIT) json_object_set_new(object, "bit_equal", json_boolean(same[way]));
    bench_device(object, on->options, on->device);
    bench_machine(object);
    bench_print(on->options, object);
}

static refit_status run_format(const bench_options *options, const format *kind, uint64_t bytes,
                               refit_error *error)
{
    bool same[WAYS] = {false};
    refit_error closing;
    bed *on = calloc(1, sizeof *on);
    if (on == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for results");
    on->options = options;
    on->kind = kind;
    on->elements = bytes / 28 / PARAMETERS + 1;
    on->count = on->elements * PARAMETERS;
    refit_status status = open_bed(on, error);
    if (status == REFIT_OK) status = run_rounds(on, error);
    if (status == REFIT_OK) status = compare(on, &same[WAY_STEP], error);
    if (status == REFIT_OK) step_sample(on);
    same[WAY_NORM] = same[WAY_STEP];
    same[WAY_KERNEL] = status == REFIT_OK && same_as_sample(on);
    for (int way = 0; status == REFIT_OK && way < WAYS; way++)
        report(on, way, same);
    if (status == REFIT_OK && !same[WAY_KERNEL])
        status = cli_refuse(error, REFIT_ERR_CORRUPT, 0,
                            "the kernel has other bits than its scalar form");
    if (status == REFIT_OK && !same[WAY_STEP])
        status = cli_refuse(error, REFIT_ERR_CORRUPT, 0,
                            "the host step has other bits than the kernel on plain arrays");
    refit_status closed = close_bed(on, status == REFIT_OK ? error : &closing);
    free(on);
    return status == REFIT_OK ? closed : status;
}

int bench_host_step(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    refit_status status = REFIT_OK;
    const uint64_t wanted = options->bytes != 0 ? options->bytes : default_bytes;
    const uint64_t bytes = bench_memory_for(wanted, COPIES);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0] && status == REFIT_OK; i++)
        status = run_format(options, &formats[i], bytes, &error);
    if (status == REFIT_OK) status = bench_written(&error);
    return status == REFIT_OK ? CLI_DONE : cli_complain_error(&error);
}
