/* The nearest name: distances are right, whatever the lengths, and the key meant is found. */
#include "config/options.h"
#include "tests/support/test.h"

static size_t distance(const char *a, const char *b)
{
    return rft_edit_distance(a, strlen(a), b, strlen(b));
}

static void distances_count_single_changes(void **state)
{
    assert_int_equal(distance("", ""), 0);
    assert_int_equal(distance("slab", ""), 4);
    assert_int_equal(distance("", "slab"), 4);
    assert_int_equal(distance("slab", "slab"), 0);
    assert_int_equal(distance("slab", "slabs"), 1);
    assert_int_equal(distance("slab", "slob"), 1);
    assert_int_equal(distance("slab", "salb"), 1);
    assert_int_equal(distance("kitten", "sitting"), 3);
    assert_int_equal(distance("ca", "abc"), 3);
}

static void only_the_given_lengths_count(void **state)
{
    assert_int_equal(rft_edit_distance("offload.numa", 7, "offload.pin", 7), 0);
}

static void long_words_are_cut_not_overrun(void **state)
{
    char longer[4000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    assert_int_equal(distance(longer, longer), 0);
    assert_int_equal(distance(longer, ""), 127);
    assert_non_null(rft_nearest_key(longer));
}

static void meant_key_is_found(void **state)
{
    assert_string_equal(rft_nearest_key("offload.slab_byte"), "offload.slab_bytes");
    assert_string_equal(rft_nearest_key("broadcast.endpiont"), "broadcast.endpoint");
    assert_string_equal(rft_nearest_key("Device"), "device");
    assert_string_equal(rft_nearest_key("use_pinned_offload"), "use_pinned_optimizer_offload");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(distances_count_single_changes),
        cmocka_unit_test(only_the_given_lengths_count),
        cmocka_unit_test(long_words_are_cut_not_overrun),
        cmocka_unit_test(meant_key_is_found),
    };
    return cmocka_run_group_tests_name("nearest", tests, NULL, NULL);
}
