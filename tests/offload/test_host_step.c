/* A host step: the CPU steps parameters whose states are in the image, with the bits of the kernel.
 */
#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <refit.h>

#include "kernels/adam.h"
#include "kernels/cast.h"
#include "kernels/floats.h"
#include "kernels/norm.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define PARAMETERS  8
#define GROUPS      5
#define TRIES       12
#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */
#define BLOCK       UINT64_C(16384)

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

/* ---- What every test stands on: parameters, and the same in plain arrays --------------------- */

/* What a parameter must be. */
typedef struct plain {
    void *weights;
    void *beside;
    float *states[3];
    uint64_t number; /* of its steps */
} plain;

typedef struct scene {
    refit_device *device;
    refit_device *inner; /* the one in it, for the test's own copies */
    refit_config config;
    refit_offloader *offloader;
    refit_host_step *step;
    refit_stream_ref stream;
    refit_region_id other; /* a region of no parameter */
    refit_host_parameter list[PARAMETERS];
    char names[PARAMETERS][16];
    plain expected[PARAMETERS];
    void *gradients[PARAMETERS]; /* on the device */
    void *given[PARAMETERS];     /* the same, in host memory that copies may come from */
    refit_optimizer_options groups[GROUPS];
    bool named[PARAMETERS]; /* in this step */
    double unscale, clip;
    uint32_t order[PARAMETERS];
    uint64_t seed;
    refit_error error;
} scene;

static bool with_verify; /* scenes have offload.verify */

static const uint64_t sizes[PARAMETERS] = {1, 7, 1000, 16384, 16385, 40000, 70001, 512};

static uint64_t below(scene *on, uint64_t bound)
{
    return seeded_below(&on->seed, bound);
}

static void set(scene *on, const char *key, const char *value)
{
    assert_ok(refit_config_set(&on->config, key, value, &on->error));
}

static uint64_t width(int32_t type)
{
    return type == REFIT_NUMBER_FP32 ? 4 : 2;
}

static void set_groups(scene *on)
{
    const refit_optimizer_options base = {.size = sizeof base,
                                          .lr = 0.01,
                                          .weight_decay = 0.1,
                                          .beta1 = 0.9,
                                          .beta2 = 0.95,
                                          .eps = 1e-8};
    for (uint32_t at = 0; at < GROUPS; at++) {
        on->groups[at] = base;
        on->groups[at].optimizer = (int32_t)(at % 4);
        on->groups[at].lr = 0.001 + (double)below(on, 1000) / 1e5;
    }
    on->groups[0].decoupled = 1;
    on->groups[2].momentum = 0.8;
    on->groups[2].nesterov = 1;
    on->groups[4].amsgrad = on->groups[4].maximize = 1;
}

static uint32_t states_of(uint32_t group)
{
    static const uint32_t counts[GROUPS] = {2, 1, 1, 1, 3};
    return counts[group];
}

static refit_region_id add_region(scene *on, const char *name, uint64_t bytes)
{
    refit_region_id id;
    refit_region_desc desc = {
        .size = sizeof desc, .name = name, .bytes = bytes, .home = REFIT_HOME_HOST};
    assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
    return id;
}

static float random_float(scene *on)
{
    return ((float)below(on, 1 << 24) - 8388608.0f) * ldexpf(1, -23 - (int)below(on, 8));
}

static void fill_typed(scene *on, void *to, int32_t type, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        float value = random_float(on);
        if (type == REFIT_NUMBER_FP32) ((float *)to)[i] = value;
        if (type == REFIT_NUMBER_BF16) rft_cast_bf16((uint16_t *)to + i, &value, 1);
        if (type == REFIT_NUMBER_FP16) rft_floats_to_half((uint16_t *)to + i, &value, 1);
    }
}

static void *zeros(uint64_t bytes)
{
    void *memory = calloc(1, bytes);
    assert_non_null(memory);
    return memory;
}

/* A parameter of random kind, on the device and in plain arrays. */
static void make_parameter(scene *on, uint32_t at)
{
    refit_host_parameter *it = &on->list[at];
    char name[32];
    snprintf(on->names[at], sizeof on->names[at], "layer.%u", at);
    *it = (refit_host_parameter){.size = sizeof *it, .name = on->names[at], .elements = sizes[at]};
    it->group = (uint32_t)below(on, GROUPS);
    it->type = (int32_t)below(on, 3);
    it->gradient_type = (int32_t)below(on, 3);
    it->state_count = states_of(it->group);
    if (it->type != REFIT_NUMBER_FP32) it->beside = (int32_t)below(on, 3);
    if (it->beside == REFIT_BESIDE_REMAINDER) it->type = REFIT_NUMBER_BF16;
    uint64_t bytes = width(it->type) * it->elements;
    plain *expected = &on->expected[at];
    expected->weights = zeros(bytes);
    fill_typed(on, expected->weights, it->type, it->elements);
    for (uint32_t state = 0; state < it->state_count; state++) {
        snprintf(name, sizeof name, "layer.%u.state.%u", at, state);
        it->states[state] = add_region(on, name, 4 * it->elements);
        expected->states[state] = zeros(4 * it->elements);
    }
    snprintf(name, sizeof name, "layer.%u.beside", at);
    if (it->beside == REFIT_BESIDE_MASTER) {
        it->beside_region = add_region(on, name, 4 * it->elements);
        expected->beside = zeros(4 * it->elements);
        if (it->type == REFIT_NUMBER_BF16)
            rft_floats_from_bf16(expected->beside, expected->weights, it->elements);
        else
            rft_floats_from_half(expected->beside, expected->weights, it->elements);
    } else if (it->beside == REFIT_BESIDE_REMAINDER) {
        it->beside_region = add_region(on, name, 2 * it->elements);
        expected->beside = zeros(2 * it->elements);
    }
    assert_ok(refit_memory_alloc(on->device, bytes, &it->memory, &on->error));
    test_write(on->inner, it->memory, expected->weights, bytes);
    uint64_t gradient = width(it->gradient_type) * it->elements;
    assert_ok(refit_memory_alloc(on->device, gradient, &on->gradients[at], &on->error));
    on->given[at] = test_host_alloc(on->inner, gradient);
}

static void open_objects(scene *on, uint64_t seed, const char *threads, const char *piece)
{
    *on = (scene){.seed = seed * 0x9E3779B97F4A7C15u + 1, .unscale = 1, .clip = 1};
    refit_config_init(&on->config, sizeof on->config);
    set(on, "offload.piece_bytes", piece);
    set(on, "offload.slab_bytes", "64KiB");
    set(on, "offload.batch", "3");
    set(on, "offload.timeout_ms", "20s");
    set(on, "offload.take_turns", "false");
    set(on, "offload.host_step_threads", threads);
    set(on, "offload.verify", with_verify ? "true" : "false");
    assert_ok(faulty_device_open(test_device_spec("host"), &on->device, &on->error));
    on->inner = faulty_device_inner(on->device);
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    set_groups(on);
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        make_parameter(on, at);
    }
    on->other = add_region(on, "other", 4096);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
}

static void open_scene(scene *on, uint64_t seed, const char *threads, const char *piece)
{
    open_objects(on, seed, threads, piece);
    assert_ok(refit_host_step_open(on->offloader, on->list, PARAMETERS, &on->step, &on->error));
    assert_ok(refit_host_step_load(on->step, 1, on->stream, &on->error));
}

static void close_scene(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    assert_ok(refit_host_step_close(on->step, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        free(on->expected[at].weights);
        free(on->expected[at].beside);
        for (uint32_t state = 0; state < 3; state++) {
            free(on->expected[at].states[state]);
        }
        test_host_free(on->inner, on->given[at],
                       width(on->list[at].gradient_type) * on->list[at].elements);
        assert_ok(refit_memory_free(on->device, on->gradients[at], &on->error));
        assert_ok(refit_memory_free(on->device, on->list[at].memory, &on->error));
    }
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

/* ---- What must be ---------------------------------------------------------------------------- */

static rft_adam_options kernel_options(const refit_optimizer_options *options)
{
    return (rft_adam_options){.kind = (rft_adam_kind)options->optimizer,
                              .lr = options->lr,
                              .weight_decay = options->weight_decay,
                              .beta1 = options->beta1,
                              .beta2 = options->beta2,
                              .eps = options->eps,
                              .lr_decay = options->lr_decay,
                              .momentum = options->momentum,
                              .dampening = options->dampening,
                              .decoupled = options->decoupled != 0,
                              .amsgrad = options->amsgrad != 0,
                              .nesterov = options->nesterov != 0,
                              .maximize = options->maximize != 0,
                              .lr_is_tensor = options->lr_is_tensor != 0};
}

/* The step of one parameter in plain arrays, in one call of the kernel. */
static void expect_step(scene *on, uint32_t at)
{
    const refit_host_parameter *it = &on->list[at];
    plain *expected = &on->expected[at];
    rft_adam_options options = kernel_options(&on->groups[it->group]);
    rft_adam_rule rule = rft_adam_rule_at(&options, (double)expected->number);
    rule.unscale = (float)on->unscale;
    rule.clip = (float)on->clip;
    rft_adam_span span = {.count = it->elements,
                          .gradient = on->given[at],
                          .weights = expected->weights,
                          .beside = expected->beside,
                          .gradient_type = (rft_float_type)it->gradient_type,
                          .weights_type = (rft_float_type)it->type,
                          .beside_is = (rft_adam_beside)it->beside};
    memcpy(span.states, expected->states, sizeof span.states);
    rft_adam_step(&rule, &span);
}

static void check_region(scene *on, refit_region_id region, const void *expected, uint64_t bytes)
{
    void *image;
    uint64_t count;
    assert_ok(refit_host_step_region(on->step, region, &image, &count, &on->error));
    assert_int_equal(count, bytes);
    assert_memory_equal(image, expected, bytes);
}

static void check_states(scene *on, uint32_t at)
{
    const refit_host_parameter *it = &on->list[at];
    for (uint32_t state = 0; state < it->state_count; state++) {
        check_region(on, it->states[state], on->expected[at].states[state], 4 * it->elements);
    }
    if (it->beside == REFIT_BESIDE_NONE) return;
    uint64_t each = it->beside == REFIT_BESIDE_MASTER ? 4 : 2;
    check_region(on, it->beside_region, on->expected[at].beside, each * it->elements);
}

/* Host and device have the parameters and states that plain arrays have. */
static void check_all(scene *on)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        const refit_host_parameter *it = &on->list[at];
        const void *bytes;
        uint64_t count;
        assert_ok(refit_host_step_parameter(on->step, at, &bytes, &count, &on->error));
        assert_int_equal(count, width(it->type) * it->elements);
        assert_memory_equal(bytes, on->expected[at].weights, count);
        assert_device_equal(on->inner, it->memory, on->expected[at].weights, count);
        check_states(on, at);
    }
}

/* ---- A step ---------------------------------------------------------------------------------- */

/* Chooses the parameters that have gradients, and the order in which they come. */
static void choose(scene *on, uint32_t most_in_ten)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        on->order[at] = at;
        on->named[at] = below(on, 10) < most_in_ten;
        fill_typed(on, on->given[at], on->list[at].gradient_type, on->list[at].elements);
    }
    for (uint32_t at = PARAMETERS; at > 1; at--) {
        uint32_t other = (uint32_t)below(on, at), kept = on->order[at - 1];
        on->order[at - 1] = on->order[other];
        on->order[other] = kept;
    }
}

/* Calls until it is well, as a caller does who has read the header: at most TRIES times. */
#define UNTIL_OK(on, call)                                                                         \
    do {                                                                                           \
        uint32_t tries = 0;                                                                        \
        while ((call) != REFIT_OK) {                                                               \
            assert_true((on)->error.text[0] != '\0');                                              \
            if (++tries == TRIES) fail_msg("%s: %s", #call, (on)->error.text);                     \
        }                                                                                          \
    } while (0)

/* Work on the stream makes the gradient, and it is named at once. */
static void name(scene *on, uint32_t at)
{
    const refit_host_parameter *it = &on->list[at];
    assert_ok(refit_stream_copy(on->inner, on->stream, on->gradients[at], on->given[at],
                                width(it->gradient_type) * it->elements, &on->error));
    uint64_t number = on->expected[at].number + 1;
    UNTIL_OK(on, refit_host_step_gradient(on->step, at, on->gradients[at], number, on->stream,
                                          &on->error));
}

static void begin_and_name(scene *on)
{
    UNTIL_OK(on, refit_host_step_begin(on->step, on->groups, GROUPS, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (on->named[on->order[at]]) name(on, on->order[at]);
    }
}

static void expect_all(scene *on)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (!on->named[at]) continue;
        on->expected[at].number++;
        expect_step(on, at);
    }
}

static void step_all(scene *on)
{
    begin_and_name(on);
    UNTIL_OK(on, refit_host_step_run(on->step, on->unscale, on->clip, on->stream, &on->error));
    expect_all(on);
}

static void wait_all(scene *on)
{
    UNTIL_OK(on, refit_host_step_wait(on->step, PATIENCE_MS, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        uint32_t all = REFIT_PARAMETER_NAMED | REFIT_PARAMETER_STEPPED | REFIT_PARAMETER_RETURNED;
        assert_int_equal(refit_host_step_progress(on->step, at), on->named[at] ? all : 0);
    }
}

static refit_stats stats_of(scene *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    return stats;
}

/* ---- What holds ------------------------------------------------------------------------------ */

static void the_bits_are_those_of_the_kernel(void **state)
{
    (void)state;
    static const char *const threads[] = {"1", "2", "3", "5"};
    static const char *const pieces[] = {"4KiB", "100000", "256KiB", "32MiB"};
    for (uint64_t seed = 0; seed < 24; seed++) {
        scene on;
        open_scene(&on, seed + 1, threads[seed % 4], pieces[seed / 4 % 4]);
        for (uint32_t step = 0; step < 4; step++) {
            choose(&on, step == 0 ? 10 : 7);
            set_groups(&on);
            on.unscale = step % 2 == 0 ? 1.0 : 1.0 / 1024;
            on.clip = step < 2 ? 1.0 : 0.37;
            step_all(&on);
            if (step % 2 == 0) wait_all(&on); /* else the next begin does */
            if (step % 2 == 0) check_all(&on);
        }
        wait_all(&on);
        check_all(&on);
        close_scene(&on);
    }
}

static void a_stream_that_joins_sees_new_parameters(void **state)
{
    (void)state;
    for (uint64_t seed = 50; seed < 54; seed++) {
        scene on;
        void *copies[PARAMETERS];
        open_scene(&on, seed, "2", "64KiB");
        choose(&on, 8);
        step_all(&on);
        if (seed % 2 == 0) {
            assert_ok(refit_host_step_join(on.step, REFIT_EACH_PARAMETER, on.stream, &on.error));
        }
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            uint64_t bytes = width(on.list[at].type) * on.list[at].elements;
            if (seed % 2 == 1) assert_ok(refit_host_step_join(on.step, at, on.stream, &on.error));
            copies[at] = test_host_alloc(on.inner, bytes);
            assert_ok(refit_stream_copy(on.inner, on.stream, copies[at], on.list[at].memory, bytes,
                                        &on.error));
        }
        assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            uint64_t bytes = width(on.list[at].type) * on.list[at].elements;
            assert_memory_equal(copies[at], on.expected[at].weights, bytes);
            test_host_free(on.inner, copies[at], bytes);
        }
        close_scene(&on);
    }
}

/* Of one block. */
static double squares(const void *gradient, int32_t type, uint64_t count)
{
    double sums[BLOCK / RFT_NORM_BLOCK];
    rft_norm_sum(
        &(rft_norm_span){
            .count = count, .gradient = gradient, .type = (rft_float_type)type, .scale = 1},
        sums);
    return rft_norm_total(sums, rft_norm_blocks(count));
}

/* The squares of the gradients that are named, in the order of the parameters. */
static double expected_squares(scene *on)
{
    double sum = 0;
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        const refit_host_parameter *it = &on->list[at];
        for (uint64_t from = 0; on->named[at] && from < it->elements; from += BLOCK) {
            uint64_t left = it->elements - from;
            sum += squares((char *)on->given[at] + from * width(it->gradient_type),
                           it->gradient_type, left < BLOCK ? left : BLOCK);
        }
    }
    return sum;
}

/* The same sum, whatever the threads and pieces. */
static double norm_of(uint64_t seed, const char *threads, const char *piece, bool at_once)
{
    scene on;
    double squared = -1, before = 0;
    int found_inf = -1;
    open_scene(&on, seed, threads, piece);
    choose(&on, 8);
    assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (on.named[on.order[at]]) name(&on, on.order[at]);
        if (!at_once) {
            assert_ok(refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
            assert_true(squared >= before);
            before = squared;
        }
    }
    assert_ok(refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
    assert_int_equal(found_inf, 0);
    double expected = expected_squares(&on);
    assert_memory_equal(&squared, &expected, sizeof squared);
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
    return squared;
}

static void the_norm_does_not_depend_on_threads(void **state)
{
    (void)state;
    for (uint64_t seed = 100; seed < 103; seed++) {
        double one = norm_of(seed, "1", "4KiB", true);
        double many = norm_of(seed, "4", "32MiB", false);
        assert_memory_equal(&one, &many, sizeof one);
    }
}

static void check_norm(scene *on)
{
    double squared = -1, expected = expected_squares(on);
    int found_inf = -1;
    UNTIL_OK(on, refit_host_step_norm(on->step, &squared, &found_inf, &on->error));
    assert_memory_equal(&squared, &expected, sizeof squared);
    assert_int_equal(found_inf, 0);
}

/* A gradient or a parameter may change in place while a former copy of it is under way, the bytes
 * of which are not used. ThreadSanitizer calls that a race: for it, copies end first. */
static void end_copies(scene *on)
{
#if defined(__SANITIZE_THREAD__)
    double squared;
    int found_inf;
    UNTIL_OK(on, refit_host_step_norm(on->step, &squared, &found_inf, &on->error));
#else
    (void)on;
#endif
}

/* Another gradient in the place of the former one, or elsewhere, made by work on the stream. */
static void name_anew(scene *on, uint32_t at, bool elsewhere)
{
    const refit_host_parameter *it = &on->list[at];
    uint64_t bytes = width(it->gradient_type) * it->elements;
    end_copies(on);
    /* What the stream copies stays as it is until the stream has come to it. */
    assert_ok(refit_stream_wait(on->inner, on->stream, PATIENCE_MS, &on->error));
    fill_typed(on, on->given[at], it->gradient_type, it->elements);
    if (elsewhere) {
        assert_ok(refit_memory_alloc(on->device, bytes, &on->gradients[at], &on->error));
    }
    name(on, at);
}

/* What is stepped and summed is what was named last; what was dropped is neither. Before and after
 * the gradients have landed and were summed; no gradient that was named goes before the step. */
static void a_gradient_is_replaced_and_dropped(void **state)
{
    (void)state;
    for (uint64_t seed = 120; seed < 126; seed++) {
        scene on;
        void *former[PARAMETERS];
        open_scene(&on, seed, seed % 2 == 0 ? "1" : "3", "64KiB");
        for (uint32_t round = 0; round < 6; round++) {
            choose(&on, 8);
            begin_and_name(&on);
            if (round % 3 > 0) check_norm(&on);
            for (uint32_t at = 0; at < PARAMETERS; at++) {
                former[at] = on.gradients[at];
                uint64_t what = below(&on, 5);
                if (what == 0) {
                    assert_ok(refit_host_step_drop(on.step, at, &on.error));
                    on.named[at] = false;
                    assert_int_equal(refit_host_step_progress(on.step, at), 0);
                } else if (what < 4) {
                    name_anew(&on, at, what == 3);
                    on.named[at] = true;
                    assert_int_equal(refit_host_step_progress(on.step, at), REFIT_PARAMETER_NAMED);
                }
                if (round == 5) assert_ok(refit_host_step_drop(on.step, at, &on.error));
                if (round == 5) on.named[at] = false;
            }
            if (round % 3 > 1) check_norm(&on);
            assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
            for (uint32_t at = 0; at < PARAMETERS; at++) {
                if (former[at] == on.gradients[at]) continue;
                assert_ok(refit_memory_free(on.device, former[at], &on.error));
            }
            expect_all(&on);
            wait_all(&on);
            check_all(&on);
        }
        close_scene(&on);
    }
}

static bool can_refresh(const scene *on, uint32_t at)
{
    return on->list[at].beside == REFIT_BESIDE_NONE;
}

/* Work on the stream changes a parameter, and it is refreshed behind that. */
static void change_and_refresh(scene *on, uint32_t at, void *given)
{
    const refit_host_parameter *it = &on->list[at];
    uint64_t bytes = width(it->type) * it->elements;
    end_copies(on);
    fill_typed(on, given, it->type, it->elements);
    memcpy(on->expected[at].weights, given, bytes);
    assert_ok(refit_stream_copy(on->inner, on->stream, it->memory, given, bytes, &on->error));
    UNTIL_OK(on, refit_host_step_refresh(on->step, at, on->stream, &on->error));
}

static void refresh_all(scene *on)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (!can_refresh(on, at)) continue;
        UNTIL_OK(on, refit_host_step_refresh(on->step, at, on->stream, &on->error));
    }
}

static void make_given_weights(scene *on, void **given)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        given[at] = test_host_alloc(on->inner, width(on->list[at].type) * on->list[at].elements);
    }
}

static void free_given_weights(scene *on, void **given)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        test_host_free(on->inner, given[at], width(on->list[at].type) * on->list[at].elements);
    }
}

/* A parameter that anything has changed is stepped from what it became, wherever the refresh
 * stands: before its gradient is named, behind that, and when the gradient has landed and was
 * summed. */
static void a_refreshed_parameter_is_stepped_from_the_device(void **state)
{
    (void)state;
    for (uint64_t seed = 140; seed < 146; seed++) {
        scene on;
        void *given[PARAMETERS];
        open_scene(&on, seed, seed % 2 == 0 ? "1" : "3", "64KiB");
        make_given_weights(&on, given);
        for (uint32_t round = 0; round < 6; round++) {
            choose(&on, 8);
            assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
            for (uint32_t i = 0; i < PARAMETERS; i++) {
                uint32_t at = on.order[i];
                bool first = can_refresh(&on, at) && below(&on, 3) == 0;
                if (first) change_and_refresh(&on, at, given[at]);
                if (on.named[at]) name(&on, at);
            }
            if (round % 2 == 0) check_norm(&on);
            for (uint32_t at = 0; at < PARAMETERS; at++) {
                if (round < 2 || !can_refresh(&on, at)) continue;
                assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
                change_and_refresh(&on, at, given[at]);
                if (below(&on, 4) != 0) continue;
                assert_ok(refit_host_step_drop(on.step, at, &on.error));
                on.named[at] = false;
            }
            if (round % 3 == 0) check_norm(&on);
            assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
            expect_all(&on);
            wait_all(&on);
            check_all(&on);
        }
        free_given_weights(&on, given);
        close_scene(&on);
    }
}

/* Chooses the parameters that can be refreshed; the last of these. */
static uint32_t choose_alone(scene *on)
{
    uint32_t last = PARAMETERS;
    choose(on, 10);
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        on->named[at] = can_refresh(on, at);
        if (on->named[at]) last = at;
    }
    assert_true(last > 0 && last < PARAMETERS);
    return last;
}

/* Without a load: what is refreshed in each step is stepped, what is not is refused, and what is
 * not named does not matter. Masters cannot be refreshed. */
static void a_refresh_stands_for_a_load(void **state)
{
    (void)state;
    scene on;
    const void *bytes;
    uint64_t count, in = 0;
    open_objects(&on, 150, "2", "64KiB");
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t last = choose_alone(&on);
        begin_and_name(&on);
        in = 0;
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            const refit_host_parameter *it = &on.list[at];
            if (on.named[at]) in += it->elements * (width(it->gradient_type) + width(it->type));
            if (at == last) continue;
            assert_int_equal(refit_host_step_refresh(on.step, at, on.stream, &on.error),
                             on.named[at] ? REFIT_OK : REFIT_ERR_UNSUPPORTED);
        }
        if (round == 0) {
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_STATE);
            assert_non_null(strstr(on.error.text, on.list[last].name));
            assert_int_equal(refit_host_step_parameter(on.step, last, &bytes, &count, &on.error),
                             REFIT_ERR_STATE);
            for (uint32_t at = 0; at < PARAMETERS; at++) {
                assert_int_equal(refit_host_step_progress(on.step, at),
                                 on.named[at] ? REFIT_PARAMETER_NAMED : 0);
            }
        }
        assert_ok(refit_host_step_refresh(on.step, last, on.stream, &on.error));
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        assert_int_equal(stats_of(&on).host_step_in_bytes_last, in); /* each came once */
    }
    /* Masters were never loaded. */
    choose(&on, 10);
    begin_and_name(&on);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_STATE);
    assert_ok(refit_host_step_skip(on.step, &on.error));
    assert_ok(refit_host_step_load(on.step, 1, on.stream, &on.error));
    check_all(&on);
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

static void a_number_that_is_not_finite_is_found(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (uint32_t at = 0; at < 3; at++) {
        scene on;
        double squared;
        int found_inf = 0;
        open_scene(&on, 7 + at, "2", "64KiB");
        choose(&on, 10);
        for (uint32_t it = 0; it < PARAMETERS; it++) {
            if (on.list[it].gradient_type != REFIT_NUMBER_FP32) continue;
            ((float *)on.given[it])[on.list[it].elements - 1] = bad[at];
            found_inf = 1;
        }
        int expected = found_inf;
        begin_and_name(&on);
        assert_ok(refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
        assert_int_equal(found_inf, expected);
        assert_int_equal(isfinite(squared), !expected);
        assert_ok(refit_host_step_skip(on.step, &on.error));
        check_all(&on);
        choose(&on, 10);
        step_all(&on);
        wait_all(&on);
        check_all(&on);
        close_scene(&on);
    }
}

/* Gradients may be changed once they were waited for, without a sum; a sum can follow. */
static void gradients_may_change_once_they_have_landed(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 2; round++) {
        scene on;
        double squared;
        int found_inf;
        open_scene(&on, 40 + round, "2", "64KiB");
        choose(&on, 10);
        begin_and_name(&on);
        UNTIL_OK(&on, refit_host_step_norm(on.step, NULL, NULL, &on.error));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            uint64_t bytes = width(on.list[at].gradient_type) * on.list[at].elements;
            assert_ok(refit_stream_copy(on.inner, on.stream, on.gradients[at],
                                        on.given[(at + 1) % PARAMETERS], bytes < 4 ? bytes : 4,
                                        &on.error));
        }
        assert_int_equal(refit_host_step_norm(on.step, &squared, NULL, &on.error),
                         REFIT_ERR_INVALID);
        if (round == 0) {
            UNTIL_OK(&on, refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
            double expected = expected_squares(&on);
            assert_memory_equal(&squared, &expected, sizeof squared);
        }
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
        close_scene(&on);
    }
}

/* A skipped step moves nothing back and changes nothing, whenever it is skipped. */
static void a_skipped_step_changes_nothing(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 3, "2", "64KiB");
    for (uint32_t round = 0; round < 6; round++) {
        choose(&on, round == 0 ? 0 : 8);
        begin_and_name(&on);
        assert_ok(refit_host_step_skip(on.step, &on.error));
        assert_ok(refit_host_step_skip(on.step, &on.error));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            assert_int_equal(refit_host_step_progress(on.step, at), 0);
        }
        check_all(&on);
        choose(&on, 5);
        step_all(&on);
        wait_all(&on);
        check_all(&on);
    }
    close_scene(&on);
}

static void a_step_without_gradients_changes_nothing(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 4, "2", "64KiB");
    choose(&on, 0);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    assert_int_equal(stats_of(&on).host_step_in_bytes_last, 0);
    assert_int_equal(stats_of(&on).host_step_count, 0);
    close_scene(&on);
}

/* Threads of the pool compute as the caller's thread does: its rounding shows in the bits. */
static void the_modes_are_those_of_the_caller(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 5, "4", "32MiB");
    choose(&on, 10);
    step_all(&on); /* the pool's threads have started */
    assert_int_equal(fesetround(FE_TOWARDZERO), 0);
    for (uint32_t step = 0; step < 3; step++) {
        choose(&on, 10);
        step_all(&on);
    }
    assert_int_equal(fesetround(FE_TONEAREST), 0);
    wait_all(&on);
    check_all(&on);
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

static void what_a_checkpoint_brings_is_stepped(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 6, "2", "64KiB");
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        refit_host_parameter *it = &on.list[at];
        plain *expected = &on.expected[at];
        void *image;
        uint64_t count;
        fill_typed(&on, expected->weights, it->type, it->elements);
        test_write(on.inner, it->memory, expected->weights, width(it->type) * it->elements);
        expected->number = 1 + below(&on, 100);
        for (uint32_t i = 0; i < it->state_count; i++) {
            fill_typed(&on, expected->states[i], REFIT_NUMBER_FP32, it->elements);
            for (uint64_t k = 0; k < it->elements; k++)
                expected->states[i][k] = fabsf(expected->states[i][k]);
            assert_ok(refit_host_step_region(on.step, it->states[i], &image, &count, &on.error));
            memcpy(image, expected->states[i], count);
        }
        if (it->beside == REFIT_BESIDE_NONE) continue;
        assert_ok(refit_host_step_region(on.step, it->beside_region, &image, &count, &on.error));
        for (uint64_t k = 0; k < count; k++) {
            ((unsigned char *)expected->beside)[k] = (unsigned char)below(&on, 64);
        }
        memcpy(image, expected->beside, count);
    }
    assert_ok(refit_host_step_load(on.step, 0, REFIT_STREAM_NONE, &on.error));
    check_all(&on);
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

static void figures_are_told(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 8, "2", "64KiB");
    uint64_t in = 0, out = 0;
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        in += width(on.list[at].gradient_type) * on.list[at].elements;
        out += width(on.list[at].type) * on.list[at].elements;
    }
    for (uint32_t step = 1; step <= 2; step++) {
        choose(&on, 10);
        step_all(&on);
        wait_all(&on);
        refit_stats stats = stats_of(&on);
        assert_int_equal(stats.host_step_count, step);
        assert_int_equal(stats.host_step_failures, 0);
        assert_int_equal(stats.host_step_in_bytes_last, in);
        assert_int_equal(stats.host_step_out_bytes_last, out);
        assert_true(stats.host_step_bytes >= in + out);
        assert_true(stats.host_step_seconds_last > 0);
        assert_true(stats.host_step_compute_seconds_last > 0);
        assert_true(stats.host_step_exposed_seconds_last >= 0);
        assert_int_equal(stats.step_count, 0); /* of windows */
        assert_true(stats.step_seconds_last == 0);
    }
    assert_ok(refit_host_step_close(on.step, &on.error));
    on.step = NULL;
    assert_int_equal(stats_of(&on).host_step_bytes, 0);
    close_scene(&on);
}

/* ---- What is refused ------------------------------------------------------------------------- */

static refit_status open_with(scene *on, uint32_t at, const refit_host_parameter *wrong)
{
    refit_host_parameter list[PARAMETERS];
    refit_host_step *step = NULL;
    memcpy(list, on->list, sizeof list);
    list[at] = *wrong;
    on->error.text[0] = '\0';
    refit_status status = refit_host_step_open(on->offloader, list, PARAMETERS, &step, &on->error);
    if (status == REFIT_OK) assert_ok(refit_host_step_close(step, &on->error));
    if (status != REFIT_OK) assert_true(on->error.text[0] != '\0');
    return status;
}

static void a_wrong_parameter_is_refused(void **state)
{
    (void)state;
    scene on;
    open_objects(&on, 9, "2", "64KiB");
    uint32_t at = 0; /* any with a state */
    refit_host_parameter wrong = on.list[at];
    assert_ok(open_with(&on, at, &wrong));
#define REFUSED(change, expected)                                                                  \
    do {                                                                                           \
        wrong = on.list[at];                                                                       \
        change;                                                                                    \
        assert_int_equal(open_with(&on, at, &wrong), (expected));                                  \
    } while (0)
    REFUSED(wrong.size = 8, REFIT_ERR_INVALID);
    REFUSED(wrong.size = sizeof wrong + 8, REFIT_ERR_INVALID);
    REFUSED(wrong.name = NULL, REFIT_ERR_INVALID);
    REFUSED(wrong.memory = NULL, REFIT_ERR_INVALID);
    REFUSED(wrong.memory = on.list[1].memory, REFIT_ERR_EXISTS);
    REFUSED(wrong.elements = 0, REFIT_ERR_INVALID);
    REFUSED(wrong.elements = UINT64_MAX, REFIT_ERR_LIMIT);
    REFUSED(wrong.elements++, REFIT_ERR_INVALID);
    REFUSED(wrong.type = 3, REFIT_ERR_INVALID);
    REFUSED(wrong.gradient_type = -1, REFIT_ERR_INVALID);
    REFUSED(wrong.group = UINT32_MAX, REFIT_ERR_LIMIT);
    REFUSED(wrong.beside = 3, REFIT_ERR_INVALID);
    REFUSED((wrong.type = REFIT_NUMBER_FP32, wrong.beside = REFIT_BESIDE_MASTER),
            REFIT_ERR_INVALID);
    REFUSED((wrong.type = REFIT_NUMBER_FP16, wrong.beside = REFIT_BESIDE_REMAINDER),
            REFIT_ERR_INVALID);
    REFUSED(wrong.state_count = 4, REFIT_ERR_INVALID);
    REFUSED(wrong.states[0] = 1000, REFIT_ERR_NOT_FOUND);
    REFUSED(wrong.states[0] = on.list[2].states[0], REFIT_ERR_INVALID);
    REFUSED((wrong.state_count = 2, wrong.states[1] = wrong.states[0]), REFIT_ERR_EXISTS);
#undef REFUSED
    refit_host_step *step;
    assert_int_equal(refit_host_step_open(on.offloader, on.list, 0, &step, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_host_step_open(NULL, on.list, 1, &step, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    close_scene(&on);
}

static void wrong_options_are_refused(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 10, "1", "64KiB");
    refit_optimizer_options groups[GROUPS];
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        memcpy(groups, on.groups, sizeof groups);                                                  \
        change;                                                                                    \
        assert_int_equal(refit_host_step_begin(on.step, groups, GROUPS, &on.error),                \
                         REFIT_ERR_INVALID);                                                       \
    } while (0)
    REFUSED(groups[1].size = 4);
    REFUSED(groups[0].optimizer = 4);
    REFUSED(groups[0].optimizer = -1);
    REFUSED(groups[4].lr = NAN);
    REFUSED(groups[4].lr = -1);
    REFUSED(groups[0].beta1 = 1);
    REFUSED(groups[0].beta2 = -0.1);
    REFUSED(groups[4].eps = INFINITY);
    REFUSED(groups[1].eps = -1);
    REFUSED(groups[1].lr_decay = NAN);
    REFUSED(groups[3].beta2 = 1);
    REFUSED(groups[2].dampening = NAN);
    REFUSED(groups[3].weight_decay = -1);
    REFUSED(groups[2].momentum = 0);
    REFUSED(groups[2].dampening = 0.5);
    REFUSED(for (uint32_t at = 0; at < GROUPS; at++) {
        groups[at].optimizer = REFIT_ADAM;
        groups[at].amsgrad = 1;
    });
#undef REFUSED
    assert_int_equal(refit_host_step_begin(on.step, on.groups, 0, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_host_step_begin(on.step, NULL, 1, &on.error), REFIT_ERR_INVALID);
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

static void calls_in_a_wrong_state_are_refused(void **state)
{
    (void)state;
    scene on;
    refit_host_step *second;
    double squared;
    int found_inf;
    const void *bytes;
    uint64_t count;
    open_objects(&on, 11, "2", "64KiB");
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    assert_int_equal(refit_host_step_open(on.offloader, on.list, PARAMETERS, &second, &on.error),
                     REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_BUSY);
    assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
    assert_ok(refit_host_step_gradient(on.step, 0, on.gradients[0], 1, on.stream, &on.error));
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                     REFIT_ERR_STATE); /* not loaded */
    assert_non_null(strstr(on.error.text, "refit_host_step_load"));
    assert_ok(refit_host_step_skip(on.step, &on.error));
    assert_int_equal(refit_host_step_parameter(on.step, 0, &bytes, &count, &on.error),
                     REFIT_ERR_STATE);
    assert_ok(refit_host_step_load(on.step, 1, REFIT_STREAM_NONE, &on.error));
    assert_int_equal(refit_host_step_gradient(on.step, 0, on.gradients[0], 1, on.stream, &on.error),
                     REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_drop(on.step, 0, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_refresh(on.step, 0, on.stream, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_norm(on.step, &squared, &found_inf, &on.error),
                     REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_STATE);
    assert_ok(refit_host_step_skip(on.step, &on.error));
    assert_ok(refit_host_step_wait(on.step, 0, &on.error));
    assert_ok(refit_host_step_join(on.step, REFIT_EACH_PARAMETER, on.stream, &on.error));
    choose(&on, 10);
    begin_and_name(&on);
    assert_int_equal(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_load(on.step, 1, on.stream, &on.error), REFIT_ERR_STATE);
    assert_int_equal(
        refit_host_step_gradient(on.step, PARAMETERS, on.gradients[0], 1, on.stream, &on.error),
        REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_host_step_drop(on.step, PARAMETERS, &on.error), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_host_step_refresh(on.step, PARAMETERS, on.stream, &on.error),
                     REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_host_step_join(on.step, 0, on.stream, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_run(on.step, NAN, 1, on.stream, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_host_step_run(on.step, 1, 1e300, on.stream, &on.error),
                     REFIT_ERR_INVALID);
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_join(on.step, 0, REFIT_STREAM_NONE, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_host_step_join(on.step, PARAMETERS, on.stream, &on.error),
                     REFIT_ERR_NOT_FOUND);
    wait_all(&on);
    check_all(&on);
    choose(&on, 0);
    begin_and_name(&on);
    assert_int_equal(refit_host_step_gradient(on.step, 0, on.gradients[0], 0, on.stream, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_host_step_gradient(on.step, 0, NULL, 1, on.stream, &on.error),
                     REFIT_ERR_INVALID);
    close_scene(&on);
}

/* What an optimizer does not know may be anything, and changes nothing. */
static void options_of_other_optimizers_are_not_read(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 115, "2", "64KiB");
    for (uint32_t at = 0; at < GROUPS; at++) {
        refit_optimizer_options *group = &on.groups[at];
        bool adam = group->optimizer == REFIT_ADAM, sgd = group->optimizer == REFIT_SGD;
        if (!adam && group->optimizer != REFIT_LION) group->beta1 = group->beta2 = NAN;
        if (!adam && group->optimizer != REFIT_ADAGRAD) group->eps = -1;
        if (group->optimizer != REFIT_ADAGRAD) group->lr_decay = INFINITY;
        if (!sgd) group->momentum = group->dampening = NAN;
        if (!sgd) group->nesterov = 1;
        if (!adam) group->amsgrad = group->decoupled = 1;
        if (sgd || group->optimizer == REFIT_LION) group->root = on.list;
    }
    refit_optimizer_options unknown[GROUPS];
    memcpy(unknown, on.groups, sizeof unknown);
    for (uint32_t step = 0; step < 2; step++) {
        choose(&on, 10);
        memcpy(on.groups, unknown, sizeof unknown);
        begin_and_name(&on);
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        for (uint32_t at = 0; at < GROUPS; at++) {
            refit_optimizer_options *group = &on.groups[at];
            if (!isfinite(group->beta1)) group->beta1 = group->beta2 = 0;
            if (group->eps < 0) group->eps = 0;
            if (!isfinite(group->lr_decay)) group->lr_decay = 0;
            if (!isfinite(group->momentum)) group->momentum = group->dampening = 0;
            if (group->optimizer != REFIT_SGD) group->nesterov = 0;
            if (group->optimizer != REFIT_ADAM) group->amsgrad = group->decoupled = 0;
        }
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
    }
    close_scene(&on);
}

/* As MKL_Set_Num_Threads_Local is. */
static _Thread_local int threads_of_root;
static atomic_bool root_has_a_team;

static int set_threads_of_root(int count)
{
    int former = threads_of_root;
    threads_of_root = count;
    return former;
}

/* As vmsSqrt is called; rounded to nearest. */
static void root_of_the_test(int count, const float *from, float *to, long long mode)
{
    (void)mode;
    if (threads_of_root != 1) atomic_store(&root_has_a_team, true);
    for (int i = 0; i < count; i++) {
        to[i] = sqrtf(from[i]);
    }
}

/* All threads call the root that is given, and have told it before that it has one thread. */
static void roots_of_the_process_are_taken(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 116, "4", "32MiB");
    rft_adam_root root = root_of_the_test;
    rft_adam_root_threads threads = set_threads_of_root;
    threads_of_root = 7;
    for (uint32_t step = 0; step < 3; step++) {
        choose(&on, 10);
        for (uint32_t at = 0; at < GROUPS; at++) {
            memcpy(&on.groups[at].root, &root, sizeof root);
            memcpy(&on.groups[at].root_threads, &threads, sizeof threads);
        }
        step_all(&on);
    }
    wait_all(&on);
    check_all(&on);
    assert_false(atomic_load(&root_has_a_team));
    assert_int_equal(threads_of_root, 7);
    close_scene(&on);
}

/* Windows step other regions of the same offloader; leases and restores stay out of a step. */
static void others_of_the_image_are_kept_apart(void **state)
{
    (void)state;
    scene on;
    refit_lease *lease;
    refit_window *window;
    void *bytes;
    uint64_t count;
    open_scene(&on, 12, "2", "64KiB");
    assert_ok(refit_window_open(on.offloader, &window, &on.error));
    refit_window_part part = {.size = sizeof part, .region = on.list[3].states[0], .bytes = 64};
    assert_int_equal(refit_window_begin(window, &part, 1, REFIT_STREAM_NONE, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_window_host(window, part.region, &bytes, &count, &on.error),
                     REFIT_ERR_INVALID);
    assert_ok(refit_window_close(window, &on.error));

    choose(&on, 10);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_int_equal(refit_host_step_load(on.step, 1, on.stream, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(
        refit_host_step_region(on.step, on.list[3].states[0], &bytes, &count, &on.error),
        REFIT_ERR_BUSY);
    begin_and_name(&on);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_BUSY);
    refit_lease_release(lease);
    faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY); /* a copy back */
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_COPY);
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_BUSY);
    assert_int_equal(
        refit_host_step_region(on.step, on.list[3].states[0], &bytes, &count, &on.error),
        REFIT_ERR_STATE);
    assert_int_equal(refit_host_step_run(on.step, 0.5, 1, on.stream, &on.error),
                     REFIT_ERR_INVALID); /* other factors */
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error)); /* the image is whole */
    refit_lease_release(lease);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

static void step_window(scene *on, refit_window *window)
{
    refit_window_part part = {.size = sizeof part, .region = on->other, .bytes = 4096};
    refit_window_view view = {.size = sizeof view};
    assert_ok(refit_window_begin(window, &part, 1, on->stream, &on->error));
    assert_ok(refit_window_next(window, &view, &on->error));
    test_fill(on->inner, view.memory[0], 0x5A, 4096);
    assert_ok(refit_window_done(window, REFIT_STREAM_NONE, &on->error));
    assert_ok(refit_window_end(window, &on->error));
}

static void windows_step_other_regions_meanwhile(void **state)
{
    (void)state;
    scene on;
    refit_window *window;
    void *bytes;
    uint64_t count;
    open_scene(&on, 13, "2", "64KiB");
    assert_ok(refit_window_open(on.offloader, &window, &on.error));
    assert_int_equal(refit_host_step_region(on.step, on.other, &bytes, &count, &on.error),
                     REFIT_ERR_NOT_FOUND);
    for (uint32_t round = 0; round < 3; round++) {
        choose(&on, 9);
        if (round == 0) step_window(&on, window);
        begin_and_name(&on);
        if (round == 1) step_window(&on, window);
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        if (round == 2) step_window(&on, window);
        expect_all(&on);
        wait_all(&on);
        assert_ok(refit_window_wait(window, PATIENCE_MS, &on.error));
        check_all(&on);
        assert_ok(refit_window_host(window, on.other, &bytes, &count, &on.error));
        for (uint64_t i = 0; i < count; i++) {
            assert_int_equal(((unsigned char *)bytes)[i], 0x5A);
        }
        memset(bytes, 0, count);
        assert_int_equal(stats_of(&on).step_count, round + 1);
        assert_int_equal(stats_of(&on).host_step_count, round + 1);
        assert_int_equal(stats_of(&on).step_out_bytes_last, count);
    }
    assert_ok(refit_window_close(window, &on.error));
    close_scene(&on);
}

static void bind_all(scene *on, void **memory)
{
    for (uint32_t at = 0; at < refit_offloader_count(on->offloader); at++) {
        refit_region_info info = {.size = sizeof info};
        assert_ok(refit_offloader_region(on->offloader, at, &info, &on->error));
        if (memory[at] == NULL)
            assert_ok(refit_memory_alloc(on->device, info.bytes, &memory[at], &on->error));
        assert_ok(refit_offloader_bind(on->offloader, at, memory[at], &on->error));
    }
}

static void restore_all(scene *on, void **memory)
{
    bind_all(on, memory);
    assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
    assert_ok(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error));
}

/* States that left the device with a digest are stepped, and return: no digest of before is held
 * against them. */
static void stepped_states_return_to_the_device(void **state)
{
    (void)state;
    scene on;
    void *memory[64] = {NULL};
    with_verify = true;
    open_scene(&on, 15, "2", "64KiB");
    with_verify = false;
    uint32_t count = refit_offloader_count(on.offloader);
    assert_true(count <= 64);
    restore_all(&on, memory);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    restore_all(&on, memory);
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        const refit_host_parameter *it = &on.list[at];
        for (uint32_t i = 0; i < it->state_count; i++) {
            assert_device_equal(on.inner, memory[it->states[i]], on.expected[at].states[i],
                                4 * it->elements);
        }
    }
    for (uint32_t at = 0; at < count; at++) {
        assert_ok(refit_memory_free(on.device, memory[at], &on.error));
    }
    close_scene(&on);
}

/* Memory of the image that a step alone has written does not show through in new regions. */
static void new_regions_begin_as_zeros(void **state)
{
    (void)state;
    scene on;
    void *memory[64] = {NULL};
    open_objects(&on, 16, "2", "64KiB");
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    assert_ok(refit_host_step_load(on.step, 0, on.stream, &on.error));
    choose(&on, 10);
    begin_and_name(&on);
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    wait_all(&on);
    assert_ok(refit_host_step_close(on.step, &on.error));
    on.step = NULL;
    uint32_t count = refit_offloader_count(on.offloader);
    restore_all(&on, memory);
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(refit_offloader_clear(on.offloader, &on.error));
    for (uint32_t at = 0; at < count; at++) {
        assert_ok(refit_memory_free(on.device, memory[at], &on.error));
    }
    refit_region_id id = add_region(&on, "new", 100000);
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    refit_lease *lease;
    const void *bytes;
    uint64_t read;
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_ok(refit_lease_read(lease, id, &bytes, &read, &on.error));
    for (uint64_t i = 0; i < read; i++) {
        assert_int_equal(((const unsigned char *)bytes)[i], 0);
    }
    refit_lease_release(lease);
    close_scene(&on);
}

/* Regions that were removed and added again are others: the host step says so. */
static void regions_that_were_removed_are_missed(void **state)
{
    (void)state;
    scene on;
    void *memory[64] = {NULL};
    open_scene(&on, 14, "2", "64KiB");
    uint32_t count = refit_offloader_count(on.offloader);
    restore_all(&on, memory);
    assert_int_equal(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error), REFIT_ERR_STATE);
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(refit_offloader_clear(on.offloader, &on.error));
    for (uint32_t at = 0; at < count; at++) {
        assert_ok(refit_memory_free(on.device, memory[at], &on.error));
    }
    (void)add_region(&on, "new", 4096);
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_int_equal(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error), REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "removed"));
    close_scene(&on);
}

/* The offloader anew, with one setting more, and regions for the same parameters. */
static void reopen_with(scene *on, const char *key, const char *value)
{
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    set(on, key, value);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        char name[32];
        for (uint32_t i = 0; i < on->list[at].state_count; i++) {
            snprintf(name, sizeof name, "s.%u.%u", at, i);
            on->list[at].states[i] = add_region(on, name, 4 * sizes[at]);
        }
        uint64_t each = on->list[at].beside == REFIT_BESIDE_MASTER ? 4 : 2;
        snprintf(name, sizeof name, "b.%u", at);
        if (on->list[at].beside != REFIT_BESIDE_NONE)
            on->list[at].beside_region = add_region(on, name, each * sizes[at]);
    }
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
}

/* ---- What fails ------------------------------------------------------------------------------ */

/* A gradient whose copy breaks leaves its parameter as it was; the others are stepped. */
static void a_broken_gradient_is_copied_again(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= PARAMETERS; nth++) {
        scene on;
        open_scene(&on, 20 + nth, "2", "32MiB");
        choose(&on, 10);
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        begin_and_name(&on);
        assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_COPY);
        uint32_t stepped = 0;
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            uint32_t flags = refit_host_step_progress(on.step, at);
            const void *bytes;
            uint64_t count;
            assert_true((flags & REFIT_PARAMETER_NAMED) != 0);
            if ((flags & REFIT_PARAMETER_STEPPED) != 0) {
                stepped++;
                continue;
            }
            assert_ok(refit_host_step_parameter(on.step, at, &bytes, &count, &on.error));
            assert_memory_equal(bytes, on.expected[at].weights, count);
            assert_device_equal(on.inner, on.list[at].memory, on.expected[at].weights, count);
        }
        assert_int_equal(stepped, PARAMETERS - 1);
        assert_true(stats_of(&on).host_step_failures > 0);
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
        close_scene(&on);
    }
}

/* The work that makes a gradient fails, or that which run is to follow: the first leaves the
 * parameter as it was, the second is told by wait. */
static void work_of_the_caller_that_fails_is_told(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 31, "2", "64KiB");
    choose(&on, 0);
    on.named[3] = on.named[5] = true;
    begin_and_name(&on);
    on.named[6] = true;
    uint64_t bytes = width(on.list[6].gradient_type) * on.list[6].elements;
    assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(
        refit_stream_copy(on.device, on.stream, on.gradients[6], on.given[6], bytes, &on.error));
    assert_ok(refit_host_step_gradient(on.step, 6, on.gradients[6], 1, on.stream, &on.error));
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_COPY);
    assert_int_equal(refit_host_step_progress(on.step, 6), REFIT_PARAMETER_NAMED);
    assert_true((refit_host_step_progress(on.step, 3) & REFIT_PARAMETER_STEPPED) != 0);
    test_write(on.inner, on.gradients[6], on.given[6], bytes);
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    wait_all(&on);
    check_all(&on);

    choose(&on, 10);
    begin_and_name(&on);
    void *other;
    assert_ok(refit_memory_alloc(on.device, 64, &other, &on.error));
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(refit_stream_copy(on.device, on.stream, other, on.given[5], 64, &on.error));
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    assert_int_equal(refit_host_step_wait(on.step, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    wait_all(&on);
    check_all(&on);
    assert_ok(refit_memory_free(on.device, other, &on.error));
    close_scene(&on);
}

/* Work of the caller's on its stream, which breaks with `status`. */
static void break_work(scene *on, void *memory, uint64_t bytes, refit_status status)
{
    faulty_device_fail_later(on->device, FAULTY_COPY_BATCH, 1, status);
    assert_ok(refit_stream_copy(on->device, on->stream, memory, on->given[5], bytes, &on->error));
}

/* As break_work, and it has ended. */
static void break_work_now(scene *on, void *memory, uint64_t bytes, refit_status status)
{
    break_work(on, memory, bytes, status);
    assert_ok(refit_stream_wait(on->inner, on->stream, PATIENCE_MS, &on->error));
}

static double seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Nothing returns, so nothing but the wait itself stands behind the work that run is to follow. */
static void work_behind_which_nothing_returns_is_waited_for(void **state)
{
    (void)state;
    scene on;
    void *other;
    open_scene(&on, 110, "2", "64KiB");
    assert_ok(refit_memory_alloc(on.device, 64, &other, &on.error));
    for (int breaks = 0; breaks < 2; breaks++) {
        choose(&on, 0);
        begin_and_name(&on);
        faulty_device_stop(on.device);
        if (breaks) faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        assert_ok(refit_stream_copy(on.device, on.stream, other, on.given[5], 64, &on.error));
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        assert_int_equal(refit_host_step_wait(on.step, 0, &on.error), REFIT_ERR_TIMEOUT);
        double began = seconds();
        assert_int_equal(refit_host_step_wait(on.step, 50, &on.error), REFIT_ERR_TIMEOUT);
        assert_true(seconds() - began >= 0.049);
        assert_int_equal(stats_of(&on).host_step_failures, 0);
        faulty_device_go(on.device);
        if (breaks) {
            assert_int_equal(refit_host_step_wait(on.step, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
        }
        assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
        assert_ok(refit_host_step_skip(on.step, &on.error));
        check_all(&on);
    }
    assert_ok(refit_memory_free(on.device, other, &on.error));
    close_scene(&on);
}

/* Work and the copy behind it fail: the work is what is told, for its gradient has to be made
 * again. If the copy could not be put behind it, the second naming tells of it. */
static void work_that_fails_is_told_before_its_copy(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 111, "2", "64KiB");
    uint64_t bytes = width(on.list[5].gradient_type) * on.list[5].elements;
    for (int named_twice = 0; named_twice < 2; named_twice++) {
        choose(&on, 0);
        on.named[3] = true;
        begin_and_name(&on);
        on.named[5] = true;
        uint64_t number = on.expected[5].number + 1;
        assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
        break_work_now(&on, on.gradients[5], bytes, REFIT_ERR_COPY);
        if (named_twice) {
            faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
            assert_int_equal(
                refit_host_step_gradient(on.step, 5, on.gradients[5], number, on.stream, &on.error),
                REFIT_ERR_DEVICE);
            /* An event that is reached has the failure; before, the stream has it. */
            assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
            assert_int_equal(
                refit_host_step_gradient(on.step, 5, on.gradients[5], number, on.stream, &on.error),
                REFIT_ERR_COPY);
            assert_int_equal(refit_host_step_progress(on.step, 5), 0);
            test_write(on.inner, on.gradients[5], on.given[5], bytes);
        } else {
            faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
        }
        assert_ok(
            refit_host_step_gradient(on.step, 5, on.gradients[5], number, on.stream, &on.error));
        if (!named_twice) {
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_COPY);
            assert_int_equal(refit_host_step_progress(on.step, 5), REFIT_PARAMETER_NAMED);
            test_write(on.inner, on.gradients[5], on.given[5], bytes);
        }
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
    }
    close_scene(&on);
}

/* Gradients are dropped, and a step counts for none; that work has failed is told all the same. */
static void a_skip_tells_of_work_that_failed(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 112, "2", "64KiB");
    uint64_t bytes = width(on.list[5].gradient_type) * on.list[5].elements;
    for (int unnamed = 0; unnamed < 2; unnamed++) {
        choose(&on, 0);
        on.named[3] = true;
        begin_and_name(&on);
        break_work_now(&on, on.gradients[5], bytes, REFIT_ERR_COPY);
        if (unnamed) faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
        assert_int_equal(
            refit_host_step_gradient(on.step, 5, on.gradients[5], 1, on.stream, &on.error),
            unnamed ? REFIT_ERR_DEVICE : REFIT_OK);
        assert_int_equal(refit_host_step_skip(on.step, &on.error), REFIT_ERR_COPY);
        assert_ok(refit_host_step_skip(on.step, &on.error));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            assert_int_equal(refit_host_step_progress(on.step, at), 0);
        }
        assert_ok(refit_host_step_wait(on.step, 0, &on.error));
        check_all(&on);
    }
    /* What run was to follow has failed, and nothing was stepped. */
    choose(&on, 0);
    on.named[3] = true;
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
    begin_and_name(&on);
    break_work_now(&on, on.gradients[5], bytes, REFIT_ERR_COPY);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_DEVICE);
    assert_ok(refit_host_step_skip(on.step, &on.error));
    assert_int_equal(refit_host_step_wait(on.step, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    assert_ok(refit_host_step_wait(on.step, PATIENCE_MS, &on.error));
    assert_int_equal(stats_of(&on).host_step_count, 0);
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    assert_int_equal(stats_of(&on).host_step_count, 1);
    close_scene(&on);
}

/* A run and a load that fail twice over tell of the caller's work first. */
static void work_that_fails_is_not_lost_by_other_failures(void **state)
{
    (void)state;
    scene on;
    void *other;
    open_scene(&on, 113, "2", "64KiB");
    assert_ok(refit_memory_alloc(on.device, 64, &other, &on.error));
    choose(&on, 10);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 4, REFIT_ERR_DEVICE);
    begin_and_name(&on);
    break_work_now(&on, other, 64, REFIT_ERR_COPY);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_DEVICE);
    assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
    faulty_device_fail(on.device, FAULTY_EVENT_RECORD, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_COPY);
    UNTIL_OK(&on, refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    wait_all(&on);
    check_all(&on);
    for (int later = 0; later < 2; later++) {
        break_work_now(&on, other, 64, REFIT_ERR_COPY);
        if (later) {
            faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
        } else {
            faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
        }
        assert_int_equal(refit_host_step_load(on.step, 0, on.stream, &on.error), REFIT_ERR_COPY);
        assert_ok(refit_host_step_load(on.step, 0, on.stream, &on.error));
        check_all(&on);
    }
    assert_ok(refit_memory_free(on.device, other, &on.error));
    close_scene(&on);
}

/* The figure ends with the last byte, not with the first try to bring it. */
static void copies_that_are_sent_again_count_as_time(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 114, "2", "64KiB");
    choose(&on, 10);
    begin_and_name(&on);
    double squared;
    int found_inf;
    assert_ok(refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
    double began = seconds();
    assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    assert_int_equal(refit_host_step_wait(on.step, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    (void)nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
    wait_all(&on);
    assert_true(stats_of(&on).host_step_seconds_last >= 0.05);
    assert_true(stats_of(&on).host_step_seconds_last <= seconds() - began);
    check_all(&on);
    close_scene(&on);
}

/* The former copy breaks, or the work that made what it reads: neither is held against the gradient
 * that is named in its place. If the new one cannot be named, the former is not stepped either. */
static void a_gradient_that_failed_is_replaced(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 130, "2", "64KiB");
    uint64_t bytes = width(on.list[5].gradient_type) * on.list[5].elements;
    for (uint32_t round = 0; round < 6; round++) {
        choose(&on, 0);
        on.named[3] = true;
        begin_and_name(&on);
        on.named[5] = true;
        assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
        if (round == 1) break_work_now(&on, on.gradients[5], bytes, REFIT_ERR_COPY);
        if (round == 0) {
            faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
        }
        name(&on, 5);
        if (round == 1) { /* once its work is over, the second naming tells of it */
            assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
        }
        if (round == 2 || round == 3) {
            faulty_device_fail(on.device, round == 2 ? FAULTY_COPY_BATCH : FAULTY_EVENT_RECORD, 1,
                               REFIT_ERR_DEVICE);
            assert_int_equal(refit_host_step_gradient(on.step, 5, on.gradients[5],
                                                      on.expected[5].number + 1, on.stream,
                                                      &on.error),
                             REFIT_ERR_DEVICE);
            assert_int_equal(refit_host_step_progress(on.step, 5), 0);
            if (round == 2) on.named[5] = false;
        }
        if (round == 4 || round == 5) { /* work that fails, of a gradient that is dropped */
            end_copies(&on);
            break_work_now(&on, on.gradients[5], bytes, REFIT_ERR_COPY);
            assert_ok(refit_host_step_gradient(on.step, 5, on.gradients[5],
                                               on.expected[5].number + 1, on.stream, &on.error));
            assert_ok(refit_host_step_drop(on.step, 5, &on.error));
            on.named[5] = false;
        }
        if (round != 2 && round < 4) name_anew(&on, 5, false);
        if (round < 4) check_norm(&on);
        if (round >= 4) {
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_COPY);
        }
        UNTIL_OK(&on, refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
    }
    close_scene(&on);
}

/* A gradient that was dropped, or replaced by one elsewhere, is read until norm or run is OK. */
static void a_dropped_gradient_is_waited_for(void **state)
{
    (void)state;
    scene on;
    open_objects(&on, 131, "2", "64KiB");
    reopen_with(&on, "offload.timeout_ms", "50ms");
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    assert_ok(refit_host_step_load(on.step, 1, on.stream, &on.error));
    for (uint32_t round = 0; round < 2; round++) {
        double squared;
        int found_inf;
        choose(&on, 0);
        on.named[6] = true;
        assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
        faulty_device_stop(on.device);
        name(&on, 6);
        assert_ok(refit_host_step_drop(on.step, 6, &on.error));
        assert_int_equal(refit_host_step_norm(on.step, &squared, &found_inf, &on.error),
                         REFIT_ERR_TIMEOUT);
        if (round == 1) {
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_TIMEOUT);
        }
        faulty_device_go(on.device);
        on.named[6] = false;
        if (round == 0) check_norm(&on);
        UNTIL_OK(&on, refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        wait_all(&on);
        check_all(&on);
    }
    close_scene(&on);
}

/* The copy of a parameter breaks, cannot be started, or the work before it fails: the parameter is
 * not stepped before it has come. */
static void a_refresh_that_fails_is_repeated(void **state)
{
    (void)state;
    scene on;
    void *given[PARAMETERS];
    open_scene(&on, 151, "2", "32MiB");
    make_given_weights(&on, given);
    for (uint32_t round = 0; round < 5; round++) {
        uint32_t at = choose_alone(&on);
        uint64_t bytes = width(on.list[at].type) * on.list[at].elements;
        begin_and_name(&on);
        if (round % 2 == 0) check_norm(&on);
        assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
        if (round == 0) faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        if (round < 3) change_and_refresh(&on, at, given[at]);
        if (round == 1) { /* again, over one that is under way */
            assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
            faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
            change_and_refresh(&on, at, given[at]);
        }
        if (round == 2) {
            faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_DEVICE);
            assert_int_equal(refit_host_step_refresh(on.step, at, on.stream, &on.error),
                             REFIT_ERR_DEVICE);
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_STATE); /* what it became has not come */
            assert_ok(refit_host_step_refresh(on.step, at, on.stream, &on.error));
        }
        if (round == 3) {
            break_work_now(&on, on.list[at].memory, bytes, REFIT_ERR_COPY);
            assert_ok(refit_host_step_refresh(on.step, at, on.stream, &on.error));
        }
        if (round != 2 && round != 4) {
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_COPY);
            for (uint32_t it = 0; it < PARAMETERS; it++) {
                bool stepped =
                    (refit_host_step_progress(on.step, it) & REFIT_PARAMETER_STEPPED) != 0;
                assert_int_equal(stepped, on.named[it] && it != at);
            }
        }
        if (round == 3) test_write(on.inner, on.list[at].memory, on.expected[at].weights, bytes);
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
    }
    free_given_weights(&on, given);
    close_scene(&on);
}

/* A skip gives up what has not come. A parameter that has come is stepped by the next step; one
 * that came in part is refused until it is refreshed again. */
static void a_skip_keeps_no_torn_parameter(void **state)
{
    (void)state;
    scene on;
    void *given[PARAMETERS];
    const void *host;
    uint64_t count;
    open_scene(&on, 152, "2", "32MiB");
    make_given_weights(&on, given);
    for (uint32_t round = 0; round < 4; round++) {
        bool torn = round % 2 == 1, seen = round >= 2;
        uint32_t at = choose_alone(&on);
        assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
        if (torn) faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        change_and_refresh(&on, at, given[at]);
        if (seen) {
            double squared;
            int found_inf;
            assert_int_equal(refit_host_step_norm(on.step, &squared, &found_inf, &on.error),
                             torn ? REFIT_ERR_COPY : REFIT_OK);
        }
        assert_ok(refit_host_step_skip(on.step, &on.error));
        assert_int_equal(refit_host_step_parameter(on.step, at, &host, &count, &on.error),
                         torn ? REFIT_ERR_STATE : REFIT_OK);
        assert_ok(refit_stream_wait(on.inner, on.stream, PATIENCE_MS, &on.error));
        begin_and_name(&on);
        if (torn) {
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_STATE);
            if (seen) {
                assert_ok(refit_host_step_skip(on.step, &on.error));
                assert_ok(refit_host_step_load(on.step, 0, on.stream, &on.error));
                begin_and_name(&on);
            } else {
                assert_ok(refit_host_step_refresh(on.step, at, on.stream, &on.error));
            }
        }
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        wait_all(&on);
        check_all(&on);
    }
    free_given_weights(&on, given);
    close_scene(&on);
}

/* What could not be stepped is given up; what was stepped returns. */
static void the_rest_of_a_step_can_be_skipped(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, 30, "2", "32MiB");
    choose(&on, 10);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 4, REFIT_ERR_COPY);
    begin_and_name(&on);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_COPY);
    assert_ok(refit_host_step_skip(on.step, &on.error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        on.named[at] = (refit_host_step_progress(on.step, at) & REFIT_PARAMETER_STEPPED) != 0;
    }
    expect_all(&on);
    wait_all(&on);
    check_all(&on);
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

/* A torn copy back is told by wait, and sent again. */
static void a_broken_copy_back_is_sent_again(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= 4; nth++) {
        scene on;
        double squared;
        int found_inf;
        open_scene(&on, 40 + nth, "2", "64KiB");
        choose(&on, 10);
        begin_and_name(&on);
        assert_ok(refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        expect_all(&on);
        assert_int_equal(refit_host_step_wait(on.step, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
        uint32_t lost = 0;
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            uint32_t flags = refit_host_step_progress(on.step, at);
            assert_true((flags & REFIT_PARAMETER_STEPPED) != 0);
            if ((flags & REFIT_PARAMETER_RETURNED) != 0) continue;
            lost++;
            assert_int_equal(refit_host_step_join(on.step, at, on.stream, &on.error),
                             REFIT_ERR_COPY);
        }
        assert_int_equal(lost, 1);
        assert_int_equal(refit_host_step_join(on.step, REFIT_EACH_PARAMETER, on.stream, &on.error),
                         REFIT_ERR_COPY);
        if (nth % 2 == 0) wait_all(&on);
        if (nth % 2 == 0) check_all(&on);
        choose(&on, 10); /* begin sends it again, too */
        step_all(&on);
        wait_all(&on);
        check_all(&on);
        close_scene(&on);
    }
}

/* Each call of each slot fails once, at once or when the stream comes to it: called again, the step
 * has the same bits. */
static bool fail_nth(faulty_slot slot, uint32_t nth, bool later)
{
    scene on;
    double squared;
    int found_inf;
    open_scene(&on, 60 + nth, "2", "64KiB");
    faulty_device_reset(on.device);
    if (later) {
        faulty_device_fail_later(on.device, slot, nth, REFIT_ERR_COPY);
    } else {
        faulty_device_fail(on.device, slot, nth, REFIT_ERR_DEVICE);
    }
    choose(&on, 9);
    begin_and_name(&on);
    refresh_all(&on);
    if (nth % 2 == 0) {
        UNTIL_OK(&on, refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
    }
    UNTIL_OK(&on, refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    wait_all(&on);
    bool came = faulty_device_calls(on.device, slot) >= nth;
    faulty_device_reset(on.device);
    check_all(&on);
    choose(&on, 9);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
    return came;
}

static void each_call_of_the_device_may_fail(void **state)
{
    (void)state;
    static const faulty_slot slots[] = {FAULTY_COPY_BATCH, FAULTY_EVENT_RECORD, FAULTY_EVENT_JOIN,
                                        FAULTY_EVENT_WAIT, FAULTY_STREAM_CALL};
    for (size_t at = 0; at < sizeof slots / sizeof slots[0]; at++) {
        uint32_t nth = 1;
        while (nth < 60 && fail_nth(slots[at], nth, false)) {
            nth++;
        }
        assert_true(nth > 1);
    }
    uint32_t nth = 1;
    while (fail_nth(FAULTY_COPY_BATCH, nth, true)) {
        nth++;
    }
    assert_true(nth > PARAMETERS);
}

static void a_load_that_fails_is_repeated(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= 8; nth++) {
        scene on;
        open_objects(&on, 70 + nth, "2", "64KiB");
        assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        assert_int_equal(refit_host_step_load(on.step, 1, on.stream, &on.error), REFIT_ERR_COPY);
        choose(&on, 10);
        begin_and_name(&on);
        assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_STATE);
        assert_ok(refit_host_step_skip(on.step, &on.error));
        assert_ok(refit_host_step_load(on.step, 1, on.stream, &on.error));
        check_all(&on);
        close_scene(&on);
    }
}

static void each_part_of_an_open_may_fail(void **state)
{
    (void)state;
    static const faulty_slot slots[] = {FAULTY_EVENT_OPEN, FAULTY_STREAM_OPEN, FAULTY_HOST_PIN};
    scene on;
    open_objects(&on, 80, "2", "64KiB");
    for (size_t at = 0; at < sizeof slots / sizeof slots[0]; at++) {
        for (uint32_t nth = 1;; nth++) {
            refit_host_step *step = NULL;
            faulty_device_reset(on.device);
            faulty_device_fail(on.device, slots[at], nth, REFIT_ERR_DEVICE);
            refit_status status =
                refit_host_step_open(on.offloader, on.list, PARAMETERS, &step, &on.error);
            bool came = faulty_device_calls(on.device, slots[at]) >= nth;
            faulty_device_reset(on.device);
            if (status == REFIT_OK) assert_ok(refit_host_step_close(step, &on.error));
            if (!came) break;
            if (slots[at] != FAULTY_HOST_PIN) assert_int_equal(status, REFIT_ERR_DEVICE);
        }
    }
    /* The second stream does not open, and the first does not close at once: the device can close.
     */
    refit_host_step *step = NULL;
    faulty_device_reset(on.device);
    faulty_device_fail(on.device, FAULTY_STREAM_OPEN, 2, REFIT_ERR_DEVICE);
    faulty_device_fail_times(on.device, FAULTY_STREAM_CLOSE, 1, 2, REFIT_ERR_DEVICE);
    assert_int_equal(refit_host_step_open(on.offloader, on.list, PARAMETERS, &step, &on.error),
                     REFIT_ERR_DEVICE);
    assert_int_equal(faulty_device_calls(on.device, FAULTY_STREAM_CLOSE), 3);
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    assert_ok(refit_host_step_load(on.step, 1, on.stream, &on.error));
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

static void each_allocation_may_fail(void **state)
{
    (void)state;
    scene on;
    failing_alloc_begin(0);
    open_objects(&on, 90, "2", "64KiB");
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        refit_host_step *step = NULL;
        failing_alloc_here(nth);
        refit_status status =
            refit_host_step_open(on.offloader, on.list, PARAMETERS, &step, &on.error);
        came = failing_alloc_stop_here();
        if (came && status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        if (!came) assert_ok(status);
        assert_ok(refit_host_step_close(step, &on.error));
    }
    close_scene(&on);
    assert_false(failing_alloc_end());
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    scene on;
    double squared;
    int found_inf;
    failing_alloc_begin(0);
    open_scene(&on, 91, "3", "64KiB");
    choose(&on, 10);
    step_all(&on);
    wait_all(&on);
    for (int step = 0; step < 3; step++) {
        choose(&on, 10);
        failing_alloc_here(1);
        begin_and_name(&on);
        refresh_all(&on);
        assert_ok(refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
        assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        assert_ok(refit_host_step_wait(on.step, PATIENCE_MS, &on.error));
        assert_false(failing_alloc_stop_here());
        expect_all(&on);
        check_all(&on);
    }
    close_scene(&on);
    assert_false(failing_alloc_end());
}

/* Each alone is below the budget; it is for both. */
static void image_and_step_share_a_budget(void **state)
{
    (void)state;
    scene on;
    char budget[32];
    open_objects(&on, 117, "2", "64KiB");
    reopen_with(&on, "offload.budget_bytes", "64MiB");
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    uint64_t bytes = stats_of(&on).host_bytes + stats_of(&on).host_step_bytes;
    assert_true(stats_of(&on).host_bytes > 1 && stats_of(&on).host_step_bytes > 1);
    assert_ok(refit_host_step_close(on.step, &on.error));
    snprintf(budget, sizeof budget, "%llu", (unsigned long long)(bytes - 1));
    reopen_with(&on, "offload.budget_bytes", budget);
    assert_int_equal(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error),
                     REFIT_ERR_BUDGET);
    assert_non_null(strstr(on.error.text, "offload.budget_bytes"));
    on.step = NULL;
    snprintf(budget, sizeof budget, "%llu", (unsigned long long)bytes);
    reopen_with(&on, "offload.budget_bytes", budget);
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    close_scene(&on);
}

/* Copies that stand are waited for no longer than was said, and close is refused until they end. */
static void copies_that_stand_are_a_timeout(void **state)
{
    (void)state;
    scene on;
    double squared;
    int found_inf;
    open_objects(&on, 92, "2", "64KiB");
    /* The device waits for streams by its own configuration; this one for gradients. */
    reopen_with(&on, "offload.timeout_ms", "50ms");
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    assert_ok(refit_host_step_load(on.step, 1, on.stream, &on.error));
    assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
    faulty_device_stop(on.device);
    /* A gradient that could not be named may still be read. */
    faulty_device_fail(on.device, FAULTY_EVENT_RECORD, 1, REFIT_ERR_DEVICE);
    assert_int_equal(
        refit_host_step_gradient(on.step, 6, on.gradients[6], 1, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_DEVICE);
    assert_int_equal(refit_host_step_progress(on.step, 6), 0);
    assert_int_equal(refit_host_step_norm(on.step, &squared, &found_inf, &on.error),
                     REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    UNTIL_OK(&on, refit_host_step_norm(on.step, &squared, &found_inf, &on.error));
    assert_true(squared == 0);
    assert_ok(refit_host_step_skip(on.step, &on.error));
    choose(&on, 10);
    faulty_device_stop(on.device);
    begin_and_name(&on);
    assert_int_equal(refit_host_step_norm(on.step, &squared, &found_inf, &on.error),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_TIMEOUT);
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        assert_int_equal(refit_host_step_progress(on.step, at), REFIT_PARAMETER_NAMED);
    }
    assert_int_equal(refit_host_step_skip(on.step, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    UNTIL_OK(&on, refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
    expect_all(&on);
    wait_all(&on);
    check_all(&on);
    close_scene(&on);
}

/* A close that fails half-way leaves no step that copies on the calling thread. */
static void a_close_that_fails_is_repeated(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= 2; nth++) {
        scene on;
        double squared;
        int found_inf;
        open_scene(&on, 118, "2", "64KiB");
        choose(&on, 0);
        begin_and_name(&on);
        faulty_device_fail(on.device, FAULTY_STREAM_CLOSE, nth, REFIT_ERR_DEVICE);
        assert_int_equal(refit_host_step_close(on.step, &on.error), REFIT_ERR_DEVICE);
        assert_int_equal(
            refit_host_step_gradient(on.step, 3, on.gradients[3], 1, on.stream, &on.error),
            REFIT_ERR_STATE);
        assert_non_null(strstr(on.error.text, "refit_host_step_close"));
        assert_int_equal(refit_host_step_norm(on.step, &squared, &found_inf, &on.error),
                         REFIT_ERR_STATE);
        assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error), REFIT_ERR_STATE);
        assert_int_equal(refit_host_step_wait(on.step, 0, &on.error), REFIT_ERR_STATE);
        assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_BUSY);
        close_scene(&on);
    }
}

static uint32_t threads_of_steps(void)
{
    uint32_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *it = readdir(tasks); it != NULL; it = readdir(tasks)) {
        char path[300], name[16] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", it->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL) continue;
        count += fgets(name, sizeof name, file) != NULL && strcmp(name, "refit-step\n") == 0;
        fclose(file);
    }
    closedir(tasks);
    return count;
}

/* Their stacks are memory, which a step does not take. */
static void threads_start_with_open(void **state)
{
    (void)state;
    scene on;
    open_objects(&on, 119, "4", "64KiB");
    assert_int_equal(threads_of_steps(), 0);
    assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
    assert_int_equal(threads_of_steps(), 3);
    close_scene(&on);
    assert_int_equal(threads_of_steps(), 0);
}

/* In each state; copies under way are waited for, and nothing is leaked. */
static void it_closes_in_any_state(void **state)
{
    (void)state;
    for (uint32_t at = 0; at < 7; at++) {
        scene on;
        open_objects(&on, 95 + at, "2", "64KiB");
        assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
        choose(&on, 10);
        if (at > 0) assert_ok(refit_host_step_load(on.step, 1, on.stream, &on.error));
        if (at == 1) assert_ok(refit_host_step_begin(on.step, on.groups, GROUPS, &on.error));
        if (at > 1) begin_and_name(&on);
        if (at == 3) {
            faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
            assert_int_equal(refit_host_step_run(on.step, 1, 1, on.stream, &on.error),
                             REFIT_ERR_COPY);
        }
        if (at > 3) assert_ok(refit_host_step_run(on.step, 1, 1, on.stream, &on.error));
        if (at == 5) assert_ok(refit_host_step_wait(on.step, PATIENCE_MS, &on.error));
        assert_ok(refit_host_step_close(on.step, &on.error));
        on.step = NULL;
        refit_lease *lease;
        assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
        refit_lease_release(lease);
        assert_ok(refit_host_step_open(on.offloader, on.list, PARAMETERS, &on.step, &on.error));
        close_scene(&on);
    }
    assert_ok(refit_host_step_close(NULL, NULL));
    assert_int_equal(refit_host_step_progress(NULL, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bits_are_those_of_the_kernel),
        cmocka_unit_test(a_stream_that_joins_sees_new_parameters),
        cmocka_unit_test(the_norm_does_not_depend_on_threads),
        cmocka_unit_test(gradients_may_change_once_they_have_landed),
        cmocka_unit_test(a_gradient_is_replaced_and_dropped),
        cmocka_unit_test(a_refreshed_parameter_is_stepped_from_the_device),
        cmocka_unit_test(a_refresh_stands_for_a_load),
        cmocka_unit_test(a_number_that_is_not_finite_is_found),
        cmocka_unit_test(a_skipped_step_changes_nothing),
        cmocka_unit_test(a_step_without_gradients_changes_nothing),
        cmocka_unit_test(the_modes_are_those_of_the_caller),
        cmocka_unit_test(what_a_checkpoint_brings_is_stepped),
        cmocka_unit_test(figures_are_told),
        cmocka_unit_test(a_wrong_parameter_is_refused),
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(options_of_other_optimizers_are_not_read),
        cmocka_unit_test(roots_of_the_process_are_taken),
        cmocka_unit_test(calls_in_a_wrong_state_are_refused),
        cmocka_unit_test(others_of_the_image_are_kept_apart),
        cmocka_unit_test(windows_step_other_regions_meanwhile),
        cmocka_unit_test(stepped_states_return_to_the_device),
        cmocka_unit_test(new_regions_begin_as_zeros),
        cmocka_unit_test(regions_that_were_removed_are_missed),
        cmocka_unit_test(a_broken_gradient_is_copied_again),
        cmocka_unit_test(work_of_the_caller_that_fails_is_told),
        cmocka_unit_test(work_behind_which_nothing_returns_is_waited_for),
        cmocka_unit_test(work_that_fails_is_told_before_its_copy),
        cmocka_unit_test(a_skip_tells_of_work_that_failed),
        cmocka_unit_test(work_that_fails_is_not_lost_by_other_failures),
        cmocka_unit_test(copies_that_are_sent_again_count_as_time),
        cmocka_unit_test(a_gradient_that_failed_is_replaced),
        cmocka_unit_test(a_dropped_gradient_is_waited_for),
        cmocka_unit_test(a_refresh_that_fails_is_repeated),
        cmocka_unit_test(a_skip_keeps_no_torn_parameter),
        cmocka_unit_test(the_rest_of_a_step_can_be_skipped),
        cmocka_unit_test(a_broken_copy_back_is_sent_again),
        cmocka_unit_test(each_call_of_the_device_may_fail),
        cmocka_unit_test(a_load_that_fails_is_repeated),
        cmocka_unit_test(each_part_of_an_open_may_fail),
        cmocka_unit_test(each_allocation_may_fail),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(copies_that_stand_are_a_timeout),
        cmocka_unit_test(image_and_step_share_a_budget),
        cmocka_unit_test(a_close_that_fails_is_repeated),
        cmocka_unit_test(threads_start_with_open),
        cmocka_unit_test(it_closes_in_any_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
