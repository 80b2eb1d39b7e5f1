/* A host step: the CPU steps parameters whose states are in the image, with the bits of the kernel.
 */
#include "tests/offload/offload.h"

#include <fenv.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/cast.h"
#include "kernels/floats.h"
#include "kernels/norm.h"
#include "kernels/optim.h"
#include "tests/offload/step_tasks.h"
#include "tests/support/failing_alloc.h"

#define PARAMETERS 8
#define GROUPS     5
#define TRIES      12
#define BLOCK      UINT64_C(16384)

/* ---- What every test stands on: parameters, and the same in plain arrays --------------------- */

/* What a parameter must be. */
typedef struct plain {
    void *weights;
    void *master;
    float *states[3];
    uint64_t number; /* of its steps */
} plain;

struct scene {
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
    void *changed[PARAMETERS];   /* such memory for weights */
    void *work;                  /* on the device, for work of the caller's that breaks */
    refit_optimizer_options groups[GROUPS];
    bool named[PARAMETERS];       /* in this step */
    bool given_again[PARAMETERS]; /* `changed` is in use by this step */
    double unscale, clip;
    double squared; /* of the last norm */
    int found_inf;
    uint32_t order[PARAMETERS];
    uint64_t seed;
    refit_error error;
};

static const uint64_t sizes[PARAMETERS] = {1, 7, 1000, 16384, 16385, 40000, 70001, 512};

static uint64_t below(scene *on, uint64_t bound)
{
    return seeded_below(&on->seed, bound);
}

static uint64_t width(int32_t type)
{
    return type == REFIT_F32 ? 4 : 2;
}

static rft_float_type float_type(int32_t type)
{
    return type == REFIT_F32 ? RFT_FP32 : type == REFIT_BF16 ? RFT_BF16 : RFT_FP16;
}

static uint64_t weight_bytes(const scene *on, uint32_t at)
{
    return width(on->list[at].type) * on->list[at].elements;
}

static uint64_t gradient_bytes(const scene *on, uint32_t at)
{
    return width(on->list[at].gradient_type) * on->list[at].elements;
}

/* Of the region that goes with the weights. */
static uint64_t master_bytes(const scene *on, uint32_t at)
{
    const refit_host_parameter *it = &on->list[at];
    return it->elements * (it->master == REFIT_MASTER_FP32        ? 4u
                           : it->master == REFIT_MASTER_REMAINDER ? 2u
                                                                  : 0u);
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

static float random_float(scene *on)
{
    return ((float)below(on, 1 << 24) - 8388608.0f) * ldexpf(1, -23 - (int)below(on, 8));
}

static void fill_typed(scene *on, void *to, int32_t type, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        float value = random_float(on);
        if (type == REFIT_F32) ((float *)to)[i] = value;
        if (type == REFIT_BF16) rft_cast_bf16((uint16_t *)to + i, &value, 1);
        if (type == REFIT_F16) rft_floats_to_half((uint16_t *)to + i, &value, 1);
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
    static const uint32_t states_of[GROUPS] = {2, 1, 1, 1, 3};
    static const int32_t types[] = {REFIT_F32, REFIT_BF16, REFIT_F16};
    refit_host_parameter *it = &on->list[at];
    plain *expected = &on->expected[at];
    snprintf(on->names[at], sizeof on->names[at], "layer.%u", at);
    *it = (refit_host_parameter){.size = sizeof *it, .name = on->names[at], .elements = sizes[at]};
    it->group = (uint32_t)below(on, GROUPS);
    it->type = types[below(on, 3)];
    it->gradient_type = types[below(on, 3)];
    it->state_count = states_of[it->group];
    if (it->type != REFIT_F32) it->master = (int32_t)below(on, 3);
    if (it->master == REFIT_MASTER_REMAINDER) it->type = REFIT_BF16;
    expected->weights = zeros(weight_bytes(on, at));
    fill_typed(on, expected->weights, it->type, it->elements);
    for (uint32_t state = 0; state < it->state_count; state++)
        expected->states[state] = zeros(4 * it->elements);
    if (it->master != REFIT_MASTER_NONE) expected->master = zeros(master_bytes(on, at));
    if (it->master == REFIT_MASTER_FP32 && it->type == REFIT_BF16)
        rft_floats_from_bf16(expected->master, expected->weights, it->elements);
    if (it->master == REFIT_MASTER_FP32 && it->type == REFIT_F16)
        rft_floats_from_half(expected->master, expected->weights, it->elements);
    assert_ok(refit_memory_alloc(on->device, weight_bytes(on, at), &it->memory, &on->error));
    test_write(on->inner, it->memory, expected->weights, weight_bytes(on, at));
    assert_ok(
        refit_memory_alloc(on->device, gradient_bytes(on, at), &on->gradients[at], &on->error));
    on->given[at] = test_host_alloc(on->inner, gradient_bytes(on, at));
    on->changed[at] = test_host_alloc(on->inner, weight_bytes(on, at));
}

static refit_region_id add_region(scene *on, const char *name, uint64_t bytes)
{
    refit_region_id id;
    refit_region_desc desc = {
        .size = sizeof desc, .name = name, .bytes = bytes, .placement = REFIT_PLACEMENT_HOST};
    assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
    return id;
}

static void open_offloader(scene *on)
{
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        refit_host_parameter *it = &on->list[at];
        char name[32];
        for (uint32_t state = 0; state < it->state_count; state++) {
            snprintf(name, sizeof name, "layer.%u.state.%u", at, state);
            it->states[state] = add_region(on, name, 4 * it->elements);
        }
        snprintf(name, sizeof name, "layer.%u.beside", at);
        if (it->master != REFIT_MASTER_NONE)
            it->master_region = add_region(on, name, master_bytes(on, at));
    }
    on->other = add_region(on, "other", 4096);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
}

/* The offloader anew, with one setting more. */
static void reopen_with(scene *on, const char *key, const char *value)
{
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_config_set(&on->config, key, value, &on->error));
    open_offloader(on);
}

static refit_status open_step(scene *on)
{
    on->step = NULL;
    return refit_host_step_open(on->offloader, on->list, PARAMETERS, &on->step, &on->error);
}

static void close_step(scene *on)
{
    assert_ok(refit_host_step_close(on->step, &on->error));
    on->step = NULL;
}

/* `masters`: those that go with weights begin as these. */
static refit_status load(scene *on, int masters)
{
    return refit_host_step_load(on->step, masters, on->stream, &on->error);
}

/* How a test's scene is. */
struct opening {
    uint64_t seed;
    const char *threads, *piece; /* NULL: 2, and 64KiB */
    bool bare;                   /* without a host step */
};

scene *open_scene(const opening *how)
{
    static scene only;
    scene *on = &only;
    const char *const settings[] = {"offload.slab_bytes=64KiB", "offload.batch=3",
                                    "offload.timeout_ms=20s", "offload.take_turns=false", NULL};
    begin_without_blocks();
    *on = (scene){.seed = how->seed * 0x9E3779B97F4A7C15u + 1, .unscale = 1, .clip = 1};
    refit_config_init(&on->config, sizeof on->config);
    set_each(&on->config, settings);
    assert_ok(refit_config_set(&on->config, "offload.piece_bytes",
                               how->piece == NULL ? "64KiB" : how->piece, &on->error));
    assert_ok(refit_config_set(&on->config, "offload.host_step_threads",
                               how->threads == NULL ? "2" : how->threads, &on->error));
    assert_ok(faulty_device_open(test_device_spec("host"), &on->device, &on->error));
    on->inner = faulty_device_inner(on->device);
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
    assert_ok(refit_memory_alloc(on->device, 64, &on->work, &on->error));
    set_groups(on);
    for (uint32_t at = 0; at < PARAMETERS; at++)
        make_parameter(on, at);
    open_offloader(on);
    if (how->bare) return on;
    assert_ok(open_step(on));
    assert_ok(load(on, 1));
    return on;
}

void close_scene(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    close_step(on);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        free(on->expected[at].weights);
        free(on->expected[at].master);
        for (uint32_t state = 0; state < 3; state++)
            free(on->expected[at].states[state]);
        test_host_free(on->inner, on->given[at], gradient_bytes(on, at));
        test_host_free(on->inner, on->changed[at], weight_bytes(on, at));
        assert_ok(refit_memory_free(on->device, on->gradients[at], &on->error));
        assert_ok(refit_memory_free(on->device, on->list[at].memory, &on->error));
    }
    assert_ok(refit_memory_free(on->device, on->work, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
    end_without_blocks();
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static refit_status begin(scene *on)
{
    memset(on->given_again, 0, sizeof on->given_again);
    return refit_host_step_begin(on->step, on->groups, GROUPS, &on->error);
}

static refit_status gradient(scene *on, uint32_t at)
{
    return refit_host_step_gradient(on->step, at, on->gradients[at], on->expected[at].number + 1,
                                    on->stream, &on->error);
}

static refit_status refresh(scene *on, uint32_t at)
{
    return refit_host_step_refresh(on->step, at, on->stream, &on->error);
}

static refit_status drop(scene *on, uint32_t at)
{
    return refit_host_step_drop(on->step, at, &on->error);
}

static refit_status norm(scene *on)
{
    return refit_host_step_norm(on->step, &on->squared, &on->found_inf, &on->error);
}

static refit_status run(scene *on)
{
    return refit_host_step_run(on->step, on->unscale, on->clip, on->stream, &on->error);
}

static refit_status give_up(scene *on)
{
    return refit_host_step_skip(on->step, &on->error);
}

static refit_status wait_for(scene *on, uint32_t timeout_ms)
{
    return refit_host_step_wait(on->step, timeout_ms, &on->error);
}

static refit_status join(scene *on, uint32_t at)
{
    return refit_host_step_join(on->step, at, on->stream, &on->error);
}

/* The image's bytes of a region. */
static refit_status image_of(scene *on, refit_region_id region, void **bytes, uint64_t *count)
{
    return refit_host_step_region(on->step, region, bytes, count, &on->error);
}

static refit_status host_weights(scene *on, uint32_t at, const void **bytes, uint64_t *count)
{
    return refit_host_step_parameter(on->step, at, bytes, count, &on->error);
}

static uint32_t progress(scene *on, uint32_t at)
{
    return refit_host_step_progress(on->step, at);
}

static bool is_stepped(scene *on, uint32_t at)
{
    return (progress(on, at) & REFIT_PARAMETER_STEPPED) != 0;
}

/* Puts a copy on the stream. */
static void queue_copy(scene *on, void *to, const void *from, uint64_t bytes)
{
    assert_ok(refit_stream_copy(on->inner, on->stream, to, from, bytes, &on->error));
}

static void await_stream(scene *on)
{
    assert_ok(refit_stream_wait(on->inner, on->stream, TIMEOUT_MS, &on->error));
}

static void fail_next(scene *on, faulty_slot slot)
{
    faulty_device_fail(on->device, slot, 1, REFIT_ERR_DEVICE);
}

/* ---- What must be ---------------------------------------------------------------------------- */

static rft_optim_options kernel_options(const refit_optimizer_options *options)
{
    return (rft_optim_options){.kind = (rft_optim_kind)options->optimizer,
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
    rft_optim_options options = kernel_options(&on->groups[it->group]);
    rft_optim_rule rule = rft_optim_rule_at(&options, (double)++expected->number);
    rule.unscale = (float)on->unscale;
    rule.clip = (float)on->clip;
    rft_optim_span span = {.count = it->elements,
                           .gradient = on->given[at],
                           .weights = expected->weights,
                           .master = expected->master,
                           .gradient_type = float_type(it->gradient_type),
                           .weights_type = float_type(it->type),
                           .master_form = (rft_optim_master)it->master};
    memcpy(span.states, expected->states, sizeof span.states);
    rft_optim_step(&rule, &span);
}

static void expect_all(scene *on)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (on->named[at]) expect_step(on, at);
    }
}

static void check_region(scene *on, refit_region_id region, const void *expected, uint64_t bytes)
{
    void *image;
    uint64_t count;
    assert_ok(image_of(on, region, &image, &count));
    assert_int_equal(count, bytes);
    assert_memory_equal(image, expected, bytes);
}

static void check_weights(scene *on, uint32_t at)
{
    const void *bytes;
    uint64_t count;
    assert_ok(host_weights(on, at, &bytes, &count));
    assert_int_equal(count, weight_bytes(on, at));
    assert_memory_equal(bytes, on->expected[at].weights, count);
    assert_device_equal(on->inner, on->list[at].memory, on->expected[at].weights, count);
}

/* Host and device have the parameters and states that plain arrays have. */
static void check_all(scene *on)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        const refit_host_parameter *it = &on->list[at];
        const plain *expected = &on->expected[at];
        check_weights(on, at);
        for (uint32_t state = 0; state < it->state_count; state++)
            check_region(on, it->states[state], expected->states[state], 4 * it->elements);
        if (it->master == REFIT_MASTER_NONE) continue;
        check_region(on, it->master_region, expected->master, master_bytes(on, at));
    }
}

static void check_progress(scene *on, uint32_t of_named)
{
    for (uint32_t at = 0; at < PARAMETERS; at++)
        assert_int_equal(progress(on, at), on->named[at] ? of_named : 0);
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

static void choose_one(scene *on, uint32_t at)
{
    choose(on, 0);
    on->named[at] = true;
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
    queue_copy(on, on->gradients[at], on->given[at], gradient_bytes(on, at));
    UNTIL_OK(on, gradient(on, at));
}

static void begin_and_name(scene *on)
{
    UNTIL_OK(on, begin(on));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (on->named[on->order[at]]) name(on, on->order[at]);
    }
}

static void wait_all(scene *on)
{
    UNTIL_OK(on, wait_for(on, TIMEOUT_MS));
    check_progress(on,
                   REFIT_PARAMETER_SUBMITTED | REFIT_PARAMETER_STEPPED | REFIT_PARAMETER_RETURNED);
}

/* What was named has been stepped: it is what plain arrays say. */
static void finish(scene *on)
{
    expect_all(on);
    wait_all(on);
    check_all(on);
}

static void start_step(scene *on, uint32_t most_in_ten)
{
    choose(on, most_in_ten);
    begin_and_name(on);
}

/* A whole step, but for the wait. */
static void step(scene *on, uint32_t most_in_ten)
{
    start_step(on, most_in_ten);
    UNTIL_OK(on, run(on));
    expect_all(on);
}

static void step_and_check(scene *on, uint32_t most_in_ten)
{
    start_step(on, most_in_ten);
    UNTIL_OK(on, run(on));
    finish(on);
}

/* ---- What holds ------------------------------------------------------------------------------ */

SCENE(a_stream_that_joins_sees_new_parameters, .seed = 50)
{
    for (uint32_t round = 0; round < 4; round++) {
        bool each = round % 2 == 1;
        step(on, 8);
        if (!each) assert_ok(join(on, REFIT_EACH_PARAMETER));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            if (each) assert_ok(join(on, at));
            queue_copy(on, on->changed[at], on->list[at].memory, weight_bytes(on, at));
        }
        await_stream(on);
        for (uint32_t at = 0; at < PARAMETERS; at++)
            assert_memory_equal(on->changed[at], on->expected[at].weights, weight_bytes(on, at));
    }
}

/* Of one block. */
static double squares(const void *gradient, int32_t type, uint64_t count)
{
    double sums[BLOCK / RFT_NORM_BLOCK];
    rft_norm_sum(
        &(rft_norm_span){
            .count = count, .gradient = gradient, .type = float_type(type), .scale = 1},
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

static void check_norm(scene *on)
{
    double expected = expected_squares(on);
    UNTIL_OK(on, norm(on));
    assert_memory_equal(&on->squared, &expected, sizeof expected);
    assert_int_equal(on->found_inf, 0);
}

/* A gradient or a parameter may change in place while a former copy of it is under way, the bytes
 * of which are not used. ThreadSanitizer calls that a race: for it, copies end first. */
static void end_copies(scene *on)
{
#if defined(__SANITIZE_THREAD__)
    UNTIL_OK(on, norm(on));
#else
    (void)on;
#endif
}

/* Another gradient in the place of the former one, or elsewhere, made by work on the stream. */
static void name_anew(scene *on, uint32_t at, bool elsewhere)
{
    end_copies(on);
    /* What the stream copies stays as it is until the stream has come to it. */
    await_stream(on);
    fill_typed(on, on->given[at], on->list[at].gradient_type, on->list[at].elements);
    if (elsewhere) {
        assert_ok(
            refit_memory_alloc(on->device, gradient_bytes(on, at), &on->gradients[at], &on->error));
    }
    name(on, at);
    on->named[at] = true;
    assert_int_equal(progress(on, at), REFIT_PARAMETER_SUBMITTED);
}

static void drop_named(scene *on, uint32_t at)
{
    assert_ok(drop(on, at));
    on->named[at] = false;
    assert_int_equal(progress(on, at), 0);
}

static bool can_refresh(const scene *on, uint32_t at)
{
    return on->list[at].master == REFIT_MASTER_NONE;
}

/* Work on the stream changes a parameter, and it is refreshed after that. */
static void change_and_refresh(scene *on, uint32_t at)
{
    uint64_t bytes = weight_bytes(on, at);
    if (on->given_again[at]) await_stream(on);
    on->given_again[at] = true;
    end_copies(on);
    fill_typed(on, on->changed[at], on->list[at].type, on->list[at].elements);
    memcpy(on->expected[at].weights, on->changed[at], bytes);
    queue_copy(on, on->list[at].memory, on->changed[at], bytes);
    UNTIL_OK(on, refresh(on, at));
}

static void refresh_all(scene *on)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (can_refresh(on, at)) UNTIL_OK(on, refresh(on, at));
    }
}

/* Changes or drops a gradient, changes a parameter, or asks for the norm. */
static void meddle(scene *on, uint32_t at)
{
    switch (below(on, 8)) {
    case 0: drop_named(on, at); return;
    case 1:
    case 2: name_anew(on, at, below(on, 2) == 0); return;
    case 3:
        if (can_refresh(on, at)) change_and_refresh(on, at);
        return;
    case 4: check_norm(on); return;
    default: return;
    }
}

/* A step in which parameters and gradients are changed at any moment. */
static void random_step(scene *on)
{
    void *former[PARAMETERS];
    bool wanted[PARAMETERS];
    choose(on, (uint32_t)below(on, 11));
    set_groups(on);
    on->unscale = below(on, 2) == 0 ? 1.0 : 1.0 / 1024;
    on->clip = below(on, 2) == 0 ? 1.0 : 0.37;
    memcpy(wanted, on->named, sizeof wanted);
    memset(on->named, 0, sizeof on->named);
    memcpy(former, on->gradients, sizeof former);
    assert_ok(begin(on)); /* which waits for the step before */
    for (uint32_t i = 0; i < PARAMETERS; i++) {
        uint32_t at = on->order[i];
        if (can_refresh(on, at) && below(on, 4) == 0) change_and_refresh(on, at);
        if (wanted[at]) name(on, at);
        on->named[at] = wanted[at];
        if (below(on, 8) == 0) check_norm(on);
    }
    bool meddled = below(on, 3) > 0;
    for (uint32_t at = 0; meddled && at < PARAMETERS; at++)
        meddle(on, at);
    bool skipped = below(on, 6) == 0;
    assert_ok(skipped ? give_up(on) : run(on));
    if (skipped) memset(on->named, 0, sizeof on->named);
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        if (former[at] == on->gradients[at]) continue;
        assert_ok(refit_memory_free(on->device, former[at], &on->error));
    }
    expect_all(on);
}

/* What is stepped and summed is what was named last, and from what a parameter became; what was
 * dropped or skipped changes nothing; the bits are those of the kernel. */
TEST(any_step_has_the_bits_of_the_kernel)
{
    static const char *const threads[] = {"1", "2", "3", "5"};
    static const char *const pieces[] = {"4KiB", "100000", "256KiB", "32MiB"};
    for (uint64_t seed = 0; seed < 24; seed++) {
        scene *on = open_scene(&(opening){
            .seed = seed + 1, .threads = threads[seed % 4], .piece = pieces[seed / 4 % 4]});
        for (uint32_t at = 0; at < 7; at++) {
            random_step(on);
            if (at % 2 == 0) wait_all(on);
            if (at % 2 == 0) check_all(on);
        }
        close_scene(on);
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
SCENE(a_refresh_stands_for_a_load, .seed = 150, .bare = true)
{
    const void *bytes;
    uint64_t count;
    assert_ok(open_step(on));
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t last = choose_alone(on);
        uint64_t in = 0;
        begin_and_name(on);
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            if (on->named[at]) in += gradient_bytes(on, at) + weight_bytes(on, at);
            if (at == last) continue;
            assert_int_equal(refresh(on, at), on->named[at] ? REFIT_OK : REFIT_ERR_UNSUPPORTED);
        }
        if (round == 0) {
            assert_int_equal(run(on), REFIT_ERR_STATE);
            assert_says(&on->error, on->list[last].name);
            assert_int_equal(host_weights(on, last, &bytes, &count), REFIT_ERR_STATE);
            check_progress(on, REFIT_PARAMETER_SUBMITTED);
        }
        assert_ok(refresh(on, last));
        assert_ok(run(on));
        expect_all(on);
        wait_all(on);
        assert_int_equal(stats_of(on->offloader).host_step_in_bytes_last, in); /* each came once */
    }
    start_step(on, 10);
    assert_int_equal(run(on), REFIT_ERR_STATE); /* masters were never loaded */
    assert_ok(give_up(on));
    assert_ok(load(on, 1));
    check_all(on);
    step_and_check(on, 10);
}

SCENE(a_number_that_is_not_finite_is_found, .seed = 7)
{
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (size_t at = 0; at < COUNT_OF(bad); at++) {
        uint32_t spoiled = 0;
        choose(on, 10);
        for (uint32_t it = 0; it < PARAMETERS; it++) {
            if (on->list[it].gradient_type != REFIT_F32) continue;
            ((float *)on->given[it])[on->list[it].elements - 1] = bad[at];
            spoiled++;
        }
        assert_true(spoiled > 0);
        begin_and_name(on);
        assert_ok(norm(on));
        assert_true(on->found_inf == 1 && !isfinite(on->squared));
        assert_ok(give_up(on));
        check_all(on);
        step_and_check(on, 10);
    }
}

/* Gradients may be changed once they were waited for, without a sum; a sum can follow. */
SCENE(gradients_may_change_once_they_have_landed, .seed = 40)
{
    for (uint32_t round = 0; round < 2; round++) {
        start_step(on, 10);
        UNTIL_OK(on, refit_host_step_norm(on->step, NULL, NULL, &on->error));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            uint64_t bytes = gradient_bytes(on, at);
            queue_copy(on, on->gradients[at], on->given[(at + 1) % PARAMETERS],
                       bytes < 4 ? bytes : 4);
        }
        assert_invalid(refit_host_step_norm(on->step, &on->squared, NULL, &on->error));
        if (round == 0) check_norm(on);
        assert_ok(run(on));
        finish(on);
        await_stream(on);
    }
}

/* Threads of the pool compute as the caller's thread does: its rounding shows in the bits. */
SCENE(the_modes_are_those_of_the_caller, .seed = 5, .threads = "4", .piece = "32MiB")
{
    step(on, 10); /* the pool's threads have started */
    assert_int_equal(fesetround(FE_TOWARDZERO), 0);
    for (uint32_t at = 0; at < 3; at++)
        step(on, 10);
    assert_int_equal(fesetround(FE_TONEAREST), 0);
    wait_all(on);
    check_all(on);
    step_and_check(on, 10);
}

SCENE(what_a_checkpoint_brings_is_stepped, .seed = 6)
{
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        refit_host_parameter *it = &on->list[at];
        plain *expected = &on->expected[at];
        void *image;
        uint64_t count;
        fill_typed(on, expected->weights, it->type, it->elements);
        test_write(on->inner, it->memory, expected->weights, weight_bytes(on, at));
        expected->number = below(on, 100);
        for (uint32_t i = 0; i < it->state_count; i++) {
            fill_typed(on, expected->states[i], REFIT_F32, it->elements);
            for (uint64_t k = 0; k < it->elements; k++)
                expected->states[i][k] = fabsf(expected->states[i][k]);
            assert_ok(image_of(on, it->states[i], &image, &count));
            memcpy(image, expected->states[i], count);
        }
        if (it->master == REFIT_MASTER_NONE) continue;
        assert_ok(image_of(on, it->master_region, &image, &count));
        for (uint64_t k = 0; k < count; k++)
            ((unsigned char *)expected->master)[k] = (unsigned char)below(on, 64);
        memcpy(image, expected->master, count);
    }
    assert_ok(refit_host_step_load(on->step, 0, REFIT_STREAM_NONE, &on->error));
    check_all(on);
    step_and_check(on, 10);
}

SCENE(figures_are_told, .seed = 8)
{
    uint64_t in = 0, out = 0;
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        in += gradient_bytes(on, at);
        out += weight_bytes(on, at);
    }
    step_and_check(on, 0); /* without gradients it is not one */
    assert_int_equal(stats_of(on->offloader).host_step_in_bytes_last, 0);
    assert_int_equal(stats_of(on->offloader).host_step_count, 0);
    for (uint32_t count = 1; count <= 2; count++) {
        step_and_check(on, 10);
        refit_stats stats = stats_of(on->offloader);
        assert_int_equal(stats.host_step_count, count);
        assert_int_equal(stats.host_step_failures, 0);
        assert_int_equal(stats.host_step_in_bytes_last, in);
        assert_int_equal(stats.host_step_out_bytes_last, out);
        assert_true(stats.host_step_bytes >= in + out);
        assert_true(stats.host_step_seconds_last > 0);
        assert_true(stats.host_step_compute_seconds_last > 0);
        assert_true(stats.host_step_blocked_seconds_last >= 0);
        assert_int_equal(stats.step_count, 0); /* of windows */
        assert_true(stats.step_seconds_last == 0);
    }
    close_step(on);
    assert_int_equal(stats_of(on->offloader).host_step_bytes, 0);
}

/* ---- What is refused ------------------------------------------------------------------------- */

static refit_status open_with(scene *on, const refit_host_parameter *first)
{
    refit_host_parameter list[PARAMETERS];
    refit_host_step *opened = NULL;
    memcpy(list, on->list, sizeof list);
    list[0] = *first;
    on->error.text[0] = '\0';
    refit_status status =
        refit_host_step_open(on->offloader, list, PARAMETERS, &opened, &on->error);
    if (status == REFIT_OK) assert_ok(refit_host_step_close(opened, &on->error));
    if (status != REFIT_OK) assert_true(on->error.text[0] != '\0');
    return status;
}

SCENE(a_wrong_parameter_is_refused, .seed = 9, .bare = true)
{
    refit_host_step *opened;
    refit_host_parameter wrong = on->list[0];
    assert_ok(open_with(on, &wrong));
#define REFUSED(change, expected)                                                                  \
    do {                                                                                           \
        wrong = on->list[0];                                                                       \
        change;                                                                                    \
        assert_int_equal(open_with(on, &wrong), (expected));                                       \
    } while (0)
    REFUSED(wrong.size = 8, REFIT_ERR_INVALID);
    REFUSED(wrong.size = sizeof wrong + 8, REFIT_ERR_INVALID);
    REFUSED(wrong.name = NULL, REFIT_ERR_INVALID);
    REFUSED(wrong.memory = NULL, REFIT_ERR_INVALID);
    REFUSED(wrong.memory = on->list[1].memory, REFIT_ERR_EXISTS);
    REFUSED(wrong.elements = 0, REFIT_ERR_INVALID);
    REFUSED(wrong.elements = UINT64_MAX, REFIT_ERR_LIMIT);
    REFUSED(wrong.elements++, REFIT_ERR_INVALID);
    REFUSED(wrong.type = REFIT_F64, REFIT_ERR_INVALID);
    REFUSED(wrong.gradient_type = -1, REFIT_ERR_INVALID);
    REFUSED(wrong.group = UINT32_MAX, REFIT_ERR_LIMIT);
    REFUSED(wrong.master = 3, REFIT_ERR_INVALID);
    REFUSED((wrong.type = REFIT_F32, wrong.master = REFIT_MASTER_FP32), REFIT_ERR_INVALID);
    REFUSED((wrong.type = REFIT_F16, wrong.master = REFIT_MASTER_REMAINDER), REFIT_ERR_INVALID);
    REFUSED(wrong.state_count = 4, REFIT_ERR_INVALID);
    REFUSED(wrong.states[0] = 1000, REFIT_ERR_NOT_FOUND);
    REFUSED(wrong.states[0] = on->list[2].states[0], REFIT_ERR_INVALID);
    REFUSED((wrong.state_count = 2, wrong.states[1] = wrong.states[0]), REFIT_ERR_EXISTS);
#undef REFUSED
    assert_invalid(refit_host_step_open(on->offloader, on->list, 0, &opened, &on->error));
    assert_invalid(refit_host_step_open(NULL, on->list, 1, &opened, &on->error));
}

SCENE(wrong_options_are_refused, .seed = 10, .threads = "1")
{
    refit_optimizer_options groups[GROUPS];
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        memcpy(groups, on->groups, sizeof groups);                                                 \
        change;                                                                                    \
        assert_int_equal(refit_host_step_begin(on->step, groups, GROUPS, &on->error),              \
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
    assert_invalid(refit_host_step_begin(on->step, on->groups, 0, &on->error));
    assert_invalid(refit_host_step_begin(on->step, NULL, 1, &on->error));
    step_and_check(on, 10);
}

/* Of a step that has not begun, or that stands after run. */
static void refuse_all_but_begin(scene *on)
{
    assert_int_equal(gradient(on, 0), REFIT_ERR_STATE);
    assert_int_equal(drop(on, 0), REFIT_ERR_STATE);
    assert_int_equal(refresh(on, 0), REFIT_ERR_STATE);
    assert_int_equal(norm(on), REFIT_ERR_STATE);
    assert_int_equal(run(on), REFIT_ERR_STATE);
}

SCENE(calls_in_a_wrong_state_are_refused, .seed = 11, .bare = true)
{
    refit_host_step *second;
    const void *bytes;
    uint64_t count;
    assert_ok(open_step(on));
    assert_int_equal(refit_host_step_open(on->offloader, on->list, PARAMETERS, &second, &on->error),
                     REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on->offloader, &on->error), REFIT_ERR_BUSY);
    assert_ok(begin(on));
    assert_ok(gradient(on, 0));
    assert_int_equal(run(on), REFIT_ERR_STATE); /* not loaded */
    assert_says(&on->error, "refit_host_step_load");
    assert_ok(give_up(on));
    assert_int_equal(host_weights(on, 0, &bytes, &count), REFIT_ERR_STATE);
    assert_ok(refit_host_step_load(on->step, 1, REFIT_STREAM_NONE, &on->error));
    refuse_all_but_begin(on);
    assert_ok(give_up(on));
    assert_ok(wait_for(on, 0));
    assert_ok(join(on, REFIT_EACH_PARAMETER));
    start_step(on, 10);
    assert_int_equal(begin(on), REFIT_ERR_STATE);
    assert_int_equal(load(on, 1), REFIT_ERR_STATE);
    assert_int_equal(
        refit_host_step_gradient(on->step, PARAMETERS, on->gradients[0], 1, on->stream, &on->error),
        REFIT_ERR_NOT_FOUND);
    assert_int_equal(drop(on, PARAMETERS), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refresh(on, PARAMETERS), REFIT_ERR_NOT_FOUND);
    assert_int_equal(join(on, 0), REFIT_ERR_STATE);
    assert_invalid(refit_host_step_run(on->step, NAN, 1, on->stream, &on->error));
    assert_invalid(refit_host_step_run(on->step, 1, 1e300, on->stream, &on->error));
    assert_ok(run(on));
    assert_int_equal(run(on), REFIT_ERR_STATE);
    assert_invalid(refit_host_step_join(on->step, 0, REFIT_STREAM_NONE, &on->error));
    assert_int_equal(join(on, PARAMETERS), REFIT_ERR_NOT_FOUND);
    finish(on);
    start_step(on, 0);
    assert_invalid(
        refit_host_step_gradient(on->step, 0, on->gradients[0], 0, on->stream, &on->error));
    assert_invalid(refit_host_step_gradient(on->step, 0, NULL, 1, on->stream, &on->error));
}

/* What an optimizer does not know may be anything, and changes nothing. */
SCENE(options_of_other_optimizers_are_not_read, .seed = 115)
{
    refit_optimizer_options known[GROUPS];
    memcpy(known, on->groups, sizeof known);
    for (uint32_t round = 0; round < 2; round++) {
        choose(on, 10);
        for (uint32_t at = 0; at < GROUPS; at++) {
            refit_optimizer_options *group = &on->groups[at];
            bool adam = group->optimizer == REFIT_ADAM, sgd = group->optimizer == REFIT_SGD;
            if (!adam && group->optimizer != REFIT_LION) group->beta1 = group->beta2 = NAN;
            if (!adam && group->optimizer != REFIT_ADAGRAD) group->eps = -1;
            if (group->optimizer != REFIT_ADAGRAD) group->lr_decay = INFINITY;
            if (!sgd) group->momentum = group->dampening = NAN;
            if (!sgd) group->nesterov = 1;
            if (!adam) group->amsgrad = group->decoupled = 1;
        }
        begin_and_name(on);
        assert_ok(run(on));
        memcpy(on->groups, known, sizeof known);
        finish(on);
    }
}

/* As MKL_Set_Num_Threads_Local is. */
static _Thread_local int threads_of_root;
static atomic_bool root_has_a_team, root_was_called;

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
    atomic_store(&root_was_called, true);
    if (threads_of_root != 1) atomic_store(&root_has_a_team, true);
    for (int i = 0; i < count; i++)
        to[i] = sqrtf(from[i]);
}

/* All threads call the root that is given, and have told it before that it has one thread. */
SCENE(roots_of_the_process_are_taken, .seed = 116, .threads = "4", .piece = "32MiB")
{
    threads_of_root = 7;
    assert_ok(
        refit_host_step_set_sqrt(on->step, root_of_the_test, set_threads_of_root, &on->error));
    for (uint32_t round = 0; round < 3; round++)
        step(on, 10);
    wait_all(on);
    check_all(on);
    assert_true(atomic_load(&root_was_called));
    assert_false(atomic_load(&root_has_a_team));
    assert_int_equal(threads_of_root, 7);
    assert_ok(begin(on));
    assert_int_equal(refit_host_step_set_sqrt(on->step, NULL, NULL, &on->error), REFIT_ERR_STATE);
    assert_ok(give_up(on));
    assert_invalid(refit_host_step_set_sqrt(NULL, NULL, NULL, &on->error));
}

/* ---- Others of the same offloader ------------------------------------------------------------ */

static refit_status try_read_lock(scene *on)
{
    refit_read_lock *taken;
    RFT_TRY(refit_read_lock_acquire(on->offloader, &taken, &on->error));
    refit_read_lock_release(taken);
    return REFIT_OK;
}

/* Windows step other regions of the same offloader; read locks and restores stay out of a step. */
SCENE(others_of_the_image_are_kept_apart, .seed = 12)
{
    refit_read_lock *held;
    refit_window *window;
    void *bytes;
    uint64_t count;
    refit_region_id states = on->list[3].states[0];
    assert_ok(refit_window_open(on->offloader, &window, &on->error));
    refit_window_part part = {.size = sizeof part, .region = states, .bytes = 64};
    assert_invalid(refit_window_begin(window, &part, 1, REFIT_STREAM_NONE, &on->error));
    assert_invalid(refit_window_host(window, states, &bytes, &count, &on->error));
    assert_ok(refit_window_close(window, &on->error));

    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    assert_int_equal(load(on, 1), REFIT_ERR_BUSY);
    assert_int_equal(image_of(on, states, &bytes, &count), REFIT_ERR_BUSY);
    start_step(on, 10);
    assert_int_equal(run(on), REFIT_ERR_BUSY);
    refit_read_lock_release(held);
    faulty_device_fail(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY); /* a copy back */
    assert_int_equal(run(on), REFIT_ERR_COPY);
    assert_int_equal(try_read_lock(on), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error),
                     REFIT_ERR_BUSY);
    assert_int_equal(image_of(on, states, &bytes, &count), REFIT_ERR_STATE);
    assert_invalid(
        refit_host_step_run(on->step, 0.5, 1, on->stream, &on->error)); /* other factors */
    assert_ok(run(on));
    assert_ok(try_read_lock(on)); /* the image is whole */
    finish(on);
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

SCENE(windows_step_other_regions_meanwhile, .seed = 13)
{
    refit_window *window;
    void *bytes;
    uint64_t count;
    assert_ok(refit_window_open(on->offloader, &window, &on->error));
    assert_int_equal(image_of(on, on->other, &bytes, &count), REFIT_ERR_NOT_FOUND);
    for (uint32_t round = 0; round < 3; round++) {
        choose(on, 9);
        if (round == 0) step_window(on, window);
        begin_and_name(on);
        if (round == 1) step_window(on, window);
        assert_ok(run(on));
        if (round == 2) step_window(on, window);
        expect_all(on);
        wait_all(on);
        assert_ok(refit_window_wait(window, TIMEOUT_MS, &on->error));
        check_all(on);
        assert_ok(refit_window_host(window, on->other, &bytes, &count, &on->error));
        for (uint64_t i = 0; i < count; i++)
            assert_int_equal(((unsigned char *)bytes)[i], 0x5A);
        memset(bytes, 0, count);
        refit_stats stats = stats_of(on->offloader);
        assert_int_equal(stats.step_count, round + 1);
        assert_int_equal(stats.host_step_count, round + 1);
        assert_int_equal(stats.step_out_bytes_last, count);
    }
    assert_ok(refit_window_close(window, &on->error));
}

#define REGIONS_MOST 64

/* Restores all regions to device memory. */
static void restore(scene *on, void **memory)
{
    assert_true(refit_offloader_count(on->offloader) <= REGIONS_MOST);
    for (uint32_t at = 0; at < refit_offloader_count(on->offloader); at++) {
        uint64_t bytes = region_of(on->offloader, at).bytes;
        if (memory[at] == NULL)
            assert_ok(refit_memory_alloc(on->device, bytes, &memory[at], &on->error));
        assert_ok(refit_offloader_bind(on->offloader, at, memory[at], &on->error));
    }
    assert_ok(restore_all(on->offloader, &on->error));
}

static void free_all(scene *on, void **memory)
{
    for (uint32_t at = 0; at < REGIONS_MOST; at++)
        assert_ok(refit_memory_free(on->device, memory[at], &on->error));
}

/* Removes all regions, which are on the device, and adds another. */
static refit_region_id replace_regions(scene *on, uint64_t bytes)
{
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    assert_ok(refit_offloader_clear(on->offloader, &on->error));
    refit_region_id id = add_region(on, "new", bytes);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    return id;
}

/* States that left the device with a digest are stepped, and return: no digest of before is held
 * against them. */
SCENE(stepped_states_return_to_the_device, .seed = 15, .bare = true)
{
    void *memory[REGIONS_MOST] = {NULL};
    reopen_with(on, "offload.verify", "true");
    assert_ok(open_step(on));
    assert_ok(load(on, 1));
    restore(on, memory);
    assert_ok(offload_all(on->offloader, &on->error));
    step(on, 10);
    wait_all(on);
    restore(on, memory);
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        const refit_host_parameter *it = &on->list[at];
        for (uint32_t i = 0; i < it->state_count; i++) {
            assert_device_equal(on->inner, memory[it->states[i]], on->expected[at].states[i],
                                4 * it->elements);
        }
    }
    free_all(on, memory);
}

/* Memory of the image that a step alone has written does not show through in new regions. */
SCENE(new_regions_begin_as_zeros, .seed = 16, .bare = true)
{
    void *memory[REGIONS_MOST] = {NULL};
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    assert_ok(open_step(on));
    assert_ok(load(on, 0));
    start_step(on, 10);
    assert_ok(run(on));
    wait_all(on);
    close_step(on);
    restore(on, memory);
    refit_region_id id = replace_regions(on, 100000);
    free_all(on, memory);
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    assert_ok(refit_read_lock_read(held, id, &bytes, &count, &on->error));
    for (uint64_t i = 0; i < count; i++)
        assert_int_equal(((const unsigned char *)bytes)[i], 0);
    refit_read_lock_release(held);
}

/* Regions that were removed and added again are others: the host step says so. */
SCENE(regions_that_were_removed_are_missed, .seed = 14)
{
    void *memory[REGIONS_MOST] = {NULL};
    restore(on, memory);
    assert_int_equal(begin(on), REFIT_ERR_STATE);
    (void)replace_regions(on, 4096);
    free_all(on, memory);
    assert_int_equal(begin(on), REFIT_ERR_STATE);
    assert_says(&on->error, "removed");
}

/* Each alone is below the budget; it is for both. */
SCENE(image_and_step_share_a_budget, .seed = 117, .bare = true)
{
    char budget[32];
    reopen_with(on, "offload.budget_bytes", "64MiB");
    assert_ok(open_step(on));
    refit_stats stats = stats_of(on->offloader);
    assert_true(stats.host_bytes > 1 && stats.host_step_bytes > 1);
    for (uint64_t missing = 2; missing-- > 0;) {
        close_step(on);
        snprintf(budget, sizeof budget, "%llu",
                 (unsigned long long)(stats.host_bytes + stats.host_step_bytes - missing));
        reopen_with(on, "offload.budget_bytes", budget);
        assert_int_equal(open_step(on), missing > 0 ? REFIT_ERR_BUDGET : REFIT_OK);
        if (missing > 0) assert_says(&on->error, "offload.budget_bytes");
    }
}

/* ---- What fails ------------------------------------------------------------------------------ */

/* If a gradient cannot be named again, the former is not stepped either. */
SCENE(a_gradient_that_is_refused_is_not_stepped, .seed = 130)
{
    static const faulty_slot slots[] = {FAULTY_COPY_BATCH, FAULTY_EVENT_RECORD};
    for (uint32_t round = 0; round < 4; round++) {
        choose_one(on, 3);
        begin_and_name(on);
        name(on, 5);
        await_stream(on);
        fail_next(on, slots[round % 2]);
        assert_int_equal(gradient(on, 5), REFIT_ERR_DEVICE);
        assert_int_equal(progress(on, 5), 0);
        if (round >= 2) name_anew(on, 5, false);
        check_norm(on);
        UNTIL_OK(on, run(on));
        finish(on);
    }
}

/* A parameter whose copy could not be started is not stepped before it has come; a skip leaves it
 * so. */
SCENE(a_refresh_that_is_refused_is_repeated, .seed = 151, .piece = "32MiB")
{
    const void *host;
    uint64_t count;
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t at = choose_alone(on);
        begin_and_name(on);
        await_stream(on);
        change_and_refresh(on, at); /* the next refresh comes over this one */
        fail_next(on, FAULTY_COPY_BATCH);
        assert_int_equal(refresh(on, at), REFIT_ERR_DEVICE);
        assert_int_equal(run(on), REFIT_ERR_STATE);
        if (round > 0) {
            assert_ok(give_up(on));
            assert_int_equal(host_weights(on, at, &host, &count), REFIT_ERR_STATE);
            if (round == 2) assert_ok(load(on, 0));
            begin_and_name(on);
        }
        if (round < 2) assert_int_equal(run(on), REFIT_ERR_STATE);
        if (round < 2) assert_ok(refresh(on, at));
        assert_ok(run(on));
        finish(on);
    }
}

/* A parameter that has come is stepped by the next step, also if this one is skipped. */
SCENE(a_skip_keeps_a_parameter_that_has_come, .seed = 152)
{
    const void *host;
    uint64_t count;
    uint32_t at = choose_alone(on);
    assert_ok(begin(on));
    change_and_refresh(on, at);
    assert_ok(give_up(on));
    assert_ok(host_weights(on, at, &host, &count));
    begin_and_name(on);
    assert_ok(run(on));
    finish(on);
}

/* Run is given up; wait, or the next begin, starts the copy. */
SCENE(a_copy_back_that_is_refused_is_started_later, .seed = 41)
{
    for (uint32_t nth = 1; nth <= 4; nth++) {
        uint32_t lost = 0;
        start_step(on, 10);
        assert_ok(norm(on));
        faulty_device_fail(on->device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        assert_int_equal(run(on), REFIT_ERR_COPY);
        expect_all(on);
        assert_ok(give_up(on));
        for (uint32_t at = 0; at < PARAMETERS; at++) {
            assert_true(is_stepped(on, at));
            refit_status status = join(on, at);
            if (status == REFIT_OK) continue;
            lost++;
            assert_int_equal(status, REFIT_ERR_COPY);
        }
        assert_int_equal(lost, 1);
        assert_int_equal(join(on, REFIT_EACH_PARAMETER), REFIT_ERR_COPY);
        if (nth % 2 == 0) wait_all(on);
        if (nth % 2 == 0) check_all(on);
        step_and_check(on, 10);
    }
}

static void check_locked(scene *on)
{
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    for (uint32_t at = 0; at < PARAMETERS; at++) {
        const refit_host_parameter *it = &on->list[at];
        for (uint32_t state = 0; state < it->state_count; state++) {
            assert_ok(refit_read_lock_read(held, it->states[state], &bytes, &count, &on->error));
            assert_memory_equal(bytes, on->expected[at].states[state], count);
        }
        assert_ok(host_weights(on, at, &bytes, &count));
        assert_memory_equal(bytes, on->expected[at].weights, count);
    }
    refit_read_lock_release(held);
}

/* Nothing is stepped whose gradient has not come. What the CPU has stepped is there to be read. */
TEST(a_lost_device_leaves_what_the_host_has)
{
    for (int back = 0; back < 2; back++) {
        scene *on = open_scene(&(opening){.seed = 20});
        step_and_check(on, 10);
        choose(on, 10);
        if (!back) {
            assert_ok(begin(on));
            faulty_device_lose(on->device, FAULTY_COPY_BATCH, 1);
            faulty_device_stop(on->device);
        }
        if (back) begin_and_name(on);
        for (uint32_t at = 0; !back && at < PARAMETERS; at++)
            name(on, at);
        if (back) {
            assert_ok(norm(on));
            faulty_device_lose(on->device, FAULTY_COPY_BATCH, 1);
            faulty_device_stop(on->device);
            assert_ok(run(on));
            expect_all(on);
        }
        faulty_device_go(on->device);
        assert_int_equal(back ? wait_for(on, TIMEOUT_MS) : run(on), REFIT_ERR_DEVICE);
        assert_says(&on->error, "lost");
        for (uint32_t at = 0; at < PARAMETERS; at++)
            assert_int_equal(is_stepped(on, at), back);
        if (!back) assert_int_equal(try_read_lock(on), REFIT_ERR_DEVICE);
        assert_ok(give_up(on));
        check_locked(on);
        assert_int_equal(begin(on), back ? REFIT_ERR_DEVICE : REFIT_OK);
        close_step(on);
        assert_ok(try_read_lock(on));
        close_scene(on);
    }
}

/* Each call of each slot fails once: called again, the step has the same bits. */
static bool fail_nth(faulty_slot slot, uint32_t nth)
{
    scene *on = open_scene(&(opening){.seed = 60 + nth, .bare = true});
    faulty_device_reset(on->device);
    faulty_device_fail(on->device, slot, nth, REFIT_ERR_DEVICE);
    UNTIL_OK(on, open_step(on));
    UNTIL_OK(on, load(on, 1));
    check_all(on);
    start_step(on, 9);
    refresh_all(on);
    if (nth % 2 == 0) UNTIL_OK(on, norm(on));
    UNTIL_OK(on, run(on));
    expect_all(on);
    wait_all(on);
    bool came = faulty_device_calls(on->device, slot) >= nth;
    faulty_device_reset(on->device);
    check_all(on);
    step_and_check(on, 9);
    close_scene(on);
    return came;
}

TEST(each_call_of_the_device_may_fail)
{
    static const struct {
        faulty_slot slot;
        uint32_t least; /* calls, all of which fail in turn */
    } rows[] = {{FAULTY_STREAM_OPEN, 2},  {FAULTY_HOST_PIN, 1},
                {FAULTY_EVENT_RECORD, 1}, {FAULTY_COPY_BATCH, 2 * PARAMETERS},
                {FAULTY_EVENT_JOIN, 1},   {FAULTY_STREAM_CALL, 1}};
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        uint32_t nth = 1;
        while (nth < 40 && fail_nth(rows[at].slot, nth))
            nth++;
        assert_true(nth > rows[at].least);
    }
}

/* A failed load leaves the step without parameters; an open whose second stream does not open,
 * while the first does not close at once, lets the device close. */
SCENE(what_failed_in_part_is_repeated, .seed = 80, .bare = true)
{
    bool came = true;
    for (uint32_t nth = 1; came; nth++) {
        faulty_device_reset(on->device);
        faulty_device_fail(on->device, FAULTY_EVENT_OPEN, nth, REFIT_ERR_DEVICE);
        refit_status status = open_step(on);
        came = faulty_device_calls(on->device, FAULTY_EVENT_OPEN) >= nth;
        assert_int_equal(status, came ? REFIT_ERR_DEVICE : REFIT_OK);
        close_step(on);
    }
    faulty_device_reset(on->device);
    faulty_device_fail(on->device, FAULTY_STREAM_OPEN, 2, REFIT_ERR_DEVICE);
    faulty_device_fail_times(on->device, FAULTY_STREAM_CLOSE, 1, 2, REFIT_ERR_DEVICE);
    assert_int_equal(open_step(on), REFIT_ERR_DEVICE);
    assert_int_equal(faulty_device_calls(on->device, FAULTY_STREAM_CLOSE), 3);
    assert_ok(open_step(on));
    for (uint32_t nth = 1; nth <= 8; nth++) {
        faulty_device_fail(on->device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        assert_int_equal(load(on, 1), REFIT_ERR_COPY);
        start_step(on, 10);
        assert_int_equal(run(on), REFIT_ERR_STATE);
        assert_ok(give_up(on));
    }
    assert_ok(load(on, 1));
    check_all(on);
    step_and_check(on, 10);
}

SCENE(each_allocation_may_fail, .seed = 90, .bare = true)
{
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        failing_alloc_here(nth);
        refit_status status = open_step(on);
        came = failing_alloc_stop_here();
        if (came && status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        if (!came) assert_ok(status);
        close_step(on);
    }
}

SCENE(a_step_allocates_nothing, .seed = 91, .threads = "3")
{
    step_and_check(on, 10);
    for (int round = 0; round < 3; round++) {
        choose(on, 10);
        failing_alloc_here(1);
        begin_and_name(on);
        refresh_all(on);
        assert_ok(norm(on));
        assert_ok(run(on));
        assert_ok(wait_for(on, TIMEOUT_MS));
        assert_false(failing_alloc_stop_here());
        finish(on);
    }
}

/* Copies that hang are waited for no longer than was said: also those of a gradient that could not
 * be named, or was dropped, which is read until norm or run is OK. */
SCENE(copies_that_hang_are_a_timeout, .seed = 92)
{
    for (int way = 0; way < 3; way++) {
        bool dropped = way > 0, runs = way == 2;
        choose_one(on, 6);
        assert_ok(begin(on));
        faulty_device_hang(on->device);
        if (dropped) {
            name(on, 6);
            assert_ok(drop(on, 6));
        } else {
            fail_next(on, FAULTY_EVENT_RECORD);
            assert_int_equal(refit_host_step_gradient(on->step, 6, on->gradients[6], 1,
                                                      REFIT_STREAM_NONE, &on->error),
                             REFIT_ERR_DEVICE);
        }
        on->named[6] = false;
        check_progress(on, 0);
        assert_hung(on, norm(on));
        if (runs) assert_hung(on, run(on));
        faulty_device_go(on->device);
        if (!runs) check_norm(on);
        assert_ok(dropped ? run(on) : give_up(on));
        finish(on);
    }
    choose(on, 10);
    faulty_device_hang(on->device);
    begin_and_name(on);
    assert_hung(on, norm(on));
    assert_hung(on, run(on));
    check_progress(on, REFIT_PARAMETER_SUBMITTED);
    assert_hung(on, give_up(on));
    faulty_device_go(on->device);
    UNTIL_OK(on, run(on));
    finish(on);
}

/* A close that fails half-way leaves no step that copies on the calling thread. */
TEST(a_close_that_fails_is_repeated)
{
    for (uint32_t nth = 1; nth <= 2; nth++) {
        scene *on = open_scene(&(opening){.seed = 118});
        start_step(on, 0);
        faulty_device_fail(on->device, FAULTY_STREAM_CLOSE, nth, REFIT_ERR_DEVICE);
        assert_int_equal(refit_host_step_close(on->step, &on->error), REFIT_ERR_DEVICE);
        assert_int_equal(gradient(on, 3), REFIT_ERR_STATE);
        assert_says(&on->error, "refit_host_step_close");
        assert_int_equal(norm(on), REFIT_ERR_STATE);
        assert_int_equal(run(on), REFIT_ERR_STATE);
        assert_int_equal(wait_for(on, 0), REFIT_ERR_STATE);
        assert_int_equal(refit_offloader_close(on->offloader, &on->error), REFIT_ERR_BUSY);
        close_scene(on);
    }
}

/* Their stacks are memory, which a step does not take. */
SCENE(threads_start_with_open, .seed = 119, .threads = "4", .bare = true)
{
    await_step_threads(0, NULL); /* those of a test before may just be ending */
    assert_ok(open_step(on));
    assert_int_equal(count_step_threads(NULL), 3);
    close_step(on);
    await_step_threads(0, NULL);
}

/* Copies under way are waited for, and nothing is leaked. */
TEST(it_closes_in_any_state)
{
    enum { OPEN, BEGUN, NAMED, HALF_RUN, RUNNING, RETURNED, STATES };
    for (uint32_t at = OPEN; at < STATES; at++) {
        scene *on = open_scene(&(opening){.seed = 95 + at, .bare = true});
        assert_ok(open_step(on));
        choose(on, 10);
        if (at > OPEN) assert_ok(load(on, 1));
        if (at == BEGUN) assert_ok(begin(on));
        if (at > BEGUN) begin_and_name(on);
        if (at == HALF_RUN) {
            faulty_device_fail(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
            assert_int_equal(run(on), REFIT_ERR_COPY);
        }
        if (at > HALF_RUN) assert_ok(run(on));
        if (at == RETURNED) assert_ok(wait_for(on, TIMEOUT_MS));
        close_step(on);
        assert_ok(try_read_lock(on));
        assert_ok(open_step(on));
        close_scene(on);
    }
    assert_ok(refit_host_step_close(NULL, NULL));
    assert_int_equal(refit_host_step_progress(NULL, 0), 0);
}

int main(void)
{
    return test_run("host_step");
}
