/* Statuses: every number has a name and a text, unknown ones too; details are cut, never overrun.
 */
#include "base/error.h"
#include "tests/support/test.h"

static void every_status_has_name_and_text(void **state)
{
#define CHECK_STATUS(name, number, text)                                                           \
    assert_string_equal(refit_status_name(REFIT_##name), #name);                                   \
    assert_string_equal(refit_status_text(REFIT_##name), text);
    REFIT_STATUS_MAP(CHECK_STATUS)
#undef CHECK_STATUS
}

static void unknown_status_is_named(void **state)
{
    assert_string_equal(refit_status_name((refit_status)9999), "ERR_UNKNOWN");
    assert_string_equal(refit_status_text((refit_status)9999), "an unknown status");
}

static void detail_is_cut_and_terminated(void **state)
{
    char longer[600];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    refit_error error;
    assert_int_equal(rft_fail_sub(&error, REFIT_ERR_IO, 5, "%s", longer), REFIT_ERR_IO);
    assert_int_equal(error.status, REFIT_ERR_IO);
    assert_int_equal(error.subsystem, 5);
    assert_int_equal(strlen(error.text), sizeof error.text - 1);
}

static void detail_is_optional(void **state)
{
    assert_int_equal(rft_fail(NULL, REFIT_ERR_STATE, "not read"), REFIT_ERR_STATE);
}

static void error_never_changes_its_size(void **state)
{
    assert_int_equal(sizeof(refit_error), 256);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_status_has_name_and_text), cmocka_unit_test(unknown_status_is_named),
        cmocka_unit_test(detail_is_cut_and_terminated),   cmocka_unit_test(detail_is_optional),
        cmocka_unit_test(error_never_changes_its_size),
    };
    return cmocka_run_group_tests_name("status", tests, NULL, NULL);
}
