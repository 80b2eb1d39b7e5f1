/* Every device: streams keep their order and finish what they have; events and joins wait. */
#include "tests/device/every_device.h"

#include <stdatomic.h>

#include "base/alloc.h"

/* Calls that write down in which order they ran. */
typedef struct journal {
    unsigned written;
    unsigned lines[10000];
} journal;

typedef struct entry {
    journal *book;
    unsigned number;
} entry;

static void write_down(void *user)
{
    const entry *it = user;
    it->book->lines[it->book->written++] = it->number;
}

static void raise_flag(void *user)
{
    atomic_store((atomic_bool *)user, true);
}

static refit_stream_ref open_stream(void)
{
    refit_stream_ref stream;
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    return stream;
}

TEST(a_stream_is_a_fifo_of_any_depth)
{
    static journal book;
    static entry entries[COUNT_OF(book.lines)];
    book.written = 0;
    gate_put(on.stream);
    for (unsigned i = 0; i < on.depth; i++) {
        entries[i] = (entry){&book, i};
        assert_ok(refit_stream_call(on.device, on.stream, write_down, &entries[i], &on.error));
    }
    assert_int_equal(refit_stream_wait(on.device, on.stream, 0, &on.error), REFIT_ERR_TIMEOUT);
    gate_open();
    wait_stream();
    assert_int_equal(book.written, on.depth);
    for (unsigned i = 0; i < on.depth; i++)
        assert_int_equal(book.lines[i], i);
}

/* The event lies in the middle: when it is reached half of the queue is free again. */
TEST(a_full_queue_refuses_and_recovers)
{
    if (!on.strict) skip();
    atomic_bool flag = false;
    rft_event *middle = open_event();
    gate_put(on.stream);
    refit_status status = REFIT_OK;
    for (unsigned i = 0; i < 1000000 && status == REFIT_OK; i++) {
        if (i == 50000) {
            assert_ok(rft_device_event_record(on.device, middle, on.stream, &on.error));
        }
        status = refit_stream_call(on.device, on.stream, raise_flag, &flag, &on.error);
    }
    assert_int_equal(status, REFIT_ERR_LIMIT);
    gate_open();
    assert_ok(rft_device_event_wait(on.device, middle, TIMEOUT_MS, &on.error));
    wait_stream();
    assert_true(atomic_load(&flag));
    rft_device_event_close(on.device, middle);
}

TEST(closing_a_stream_finishes_its_work)
{
    atomic_bool flag = false;
    refit_stream_ref stream = open_stream();
    gate_put(stream);
    assert_ok(refit_stream_call(on.device, stream, raise_flag, &flag, &on.error));
    gate_open();
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    assert_true(atomic_load(&flag));
}

TEST(only_an_open_stream_can_be_closed)
{
    refit_stream_ref closed = open_stream(), strange = {&closed};
    assert_ok(refit_stream_close(on.device, closed, &on.error));
    assert_invalid(refit_stream_close(on.device, closed, NULL));
    assert_invalid(refit_stream_close(on.device, strange, NULL));
    assert_invalid(refit_stream_close(on.device, REFIT_STREAM_NONE, NULL));
    assert_invalid(refit_stream_open(on.device, NULL, NULL));
    assert_invalid(refit_stream_open(NULL, &closed, NULL));
    assert_invalid(refit_stream_call(on.device, on.stream, NULL, NULL, NULL));
}

TEST(a_stream_that_is_none_takes_no_work)
{
    if (!on.strict) skip();
    char from = 1, to = 0;
    refit_stream_ref closed = open_stream();
    rft_event *event = open_event();
    assert_ok(refit_stream_close(on.device, closed, &on.error));
    assert_invalid(refit_stream_copy(on.device, closed, &to, &from, 1, NULL));
    assert_invalid(rft_device_event_record(on.device, event, closed, NULL));
    assert_invalid(rft_device_event_join(on.device, event, closed, NULL));
    assert_invalid(refit_stream_wait(on.device, closed, 0, NULL));
    assert_int_equal(to, 0);
    rft_device_event_close(on.device, event);
}

TEST(work_on_the_calling_thread_is_done_at_once)
{
    char from = 1, to = 0;
    rft_event *event = open_event();
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, &to, &from, 1, &on.error));
    assert_int_equal(to, 1);
    assert_ok(refit_stream_wait(on.device, REFIT_STREAM_NONE, 0, &on.error));
    assert_ok(rft_device_event_record(on.device, event, REFIT_STREAM_NONE, &on.error));
    assert_ok(rft_device_event_wait(on.device, event, 0, &on.error));
    rft_device_event_close(on.device, event);
}

TEST(an_event_never_recorded_is_done)
{
    rft_event *event = open_event();
    assert_ok(rft_device_event_wait(on.device, event, 0, &on.error));
    assert_ok(rft_device_event_join(on.device, event, on.stream, &on.error));
    assert_ok(rft_device_event_join(on.device, event, REFIT_STREAM_NONE, &on.error));
    wait_stream();
    rft_device_event_close(on.device, event);
}

TEST(an_event_is_done_when_its_place_is_reached)
{
    rft_event *event = open_event();
    gate_put(on.stream);
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_int_equal(rft_device_event_wait(on.device, event, 0, &on.error), REFIT_ERR_TIMEOUT);
    assert_int_equal(rft_device_event_wait(on.device, event, 5, &on.error), REFIT_ERR_TIMEOUT);
    gate_open();
    assert_ok(rft_device_event_wait(on.device, event, TIMEOUT_MS, &on.error));
    assert_ok(rft_device_event_wait(on.device, event, 0, &on.error));
    rft_device_event_close(on.device, event);
}

TEST(a_join_waits_for_the_other_stream)
{
    char *bytes = steady_alloc(2); /* from the first to the last by memory of the device */
    memcpy(bytes, "\1\0", 2);
    void *middle = device_alloc(1);
    refit_stream_ref other = open_stream();
    rft_event *event = open_event();
    gate_put(on.stream);
    assert_ok(refit_stream_copy(on.device, on.stream, middle, bytes, 1, &on.error));
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_ok(rft_device_event_join(on.device, event, other, &on.error));
    assert_ok(refit_stream_copy(on.device, other, bytes + 1, middle, 1, &on.error));
    assert_int_equal(refit_stream_wait(on.device, other, 5, &on.error), REFIT_ERR_TIMEOUT);
    gate_open();
    assert_ok(refit_stream_wait(on.device, other, TIMEOUT_MS, &on.error));
    assert_int_equal(bytes[1], 1);
    steady_free(bytes, 2);
    device_free(middle);
    rft_device_event_close(on.device, event);
    assert_ok(refit_stream_close(on.device, other, &on.error));
}

/* The join was made when the event was here; that it is done elsewhere since changes nothing. */
TEST(a_join_keeps_the_place_it_was_made_for)
{
    refit_stream_ref other = open_stream(), third = open_stream();
    rft_event *event = open_event();
    gate_put(on.stream);
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_ok(rft_device_event_join(on.device, event, other, &on.error));
    assert_ok(rft_device_event_record(on.device, event, third, &on.error));
    assert_ok(rft_device_event_wait(on.device, event, TIMEOUT_MS, &on.error));
    assert_int_equal(refit_stream_wait(on.device, other, 5, &on.error), REFIT_ERR_TIMEOUT);
    gate_open();
    assert_ok(refit_stream_wait(on.device, other, TIMEOUT_MS, &on.error));
    rft_device_event_close(on.device, event);
    assert_ok(refit_stream_close(on.device, third, &on.error));
    assert_ok(refit_stream_close(on.device, other, &on.error));
}

static void *open_from_elsewhere(void *user)
{
    gate_open();
    return user;
}

TEST(joining_on_the_calling_thread_blocks)
{
    atomic_bool flag = false;
    rft_thread thread;
    rft_event *event = open_event();
    gate_put(on.stream);
    assert_ok(refit_stream_call(on.device, on.stream, raise_flag, &flag, &on.error));
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_ok(rft_thread_start(&thread, "opener", open_from_elsewhere, NULL, &on.error));
    assert_ok(rft_device_event_join(on.device, event, REFIT_STREAM_NONE, &on.error));
    assert_true(atomic_load(&flag));
    rft_thread_join(thread);
    rft_device_event_close(on.device, event);
}

TEST(events_may_go_first_or_last)
{
    refit_stream_ref other = open_stream();
    rft_event *early = open_event(), *late = open_event();
    gate_put(other);
    assert_ok(rft_device_event_record(on.device, early, other, &on.error));
    assert_ok(rft_device_event_record(on.device, late, other, &on.error));
    assert_ok(rft_device_event_join(on.device, early, on.stream, &on.error));
    rft_device_event_close(on.device, early);
    gate_open();
    assert_ok(refit_stream_close(on.device, other, &on.error));
    assert_ok(rft_device_event_wait(on.device, late, 0, &on.error));
    assert_ok(rft_device_event_join(on.device, late, on.stream, &on.error));
    wait_stream();
    rft_device_event_close(on.device, late);
}

TEST(waits_that_time_out_leave_nothing)
{
    gate_put(on.stream);
    for (unsigned i = 0; i < 20; i++)
        assert_int_equal(refit_stream_wait(on.device, on.stream, 0, NULL), REFIT_ERR_TIMEOUT);
    gate_open();
    wait_stream();
}

int main(void)
{
    return run_on_every_device("streams");
}
