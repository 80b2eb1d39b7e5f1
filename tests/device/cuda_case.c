#include "tests/device/cuda_case.h"

int cuda_case_begin(void **state)
{
    fake_cuda_reset();
    return 0;
}

int cuda_case_end(void **state)
{
    fake_cuda_settle();
    assert_string_equal(fake_cuda_violation(), "");
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_int_equal(fake_cuda_depth(), 0);
    assert_int_equal(fake_cuda_capture_mode(), RFT_CU_CAPTURE_MODE_GLOBAL);
    return 0;
}

refit_device *cuda_open(void)
{
    refit_device *device = NULL;
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.offload_timeout_ms = TIMEOUT_MS;
    assert_ok(refit_device_open("cuda:0", &config, &device, NULL));
    return device;
}

void cuda_close(refit_device *device)
{
    refit_error error = {0};
    refit_status status = refit_device_close(device, &error);
    if (status != REFIT_OK) print_error("%s\n", error.text);
    assert_ok(status);
}
