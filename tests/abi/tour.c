/* The example that lib/include/refit.h shows runs as it stands there: it leaves statuses unread, so
 * each of its calls is wrapped here, and the first failure is the program's. */
#include <refit.h>
#include <stdio.h>
#include <stdlib.h>

static void expect_ok(refit_status status, const char *call)
{
    if (status == REFIT_OK) return;
    fprintf(stderr, "%s: %s\n", call, refit_status_text(status));
    exit(1);
}

#define refit_device_open(...)       expect_ok(refit_device_open(__VA_ARGS__), "device_open")
#define refit_device_close(...)      expect_ok(refit_device_close(__VA_ARGS__), "device_close")
#define refit_memory_alloc(...)      expect_ok(refit_memory_alloc(__VA_ARGS__), "memory_alloc")
#define refit_memory_free(...)       expect_ok(refit_memory_free(__VA_ARGS__), "memory_free")
#define refit_offloader_open(...)    expect_ok(refit_offloader_open(__VA_ARGS__), "offloader_open")
#define refit_offloader_add(...)     expect_ok(refit_offloader_add(__VA_ARGS__), "add")
#define refit_offloader_seal(...)    expect_ok(refit_offloader_seal(__VA_ARGS__), "seal")
#define refit_offloader_offload(...) expect_ok(refit_offloader_offload(__VA_ARGS__), "offload")
#define refit_offloader_wait(...)    expect_ok(refit_offloader_wait(__VA_ARGS__), "finish")
#define refit_offloader_unbind(...)  expect_ok(refit_offloader_unbind(__VA_ARGS__), "unbind")
#define refit_offloader_bind(...)    expect_ok(refit_offloader_bind(__VA_ARGS__), "bind")
#define refit_offloader_restore(...) expect_ok(refit_offloader_restore(__VA_ARGS__), "restore")
#define refit_offloader_close(...)   expect_ok(refit_offloader_close(__VA_ARGS__), "close")

int main(void)
{
#include "tour_body.h"
    return 0;
}
