/* YAML as options: what is taken, and that every refusal names its line, its column and a remedy.
 */
#include <stdio.h>

#include "config/config.h"
#include "config/options.h"
#include "tests/support/test.h"

static refit_config config;
static refit_error error;

static int start(void **state)
{
    refit_config_init(&config, sizeof config);
    memset(&error, 0, sizeof error);
    return 0;
}

static refit_status read_bytes(const char *text, size_t bytes)
{
    return rft_config_read_text("x.yaml", text, bytes, config.size, &config, &error);
}

static void assert_reads(const char *text)
{
    if (read_bytes(text, strlen(text)) != REFIT_OK) fail_msg("%s", error.text);
}

static void assert_refuses(const char *text, const char *sentence)
{
    refit_config_init(&config, sizeof config);
    assert_int_equal(read_bytes(text, strlen(text)), REFIT_ERR_CONFIG);
    if (strstr(error.text, sentence) != error.text) {
        fail_msg("\"%s\" does not begin with \"%s\"", error.text, sentence);
    }
    assert_null(strchr(error.text, '\n'));
}

static void nested_and_dotted_keys_are_taken(void **state)
{
    assert_reads("# a comment\n"
                 "device: host\n"
                 "offload:\n"
                 "  slab_bytes: 64MiB\n"
                 "  numa: 3\n"
                 "broadcast: {window: 4, worker: \"rank 7\"}\n"
                 "limits.workers: 12\n");
    assert_string_equal(config.device, "host");
    assert_int_equal(config.offload_slab_bytes, 64 << 20);
    assert_int_equal(config.offload_numa, 3);
    assert_int_equal(config.broadcast_window, 4);
    assert_string_equal(config.broadcast_worker, "rank 7");
    assert_int_equal(config.limits_workers, 12);
    assert_int_equal(config.origin[0], REFIT_CONFIG_FILE);
    assert_int_equal(config.origin[1], REFIT_CONFIG_DEFAULT);
}

static void nothing_is_a_configuration_too(void **state)
{
    const char *const texts[] = {"", "# nothing\n", "---\n", "---\n...\n", "{}\n", "null\n"};
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        assert_reads(texts[i]);
}

static void empty_text_needs_quotes(void **state)
{
    assert_reads("broadcast: {worker: x}\n");
    assert_reads("broadcast: {worker: ''}\n");
    assert_string_equal(config.broadcast_worker, "");
    assert_refuses("broadcast:\n  worker:\n", "x.yaml:2:10: broadcast.worker has no value");
    assert_refuses("device: ~\n", "x.yaml:1:9: device has no value");
    assert_refuses("device: null\n", "x.yaml:1:9: device has no value");
}

static void unknown_names_come_with_the_nearest(void **state)
{
    assert_refuses("offload:\n  pin: auto\n  slab_byte: 1GiB\n",
                   "x.yaml:3:3: there is no option offload.slab_byte: the nearest is "
                   "offload.slab_bytes");
    assert_refuses("\n  devise: host\n", "x.yaml:2:3: there is no option devise: the nearest is "
                                         "device");
    assert_refuses("brodcast:\n  window: 4\n",
                   "x.yaml:1:1: there is no section brodcast: the nearest is broadcast");
    assert_refuses("offload:\n  deep:\n    deeper: 1\n",
                   "x.yaml:2:3: there is no section offload.deep: the nearest is offload");
    assert_refuses("\"a\\nb\": 1\n", "x.yaml:1:1: there is no option a?b");
}

static void values_out_of_range_come_with_the_range(void **state)
{
    assert_refuses("broadcast:\n  slots: 3\n",
                   "x.yaml:2:10: broadcast.slots cannot be 3: it must be 1 to 2");
    assert_refuses("offload: {slab_bytes: 1GB}\n",
                   "x.yaml:1:23: offload.slab_bytes cannot be \"1GB\": write a whole number of "
                   "bytes");
}

static void duplicates_are_refused(void **state)
{
    assert_refuses("device: host\ndevice: auto\n", "x.yaml:2:1: device is there twice");
    assert_refuses("offload: {batch: 1}\noffload: {pin: off}\n",
                   "x.yaml:2:1: offload is there twice");
    assert_refuses("offload: {batch: 1}\noffload.batch: 2\n",
                   "x.yaml:2:1: offload.batch is there twice");
}

static void sections_and_options_are_not_confused(void **state)
{
    assert_refuses("offload: 5\n", "x.yaml:1:1: offload is a section");
    assert_refuses("device: {kind: host}\n", "x.yaml:1:1: device takes one value, not a mapping");
    assert_refuses("device: [host]\n", "x.yaml:1:9: device takes one value, not a list");
    assert_refuses("- device\n", "x.yaml:1:1: write options as lines of the form key: value");
    assert_refuses("device\n", "x.yaml:1:1: write options as lines of the form key: value");
    assert_refuses("? [a]\n: b\n", "x.yaml:1:3: a key must be a single word");
}

static void what_yaml_offers_beyond_values_is_refused(void **state)
{
    assert_refuses("device: &here host\n", "x.yaml:1:9: an anchor is not taken here");
    assert_refuses("offload: &o {batch: 1}\n", "x.yaml:1:10: an anchor is not taken here");
    assert_refuses("device: *there\n", "x.yaml:1:9: an alias is not taken here");
    assert_refuses("device: !!str host\n", "x.yaml:1:9: a tag is not taken here");
    assert_refuses("offload: !x {batch: 1}\n", "x.yaml:1:10: a tag is not taken here");
    assert_refuses("device: \"ho\\0st\"\n", "x.yaml:1:9: a NUL byte is not taken here");
    assert_refuses("device: host\n---\ndevice: auto\n", "x.yaml:2:1: a second document");
    assert_refuses("include: other.yaml\n", "x.yaml:1:10: there is no file to include");
}

static void broken_yaml_names_its_place(void **state)
{
    assert_refuses("offload:\n\tbatch: 1\n", "x.yaml:2:1: ");
    assert_refuses("device: \"host\n", "x.yaml:2:1: ");
    assert_refuses("{device: host\n", "x.yaml:2:1: ");
    assert_refuses("device: \xff\xfe\n", "x.yaml: byte 8: ");
    assert_refuses("a: b: c\n", "x.yaml:1:");
}

static void depth_and_length_are_bounded(void **state)
{
    char text[5000];
    memset(text, '[', sizeof text);
    assert_int_equal(read_bytes(text, sizeof text), REFIT_ERR_CONFIG);
    for (size_t i = 0; i + 3 <= sizeof text; i += 3)
        memcpy(text + i, "{a:", 3);
    assert_int_equal(read_bytes(text, sizeof text), REFIT_ERR_CONFIG);
    memset(text, 'k', sizeof text);
    memcpy(text + 600, ": 1\n", 4);
    assert_int_equal(read_bytes(text, 604), REFIT_ERR_CONFIG);
}

static void every_option_can_stand_in_a_file(void **state)
{
    char text[16384] = "";
    size_t length = 0;
    for (size_t i = 0; i < rft_option_count; i++) {
        length += (size_t)snprintf(text + length, sizeof text - length, "%s: \"%s\"\n",
                                   rft_options[i].key, rft_options[i].standard);
    }
    assert_reads(text);
    for (size_t i = 0; i < rft_option_count; i++) {
        assert_int_equal(config.origin[i], REFIT_CONFIG_FILE);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(nested_and_dotted_keys_are_taken, start),
        cmocka_unit_test_setup(nothing_is_a_configuration_too, start),
        cmocka_unit_test_setup(empty_text_needs_quotes, start),
        cmocka_unit_test_setup(unknown_names_come_with_the_nearest, start),
        cmocka_unit_test_setup(values_out_of_range_come_with_the_range, start),
        cmocka_unit_test_setup(duplicates_are_refused, start),
        cmocka_unit_test_setup(sections_and_options_are_not_confused, start),
        cmocka_unit_test_setup(what_yaml_offers_beyond_values_is_refused, start),
        cmocka_unit_test_setup(broken_yaml_names_its_place, start),
        cmocka_unit_test_setup(depth_and_length_are_bounded, start),
        cmocka_unit_test_setup(every_option_can_stand_in_a_file, start),
    };
    return cmocka_run_group_tests_name("yaml", tests, NULL, NULL);
}
