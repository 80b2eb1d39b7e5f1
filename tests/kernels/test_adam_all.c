/*
 * What a step does to a parameter besides arithmetic, for all 2^32 patterns of bits and at every
 * level: a master comes back from its weight and its remainder, and 16-bit weights are the rounding
 * of their master that kernels/cast.h and kernels/floats.h give. The step is one of SGD by nothing,
 * which leaves the parameter as it is.
 */
#include "kernels/adam.h"
#include "kernels/cast.h"
#include "kernels/floats.h"
#include "tests/kernels/levels.h"
#include "tests/support/test.h"

#define COUNT ((size_t)1 << 16)

static uint32_t masters[COUNT], expected[COUNT], back[COUNT];
static uint16_t gradient[COUNT]; /* zeros */
static uint16_t weights[COUNT], remainders[COUNT];
static uint16_t stepped_weights[COUNT], stepped_remainders[COUNT], rounded[COUNT], halves[COUNT];

/* cmocka's own looks at each byte. */
static void assert_same(const void *one, const void *other, size_t bytes)
{
    assert_int_equal(memcmp(one, other, bytes), 0);
}

static void step(uint16_t *to, void *beside, rft_float_type type, rft_adam_beside is)
{
    rft_adam_rule rule = rft_adam_rule_at(&(rft_adam_options){.kind = RFT_SGD, .lr = 0}, 1);
    rft_adam_span span = {.count = COUNT,
                          .gradient = gradient,
                          .weights = to,
                          .beside = beside,
                          .gradient_type = RFT_BF16,
                          .weights_type = type,
                          .beside_is = is};
    rft_adam_step(&rule, &span);
}

static bool is_nan(uint32_t bits)
{
    return (bits & 0x7FFFFFFFu) > 0x7F800000u;
}

static void check_remainders(void)
{
    memcpy(stepped_weights, weights, sizeof weights);
    memcpy(stepped_remainders, remainders, sizeof remainders);
    step(stepped_weights, stepped_remainders, RFT_BF16, RFT_ADAM_REMAINDER);
    assert_same(stepped_weights, weights, sizeof weights);
    assert_same(stepped_remainders, remainders, sizeof remainders);
}

/* The scalar form calls what it would be compared with. What a NaN's payload becomes in a master is
 * not said. */
static void check_masters(void)
{
    if (rft_cpu_get_level() == RFT_CPU_BASE) return;
    memcpy(back, masters, sizeof masters);
    step(stepped_weights, back, RFT_BF16, RFT_ADAM_MASTER);
    assert_same(stepped_weights, rounded, sizeof rounded);
    step(stepped_weights, back, RFT_FP16, RFT_ADAM_MASTER);
    assert_same(stepped_weights, halves, sizeof halves);
    for (size_t i = 0; i < COUNT; i++) {
        if (back[i] != masters[i]) assert_true(is_nan(back[i]) && is_nan(masters[i]));
    }
}

/* Nearest, and of two neighbours that are as near the one away from zero. */
static uint32_t nearest(uint32_t master)
{
    return is_nan(master) ? 0x7FC0u : ((master >> 16) + (master >> 15 & 1u)) & 0xFFFFu;
}

static void check_split(void)
{
    rft_adam_split(weights, remainders, (const float *)(const void *)masters, COUNT);
    rft_adam_join((float *)(void *)back, weights, remainders, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        expected[i] = is_nan(masters[i]) ? 0x7FC00000u : masters[i];
        if (weights[i] != nearest(masters[i]))
            fail_msg("0x%08x became 0x%04x", masters[i], weights[i]);
    }
    assert_same(back, expected, sizeof expected);
}

static void every_parameter_stays_as_it_is(void **state)
{
    for (uint64_t first = 0; first < UINT64_C(1) << 32; first += COUNT) {
        for (uint32_t i = 0; i < COUNT; i++)
            masters[i] = (uint32_t)first + i;
        check_split();
        rft_cast_bf16(rounded, (const float *)(const void *)masters, COUNT);
        rft_floats_to_half(halves, (const float *)(const void *)masters, COUNT);
        on_every_level(check_remainders);
        on_every_level(check_masters);
    }
}

static uint32_t stepped_by[COUNT];

static void check_gradients(void)
{
    rft_adam_rule rule = rft_adam_rule_at(&(rft_adam_options){.kind = RFT_SGD, .lr = -1}, 1);
    for (int type = RFT_BF16; type <= RFT_FP16; type++) {
        rft_adam_span span = {.count = COUNT,
                              .gradient = weights,
                              .weights = stepped_by,
                              .gradient_type = (rft_float_type)type};
        for (size_t i = 0; i < COUNT; i++)
            stepped_by[i] = 0x80000000u; /* minus zero: the sum is the gradient */
        rft_adam_step(&rule, &span);
        float *widened = (float *)(void *)expected;
        if (type == RFT_BF16) rft_floats_from_bf16(widened, weights, COUNT);
        if (type == RFT_FP16) rft_floats_from_half(widened, weights, COUNT);
        for (size_t i = 0; i < COUNT; i++) {
            if (stepped_by[i] == expected[i]) continue;
            assert_true(is_nan(stepped_by[i]) && is_nan(expected[i]));
        }
    }
}

static void every_gradient_of_16_bits_is_widened_exactly(void **state)
{
    for (uint32_t i = 0; i < COUNT; i++)
        weights[i] = (uint16_t)i;
    on_every_level(check_gradients);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_gradient_of_16_bits_is_widened_exactly),
        cmocka_unit_test(every_parameter_stays_as_it_is),
    };
    return cmocka_run_group_tests_name("adam_all", tests, NULL, NULL);
}
