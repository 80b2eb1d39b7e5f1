/* Windows: parts of the host image visit the device, are stepped there once, and return. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <refit.h>

#include "base/clock.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define REGIONS     10
#define PARTS_MOST  96
#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

/* ---- What every test stands on: regions that live on the host, and what they must hold ---------
 */

typedef struct scene {
    refit_device *device;
    refit_device *plain; /* the one in it, for the test's own copies */
    refit_config config;
    refit_offloader *offloader;
    refit_window *window;
    uint64_t bytes[REGIONS];
    unsigned char *expected[REGIONS];
    refit_window_part parts[PARTS_MOST];
    void *born[PARTS_MOST]; /* memory of parts that are born */
    uint32_t count;
    uint32_t windows; /* of the last step */
    uint64_t seed;
    refit_error error;
} scene;

/* One larger than a slab, one of a single byte. */
static const uint64_t sizes[REGIONS] = {4096,  70000, 512,  1,      300000,
                                        65536, 65536, 4099, 600000, 33333};

static void set(scene *on, const char *key, const char *value)
{
    assert_int_equal(refit_config_set(&on->config, key, value, &on->error), REFIT_OK);
}

static void open_config(scene *on, const char *windows)
{
    *on = (scene){.seed = 88172645463325252u};
    refit_config_init(&on->config, sizeof on->config);
    set(on, "offload.piece_bytes", "64KiB");
    set(on, "offload.slab_bytes", "512KiB");
    set(on, "offload.batch", "3");
    set(on, "offload.timeout_ms", "20s");
    set(on, "offload.take_turns", "false");
    set(on, "offload.window_bytes", "128KiB");
    set(on, "offload.windows", windows);
}

static refit_status add_regions(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        char name[16];
        snprintf(name, sizeof name, "state.%u", at);
        refit_region_desc desc = {
            .size = sizeof desc, .name = name, .bytes = sizes[at], .home = REFIT_HOME_HOST};
        refit_region_id id;
        refit_status status = refit_offloader_add(on->offloader, &desc, &id, &on->error);
        if (status != REFIT_OK) return status;
        assert_int_equal(id, at);
        on->bytes[at] = sizes[at];
    }
    return REFIT_OK;
}

static void fill(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        void *bytes;
        uint64_t count;
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        assert_int_equal(count, on->bytes[at]);
        for (uint64_t i = 0; i < count; i++) {
            on->expected[at][i] = (unsigned char)seeded_next(&on->seed);
        }
        memcpy(bytes, on->expected[at], count);
    }
}

static void open_scene(scene *on, const char *device, const char *windows)
{
    open_config(on, windows);
    assert_ok(faulty_device_open(test_device_spec(device), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    assert_ok(add_regions(on));
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_int_equal(refit_offloader_get_state(on->offloader), REFIT_OFFLOADED);
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        on->expected[at] = calloc(1, on->bytes[at]);
        assert_non_null(on->expected[at]);
    }
}

/* The offloader and its window again, with another option. */
static void reopen_with(scene *on, const char *key, const char *value)
{
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    set(on, key, value);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    assert_ok(add_regions(on));
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
}

static void close_scene(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    for (uint32_t at = 0; at < PARTS_MOST; at++) {
        assert_ok(refit_memory_free(on->device, on->born[at], &on->error));
    }
    for (uint32_t at = 0; at < REGIONS; at++) {
        free(on->expected[at]);
    }
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

static void check_image(scene *on)
{
    assert_ok(refit_window_wait(on->window, PATIENCE_MS, &on->error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        void *bytes;
        uint64_t count;
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        assert_memory_equal(bytes, on->expected[at], count);
    }
}

static refit_stats stats_of(scene *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    return stats;
}

/* ---- Lists of parts -----------------------------------------------------------------------------
 */

static void add_part(scene *on, refit_region_id region, uint32_t flags, uint64_t offset,
                     uint64_t bytes)
{
    assert_true(on->count < PARTS_MOST);
    on->parts[on->count++] = (refit_window_part){.size = sizeof(refit_window_part),
                                                 .region = region,
                                                 .flags = flags,
                                                 .offset = offset,
                                                 .bytes = bytes};
}

static void list_all(scene *on)
{
    on->count = 0;
    for (uint32_t at = 0; at < REGIONS; at++) {
        add_part(on, at, 0, 0, on->bytes[at]);
    }
}

/* Some regions, some of them in pieces with bytes left out between, some together, some born. */
static void list_some(scene *on, bool with_born)
{
    on->count = 0;
    for (uint32_t at = 0; at < REGIONS; at++) {
        if (seeded_below(&on->seed, 4) == 0) continue;
        uint32_t flags = with_born && seeded_below(&on->seed, 5) == 0 ? REFIT_PART_BORN : 0;
        uint64_t most = 1 + on->bytes[at] / 6 + seeded_below(&on->seed, 90000);
        for (uint64_t offset = seeded_below(&on->seed, on->bytes[at]); offset < on->bytes[at];) {
            uint64_t left = on->bytes[at] - offset, bytes = left < most ? left : most;
            uint32_t together =
                on->count > 0 && seeded_below(&on->seed, 4) == 0 ? REFIT_PART_TOGETHER : 0;
            add_part(on, at, flags | together, offset, bytes);
            offset += bytes + 100 * seeded_below(&on->seed, 3);
        }
    }
}

/* ---- A step: each byte of each part becomes another, and must do so once ------------------------
 */

static unsigned char stepped(unsigned char byte, uint64_t at)
{
    return (unsigned char)(byte * 5u + 1u + at % 7);
}

static void step_part(scene *on, uint32_t number, void *memory)
{
    const refit_window_part *part = &on->parts[number];
    unsigned char *expected = on->expected[part->region] + part->offset;
    unsigned char *bytes = malloc(part->bytes);
    assert_non_null(bytes);
    if ((part->flags & REFIT_PART_BORN) != 0) {
        assert_null(memory);
        if (on->born[number] != NULL) {
            assert_ok(refit_memory_free(on->device, on->born[number], &on->error));
        }
        assert_ok(refit_memory_alloc(on->device, 700000, &on->born[number], &on->error));
        memory = on->born[number];
        assert_ok(refit_window_place(on->window, number, memory, &on->error));
        memcpy(bytes, expected, part->bytes);
    } else {
        if (part->offset == 0) assert_int_equal((uintptr_t)memory % 64, 0);
        test_read(on->plain, bytes, memory, part->bytes);
        assert_memory_equal(bytes, expected, part->bytes);
    }
    for (uint64_t i = 0; i < part->bytes; i++) {
        bytes[i] = expected[i] = stepped(bytes[i], i);
    }
    test_write(on->plain, memory, bytes, part->bytes);
    free(bytes);
}

/* Steps the window that next has handed out. */
static void step_window(scene *on, const refit_window_view *view)
{
    for (uint32_t at = 0; at < view->count; at++) {
        step_part(on, view->first + at, view->memory[at]);
    }
    on->windows++;
}

static void begin(scene *on)
{
    on->windows = 0;
    assert_ok(refit_window_begin(on->window, on->parts, on->count, REFIT_STREAM_NONE, &on->error));
}

/* Steps `most` windows; true if there are more. */
static bool step_windows(scene *on, uint32_t most)
{
    refit_window_view view = {.size = sizeof view};
    for (uint32_t at = 0; at < most; at++) {
        assert_ok(refit_window_next(on->window, &view, &on->error));
        if (view.count == 0) {
            assert_int_equal(view.first, on->count);
            return false;
        }
        assert_int_equal(view.first, refit_window_progress(on->window));
        step_window(on, &view);
        assert_ok(refit_window_done(on->window, REFIT_STREAM_NONE, &on->error));
        assert_int_equal(refit_window_progress(on->window), view.first + view.count);
    }
    return true;
}

static void step_all(scene *on)
{
    begin(on);
    assert_false(step_windows(on, UINT32_MAX));
    assert_int_equal(refit_window_progress(on->window), on->count);
    assert_ok(refit_window_end(on->window, &on->error));
}

static uint64_t bytes_of_list(const scene *on, bool born)
{
    uint64_t bytes = 0;
    for (uint32_t at = 0; at < on->count; at++) {
        if (born || (on->parts[at].flags & REFIT_PART_BORN) == 0) bytes += on->parts[at].bytes;
    }
    return bytes;
}

/* ---- What holds -------------------------------------------------------------------------------
 */

static void regions_begin_as_zeros(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    check_image(&on);
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(on.offloader, 4, &info, &on.error));
    assert_int_equal(info.place, REFIT_ON_HOST);
    assert_null(info.memory);
    assert_int_equal(info.bound, 0);
    close_scene(&on);
}

static void each_byte_is_stepped_once(void **state)
{
    (void)state;
    static const char *const windows[] = {"1", "2", "3", "4"};
    for (size_t at = 0; at < sizeof windows / sizeof windows[0]; at++) {
        scene on;
        open_scene(&on, "host", windows[at]);
        fill(&on);
        list_all(&on);
        for (uint64_t step = 0; step < 3; step++) {
            step_all(&on);
            check_image(&on);
            refit_stats stats = stats_of(&on);
            assert_int_equal(stats.step_count, step + 1);
            assert_int_equal(stats.step_in_bytes_last, bytes_of_list(&on, false));
            assert_int_equal(stats.step_out_bytes_last, bytes_of_list(&on, true));
            assert_true(stats.step_seconds_last > 0);
        }
        close_scene(&on);
    }
}

static void any_list_is_stepped(void **state)
{
    (void)state;
    static const char *const windows[] = {"1", "2", "3", "4"};
    for (size_t at = 0; at < sizeof windows / sizeof windows[0]; at++) {
        scene on;
        open_scene(&on, "host", windows[at]);
        fill(&on);
        for (unsigned step = 0; step < 12; step++) {
            list_some(&on, step % 2 == 1);
            step_all(&on);
            if (step % 3 == 0) check_image(&on);
        }
        check_image(&on);
        close_scene(&on);
    }
}

static void device_memory_is_that_of_the_windows(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "3");
    fill(&on);
    on.count = 0; /* none is larger than a window */
    for (uint32_t at = 0; at < REGIONS; at++) {
        for (uint64_t offset = 0; offset < on.bytes[at]; offset += 65536) {
            uint64_t left = on.bytes[at] - offset;
            add_part(&on, at, 0, offset, left < 65536 ? left : 65536);
        }
    }
    refit_device_info info = {.size = sizeof info};
    begin(&on);
    while (step_windows(&on, 1)) {
        assert_ok(refit_device_describe(on.device, &info, &on.error));
        assert_int_equal(info.used_bytes, 3 * 128 * 1024);
        assert_int_equal(stats_of(&on).window_bytes, 3 * 128 * 1024);
    }
    assert_true(on.windows > 6);
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    assert_ok(refit_window_trim(on.window, &on.error));
    assert_ok(refit_device_describe(on.device, &info, &on.error));
    assert_int_equal(info.used_bytes, 0);
    assert_int_equal(stats_of(&on).window_bytes, 0);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void windows_grow_to_parts_that_stay_together(void **state)
{
    (void)state;
    scene on;
    uint64_t least;
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    for (uint32_t at = 1; at < REGIONS; at++) {
        on.parts[at].flags = REFIT_PART_TOGETHER;
    }
    assert_ok(refit_window_measure(on.window, on.parts, on.count, &least, &on.error));
    assert_true(least >= bytes_of_list(&on, true));
    assert_int_equal(least % 512, 0);
    step_all(&on);
    assert_int_equal(on.windows, 1);
    check_image(&on);
    assert_int_equal(stats_of(&on).window_bytes, least); /* there is one window */
    close_scene(&on);
}

static void a_short_list_takes_no_more_memory_than_it_needs(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "4");
    fill(&on);
    on.count = 0;
    add_part(&on, 0, 0, 0, 4096);
    step_all(&on);
    assert_int_equal(stats_of(&on).window_bytes, 4096);
    add_part(&on, 1, 0, 0, 70000);
    add_part(&on, 4, 0, 0, 100000);
    step_all(&on);
    assert_int_equal(stats_of(&on).window_bytes, 2 * 131072);
    on.count = 1;
    step_all(&on);
    assert_int_equal(stats_of(&on).window_bytes, 2 * 131072);
    check_image(&on);
    close_scene(&on);
}

static void memory_of_the_caller_is_used(void **state)
{
    (void)state;
    scene on;
    void *memory;
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    assert_ok(refit_memory_alloc(on.device, 3 * 700416, &memory, &on.error));
    assert_int_equal(refit_window_set_memory(on.window, (char *)memory + 1, 512, 1, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_window_set_memory(on.window, memory, 513, 1, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_window_set_memory(on.window, memory, 512, 5, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_window_set_memory(on.window, memory, 512, 0, &on.error),
                     REFIT_ERR_INVALID);
    assert_ok(refit_window_set_memory(on.window, memory, 65536, 3, &on.error));
    assert_int_equal(
        refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_LIMIT);
    assert_ok(refit_window_set_memory(on.window, memory, 700416, 3, &on.error));
    assert_int_equal(stats_of(&on).window_bytes, 3 * 700416);
    begin(&on);
    assert_int_equal(refit_window_set_memory(on.window, NULL, 0, 0, &on.error), REFIT_ERR_STATE);
    while (step_windows(&on, 1)) {
    }
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    assert_ok(refit_window_set_memory(on.window, NULL, 0, 0, &on.error));
    assert_ok(refit_memory_free(on.device, memory, &on.error));
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void born_parts_need_no_memory_of_the_window(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    list_all(&on);
    for (uint32_t at = 0; at < REGIONS; at++) {
        on.parts[at].flags = REFIT_PART_BORN;
    }
    refit_window_view view = {.size = sizeof view};
    begin(&on);
    assert_ok(refit_window_next(on.window, &view, &on.error));
    assert_int_equal(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_window_place(on.window, view.first + view.count, &view, &on.error),
                     REFIT_ERR_INVALID);
    assert_true(view.count > 1);
    void *first;
    assert_ok(refit_memory_alloc(on.device, on.parts[view.first].bytes, &first, &on.error));
    assert_ok(refit_window_place(on.window, view.first, first, &on.error));
    assert_int_equal(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_window_end(on.window, &on.error));
    assert_ok(refit_memory_free(on.device, first, &on.error));
    begin(&on);
    while (step_windows(&on, 1)) {
    }
    assert_true(on.windows > 4);
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    assert_int_equal(stats_of(&on).window_bytes, 0);
    assert_int_equal(stats_of(&on).step_in_bytes_last, 0);
    close_scene(&on);
}

/* One part that is born, then one that comes. */
static void born_parts_and_others_share_a_step(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    fill(&on);
    on.count = 0;
    add_part(&on, 0, REFIT_PART_BORN, 0, 4096);
    add_part(&on, 4, 0, 0, 100000);
    step_all(&on);
    check_image(&on);
    assert_int_equal(stats_of(&on).step_in_bytes_last, 100000);
    close_scene(&on);
}

/* Memory that other regions have used does not show through. */
static void regions_that_are_added_again_begin_as_zeros(void **state)
{
    (void)state;
    scene on;
    void *memory[REGIONS];
    open_scene(&on, "host", "2");
    list_all(&on);
    step_all(&on); /* written by windows alone */
    check_image(&on);
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_memory_alloc(on.device, on.bytes[at], &memory[at], &on.error));
        assert_ok(refit_offloader_bind(on.offloader, at, memory[at], &on.error));
    }
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(refit_offloader_clear(on.offloader, &on.error));
    assert_ok(add_regions(&on));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_memory_free(on.device, memory[at], &on.error));
        memset(on.expected[at], 0, on.bytes[at]);
    }
    check_image(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

/* Neither longer than the step itself, however many there were before. */
static void times_are_those_of_the_last_step(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    for (int step = 0; step < 4; step++) {
        int64_t began = rft_now();
        step_all(&on);
        assert_ok(refit_window_wait(on.window, PATIENCE_MS, &on.error));
        double elapsed = rft_seconds(rft_now() - began);
        refit_stats stats = stats_of(&on);
        assert_true(stats.step_exposed_seconds_last > 0);
        assert_true(stats.step_exposed_seconds_last < elapsed);
        assert_true(stats.step_seconds_last > 0);
        assert_true(stats.step_seconds_last < elapsed);
    }
    check_image(&on);
    close_scene(&on);
}

/* Regions that lie side by side in the image: one copy of both, cut at offload.piece_bytes. */
static void neighbours_are_one_copy(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "1");
    reopen_with(&on, "offload.batch", "1");
    fill(&on);
    on.count = 0;
    add_part(&on, 0, 0, 0, 4096);
    add_part(&on, 1, 0, 0, 70000);
    faulty_device_reset(on.device);
    step_all(&on);
    check_image(&on);
    assert_int_equal(on.windows, 1);
    assert_int_equal(faulty_device_calls(on.device, FAULTY_COPY_BATCH), 2 + 2);
    close_scene(&on);
}

static void a_step_may_end_early(void **state)
{
    (void)state;
    static const uint32_t most[] = {0, 1, 3};
    for (size_t at = 0; at < 3; at++) {
        scene on;
        open_scene(&on, "host", "3");
        fill(&on);
        list_all(&on);
        begin(&on);
        assert_true(step_windows(&on, most[at]));
        uint32_t progress = refit_window_progress(on.window);
        if (at == 1) { /* with a window in use, which keeps its bytes */
            refit_window_view view = {.size = sizeof view}, again = view;
            assert_ok(refit_window_next(on.window, &view, &on.error));
            assert_ok(refit_window_next(on.window, &again, &on.error));
            assert_ptr_equal(view.memory, again.memory);
            assert_int_equal(view.first, again.first);
            test_fill(on.plain, view.memory[0], 0xCC, on.parts[view.first].bytes);
        }
        assert_ok(refit_window_end(on.window, &on.error));
        assert_int_equal(refit_window_progress(on.window), progress);
        check_image(&on);
        /* The rest, once. */
        on.count -= progress;
        memmove(on.parts, on.parts + progress, on.count * sizeof on.parts[0]);
        step_all(&on);
        check_image(&on);
        close_scene(&on);
    }
}

static void a_wrong_list_is_refused(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    fill(&on);
    static const struct {
        const char *name;
        refit_window_part part;
        refit_status status;
    } cases[] = {
        {"no such region", {sizeof(refit_window_part), REGIONS, 0, 0, 1}, REFIT_ERR_NOT_FOUND},
        {"no bytes", {sizeof(refit_window_part), 1, 0, 0, 0}, REFIT_ERR_INVALID},
        {"behind the end", {sizeof(refit_window_part), 1, 0, 69999, 2}, REFIT_ERR_INVALID},
        {"far behind the end", {sizeof(refit_window_part), 1, 0, UINT64_MAX, 2}, REFIT_ERR_INVALID},
        {"unknown flag", {sizeof(refit_window_part), 1, 4, 0, 1}, REFIT_ERR_INVALID},
        {"bytes given twice", {sizeof(refit_window_part), 0, 0, 4095, 1}, REFIT_ERR_INVALID},
        {"another size", {sizeof(refit_window_part) + 8, 1, 0, 0, 1}, REFIT_ERR_INVALID},
    };
    for (size_t at = 0; at < sizeof cases / sizeof cases[0]; at++) {
        on.count = 0;
        add_part(&on, 0, 0, 0, 4096);
        on.parts[on.count++] = cases[at].part;
        refit_status status =
            refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error);
        if (status != cases[at].status) print_error("%s: %s\n", cases[at].name, on.error.text);
        assert_int_equal(status, cases[at].status);
        assert_true(on.error.text[0] != '\0');
    }
    on.count = 0;
    add_part(&on, 0, REFIT_PART_TOGETHER, 0, 4096);
    assert_int_equal(
        refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_INVALID);
    assert_int_equal(refit_window_begin(on.window, NULL, 1, REFIT_STREAM_NONE, &on.error),
                     REFIT_ERR_INVALID);
    list_all(&on);
    step_all(&on);
    check_image(&on);
    on.count = 0;
    step_all(&on); /* no part at all */
    check_image(&on);
    close_scene(&on);
}

static void calls_in_a_wrong_state_are_refused(void **state)
{
    (void)state;
    scene on;
    refit_window *second;
    refit_lease *lease;
    void *bytes;
    uint64_t count;
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    refit_window_view view = {.size = sizeof view};
    assert_int_equal(refit_window_open(on.offloader, &second, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_window_place(on.window, 0, &view, &on.error), REFIT_ERR_STATE);
    assert_ok(refit_window_end(on.window, &on.error));

    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_int_equal(
        refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_BUSY);
    assert_int_equal(refit_window_host(on.window, 0, &bytes, &count, &on.error), REFIT_ERR_BUSY);
    refit_lease_release(lease);

    begin(&on);
    assert_int_equal(
        refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_STATE);
    assert_int_equal(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_window_trim(on.window, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_window_host(on.window, 0, &bytes, &count, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_BUSY);
    view.size = 8;
    assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_INVALID);
    while (step_windows(&on, 1)) {
    }
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    refit_lease_release(lease);
    close_scene(&on);
}

static void homes_do_not_mix(void **state)
{
    (void)state;
    scene on;
    void *memory;
    refit_region_id id;
    refit_offloader *other;
    open_scene(&on, "host", "2");
    assert_ok(refit_offloader_open(on.device, &on.config, &other, &on.error));
    assert_ok(refit_memory_alloc(on.device, 4096, &memory, &on.error));
    refit_region_desc desc = {.size = sizeof desc, .name = "a", .memory = memory, .bytes = 4096};
    refit_region_desc host = {
        .size = sizeof host, .name = "b", .bytes = 4096, .home = REFIT_HOME_HOST};
    desc.home = REFIT_HOME_HOST;
    assert_int_equal(refit_offloader_add(other, &desc, &id, &on.error), REFIT_ERR_INVALID);
    desc.home = (refit_home)2;
    assert_int_equal(refit_offloader_add(other, &desc, &id, &on.error), REFIT_ERR_INVALID);
    host.policy = REFIT_ZERO;
    assert_int_equal(refit_offloader_add(other, &host, &id, &on.error), REFIT_ERR_INVALID);
    host.policy = REFIT_KEEP;
    desc.home = REFIT_HOME_DEVICE;
    assert_ok(refit_offloader_add(other, &desc, &id, &on.error));
    assert_int_equal(refit_offloader_add(other, &host, &id, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_offloader_close(other, &on.error));
    assert_ok(refit_memory_free(on.device, memory, &on.error));
    close_scene(&on);
}

/* Regions that live on the host are bound and restored like any that are away; and states that
 * have left may be stepped in windows before they return, verified or not. */
static void regions_come_to_stay_and_leave_again(const char *verify)
{
    scene on;
    void *memory[REGIONS];
    open_config(&on, "2");
    set(&on, "offload.verify", verify);
    refit_config config = on.config;
    open_scene(&on, "host", "2");
    assert_ok(refit_window_close(on.window, &on.error));
    assert_ok(refit_offloader_close(on.offloader, &on.error));
    assert_ok(refit_offloader_open(on.device, &config, &on.offloader, &on.error));
    assert_ok(add_regions(&on));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_ok(refit_window_open(on.offloader, &on.window, &on.error));
    fill(&on);
    list_all(&on);
    for (int round = 0; round < 2; round++) {
        step_all(&on);
        check_image(&on);
        for (uint32_t at = 0; at < REGIONS; at++) {
            assert_ok(refit_memory_alloc(on.device, on.bytes[at], &memory[at], &on.error));
            assert_ok(refit_offloader_bind(on.offloader, at, memory[at], &on.error));
        }
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
        assert_int_equal(
            refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error),
            REFIT_ERR_STATE);
        for (uint32_t at = 0; at < REGIONS; at++) {
            assert_device_equal(on.plain, memory[at], on.expected[at], on.bytes[at]);
        }
        assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
        for (uint32_t at = 0; at < REGIONS; at++) {
            assert_ok(refit_offloader_unbind(on.offloader, at, &on.error));
            assert_ok(refit_memory_free(on.device, memory[at], &on.error));
        }
    }
    close_scene(&on);
}

static void states_move_by_both_schedules(void **state)
{
    (void)state;
    regions_come_to_stay_and_leave_again("false");
    regions_come_to_stay_and_leave_again("true");
}

/* ---- Arithmetic on a stream
 * ----------------------------------------------------------------------- */

/* One part, stepped in stream order. Host device: its memory is read and written by the stream. */
typedef struct queued_part {
    scene *on;
    unsigned char *memory;
    uint32_t number;
} queued_part;

static void step_queued(void *user)
{
    const queued_part *queued = user;
    const refit_window_part *part = &queued->on->parts[queued->number];
    for (uint64_t i = 0; i < part->bytes; i++) {
        queued->memory[i] = stepped(queued->memory[i], i);
    }
}

static void expect_step(scene *on)
{
    for (uint32_t number = 0; number < on->count; number++) {
        const refit_window_part *part = &on->parts[number];
        unsigned char *expected = on->expected[part->region] + part->offset;
        for (uint64_t i = 0; i < part->bytes; i++) {
            expected[i] = stepped(expected[i], i);
        }
    }
}

static void copies_out_follow_the_stream(void **state)
{
    (void)state;
    static const char *const windows[] = {"1", "2", "3", "4"};
    if (test_on_cuda()) skip(); /* its memory is not the CPU's */
    for (size_t at = 0; at < sizeof windows / sizeof windows[0]; at++) {
        scene on;
        refit_stream_ref stream;
        queued_part queued[PARTS_MOST];
        open_scene(&on, "host", windows[at]);
        fill(&on);
        assert_ok(refit_stream_open(on.device, &stream, &on.error));
        for (int step = 0; step < 6; step++) {
            refit_window_view view = {.size = sizeof view};
            list_some(&on, false);
            assert_ok(refit_window_begin(on.window, on.parts, on.count, stream, &on.error));
            for (;;) {
                assert_ok(refit_window_next(on.window, &view, &on.error));
                if (view.count == 0) break;
                for (uint32_t part = 0; part < view.count; part++) {
                    queued_part *one = &queued[view.first + part];
                    *one = (queued_part){&on, view.memory[part], view.first + part};
                    assert_ok(refit_stream_call(on.device, stream, step_queued, one, &on.error));
                }
                assert_ok(refit_window_done(on.window, stream, &on.error));
            }
            assert_ok(refit_window_end(on.window, &on.error));
            assert_ok(refit_window_wait(on.window, PATIENCE_MS, &on.error));
            expect_step(&on);
            check_image(&on);
        }
        assert_ok(refit_stream_close(on.device, stream, &on.error));
        close_scene(&on);
    }
}

/* The first copies in wait for what used the windows' memory last. */
static void copies_in_follow_the_stream(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    void *memory;
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(refit_memory_alloc(on.device, 2 * 700416, &memory, &on.error));
    assert_ok(refit_window_set_memory(on.window, memory, 700416, 2, &on.error));
    void *other = test_host_alloc(on.plain, 2 * 700416);
    memset(other, 0xCC, 2 * 700416);
    faulty_device_stop(on.device);
    assert_ok(refit_stream_copy(on.device, stream, memory, other, 2 * 700416, &on.error));
    assert_ok(
        refit_window_begin(on.window, on.parts, on.count, stream, &on.error)); /* does not block */
    faulty_device_go(on.device);
    while (step_windows(&on, 1)) {
    }
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    assert_ok(refit_window_set_memory(on.window, NULL, 0, 0, &on.error));
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    assert_ok(refit_memory_free(on.device, memory, &on.error));
    test_host_free(on.plain, other, 2 * 700416);
    close_scene(&on);
}

static void host_memory_may_come_in_the_background(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    reopen_with(&on, "offload.background", "true");
    list_all(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

/* ---- Failures -----------------------------------------------------------------------------------
 */

/* Calls it until it succeeds; how often it failed. */
#define UNTIL_OK(on, failures, call)                                                               \
    do {                                                                                           \
        for (uint32_t tries = 0; (call) != REFIT_OK; tries++) {                                    \
            if (tries >= 4) print_error("%s: %s\n", #call, (on)->error.text);                      \
            assert_true(tries < 4);                                                                \
            (failures)++;                                                                          \
        }                                                                                          \
    } while (0)

/* One step in which calls that fail are repeated. Returns how many failed. */
static uint32_t step_stubbornly(scene *on)
{
    refit_window_view view = {.size = sizeof view};
    uint32_t failures = 0;
    UNTIL_OK(on, failures,
             refit_window_begin(on->window, on->parts, on->count, REFIT_STREAM_NONE, &on->error));
    for (;;) {
        UNTIL_OK(on, failures, refit_window_next(on->window, &view, &on->error));
        if (view.count == 0) break;
        step_window(on, &view);
        if (refit_window_done(on->window, REFIT_STREAM_NONE, &on->error) != REFIT_OK) {
            failures++;
            assert_int_equal(refit_window_progress(on->window), view.first + view.count);
        }
    }
    UNTIL_OK(on, failures, refit_window_end(on->window, &on->error));
    UNTIL_OK(on, failures, refit_window_wait(on->window, PATIENCE_MS, &on->error));
    return failures;
}

typedef void (*order_fault)(scene *on, faulty_slot slot, uint32_t nth, refit_status status);

static void fail_at_once(scene *on, faulty_slot slot, uint32_t nth, refit_status status)
{
    faulty_device_fail(on->device, slot, nth, status);
}

static void fail_under_way(scene *on, faulty_slot slot, uint32_t nth, refit_status status)
{
    faulty_device_fail_later(on->device, slot, nth, status);
}

typedef struct fault_case {
    const char *name;
    faulty_slot slot;
    order_fault order;
    refit_status fault;
    bool may_pass; /* another way leads to the same end */
} fault_case;

static const fault_case faults[] = {
    {"a copy is refused", FAULTY_COPY_BATCH, fail_at_once, REFIT_ERR_COPY, false},
    {"a copy breaks", FAULTY_COPY_BATCH, fail_under_way, REFIT_ERR_COPY, false},
    {"an event cannot be recorded", FAULTY_EVENT_RECORD, fail_at_once, REFIT_ERR_DEVICE, false},
    {"an event cannot be waited for", FAULTY_EVENT_WAIT, fail_at_once, REFIT_ERR_DEVICE, true},
    {"no memory for windows", FAULTY_MEMORY_ALLOC, fail_at_once, REFIT_ERR_DEVICE_MEMORY, true},
};

/* A step meets each failure in turn: each part is stepped once all the same. */
static void every_failure_can_be_repeated(void **state)
{
    (void)state;
    for (size_t at = 0; at < sizeof faults / sizeof faults[0]; at++) {
        const fault_case *fault = &faults[at];
        uint32_t calls = 1, failed = 0;
        for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
            scene on;
            open_scene(&on, "host", nth % 2 == 0 ? "2" : "3");
            fill(&on);
            list_all(&on);
            faulty_device_reset(on.device);
            if (nth > 0) fault->order(&on, fault->slot, nth, fault->fault);
            uint32_t failures = step_stubbornly(&on);
            assert_int_equal(stats_of(&on).step_failures, failures);
            assert_int_equal(stats_of(&on).step_in_bytes_last, bytes_of_list(&on, false));
            assert_int_equal(stats_of(&on).step_out_bytes_last, bytes_of_list(&on, true));
            if (nth == 0) calls = faulty_device_calls(on.device, fault->slot);
            if (nth == 0) assert_int_equal(failures, 0);
            failed += failures > 0;
            faulty_device_reset(on.device); /* this time there may have been fewer calls */
            check_image(&on);
            step_all(&on);
            check_image(&on);
            close_scene(&on);
        }
        if (!fault->may_pass && failed < calls / 2) print_error("%s: %u\n", fault->name, failed);
        assert_true(fault->may_pass || failed >= calls / 2);
    }
}

/* A step that meets a failure is given up: parts before it are stepped, those behind are not. */
static void a_failed_step_can_be_given_up(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth < 12; nth++) {
        scene on;
        open_scene(&on, "host", "2");
        fill(&on);
        list_all(&on);
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        refit_window_view view = {.size = sizeof view};
        refit_status status =
            refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error);
        while (status == REFIT_OK) {
            status = refit_window_next(on.window, &view, &on.error);
            if (status != REFIT_OK || view.count == 0) break;
            step_window(&on, &view);
            status = refit_window_done(on.window, REFIT_STREAM_NONE, &on.error);
        }
        uint32_t progress = refit_window_progress(on.window), failures = 0;
        UNTIL_OK(&on, failures, refit_window_end(on.window, &on.error));
        UNTIL_OK(&on, failures, refit_window_wait(on.window, PATIENCE_MS, &on.error));
        check_image(&on);
        on.count -= progress;
        memmove(on.parts, on.parts + progress, on.count * sizeof on.parts[0]);
        step_all(&on);
        check_image(&on);
        assert_true(stats_of(&on).step_failures > 0);
        close_scene(&on);
    }
}

static void too_little_memory_makes_fewer_and_smaller_windows(void **state)
{
    (void)state;
    /* Capacity, and what is taken of it: windows are 128 KiB, the largest part needs 64 KiB. */
    static const struct {
        const char *device;
        uint64_t taken;
    } cases[] = {
        {"host:capacity=1MiB", 4 * 131072},   {"host:capacity=512KiB", 4 * 131072},
        {"host:capacity=400KiB", 3 * 131072}, {"host:capacity=260KiB", 2 * 131072},
        {"host:capacity=200KiB", 2 * 65536},  {"host:capacity=100KiB", 65536},
    };
    if (test_on_cuda()) skip(); /* a GPU's memory comes in larger pieces */
    for (size_t at = 0; at < sizeof cases / sizeof cases[0]; at++) {
        scene on;
        open_scene(&on, cases[at].device, "4");
        fill(&on);
        on.count = 0;
        for (uint64_t offset = 0; offset < 589824; offset += 65536) {
            add_part(&on, 8, 0, offset, 65536);
        }
        step_all(&on);
        check_image(&on);
        assert_int_equal(stats_of(&on).window_bytes, cases[at].taken);
        step_all(&on);
        check_image(&on);
        assert_int_equal(stats_of(&on).window_bytes, cases[at].taken);
        close_scene(&on);
    }
    scene on;
    open_scene(&on, "host:capacity=60KiB", "2");
    fill(&on);
    list_all(&on);
    assert_int_equal(
        refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_DEVICE_MEMORY);
    check_image(&on);
    close_scene(&on);
}

/* A step does not ask for more each time; after a trim it does. */
static void a_trim_lets_the_windows_be_as_configured_again(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "3");
    fill(&on);
    on.count = 0;
    for (uint64_t offset = 0; offset < 589824; offset += 65536) {
        add_part(&on, 8, 0, offset, 65536);
    }
    faulty_device_fail(on.device, FAULTY_MEMORY_ALLOC, 1, REFIT_ERR_DEVICE_MEMORY);
    step_all(&on);
    assert_int_equal(stats_of(&on).window_bytes, 2 * 131072);
    uint32_t calls = faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC);
    step_all(&on);
    assert_int_equal(faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC), calls);
    assert_ok(refit_window_trim(on.window, &on.error));
    step_all(&on);
    assert_int_equal(stats_of(&on).window_bytes, 3 * 131072);
    check_image(&on);
    close_scene(&on);
}

/* Copies that are repeated do not need the stream of the arithmetic, which may be closed by then.
 */
static void copies_are_repeated_without_the_stream(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    refit_window_view view = {.size = sizeof view};
    open_scene(&on, "host", "2");
    fill(&on);
    on.count = 0;
    add_part(&on, 5, 0, 0, 65536);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    begin(&on);
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    faulty_device_stop(on.device);
    assert_ok(refit_window_done(on.window, stream, &on.error));
    assert_ok(refit_window_end(on.window, &on.error));
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    faulty_device_go(on.device);
    assert_int_equal(refit_window_wait(on.window, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    assert_ok(refit_window_wait(on.window, PATIENCE_MS, &on.error));
    check_image(&on);
    close_scene(&on);
}

/* A done that ran out of time is repeated, as long as it takes. */
static void done_is_repeated_after_its_deadline(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "host", "2");
    reopen_with(&on, "offload.timeout_ms", "50ms");
    fill(&on);
    on.count = 0;
    add_part(&on, 5, 0, 0, 65536);
    add_part(&on, 6, 0, 0, 65536);
    uint64_t bytes = 65536;
    void *memory;
    assert_ok(refit_memory_alloc(on.device, 2 * bytes, &memory, &on.error));
    assert_ok(refit_window_set_memory(on.window, memory, bytes, 2, &on.error));
    begin(&on);
    refit_window_view view = {.size = sizeof view};
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    faulty_device_stop(on.device);
    assert_ok(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    for (int tries = 0; tries < 2; tries++) {
        assert_int_equal(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error),
                         REFIT_ERR_TIMEOUT);
        assert_int_equal(refit_window_progress(on.window), 2);
    }
    faulty_device_go(on.device);
    assert_ok(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    assert_ok(refit_window_close(on.window, &on.error));
    assert_ok(refit_memory_free(on.device, memory, &on.error));
    assert_ok(refit_window_open(on.offloader, &on.window, &on.error));
    close_scene(&on);
}

static void copies_that_hang_end_by_the_deadline(void **state)
{
    (void)state;
    scene on;
    open_config(&on, "2");
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    reopen_with(&on, "offload.timeout_ms", "50ms");
    fill(&on);
    refit_window_view view = {.size = sizeof view};
    faulty_device_stop(on.device);
    begin(&on);
    assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_window_end(on.window, &on.error), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_window_close(on.window, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_true(step_windows(&on, 1));
    faulty_device_stop(on.device);
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    refit_status status = refit_window_done(on.window, REFIT_STREAM_NONE, &on.error);
    assert_true(status == REFIT_OK || status == REFIT_ERR_TIMEOUT);
    status = refit_window_wait(on.window, 0, &on.error);
    assert_true(status == REFIT_OK || status == REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    while (step_windows(&on, 1)) {
    }
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    close_scene(&on);
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    scene on;
    failing_alloc_begin(0);
    open_scene(&on, "host", "3");
    fill(&on);
    list_all(&on);
    step_all(&on);
    check_image(&on);
    for (int step = 0; step < 3; step++) {
        failing_alloc_here(1);
        step_all(&on);
        assert_false(failing_alloc_stop_here());
        check_image(&on);
    }
    close_scene(&on);
    assert_false(failing_alloc_end());
}

static void each_allocation_may_fail(void **state)
{
    (void)state;
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        scene on;
        failing_alloc_begin(0);
        open_scene(&on, "host", "2");
        fill(&on);
        list_all(&on);
        failing_alloc_here(nth);
        refit_status status =
            refit_window_begin(on.window, on.parts, on.count, REFIT_STREAM_NONE, &on.error);
        came = failing_alloc_stop_here();
        assert_true(status == (came ? REFIT_ERR_HOST_MEMORY : REFIT_OK));
        if (!came) assert_ok(refit_window_end(on.window, &on.error));
        check_image(&on);
        step_all(&on);
        check_image(&on);
        close_scene(&on);
        assert_false(failing_alloc_end());
    }
}

/* The copies of one direction can be waited for no more: the window closes all the same, and
 * nothing reads the bytes that did not come back. */
static void a_window_over_copies_that_hang_closes(void **state)
{
    (void)state;
    scene on;
    refit_lease *lease;
    refit_window_view view = {.size = sizeof view};
    if (test_on_cuda()) skip(); /* its driver drains a stream that is closed */
    open_scene(&on, "host", "2");
    fill(&on);
    list_all(&on);
    begin(&on);
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    faulty_device_fail_times(on.device, FAULTY_COPY_BATCH, 1, FAULTY_ALWAYS, REFIT_ERR_COPY);
    faulty_device_fail_times(on.device, FAULTY_EVENT_RECORD, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail_times(on.device, FAULTY_STREAM_CLOSE, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    assert_true(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error) != REFIT_OK);
    faulty_device_reset(on.device);
    assert_true(refit_window_end(on.window, &on.error) != REFIT_OK);
    assert_ok(refit_window_close(on.window, &on.error));
    on.window = NULL;
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_BUSY);
    close_scene(&on);
}

static void a_pageable_offloader_has_no_windows(void **state)
{
    (void)state;
    scene on;
    refit_window *window;
    open_scene(&on, "host", "2");
    set(&on, "use_pinned_optimizer_offload", "false");
    refit_offloader *other;
    assert_ok(refit_offloader_open(on.device, &on.config, &other, &on.error));
    assert_int_equal(refit_window_open(other, &window, &on.error), REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_offloader_close(other, &on.error));
    assert_int_equal(refit_window_open(NULL, &window, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_window_close(NULL, &on.error));
    assert_int_equal(refit_window_progress(NULL), 0);
    close_scene(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(regions_begin_as_zeros),
        cmocka_unit_test(each_byte_is_stepped_once),
        cmocka_unit_test(any_list_is_stepped),
        cmocka_unit_test(device_memory_is_that_of_the_windows),
        cmocka_unit_test(windows_grow_to_parts_that_stay_together),
        cmocka_unit_test(a_short_list_takes_no_more_memory_than_it_needs),
        cmocka_unit_test(memory_of_the_caller_is_used),
        cmocka_unit_test(born_parts_need_no_memory_of_the_window),
        cmocka_unit_test(born_parts_and_others_share_a_step),
        cmocka_unit_test(regions_that_are_added_again_begin_as_zeros),
        cmocka_unit_test(times_are_those_of_the_last_step),
        cmocka_unit_test(neighbours_are_one_copy),
        cmocka_unit_test(a_step_may_end_early),
        cmocka_unit_test(a_wrong_list_is_refused),
        cmocka_unit_test(calls_in_a_wrong_state_are_refused),
        cmocka_unit_test(homes_do_not_mix),
        cmocka_unit_test(states_move_by_both_schedules),
        cmocka_unit_test(copies_out_follow_the_stream),
        cmocka_unit_test(copies_in_follow_the_stream),
        cmocka_unit_test(host_memory_may_come_in_the_background),
        cmocka_unit_test(every_failure_can_be_repeated),
        cmocka_unit_test(a_failed_step_can_be_given_up),
        cmocka_unit_test(too_little_memory_makes_fewer_and_smaller_windows),
        cmocka_unit_test(a_trim_lets_the_windows_be_as_configured_again),
        cmocka_unit_test(copies_are_repeated_without_the_stream),
        cmocka_unit_test(done_is_repeated_after_its_deadline),
        cmocka_unit_test(copies_that_hang_end_by_the_deadline),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(each_allocation_may_fail),
        cmocka_unit_test(a_window_over_copies_that_hang_closes),
        cmocka_unit_test(a_pageable_offloader_has_no_windows),
    };
    return cmocka_run_group_tests_name("window", tests, NULL, NULL);
}
