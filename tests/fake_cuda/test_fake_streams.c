/* The fake driver keeps NVIDIA's rules of order: streams, events, host functions,
 * threads, captures. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "fake_fixture.h"

DRIVER_TEST(work_waits_for_the_gate)
{
    rft_cu_stream stream = open_stream();
    rft_cu_event event = open_event();
    rft_cu_ptr memory = device_memory(4096);
    unsigned char *bytes = fake_cuda_bytes(memory, 4096);
    assert_cu(cu.event_query(event)); /* never recorded: done */
    fake_cuda_stop();
    assert_cu(cu.fill(memory, 1, 4096, stream));
    assert_cu(cu.fill(memory, 2, 4096, stream));
    assert_cu(cu.event_record(event, stream));
    refuses(NOT_READY, cu.event_query(event));
    refuses(NOT_READY, cu.stream_query(stream));
    fake_cuda_let(1);
    fake_cuda_settle();
    assert_int_equal(bytes[4095], 1);
    refuses(NOT_READY, cu.event_query(event));
    fake_cuda_go();
    fake_cuda_settle();
    assert_int_equal(bytes[4095], 2);
    assert_cu(cu.event_query(event));
    assert_cu(cu.stream_query(stream));
}

DRIVER_TEST(an_event_joins_streams_as_it_was_recorded)
{
    rft_cu_stream first = open_stream(), second = open_stream();
    rft_cu_event event = open_event();
    rft_cu_ptr memory = device_memory(512);
    unsigned char *bytes = fake_cuda_bytes(memory, 512);
    fake_cuda_stop_stream(first);
    assert_cu(cu.fill(memory, 1, 512, first));
    assert_cu(cu.event_record(event, first));
    assert_cu(cu.stream_wait_event(second, event, 0));
    assert_cu(cu.fill(memory, 2, 512, second));
    /* What is recorded later is not what was joined. */
    fake_cuda_settle();
    refuses(NOT_READY, cu.stream_query(second));
    assert_cu(cu.event_record(event, second));
    fake_cuda_go_stream(first);
    fake_cuda_settle();
    assert_int_equal(bytes[0], 2);
}

DRIVER_TEST(an_event_may_end_before_its_work)
{
    rft_cu_stream first = open_stream(), second = open_stream();
    rft_cu_event event = open_event();
    fake_cuda_stop();
    assert_cu(cu.event_record(event, first));
    assert_cu(cu.stream_wait_event(second, event, 0));
    assert_cu(cu.event_close(event));
    assert_cu(cu.stream_close(first));
    fake_cuda_go();
    fake_cuda_settle();
    assert_cu(cu.stream_query(second));
}

static void ask_the_driver(void *user)
{
    rft_cu_event event;
    atomic_store((atomic_int *)user, cu.event_open(&event, 0));
}

DRIVER_TEST(a_host_function_may_not_call_the_driver)
{
    atomic_int answer = 99;
    rft_cu_stream stream = open_stream();
    assert_cu(cu.stream_call(stream, ask_the_driver, &answer));
    fake_cuda_settle();
    assert_int_equal(atomic_load(&answer), RFT_CU_NOT_PERMITTED);
}

DRIVER_TEST(work_that_fails_loses_the_context)
{
    atomic_int called = 99;
    rft_cu_ptr memory = device_memory(512);
    rft_cu_stream stream = open_stream();
    rft_cu_event event = open_event();
    fake_cuda_fail_later("cuMemsetD8Async", 2, RFT_CU_LAUNCH_FAILED);
    fake_cuda_stop();
    assert_cu(cu.fill(memory, 1, 512, stream));
    assert_cu(cu.fill(memory, 2, 512, stream));
    assert_cu(cu.stream_call(stream, ask_the_driver, &called));
    assert_cu(cu.event_record(event, stream));
    fake_cuda_go();
    fake_cuda_settle();
    refuses(LAUNCH_FAILED, cu.event_query(event));
    assert_int_equal(atomic_load(&called), 99);
    refuses(LAUNCH_FAILED, cu.event_close(event));
    refuses(LAUNCH_FAILED, cu.stream_close(stream));
    refuses(LAUNCH_FAILED, cu.memory_free(memory));
}

DRIVER_TEST(the_legacy_stream_and_blocking_streams_wait_for_each_other)
{
    rft_cu_stream blocking = fake_cuda_stream(context, 0), other = open_stream();
    rft_cu_ptr memory = device_memory(512);
    unsigned char *bytes = fake_cuda_bytes(memory, 512);
    fake_cuda_stop_stream(blocking);
    assert_cu(cu.fill(memory, 1, 512, blocking));
    assert_cu(cu.fill(memory, 2, 512, RFT_CU_STREAM_LEGACY));
    assert_cu(cu.fill(memory + 256, 3, 1, other));
    fake_cuda_settle();
    assert_int_equal(bytes[256], 3);
    refuses(NOT_READY, cu.stream_query(NULL));
    fake_cuda_go_stream(blocking);
    fake_cuda_settle();
    assert_int_equal(bytes[0], 2);
    assert_int_equal(fake_cuda_legacy_calls(NULL), 2);
    assert_int_equal(fake_cuda_legacy_calls("cuMemsetD8Async"), 1);
    assert_int_equal(fake_cuda_legacy_calls("cuMemcpyAsync"), 0);
    fake_cuda_stream_free(blocking);
}

DRIVER_TEST(a_stream_of_another_context_is_told)
{
    rft_cu_context strange = fake_cuda_other_context(0), found;
    rft_cu_stream stream = fake_cuda_stream(strange, 0);
    rft_cu_event event = open_event();
    assert_cu(cu.stream_context(stream, &found));
    assert_ptr_equal(found, strange);
    refuses(INVALID_HANDLE, cu.event_record(event, stream));
    fake_cuda_stream_free(stream);
}

DRIVER_TEST(elapsed_time_needs_timing)
{
    rft_cu_stream stream = open_stream();
    rft_cu_event plain = open_event(), first, second;
    float milliseconds = -1;
    assert_cu(cu.event_open(&first, RFT_CU_EVENT_TIMING));
    assert_cu(cu.event_open(&second, RFT_CU_EVENT_TIMING));
    refuses(INVALID_HANDLE, cu.event_elapsed(&milliseconds, first, second));
    assert_cu(cu.event_record(first, stream));
    assert_cu(cu.event_record(plain, stream));
    fake_cuda_settle();
    fake_cuda_stop();
    assert_cu(cu.event_record(second, stream));
    refuses(NOT_READY, cu.event_elapsed(&milliseconds, first, second));
    fake_cuda_go();
    fake_cuda_settle();
    refuses(INVALID_HANDLE, cu.event_elapsed(&milliseconds, first, plain));
    assert_cu(cu.event_elapsed(&milliseconds, first, second));
    assert_true(milliseconds >= 0);
    assert_cu(cu.event_close(first));
    assert_cu(cu.event_close(second));
}

/* A call of another thread, which may wait. */
typedef struct waiting {
    rft_cu_result (*call)(struct waiting *on);
    rft_cu_ptr memory;
    void *host;
    rft_cu_stream stream;
    atomic_bool called;
    atomic_bool returned;
} waiting;

static rft_cu_result free_memory(waiting *on)
{
    return cu.memory_free(on->memory);
}

static rft_cu_result free_host(waiting *on)
{
    return cu.host_free(on->host);
}

static rft_cu_result copy_on_host(waiting *on)
{
    return cu.copy(address_of(on->host), address_of((char *)on->host + 64), 64, on->stream);
}

static void *wait_in_call(void *user)
{
    waiting *on = user;
    rft_cu_context popped;
    cu.context_push(context);
    atomic_store(&on->called, true);
    rft_cu_result result = on->call(on);
    atomic_store(&on->returned, result == RFT_CU_SUCCESS);
    cu.context_pop(&popped);
    return NULL;
}

static void nothing_to_do(void *user)
{
    (void)user;
}

static rft_cu_result one_more_fill(waiting *on)
{
    return cu.fill(on->memory, 1, 1, on->stream);
}

static rft_cu_result one_more_call(waiting *on)
{
    return cu.stream_call(on->stream, nothing_to_do, NULL);
}

/* The queue is full: the call becomes the one after `calls`, and waits until `pieces` are gone. */
static void check_overflow(waiting *on, const char *symbol, uint64_t calls, unsigned pieces)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, wait_in_call, on), 0);
    while (fake_cuda_calls(symbol) <= calls)
        sched_yield();
    assert_false(atomic_load(&on->returned));
    fake_cuda_let(pieces);
    pthread_join(thread, NULL);
    assert_true(atomic_load(&on->returned));
    fake_cuda_go();
    fake_cuda_settle();
}

DRIVER_TEST(the_call_that_overflows_a_queue_waits)
{
    enum { depth = 1024 };
    waiting on = {.call = one_more_fill, .stream = open_stream(), .memory = device_memory(512)};
    fake_cuda_stop();
    for (int i = 0; i < depth; i++)
        assert_cu(one_more_fill(&on));
    check_overflow(&on, "cuMemsetD8Async", depth, 1);
}

/* The last one is next to another: both count as one. */
DRIVER_TEST(a_queue_takes_few_host_functions_between_other_work)
{
    enum { most = 56 };
    waiting on = {.call = one_more_call, .stream = open_stream(), .memory = device_memory(512)};
    fake_cuda_stop();
    for (int i = 0; i < most; i++) {
        assert_cu(one_more_fill(&on));
        assert_cu(one_more_call(&on));
    }
    assert_cu(one_more_call(&on));
    assert_cu(one_more_fill(&on));
    check_overflow(&on, "cuLaunchHostFunc", most + 1, 2);
}

typedef struct standing {
    atomic_bool began;
    atomic_bool goes_on;
} standing;

static void stand(void *user)
{
    standing *it = user;
    atomic_store(&it->began, true);
    while (!atomic_load(&it->goes_on))
        sched_yield();
}

static void begin_to_stand(standing *it, rft_cu_stream stream)
{
    assert_cu(cu.stream_call(stream, stand, it));
    while (!atomic_load(&it->began))
        sched_yield();
}

DRIVER_TEST(host_functions_run_one_at_a_time)
{
    standing first = {false}, second = {false};
    rft_cu_ptr memory = device_memory(512);
    rft_cu_stream one = open_stream(), other = open_stream();
    begin_to_stand(&first, one);
    assert_cu(cu.fill(memory, 7, 1, other));
    while (cu.stream_query(other) == RFT_CU_NOT_READY) /* other work does not wait */
        sched_yield();
    assert_cu(cu.stream_call(other, stand, &second));
    usleep(2000);
    assert_false(atomic_load(&second.began));
    atomic_store(&first.goes_on, true);
    while (!atomic_load(&second.began))
        sched_yield();
    atomic_store(&second.goes_on, true);
    fake_cuda_settle();
}

/* The call returns once a host function that stands on the stream has gone on. */
static void check_waits(waiting *on)
{
    standing gate = {false};
    pthread_t thread;
    begin_to_stand(&gate, on->stream);
    assert_int_equal(pthread_create(&thread, NULL, wait_in_call, on), 0);
    while (!atomic_load(&on->called))
        sched_yield();
    usleep(2000);
    assert_false(atomic_load(&on->returned));
    atomic_store(&gate.goes_on, true);
    pthread_join(thread, NULL);
    assert_true(atomic_load(&on->returned));
}

DRIVER_TEST(frees_and_copies_on_the_host_wait)
{
    rft_cu_stream stream = open_stream();
    void *host;
    assert_cu(cu.host_alloc(&host, 128, 0));
    check_waits(&(waiting){.call = copy_on_host, .host = host, .stream = stream});
    check_waits(&(waiting){.call = free_host, .host = host, .stream = stream});
    check_waits(&(waiting){.call = free_memory, .memory = device_memory(512), .stream = stream});
}

/* ---- Captures in global mode */

DRIVER_TEST(a_capture_takes_work_and_is_broken_by_unsafe_calls)
{
    rft_cu_stream stream = open_stream();
    rft_cu_event event = open_event();
    rft_cu_ptr memory = device_memory(512), second;
    int status, mode = RFT_CU_CAPTURE_MODE_RELAXED;
    fake_cuda_capture_begin(stream);
    assert_cu(cu.stream_capturing(stream, &status));
    assert_int_equal(status, RFT_CU_CAPTURE_ACTIVE);
    assert_cu(cu.fill(memory, 1, 512, stream));
    fake_cuda_settle();
    assert_int_not_equal(*(unsigned char *)fake_cuda_bytes(memory, 1), 1);
    assert_cu(cu.capture_mode(&mode));
    assert_int_equal(mode, RFT_CU_CAPTURE_MODE_GLOBAL);
    assert_cu(cu.event_query(event));
    assert_cu(cu.memory_alloc(&second, 512));
    assert_cu(cu.memory_free(second));
    assert_cu(cu.capture_mode(&mode));
    assert_true(fake_cuda_capture_end(stream));
    fake_cuda_capture_begin(stream);
    refuses(STREAM_CAPTURE_UNSUPPORTED, cu.memory_alloc(&second, 512));
    assert_cu(cu.stream_capturing(stream, &status));
    assert_int_equal(status, RFT_CU_CAPTURE_INVALIDATED);
    refuses(STREAM_CAPTURE_INVALIDATED, cu.fill(memory, 1, 512, stream));
    assert_false(fake_cuda_capture_end(stream));
}

DRIVER_TEST(a_captured_event_is_no_place_in_time)
{
    rft_cu_stream stream = open_stream(), other = open_stream();
    rft_cu_event event = open_event();
    int mode = RFT_CU_CAPTURE_MODE_RELAXED;
    assert_cu(cu.capture_mode(&mode));
    fake_cuda_capture_begin(stream);
    assert_cu(cu.event_record(event, stream));
    refuses(CAPTURED_EVENT, cu.event_query(event));
    refuses(STREAM_CAPTURE_ISOLATION, cu.stream_wait_event(other, event, 0));
    assert_true(fake_cuda_capture_end(stream));
    assert_cu(cu.event_record(event, stream));
    fake_cuda_settle();
    assert_cu(cu.event_query(event));
    assert_cu(cu.capture_mode(&mode));
}

DRIVER_TEST(the_legacy_stream_breaks_the_capture_of_a_blocking_one)
{
    rft_cu_stream blocking = fake_cuda_stream(context, 0);
    rft_cu_ptr memory = device_memory(512);
    fake_cuda_capture_begin(blocking);
    refuses(STREAM_CAPTURE_IMPLICIT, cu.fill(memory, 1, 512, NULL));
    assert_false(fake_cuda_capture_end(blocking));
    fake_cuda_stream_free(blocking);
}

int main(void)
{
    return test_run("fake_streams");
}
