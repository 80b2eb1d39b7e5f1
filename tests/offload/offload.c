/* What the tests of offloading share. */
#include "tests/offload/offload.h"

#include "tests/support/failing_alloc.h"

void set_each(refit_config *config, const char *const *settings)
{
    for (; settings != NULL && *settings != NULL; settings++) {
        char key[64] = "";
        const char *equals = strchr(*settings, '=');
        assert_true(equals != NULL && equals < *settings + sizeof key);
        memcpy(key, *settings, (size_t)(equals - *settings));
        assert_ok(refit_config_set(config, key, equals + 1, NULL));
    }
}

refit_stats stats_of(refit_offloader *offloader)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(offloader, &stats, NULL));
    return stats;
}

refit_region_info region_of(refit_offloader *offloader, refit_region_id region)
{
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(offloader, region, &info, NULL));
    return info;
}

uint64_t used_bytes(refit_device *device)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(device, &info, NULL));
    return info.used_bytes;
}

refit_status offload_all(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(refit_offloader_offload(offloader, REFIT_STREAM_NONE, NULL, error));
    return refit_offloader_wait(offloader, TIMEOUT_MS, error);
}

refit_status restore_all(refit_offloader *offloader, refit_error *error)
{
    RFT_TRY(refit_offloader_restore(offloader, REFIT_STREAM_NONE, NULL, error));
    return refit_offloader_wait(offloader, TIMEOUT_MS, error);
}

void order_fault(refit_device *device, const fault *it, uint32_t nth)
{
    faulty_device_fail(device, it->slot, nth, it->status);
}

void check_hung(refit_device *device, refit_status status)
{
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_in_range(faulty_device_longest_wait(device), TIMEOUT_MS / 2, TIMEOUT_MS);
}

static uint32_t begun; /* more than one: a test before has failed */

void begin_without_blocks(void)
{
    if (begun++ == 0) failing_alloc_begin(0);
}

void end_without_blocks(void)
{
    if (begun > 1) return;
    begun = 0;
    assert_false(failing_alloc_end());
}
