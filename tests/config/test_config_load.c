/* Files, their includes and the environment: each over the one before, all or nothing. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/config.h"
#include "config/options.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/file_tree.h"
#include "tests/support/test.h"

static file_tree tree;
static refit_config config;
static refit_error error;

static const char *in_folder(const char *name)
{
    static char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", tree.root, name);
    return path;
}

static void put(const char *path, const char *text)
{
    file_tree_write(&tree, path, text);
}

static int start(void **state)
{
    refit_config_init(&config, sizeof config);
    memset(&error, 0, sizeof error);
    tree = file_tree_open();
    return 0;
}

static int clean(void **state)
{
    file_tree_close(&tree);
    return 0;
}

static void assert_load_fails(const char *name, refit_status status, const char *part)
{
    refit_config before = config;
    assert_int_equal(refit_config_load(&config, in_folder(name), &error), status);
    assert_says(&error, part);
    assert_memory_equal(&config, &before, sizeof config);
}

TEST_WITH(file_goes_over_defaults, start, clean)
{
    put("/a.yaml", "offload: {batch: 3}\n");
    assert_ok(refit_config_load(&config, in_folder("a.yaml"), &error));
    assert_int_equal(config.offload_batch, 3);
    assert_int_equal(config.broadcast_window, 8);
}

TEST_WITH(included_file_goes_below, start, clean)
{
    put("/sub/base.yaml", "include: deeper.yaml\noffload: {batch: 1, copy_threads: 1}\n");
    put("/sub/deeper.yaml", "offload: {batch: 9, copy_threads: 9, touch_threads: 9}\n");
    put("/top.yaml", "include: sub/base.yaml\noffload: {batch: 2}\n");
    assert_ok(refit_config_load(&config, in_folder("top.yaml"), &error));
    assert_int_equal(config.offload_batch, 2);
    assert_int_equal(config.offload_copy_threads, 1);
    assert_int_equal(config.offload_touch_threads, 9);
}

TEST_WITH(same_file_may_be_included_by_absolute_path, start, clean)
{
    char text[256];
    put("/base.yaml", "offload: {batch: 4}\n");
    (void)snprintf(text, sizeof text, "include: %s/base.yaml\n", tree.root);
    put("/top.yaml", text);
    assert_ok(refit_config_load(&config, in_folder("top.yaml"), &error));
    assert_int_equal(config.offload_batch, 4);
}

TEST_WITH(circle_of_includes_is_refused, start, clean)
{
    put("/self.yaml", "include: self.yaml\n");
    assert_load_fails("self.yaml", REFIT_ERR_CONFIG, "includes itself: break the circle");
    put("/a.yaml", "include: b.yaml\n");
    put("/b.yaml", "include: ./link.yaml\n");
    assert_int_equal(symlink("a.yaml", in_folder("link.yaml")), 0);
    assert_load_fails("a.yaml", REFIT_ERR_CONFIG, "includes itself: break the circle");
}

static void write_chain(int files)
{
    for (int i = 0; i < files; i++) {
        char name[32], text[64];
        (void)snprintf(name, sizeof name, "/%d.yaml", i);
        (void)snprintf(text, sizeof text, "include: %d.yaml\n", i + 1);
        put(name, i + 1 < files ? text : "offload: {batch: 8}\n");
    }
}

TEST_WITH(chain_of_includes_is_bounded, start, clean)
{
    write_chain(9);
    assert_load_fails("0.yaml", REFIT_ERR_CONFIG, "at most 8");
    write_chain(8);
    assert_ok(refit_config_load(&config, in_folder("0.yaml"), &error));
    assert_int_equal(config.offload_batch, 8);
}

TEST_WITH(include_comes_first_and_once, start, clean)
{
    put("/base.yaml", "offload: {batch: 77}\n");
    put("/top.yaml", "device: host\ninclude: base.yaml\n");
    assert_load_fails("top.yaml", REFIT_ERR_CONFIG, "top.yaml:2:1: include comes first");
    put("/top.yaml", "include: base.yaml\ninclude: base.yaml\n");
    assert_load_fails("top.yaml", REFIT_ERR_CONFIG, "top.yaml:2:1: include comes first");
}

TEST_WITH(failure_in_an_included_file_names_its_place, start, clean)
{
    put("/base.yaml", "offload:\n  batch: none\n");
    put("/top.yaml", "include: base.yaml\noffload: {batch: 2}\n");
    assert_load_fails("top.yaml", REFIT_ERR_CONFIG,
                      "base.yaml:2:10: offload.batch cannot be \"none\"");
    put("/top.yaml", "include: missing.yaml\n");
    assert_load_fails("top.yaml", REFIT_ERR_IO, "top.yaml:1:10: cannot open ");
}

TEST_WITH(file_that_cannot_be_read_is_an_io_error, start, clean)
{
    assert_load_fails("missing.yaml", REFIT_ERR_IO, "No such file or directory");
    assert_int_equal(error.subsystem, ENOENT);
    assert_invalid(refit_config_load(&config, NULL, &error));
    assert_invalid(refit_config_load(&config, "", &error));
    assert_invalid(refit_config_load(NULL, "x", &error));
}

TEST_WITH(what_is_no_regular_file_is_refused_without_waiting, start, clean)
{
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    assert_load_fails("fifo", REFIT_ERR_CONFIG, "fifo is not a regular file");
    assert_load_fails("", REFIT_ERR_CONFIG, "is not a regular file");
}

TEST_WITH(huge_file_is_refused, start, clean)
{
    static char text[300001];
    memset(text, '#', sizeof text - 1);
    put("/huge.yaml", text);
    assert_load_fails("huge.yaml", REFIT_ERR_CONFIG, "is longer than 262144 bytes");
}

TEST_WITH(late_mistake_undoes_the_whole_file, start, clean)
{
    put("/a.yaml", "device: host\noffload: {batch: 3}\nbroadcast: {window: 0}\n");
    assert_load_fails("a.yaml", REFIT_ERR_CONFIG, "broadcast.window cannot be 0");
}

TEST_WITH(failed_allocation_is_an_error, start, clean)
{
    put("/base.yaml", "offload: {batch: 3}\n");
    put("/a.yaml", "include: base.yaml\n");
    const char *path = in_folder("a.yaml");
    for (uint64_t nth = 1;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = refit_config_load(&config, path, &error);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_int_equal(config.offload_batch, 3);
}

TEST_WITH(environment_goes_over_the_file, start, clean)
{
    put("/a.yaml", "offload: {batch: 3, copy_threads: 3}\n");
    assert_ok(refit_config_load(&config, in_folder("a.yaml"), &error));
    assert_int_equal(setenv("REFIT_OFFLOAD_BATCH", "5", 1), 0);
    assert_int_equal(setenv("REFITTING", "not ours", 1), 0);
    refit_status status = refit_config_load_env(&config, &error);
    unsetenv("REFIT_OFFLOAD_BATCH");
    unsetenv("REFITTING");
    assert_ok(status);
    assert_int_equal(config.offload_batch, 5);
    assert_int_equal(config.offload_copy_threads, 3);
    const rft_option *option = rft_option_find("offload.batch");
    assert_int_equal(config.origin[option - rft_options], REFIT_CONFIG_ENVIRONMENT);
}

static void assert_variable_fails(const char *name, const char *value, const char *part)
{
    refit_config before = config;
    assert_int_equal(setenv(name, value, 1), 0);
    refit_status status = refit_config_load_env(&config, &error);
    unsetenv(name);
    assert_int_equal(status, REFIT_ERR_CONFIG);
    assert_says(&error, part);
    assert_memory_equal(&config, &before, sizeof config);
}

TEST_WITH(wrong_variables_are_refused, start, clean)
{
    assert_variable_fails("REFIT_OFFLOAD_SLAB_BYTE", "1GiB",
                          "REFIT_OFFLOAD_SLAB_BYTE names no option: the nearest is "
                          "REFIT_OFFLOAD_SLAB_BYTES");
    assert_variable_fails("REFIT_OFFLOAD_BATCH", "many",
                          "environment: REFIT_OFFLOAD_BATCH: offload.batch cannot be \"many\"");
    assert_variable_fails("REFIT_OFFLOAD_BATCH_", "1", "names no option");
    assert_variable_fails("REFIT_", "1", "names no option");
    assert_variable_fails("REFIT_BROADCAST_WORKER", "rank\xff",
                          "environment: REFIT_BROADCAST_WORKER: broadcast.worker has a control "
                          "character (byte 5), or is not UTF-8 there");
    assert_variable_fails("REFIT_SECURITY_KEY", "a\tb", "security.key has a control character");
    assert_variable_fails("REFIT_offload_batch", "1", "names no option");
}

TEST_WITH(variable_of_the_python_package_is_no_option, start, clean)
{
    refit_config before = config;
    assert_int_equal(setenv("REFIT_LIBRARY", "/opt/librefit.so", 1), 0);
    refit_status status = refit_config_load_env(&config, &error);
    unsetenv("REFIT_LIBRARY");
    assert_ok(status);
    assert_memory_equal(&config, &before, sizeof config);
    assert_variable_fails("REFIT_LIBRARY_", "1", "names no option");
}

/* REFIT_ and the key in capitals, made here by other means. */
TEST_WITH(every_option_has_its_variable, start, clean)
{
    for (size_t i = 0; i < rft_option_count; i++) {
        char name[128] = "REFIT_";
        size_t length = strlen(name);
        for (const char *key = rft_options[i].key; *key != '\0'; key++) {
            const char *at = strchr("a.bcdefghijklmnopqrstuvwxyz_", *key);
            assert_non_null(at);
            name[length++] = "A_BCDEFGHIJKLMNOPQRSTUVWXYZ_"[at - "a.bcdefghijklmnopqrstuvwxyz_"];
        }
        name[length] = '\0';
        refit_config_init(&config, sizeof config);
        assert_int_equal(setenv(name, rft_options[i].standard, 1), 0);
        refit_status status = refit_config_load_env(&config, &error);
        unsetenv(name);
        if (status != REFIT_OK) fail_msg("%s", error.text);
        assert_int_equal(config.origin[i], REFIT_CONFIG_ENVIRONMENT);
    }
}

TEST_WITH(examples_can_be_loaded, start, clean)
{
    const char *const files[] = {"configs/refit.yaml", "configs/grpo.yaml", "configs/ppo.yaml"};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        refit_config_init(&config, sizeof config);
        if (refit_config_load(&config, files[i], &error) != REFIT_OK) fail_msg("%s", error.text);
        if (refit_config_check(&config, &error) != REFIT_OK) fail_msg("%s", error.text);
        for (size_t k = 0; k < rft_option_count; k++)
            assert_int_equal(config.origin[k], REFIT_CONFIG_FILE);
    }
}

/* ---- YAML as options: what is taken; every refusal names its line, column and a remedy */

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

TEST_WITH(nested_and_dotted_keys_are_taken, start, NULL)
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

TEST_WITH(nothing_is_a_configuration_too, start, NULL)
{
    const char *const texts[] = {"", "# nothing\n", "---\n", "---\n...\n", "{}\n", "null\n"};
    for (size_t i = 0; i < COUNT_OF(texts); i++)
        assert_reads(texts[i]);
}

TEST_WITH(empty_text_needs_quotes, start, NULL)
{
    assert_reads("broadcast: {worker: x}\n");
    assert_reads("broadcast: {worker: ''}\n");
    assert_string_equal(config.broadcast_worker, "");
    assert_refuses("broadcast:\n  worker:\n", "x.yaml:2:10: broadcast.worker has no value");
    assert_refuses("device: ~\n", "x.yaml:1:9: device has no value");
    assert_refuses("device: null\n", "x.yaml:1:9: device has no value");
}

TEST_WITH(unknown_names_come_with_the_nearest, start, NULL)
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

TEST_WITH(values_out_of_range_come_with_the_range, start, NULL)
{
    assert_refuses("broadcast:\n  slots: 3\n",
                   "x.yaml:2:10: broadcast.slots cannot be 3: it must be 1 to 2");
    assert_refuses("offload: {slab_bytes: 1GB}\n",
                   "x.yaml:1:23: offload.slab_bytes cannot be \"1GB\": write a whole number of "
                   "bytes");
}

TEST_WITH(duplicates_are_refused, start, NULL)
{
    assert_refuses("device: host\ndevice: auto\n", "x.yaml:2:1: device is there twice");
    assert_refuses("offload: {batch: 1}\noffload: {pin: off}\n",
                   "x.yaml:2:1: offload is there twice");
    assert_refuses("offload: {batch: 1}\noffload.batch: 2\n",
                   "x.yaml:2:1: offload.batch is there twice");
}

TEST_WITH(sections_and_options_are_not_confused, start, NULL)
{
    assert_refuses("offload: 5\n", "x.yaml:1:1: offload is a section");
    assert_refuses("device: {kind: host}\n", "x.yaml:1:1: device takes one value, not a mapping");
    assert_refuses("device: [host]\n", "x.yaml:1:9: device takes one value, not a list");
    assert_refuses("- device\n", "x.yaml:1:1: write options as lines of the form key: value");
    assert_refuses("device\n", "x.yaml:1:1: write options as lines of the form key: value");
    assert_refuses("? [a]\n: b\n", "x.yaml:1:3: a key must be a single word");
}

TEST_WITH(what_yaml_offers_beyond_values_is_refused, start, NULL)
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

TEST_WITH(broken_yaml_names_its_place, start, NULL)
{
    assert_refuses("offload:\n\tbatch: 1\n", "x.yaml:2:1: ");
    assert_refuses("device: \"host\n", "x.yaml:2:1: ");
    assert_refuses("{device: host\n", "x.yaml:2:1: ");
    assert_refuses("device: \xff\xfe\n", "x.yaml: byte 8: ");
    assert_refuses("a: b: c\n", "x.yaml:1:");
}

TEST_WITH(depth_and_length_are_bounded, start, NULL)
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

TEST_WITH(every_option_can_stand_in_a_file, start, NULL)
{
    char text[16384] = "";
    size_t length = 0;
    for (size_t i = 0; i < rft_option_count; i++) {
        length += (size_t)snprintf(text + length, sizeof text - length, "%s: \"%s\"\n",
                                   rft_options[i].key, rft_options[i].standard);
    }
    assert_reads(text);
    for (size_t i = 0; i < rft_option_count; i++)
        assert_int_equal(config.origin[i], REFIT_CONFIG_FILE);
}

int main(void)
{
    return test_run("config_load");
}
