/* No driver, the toolkit's stub, a driver that is too old, a file that is not a library: each has
 * its own error, and "auto" takes the host only where there is no driver at all. ABSENT_CUDA_KIND,
 * set by CMakeLists.txt, says which libcuda.so.1 this process finds. */
#include <stdlib.h>

#include <refit/device.h>
#include <refit/host.h>

#include "tests/support/test.h"

typedef struct expectation {
    const char *kind;
    refit_status status;
    const char *says; /* part of the sentence */
} expectation;

static const expectation expectations[] = {
    {"empty_file", REFIT_ERR_NOT_FOUND, "there is no CUDA driver"},
    {"old_stub", REFIT_ERR_NOT_FOUND, "stub"},
    {"stub", REFIT_ERR_NOT_FOUND, "stub"},
    {"old_driver", REFIT_ERR_UNSUPPORTED, "for CUDA 11.4 and refit needs 12.0"},
    {"no_driver", REFIT_ERR_DEVICE, "is not a CUDA driver"},
};

static const expectation *expected(void)
{
    const char *kind = getenv("ABSENT_CUDA_KIND");
    for (size_t i = 0; i < COUNT_OF(expectations); i++) {
        if (kind != NULL && strcmp(kind, expectations[i].kind) == 0) return &expectations[i];
    }
    fail_msg("run me through ctest, which says which library I find");
    return NULL;
}

TEST(opening_it_says_what_is_wrong)
{
    const char *const specs[] = {"cuda", "cuda:0", "cuda:7", "cuda:0:capacity=1GiB"};
    for (size_t i = 0; i < COUNT_OF(specs); i++) {
        refit_device *device = NULL;
        refit_error error = {0};
        assert_int_equal(refit_device_open(specs[i], NULL, &device, &error), expected()->status);
        assert_null(device);
        assert_int_equal(error.status, expected()->status);
        assert_non_null(strstr(error.text, expected()->says));
    }
}

static void keep_line(void *user, refit_log_level level, const char *line)
{
    (void)level;
    strncpy(user, line, 399);
}

TEST(auto_is_the_host_only_without_a_driver)
{
    char line[400] = "";
    refit_device *device = NULL;
    refit_error error = {0};
    refit_set_log(keep_line, line, REFIT_LOG_INFO);
    refit_status status = refit_device_open("auto", NULL, &device, &error);
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
    if (expected()->status != REFIT_ERR_NOT_FOUND) {
        assert_int_equal(status, expected()->status);
        assert_non_null(strstr(error.text, expected()->says));
        assert_string_equal(line, "");
        return;
    }
    refit_device_info info = {.size = sizeof info};
    assert_ok(status);
    assert_non_null(strstr(line, "device auto: host, since"));
    assert_non_null(strstr(line, expected()->says));
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_string_equal(info.kind, "host");
    assert_ok(refit_device_close(device, NULL));
}

int main(void)
{
    return test_run("cuda_absent");
}
