/* What the fake driver's own tests share. */
#include "fake_fixture.h"

#include <dlfcn.h>
#include <stdlib.h>

rft_cuda_driver cu;
rft_cu_context context;

void *symbol_of(const char *name, int version, rft_cu_result *result, int *found)
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
    rft_cu_result result;
    int found;
    void *function;
#define READ(field, symbol, version, ...)                                                          \
    function = symbol_of(symbol, version, &result, &found);                                        \
    assert_cu(result);                                                                             \
    assert_int_equal(found, RFT_CU_SYMBOL_FOUND);                                                  \
    assert_non_null(function);                                                                     \
    memcpy(&cu.field, &function, sizeof function);
    RFT_CUDA_SYMBOLS(READ, READ)
#undef READ
}

int set_up(void **state)
{
    fake_cuda_reset();
    fake_cuda_set_granule(65536);
    read_table();
    assert_cu(cu.init(0));
    assert_cu(cu.context_retain(&context, 0));
    assert_cu(cu.context_push(context));
    return 0;
}

int tear_down(void **state)
{
    rft_cu_context popped;
    assert_cu(cu.context_pop(&popped));
    assert_ptr_equal(popped, context);
    assert_cu(cu.context_release(0));
    assert_int_equal(fake_cuda_depth(), 0);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_int_equal(fake_cuda_used(0), 0);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

rft_cu_stream open_stream(void)
{
    rft_cu_stream stream;
    assert_cu(cu.stream_open(&stream, RFT_CU_STREAM_NON_BLOCKING, 0));
    return stream;
}

rft_cu_event open_event(void)
{
    rft_cu_event event;
    assert_cu(cu.event_open(&event, RFT_CU_EVENT_NO_TIMING));
    return event;
}

rft_cu_ptr device_memory(size_t bytes)
{
    rft_cu_ptr memory = 0;
    assert_cu(cu.memory_alloc(&memory, bytes));
    return memory;
}

void *pinned_memory(size_t bytes)
{
    void *memory = calloc(1, bytes);
    assert_non_null(memory);
    assert_cu(cu.host_register(memory, bytes, RFT_CU_HOST_REGISTER_PORTABLE));
    return memory;
}

void free_pinned(void *memory)
{
    assert_cu(cu.host_unregister(memory));
    free(memory);
}
