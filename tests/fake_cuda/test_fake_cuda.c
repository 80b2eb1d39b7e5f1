/* The fake driver keeps NVIDIA's rules: what it refuses, what it orders, what it counts. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/cuda_driver.h"
#include "fake_cuda.h"

static rft_cuda_driver cu;
static rft_cu_context context;

static void *symbol_of(const char *name, int version, int *found, rft_cu_result *result)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    rft_cu_get_proc_address_fn get;
    void *address = dlsym(library, "cuGetProcAddress_v2");
    assert_non_null(address);
    memcpy(&get, &address, sizeof get);
    void *function = NULL;
    *result = get(name, &function, version, 0, found);
    dlclose(library);
    return function;
}

static void read_table(void)
{
    int found;
    rft_cu_result result;
    void *function;
#define READ(field, symbol, version, ...)                                                          \
    function = symbol_of(symbol, version, &found, &result);                                        \
    assert_int_equal(result, RFT_CU_SUCCESS);                                                      \
    assert_non_null(function);                                                                     \
    memcpy(&cu.field, &function, sizeof function);
    RFT_CUDA_SYMBOLS(READ, READ)
#undef READ
}

static int set_up(void **state)
{
    (void)state;
    fake_cuda_reset();
    read_table();
    assert_int_equal(cu.init(0), RFT_CU_SUCCESS);
    assert_int_equal(cu.context_retain(&context, 0), RFT_CU_SUCCESS);
    assert_int_equal(cu.context_push(context), RFT_CU_SUCCESS);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    rft_cu_context popped;
    cu.context_pop(&popped);
    cu.context_release(0);
    assert_int_equal(fake_cuda_depth(), 0);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

static rft_cu_ptr at(const void *memory)
{
    return (rft_cu_ptr)(uintptr_t)memory;
}

static void bytes_go_to_the_device_and_come_back(void **state)
{
    (void)state;
    enum { bytes = 100000 };
    char *here = malloc(bytes), *back = calloc(1, bytes);
    for (int i = 0; i < bytes; i++)
        here[i] = (char)(i * 7);
    rft_cu_ptr there;
    rft_cu_stream stream;
    assert_int_equal(cu.memory_alloc(&there, bytes), RFT_CU_SUCCESS);
    assert_int_equal(cu.stream_open(&stream, RFT_CU_STREAM_NON_BLOCKING, 0), RFT_CU_SUCCESS);
    assert_int_equal(cu.host_register(here, bytes, 0), RFT_CU_SUCCESS);
    assert_int_equal(cu.host_register(back, bytes, 0), RFT_CU_SUCCESS);
    assert_int_equal(cu.copy(there, at(here), bytes, stream), RFT_CU_SUCCESS);
    assert_int_equal(cu.copy(at(back), there, bytes, stream), RFT_CU_SUCCESS);
    fake_cuda_settle();
    assert_memory_equal(here, back, bytes);
    assert_int_equal(fake_cuda_pageable_copies(), 0);
    assert_int_equal(fake_cuda_legacy_calls(NULL), 0);
    assert_int_equal(cu.host_unregister(here), RFT_CU_SUCCESS);
    assert_int_equal(cu.host_unregister(back), RFT_CU_SUCCESS);
    assert_int_equal(cu.stream_close(stream), RFT_CU_SUCCESS);
    assert_int_equal(cu.memory_free(there), RFT_CU_SUCCESS);
    free(here);
    free(back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(bytes_go_to_the_device_and_come_back, set_up, tear_down),
    };
    return cmocka_run_group_tests_name("fake_cuda", tests, NULL, NULL);
}
