/* The fake driver keeps NVIDIA's rules of symbols, devices, contexts and scripted failures. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "fake_fixture.h"

DRIVER_TEST(a_symbol_is_given_at_its_version_and_above)
{
    rft_cu_result result;
    int found;
    void *first = symbol_of("cuMemcpyBatchAsync", 12080, &result, &found);
    void *second = symbol_of("cuMemcpyBatchAsync", 13000, &result, &found);
    assert_non_null(first);
    assert_non_null(second);
    assert_ptr_not_equal(first, second);
    assert_ptr_equal(symbol_of("cuMemcpyBatchAsync", 12090, &result, &found), first);
    assert_null(symbol_of("cuMemcpyBatchAsync", 12000, &result, &found));
    assert_cu(result);
    assert_int_equal(found, RFT_CU_SYMBOL_TOO_NEW);
    assert_null(symbol_of("cuMemcpyByPigeon", 13000, &result, &found));
    assert_cu(result);
    assert_int_equal(found, RFT_CU_SYMBOL_NOT_FOUND);
}

DRIVER_TEST(a_version_above_the_drivers_is_invalid)
{
    rft_cu_result result;
    int found, version;
    fake_cuda_set_version(12080);
    symbol_of("cuInit", 13000, &result, &found);
    assert_int_equal(result, RFT_CU_INVALID_VALUE);
    assert_non_null(symbol_of("cuMemcpyBatchAsync", 12080, &result, &found));
    assert_cu(cu.driver_version(&version));
    assert_int_equal(version, 12080);
    fake_cuda_set_version(12020);
    assert_null(symbol_of("cuMemcpyBatchAsync", 12020, &result, &found));
    assert_int_equal(found, RFT_CU_SYMBOL_NOT_FOUND);
}

DRIVER_TEST(devices_say_what_they_are)
{
    int count, value;
    rft_cu_device device;
    rft_cu_uuid first, second;
    size_t bytes;
    char name[32];
    assert_cu(cu.device_count(&count));
    assert_int_equal(count, 2);
    assert_cu(cu.device_get(&device, 1));
    refuses(INVALID_DEVICE, cu.device_get(&device, 2));
    assert_cu(cu.device_uuid(&first, 0));
    assert_cu(cu.device_uuid(&second, 1));
    assert_memory_not_equal(&first, &second, sizeof first);
    assert_cu(cu.device_total(&bytes, 1));
    assert_int_equal(bytes, 64 << 20);
    assert_cu(cu.device_name(name, sizeof name, 1));
    assert_string_equal(name, "Fake GPU 1");
    assert_cu(cu.device_attribute(&value, RFT_CU_ATTR_CAPABILITY_MAJOR, 0));
    assert_int_equal(value, 9);
    fake_cuda_set_attribute(0, RFT_CU_ATTR_HOST_NUMA, 0, false);
    refuses(INVALID_VALUE, cu.device_attribute(&value, RFT_CU_ATTR_HOST_NUMA, 0));
}

DRIVER_TEST(nothing_works_before_init)
{
    int count;
    leave_context();
    fake_cuda_reset();
    refuses(NOT_INITIALIZED, cu.device_count(&count));
    fake_cuda_set_devices(0);
    refuses(NO_DEVICE, cu.init(0));
    fake_cuda_set_devices(1);
    enter_context();
}

DRIVER_TEST(contexts_are_a_stack_of_each_thread)
{
    rft_cu_context other, popped;
    rft_cu_ptr memory;
    assert_cu(cu.context_retain(&other, 1));
    assert_cu(cu.context_push(other));
    assert_int_equal(fake_cuda_depth(), 2);
    assert_cu(cu.context_pop(&popped));
    assert_ptr_equal(popped, other);
    assert_cu(cu.context_pop(&popped));
    refuses(INVALID_CONTEXT, cu.memory_alloc(&memory, 512));
    refuses(INVALID_CONTEXT, cu.context_pop(&popped));
    refuses(INVALID_CONTEXT, cu.context_push((rft_cu_context)(uintptr_t)4096));
    assert_cu(cu.context_push(context));
    assert_cu(cu.context_release(1));
    refuses(INVALID_CONTEXT, cu.context_release(1));
}

static void *depth_elsewhere(void *user)
{
    *(unsigned *)user = fake_cuda_depth();
    return NULL;
}

DRIVER_TEST(another_thread_has_no_context)
{
    pthread_t thread;
    unsigned depth = 99;
    assert_int_equal(pthread_create(&thread, NULL, depth_elsewhere, &depth), 0);
    pthread_join(thread, NULL);
    assert_int_equal(depth, 0);
}

DRIVER_TEST(a_context_that_ends_with_objects_in_it_is_a_violation)
{
    rft_cu_context other, popped;
    rft_cu_ptr memory;
    assert_cu(cu.context_retain(&other, 1));
    assert_cu(cu.context_push(other));
    memory = device_memory(512);
    assert_cu(cu.context_release(1));
    assert_violations(1);
    fake_cuda_forgive();
    refuses(CONTEXT_IS_DESTROYED, cu.memory_free(memory));
    assert_cu(cu.context_retain(&other, 1));
    assert_cu(cu.memory_free(memory));
    assert_cu(cu.context_release(1));
    assert_cu(cu.context_pop(&popped));
}

DRIVER_TEST(a_scripted_call_fails_so_often)
{
    rft_cu_ptr second;
    fake_cuda_fail("cuMemAlloc", 2, 2, RFT_CU_OUT_OF_MEMORY);
    (void)device_memory(512);
    refuses(OUT_OF_MEMORY, cu.memory_alloc(&second, 512));
    refuses(OUT_OF_MEMORY, cu.memory_alloc(&second, 512));
    assert_cu(cu.memory_alloc(&second, 512));
    assert_int_equal(fake_cuda_calls("cuMemAlloc"), 4);
    assert_cu(cu.memory_free(second));
}

DRIVER_TEST(a_star_means_every_call_that_ends_nothing)
{
    rft_cu_event event;
    rft_cu_ptr memory = device_memory(512);
    fake_cuda_fail("*", 1, 1, RFT_CU_UNKNOWN);
    assert_cu(cu.memory_free(memory));
    refuses(UNKNOWN, cu.event_open(&event, 0));
    fake_cuda_fail("*", 1, 5, RFT_CU_UNKNOWN);
    fake_cuda_forget_faults();
    assert_cu(cu.event_open(&event, 0));
    assert_cu(cu.event_close(event));
}

DRIVER_TEST(the_environment_scripts_other_processes)
{
    rft_cu_ptr second;
    rft_cu_event event;
    size_t total;
    leave_context();
    setenv("FAKE_CUDA_SCRIPT", "cuMemAlloc:2:1:2,cuEventCreate:1:1:999", 1);
    setenv("FAKE_CUDA_MEMORY", "8192", 1);
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    fake_cuda_reset();
    unsetenv("FAKE_CUDA_SCRIPT");
    unsetenv("FAKE_CUDA_MEMORY");
    unsetenv("FAKE_CUDA_DEVICES");
    enter_context();
    refuses(INVALID_DEVICE, cu.device_total(&total, 1));
    assert_cu(cu.device_total(&total, 0));
    assert_int_equal(total, 8192);
    (void)device_memory(512);
    refuses(OUT_OF_MEMORY, cu.memory_alloc(&second, 512));
    refuses(UNKNOWN, cu.event_open(&event, 0));
}

DRIVER_TEST(a_lost_context_answers_so_and_its_objects_can_be_ended)
{
    const char *name;
    rft_cu_ptr memory = device_memory(4096), second;
    rft_cu_stream stream = open_stream();
    rft_cu_event event = open_event();
    fake_cuda_lose(0, RFT_CU_ECC_UNCORRECTABLE);
    refuses(ECC_UNCORRECTABLE, cu.memory_alloc(&second, 512));
    refuses(ECC_UNCORRECTABLE, cu.event_query(event));
    refuses(ECC_UNCORRECTABLE, cu.memory_free(memory));
    refuses(ECC_UNCORRECTABLE, cu.event_close(event));
    refuses(ECC_UNCORRECTABLE, cu.stream_close(stream));
    assert_cu(cu.get_error_name(RFT_CU_ECC_UNCORRECTABLE, &name));
    assert_string_equal(name, "CUDA_ERROR_ECC_UNCORRECTABLE");
    refuses(INVALID_VALUE, cu.get_error_name(12345, &name));
}

DRIVER_TEST(the_child_of_a_fork_is_not_initialised)
{
    int count;
    pid_t child = fork();
    if (child == 0) {
        bool refused = cu.device_count(&count) == RFT_CU_NOT_INITIALIZED &&
                       cu.init(0) == RFT_CU_NOT_INITIALIZED;
        _exit(refused ? 0 : 1);
    }
    assert_child_succeeds(child);
}

DRIVER_TEST(a_handle_is_dead_after_its_end)
{
    rft_cu_event event = open_event();
    rft_cu_stream stream = open_stream();
    assert_cu(cu.event_close(event));
    assert_cu(cu.stream_close(stream));
    refuses(INVALID_HANDLE, cu.event_query(event));
    refuses(INVALID_HANDLE, cu.event_close(event));
    refuses(INVALID_HANDLE, cu.stream_close(stream));
    refuses(INVALID_HANDLE, cu.stream_query(stream));
    assert_violations(4);
    fake_cuda_forgive();
}

int main(void)
{
    return test_run("fake_cuda");
}
