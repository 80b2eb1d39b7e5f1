/* The fake driver keeps NVIDIA's rules of images and kernels, and runs the twins of ours. */
#include <stdlib.h>

#include "fake_fixture.h"
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/pack.h"

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

DRIVER_TEST(the_pack_kernel_moves_between_device_and_mapped_memory)
{
    rft_cu_kernel kernel = kernel_named("rft_pack_kernel");
    rft_cu_stream stream = open_stream();
    char *pinned = pinned_memory(4096);
    rft_cu_ptr memory = device_memory(4096), mapped, table;
    rft_pack_entry *entries;
    assert_cu(cu.host_pointer(&mapped, pinned, 0));
    assert_cu(cu.host_alloc((void **)&entries, 4096, RFT_CU_HOST_ALLOC_DEVICEMAP));
    assert_cu(cu.host_pointer(&table, entries, 0));
    strcpy(pinned, "one two");
    entries[0] = (rft_pack_entry){memory + 100, mapped, 4};
    entries[1] = (rft_pack_entry){memory, mapped + 4, 4};
    uint32_t count = 2;
    void *arguments[] = {&table, &count};
    launch(kernel, stream, arguments);
    assert_string_equal(fake_cuda_bytes(memory, 4), "two");
    assert_memory_equal(fake_cuda_bytes(memory + 100, 4), "one ", 4);
    assert_cu(cu.host_free(entries));
    assert_cu(cu.library_unload(library));
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

DRIVER_TEST(cast_and_digest_are_those_of_their_twins)
{
    enum { count = 1000 };
    rft_cu_kernel cast = kernel_named("rft_cast_kernel");
    rft_cu_kernel digest, copy;
    assert_cu(cu.library_kernel(&digest, library, "rft_digest_kernel"));
    assert_cu(cu.library_kernel(&copy, library, "rft_digest_copy_kernel"));
    rft_cu_stream stream = open_stream();
    rft_cu_ptr from = device_memory(count * 4), to = device_memory(count * 2);
    rft_cu_ptr sum = device_memory(8);
    float *values = fake_cuda_bytes(from, count * 4);
    uint16_t expected[count];
    for (int i = 0; i < count; i++)
        values[i] = (float)i / 3;
    rft_cast_bf16(expected, values, count);
    uint64_t elements = count, bytes = count * 4, offset = 64, begun = 5, found;
    memcpy(fake_cuda_bytes(sum, 8), &begun, 8);
    launch(cast, stream, (void *[]){&to, &from, &elements});
    launch(digest, stream, (void *[]){&from, &bytes, &offset, &sum});
    assert_memory_equal(fake_cuda_bytes(to, count * 2), expected, sizeof expected);
    memcpy(&found, fake_cuda_bytes(sum, 8), 8);
    begun += rft_digest_part(values, bytes, offset);
    assert_true(found == begun);
    rft_cu_ptr there = device_memory(bytes);
    launch(copy, stream, (void *[]){&there, &from, &bytes, &offset, &sum});
    assert_memory_equal(fake_cuda_bytes(there, bytes), values, bytes);
    memcpy(&found, fake_cuda_bytes(sum, 8), 8);
    assert_true(found == begun + rft_digest_part(values, bytes, offset));
    assert_cu(cu.library_unload(library));
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
