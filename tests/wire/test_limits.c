/* Limits: each comes from its own key of the configuration. */
#include "tests/support/unit.h"
#include "wire/message.h"

static void every_limit_has_its_key(void **state)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.limits_tensors = 1;
    config.limits_rank = 2;
    config.limits_name_bytes = 3;
    config.limits_message_bytes = 4;
    config.limits_manifest_bytes = 5;
    config.limits_frame_bytes = 6;
    config.limits_version_bytes = 7;
    config.limits_window = 8;
    config.limits_blocks = 9;
    rft_limits limits = rft_limits_from(&config);
    assert_int_equal(limits.tensors, 1);
    assert_int_equal(limits.rank, 2);
    assert_int_equal(limits.name_bytes, 3);
    assert_int_equal(limits.message_bytes, 4);
    assert_int_equal(limits.manifest_bytes, 5);
    assert_int_equal(limits.frame_bytes, 6);
    assert_int_equal(limits.version_bytes, 7);
    assert_int_equal(limits.blocks, 9);
    assert_int_equal(limits.window, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_limit_has_its_key),
    };
    return cmocka_run_group_tests_name("limits", tests, NULL, NULL);
}
