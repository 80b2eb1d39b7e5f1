/* The kernels' image in the driver: which form of it is taken, and what is left where none is. */
#include <refit/host.h>

#include "device/cuda/cuda_kernels.h"
#include "fake_cuda.h"
#include "kernels/pack.h"
#include "tests/support/test.h"

static refit_error error;
static unsigned lines;
static char line[512];

static void keep_line(void *user, refit_log_level level, const char *text)
{
    (void)user;
    (void)level;
    lines++;
    strncpy(line, text, sizeof line - 1);
}

static int set_up(void **state)
{
    fake_cuda_reset();
    lines = 0;
    line[0] = '\0';
    refit_set_log(keep_line, NULL, REFIT_LOG_WARNING);
    return 0;
}

static int tear_down(void **state)
{
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

static refit_device *open_gpu(bool with_kernels)
{
    refit_device *device;
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_open("cuda:0", NULL, &device, &error));
    assert_ok(refit_device_describe(device, &info, &error));
    assert_int_equal(info.kernels, with_kernels);
    assert_int_equal(rft_device_get_caps(device).digests, with_kernels);
    return device;
}

static void close_gpu(refit_device *device)
{
    assert_ok(refit_device_close(device, &error));
}

static void check_digest(refit_device *device)
{
    void *memory;
    uint64_t sum = 1;
    assert_ok(refit_memory_alloc(device, 4096, &memory, &error));
    assert_ok(rft_device_zero(device, REFIT_STREAM_NONE, memory, 4096, &error));
    assert_ok(rft_device_digest(device, REFIT_STREAM_NONE, memory, 4096, 0, &sum, &error));
    assert_int_not_equal(sum, 1);
    assert_ok(refit_memory_free(device, memory, &error));
}

static void every_kernel_is_on_the_gpu_before_it_is_needed(void **state)
{
    refit_device *device = open_gpu(true);
    assert_int_equal(fake_cuda_calls("cuLibraryLoadData"), 1);
    assert_int_equal(fake_cuda_calls("cuKernelGetFunction"), 9);
    assert_int_equal(fake_cuda_calls("cuFuncLoad"), 9);
    assert_int_equal(fake_cuda_alive().libraries, 1);
    check_digest(device);
    close_gpu(device);
    assert_int_equal(fake_cuda_alive().libraries, 0);
    assert_int_equal(lines, 0);
}

/* A driver may look at the image when it gets it, or when a kernel is asked for. */
static void machine_code_that_is_refused_gives_way_to_ptx(void **state)
{
    static const char *const calls[] = {"cuLibraryLoadData", "cuLibraryGetKernel",
                                        "cuKernelGetFunction", "cuFuncLoad"};
    for (unsigned i = 0; i < 4; i++) {
        fake_cuda_reset();
        fake_cuda_fail(calls[i], 1, 1, RFT_CU_NO_BINARY_FOR_GPU);
        refit_device *device = open_gpu(true);
        assert_int_equal(fake_cuda_calls("cuLibraryLoadData"), 2);
        assert_int_equal(fake_cuda_alive().libraries, 1);
        check_digest(device);
        close_gpu(device);
        assert_int_equal(fake_cuda_leaks(), 0);
    }
    assert_int_equal(lines, 0);
}

/* The device does all but what needs a kernel, and says why. */
static void check_without_kernels(refit_device *device, const char *reason)
{
    void *memory;
    uint64_t sum;
    char there[16] = "fifteen letters", back[16] = "";
    assert_ok(refit_memory_alloc(device, 4096, &memory, &error));
    assert_ok(refit_stream_copy(device, REFIT_STREAM_NONE, memory, there, 16, &error));
    assert_ok(refit_stream_copy(device, REFIT_STREAM_NONE, back, memory, 16, &error));
    assert_string_equal(back, there);
    assert_int_equal(rft_device_digest(device, REFIT_STREAM_NONE, memory, 16, 0, &sum, &error),
                     REFIT_ERR_UNSUPPORTED);
    assert_non_null(strstr(error.text, reason));
    assert_int_equal(error.status, REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_stream_cast_bf16(device, REFIT_STREAM_NONE, memory, memory, 4, &error),
                     REFIT_ERR_UNSUPPORTED);
    assert_non_null(strstr(error.text, reason));
    assert_ok(refit_memory_free(device, memory, &error));
}

static void where_no_image_fits_the_device_works_without(void **state)
{
    fake_cuda_fail("cuLibraryLoadData", 1, 1, RFT_CU_INVALID_IMAGE);
    fake_cuda_fail("cuLibraryLoadData", 1, 1, RFT_CU_UNSUPPORTED_PTX_VERSION);
    refit_device *device = open_gpu(false);
    assert_int_equal(lines, 1);
    assert_non_null(strstr(line, "cuda:0"));
    assert_non_null(strstr(line, "CUDA_ERROR_INVALID_IMAGE"));
    check_without_kernels(device, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION");
    close_gpu(device);
    assert_int_equal(lines, 1);
}

static void a_gpu_too_full_for_the_image_works_without(void **state)
{
    fake_cuda_fail("cuKernelGetFunction", 3, 1, RFT_CU_OUT_OF_MEMORY);
    fake_cuda_fail("cuKernelGetFunction", 1, 1, RFT_CU_OUT_OF_MEMORY);
    refit_device *device = open_gpu(false);
    check_without_kernels(device, "CUDA_ERROR_OUT_OF_MEMORY");
    close_gpu(device);
}

static void a_driver_without_libraries_works_without(void **state)
{
    static const char *const symbols[] = {"cuLibraryLoadData", "cuLibraryUnload",
                                          "cuLibraryGetKernel", "cuKernelGetFunction"};
    for (unsigned i = 0; i < 4; i++) {
        fake_cuda_reset();
        lines = 0;
        fake_cuda_hide(symbols[i], 0);
        refit_device *device = open_gpu(false);
        assert_int_equal(lines, 1);
        check_without_kernels(device, "the driver cannot load");
        close_gpu(device);
        assert_int_equal(fake_cuda_leaks(), 0);
    }
}

/* The table lies in host memory that the GPU reaches. */
static void entries_are_packed_on_a_stream(void **state)
{
    enum { COUNT = 300, BYTES = 100 };
    refit_device *device = open_gpu(true);
    rft_cuda_device *cuda = device->self;
    refit_stream_ref stream;
    rft_cuda_guard guard;
    void *entries, *from, *to;
    assert_ok(refit_stream_open(device, &stream, &error));
    assert_ok(refit_memory_alloc(device, COUNT * BYTES, &from, &error));
    assert_ok(refit_memory_alloc(device, COUNT * BYTES, &to, &error));
    assert_ok(rft_cuda_enter(cuda, &guard, &error));
    assert_int_equal(cuda->driver.host_alloc(&entries, COUNT * sizeof(rft_pack_entry),
                                             RFT_CU_HOST_ALLOC_DEVICEMAP),
                     RFT_CU_SUCCESS);
    unsigned char *bytes = fake_cuda_bytes((uintptr_t)from, COUNT * BYTES);
    for (unsigned i = 0; i < COUNT; i++) {
        rft_pack_entry *entry = (rft_pack_entry *)entries + i;
        *entry = (rft_pack_entry){(uintptr_t)to + i * BYTES,
                                  (uintptr_t)from + (COUNT - 1 - i) * BYTES, BYTES};
        memset(bytes + i * BYTES, (int)i % 251, BYTES);
    }
    assert_ok(rft_cuda_launch_pack(cuda, stream.native, (uintptr_t)entries, COUNT, COUNT * BYTES,
                                   &error));
    assert_ok(rft_cuda_launch_pack(cuda, stream.native, 0, 0, 0, &error));
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 1);
    fake_cuda_settle();
    bytes = fake_cuda_bytes((uintptr_t)to, COUNT * BYTES);
    for (unsigned i = 0; i < COUNT * BYTES; i++) {
        assert_int_equal(bytes[i], (COUNT - 1 - i / BYTES) % 251);
    }
    assert_int_equal(cuda->driver.host_free(entries), RFT_CU_SUCCESS);
    rft_cuda_leave(cuda, &guard);
    assert_ok(refit_memory_free(device, from, &error));
    assert_ok(refit_memory_free(device, to, &error));
    assert_ok(refit_stream_close(device, stream, &error));
    close_gpu(device);
}

static void a_gpu_lost_meanwhile_is_not_opened(void **state)
{
    refit_device *device = NULL;
    fake_cuda_fail("cuLibraryLoadData", 1, 2, RFT_CU_ECC_UNCORRECTABLE);
    assert_int_equal(refit_device_open("cuda:0", NULL, &device, &error), REFIT_ERR_DEVICE);
    assert_int_equal(error.subsystem, RFT_CU_ECC_UNCORRECTABLE);
    assert_null(device);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(every_kernel_is_on_the_gpu_before_it_is_needed),
        T(machine_code_that_is_refused_gives_way_to_ptx),
        T(where_no_image_fits_the_device_works_without),
        T(a_gpu_too_full_for_the_image_works_without),
        T(a_driver_without_libraries_works_without),
        T(entries_are_packed_on_a_stream),
        T(a_gpu_lost_meanwhile_is_not_opened),
    };
    return cmocka_run_group_tests_name("cuda_kernels", tests, NULL, NULL);
}
