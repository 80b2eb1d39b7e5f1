/* Element types: each has a name and a size, and is found by its name. */
#include <refit/broadcast.h>

#include "tests/support/unit.h"

static void every_type_has_name_and_bits(void **state)
{
#define CHECK_DTYPE(name, number, bits)                                                            \
    do {                                                                                           \
        refit_dtype found;                                                                         \
        assert_string_equal(refit_dtype_name(REFIT_##name), #name);                                \
        assert_int_equal(refit_dtype_bits(REFIT_##name), bits);                                    \
        assert_ok(refit_dtype_parse(#name, &found));                                               \
        assert_int_equal(found, REFIT_##name);                                                     \
        assert_int_equal(found, number);                                                           \
    } while (0);
    REFIT_DTYPE_MAP(CHECK_DTYPE)
#undef CHECK_DTYPE
}

static void unknown_types_are_told(void **state)
{
    refit_dtype found = REFIT_F32;
    assert_null(refit_dtype_name((refit_dtype)0));
    assert_null(refit_dtype_name((refit_dtype)21));
    assert_int_equal(refit_dtype_bits((refit_dtype)0), 0);
    assert_int_equal(refit_dtype_parse("float32", &found), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_dtype_parse("", &found), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_dtype_parse(NULL, &found), REFIT_ERR_INVALID);
    assert_int_equal(refit_dtype_parse("F32", NULL), REFIT_ERR_INVALID);
    assert_int_equal(found, REFIT_F32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_has_name_and_bits),
        cmocka_unit_test(unknown_types_are_told),
    };
    return cmocka_run_group_tests_name("dtype", tests, NULL, NULL);
}
