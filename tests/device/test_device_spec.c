/* Device specs: what can be read opens the right device, what cannot is refused with a sentence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "device/device.h"

static void assert_opens(const char *spec, const refit_config *config, uint64_t capacity)
{
    refit_device *device;
    refit_error error;
    refit_device_info info = {.size = sizeof info};
    assert_int_equal(refit_device_open(spec, config, &device, &error), REFIT_OK);
    assert_int_equal(refit_device_describe(device, &info, &error), REFIT_OK);
    assert_string_equal(info.kind, "host");
    assert_int_equal(info.capacity_bytes, capacity);
    assert_int_equal(info.used_bytes, 0);
    assert_int_equal(refit_device_close(device, &error), REFIT_OK);
}

static void specs_open_the_host_device(void **state)
{
    (void)state;
    refit_config config;
    refit_config_init(&config, sizeof config);
    strcpy(config.device, "host:capacity=5MiB");
    assert_opens("host", NULL, UINT64_MAX);
    assert_opens("auto", NULL, UINT64_MAX);
    assert_opens(NULL, NULL, UINT64_MAX);
    assert_opens("host:capacity=1", NULL, 1);
    assert_opens("host:capacity=17KiB", NULL, 17 << 10);
    assert_opens("host:capacity=2GiB", NULL, UINT64_C(2) << 30);
    assert_opens("host:capacity=1TiB", NULL, UINT64_C(1) << 40);
    assert_opens("host:capacity=18446744073709551615", NULL, UINT64_MAX);
    assert_opens(NULL, &config, 5 << 20);
    assert_opens("host", &config, UINT64_MAX);
}

static void other_specs_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      "hos",
                                      "hosts",
                                      "HOST",
                                      "host capacity",
                                      "host:x",
                                      "host:capacity",
                                      "gpu:0",
                                      ":",
                                      "host:",
                                      "auto:",
                                      "cuda:",
                                      "host:capacity=",
                                      "host:capacity=GiB",
                                      "host:capacity=0GiB",
                                      "host:capacity=-1GiB",
                                      "host:capacity= 1GiB",
                                      "host:capacity=1GB",
                                      "host:capacity=1 GiB",
                                      "host:capacity=1GiB,",
                                      "host:capacity=1gib",
                                      "host:capacity=0x1",
                                      "host:capacity=1.5GiB",
                                      "host:capacity=18446744073709551616",
                                      "host:capacity=99999999TiB",
                                      "host:Capacity=1GiB",
                                      "auto:0",
                                      "cuda:x",
                                      "cuda:-1",
                                      "cuda: 0",
                                      "cuda:0:",
                                      "cuda:0x",
                                      "cuda::capacity=1GiB",
                                      "cuda:capacity=1GiB",
                                      "cuda:0:capacity=0",
                                      "cuda:0:capacity=1GiB:",
                                      "cuda:99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        refit_device *device = NULL;
        refit_error error = {0};
        assert_int_equal(refit_device_open(bad[i], NULL, &device, &error), REFIT_ERR_INVALID);
        assert_null(device);
        assert_int_equal(error.status, REFIT_ERR_INVALID);
        assert_string_not_equal(error.text, "");
    }
    assert_int_equal(refit_device_open("host", NULL, NULL, NULL), REFIT_ERR_INVALID);
}

static void no_device_is_a_valid_thing_to_close(void **state)
{
    (void)state;
    assert_int_equal(refit_device_close(NULL, NULL), REFIT_OK);
}

static void operations_of_another_version_are_refused(void **state)
{
    (void)state;
    rft_device_ops ops = {.version = RFT_DEVICE_OPS_VERSION + 1, .size = sizeof ops, .kind = "odd"};
    refit_device *device;
    assert_int_equal(rft_device_make(&ops, NULL, &device, NULL), REFIT_ERR_INVALID);
    ops.version = RFT_DEVICE_OPS_VERSION;
    ops.size = 8;
    assert_int_equal(rft_device_make(&ops, NULL, &device, NULL), REFIT_ERR_INVALID);
}

/* A device that implements nothing. */
static void missing_operations_say_so(void **state)
{
    (void)state;
    const rft_device_ops ops = {
        .version = RFT_DEVICE_OPS_VERSION, .size = sizeof ops, .kind = "empty"};
    refit_device *device;
    refit_device_info info = {.size = sizeof info};
    refit_stream_ref stream;
    rft_event *event;
    void *memory;
    uint64_t granule;
    char byte = 0;
    assert_int_equal(rft_device_make(&ops, NULL, &device, NULL), REFIT_OK);
    assert_int_equal(refit_device_describe(device, &info, NULL), REFIT_OK);
    assert_string_equal(info.kind, "empty");
    assert_int_equal(rft_device_get_caps(device).batch_most, 0);
    assert_int_equal(refit_memory_alloc(device, 1, &memory, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_memory_free(device, &byte, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_reserve(device, 1, &memory, &granule, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_commit(device, &byte, 1, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_decommit(device, &byte, 1, NULL, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_host_pin(device, &byte, 1, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_stream_open(device, &stream, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_zero(device, REFIT_STREAM_NONE, &byte, 1, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_event_open(device, &event, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_stream_wait(device, REFIT_STREAM_NONE, 0, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_device_close(device, NULL), REFIT_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(specs_open_the_host_device),
        cmocka_unit_test(other_specs_are_refused),
        cmocka_unit_test(no_device_is_a_valid_thing_to_close),
        cmocka_unit_test(operations_of_another_version_are_refused),
        cmocka_unit_test(missing_operations_say_so),
    };
    return cmocka_run_group_tests_name("device_spec", tests, NULL, NULL);
}
