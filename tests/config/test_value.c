/* Values as text: what is read, what is refused, and that printing reads back as the same value. */
#include <stdio.h>

#include "config/options.h"
#include "tests/support/test.h"

static refit_config config;

static int start(void **state)
{
    refit_config_init(&config, sizeof config);
    return 0;
}

static void assert_reads(const char *key, const char *text, const char *printed)
{
    refit_error error;
    char back[RFT_VALUE_TEXT];
    const rft_option *option = rft_option_find(key);
    if (rft_option_parse(option, text, &config, &error) != REFIT_OK) fail_msg("%s", error.text);
    rft_option_print(option, &config, back);
    assert_string_equal(back, printed);
    assert_ok(rft_option_parse(option, back, &config, &error));
}

static void assert_refuses(const char *key, const char *text, const char *part)
{
    refit_error error;
    refit_config before = config;
    assert_int_equal(rft_option_parse(rft_option_find(key), text, &config, &error),
                     REFIT_ERR_CONFIG);
    assert_says(&error, part);
    assert_memory_equal(&config, &before, sizeof config);
}

TEST_WITH(sizes_take_binary_units, start, NULL)
{
    const char *key = "offload.budget_bytes";
    assert_reads(key, "0", "0");
    assert_reads(key, "1023", "1023");
    assert_reads(key, "1024", "1KiB");
    assert_reads(key, "1536KiB", "1536KiB");
    assert_reads(key, "2048MiB", "2GiB");
    assert_reads(key, "1024TiB", "1024TiB");
    assert_int_equal(config.offload_budget_bytes, (uint64_t)1 << 50);
    const char *const wrong[] = {"",       "1GB",  "1 GiB", "1gib", "-1",  "+1",
                                 "1.5GiB", "0x10", " 1",    "1 ",   "GiB", "99999999999999999999"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        assert_refuses(key, wrong[i], "such as 512MiB");
    assert_refuses(key, "18446744073709551615TiB", "such as 512MiB");
    assert_refuses(key, "1025TiB", "it must be 0 to 1024TiB");
}

TEST_WITH(times_take_ms_s_and_min, start, NULL)
{
    const char *key = "broadcast.stage_timeout_ms";
    assert_reads(key, "250", "250ms");
    assert_reads(key, "1500ms", "1500ms");
    assert_reads(key, "90s", "90s");
    assert_reads(key, "120s", "2min");
    assert_int_equal(config.broadcast_stage_timeout_ms, 120000);
    assert_refuses(key, "1h", "such as 30s");
    assert_refuses(key, "0", "1ms to 1440min");
    assert_refuses(key, "4294967297ms", "1ms to 1440min");
    assert_reads("broadcast.linger_ms", "0s", "0");
}

TEST_WITH(counts_are_whole_numbers, start, NULL)
{
    assert_reads("offload.batch", "65536", "65536");
    assert_reads("offload.batch", "0064", "64");
    assert_refuses("offload.batch", "65537", "1 to 65536");
    assert_refuses("offload.batch", "4294967297", "1 to 65536");
    assert_refuses("offload.batch", "1e3", "whole number");
    assert_refuses("offload.batch", "-1", "whole number");
}

TEST_WITH(shares_have_up_to_nine_decimals, start, NULL)
{
    const char *key = "offload.budget_share";
    assert_reads(key, "1", "1");
    assert_reads(key, "1.000", "1");
    assert_reads(key, "0.5", "0.5");
    assert_true(config.offload_budget_share > 0.4999 && config.offload_budget_share < 0.5001);
    assert_reads(key, "0.123456789", "0.123456789");
    assert_refuses(key, "0", "0.001 to 1");
    assert_refuses(key, "1.1", "0.001 to 1");
    const char *const wrong[] = {"99999999999999999", "0.1234567891", "0,8", ".8", "1.", "nan"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        assert_refuses(key, wrong[i], "such as 0.8");
}

TEST_WITH(every_share_survives_being_printed, start, NULL)
{
    for (unsigned part = 1; part < 1000; part++) {
        char text[16];
        (void)snprintf(text, sizeof text, "0.%03u", part);
        size_t end = strlen(text);
        while (text[end - 1] == '0')
            text[--end] = '\0';
        assert_reads("offload.budget_share", text, text);
    }
}

TEST_WITH(choices_are_those_of_the_unit, start, NULL)
{
    const struct {
        const char *key, *text;
        const int *value;
        int expected;
    } choices[] = {
        {"offload.pin", "require", &config.offload_pin, REFIT_PIN_REQUIRE},
        {"offload.pin", "off", &config.offload_pin, REFIT_PIN_OFF},
        {"offload.huge_pages", "never", &config.offload_huge_pages, REFIT_HUGE_PAGES_NEVER},
        {"offload.numa", "off", &config.offload_numa, REFIT_NUMA_OFF},
        {"offload.numa", "interleave", &config.offload_numa, REFIT_NUMA_INTERLEAVE},
        {"offload.numa", "auto", &config.offload_numa, REFIT_NUMA_AUTO},
        {"offload.numa", "0", &config.offload_numa, 0},
        {"offload.numa", "1023", &config.offload_numa, 1023},
        {"broadcast.shm", "off", &config.broadcast_shm, REFIT_SHM_OFF},
        {"broadcast.commit", "quorum", &config.broadcast_commit, REFIT_COMMIT_QUORUM},
        {"broadcast.verify", "always", &config.broadcast_verify, REFIT_VERIFY_ALWAYS},
    };
    for (size_t i = 0; i < COUNT_OF(choices); i++) {
        assert_reads(choices[i].key, choices[i].text, choices[i].text);
        assert_int_equal(*choices[i].value, choices[i].expected);
    }
    const char *const wrong[] = {"", "Auto", "auto|require", "req", "requires", "|", "1"};
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        assert_refuses("offload.pin", wrong[i], "write one of auto|require|prefer|off");
    assert_refuses("offload.numa", "1024", "auto|off|interleave|N");
    assert_refuses("offload.numa", "-1", "auto|off|interleave|N");
    assert_refuses("offload.numa", "18446744073709551615", "auto|off|interleave|N");
}

TEST_WITH(flags_are_true_or_false, start, NULL)
{
    assert_reads("offload.verify", "true", "true");
    assert_int_equal(config.offload_verify, 1);
    assert_reads("offload.verify", "false", "false");
    assert_refuses("offload.verify", "yes", "true or false");
    assert_refuses("offload.verify", "1", "true or false");
    assert_refuses("offload.verify", "", "true or false");
}

TEST_WITH(texts_fill_their_field_and_no_more, start, NULL)
{
    char text[65];
    memset(text, 'x', sizeof text);
    text[63] = '\0';
    assert_reads("device", text, text);
    text[63] = 'x';
    text[64] = '\0';
    assert_refuses("device", text, "device has 64 bytes: it can hold at most 63");
    assert_reads("broadcast.worker", "", "");
    assert_refuses("device", "ho\nst", "control character (byte 3)");
}

int main(void)
{
    return test_run("value");
}
