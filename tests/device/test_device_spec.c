/* Device specs: a valid spec opens the right device, any other is refused with a sentence. */
#include <stdio.h>
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

TEST(specs_open_the_host_device)
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

static void assert_refuses(const char *begin, const char *end)
{
    char spec[64];
    refit_device *device = NULL;
    (void)snprintf(spec, sizeof spec, "%s%s", begin, end);
    assert_refused(refit_device_open(spec, NULL, &device, error), REFIT_ERR_INVALID, " ");
    assert_null(device);
}

TEST(other_specs_are_refused)
{
    static const char *const others[] = {
        "",      "hos", "hosts", "HOST",  "host capacity",      "host:x", "host:capacity",
        "gpu:0", ":",   "host:", "auto:", "host:Capacity=1GiB", "auto:0"};
    static const char *const capacities[] = {"",           "GiB", "0GiB",   "-1GiB",
                                             " 1GiB",      "1GB", "1 GiB",  "1GiB,",
                                             "1gib",       "0x1", "1.5GiB", "18446744073709551616",
                                             "99999999TiB"};
    static const char *const gpus[] = {"",
                                       "x",
                                       "-1",
                                       " 0",
                                       "0:",
                                       "0x",
                                       ":capacity=1GiB",
                                       "capacity=1GiB",
                                       "0:capacity=0",
                                       "0:capacity=1GiB:"};
    for (size_t i = 0; i < COUNT_OF(others); i++)
        assert_refuses("", others[i]);
    for (size_t i = 0; i < COUNT_OF(capacities); i++)
        assert_refuses("host:capacity=", capacities[i]);
    for (size_t i = 0; i < COUNT_OF(gpus); i++)
        assert_refuses("cuda:", gpus[i]);
    assert_refuses("cuda:", "99999999999999999999");
    assert_invalid(refit_device_open("host", NULL, NULL, NULL));
}

TEST(no_device_is_a_valid_thing_to_close)
{
    assert_ok(refit_device_close(NULL, NULL));
}

TEST(operations_of_another_version_are_refused)
{
    rft_device_ops ops = {.version = RFT_DEVICE_OPS_VERSION + 1, .size = sizeof ops, .kind = "odd"};
    refit_device *device;
    assert_invalid(rft_device_make(&ops, NULL, &device, NULL));
    ops.version = RFT_DEVICE_OPS_VERSION;
    ops.size = 8;
    assert_invalid(rft_device_make(&ops, NULL, &device, NULL));
}

TEST(optional_operations_that_are_missing_say_so)
{
    refit_device *device;
    refit_device_info info = {.size = sizeof info};
    refit_stream_ref stream = {.native = &info};
    rft_memory_range allocation = {.base = &info};
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
    assert_ok(rft_device_memory_check(device, &byte, 1, &allocation, NULL));
    assert_null(allocation.base);
    assert_int_equal(rft_device_reserve(device, 1, &memory, &granule, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_commit(device, &byte, 1, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_decommit(device, &byte, 1, NULL, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_host_pin(device, &byte, 1, false, NULL), REFIT_ERR_UNSUPPORTED);
    rft_device_host_unpin(device, &byte, 1);
    assert_int_equal(refit_stream_call(device, stream, free, NULL, NULL), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_digest(device, stream, &byte, 1, 0, &sum, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_stream_cast_bf16(device, stream, &half, &single, 1, NULL),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_share_map(device, &share, &memory, NULL), REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_device_close(device, NULL));
}

#define SLOT(name)                                                                                 \
    {                                                                                              \
        offsetof(rft_device_ops, name), #name                                                      \
    }

TEST(a_required_operation_that_is_missing_is_named)
{
    static const struct {
        size_t slot;
        const char *name;
    } required[] = {SLOT(close),       SLOT(describe),    SLOT(caps),         SLOT(memory_alloc),
                    SLOT(memory_free), SLOT(stream_open), SLOT(stream_close), SLOT(copy_batch),
                    SLOT(zero),        SLOT(event_open),  SLOT(event_close),  SLOT(event_record),
                    SLOT(event_join),  SLOT(event_wait)};
    for (size_t i = 0; i < COUNT_OF(required); i++) {
        rft_device_ops ops = bare_device_ops;
        refit_device *device;
        memset((char *)&ops + required[i].slot, 0, sizeof ops.close);
        assert_refused(rft_device_make(&ops, NULL, &device, error), REFIT_ERR_INVALID,
                       required[i].name);
    }
}

int main(void)
{
    return test_run("device_spec");
}
