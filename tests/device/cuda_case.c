#include "tests/device/cuda_case.h"

refit_device *gpu;

int cuda_case_begin(void **state)
{
    fake_cuda_reset();
    heard_begin(REFIT_LOG_WARNING);
    return 0;
}

int cuda_case_end(void **state)
{
    heard_end();
    fake_cuda_settle();
    assert_string_equal(fake_cuda_violation(), "");
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_int_equal(fake_cuda_depth(), 0);
    assert_int_equal(fake_cuda_capture_mode(), RFT_CU_CAPTURE_MODE_GLOBAL);
    return 0;
}

int gpu_case_begin(void **state)
{
    (void)cuda_case_begin(state);
    gpu = cuda_open();
    return 0;
}

int gpu_case_end(void **state)
{
    cuda_close(gpu);
    return cuda_case_end(state);
}

void cuda_case_again(void)
{
    (void)cuda_case_end(NULL);
    (void)cuda_case_begin(NULL);
}

refit_device *cuda_open_spec(const char *spec)
{
    refit_device *device = NULL;
    refit_error error = {0};
    refit_config config;
    refit_config_init(&config, sizeof config);
    config.offload_timeout_ms = TIMEOUT_MS;
    if (refit_device_open(spec, &config, &device, &error) != REFIT_OK) fail_msg("%s", error.text);
    return device;
}

refit_device *cuda_open(void)
{
    return cuda_open_spec("cuda:0");
}

void cuda_close(refit_device *device)
{
    refit_error error = {0};
    if (refit_device_close(device, &error) != REFIT_OK) fail_msg("%s", error.text);
}
