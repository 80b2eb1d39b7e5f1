/*
 * What is done with each fp32 by itself, for all 2^32 patterns of bits and at every level: the cast
 * to bf16, what a step of Adam does to a parameter besides arithmetic, and the coding of masters.
 *
 * Called with a pattern of test names ("master*"), it goes through every fp32; without one it takes
 * a sample, by TEST_SEED or a seed of its own, which it prints.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cast.h"
#include "kernels/floats.h"
#include "kernels/master_rules.h"
#include "kernels/optim.h"
#include "tests/kernels/cast_oracle.h"
#include "tests/kernels/levels.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define BLOCK  RFT_MASTER_UNIT
#define SAMPLE 6 /* blocks */

static uint32_t patterns[BLOCK], back[BLOCK];
static uint16_t weights[BLOCK], expected[BLOCK], found[BLOCK];
static bool all;
static uint64_t seed, gone; /* through so many patterns of this test */

/* Often special: a zero, subnormal, huge, infinite or NaN, or next to where rounding changes. */
static uint32_t any_pattern(void)
{
    static const uint32_t highs[] = {0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81,
                                     0x7F7F, 0x7F80, 0x7FBF, 0x7FC0, 0x7FFF};
    static const uint32_t lows[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    uint64_t random = seeded_next(&seed);
    uint32_t bits = (uint32_t)(random >> 20);
    if (random % 8 == 0) bits = (bits & 0x8000FFFFu) | highs[random / 8 % COUNT_OF(highs)] << 16;
    if (random % 3 == 0) bits = (bits & 0xFFFF0000u) | lows[random / 3 % COUNT_OF(lows)];
    return bits;
}

/* Puts the next block into `patterns`, of all there are each `step`th; false: there is none. */
static bool next_block(uint32_t step)
{
    if (gone >= (all ? UINT64_C(1) << 32 : SAMPLE * (uint64_t)step * BLOCK)) return false;
    for (uint32_t i = 0; i < BLOCK; i++)
        patterns[i] = all ? (uint32_t)gone + step * i : any_pattern();
    gone += (uint64_t)step * BLOCK;
    return true;
}

static const float *values(const uint32_t *bits)
{
    return (const float *)(const void *)bits;
}

static bool is_nan(uint32_t bits)
{
    return (bits & 0x7FFFFFFFu) > 0x7F800000u;
}

static int begin(void **state)
{
    gone = 0;
    return 0;
}

/* ---- Cast */

static void check_cast(void)
{
    memset(found, 0, sizeof found);
    rft_cast_bf16(found, values(patterns), BLOCK);
    assert_memory_equal(found, expected, sizeof found);
}

TEST_WITH(cast_rounds_each_float_right, begin, NULL)
{
    while (next_block(7)) {
        for (uint32_t i = 0; i < BLOCK; i++)
            expected[i] = cast_oracle(patterns[i]);
        on_every_level(check_cast);
    }
}

/* ---- Adam: a master comes back from its weight and its remainder, and 16-bit weights are the
 * rounding of their master. The step is one of SGD by nothing, which leaves the parameter. */

static uint16_t remainders[BLOCK], stepped_remainders[BLOCK], halves[BLOCK];

static void step(double rate, const uint16_t *gradient, rft_optim_span span)
{
    rft_optim_rule rule = rft_optim_rule_at(&(rft_optim_options){.kind = RFT_SGD, .lr = rate}, 1);
    span.count = BLOCK;
    span.gradient = gradient;
    rft_optim_step(&rule, &span);
}

static void step_by_nothing(void *master, rft_float_type type, rft_optim_master is)
{
    static const uint16_t zeros[BLOCK];
    step(0, zeros,
         (rft_optim_span){.weights = found,
                          .master = master,
                          .gradient_type = RFT_BF16,
                          .weights_type = type,
                          .master_form = is});
}

/* What a NaN's payload becomes in a master is not said. */
static void check_patterns(const uint32_t *made, const uint32_t *right)
{
    for (size_t i = 0; i < BLOCK; i++) {
        if (made[i] != right[i] && !(is_nan(made[i]) && is_nan(right[i])))
            fail_msg("0x%08x instead of 0x%08x", made[i], right[i]);
    }
}

static void check_parameters(void)
{
    memcpy(found, weights, sizeof found);
    memcpy(stepped_remainders, remainders, sizeof remainders);
    step_by_nothing(stepped_remainders, RFT_BF16, RFT_OPTIM_REMAINDER);
    assert_memory_equal(found, weights, sizeof weights);
    assert_memory_equal(stepped_remainders, remainders, sizeof remainders);
    if (rft_cpu_get_level() == RFT_CPU_BASE) return; /* it calls what it would be compared with */
    memcpy(back, patterns, sizeof back);
    step_by_nothing(back, RFT_BF16, RFT_OPTIM_FP32_MASTER);
    assert_memory_equal(found, expected, sizeof expected);
    step_by_nothing(back, RFT_FP16, RFT_OPTIM_FP32_MASTER);
    assert_memory_equal(found, halves, sizeof halves);
    check_patterns(back, patterns);
}

/* Nearest, and of two neighbours that are as near the one away from zero. */
static uint32_t nearest(uint32_t master)
{
    return is_nan(master) ? 0x7FC0u : ((master >> 16) + (master >> 15 & 1u)) & 0xFFFFu;
}

static void check_split(void)
{
    rft_optim_split(weights, remainders, values(patterns), BLOCK);
    rft_optim_join((float *)(void *)back, weights, remainders, BLOCK);
    for (size_t i = 0; i < BLOCK; i++) {
        if (weights[i] != nearest(patterns[i]))
            fail_msg("0x%08x became 0x%04x", patterns[i], weights[i]);
        if (back[i] != (is_nan(patterns[i]) ? 0x7FC00000u : patterns[i]))
            fail_msg("0x%08x came back as 0x%08x", patterns[i], back[i]);
    }
}

TEST_WITH(optim_leaves_each_parameter_as_it_is, begin, NULL)
{
    while (next_block(1)) {
        check_split();
        rft_cast_bf16(expected, values(patterns), BLOCK);
        rft_floats_to_half(halves, values(patterns), BLOCK);
        on_every_level(check_parameters);
    }
}

static void check_gradients(void)
{
    for (int type = RFT_BF16; type <= RFT_FP16; type++) {
        for (size_t i = 0; i < BLOCK; i++)
            back[i] = 0x80000000u; /* minus zero: the sum is the gradient */
        step(-1, weights, (rft_optim_span){.weights = back, .gradient_type = (rft_float_type)type});
        float *widened = (float *)(void *)patterns;
        if (type == RFT_BF16) rft_floats_from_bf16(widened, weights, BLOCK);
        if (type == RFT_FP16) rft_floats_from_half(widened, weights, BLOCK);
        check_patterns(back, patterns);
    }
}

TEST_WITH(optim_widens_each_gradient_of_16_bits, begin, NULL)
{
    for (uint32_t i = 0; i < BLOCK; i++)
        weights[i] = (uint16_t)i;
    on_every_level(check_gradients);
}

/* ---- Masters: each comes back from its remainder and its weight. Each level writes what the base
 * one does. Of rounded weights, the exceptions are those that can be counted by hand. */

static unsigned char *coded, *expected_code;
static bool compares; /* with what the base level wrote */

static void check_masters(void)
{
    rft_master_result result = {0};
    rft_master_job job = {.master = patterns,
                          .weights = weights,
                          .coded = coded,
                          .result = &result,
                          .elements = BLOCK,
                          .room = RFT_MASTER_ROOM};
    rft_master_split(&job);
    rft_master_list(&job);
    size_t written =
        (size_t)rft_master_bytes(BLOCK, RFT_MASTER_ROOM) - RFT_MASTER_ROOM + result.need;
    if (compares && rft_cpu_get_level() == RFT_CPU_BASE) memcpy(expected_code, coded, written);
    if (compares) assert_memory_equal(coded, expected_code, written);
    job.master = back;
    rft_master_join(&job);
    assert_int_equal(result.found, 0);
    assert_memory_equal(back, patterns, sizeof patterns);
}

static uint64_t count_exceptions(void)
{
    uint64_t exceptions = 0;
    rft_master_entry table[BLOCK / RFT_MASTER_BLOCK];
    memcpy(table, coded, sizeof table);
    for (size_t i = 0; i < COUNT_OF(table); i++)
        exceptions += table[i].exceptions;
    return exceptions;
}

typedef enum way { ROUNDED, CUT, NEXT, RANDOM } way;

/* PyTorch's CPU gives another NaN than its GPU. */
static uint16_t make_weight(way made, uint32_t i)
{
    if (made == CUT) return (uint16_t)(patterns[i] >> 16);
    if (made == NEXT) return (uint16_t)(weights[i] + (i % 3 == 0 ? -1 : 1));
    if (made == RANDOM) return (uint16_t)(seeded_next(&seed) >> 33);
    return weights[i] == 0x7FFF && i % 2 == 0 ? 0x7FC0 : weights[i];
}

/* Each level with all patterns for rounded weights; for others, with which few parts take the wide
 * forms, with one block in 16. */
static uint64_t go_through(way made)
{
    uint64_t exceptions = 0;
    size_t bytes = (size_t)rft_master_bytes(BLOCK, RFT_MASTER_ROOM);
    coded = aligned_alloc(64, bytes);
    expected_code = aligned_alloc(64, bytes);
    assert_true(coded != NULL && expected_code != NULL);
    while (next_block(1)) {
        rft_cast_bf16(weights, values(patterns), BLOCK);
        for (uint32_t i = 0; i < BLOCK; i++)
            weights[i] = make_weight(made, i);
        compares = made == ROUNDED || gone / BLOCK % 16 == 1;
        if (compares) on_every_level(check_masters);
        if (!compares) check_masters();
        exceptions += count_exceptions();
    }
    free(coded);
    free(expected_code);
    return exceptions;
}

/* In the middle above an odd upper half that is not a NaN's; and NaNs, but for those that a weight
 * of 0x7FFF, which the odd ones have, or 0x7FC0, the even ones, gives. */
TEST_WITH(master_comes_back_from_rounded_weights, begin, NULL)
{
    const uint64_t middles = (65536 - 256) / 2, nans = 2 * ((UINT64_C(1) << 23) - 1);
    const uint64_t upper_7fff = 16384, upper_7ffe = 16384; /* odd, <= 0x8000; odd, > 0x8000 */
    const uint64_t upper_7fc0 = 16385, upper_7fbf = 16383; /* even */
    uint64_t exceptions = go_through(ROUNDED);
    uint64_t given = upper_7fff + upper_7ffe + upper_7fc0 + upper_7fbf;
    if (all) assert_int_equal(exceptions, middles + nans - given);
}

TEST_WITH(master_comes_back_from_weights_that_were_cut_off, begin, NULL)
{
    uint64_t exceptions = go_through(CUT);
    if (all) assert_int_equal(exceptions, UINT64_C(65536) * 32767);
}

TEST_WITH(master_comes_back_from_weights_next_to_the_rounding, begin, NULL)
{
    uint64_t exceptions = go_through(NEXT);
    if (all) assert_true(exceptions > UINT64_C(4200000000));
}

TEST_WITH(master_comes_back_from_random_weights, begin, NULL)
{
    uint64_t exceptions = go_through(RANDOM);
    if (all) assert_true(exceptions > UINT64_C(4200000000));
}

int main(int count, char **words)
{
    const char *given = getenv("TEST_SEED");
    seed = given != NULL ? strtoull(given, NULL, 10) : 1 + (uint64_t)time(NULL);
    all = count > 1;
    if (all) test_filter(words[1]);
    if (!all) print_message("a sample by TEST_SEED=%" PRIu64 "\n", seed);
    return test_run("floats");
}
