/* Files, their includes and the environment: each over the one before, all or nothing. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/options.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"

static char folder[64];
static refit_config config;
static refit_error error;

static const char *in_folder(const char *name)
{
    static char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const char *text)
{
    FILE *file = fopen(in_folder(name), "w");
    assert_non_null(file);
    assert_int_equal(fputs(text, file) >= 0, 1);
    assert_int_equal(fclose(file), 0);
}

static int start(void **state)
{
    refit_config_init(&config, sizeof config);
    memset(&error, 0, sizeof error);
    (void)snprintf(folder, sizeof folder, "/tmp/refit-config-XXXXXX");
    return mkdtemp(folder) == NULL;
}

static int clean(void **state)
{
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

static void assert_load_fails(const char *name, refit_status status, const char *part)
{
    refit_config before = config;
    assert_int_equal(refit_config_load(&config, in_folder(name), &error), status);
    if (strstr(error.text, part) == NULL) fail_msg("\"%s\" lacks \"%s\"", error.text, part);
    assert_memory_equal(&config, &before, sizeof config);
}

static void file_goes_over_defaults(void **state)
{
    write_file("a.yaml", "offload: {batch: 3}\n");
    assert_ok(refit_config_load(&config, in_folder("a.yaml"), &error));
    assert_int_equal(config.offload_batch, 3);
    assert_int_equal(config.broadcast_window, 8);
}

static void included_file_goes_below(void **state)
{
    assert_int_equal(mkdir(in_folder("sub"), 0700), 0);
    write_file("sub/base.yaml", "include: deeper.yaml\noffload: {batch: 1, copy_threads: 1}\n");
    write_file("sub/deeper.yaml", "offload: {batch: 9, copy_threads: 9, touch_threads: 9}\n");
    write_file("top.yaml", "include: sub/base.yaml\noffload: {batch: 2}\n");
    assert_ok(refit_config_load(&config, in_folder("top.yaml"), &error));
    assert_int_equal(config.offload_batch, 2);
    assert_int_equal(config.offload_copy_threads, 1);
    assert_int_equal(config.offload_touch_threads, 9);
}

static void same_file_may_be_included_by_absolute_path(void **state)
{
    char text[256];
    write_file("base.yaml", "offload: {batch: 4}\n");
    (void)snprintf(text, sizeof text, "include: %s/base.yaml\n", folder);
    write_file("top.yaml", text);
    assert_ok(refit_config_load(&config, in_folder("top.yaml"), &error));
    assert_int_equal(config.offload_batch, 4);
}

static void circle_of_includes_is_refused(void **state)
{
    write_file("self.yaml", "include: self.yaml\n");
    assert_load_fails("self.yaml", REFIT_ERR_CONFIG, "includes itself: break the circle");
    write_file("a.yaml", "include: b.yaml\n");
    write_file("b.yaml", "include: ./link.yaml\n");
    assert_int_equal(symlink("a.yaml", in_folder("link.yaml")), 0);
    assert_load_fails("a.yaml", REFIT_ERR_CONFIG, "includes itself: break the circle");
}

static void write_chain(int files)
{
    for (int i = 0; i < files; i++) {
        char name[32], text[64];
        (void)snprintf(name, sizeof name, "%d.yaml", i);
        (void)snprintf(text, sizeof text, "include: %d.yaml\n", i + 1);
        write_file(name, i + 1 < files ? text : "offload: {batch: 8}\n");
    }
}

static void chain_of_includes_is_bounded(void **state)
{
    write_chain(9);
    assert_load_fails("0.yaml", REFIT_ERR_CONFIG, "at most 8");
    write_chain(8);
    assert_ok(refit_config_load(&config, in_folder("0.yaml"), &error));
    assert_int_equal(config.offload_batch, 8);
}

static void include_comes_first_and_once(void **state)
{
    write_file("base.yaml", "offload: {batch: 77}\n");
    write_file("top.yaml", "device: host\ninclude: base.yaml\n");
    assert_load_fails("top.yaml", REFIT_ERR_CONFIG, "top.yaml:2:1: include comes first");
    write_file("top.yaml", "include: base.yaml\ninclude: base.yaml\n");
    assert_load_fails("top.yaml", REFIT_ERR_CONFIG, "top.yaml:2:1: include comes first");
}

static void failure_in_an_included_file_names_its_place(void **state)
{
    write_file("base.yaml", "offload:\n  batch: none\n");
    write_file("top.yaml", "include: base.yaml\noffload: {batch: 2}\n");
    assert_load_fails("top.yaml", REFIT_ERR_CONFIG,
                      "base.yaml:2:10: offload.batch cannot be \"none\"");
    write_file("top.yaml", "include: missing.yaml\n");
    assert_load_fails("top.yaml", REFIT_ERR_IO, "top.yaml:1:10: cannot open ");
}

static void file_that_cannot_be_read_is_an_io_error(void **state)
{
    assert_load_fails("missing.yaml", REFIT_ERR_IO, "No such file or directory");
    assert_int_equal(error.subsystem, ENOENT);
    assert_invalid(refit_config_load(&config, NULL, &error));
    assert_invalid(refit_config_load(&config, "", &error));
    assert_invalid(refit_config_load(NULL, "x", &error));
}

static void what_is_no_regular_file_is_refused_without_waiting(void **state)
{
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    assert_load_fails("fifo", REFIT_ERR_CONFIG, "fifo is no regular file");
    assert_load_fails("", REFIT_ERR_CONFIG, "is no regular file");
    assert_int_equal(unlink(in_folder("fifo")), 0);
}

static void huge_file_is_refused(void **state)
{
    FILE *file = fopen(in_folder("huge.yaml"), "w");
    assert_non_null(file);
    for (int line = 0; line < 30000; line++)
        fputs("# padding\n", file);
    assert_int_equal(fclose(file), 0);
    assert_load_fails("huge.yaml", REFIT_ERR_CONFIG, "is longer than 262144 bytes");
}

static void late_mistake_undoes_the_whole_file(void **state)
{
    write_file("a.yaml", "device: host\noffload: {batch: 3}\nbroadcast: {window: 0}\n");
    assert_load_fails("a.yaml", REFIT_ERR_CONFIG, "broadcast.window cannot be 0");
}

static void failed_allocation_is_an_error(void **state)
{
    write_file("base.yaml", "offload: {batch: 3}\n");
    write_file("a.yaml", "include: base.yaml\n");
    const char *path = in_folder("a.yaml");
    for (uint64_t nth = 1;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = refit_config_load(&config, path, &error);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_int_equal(config.offload_batch, 3);
}

static void environment_goes_over_the_file(void **state)
{
    write_file("a.yaml", "offload: {batch: 3, copy_threads: 3}\n");
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
    if (strstr(error.text, part) == NULL) fail_msg("\"%s\" lacks \"%s\"", error.text, part);
    assert_memory_equal(&config, &before, sizeof config);
}

static void wrong_variables_are_refused(void **state)
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
                          "character (byte 5), or is no UTF-8 there");
    assert_variable_fails("REFIT_SECURITY_KEY", "a\tb", "security.key has a control character");
    assert_variable_fails("REFIT_offload_batch", "1", "names no option");
}

static void variable_of_the_python_package_is_no_option(void **state)
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
static void every_option_has_its_variable(void **state)
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

static void examples_can_be_loaded(void **state)
{
    const char *const files[] = {"configs/refit.yaml", "configs/grpo.yaml", "configs/ppo.yaml"};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        refit_config_init(&config, sizeof config);
        if (refit_config_load(&config, files[i], &error) != REFIT_OK) fail_msg("%s", error.text);
        if (refit_config_check(&config, &error) != REFIT_OK) fail_msg("%s", error.text);
        for (size_t k = 0; k < rft_option_count; k++) {
            assert_int_equal(config.origin[k], REFIT_CONFIG_FILE);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(file_goes_over_defaults, start, clean),
        cmocka_unit_test_setup_teardown(included_file_goes_below, start, clean),
        cmocka_unit_test_setup_teardown(same_file_may_be_included_by_absolute_path, start, clean),
        cmocka_unit_test_setup_teardown(circle_of_includes_is_refused, start, clean),
        cmocka_unit_test_setup_teardown(chain_of_includes_is_bounded, start, clean),
        cmocka_unit_test_setup_teardown(include_comes_first_and_once, start, clean),
        cmocka_unit_test_setup_teardown(failure_in_an_included_file_names_its_place, start, clean),
        cmocka_unit_test_setup_teardown(file_that_cannot_be_read_is_an_io_error, start, clean),
        cmocka_unit_test_setup_teardown(what_is_no_regular_file_is_refused_without_waiting, start,
                                        clean),
        cmocka_unit_test_setup_teardown(huge_file_is_refused, start, clean),
        cmocka_unit_test_setup_teardown(late_mistake_undoes_the_whole_file, start, clean),
        cmocka_unit_test_setup_teardown(failed_allocation_is_an_error, start, clean),
        cmocka_unit_test_setup_teardown(environment_goes_over_the_file, start, clean),
        cmocka_unit_test_setup_teardown(wrong_variables_are_refused, start, clean),
        cmocka_unit_test_setup_teardown(variable_of_the_python_package_is_no_option, start, clean),
        cmocka_unit_test_setup_teardown(every_option_has_its_variable, start, clean),
        cmocka_unit_test_setup_teardown(examples_can_be_loaded, start, clean),
    };
    return cmocka_run_group_tests_name("config_load", tests, NULL, NULL);
}
