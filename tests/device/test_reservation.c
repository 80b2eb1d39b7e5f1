/* Addresses that are given up while a thread still waits for a stream that uses them. */
#include "base/clock.h"
#include "base/thread.h"
#include "device/device.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

typedef struct waiter {
    refit_device *device;
    void *base;
    refit_stream_ref stream;
    refit_status status;
} waiter;

static void *run_remove(void *user)
{
    waiter *it = user;
    it->status = rft_device_reserve_remove_stream(it->device, it->base, it->stream, NULL);
    return NULL;
}

/* The sanitizers see a waiter that reads what has been freed. */
TEST(a_reservation_is_closed_after_the_last_that_waits)
{
    waiter it = {0};
    uint64_t granule;
    char from = 1;
    void *to;
    rft_thread thread;
    assert_ok(faulty_device_open("host", &it.device, NULL));
    assert_ok(refit_memory_alloc(it.device, 1, &to, NULL));
    assert_ok(refit_stream_open(it.device, &it.stream, NULL));
    assert_ok(rft_device_reserve(it.device, 1, &it.base, &granule, NULL));
    assert_ok(rft_device_reserve_add_stream(it.device, it.base, it.stream, NULL));
    faulty_device_reset(it.device);
    faulty_device_stop(it.device);
    assert_ok(refit_stream_copy(it.device, it.stream, to, &from, 1, NULL));
    assert_ok(rft_thread_start(&thread, "waiter", run_remove, &it, NULL));
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (faulty_device_calls(it.device, FAULTY_EVENT_WAIT) < 1 && rft_now() < deadline) {
    }
    assert_int_equal(faulty_device_calls(it.device, FAULTY_EVENT_WAIT), 1);
    rft_device_unreserve(it.device, it.base, granule);
    faulty_device_go(it.device);
    rft_thread_join(thread);
    assert_ok(it.status);
    assert_ok(refit_stream_close(it.device, it.stream, NULL));
    assert_ok(refit_memory_free(it.device, to, NULL));
    assert_ok(refit_device_close(it.device, NULL));
}

int main(void)
{
    return test_run("reservation");
}
