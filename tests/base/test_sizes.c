/* Checked arithmetic refuses what would wrap; random bits are not zero and not the same twice. */
#include "base/checked.h"
#include "base/random.h"
#include "tests/support/test.h"

TEST(sums_and_products_that_wrap_are_refused)
{
    uint64_t out = 5;
    assert_true(rft_add_u64(UINT64_MAX - 1, 1, &out));
    assert_int_equal(out, UINT64_MAX);
    assert_false(rft_add_u64(UINT64_MAX, 1, &out));
    assert_true(rft_mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &out));
    assert_false(rft_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &out));
}

TEST(alignment_rounds_up_or_refuses)
{
    uint64_t out = 0;
    assert_true(rft_align_u64(0, 512, &out));
    assert_int_equal(out, 0);
    assert_true(rft_align_u64(1, 512, &out));
    assert_int_equal(out, 512);
    assert_true(rft_align_u64(512, 512, &out));
    assert_int_equal(out, 512);
    assert_false(rft_align_u64(UINT64_MAX - 10, 512, &out));
}

TEST(powers_of_two_are_known)
{
    assert_true(rft_is_power_of_two(1));
    assert_true(rft_is_power_of_two(UINT64_C(1) << 63));
    assert_false(rft_is_power_of_two(0));
    assert_false(rft_is_power_of_two(3));
}

TEST(random_bits_differ_and_are_never_zero)
{
    uint64_t first, second;
    assert_ok(rft_random_u64(&first, NULL));
    assert_ok(rft_random_u64(&second, NULL));
    assert_int_not_equal(first, 0);
    assert_int_not_equal(first, second);
}

int main(void)
{
    return test_run("sizes");
}
