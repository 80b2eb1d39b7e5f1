/* Statuses: every number has a name and a text, unknown ones too; details are cut to fit. */
#include "base/error.h"
#include "tests/support/test.h"

TEST(every_status_has_name_and_text)
{
#define CHECK_STATUS(name, number, text)                                                           \
    assert_string_equal(refit_status_name(REFIT_##name), #name);                                   \
    assert_string_equal(refit_status_text(REFIT_##name), text);
    REFIT_STATUS_MAP(CHECK_STATUS)
#undef CHECK_STATUS
}

TEST(unknown_status_is_named)
{
    assert_string_equal(refit_status_name((refit_status)9999), "ERR_UNKNOWN");
    assert_string_equal(refit_status_text((refit_status)9999), "an unknown status");
}

TEST(detail_is_cut_and_terminated)
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

TEST(detail_is_optional)
{
    assert_int_equal(rft_fail(NULL, REFIT_ERR_STATE, "not read"), REFIT_ERR_STATE);
}

TEST(error_never_changes_its_size)
{
    assert_int_equal(sizeof(refit_error), 256);
}

int main(void)
{
    return test_run("status");
}
