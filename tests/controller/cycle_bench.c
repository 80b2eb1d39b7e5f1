/* The controller's test bench. */
#include "tests/controller/cycle_bench.h"

static int release_memory(void *user, refit_region_id region, void *memory, uint64_t bytes)
{
    cycle_bench *on = user;
    (void)region;
    if (on->fail_release > 0) return on->fail_release--;
    test_fill(faulty_device_inner(on->device), memory, 0xDD, bytes);
    on->memory = NULL;
    return refit_memory_free(on->device, memory, NULL) == REFIT_OK ? 0 : 1;
}

static int acquire_memory(void *user, refit_region_id region, uint64_t bytes, void **memory)
{
    cycle_bench *on = user;
    (void)region;
    if (on->fail_acquire > 0) return on->fail_acquire--;
    if (refit_memory_alloc(on->device, bytes, memory, NULL) != REFIT_OK) return 1;
    test_fill(faulty_device_inner(on->device), *memory, 0xDD, bytes); /* a torn copy leaves some */
    on->memory = *memory;
    return 0;
}

static void open_offloader(cycle_bench *on)
{
    void *memory;
    refit_region_id id;
    refit_memory_hooks hooks = {sizeof hooks, release_memory, acquire_memory, on};
    assert_ok(refit_memory_alloc(on->device, BENCH_BYTES, &memory, &on->error));
    on->memory = memory;
    for (size_t i = 0; i < BENCH_BYTES; i++)
        on->expected[i] = (unsigned char)(i * 31 + i / 251);
    test_write(faulty_device_inner(on->device), memory, on->expected, BENCH_BYTES);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    refit_region_desc region = {
        .size = sizeof region, .name = "moments", .memory = memory, .bytes = BENCH_BYTES};
    assert_ok(refit_offloader_add(on->offloader, &region, &id, &on->error));
    assert_ok(refit_offloader_set_memory(on->offloader, &hooks, &on->error));
}

static void open_publisher(cycle_bench *on)
{
    refit_tensor tensors[2];
    for (int i = 0; i < 2; i++) {
        tensors[i] = (refit_tensor){.size = sizeof tensors[i],
                                    .name = i == 0 ? "w" : "b",
                                    .dtype = REFIT_U8,
                                    .rank = 1,
                                    .shape = {sizeof on->weights[i]},
                                    .bytes = sizeof on->weights[i],
                                    .alias_of = REFIT_NO_ALIAS};
    }
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &on->config, &on->publisher, &on->error));
    assert_ok(refit_publisher_declare(on->publisher, tensors, 2, &on->error));
}

static void open_with(cycle_bench *on, const char *verify, bool with_offloader, bool with_publisher)
{
    memset(on, 0, sizeof *on);
    refit_config_init(&on->config, sizeof on->config);
    assert_ok(refit_config_set(&on->config, "offload.timeout_ms", "20s", &on->error));
    assert_ok(refit_config_set(&on->config, "offload.verify", verify, &on->error));
    assert_ok(faulty_device_open(test_device_spec("host:capacity=16MiB"), &on->device, &on->error));
    if (with_offloader) open_offloader(on);
    if (with_publisher) open_publisher(on);
    assert_ok(refit_controller_open(on->offloader, on->publisher, &on->config, &on->controller,
                                    &on->error));
}

void bench_open(cycle_bench *on, bool with_offloader, bool with_publisher)
{
    open_with(on, "false", with_offloader, with_publisher);
}

void bench_open_verified(cycle_bench *on, bool with_offloader, bool with_publisher)
{
    open_with(on, "true", with_offloader, with_publisher);
}

void bench_tear(cycle_bench *on)
{
    faulty_device_order(on->device,
                        &(faulty_order){.slot = FAULTY_COPY_BATCH, .nth = 1, .kind = FAULTY_TEARS});
}

void bench_check_image(cycle_bench *on)
{
    refit_read_lock *lock;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_read_lock_acquire(on->offloader, &lock, &on->error));
    assert_ok(refit_read_lock_read(lock, 0, &bytes, &count, &on->error));
    assert_memory_equal(bytes, on->expected, BENCH_BYTES);
    refit_read_lock_release(lock);
}

void bench_close(cycle_bench *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    refit_controller_close(on->controller);
    refit_publisher_close(on->publisher);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_memory_free(on->device, on->memory, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

void bench_check(const cycle_bench *on)
{
    assert_non_null(on->memory);
    assert_device_equal(faulty_device_inner(on->device), on->memory, on->expected, BENCH_BYTES);
}

refit_status bench_clear(cycle_bench *on)
{
    return refit_controller_offload(on->controller, REFIT_STREAM_NONE, &on->error);
}

refit_status bench_return(cycle_bench *on)
{
    return refit_controller_restore(on->controller, REFIT_STREAM_NONE, &on->error);
}

refit_status bench_join(cycle_bench *on)
{
    return refit_controller_wait(on->controller, REFIT_STREAM_NONE, &on->error);
}

refit_status bench_retry(cycle_bench *on, refit_status (*verb)(cycle_bench *on))
{
    refit_status status = verb(on);
    while (status == REFIT_ERR_TIMEOUT)
        status = verb(on);
    return status;
}

refit_status bench_publish(cycle_bench *on, uint64_t version)
{
    refit_weight weights[2] = {{0, on->weights[0], sizeof on->weights[0]},
                               {1, on->weights[1], sizeof on->weights[1]}};
    return refit_controller_publish(on->controller, version, weights, 2, NULL, REFIT_STREAM_NONE,
                                    &on->error);
}

refit_controller_state bench_state(const cycle_bench *on)
{
    return refit_controller_get_state(on->controller);
}

refit_stats bench_stats(cycle_bench *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_controller_stats(on->controller, &stats, &on->error));
    return stats;
}
