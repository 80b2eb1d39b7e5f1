/* The faulty device fails the calls that it is ordered to, as often as ordered, and no others. */
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

static struct {
    refit_device *device;
    refit_stream_ref stream;
    refit_error error;
} on;

static int set_up(void **state)
{
    assert_ok(faulty_device_open("host", &on.device, &on.error));
    assert_ok(refit_stream_open(on.device, &on.stream, &on.error));
    return 0;
}

static int tear_down(void **state)
{
    assert_ok(refit_stream_close(on.device, on.stream, &on.error));
    assert_ok(refit_device_close(on.device, &on.error));
    return 0;
}

#define FAULTY_TEST(name) TEST_WITH(name, set_up, tear_down)

FAULTY_TEST(the_nth_call_fails_and_the_next_does_not)
{
    void *first, *second;
    faulty_device_fail(on.device, FAULTY_MEMORY_ALLOC, 2, REFIT_ERR_DEVICE_MEMORY);
    assert_ok(refit_memory_alloc(on.device, 10, &first, &on.error));
    assert_int_equal(refit_memory_alloc(on.device, 10, &second, &on.error),
                     REFIT_ERR_DEVICE_MEMORY);
    assert_string_equal(on.error.text, "memory_alloc fails as ordered by the test");
    assert_ok(refit_memory_alloc(on.device, 10, &second, &on.error));
    assert_int_equal(faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC), 3);
    faulty_device_reset(on.device);
    assert_int_equal(faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC), 0);
    assert_ok(refit_memory_free(on.device, first, &on.error));
    assert_ok(refit_memory_free(on.device, second, &on.error));
}

FAULTY_TEST(calls_fail_as_often_as_ordered)
{
    rft_event *event;
    faulty_device_fail_times(on.device, FAULTY_EVENT_OPEN, 1, 2, REFIT_ERR_DEVICE);
    assert_int_equal(rft_device_event_open(on.device, &event, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(rft_device_event_open(on.device, &event, NULL), REFIT_ERR_DEVICE);
    assert_ok(rft_device_event_open(on.device, &event, NULL));
    rft_device_event_close(on.device, event);
    faulty_device_fail_times(on.device, FAULTY_EVENT_OPEN, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    for (unsigned i = 0; i < 100; i++)
        assert_int_equal(rft_device_event_open(on.device, &event, NULL), REFIT_ERR_DEVICE);
}

FAULTY_TEST(a_copy_that_loses_the_device_writes_a_half)
{
    char from[8], to[8];
    void *memory;
    memset(from, 1, sizeof from);
    memset(to, 2, sizeof to);
    assert_ok(refit_memory_alloc(on.device, 1, &memory, &on.error));
    faulty_device_lose(on.device, FAULTY_COPY_BATCH, 2);
    assert_ok(refit_stream_copy(on.device, on.stream, &to[7], from, 1, &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, to, from, 4, &on.error));
    assert_int_equal(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, &on.error),
                     REFIT_ERR_DEVICE);
    const char torn[] = {0, 0, 2, 2, 2, 2, 2, 1};
    assert_memory_equal(to, torn, sizeof to);
    assert_int_equal(refit_stream_copy(on.device, on.stream, to, from, 1, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(refit_stream_copy(on.device, REFIT_STREAM_NONE, to, from, 1, NULL),
                     REFIT_ERR_DEVICE);
    assert_true(rft_device_is_lost(on.device));
    assert_ok(refit_memory_free(on.device, memory, &on.error));
}

FAULTY_TEST(a_copy_on_the_calling_thread_loses_the_device_at_once)
{
    char from[8] = {0}, to[8];
    faulty_device_lose(on.device, FAULTY_COPY_BATCH, 1);
    assert_int_equal(refit_stream_copy(on.device, REFIT_STREAM_NONE, to, from, sizeof to, NULL),
                     REFIT_ERR_DEVICE);
    assert_int_equal(refit_stream_wait(on.device, REFIT_STREAM_NONE, 0, NULL), REFIT_ERR_DEVICE);
}

FAULTY_TEST(a_stopped_stream_goes_on_when_told)
{
    char from = 1, to = 0;
    faulty_device_stop(on.device);
    assert_ok(refit_stream_copy(on.device, on.stream, &to, &from, 1, &on.error));
    assert_int_equal(refit_stream_wait(on.device, on.stream, 5, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(to, 0);
    faulty_device_go(on.device);
    assert_ok(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, &on.error));
    assert_int_equal(to, 1);
}

int main(void)
{
    return test_run("faulty_device");
}
