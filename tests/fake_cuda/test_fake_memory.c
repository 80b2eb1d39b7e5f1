/* The fake driver keeps NVIDIA's rules of memory: of the device, of the host, virtual, physical. */
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fake_fixture.h"

enum { granule = 65536 };

DRIVER_TEST(the_cpu_cannot_touch_device_memory)
{
    rft_cu_ptr memory = device_memory(4096);
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile char *)(uintptr_t)memory = 1;
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSEGV);
    assert_non_null(fake_cuda_bytes(memory, 4096));
    assert_null(fake_cuda_bytes(memory, 4097));
}

DRIVER_TEST(device_memory_ends)
{
    size_t left, total;
    rft_cu_ptr first = device_memory(40 << 20), second;
    refuses(OUT_OF_MEMORY, cu.memory_alloc(&second, 30 << 20));
    assert_cu(cu.memory_info(&left, &total));
    assert_int_equal(left, 24 << 20);
    fake_cuda_set_taken(0, 20 << 20);
    assert_cu(cu.memory_info(&left, &total));
    assert_int_equal(left, 4 << 20);
    refuses(OUT_OF_MEMORY, cu.memory_alloc(&second, 5 << 20));
    fake_cuda_set_taken(0, 0);
    assert_cu(cu.memory_free(first));
    refuses(INVALID_VALUE, cu.memory_alloc(&second, 0));
}

DRIVER_TEST(freed_addresses_do_not_come_back_at_once)
{
    rft_cu_ptr first = device_memory(4096);
    assert_cu(cu.memory_free(first));
    rft_cu_ptr second = device_memory(4096);
    assert_true(first != second);
    assert_cu(cu.memory_free(second));
    refuses(INVALID_VALUE, cu.memory_free(first));
    assert_violations(1);
    fake_cuda_forgive();
    /* Many more than there are addresses, so that they come back in the end. */
    for (int i = 0; i < 100; i++)
        assert_cu(cu.memory_free(device_memory(40 << 20)));
}

DRIVER_TEST(a_range_is_found_from_within)
{
    rft_cu_ptr memory = device_memory(5000), base;
    size_t bytes;
    assert_cu(cu.memory_range(&base, &bytes, memory + 4999));
    assert_int_equal(base, memory);
    assert_int_equal(bytes, 5000);
    refuses(NOT_FOUND, cu.memory_range(&base, &bytes, memory + 5000));
}

typedef struct pointer_facts {
    unsigned type;
    int managed;
    int mapped;
    int ordinal;
    rft_cu_ptr start;
    size_t size;
} pointer_facts;

static pointer_facts facts_of(rft_cu_ptr memory)
{
    pointer_facts facts = {0};
    int asked[] = {RFT_CU_PTR_MEMORY_TYPE, RFT_CU_PTR_IS_MANAGED,  RFT_CU_PTR_MAPPED,
                   RFT_CU_PTR_ORDINAL,     RFT_CU_PTR_RANGE_START, RFT_CU_PTR_RANGE_SIZE};
    void *values[] = {&facts.type,    &facts.managed, &facts.mapped,
                      &facts.ordinal, &facts.start,   &facts.size};
    assert_cu(cu.pointer_attributes(6, asked, values, memory));
    return facts;
}

DRIVER_TEST(pointers_say_what_they_are)
{
    rft_cu_ptr own = device_memory(4096), other = fake_cuda_memory(1, 4096);
    rft_cu_ptr managed = fake_cuda_managed(0, 4096);
    char *pinned = pinned_memory(4096);
    int here;
    assert_int_equal(facts_of(own + 100).type, RFT_CU_MEMORY_DEVICE);
    assert_int_equal(facts_of(own + 100).start, own);
    assert_int_equal(facts_of(own).ordinal, 0);
    assert_int_equal(facts_of(other).ordinal, 1);
    assert_int_equal(facts_of(managed).managed, 1);
    assert_int_equal(facts_of(address_of(pinned)).type, RFT_CU_MEMORY_HOST);
    assert_int_equal(facts_of(address_of(&here)).type, 0);
    assert_int_equal(facts_of(address_of(&here)).mapped, 0);
    assert_int_equal(facts_of(address_of(&here)).ordinal, -2);
    fake_cuda_managed_free(managed);
    fake_cuda_memory_free(other);
}

DRIVER_TEST(registrations_do_not_overlap)
{
    char *memory = calloc(1, 3 * 4096);
    assert_non_null(memory);
    assert_cu(cu.host_register(memory + 4096, 4096, 0));
    refuses(HOST_MEMORY_ALREADY_REGISTERED, cu.host_register(memory + 4096, 4096, 0));
    refuses(HOST_MEMORY_ALREADY_REGISTERED, cu.host_register(memory, 3 * 4096, 0));
    refuses(INVALID_VALUE, cu.host_register(memory, 0, 0));
    assert_cu(cu.host_register(memory, 4096, 0));
    fake_cuda_set_register_cap(1000);
    refuses(INVALID_VALUE, cu.host_register(memory + 8192, 1001, 0));
    assert_cu(cu.host_unregister(memory));
    assert_cu(cu.host_unregister(memory + 4096));
    refuses(HOST_MEMORY_NOT_REGISTERED, cu.host_unregister(memory));
    assert_violations(1);
    fake_cuda_forgive();
    free(memory);
}

DRIVER_TEST(registered_memory_has_an_address_of_the_devices)
{
    char *pinned = pinned_memory(8192);
    void *own;
    rft_cu_ptr mapped, again;
    assert_cu(cu.host_pointer(&mapped, pinned + 5, 0));
    assert_cu(cu.host_pointer(&again, pinned + 6, 0));
    assert_int_equal(again, mapped + 1);
    assert_ptr_equal(fake_cuda_bytes(mapped, 8187), pinned + 5);
    assert_null(fake_cuda_bytes(mapped, 8188));
    assert_cu(cu.host_alloc(&own, 4096, RFT_CU_HOST_ALLOC_PORTABLE));
    assert_cu(cu.host_pointer(&mapped, own, 0));
    assert_int_equal(mapped, address_of(own));
    refuses(INVALID_VALUE, cu.host_pointer(&mapped, &own, 0));
    assert_cu(cu.host_free(own));
}

static rft_cu_handle physical_memory(size_t bytes, int share)
{
    rft_cu_allocation properties = {.type = RFT_CU_ALLOCATION_PINNED,
                                    .requested_handle_types = share,
                                    .location = {RFT_CU_LOCATION_DEVICE, 0}};
    rft_cu_handle handle;
    assert_cu(cu.physical_create(&handle, bytes, &properties, 0));
    return handle;
}

static void allow(rft_cu_ptr at, size_t bytes)
{
    rft_cu_access access = {{RFT_CU_LOCATION_DEVICE, 0}, RFT_CU_ACCESS_READWRITE};
    assert_cu(cu.set_access(at, bytes, &access, 1));
}

DRIVER_TEST(mapped_memory_is_reached_once_access_is_set)
{
    rft_cu_ptr base;
    rft_cu_handle handle = physical_memory(granule, 0);
    assert_cu(cu.address_reserve(&base, 4 * granule, 0, 0, 0));
    assert_int_equal(facts_of(base).mapped, 0);
    assert_int_equal(facts_of(base).size, 4 * granule);
    refuses(INVALID_VALUE, cu.map(base, granule, granule, handle, 0));
    refuses(INVALID_VALUE, cu.map(base, 2 * granule, 0, handle, 0));
    refuses(INVALID_VALUE, cu.map(base + 1, granule, 0, handle, 0));
    assert_cu(cu.map(base + granule, granule, 0, handle, 0));
    refuses(INVALID_VALUE, cu.map(base + granule, granule, 0, handle, 0));
    assert_null(fake_cuda_bytes(base + granule, granule));
    allow(base + granule, granule);
    assert_non_null(fake_cuda_bytes(base + granule, granule));
    assert_null(fake_cuda_bytes(base + granule, granule + 1));
    assert_cu(cu.physical_release(handle));
    assert_int_equal(fake_cuda_used(0), granule);
    assert_cu(cu.unmap(base + granule, granule));
    assert_int_equal(fake_cuda_used(0), 0);
    assert_cu(cu.address_free(base, 4 * granule));
}

DRIVER_TEST(a_range_goes_on_over_mappings_side_by_side)
{
    rft_cu_ptr base;
    rft_cu_handle first = physical_memory(granule, 0), second = physical_memory(2 * granule, 0);
    assert_cu(cu.address_reserve(&base, 3 * granule, 0, 0, 0));
    assert_cu(cu.map(base, granule, 0, first, 0));
    assert_cu(cu.map(base + granule, 2 * granule, 0, second, 0));
    allow(base, 3 * granule);
    rft_cu_ipc_handle ipc;
    refuses(INVALID_VALUE, cu.ipc_export(&ipc, base));
    char *bytes = fake_cuda_bytes(base, 3 * granule);
    assert_non_null(bytes);
    memset(bytes, 7, 3 * granule);
    rft_cu_ptr start;
    size_t size;
    assert_cu(cu.memory_range(&start, &size, base + granule + 5));
    assert_int_equal(start, base + granule);
    assert_int_equal(facts_of(base + granule).start, base);
    assert_cu(cu.unmap(base, 3 * granule));
    assert_cu(cu.address_free(base, 3 * granule));
    assert_cu(cu.physical_release(first));
    assert_cu(cu.physical_release(second));
}

DRIVER_TEST(wrong_ends_of_mappings_are_violations)
{
    rft_cu_ptr base;
    rft_cu_handle handle = physical_memory(2 * granule, 0);
    assert_cu(cu.address_reserve(&base, 4 * granule, 0, 0, 0));
    assert_cu(cu.map(base, 2 * granule, 0, handle, 0));
    refuses(INVALID_VALUE, cu.unmap(base, granule));
    refuses(INVALID_VALUE, cu.unmap(base, 3 * granule));
    refuses(INVALID_VALUE, cu.address_free(base, 4 * granule));
    assert_cu(cu.unmap(base, 2 * granule));
    refuses(INVALID_VALUE, cu.address_free(base, 2 * granule));
    assert_violations(4);
    assert_cu(cu.address_free(base, 4 * granule));
    assert_cu(cu.physical_release(handle));
    refuses(INVALID_VALUE, cu.physical_release(handle));
    assert_violations(5);
    fake_cuda_forgive();
}

DRIVER_TEST(physical_memory_is_the_devices)
{
    rft_cu_allocation properties = {.type = RFT_CU_ALLOCATION_PINNED,
                                    .location = {RFT_CU_LOCATION_DEVICE, 0}};
    rft_cu_handle handle = physical_memory(60 << 20, 0), second;
    refuses(OUT_OF_MEMORY, cu.physical_create(&second, 8 << 20, &properties, 0));
    refuses(INVALID_VALUE, cu.physical_create(&second, granule + 1, &properties, 0));
    assert_cu(cu.physical_release(handle));
    properties.location.id = 2;
    refuses(INVALID_VALUE, cu.physical_create(&second, granule, &properties, 0));
}

DRIVER_TEST(a_descriptor_is_the_same_memory)
{
    int file;
    rft_cu_ptr base;
    rft_cu_handle handle = physical_memory(granule, RFT_CU_SHARE_POSIX_FD), same;
    rft_cu_handle closed = physical_memory(granule, RFT_CU_SHARE_NONE);
    refuses(INVALID_VALUE, cu.physical_export(&file, closed, RFT_CU_SHARE_POSIX_FD, 0));
    assert_cu(cu.physical_export(&file, handle, RFT_CU_SHARE_POSIX_FD, 0));
    assert_cu(cu.physical_import(&same, (void *)(uintptr_t)file, RFT_CU_SHARE_POSIX_FD));
    close(file);
    assert_cu(cu.address_reserve(&base, 2 * granule, 0, 0, 0));
    assert_cu(cu.map(base, granule, 0, handle, 0));
    assert_cu(cu.map(base + granule, granule, 0, same, 0));
    allow(base, 2 * granule);
    char *bytes = fake_cuda_bytes(base, 2 * granule);
    assert_non_null(bytes);
    bytes[100] = 42;
    assert_int_equal(bytes[granule + 100], 42);
    assert_cu(cu.unmap(base, 2 * granule));
    assert_cu(cu.address_free(base, 2 * granule));
    assert_cu(cu.physical_release(same));
    assert_cu(cu.physical_release(handle));
    assert_cu(cu.physical_release(closed));
}

DRIVER_TEST(memory_unmapped_under_queued_work_is_a_violation)
{
    rft_cu_ptr base;
    rft_cu_stream stream = open_stream();
    rft_cu_handle handle = physical_memory(granule, 0);
    assert_cu(cu.address_reserve(&base, granule, 0, 0, 0));
    assert_cu(cu.map(base, granule, 0, handle, 0));
    allow(base, granule);
    fake_cuda_stop();
    assert_cu(cu.fill(base + 100, 1, 10, stream));
    assert_cu(cu.unmap(base, granule));
    assert_violations(1);
    fake_cuda_forgive();
    fake_cuda_go();
    fake_cuda_settle();
    refuses(ILLEGAL_ADDRESS, cu.stream_close(stream));
    refuses(ILLEGAL_ADDRESS, cu.address_free(base, granule));
    refuses(ILLEGAL_ADDRESS, cu.physical_release(handle));
}

int main(void)
{
    return test_run("fake_memory");
}
