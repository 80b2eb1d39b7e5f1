/* The frame of the conformance suite. A new device is one more row in `kinds`. */
#include "tests/device/every_device.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/faulty_device.h"
#include "tests/support/test_device.h"

typedef struct device_kind {
    const char *name;
    const char *chunk; /* offload.chunk_bytes */
    bool faulty;       /* inside the faulty device */
    bool strict;
    unsigned depth;
} device_kind;

/* A GPU's queue takes about a thousand pieces of work. Its pages are 2 MiB, so that chunks are one
 * page or several. */
static const device_kind kinds[] = {
    {"host", "256MiB", false, true, 9000},
    {"faulty_host", "256MiB", true, true, 9000},
};
static const device_kind cuda_kinds[] = {
    {"cuda", "2MiB", false, false, 500},
    {"faulty_cuda", "8MiB", true, false, 500},
};

fixture on;

/* cmocka hands the kind in as the initial state. */
static int set_up(void **state)
{
    const device_kind *kind = *state;
    refit_config config;
    const char *spec = test_device_spec("host:capacity=64MiB");
    on = (fixture){.depth = kind->depth, .strict = kind->strict};
    refit_config_init(&config, sizeof config);
    assert_ok(refit_config_set(&config, "offload.chunk_bytes", kind->chunk, &on.error));
    refit_status status = kind->faulty
                              ? faulty_device_open_with(spec, &config, &on.device, &on.error)
                              : refit_device_open(spec, &config, &on.device, &on.error);
    if (status == REFIT_OK) status = refit_stream_open(on.device, &on.stream, &on.error);
    if (status != REFIT_OK) print_error("%s\n", on.error.text);
    return status == REFIT_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    refit_status status = refit_stream_close(on.device, on.stream, &on.error);
    if (status == REFIT_OK) status = refit_device_close(on.device, &on.error);
    if (status != REFIT_OK) print_error("%s\n", on.error.text);
    return status == REFIT_OK && test_device_quiet() ? 0 : -1;
}

static int run_on(const device_kind *kind, const char *name)
{
    char group[64];
    size_t count;
    const struct CMUnitTest *tests = test_listed(&count);
    struct CMUnitTest *framed = calloc(count, sizeof *framed);
    if (framed == NULL) return 1;
    for (size_t i = 0; i < count; i++) {
        framed[i] = tests[i];
        framed[i].setup_func = set_up;
        framed[i].teardown_func = tear_down;
        framed[i].initial_state = (void *)(uintptr_t)kind;
    }
    snprintf(group, sizeof group, "%s_on_%s", name, kind->name);
    print_message("[  DEVICE  ] %s\n", kind->name);
    int failed = _cmocka_run_group_tests(group, framed, count, NULL, NULL);
    free(framed);
    return failed;
}

int run_on_every_device(const char *name)
{
    const device_kind *chosen = test_on_cuda() ? cuda_kinds : kinds;
    return run_on(&chosen[0], name) + run_on(&chosen[1], name);
}

static struct {
    bool made; /* lock and condition are there, for all tests */
    rft_mutex lock;
    rft_cond opened;
    bool open; /* guarded by lock */
} gate;

static void stand(void *user)
{
    rft_lock(&gate.lock);
    while (!gate.open)
        rft_cond_wait_idle(&gate.opened, &gate.lock);
    rft_unlock(&gate.lock);
}

void gate_put(refit_stream_ref stream)
{
    if (!gate.made) {
        assert_ok(rft_mutex_open(&gate.lock, NULL));
        assert_ok(rft_cond_open(&gate.opened, NULL));
    }
    gate.made = true;
    gate.open = false;
    refit_status status = refit_stream_call(on.device, stream, stand, NULL, NULL);
    if (status == REFIT_ERR_UNSUPPORTED) skip();
    assert_ok(status);
}

void gate_open(void)
{
    rft_lock(&gate.lock);
    gate.open = true;
    rft_cond_wake_all(&gate.opened);
    rft_unlock(&gate.lock);
}

void wait_stream(void)
{
    assert_ok(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, &on.error));
}

rft_event *open_event(void)
{
    rft_event *event;
    assert_ok(rft_device_event_open(on.device, &event, &on.error));
    return event;
}

void *device_alloc(uint64_t bytes)
{
    void *memory;
    assert_ok(refit_memory_alloc(on.device, bytes, &memory, &on.error));
    return memory;
}

void device_free(void *memory)
{
    assert_ok(refit_memory_free(on.device, memory, &on.error));
}

void *steady_alloc(uint64_t bytes)
{
    return test_host_alloc(on.device, bytes);
}

void steady_free(void *memory, uint64_t bytes)
{
    test_host_free(on.device, memory, bytes);
}

static unsigned char pattern_byte(uint64_t at, unsigned seed)
{
    uint64_t mixed = (at + 1) * UINT64_C(0x9E3779B97F4A7C15) + seed;
    return (unsigned char)(mixed >> 40);
}

void pattern_fill(void *memory, uint64_t bytes, unsigned seed)
{
    unsigned char *at = memory;
    for (uint64_t i = 0; i < bytes; i++)
        at[i] = pattern_byte(i, seed);
}

uint64_t pattern_right(const void *memory, uint64_t bytes, unsigned seed)
{
    const unsigned char *at = memory;
    uint64_t right = 0;
    for (uint64_t i = 0; i < bytes; i++)
        right += at[i] == pattern_byte(i, seed);
    return right;
}

void device_fill(void *memory, uint64_t bytes, unsigned seed)
{
    void *host = malloc(bytes);
    assert_non_null(host);
    pattern_fill(host, bytes, seed);
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, host, bytes, &on.error));
    free(host);
}

uint64_t device_right(const void *memory, uint64_t bytes, unsigned seed)
{
    void *host = malloc(bytes);
    assert_non_null(host);
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, host, memory, bytes, &on.error));
    uint64_t right = pattern_right(host, bytes, seed);
    free(host);
    return right;
}

uint64_t device_used(void)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on.device, &info, NULL));
    return info.used_bytes;
}
