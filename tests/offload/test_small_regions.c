/* Thousands of small regions leave and come back, gathered where the device can; what lies between
 * them stays as it is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <refit.h>

#include "base/alloc.h"
#include "base/thread.h"
#include "tests/support/test_device.h"

#define REGIONS     2000u
#define ROOM        4096u /* for a region and what follows it */
#define BYTES       ((uint64_t)REGIONS * ROOM)
#define PATIENCE_MS 20000u

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

typedef struct fixture {
    refit_device *device;
    refit_offloader *offloader;
    char *memory; /* of the device */
    char *bytes;  /* what it held */
    refit_error error;
} fixture;

static uint64_t size_of(uint32_t region)
{
    return region % 50 == 0 ? ROOM : 1 + region * 977u % (ROOM - 64);
}

static void add_regions(fixture *on)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        char name[16];
        refit_region_id id;
        snprintf(name, sizeof name, "r%u", i);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .memory = on->memory + (uint64_t)i * ROOM,
                                  .bytes = size_of(i),
                                  .policy = REFIT_KEEP,
                                  .group = i / 500,
                                  .priority = (int32_t)(i % 2)};
        assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
    }
}

static void open_fixture(fixture *on, const char *verify, const char *rate_limit)
{
    refit_config config;
    void *memory;
    *on = (fixture){.bytes = malloc(BYTES)};
    assert_non_null(on->bytes);
    refit_config_init(&config, sizeof config);
    assert_ok(refit_config_set(&config, "offload.small_bytes", "3000", &on->error));
    assert_ok(refit_config_set(&config, "offload.staging_bytes", "1MiB", &on->error));
    assert_ok(refit_config_set(&config, "offload.slab_bytes", "1MiB", &on->error));
    assert_ok(refit_config_set(&config, "offload.verify", verify, &on->error));
    assert_ok(refit_config_set(&config, "offload.rate_limit", rate_limit, &on->error));
    assert_ok(refit_device_open(test_device_spec("host"), &config, &on->device, &on->error));
    assert_ok(refit_memory_alloc(on->device, BYTES, &memory, &on->error));
    on->memory = memory;
    assert_ok(refit_offloader_open(on->device, &config, &on->offloader, &on->error));
    add_regions(on);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
}

static void close_fixture(fixture *on)
{
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_memory_free(on->device, on->memory, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
    free(on->bytes);
}

static void fill(fixture *on, unsigned seed)
{
    for (uint64_t i = 0; i < BYTES; i++) {
        on->bytes[i] = (char)((i + seed) * 2654435761u >> 24);
    }
    test_write(on->device, on->memory, on->bytes, BYTES);
}

static void finish(fixture *on)
{
    assert_ok(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error));
}

/* While they are away their memory is used by others; what is behind each keeps what they left. */
static void wipe(fixture *on)
{
    test_fill(on->device, on->memory, 'x', BYTES);
    for (uint32_t i = 0; i < REGIONS; i++) {
        char *end = on->bytes + (uint64_t)i * ROOM + size_of(i);
        memset(end, 'x', (size_t)(ROOM - size_of(i)));
    }
}

static void regions_come_back(const char *verify)
{
    fixture on;
    open_fixture(&on, verify, "0");
    for (unsigned cycle = 0; cycle < 2; cycle++) {
        fill(&on, cycle);
        assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        finish(&on);
        wipe(&on);
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        finish(&on);
        assert_device_equal(on.device, on.memory, on.bytes, BYTES);
    }
    close_fixture(&on);
}

static void small_regions_come_back(void **state)
{
    (void)state;
    regions_come_back("false");
}

static void small_regions_come_back_verified(void **state)
{
    (void)state;
    regions_come_back("true");
}

/* On the host device a queue grows to the most that it ever held, which depends on the speed of its
 * two ends. A stream that stands until all is queued makes it the most. (A GPU's queue does not
 * grow; a caller that fills it waits.) */
typedef struct gate {
    rft_mutex lock;
    rft_cond opened;
    bool open; /* guarded by lock */
} gate;

static void stand(void *user)
{
    gate *before = user;
    rft_lock(&before->lock);
    while (!before->open) {
        rft_cond_wait_idle(&before->opened, &before->lock);
    }
    rft_unlock(&before->lock);
}

static void gate_put(gate *it, fixture *on, refit_stream_ref stream)
{
    it->open = test_on_cuda();
    if (!it->open) assert_ok(refit_stream_call(on->device, stream, stand, it, &on->error));
}

static void gate_open(gate *it)
{
    rft_lock(&it->lock);
    it->open = true;
    rft_cond_wake_all(&it->opened);
    rft_unlock(&it->lock);
}

/* As a trainer does it: behind a stream, joined by it, one group before the others. */
static void cycle_on_stream(fixture *on, refit_stream_ref stream)
{
    gate before;
    refit_future *future;
    assert_ok(rft_mutex_open(&before.lock, NULL));
    assert_ok(rft_cond_open(&before.opened, NULL));
    gate_put(&before, on, stream);
    assert_ok(refit_offloader_offload(on->offloader, stream, &future, &on->error));
    gate_open(&before);
    finish(on);
    refit_future_close(future);
    gate_put(&before, on, stream);
    assert_ok(refit_offloader_restore(on->offloader, stream, &future, &on->error));
    gate_open(&before);
    assert_ok(refit_future_wait_group(future, 1, PATIENCE_MS, &on->error));
    assert_ok(refit_future_join_group(future, 2, stream, &on->error));
    assert_ok(refit_future_join(future, stream, &on->error));
    finish(on);
    refit_future_close(future);
    assert_ok(refit_stream_wait(on->device, stream, PATIENCE_MS, &on->error));
    rft_cond_close(&before.opened);
    rft_mutex_close(&before.lock);
}

/* How much a queue must hold at once also hangs on whether its thread has seen its end before more
 * comes, so it may grow once more; a cycle that allocates does so each time. */
#define TRIALS 10

static bool two_cycles_allocate_nothing(fixture *on, refit_stream_ref stream)
{
    uint64_t before = rft_alloc_count();
    cycle_on_stream(on, stream);
    cycle_on_stream(on, stream);
    return rft_alloc_count() == before;
}

static void warm_cycles_allocate_nothing(const char *verify, const char *rate_limit)
{
    fixture on;
    refit_stream_ref stream;
    open_fixture(&on, verify, rate_limit);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    fill(&on, 7);
    cycle_on_stream(&on, stream);
    bool nothing = false;
    for (int i = 0; i < TRIALS && !nothing; i++) {
        nothing = two_cycles_allocate_nothing(&on, stream);
    }
    assert_true(nothing);
    assert_device_equal(on.device, on.memory, on.bytes, BYTES);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    close_fixture(&on);
}

static void nothing_is_allocated(void **state)
{
    (void)state;
    warm_cycles_allocate_nothing("false", "0");
    warm_cycles_allocate_nothing("true", "0");
    warm_cycles_allocate_nothing("false", "1TiB");
}

static void a_device_with_kernels_gathers_them(void **state)
{
    (void)state;
    fixture on;
    refit_device_info info = {.size = sizeof info};
    open_fixture(&on, "false", "0");
    assert_ok(refit_device_describe(on.device, &info, &on.error));
    assert_int_equal(info.small_bytes, info.kernels && test_on_cuda() ? 3000 : 0);
    close_fixture(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_regions_come_back),
        cmocka_unit_test(small_regions_come_back_verified),
        cmocka_unit_test(nothing_is_allocated),
        cmocka_unit_test(a_device_with_kernels_gathers_them),
    };
    return cmocka_run_group_tests_name("small_regions", tests, NULL, NULL);
}
