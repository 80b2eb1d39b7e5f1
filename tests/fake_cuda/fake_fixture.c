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

void enter_context(void)
{
    assert_cu(cu.init(0));
    assert_cu(cu.context_retain(&context, 0));
    assert_cu(cu.context_push(context));
}

void leave_context(void)
{
    rft_cu_context popped;
    assert_cu(cu.context_pop(&popped));
    assert_ptr_equal(popped, context);
    assert_cu(cu.context_release(0));
}

int set_up(void **state)
{
    fake_cuda_reset();
    fake_cuda_set_granule(65536);
    read_table();
    enter_context();
    return 0;
}

#define MOST 128u

static struct {
    unsigned streams, events, memories, pinned;
    rft_cu_stream stream[MOST];
    rft_cu_event event[MOST];
    rft_cu_ptr memory[MOST];
    void *host[MOST];
} given;

/* Those that the test has ended answer so, which breaks a rule. */
static void end_given(void)
{
    fake_cuda_go();
    while (given.events > 0)
        (void)cu.event_close(given.event[--given.events]);
    while (given.streams > 0)
        (void)cu.stream_close(given.stream[--given.streams]);
    while (given.memories > 0)
        (void)cu.memory_free(given.memory[--given.memories]);
    for (; given.pinned > 0; free(given.host[given.pinned]))
        (void)cu.host_unregister(given.host[--given.pinned]);
    fake_cuda_forgive();
}

int tear_down(void **state)
{
    assert_string_equal(fake_cuda_violation(), "");
    end_given();
    leave_context();
    assert_int_equal(fake_cuda_depth(), 0);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_int_equal(fake_cuda_used(0), 0);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

rft_cu_stream open_stream(void)
{
    assert_true(given.streams < MOST);
    assert_cu(cu.stream_open(&given.stream[given.streams], RFT_CU_STREAM_NON_BLOCKING, 0));
    return given.stream[given.streams++];
}

rft_cu_event open_event(void)
{
    assert_true(given.events < MOST);
    assert_cu(cu.event_open(&given.event[given.events], RFT_CU_EVENT_NO_TIMING));
    return given.event[given.events++];
}

rft_cu_ptr device_memory(size_t bytes)
{
    assert_true(given.memories < MOST);
    assert_cu(cu.memory_alloc(&given.memory[given.memories], bytes));
    return given.memory[given.memories++];
}

void *pinned_memory(size_t bytes)
{
    void *memory = calloc(1, bytes);
    assert_true(memory != NULL && given.pinned < MOST);
    assert_cu(cu.host_register(memory, bytes, RFT_CU_HOST_REGISTER_PORTABLE));
    return given.host[given.pinned++] = memory;
}
