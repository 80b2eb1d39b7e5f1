/*
 * Each vector form of a sum of squares gives the bits of the scalar one, and any division at blocks
 * the same sums; a sum written out as norm.h says it has those bits, too. What is not finite is
 * seen wherever it stands. The copy is exact and writes nothing beside itself.
 */
#include <math.h>

#include "kernels/cast.h"
#include "kernels/norm.h"
#include "tests/kernels/levels.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define MOST   ((size_t)20000)
#define GUARD  ((size_t)64)
#define BLOCKS (MOST / 4096 + 1)

static _Alignas(64) unsigned char given[4 * MOST + 2 * GUARD], copied[4 * MOST + 2 * GUARD];
static float widened[MOST];
static double expected[BLOCKS], found[BLOCKS];
static rft_norm_span at_hand;
static uint64_t seed = 3;

static void set_element(size_t i, float value)
{
    uint16_t half = 0;
    unsigned char *elements = given + GUARD;
    if (at_hand.type == RFT_FP32) memcpy(elements + 4 * i, &value, sizeof value);
    if (at_hand.type == RFT_BF16) rft_cast_bf16(&half, &value, 1);
    if (at_hand.type == RFT_FP16) rft_floats_to_half(&half, &value, 1);
    if (at_hand.type != RFT_FP32) memcpy(elements + 2 * i, &half, sizeof half);
    widened[i] = value;
    if (at_hand.type == RFT_BF16) rft_floats_from_bf16(&widened[i], &half, 1);
    if (at_hand.type == RFT_FP16) rft_floats_from_half(&widened[i], &half, 1);
}

/* Of either sign and of many exponents, subnormal ones too. */
static float any_value(void)
{
    double size = ldexp(1 + (double)seeded_below(&seed, 1 << 23) / (1 << 23),
                        (int)seeded_below(&seed, 20) - 12);
    uint64_t rare = seeded_below(&seed, 50);
    if (rare == 0) size = 0;
    if (rare == 1) size = 1e-41;
    if (rare == 2) size = 3e38;
    return (float)(seeded_below(&seed, 2) == 0 ? size : -size);
}

static void fill(rft_float_type type, size_t count, float scale)
{
    at_hand =
        (rft_norm_span){.count = count, .gradient = given + GUARD, .type = type, .scale = scale};
    for (size_t i = 0; i < count; i++)
        set_element(i, any_value());
}

/* As norm.h says it. */
static void sum_by_hand(void)
{
    for (size_t block = 0; block < rft_norm_blocks(at_hand.count); block++) {
        double lanes[16] = {0};
        for (size_t i = 4096 * block; i < at_hand.count && i < 4096 * (block + 1); i++) {
            float scaled = widened[i] * at_hand.scale;
            lanes[i % 16] += (double)scaled * (double)scaled;
        }
        double eight[8], four[4];
        for (size_t j = 0; j < 8; j++)
            eight[j] = lanes[j] + lanes[j + 8];
        for (size_t j = 0; j < 4; j++)
            four[j] = eight[j] + eight[j + 4];
        expected[block] = (four[0] + four[2]) + (four[1] + four[3]);
    }
}

static void compare(void)
{
    size_t blocks = rft_norm_blocks(at_hand.count);
    assert_memory_equal(found, expected, blocks * sizeof *found);
}

static void check_level(void)
{
    memset(found, 0xA5, sizeof found);
    rft_norm_sum(&at_hand, found);
    compare();
    if (rft_norm_blocks(at_hand.count) < BLOCKS) { /* no sum beside them */
        unsigned char untouched[sizeof(double)];
        memset(untouched, 0xA5, sizeof untouched);
        assert_memory_equal(found + rft_norm_blocks(at_hand.count), untouched, sizeof untouched);
    }
    size_t width = at_hand.type == RFT_FP32 ? 4 : 2, done = 0;
    while (done < at_hand.count) {
        rft_norm_span part = at_hand;
        size_t left = at_hand.count - done, most = 4096 * (1 + (size_t)seeded_below(&seed, 3));
        part.count = left < most ? left : most;
        part.gradient = (const char *)at_hand.gradient + done * width;
        rft_norm_sum(&part, found + done / 4096);
        done += part.count;
    }
    compare();
}

TEST(every_form_and_division_has_the_same_bits)
{
    static const float scales[] = {1, 1.0f / 65536, 1.0f / 3};
    for (size_t i = 0; i < 300; i++) {
        size_t count = i < 150 ? i : (size_t)seeded_below(&seed, MOST);
        fill((rft_float_type)(i % 3), count, scales[i / 3 % 3]);
        sum_by_hand();
        on_every_level(check_level);
    }
}

static void check_not_finite(void)
{
    double sums[1];
    rft_norm_sum(&at_hand, sums);
    double total = rft_norm_total(sums, 1);
    assert_true(isinf(total) || isnan(total));
}

TEST(what_is_not_finite_is_seen_wherever_it_stands)
{
    const float values[] = {INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < 200; i++) {
        fill((rft_float_type)(i % 3), 200, 1);
        for (size_t j = 0; j < 200; j++) /* fp16 has no numbers of that size */
            if (isinf(widened[j])) set_element(j, 1);
        set_element(i, values[i / 3 % 3]);
        on_every_level(check_not_finite);
    }
}

static void check_large(void)
{
    double sums[1];
    rft_norm_sum(&at_hand, sums);
    assert_true(sums[0] == 0x1p266);
}

TEST(the_largest_numbers_have_a_finite_sum)
{
    fill(RFT_FP32, 4096, 1);
    for (size_t i = 0; i < 4096; i++)
        set_element(i, 0x1p127f);
    on_every_level(check_large);
}

static void check_copy(void)
{
    size_t bytes = at_hand.count * (at_hand.type == RFT_FP32 ? 4 : 2);
    size_t aside = (size_t)seeded_below(&seed, GUARD);
    unsigned char untouched[GUARD];
    memset(untouched, 0x5A, sizeof untouched);
    memset(copied, 0x5A, sizeof copied);
    at_hand.copy = copied + aside;
    rft_norm_sum(&at_hand, found);
    compare();
    assert_memory_equal(copied, untouched, aside);
    assert_memory_equal(copied + aside, at_hand.gradient, bytes);
    assert_memory_equal(copied + aside + bytes, untouched, GUARD);
}

TEST(a_copy_on_the_way_is_exact)
{
    for (size_t i = 0; i < 60; i++) {
        fill((rft_float_type)(i % 3), (size_t)seeded_below(&seed, MOST), 0.5f);
        sum_by_hand();
        on_every_level(check_copy);
    }
}

TEST(blocks_are_added_in_their_order)
{
    const double sums[] = {0x1p53, 1, 1, -0x1p53};
    assert_true(rft_norm_total(sums, 4) == 0);
    assert_true(rft_norm_total(sums + 1, 2) == 2);
    assert_true(rft_norm_total(sums, 0) == 0);
    assert_int_equal(rft_norm_blocks(0), 0);
    assert_int_equal(rft_norm_blocks(1), 1);
    assert_int_equal(rft_norm_blocks(4096), 1);
    assert_int_equal(rft_norm_blocks(4097), 2);
}

int main(void)
{
    return test_run("norm");
}
