/* Masters in an arena of a GPU leave by what their weights lack: launches and copies that fail lose
 * nothing, and a GPU that is lost at any of them can be closed, and nothing is left. Those
 * that live on the host visit it in windows, and lose nothing either. */
#include "tests/offload/offload.h"

#include <refit/advanced/window.h>

#include "fake_cuda.h"
#include "kernels/cast.h"

#define MASTERS 2u
#define MOST    300000u

static const uint64_t sizes[MASTERS] = {MOST, 20000};

static struct {
    refit_device *device;
    refit_arena *arena; /* NULL: the masters live on the host, and there are windows */
    refit_offloader *offloader;
    refit_window *window;
    refit_window_part parts[MASTERS];
    void *masters[MASTERS]; /* in the arena, or of parts that are born */
    void *weights[MASTERS];
    refit_error error;
} on;

static uint32_t expected[MASTERS][MOST];
static uint16_t rounded[MOST];

/* New masters; `spoiled` of their weights are not their rounding. */
static void draw(uint32_t i, uint64_t seed, uint32_t spoiled)
{
    for (uint64_t k = 0; k < sizes[i]; k++)
        expected[i][k] = (uint32_t)(seeded_next(&seed) >> 20) & 0xBFFFFFFFu;
    rft_cast_bf16(rounded, (const void *)expected[i], sizes[i]);
    for (uint32_t k = 0; k < spoiled; k++)
        rounded[k] = (uint16_t)seeded_next(&seed);
}

static refit_status write_masters(uint32_t i, void *memory)
{
    RFT_TRY(refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, expected[i], 4 * sizes[i],
                              &on.error));
    return refit_stream_copy(on.device, REFIT_STREAM_NONE, on.weights[i], rounded, 2 * sizes[i],
                             &on.error);
}

static void add_masters(uint32_t i, bool windows)
{
    refit_region_id id;
    uint64_t bytes = 4 * sizes[i];
    assert_ok(refit_memory_alloc(on.device, 2 * sizes[i], &on.weights[i], &on.error));
    if (windows) {
        assert_ok(refit_memory_alloc(on.device, bytes, &on.masters[i], &on.error));
    } else {
        assert_ok(refit_arena_alloc(on.arena, bytes, &on.masters[i], &on.error));
        draw(i, i + 1, 0);
        assert_ok(write_masters(i, on.masters[i]));
    }
    refit_region_desc desc = {.size = sizeof desc,
                              .name = i == 0 ? "large" : "small",
                              .memory = windows ? NULL : on.masters[i],
                              .bytes = bytes,
                              .placement = windows ? REFIT_PLACEMENT_HOST : REFIT_PLACEMENT_DEVICE,
                              .weights = on.weights[i]};
    assert_ok(refit_offloader_add(on.offloader, &desc, &id, &on.error));
    on.parts[i] = (refit_window_part){.size = sizeof on.parts[i], .region = id, .bytes = bytes};
}

static void open_all(bool windows)
{
    static const char *const settings[] = {"offload.staging_bytes=1MiB",
                                           "offload.window_bytes=1MiB", "offload.take_turns=false",
                                           NULL};
    refit_config config;
    memset(&on, 0, sizeof on);
    refit_config_init(&config, sizeof config);
    set_each(&config, settings);
    fake_cuda_reset();
    assert_ok(refit_device_open("cuda:0", &config, &on.device, &on.error));
    assert_ok(refit_offloader_open(on.device, &config, &on.offloader, &on.error));
    if (!windows) assert_ok(refit_arena_open(on.device, UINT64_C(8) << 20, &on.arena, &on.error));
    for (uint32_t i = 0; i < MASTERS; i++)
        add_masters(i, windows);
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    if (windows) assert_ok(refit_window_open(on.offloader, &on.window, &on.error));
}

static void close_all(void)
{
    fake_cuda_forget_faults();
    assert_ok(refit_window_close(on.window, &on.error));
    assert_ok(refit_offloader_close(on.offloader, &on.error));
    for (uint32_t i = 0; i < MASTERS; i++) {
        refit_status freed = REFIT_OK;
        if (on.arena != NULL) freed = refit_arena_free(on.arena, on.masters[i], &on.error);
        (void)freed; /* a lost GPU gives nothing back; the arena ends all the same */
        if (on.arena == NULL) assert_ok(refit_memory_free(on.device, on.masters[i], &on.error));
        assert_ok(refit_memory_free(on.device, on.weights[i], &on.error));
    }
    assert_ok(refit_arena_close(on.arena, &on.error));
    assert_ok(refit_device_close(on.device, &on.error));
    fake_cuda_settle();
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static void check_bytes(void)
{
    for (uint32_t i = 0; i < MASTERS; i++) {
        const void *bytes = fake_cuda_bytes((uintptr_t)on.masters[i], 4 * sizes[i]);
        assert_non_null(bytes);
        assert_memory_equal(bytes, expected[i], 4 * sizes[i]);
    }
}

/* Out and back; the first failure. */
static refit_status cycle(void)
{
    RFT_TRY(offload_all(on.offloader, &on.error));
    return restore_all(on.offloader, &on.error);
}

static const char *const calls[] = {"cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyBatchAsync",
                                    "cuMemsetD8Async", "cuEventRecord"};

/* Plays on what open_all has opened, counts each call, then lets each of them fail in turn. Returns
 * how many there were. */
static uint64_t fail_each(bool windows, void (*play)(bool fails))
{
    uint64_t all = 0;
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        uint64_t made = 1;
        for (unsigned nth = 0; nth <= made; nth++) {
            open_all(windows);
            uint64_t before = fake_cuda_calls(calls[i]);
            if (nth > 0) fake_cuda_fail(calls[i], nth, 1, RFT_CU_UNKNOWN);
            play(nth > 0);
            if (nth == 0) made = fake_cuda_calls(calls[i]) - before;
            close_all();
        }
        all += made;
    }
    return all;
}

static void cycle_and_recover(bool fails)
{
    refit_status status = cycle();
    if (!fails) assert_ok(status);
    if (!fails) return;
    fake_cuda_forget_faults();
    status = refit_offloader_wait(on.offloader, TIMEOUT_MS, &on.error);
    (void)status; /* how the operation failed */
    if (refit_offloader_get_state(on.offloader) != REFIT_RESIDENT)
        assert_ok(restore_all(on.offloader, &on.error));
    check_bytes();
    assert_ok(cycle());
    check_bytes();
}

TEST(each_call_of_the_driver_that_fails_loses_nothing)
{
    /* How copies are made is the device's business. */
    assert_in_range(fail_each(false, cycle_and_recover), 20, 1000);
}

/* It is lost at each launch in turn. */
static void lose_at_each(bool windows, refit_status (*play)(void))
{
    bool lost = true;
    for (unsigned nth = 1; lost; nth++) {
        open_all(windows);
        fake_cuda_fail_later("cuLaunchKernel", nth, RFT_CU_ILLEGAL_ADDRESS);
        refit_status status = play();
        lost = status != REFIT_OK;
        if (lost) assert_int_equal(status, REFIT_ERR_DEVICE);
        close_all();
        assert_in_range(nth, 1, 100);
    }
}

TEST(a_gpu_lost_at_any_launch_can_be_closed)
{
    lose_at_each(false, cycle);
}

/* ---- In windows ------------------------------------------------------------------------------ */

/* A call that fails is made again. */
#define AGAIN(status, call)                                                                        \
    do {                                                                                           \
        (status) = (call);                                                                         \
        for (int tries = 0; (status) != REFIT_OK && tries < 3; tries++) {                          \
            (status) = (call);                                                                     \
        }                                                                                          \
        if ((status) != REFIT_OK) return (status);                                                 \
    } while (0)

/* The driver's calls that the test itself makes may fail as ordered, too. */
static refit_status step(uint32_t flags, uint64_t seed, uint32_t spoiled)
{
    refit_status status;
    refit_window_view view = {.size = sizeof view};
    for (uint32_t i = 0; i < MASTERS; i++)
        on.parts[i].flags = flags;
    AGAIN(status, refit_window_begin(on.window, on.parts, MASTERS, REFIT_STREAM_NONE, &on.error));
    for (;;) {
        AGAIN(status, refit_window_next(on.window, &view, &on.error));
        if (view.count == 0) break;
        for (uint32_t i = view.first; i < view.first + view.count; i++) {
            void *memory = flags == 0 ? view.memory[i - view.first] : on.masters[i];
            const void *bytes = fake_cuda_bytes((uintptr_t)memory, 4 * sizes[i]);
            assert_non_null(bytes);
            if (flags == 0) assert_memory_equal(bytes, expected[i], 4 * sizes[i]);
            if (flags != 0) AGAIN(status, refit_window_place(on.window, i, memory, &on.error));
            draw(i, seed + i, spoiled);
            AGAIN(status, write_masters(i, memory));
        }
        status = refit_window_done(on.window, REFIT_STREAM_NONE, &on.error);
        if (status != REFIT_OK) continue; /* the next calls try again */
    }
    AGAIN(status, refit_window_end(on.window, &on.error));
    AGAIN(status, refit_window_wait(on.window, TIMEOUT_MS, &on.error));
    return REFIT_OK;
}

/* Masters that fit, that do not, and that fit again. */
static refit_status steps(void)
{
    RFT_TRY(step(REFIT_PART_NEW, 1, 0));
    RFT_TRY(step(0, 11, 20000));
    return step(0, 21, 0);
}

static void step_and_recover(bool fails)
{
    (void)fails;
    assert_ok(steps());
    fake_cuda_forget_faults();
    assert_ok(step(0, 31, 0));
}

TEST(each_call_of_the_driver_may_fail_in_windows)
{
    assert_in_range(fail_each(true, step_and_recover), 20, 1000);
}

TEST(a_gpu_lost_at_any_launch_of_a_window_can_be_closed)
{
    lose_at_each(true, steps);
}

int main(void)
{
    return test_run("masters_cuda");
}
