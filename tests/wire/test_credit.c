/* What a frame takes of its credit. */
#include "tests/support/unit.h"
#include "wire/frame.h"

static void a_whole_frame_takes_a_whole_credit(void **state)
{
    assert_int_equal(rft_credit_cost(2097152, 2097152), RFT_CREDIT);
    assert_int_equal(rft_credit_cost(UINT64_MAX, 2097152), RFT_CREDIT);
    assert_int_equal(rft_credit_cost(1, 1), RFT_CREDIT);
}

static void less_takes_its_share_rounded_up(void **state)
{
    assert_int_equal(rft_credit_cost(2097151, 2097152), RFT_CREDIT);
    assert_int_equal(rft_credit_cost(131072, 2097152), 1);
    assert_int_equal(rft_credit_cost(131073, 2097152), 2);
    assert_int_equal(rft_credit_cost(1048576, 2097152), RFT_CREDIT / 2);
    assert_int_equal(rft_credit_cost(16, 17), 8);
}

static void nothing_takes_a_part_as_well(void **state)
{
    assert_int_equal(rft_credit_cost(0, 2097152), 1);
    assert_int_equal(rft_credit_cost(0, 1), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_frame_takes_a_whole_credit),
        cmocka_unit_test(less_takes_its_share_rounded_up),
        cmocka_unit_test(nothing_takes_a_part_as_well),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
