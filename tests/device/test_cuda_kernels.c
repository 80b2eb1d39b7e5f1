/* The kernels' image in the driver: which form of it is taken, and what is left where none is. */
#include "tests/device/cuda_case.h"

#include "device/cuda/cuda_kernels.h"
#include "kernels/pack.h"

static void open_gpu(bool with_kernels)
{
    gpu = cuda_open();
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(gpu, &info, NULL));
    assert_int_equal(info.kernels, with_kernels);
    assert_int_equal(rft_device_get_caps(gpu).digests, with_kernels);
}

static void check_digest(void)
{
    void *memory;
    uint64_t sum = 1;
    assert_ok(refit_memory_alloc(gpu, 4096, &memory, NULL));
    assert_ok(rft_device_zero(gpu, REFIT_STREAM_NONE, memory, 4096, NULL));
    assert_ok(rft_device_digest(gpu, REFIT_STREAM_NONE, memory, 4096, 0, &sum, NULL));
    assert_int_not_equal(sum, 1);
    assert_ok(refit_memory_free(gpu, memory, NULL));
}

CUDA_TEST(every_kernel_is_on_the_gpu_before_it_is_needed)
{
    open_gpu(true);
    assert_int_equal(fake_cuda_calls("cuLibraryLoadData"), 1);
    assert_int_equal(fake_cuda_calls("cuKernelGetFunction"), 9);
    assert_int_equal(fake_cuda_calls("cuFuncLoad"), 9);
    assert_int_equal(fake_cuda_alive().libraries, 1);
    check_digest();
    cuda_close(gpu);
    assert_int_equal(fake_cuda_alive().libraries, 0);
    assert_int_equal(heard_count(""), 0);
}

/* A driver may look at the image when it gets it, or when a kernel is asked for. */
CUDA_TEST(machine_code_that_is_refused_gives_way_to_ptx)
{
    static const char *const calls[] = {"cuLibraryLoadData", "cuLibraryGetKernel",
                                        "cuKernelGetFunction", "cuFuncLoad"};
    for (unsigned i = 0; i < 4; i++) {
        cuda_case_again();
        fake_cuda_fail(calls[i], 1, 1, RFT_CU_NO_BINARY_FOR_GPU);
        open_gpu(true);
        assert_int_equal(fake_cuda_calls("cuLibraryLoadData"), 2);
        assert_int_equal(fake_cuda_alive().libraries, 1);
        check_digest();
        assert_int_equal(heard_count(""), 0);
        cuda_close(gpu);
    }
}

/* The device does all but what needs a kernel, and says why. */
static void check_without_kernels(const char *reason)
{
    void *memory;
    uint64_t sum;
    char there[16] = "fifteen letters", back[16] = "";
    assert_ok(refit_memory_alloc(gpu, 4096, &memory, NULL));
    assert_ok(refit_stream_copy(gpu, REFIT_STREAM_NONE, memory, there, 16, NULL));
    assert_ok(refit_stream_copy(gpu, REFIT_STREAM_NONE, back, memory, 16, NULL));
    assert_string_equal(back, there);
    assert_refused(rft_device_digest(gpu, REFIT_STREAM_NONE, memory, 16, 0, &sum, error),
                   REFIT_ERR_UNSUPPORTED, reason);
    assert_refused(refit_stream_cast_bf16(gpu, REFIT_STREAM_NONE, memory, memory, 4, error),
                   REFIT_ERR_UNSUPPORTED, reason);
    assert_ok(refit_memory_free(gpu, memory, NULL));
}

CUDA_TEST(where_no_image_fits_the_device_works_without)
{
    fake_cuda_fail("cuLibraryLoadData", 1, 1, RFT_CU_INVALID_IMAGE);
    fake_cuda_fail("cuLibraryLoadData", 1, 1, RFT_CU_UNSUPPORTED_PTX_VERSION);
    open_gpu(false);
    assert_int_equal(heard_count("cuda:0"), 1);
    assert_int_equal(heard_count("CUDA_ERROR_INVALID_IMAGE"), 1);
    check_without_kernels("CUDA_ERROR_UNSUPPORTED_PTX_VERSION");
    cuda_close(gpu);
    assert_int_equal(heard_count(""), 1);
}

CUDA_TEST(a_gpu_too_full_for_the_image_works_without)
{
    fake_cuda_fail("cuKernelGetFunction", 3, 1, RFT_CU_OUT_OF_MEMORY);
    fake_cuda_fail("cuKernelGetFunction", 1, 1, RFT_CU_OUT_OF_MEMORY);
    open_gpu(false);
    check_without_kernels("CUDA_ERROR_OUT_OF_MEMORY");
    cuda_close(gpu);
}

CUDA_TEST(a_driver_without_libraries_works_without)
{
    static const char *const symbols[] = {"cuLibraryLoadData", "cuLibraryUnload",
                                          "cuLibraryGetKernel", "cuKernelGetFunction"};
    for (unsigned i = 0; i < 4; i++) {
        cuda_case_again();
        fake_cuda_hide(symbols[i], 0);
        open_gpu(false);
        assert_int_equal(heard_count(""), 1);
        check_without_kernels("the driver cannot load");
        cuda_close(gpu);
    }
}

/* The table lies in host memory that the GPU reaches. */
CUDA_TEST(entries_are_packed_on_a_stream)
{
    enum { COUNT = 300, BYTES = 100 };
    open_gpu(true);
    rft_cuda_device *cuda = gpu->self;
    refit_stream_ref stream;
    rft_cuda_guard guard;
    void *entries, *from, *to;
    assert_ok(refit_stream_open(gpu, &stream, NULL));
    assert_ok(refit_memory_alloc(gpu, COUNT * BYTES, &from, NULL));
    assert_ok(refit_memory_alloc(gpu, COUNT * BYTES, &to, NULL));
    assert_ok(rft_cuda_enter(cuda, &guard, NULL));
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
    assert_ok(
        rft_cuda_launch_pack(cuda, stream.native, (uintptr_t)entries, COUNT, COUNT * BYTES, NULL));
    assert_ok(rft_cuda_launch_pack(cuda, stream.native, 0, 0, 0, NULL));
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 1);
    fake_cuda_settle();
    bytes = fake_cuda_bytes((uintptr_t)to, COUNT * BYTES);
    for (unsigned i = 0; i < COUNT * BYTES; i++)
        assert_int_equal(bytes[i], (COUNT - 1 - i / BYTES) % 251);
    assert_int_equal(cuda->driver.host_free(entries), RFT_CU_SUCCESS);
    rft_cuda_leave(cuda, &guard);
    assert_ok(refit_memory_free(gpu, from, NULL));
    assert_ok(refit_memory_free(gpu, to, NULL));
    assert_ok(refit_stream_close(gpu, stream, NULL));
    cuda_close(gpu);
}

CUDA_TEST(a_gpu_lost_meanwhile_is_not_opened)
{
    refit_error error = {0};
    gpu = NULL;
    fake_cuda_fail("cuLibraryLoadData", 1, 2, RFT_CU_ECC_UNCORRECTABLE);
    assert_int_equal(refit_device_open("cuda:0", NULL, &gpu, &error), REFIT_ERR_DEVICE);
    assert_int_equal(error.subsystem, RFT_CU_ECC_UNCORRECTABLE);
    assert_null(gpu);
}

int main(void)
{
    return test_run("cuda_kernels");
}
