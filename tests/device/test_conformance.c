/* What every device must do, run on each of them: memory, streams, events, copies, arenas. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "device/device.h"

#define PATIENCE_MS 20000u

static void bytes_travel_in_stream_order(void **state)
{
    (void)state;
    refit_error error = {0};
    refit_device *device;
    refit_stream_ref stream;
    void *memory;
    static char here[3 << 20], back[3 << 20];
    memset(here, 7, sizeof here);
    assert_int_equal(refit_device_open("host:capacity=4MiB", NULL, &device, &error), REFIT_OK);
    assert_int_equal(refit_memory_alloc(device, sizeof here, &memory, &error), REFIT_OK);
    assert_int_equal(refit_stream_open(device, &stream, &error), REFIT_OK);
    assert_int_equal(refit_stream_copy(device, stream, memory, here, sizeof here, &error),
                     REFIT_OK);
    assert_int_equal(refit_stream_copy(device, stream, back, memory, sizeof back, &error),
                     REFIT_OK);
    assert_int_equal(refit_stream_wait(device, stream, PATIENCE_MS, &error), REFIT_OK);
    assert_memory_equal(here, back, sizeof here);
    assert_int_equal(refit_device_close(device, &error), REFIT_ERR_BUSY);
    assert_int_equal(refit_stream_close(device, stream, &error), REFIT_OK);
    assert_int_equal(refit_memory_free(device, memory, &error), REFIT_OK);
    assert_int_equal(refit_device_close(device, &error), REFIT_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(bytes_travel_in_stream_order)};
    return cmocka_run_group_tests_name("conformance", tests, NULL, NULL);
}
