/* Masters in an arena of a GPU leave by what their weights lack: launches and copies that fail lose
 * nothing, and a GPU that is lost at any of them can be closed, with nothing left behind. Those
 * that live on the host visit it in windows, and lose nothing either. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <refit.h>
#include <refit/window.h>

#include "fake_cuda.h"
#include "kernels/cast.h"
#include "tests/support/seeded.h"

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

#define PATIENCE_MS 20000u
#define MASTERS     2u
#define MOST        300000u

static const uint64_t sizes[MASTERS] = {MOST, 20000};

typedef struct fixture {
    refit_device *device;
    refit_arena *arena;
    refit_offloader *offloader;
    void *masters[MASTERS];
    void *weights[MASTERS];
    refit_error error;
} fixture;

static fixture on;
static uint32_t expected[MASTERS][MOST];
static uint16_t rounded[MOST];

static void write_to(void *memory, const void *bytes, uint64_t count)
{
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, bytes, count, &on.error));
}

static void open_all(void)
{
    refit_config config;
    memset(&on, 0, sizeof on);
    refit_config_init(&config, sizeof config);
    assert_ok(refit_config_set(&config, "offload.staging_bytes", "1MiB", &on.error));
    fake_cuda_reset();
    assert_ok(refit_device_open("cuda:0", &config, &on.device, &on.error));
    assert_ok(refit_arena_open(on.device, UINT64_C(8) << 20, &on.arena, &on.error));
    assert_ok(refit_offloader_open(on.device, &config, &on.offloader, &on.error));
    for (uint32_t i = 0; i < MASTERS; i++) {
        uint64_t seed = i + 1;
        refit_region_id id;
        for (uint64_t k = 0; k < sizes[i]; k++) {
            expected[i][k] = (uint32_t)(seeded_next(&seed) >> 20) & 0xBFFFFFFFu;
        }
        rft_cast_bf16(rounded, (const void *)expected[i], sizes[i]);
        assert_ok(refit_arena_alloc(on.arena, 4 * sizes[i], &on.masters[i], &on.error));
        assert_ok(refit_memory_alloc(on.device, 2 * sizes[i], &on.weights[i], &on.error));
        write_to(on.masters[i], expected[i], 4 * sizes[i]);
        write_to(on.weights[i], rounded, 2 * sizes[i]);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = i == 0 ? "large" : "small",
                                  .memory = on.masters[i],
                                  .bytes = 4 * sizes[i],
                                  .weights = on.weights[i]};
        assert_ok(refit_offloader_add(on.offloader, &desc, &id, &on.error));
    }
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
}

static void close_all(void)
{
    fake_cuda_forget_faults();
    assert_ok(refit_offloader_close(on.offloader, &on.error));
    for (uint32_t i = 0; i < MASTERS; i++) {
        refit_status freed = refit_arena_free(on.arena, on.masters[i], &on.error);
        (void)freed; /* a lost GPU gives nothing back; the arena ends all the same */
        assert_ok(refit_memory_free(on.device, on.weights[i], &on.error));
    }
    assert_ok(refit_arena_close(on.arena, &on.error));
    assert_ok(refit_device_close(on.device, &on.error));
    fake_cuda_settle();
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static refit_status offload(void)
{
    refit_status status = refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error);
    if (status != REFIT_OK) return status;
    return refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error);
}

static refit_status restore(void)
{
    refit_status status = refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error);
    if (status != REFIT_OK) return status;
    return refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error);
}

static void check_bytes(void)
{
    for (uint32_t i = 0; i < MASTERS; i++) {
        const void *bytes = fake_cuda_bytes((uintptr_t)on.masters[i], 4 * sizes[i]);
        assert_non_null(bytes);
        assert_memory_equal(bytes, expected[i], 4 * sizes[i]);
    }
}

static const char *const calls[] = {"cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync",
                                    "cuMemsetD8Async", "cuEventRecord"};

static void each_call_of_the_driver_that_fails_loses_nothing(void **state)
{
    (void)state;
    uint64_t all = 0;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        open_all();
        uint64_t before = fake_cuda_calls(calls[i]);
        assert_ok(offload());
        assert_ok(restore());
        uint64_t made = fake_cuda_calls(calls[i]) - before;
        all += made;
        check_bytes();
        close_all();
        for (unsigned nth = 1; nth <= made; nth++) {
            open_all();
            fake_cuda_fail(calls[i], nth, 1, RFT_CU_UNKNOWN);
            refit_status status = offload();
            if (status == REFIT_OK) status = restore();
            fake_cuda_forget_faults();
            refit_status seen = refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error);
            (void)seen; /* how the operation failed */
            if (refit_offloader_get_state(on.offloader) != REFIT_RESIDENT) assert_ok(restore());
            check_bytes();
            assert_ok(offload());
            assert_ok(restore());
            check_bytes();
            close_all();
        }
    }
    assert_in_range(all, 20, 1000); /* how copies are made is the device's business */
}

static void a_gpu_lost_at_any_launch_can_be_closed(void **state)
{
    (void)state;
    bool lost = true;
    for (unsigned nth = 1; lost; nth++) {
        open_all();
        fake_cuda_fail_later("cuLaunchKernel", nth, RFT_CU_ILLEGAL_ADDRESS);
        refit_status status = offload();
        if (status == REFIT_OK) status = restore();
        lost = status != REFIT_OK;
        if (lost) assert_int_equal(status, REFIT_ERR_DEVICE);
        close_all();
        assert_in_range(nth, 1, 100);
    }
}

/* ---- In windows */

static refit_window *window;
static refit_window_part parts[MASTERS];
static void *born[MASTERS];

static void open_windows(void)
{
    refit_config config;
    memset(&on, 0, sizeof on);
    refit_config_init(&config, sizeof config);
    assert_ok(refit_config_set(&config, "offload.staging_bytes", "1MiB", &on.error));
    assert_ok(refit_config_set(&config, "offload.window_bytes", "1MiB", &on.error));
    fake_cuda_reset();
    assert_ok(refit_device_open("cuda:0", &config, &on.device, &on.error));
    assert_ok(refit_offloader_open(on.device, &config, &on.offloader, &on.error));
    for (uint32_t i = 0; i < MASTERS; i++) {
        refit_region_id id;
        assert_ok(refit_memory_alloc(on.device, 4 * sizes[i], &born[i], &on.error));
        assert_ok(refit_memory_alloc(on.device, 2 * sizes[i], &on.weights[i], &on.error));
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = i == 0 ? "large" : "small",
                                  .bytes = 4 * sizes[i],
                                  .home = REFIT_HOME_HOST,
                                  .weights = on.weights[i]};
        assert_ok(refit_offloader_add(on.offloader, &desc, &id, &on.error));
        parts[i] =
            (refit_window_part){.size = sizeof parts[i], .region = id, .bytes = 4 * sizes[i]};
    }
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_ok(refit_window_open(on.offloader, &window, &on.error));
}

static void close_windows(void)
{
    fake_cuda_forget_faults();
    assert_ok(refit_window_close(window, &on.error));
    assert_ok(refit_offloader_close(on.offloader, &on.error));
    for (uint32_t i = 0; i < MASTERS; i++) {
        assert_ok(refit_memory_free(on.device, born[i], &on.error));
        assert_ok(refit_memory_free(on.device, on.weights[i], &on.error));
    }
    assert_ok(refit_device_close(on.device, &on.error));
    fake_cuda_settle();
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

/* New masters at `memory`, and their weights; `spoiled` of these are no rounding. The driver's
 * calls that this makes may fail as ordered, too. */
static bool step_masters(uint32_t i, void *memory, uint64_t seed, uint32_t spoiled)
{
    for (uint64_t k = 0; k < sizes[i]; k++) {
        expected[i][k] = (uint32_t)(seeded_next(&seed) >> 20) & 0xBFFFFFFFu;
    }
    rft_cast_bf16(rounded, (const void *)expected[i], sizes[i]);
    for (uint32_t k = 0; k < spoiled; k++) {
        rounded[k] = (uint16_t)seeded_next(&seed);
    }
    for (int tries = 0; tries < 3; tries++) {
        if (refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, expected[i], 4 * sizes[i],
                              &on.error) == REFIT_OK &&
            refit_stream_copy(on.device, REFIT_STREAM_NONE, on.weights[i], rounded, 2 * sizes[i],
                              &on.error) == REFIT_OK)
            return true;
    }
    return false;
}

/* A call that fails is made again. */
#define AGAIN(status, call)                                                                        \
    do {                                                                                           \
        (status) = (call);                                                                         \
        for (int tries = 0; (status) != REFIT_OK && tries < 3; tries++) {                          \
            (status) = (call);                                                                     \
        }                                                                                          \
        if ((status) != REFIT_OK) return (status);                                                 \
    } while (0)

static refit_status step(uint32_t flags, uint64_t seed, uint32_t spoiled)
{
    refit_status status;
    refit_window_view view = {.size = sizeof view};
    for (uint32_t i = 0; i < MASTERS; i++) {
        parts[i].flags = flags;
    }
    AGAIN(status, refit_window_begin(window, parts, MASTERS, REFIT_STREAM_NONE, &on.error));
    for (;;) {
        AGAIN(status, refit_window_next(window, &view, &on.error));
        if (view.count == 0) break;
        for (uint32_t i = view.first; i < view.first + view.count; i++) {
            void *memory = flags == 0 ? view.memory[i - view.first] : born[i];
            const void *bytes = fake_cuda_bytes((uintptr_t)memory, 4 * sizes[i]);
            assert_non_null(bytes);
            if (flags == 0) assert_memory_equal(bytes, expected[i], 4 * sizes[i]);
            if (flags != 0) AGAIN(status, refit_window_place(window, i, memory, &on.error));
            if (!step_masters(i, memory, seed + i, spoiled)) return REFIT_ERR_DEVICE;
        }
        status = refit_window_done(window, REFIT_STREAM_NONE, &on.error);
        if (status != REFIT_OK) continue; /* the next calls try again */
    }
    AGAIN(status, refit_window_end(window, &on.error));
    AGAIN(status, refit_window_wait(window, PATIENCE_MS, &on.error));
    return REFIT_OK;
}

/* Masters that fit, that do not, and that fit again. */
static refit_status steps(void)
{
    refit_status status = step(REFIT_PART_BORN, 1, 0);
    if (status == REFIT_OK) status = step(0, 11, 20000);
    if (status == REFIT_OK) status = step(0, 21, 0);
    return status == REFIT_OK ? step(0, 31, 0) : status;
}

static void each_call_of_the_driver_may_fail_in_windows(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        open_windows();
        uint64_t before = fake_cuda_calls(calls[i]);
        assert_ok(steps());
        uint64_t made = fake_cuda_calls(calls[i]) - before;
        close_windows();
        for (unsigned nth = 1; nth <= made; nth++) {
            open_windows();
            fake_cuda_fail(calls[i], nth, 1, RFT_CU_UNKNOWN);
            assert_ok(steps());
            fake_cuda_forget_faults();
            assert_ok(step(0, 41, 0));
            close_windows();
        }
    }
}

static void a_gpu_lost_at_any_launch_of_a_window_can_be_closed(void **state)
{
    (void)state;
    bool lost = true;
    for (unsigned nth = 1; lost; nth++) {
        open_windows();
        fake_cuda_fail_later("cuLaunchKernel", nth, RFT_CU_ILLEGAL_ADDRESS);
        refit_status status = steps();
        lost = status != REFIT_OK;
        if (lost) assert_int_equal(status, REFIT_ERR_DEVICE);
        close_windows();
        assert_in_range(nth, 1, 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_call_of_the_driver_that_fails_loses_nothing),
        cmocka_unit_test(a_gpu_lost_at_any_launch_can_be_closed),
        cmocka_unit_test(each_call_of_the_driver_may_fail_in_windows),
        cmocka_unit_test(a_gpu_lost_at_any_launch_of_a_window_can_be_closed),
    };
    return cmocka_run_group_tests_name("masters_cuda", tests, NULL, NULL);
}
