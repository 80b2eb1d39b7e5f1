/* The fake driver keeps NVIDIA's rules of images and kernels, and runs the twins of ours. */

#include "fake_fixture.h"

static rft_cu_library library;

static rft_cu_kernel kernel_named(const char *name)
{
    rft_cu_kernel kernel;
    assert_cu(cu.library_load(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
    assert_cu(cu.library_kernel(&kernel, library, name));
    return kernel;
}

static void launch(rft_cu_kernel kernel, rft_cu_stream stream, void **arguments)
{
    assert_cu(cu.launch(kernel, 1, 1, 1, 128, 1, 1, 0, stream, arguments, NULL));
    fake_cuda_settle();
}

DRIVER_TEST(a_kernel_that_meets_a_host_address_loses_the_context)
{
    rft_cu_kernel kernel = kernel_named("rft_cast_kernel");
    rft_cu_stream stream = open_stream();
    float *pinned = pinned_memory(4096);
    rft_cu_ptr memory = device_memory(4096), from = address_of(pinned);
    uint64_t count = 10;
    void *arguments[] = {&memory, &from, &count};
    launch(kernel, stream, arguments);
    refuses(ILLEGAL_ADDRESS, cu.stream_query(stream));
    refuses(ILLEGAL_ADDRESS, cu.memory_free(memory));
    refuses(ILLEGAL_ADDRESS, cu.host_unregister(pinned));
    refuses(ILLEGAL_ADDRESS, cu.stream_close(stream));
    assert_cu(cu.library_unload(library));
}

DRIVER_TEST(a_kernel_that_meets_another_devices_memory_loses_the_context)
{
    rft_cu_kernel kernel = kernel_named("rft_cast_kernel");
    rft_cu_stream stream = open_stream();
    rft_cu_ptr to = device_memory(4096), from = fake_cuda_memory(1, 4096);
    uint64_t count = 10;
    void *arguments[] = {&to, &from, &count};
    assert_cu(cu.copy(to, from, 4096, stream)); /* which the copy engines can */
    launch(kernel, stream, arguments);
    refuses(ILLEGAL_ADDRESS, cu.memory_free(to));
    refuses(ILLEGAL_ADDRESS, cu.stream_close(stream));
    assert_cu(cu.library_unload(library));
    fake_cuda_memory_free(from);
}

DRIVER_TEST(an_image_that_does_not_load_and_a_kernel_that_is_not_there)
{
    rft_cu_kernel kernel = kernel_named("rft_pack_kernel"), other;
    rft_cu_stream stream = open_stream();
    refuses(NOT_FOUND, cu.library_kernel(&other, library, "rft_unknown_kernel"));
    refuses(INVALID_VALUE, cu.launch(kernel, 0, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    assert_cu(cu.library_unload(library));
    uint32_t count = 0;
    rft_cu_ptr table = 0;
    void *arguments[] = {&table, &count};
    refuses(INVALID_HANDLE, cu.launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
    assert_violations(1);
    fake_cuda_forgive();
    fake_cuda_fail("cuLibraryLoadData", 1, 1, RFT_CU_NO_BINARY_FOR_GPU);
    refuses(NO_BINARY_FOR_GPU, cu.library_load(&library, "x", NULL, NULL, 0, NULL, NULL, 0));
}

int main(void)
{
    return test_run("fake_kernels");
}
