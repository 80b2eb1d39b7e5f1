/*
 * Each vector form of a step gives the bits of the scalar one: every kind, option and type, every
 * length up to several vectors, arrays that are aligned to nothing, in one range or many, with a
 * root of the caller's and without; gradients, states and parameters are ordinary, subnormal, huge,
 * infinite, zero of both signs and NaN. Nothing beside the range is written. Known answers stand
 * where the scalar form could be wrong with all others: remainders, rounding, the order of ops.
 */
#include <math.h>

#include "kernels/cast.h"
#include "kernels/floats.h"
#include "kernels/optim.h"
#include "tests/kernels/levels.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

enum { GRADIENT, WEIGHTS, MASTER, FIRST, SECOND, THIRD, ARRAYS };

#define MOST  ((size_t)5008) /* arrays are multiples of 64 bytes */
#define GUARD ((size_t)64)
#define BYTES (4 * MOST + 2 * GUARD)

/* What a step is given, what the scalar form makes of it, and what the form under test does. */
static _Alignas(64) unsigned char given[ARRAYS][BYTES], expected[ARRAYS][BYTES];
static _Alignas(64) unsigned char found[ARRAYS][BYTES];
static uint64_t seed = 5;

static uint32_t any_float(void)
{
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000,
                                       0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000,
                                       0x7FC00000, 0xFFC00001, 0x7F800001, 0x3F808000, 0x3F818000};
    uint64_t random = seeded_next(&seed);
    if (random % 16 == 0) return special[random / 16 % (COUNT_OF(special))];
    if (random % 16 == 1) return (uint32_t)(random >> 20); /* any pattern */
    uint32_t exponent = 127 - 12 + (uint32_t)(random >> 56) % 16;
    return (uint32_t)(random >> 60) << 31 | exponent << 23 | (uint32_t)(random >> 20 & 0x7FFFFF);
}

static void put_any(unsigned char *to, rft_float_type type, bool is_square)
{
    uint32_t bits = any_float();
    if (is_square) bits &= 0x7FFFFFFFu;
    float value;
    memcpy(&value, &bits, sizeof value);
    uint16_t half = 0;
    if (type == RFT_FP32) memcpy(to, &bits, sizeof bits);
    if (type == RFT_BF16) rft_cast_bf16(&half, &value, 1);
    if (type == RFT_FP16) rft_floats_to_half(&half, &value, 1);
    if (type != RFT_FP32) memcpy(to, &half, sizeof half);
}

/* Where an array begins: at no multiple of anything, but of its own type where `aside` is 0. */
static unsigned char *start_of(unsigned char *array, size_t aside)
{
    return array + GUARD + aside;
}

typedef struct scene {
    rft_optim_options options;
    rft_float_type gradient, weights;
    rft_optim_master master;
    double step;
    float unscale, clip;
    size_t count, aside;
} scene;

static size_t width_of(rft_float_type type)
{
    return type == RFT_FP32 ? 4 : 2;
}

static size_t array_width(const scene *of, int array)
{
    if (array == GRADIENT) return width_of(of->gradient);
    if (array == WEIGHTS) return width_of(of->weights);
    return array == MASTER && of->master == RFT_OPTIM_REMAINDER ? 2 : 4;
}

static void fill(const scene *of)
{
    for (int array = 0; array < ARRAYS; array++) {
        size_t width = array_width(of, array);
        memset(given[array], 0xA5, BYTES);
        for (size_t i = 0; i < of->count; i++) {
            rft_float_type type = width == 4          ? RFT_FP32
                                  : array == GRADIENT ? of->gradient
                                                      : of->weights;
            put_any(start_of(given[array], of->aside) + width * i, type, array >= SECOND);
        }
    }
    if (of->master != RFT_OPTIM_REMAINDER) return;
    for (size_t i = 0; i < of->count; i++) { /* any remainder beside any weight */
        uint16_t low = (uint16_t)(seeded_next(&seed) >> 30);
        memcpy(start_of(given[MASTER], of->aside) + 2 * i, &low, sizeof low);
    }
}

static rft_optim_span span_of(const scene *of, unsigned char (*arrays)[BYTES], size_t first,
                              size_t count)
{
    unsigned char *at[ARRAYS];
    for (int array = 0; array < ARRAYS; array++)
        at[array] = start_of(arrays[array], of->aside) + first * array_width(of, array);
    return (rft_optim_span){.count = count,
                            .gradient = at[GRADIENT],
                            .weights = at[WEIGHTS],
                            .master = of->master == RFT_OPTIM_NO_MASTER ? NULL : at[MASTER],
                            .states = {at[FIRST], at[SECOND], at[THIRD]},
                            .gradient_type = of->gradient,
                            .weights_type = of->weights,
                            .master_form = of->master};
}

/* In ranges of at most `most` elements. */
static void step(const scene *of, unsigned char (*arrays)[BYTES], size_t most)
{
    rft_optim_rule rule = rft_optim_rule_at(&of->options, of->step);
    rule.unscale = of->unscale;
    rule.clip = of->clip;
    memcpy(arrays, given, sizeof given);
    for (size_t first = 0; first < of->count; first += most) {
        size_t left = of->count - first;
        rft_optim_span span = span_of(of, arrays, first, left < most ? left : most);
        rft_optim_step(&rule, &span);
    }
}

static bool is_nan_at(const unsigned char *at, size_t width)
{
    uint32_t bits;
    memcpy(&bits, at, sizeof bits);
    return width == 4 && (bits & 0x7FFFFFFFu) > 0x7F800000u;
}

/* Bytes beside the elements count, too. */
static void compare(const scene *of)
{
    for (int array = 0; array < ARRAYS; array++) {
        if (memcmp(found[array], expected[array], BYTES) == 0) continue;
        size_t width = array_width(of, array), at = GUARD + of->aside;
        assert_memory_equal(found[array], expected[array], at);
        for (size_t i = 0; i < of->count; i++, at += width) {
            if (memcmp(found[array] + at, expected[array] + at, width) == 0) continue;
            if (is_nan_at(found[array] + at, width) && is_nan_at(expected[array] + at, width)) {
                continue;
            }
            fail_msg("kind %d level %d array %d element %zu of %zu differs", of->options.kind,
                     (int)rft_cpu_get_level(), array, i, of->count);
        }
        assert_memory_equal(found[array] + at, expected[array] + at, BYTES - at);
    }
}

static scene at_hand;

static void check_level(void)
{
    if (rft_cpu_get_level() == RFT_CPU_BASE) step(&at_hand, expected, MOST);
    step(&at_hand, found, MOST);
    compare(&at_hand);
    step(&at_hand, found, 1 + seeded_below(&seed, at_hand.count + 1));
    compare(&at_hand);
}

static void check(void)
{
    fill(&at_hand);
    on_every_level(check_level);
}

/* As MKL_Set_Num_Threads_Local is. */
static int threads_of_root = 3;
static bool asks_for_threads;

static int set_threads_of_root(int count)
{
    int former = threads_of_root;
    threads_of_root = count;
    return former;
}

/* A library's root that is not rounded to nearest, as MKL's is not on each processor; it takes as
 * many as are promised at most. */
static void other_root(int count, const float *from, float *to, long long mode)
{
    assert_true(count > 0 && (size_t)count <= RFT_OPTIM_SQRTS);
    assert_int_equal(mode, 0x140102);
    assert_true(threads_of_root == 1 || !asks_for_threads);
    for (int i = 0; i < count; i++)
        to[i] = nextafterf(sqrtf(from[i]), 0.0f);
}

static bool by_chance(void)
{
    return (seeded_next(&seed) >> 40) % 2 == 0;
}

static rft_optim_options any_options(void)
{
    static const double betas[] = {0, 0.3, 0.5, 0.9, 0.95, 0.999};
    return (rft_optim_options){.kind = (rft_optim_kind)seeded_below(&seed, 4),
                               .lr = 1e-3 * (1 + (double)seeded_below(&seed, 9)),
                               .weight_decay = by_chance() ? 0.01 : 0,
                               .beta1 = betas[seeded_below(&seed, 6)],
                               .beta2 = betas[seeded_below(&seed, 6)],
                               .eps = by_chance() ? 1e-8 : 0,
                               .lr_decay = by_chance() ? 0.01 : 0,
                               .momentum = by_chance() ? 0.9 : 0,
                               .dampening = by_chance() ? 0.2 : 0,
                               .decoupled = by_chance(),
                               .amsgrad = by_chance(),
                               .nesterov = by_chance(),
                               .maximize = by_chance(),
                               .lr_is_tensor = by_chance(),
                               .root = by_chance() ? other_root : NULL};
}

static scene any_scene(size_t count)
{
    static const rft_float_type weights[] = {RFT_FP32, RFT_BF16, RFT_FP16,
                                             RFT_BF16, RFT_FP16, RFT_BF16};
    static const rft_optim_master master[] = {RFT_OPTIM_NO_MASTER,   RFT_OPTIM_NO_MASTER,
                                              RFT_OPTIM_NO_MASTER,   RFT_OPTIM_FP32_MASTER,
                                              RFT_OPTIM_FP32_MASTER, RFT_OPTIM_REMAINDER};
    size_t way = (size_t)seeded_below(&seed, 6);
    return (scene){.options = any_options(),
                   .gradient = (rft_float_type)seeded_below(&seed, 3),
                   .weights = weights[way],
                   .master = master[way],
                   .step = 1 + (double)seeded_below(&seed, 4),
                   .unscale = by_chance() ? 1 : 1.0f / 3,
                   .clip = by_chance() ? 1 : 0.7f,
                   .count = count,
                   .aside = (size_t)seeded_below(&seed, 64)};
}

TEST(any_step_has_the_bits_of_the_scalar_form)
{
    for (size_t i = 0; i < 4000; i++) {
        at_hand = any_scene(i % 150);
        check();
    }
}

/* As many as the roots of the caller's take several blocks, and as streaming takes; it asks for
 * alignment, too. */
TEST(long_ranges_have_the_bits_of_the_scalar_form)
{
    for (size_t i = 0; i < 200; i++) {
        at_hand = any_scene(MOST - (size_t)seeded_below(&seed, 3000));
        at_hand.aside = by_chance() ? 0 : at_hand.aside % 4;
        check();
    }
}

/* MKL has one thread while roots are taken, and what it had before after that. */
TEST(roots_are_taken_on_one_thread)
{
    for (size_t i = 0; i < 50; i++) {
        at_hand = any_scene(seeded_below(&seed, 5000));
        at_hand.options.root = other_root;
        at_hand.options.root_threads = set_threads_of_root;
        asks_for_threads = true;
        check();
        asks_for_threads = false;
        assert_int_equal(threads_of_root, 3);
    }
}

/* ---- Known answers */

static float adam_once(rft_optim_options options, float gradient, float parameter, float *states)
{
    rft_optim_rule rule = rft_optim_rule_at(&options, 1);
    rft_optim_span span = {.count = 1,
                           .gradient = &gradient,
                           .weights = &parameter,
                           .states = {&states[0], &states[1], &states[2]}};
    rft_optim_step(&rule, &span);
    return parameter;
}

/* What torch.optim.AdamW(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01) makes of it. */
TEST(a_step_of_adamw_is_that_of_pytorch)
{
    float states[3] = {0};
    rft_optim_options options = {.kind = RFT_OPTIM_ADAM,
                                 .lr = 0.1,
                                 .beta1 = 0.9,
                                 .beta2 = 0.999,
                                 .eps = 1e-8,
                                 .weight_decay = 0.01,
                                 .decoupled = true};
    float parameter = adam_once(options, 0.3f, 0.7f, states);
    assert_true(parameter == 0x1.32d774p-1f);
    assert_true(states[0] == 0x1.eb852p-6f);
    assert_true(states[1] == 0x1.797cc6p-14f);
}

/* A product that is not fused would be zero, or lose its last bits. */
TEST(products_are_fused_where_pytorch_fuses_them)
{
    rft_optim_options options = {.kind = RFT_SGD, .lr = 0x1.000002p0};
    float states[3] = {0};
    assert_true(adam_once(options, 0x1.000002p0f, 0x1.000004p0f, states) == -0x1p-46f);
    options = (rft_optim_options){.kind = RFT_LION, .lr = 1, .beta1 = 0x1.000002p0, .beta2 = 1};
    states[0] = 0x1.000002p0f; /* the sum of two products is not fused: the update is zero */
    rft_optim_rule rule = rft_optim_rule_at(&options, 1);
    rule.one_minus_beta1 = -0x1.000004p0f;
    float gradient = 1, parameter = 5;
    rft_optim_span span = {
        .count = 1, .gradient = &gradient, .weights = &parameter, .states = {&states[0]}};
    rft_optim_step(&rule, &span);
    assert_true(parameter == 5);
}

static void expect_split(uint32_t master, uint16_t weight, uint16_t remainder)
{
    float value;
    uint16_t weights[1], remainders[1];
    memcpy(&value, &master, sizeof value);
    rft_optim_split(weights, remainders, &value, 1);
    assert_int_equal(weights[0], weight);
    assert_int_equal(remainders[0], remainder);
}

TEST(remainders_are_those_of_transformer_engine)
{
    expect_split(0x3F800000, 0x3F80, 0x0000); /* 1 */
    expect_split(0x3F807FFF, 0x3F80, 0x7FFF); /* just below the middle */
    expect_split(0x3F808000, 0x3F81, 0x8000); /* the middle goes away from zero, also from even */
    expect_split(0xBF818000, 0xBF82, 0x8000);
    expect_split(0x3FFFFFFF, 0x4000, 0xFFFF); /* into the next exponent */
    expect_split(0x7F7F8000, 0x7F80, 0x8000); /* to infinity, and back */
    expect_split(0x80000000, 0x8000, 0x0000); /* minus zero */
    expect_split(0x80008000, 0x8001, 0x8000);
    expect_split(0x7F800000, 0x7F80, 0x0000);
    expect_split(0x7F800001, 0x7FC0, 0x0000); /* NaNs whose weight would be infinite or zero */
    expect_split(0x7FFFFFFF, 0x7FC0, 0x0000);
    expect_split(0xFFFF8000, 0x7FC0, 0x0000);
}

TEST(states_are_counted)
{
    assert_int_equal(rft_optim_states(&(rft_optim_options){.kind = RFT_OPTIM_ADAM}), 2);
    assert_int_equal(
        rft_optim_states(&(rft_optim_options){.kind = RFT_OPTIM_ADAM, .amsgrad = true}), 3);
    assert_int_equal(rft_optim_states(&(rft_optim_options){.kind = RFT_ADAGRAD}), 1);
    assert_int_equal(rft_optim_states(&(rft_optim_options){.kind = RFT_SGD}), 0);
    assert_int_equal(rft_optim_states(&(rft_optim_options){.kind = RFT_SGD, .momentum = 0.9}), 1);
    assert_int_equal(rft_optim_states(&(rft_optim_options){.kind = RFT_LION}), 1);
}

int main(void)
{
    return test_run("adam");
}
