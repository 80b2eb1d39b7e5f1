/* Device specs: a valid spec opens the right device, any other is refused with a sentence. */
#include <stdlib.h>

#include "device/device.h"
#include "tests/support/bare_device.h"
#include "tests/support/test.h"

static void assert_opens(const char *spec, const refit_config *config, uint64_t capacity)
{
    refit_device *device;
    refit_error error;
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_open(spec, config, &device, &error));
    assert_ok(refit_device_describe(device, &info, &error));
    assert_string_equal(info.kind, "host");
    assert_int_equal(info.capacity_bytes, capacity);
    assert_int_equal(info.used_bytes, 0);
    assert_ok(refit_device_close(device, &error));
}

static void specs_open_the_host_device(void **state)
{
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
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        refit_device *device = NULL;
        refit_error error = {0};
        assert_invalid(refit_device_open(bad[i], NULL, &device, &error));
        assert_null(device);
        assert_int_equal(error.status, REFIT_ERR_INVALID);
        assert_string_not_equal(error.text, "");
    }
    assert_invalid(refit_device_open("host", NULL, NULL, NULL));
}

static void no_device_is_a_valid_thing_to_close(void **state)
{
    assert_ok(refit_device_close(NULL, NULL));
}

static void operations_of_another_version_are_refused(void **state)
{
    rft_device_ops ops = {.version = RFT_DEVICE_OPS_VERSION + 1, .size = sizeof ops, .kind = "odd"};
    refit_device *device;
    assert_invalid(rft_device_make(&ops, NULL, &device, NULL));
    ops.version = RFT_DEVICE_OPS_VERSION;
    ops.size = 8;
    assert_invalid(rft_device_make(&ops, NULL, &device, NULL));
}

static void optional_operations_that_are_missing_say_so(void **state)
{
    refit_device *device;
    refit_device_info info = {.size = sizeof info};
    refit_stream_ref stream = {.native = &info};
    const void *whole = &info;
    rft_share share = {.bytes = 1};
    void *memory;
    uint64_t granule, sum;
    uint16_t half;
    float single = 0;
    char byte = 0;
    assert_ok(rft_device_make(&bare_device_ops, NULL, &device, NULL));
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_string_equal(info.kind, "bare");
    assert_int_equal(rft_device_get_caps(device).batch_most, 0);
    assert_ok(rft_device_memory_check(device, &byte, 1, &whole, NULL));
    assert_null(whole);
    assert_int_equal(rft_device_reserve(device, 1, &memory, &granule, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_commit(device, &byte, 1, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_decommit(device, &byte, 1, NULL, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_host_pin(device, &byte, 1, NULL), REFIT_ERR_UNSUPPORTED);
    rft_device_host_unpin(device, &byte, 1);
    assert_int_equal(refit_stream_call(device, stream, free, NULL, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_digest(device, stream, &byte, 1, 0, &sum, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_stream_cast_bf16(device, stream, &half, &single, 1, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_share_map(device, &share, &memory, NULL), REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_device_close(device, NULL));
}

static void a_required_operation_that_is_missing_is_named(void **state)
{
    static const struct {
        size_t slot;
        const char *name;
    } cases[] = {
        {offsetof(rft_device_ops, close), "close"},
        {offsetof(rft_device_ops, describe), "describe"},
        {offsetof(rft_device_ops, caps), "caps"},
        {offsetof(rft_device_ops, memory_alloc), "memory_alloc"},
        {offsetof(rft_device_ops, memory_free), "memory_free"},
        {offsetof(rft_device_ops, stream_open), "stream_open"},
        {offsetof(rft_device_ops, stream_close), "stream_close"},
        {offsetof(rft_device_ops, copy_batch), "copy_batch"},
        {offsetof(rft_device_ops, zero), "zero"},
        {offsetof(rft_device_ops, event_open), "event_open"},
        {offsetof(rft_device_ops, event_close), "event_close"},
        {offsetof(rft_device_ops, event_record), "event_record"},
        {offsetof(rft_device_ops, event_join), "event_join"},
        {offsetof(rft_device_ops, event_wait), "event_wait"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        rft_device_ops ops = bare_device_ops;
        refit_device *device;
        refit_error error = {0};
        memset((char *)&ops + cases[i].slot, 0, sizeof ops.close);
        assert_invalid(rft_device_make(&ops, NULL, &device, &error));
        assert_non_null(strstr(error.text, cases[i].name));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(specs_open_the_host_device),
        cmocka_unit_test(other_specs_are_refused),
        cmocka_unit_test(no_device_is_a_valid_thing_to_close),
        cmocka_unit_test(operations_of_another_version_are_refused),
        cmocka_unit_test(optional_operations_that_are_missing_say_so),
        cmocka_unit_test(a_required_operation_that_is_missing_is_named),
    };
    return cmocka_run_group_tests_name("device_spec", tests, NULL, NULL);
}
