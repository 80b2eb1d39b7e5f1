/* Thousands of small regions leave and come back, gathered where the device can; what lies between
 * them stays as it is. */
#include "tests/offload/offload.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/thread.h"

#define REGIONS 2000u
#define ROOM    4096u /* for a region and what follows it */
#define BYTES   ((uint64_t)REGIONS * ROOM)

static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const limited[] = {"offload.rate_limit=1TiB", NULL};

struct scene {
    refit_device *device;
    refit_offloader *offloader;
    refit_stream_ref stream;
    char *memory; /* of the device */
    char *bytes;  /* what it held */
    refit_error error;
};

/* How a test's scene is. */
struct opening {
    const char *const *settings;
};

static uint64_t size_of(uint32_t region)
{
    return region % 50 == 0 ? ROOM : 1 + region * 977u % (ROOM - 64);
}

static void add_regions(scene *on)
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

scene *open_scene(const opening *how)
{
    static scene only;
    scene *on = &only;
    static const char *const common[] = {"offload.small_bytes=3000", "offload.staging_bytes=1MiB",
                                         "offload.slab_bytes=1MiB", "offload.take_turns=false",
                                         NULL};
    refit_config config;
    void *memory;
    *on = (scene){.bytes = malloc(BYTES)};
    assert_non_null(on->bytes);
    refit_config_init(&config, sizeof config);
    set_each(&config, common);
    set_each(&config, how->settings);
    assert_ok(refit_device_open(test_device_spec("host"), &config, &on->device, &on->error));
    assert_ok(refit_memory_alloc(on->device, BYTES, &memory, &on->error));
    on->memory = memory;
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
    assert_ok(refit_offloader_open(on->device, &config, &on->offloader, &on->error));
    add_regions(on);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    return on;
}

void close_scene(scene *on)
{
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    assert_ok(refit_memory_free(on->device, on->memory, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
    free(on->bytes);
}

static void fill(scene *on, unsigned seed)
{
    for (uint64_t i = 0; i < BYTES; i++)
        on->bytes[i] = (char)((i + seed) * 2654435761u >> 24);
    test_write(on->device, on->memory, on->bytes, BYTES);
}

/* While they are away their memory is used by others; what follows each keeps what they left. */
static void wipe(scene *on)
{
    test_fill(on->device, on->memory, 'x', BYTES);
    for (uint32_t i = 0; i < REGIONS; i++) {
        char *end = on->bytes + (uint64_t)i * ROOM + size_of(i);
        memset(end, 'x', (size_t)(ROOM - size_of(i)));
    }
}

SCENE(small_regions_come_back, 0)
{
    for (unsigned cycle = 0; cycle < 2; cycle++) {
        fill(on, cycle);
        assert_ok(offload_all(on->offloader, &on->error));
        wipe(on);
        assert_ok(restore_all(on->offloader, &on->error));
        assert_device_equal(on->device, on->memory, on->bytes, BYTES);
    }
}
SCENE_AGAIN(small_regions_come_back, verified, verified)

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
    while (!before->open)
        rft_cond_wait_idle(&before->opened, &before->lock);
    rft_unlock(&before->lock);
}

static void gate_put(gate *it, scene *on)
{
    it->open = test_on_cuda();
    if (!it->open) assert_ok(refit_stream_call(on->device, on->stream, stand, it, &on->error));
}

static void gate_open(gate *it)
{
    rft_lock(&it->lock);
    it->open = true;
    rft_cond_wake_all(&it->opened);
    rft_unlock(&it->lock);
}

static void finish_and_close(scene *on, refit_future *future)
{
    assert_ok(refit_offloader_wait(on->offloader, TIMEOUT_MS, &on->error));
    refit_future_close(future);
}

/* As a trainer does it: after a stream, joined by it, one group before the others. */
static void cycle_on_stream(scene *on)
{
    gate before;
    refit_future *future;
    assert_ok(rft_mutex_open(&before.lock, NULL));
    assert_ok(rft_cond_open(&before.opened, NULL));
    gate_put(&before, on);
    assert_ok(refit_offloader_offload(on->offloader, on->stream, &future, &on->error));
    gate_open(&before);
    finish_and_close(on, future);
    gate_put(&before, on);
    assert_ok(refit_offloader_restore(on->offloader, on->stream, &future, &on->error));
    gate_open(&before);
    assert_ok(refit_future_wait_group(future, 1, TIMEOUT_MS, &on->error));
    assert_ok(refit_future_join_group(future, 2, on->stream, &on->error));
    assert_ok(refit_future_join(future, on->stream, &on->error));
    finish_and_close(on, future);
    assert_ok(refit_stream_wait(on->device, on->stream, TIMEOUT_MS, &on->error));
    rft_cond_close(&before.opened);
    rft_mutex_close(&before.lock);
}

/* How much a queue must hold at once also hangs on whether its thread has seen its end before more
 * comes, so it may grow once more; a cycle that allocates does so each time. */
#define TRIALS 10

SCENE(nothing_is_allocated, 0)
{
    bool nothing = false;
    fill(on, 7);
    cycle_on_stream(on);
    for (int i = 0; i < TRIALS && !nothing; i++) {
        uint64_t before = rft_alloc_count();
        cycle_on_stream(on);
        cycle_on_stream(on);
        nothing = rft_alloc_count() == before;
    }
    assert_true(nothing);
    assert_device_equal(on->device, on->memory, on->bytes, BYTES);
}
SCENE_AGAIN(nothing_is_allocated, verified, verified)
SCENE_AGAIN(nothing_is_allocated, at_a_limited_rate, limited)

SCENE(a_device_with_kernels_gathers_them, 0)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on->device, &info, &on->error));
    assert_int_equal(info.small_bytes, info.kernels && test_on_cuda() ? 3000 : 0);
}

int main(void)
{
    return test_run("small_regions");
}
