/*
 * fp32 masters that live on the host and visit the device in windows, as what their bf16 weights
 * lack: every bit is there in each step, about half of the bytes cross the link, and nothing is
 * lost, whatever the weights are, whatever fails, and whenever a step ends.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <refit.h>

#include "kernels/cast.h"
#include "kernels/master.h"
#include "offload/master_units.h"
#include "offload/offloader.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */
#define UNIT        ((uint64_t)RFT_MASTER_UNIT)
#define REGIONS     5u
#define CODED       3u /* the first so many; then one that is too small, and one without weights */
#define PLAIN       4u
#define MOST        (5 * UNIT - 100)
#define PARTS_MOST  24u

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

static const uint64_t sizes[REGIONS] = {MOST, UNIT, 4096, 4095, 30001};

typedef struct scene {
    refit_device *device, *plain; /* that fails as ordered, and the one in it */
    refit_config config;
    refit_offloader *offloader;
    refit_window *window;
    uint32_t *expected[REGIONS];
    uint16_t *rounded[REGIONS]; /* the weights, on the host */
    void *weights[REGIONS];     /* the weights, on the device; NULL: none */
    refit_window_part parts[PARTS_MOST];
    void *born[PARTS_MOST]; /* memory of parts that are born */
    uint32_t count;
    uint64_t spared;  /* of each part's weights, the first so many are a rounding; */
    uint64_t spoiled; /* then so many are none */
    uint64_t seed;
    refit_error error;
} scene;

/* ---- Regions, and what they must hold ---------------------------------------------------------
 */

static void set(scene *on, const char *key, const char *value)
{
    assert_ok(refit_config_set(&on->config, key, value, &on->error));
}

static void add_regions(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        char name[16];
        refit_region_id id;
        snprintf(name, sizeof name, "master.%u", at);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .bytes = 4 * sizes[at],
                                  .home = REFIT_HOME_HOST,
                                  .weights = on->weights[at]};
        assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
        assert_int_equal(id, at);
    }
}

static void open_offloader(scene *on)
{
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    add_regions(on);
}

static void seal(scene *on)
{
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
}

/* `settings`: "key=value" strings, ended by NULL; may itself be NULL. Not sealed. */
static void open_unsealed(scene *on, const char *windows, const char *const *settings)
{
    *on = (scene){.seed = 88172645463325252u};
    refit_config_init(&on->config, sizeof on->config);
    set(on, "offload.timeout_ms", "20s");
    set(on, "offload.take_turns", "false");
    set(on, "offload.window_bytes", "1MiB");
    set(on, "offload.windows", windows);
    for (; settings != NULL && *settings != NULL; settings++) {
        char key[64];
        const char *value = strchr(*settings, '=') + 1;
        memcpy(key, *settings, (size_t)(value - 1 - *settings));
        key[value - 1 - *settings] = '\0';
        set(on, key, value);
    }
    assert_ok(
        faulty_device_open(test_device_spec("host:capacity=256MiB"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    for (uint32_t at = 0; at < REGIONS; at++) {
        on->expected[at] = calloc(sizes[at], 4);
        on->rounded[at] = calloc(sizes[at], 2);
        assert_true(on->expected[at] != NULL && on->rounded[at] != NULL);
        if (at == PLAIN) continue;
        assert_ok(refit_memory_alloc(on->plain, 2 * sizes[at], &on->weights[at], &on->error));
        test_fill(on->plain, on->weights[at], 0, 2 * sizes[at]);
    }
    open_offloader(on);
}

static void open_scene(scene *on, const char *windows, const char *const *settings)
{
    open_unsealed(on, windows, settings);
    seal(on);
}

static void close_scene(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    for (uint32_t at = 0; at < PARTS_MOST; at++) {
        assert_ok(refit_memory_free(on->plain, on->born[at], &on->error));
    }
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_memory_free(on->plain, on->weights[at], &on->error));
        free(on->expected[at]);
        free(on->rounded[at]);
    }
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

static refit_stats stats_of(scene *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    return stats;
}

static uint64_t host_bytes_of(scene *on, uint32_t region)
{
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(on->offloader, region, &info, &on->error));
    return info.host_bytes;
}

static uint64_t used_bytes(scene *on)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on->plain, &info, &on->error));
    return info.used_bytes;
}

static void check_region(scene *on, const refit_lease *lease, uint32_t region)
{
    const void *bytes;
    uint64_t count;
    assert_ok(refit_lease_read(lease, region, &bytes, &count, &on->error));
    assert_int_equal(count, 4 * sizes[region]);
    assert_memory_equal(bytes, on->expected[region], count);
}

/* What is read between steps. */
static void check_image(scene *on)
{
    refit_lease *lease;
    assert_ok(refit_window_wait(on->window, PATIENCE_MS, &on->error));
    assert_ok(refit_lease_acquire(on->offloader, &lease, &on->error));
    for (uint32_t region = 0; region < REGIONS; region++) {
        check_region(on, lease, region);
    }
    refit_lease_release(lease);
}

/* ---- Lists of parts --------------------------------------------------------------------------
 */

static void add_part(scene *on, uint32_t region, uint32_t flags, uint64_t first, uint64_t count)
{
    assert_true(on->count < PARTS_MOST);
    on->parts[on->count++] = (refit_window_part){.size = sizeof(refit_window_part),
                                                 .region = region,
                                                 .flags = flags,
                                                 .offset = 4 * first,
                                                 .bytes = 4 * count};
}

static void list_all(scene *on, uint32_t flags)
{
    on->count = 0;
    for (uint32_t at = 0; at < REGIONS; at++) {
        add_part(on, at, flags, 0, sizes[at]);
    }
}

/* Some regions, masters in parts of whole units with some left out, some together, some born. */
static void list_some(scene *on)
{
    on->count = 0;
    for (uint32_t at = 0; at < REGIONS; at++) {
        if (seeded_below(&on->seed, 4) == 0) continue;
        for (uint64_t first = 0; first < sizes[at];) {
            uint64_t count = UNIT * (1 + seeded_below(&on->seed, 3));
            if (count > sizes[at] - first) count = sizes[at] - first;
            uint32_t flags = seeded_below(&on->seed, 5) == 0 ? REFIT_PART_BORN : 0;
            if (on->count > 0 && seeded_below(&on->seed, 4) == 0) flags |= REFIT_PART_TOGETHER;
            if (seeded_below(&on->seed, 5) != 0) add_part(on, at, flags, first, count);
            first += count;
        }
    }
}

static uint64_t elements_of_list(const scene *on, bool coded)
{
    uint64_t elements = 0;
    for (uint32_t at = 0; at < on->count; at++) {
        if ((on->parts[at].region < CODED) == coded) elements += on->parts[at].bytes / 4;
    }
    return elements;
}

/* ---- A step: new masters, and the weights that are their rounding, but for some ---------------
 */

static void new_masters(scene *on, const refit_window_part *part)
{
    uint32_t *masters = on->expected[part->region] + part->offset / 4;
    uint16_t *rounded = on->rounded[part->region] + part->offset / 4;
    uint64_t count = part->bytes / 4;
    for (uint64_t k = 0; k < count; k++) {
        uint64_t drawn = seeded_next(&on->seed);
        uint32_t bits = (uint32_t)(drawn >> 20);
        masters[k] = drawn % 4096 == 0 ? bits : bits & 0xBFFFFFFFu;
    }
    rft_cast_bf16(rounded, (const void *)masters, count);
    for (uint64_t k = on->spared; k < on->spared + on->spoiled && k < count; k++) {
        rounded[k] = (uint16_t)seeded_next(&on->seed);
    }
}

static void write_weights(scene *on, const refit_window_part *part)
{
    if (on->weights[part->region] == NULL) return;
    test_write(on->plain, (char *)on->weights[part->region] + part->offset / 2,
               on->rounded[part->region] + part->offset / 4, part->bytes / 2);
}

static void step_part(scene *on, uint32_t number, void *memory)
{
    const refit_window_part *part = &on->parts[number];
    const uint32_t *masters = on->expected[part->region] + part->offset / 4;
    if ((part->flags & REFIT_PART_BORN) != 0) {
        assert_null(memory);
        if (on->born[number] == NULL) {
            assert_ok(refit_memory_alloc(on->plain, 4 * MOST, &on->born[number], &on->error));
        }
        memory = on->born[number];
        assert_ok(refit_window_place(on->window, number, memory, &on->error));
    } else {
        assert_int_equal((uintptr_t)memory % 64, 0);
        assert_device_equal(on->plain, memory, masters, part->bytes);
    }
    new_masters(on, part);
    test_write(on->plain, memory, masters, part->bytes);
    write_weights(on, part);
}

static void step_window(scene *on, const refit_window_view *view)
{
    for (uint32_t at = 0; at < view->count; at++) {
        step_part(on, view->first + at, view->memory[at]);
    }
}

static refit_status begin(scene *on)
{
    return refit_window_begin(on->window, on->parts, on->count, REFIT_STREAM_NONE, &on->error);
}

/* Steps `most` windows; true if there are more. */
static bool step_windows(scene *on, uint32_t most)
{
    refit_window_view view = {.size = sizeof view};
    for (uint32_t at = 0; at < most; at++) {
        assert_ok(refit_window_next(on->window, &view, &on->error));
        if (view.count == 0) return false;
        step_window(on, &view);
        assert_ok(refit_window_done(on->window, REFIT_STREAM_NONE, &on->error));
    }
    return true;
}

static void step_all(scene *on)
{
    assert_ok(begin(on));
    assert_false(step_windows(on, UINT32_MAX));
    assert_ok(refit_window_end(on->window, &on->error));
}

static void settle(scene *on)
{
    assert_ok(refit_window_wait(on->window, PATIENCE_MS, &on->error));
}

/* The masters come from memory of their own. */
static void fill(scene *on)
{
    list_all(on, REFIT_PART_BORN);
    step_all(on);
    settle(on);
    list_all(on, 0);
}

/* ---- What holds ------------------------------------------------------------------------------
 */

static void masters_begin_as_zeros(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    check_image(&on);
    list_all(&on, 0);
    step_all(&on); /* which finds zeros */
    settle(&on);
    uint64_t plain = 4 * elements_of_list(&on, false);
    assert_int_equal(stats_of(&on).step_in_bytes_last, plain); /* zeros do not travel */
    check_image(&on);
    close_scene(&on);
}

static void half_of_the_bytes_travel_and_every_bit_is_there(void **state)
{
    (void)state;
    static const char *const windows[] = {"1", "2", "3", "4"};
    for (size_t at = 0; at < sizeof windows / sizeof windows[0]; at++) {
        scene on;
        open_scene(&on, windows[at], NULL);
        for (uint32_t region = 0; region < REGIONS; region++) {
            uint64_t low = region < CODED ? 2 * sizes[region] : 4 * sizes[region];
            uint64_t high = region < CODED ? low + low / 40 + 1024 : low;
            assert_in_range(host_bytes_of(&on, region), low, high);
        }
        fill(&on);
        check_image(&on);
        for (int step = 0; step < 4; step++) {
            step_all(&on);
            settle(&on);
            uint64_t plain = 4 * elements_of_list(&on, false);
            uint64_t coded = elements_of_list(&on, true);
            refit_stats stats = stats_of(&on);
            assert_int_equal(stats.step_in_bytes_last, stats.step_out_bytes_last);
            assert_in_range(stats.step_in_bytes_last - plain, 2 * coded, 2.04 * (double)coded);
            check_image(&on);
        }
        close_scene(&on);
    }
}

static void parts_of_whole_units_are_stepped(void **state)
{
    (void)state;
    static const char *const settings[][6] = {
        {"offload.staging_bytes=1MiB", "offload.slab_bytes=64KiB", "offload.piece_bytes=36KiB",
         "offload.batch=2", NULL},
        {"offload.staging_bytes=4MiB", "offload.slab_bytes=1MiB", "offload.window_bytes=4MiB",
         NULL},
        {"offload.rate_limit=800MiB", "offload.alignment_bytes=16", "offload.window_bytes=3MiB",
         NULL},
    };
    for (size_t at = 0; at < sizeof settings / sizeof settings[0]; at++) {
        scene on;
        open_scene(&on, at == 0 ? "2" : "3", settings[at]);
        for (unsigned step = 0; step < 14; step++) {
            list_some(&on);
            on.spoiled = step % 3 == 2 ? seeded_below(&on.seed, 9000) : 0;
            step_all(&on);
            if (step % 3 == 0) check_image(&on);
        }
        check_image(&on);
        close_scene(&on);
    }
}

static void list_first(scene *on)
{
    on->count = 0;
    add_part(on, 0, 0, 0, sizes[0]);
}

/* Steps one unit of the first region; so many of its weights are no rounding. */
static void step_unit(scene *on, uint64_t number, uint64_t spoiled)
{
    on->count = 0;
    on->spoiled = spoiled;
    add_part(on, 0, 0, number * UNIT, UNIT);
    step_all(on);
    settle(on);
    on->spoiled = 0;
}

/* In the image, in memory of their own, and zeros. */
static void a_part_has_units_in_any_places(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    step_unit(&on, 0, 0);
    step_unit(&on, 2, 9000);
    list_first(&on);
    step_all(&on);
    settle(&on);
    assert_in_range(stats_of(&on).step_in_bytes_last, 6 * UNIT, 6 * UNIT + UNIT / 4);
    check_image(&on);
    step_unit(&on, 1, 9000);
    step_unit(&on, 3, 9000);
    list_first(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void other_parts_are_refused(void **state)
{
    (void)state;
    static const uint64_t parts[][3] = {/* region, first element, elements */
                                        {0, 4096, UNIT},
                                        {0, 0, UNIT - 1},
                                        {0, UNIT, UNIT + 4096},
                                        {2, 0, 4095}};
    scene on;
    open_scene(&on, "2", NULL);
    fill(&on);
    for (size_t at = 0; at < sizeof parts / sizeof parts[0]; at++) {
        uint64_t least;
        on.count = 0;
        add_part(&on, (uint32_t)parts[at][0], 0, parts[at][1], parts[at][2]);
        assert_int_equal(begin(&on), REFIT_ERR_INVALID);
        assert_non_null(strstr(on.error.text, "1048576"));
        assert_int_equal(refit_window_measure(on.window, on.parts, on.count, &least, &on.error),
                         REFIT_ERR_INVALID);
    }
    on.count = 0;
    add_part(&on, PLAIN, 0, 7, 100); /* of which any part may be stepped */
    on.parts[0].offset = 0;
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void host_views_are_refused(void **state)
{
    (void)state;
    scene on;
    void *bytes;
    uint64_t count;
    open_scene(&on, "2", NULL);
    fill(&on);
    assert_int_equal(refit_window_host(on.window, 0, &bytes, &count, &on.error),
                     REFIT_ERR_UNSUPPORTED);
    assert_non_null(strstr(on.error.text, "refit_lease_read"));
    assert_ok(refit_window_host(on.window, PLAIN, &bytes, &count, &on.error));
    assert_memory_equal(bytes, on.expected[PLAIN], count);
    close_scene(&on);
}

static void masters_travel_whole_where_that_is_wanted(void **state)
{
    (void)state;
    static const char *const whole[] = {"offload.masters=whole", NULL};
    scene on;
    void *bytes;
    uint64_t count;
    open_scene(&on, "2", whole);
    fill(&on);
    step_all(&on);
    check_image(&on);
    assert_int_equal(stats_of(&on).step_in_bytes_last,
                     4 * (elements_of_list(&on, true) + elements_of_list(&on, false)));
    assert_ok(refit_window_host(on.window, 0, &bytes, &count, &on.error));
    assert_memory_equal(bytes, on.expected[0], count);
    close_scene(&on);
}

static void masters_that_are_born_again_replace_those_before(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    for (int round = 0; round < 3; round++) {
        on.spoiled = round == 1 ? 20000 : 0;
        fill(&on);
        check_image(&on);
    }
    on.count = 0;
    add_part(&on, 0, REFIT_PART_BORN, UNIT, UNIT);
    refit_window_view view = {.size = sizeof view};
    assert_ok(begin(&on));
    assert_ok(refit_window_next(on.window, &view, &on.error));
    char *odd = (char *)on.born[0] + 2;
    assert_int_equal(refit_window_place(on.window, 0, odd, &on.error), REFIT_ERR_INVALID);
    assert_non_null(strstr(on.error.text, "multiple of 4"));
    step_window(&on, &view);
    assert_ok(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    close_scene(&on);
}

/* ---- Weights that are no rounding ------------------------------------------------------------
 */

static void masters_that_do_not_fit_go_whole_and_fit_again(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    fill(&on);
    uint64_t host = stats_of(&on).host_bytes, pinned = stats_of(&on).host_pinned_bytes;
    step_all(&on);
    settle(&on);
    uint64_t usual = stats_of(&on).step_in_bytes_last;
    on.spoiled = 5000; /* of the first unit of each region, if it has so many */
    step_all(&on);
    check_image(&on);
    refit_stats stats = stats_of(&on);
    assert_int_equal(stats.step_in_bytes_last, usual);
    uint64_t units = 4 * (2 * UNIT + sizes[2]); /* one of each region */
    assert_int_equal(stats.step_out_bytes_last, usual + units);
    assert_in_range(stats.host_bytes, host + units, host + units + 3 * 65536);
    assert_int_equal(stats.host_pinned_bytes + stats.host_pageable_bytes, stats.host_bytes);
    const rft_unit *unit = &on.offloader->regions.items[0].units[0];
    assert_int_equal((uintptr_t)unit->whole % 4096, 0);            /* pages of its own */
    if (pinned == 0) assert_int_equal(stats.host_pinned_bytes, 0); /* as the image is */
    if (pinned > 0) assert_in_range(stats.host_pinned_bytes - pinned, units, UINT64_MAX);
    on.spoiled = 0;
    step_all(&on);
    check_image(&on);
    stats = stats_of(&on);
    assert_in_range(stats.step_in_bytes_last, usual + 1, usual + units);
    assert_int_equal(stats.step_out_bytes_last, usual);
    assert_int_equal(stats.host_bytes, stats_of(&on).host_bytes); /* it is kept */
    step_all(&on);
    check_image(&on);
    assert_int_equal(stats_of(&on).step_in_bytes_last, usual);
    assert_ok(refit_window_trim(on.window, &on.error));
    assert_int_equal(stats_of(&on).host_bytes, host);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

/* Weights that stay no rounding are not encoded each time. */
static void masters_that_never_fit_travel_whole(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "3", NULL);
    on.spoiled = MOST;
    fill(&on);
    uint64_t all = 4 * (elements_of_list(&on, true) + elements_of_list(&on, false));
    uint32_t plain = 0;
    for (int step = 0; step < 12; step++) {
        step_all(&on);
        check_image(&on);
        refit_stats stats = stats_of(&on);
        assert_int_equal(stats.step_in_bytes_last, all);
        assert_in_range(stats.step_out_bytes_last, all, 2 * all);
        plain += stats.step_out_bytes_last == all;
        if (step == 6) assert_ok(refit_window_trim(on.window, &on.error)); /* which frees none */
    }
    assert_in_range(plain, 6, 11);
    on.spoiled = 0;
    for (int step = 0; step < 20; step++) {
        step_all(&on);
    }
    check_image(&on);
    assert_in_range(stats_of(&on).step_in_bytes_last, all / 2, 53 * all / 100);
    close_scene(&on);
}

static void without_memory_for_masters_that_do_not_fit_nothing_is_lost(void **state)
{
    (void)state;
    scene on;
    failing_alloc_begin(0);
    open_scene(&on, "2", NULL);
    fill(&on);
    on.spoiled = 9000;
    on.count = 0;
    add_part(&on, 0, 0, 0, sizes[0]);
    add_part(&on, 1, 0, 0, sizes[1]);
    assert_ok(begin(&on));
    refit_window_view view = {.size = sizeof view};
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    assert_ok(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error));
    for (int tries = 0; tries < 3; tries++) {
        failing_alloc_here(1);
        assert_int_equal(refit_window_wait(on.window, PATIENCE_MS, &on.error),
                         REFIT_ERR_HOST_MEMORY);
        assert_true(failing_alloc_stop_here());
        assert_non_null(strstr(on.error.text, "master.0"));
    }
    assert_false(step_windows(&on, UINT32_MAX));
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    /* What is copied again counts once. */
    uint64_t spilled = 8 * UNIT;
    assert_int_equal(stats_of(&on).step_out_bytes_last, stats_of(&on).step_in_bytes_last + spilled);
    close_scene(&on);
    assert_false(failing_alloc_end());
}

/* Page-locks that fail leave that memory pageable. */
static void without_page_locks_masters_go_whole_all_the_same(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    fill(&on);
    uint64_t pageable = stats_of(&on).host_pageable_bytes;
    faulty_device_fail_times(on.device, FAULTY_HOST_PIN, 1, FAULTY_ALWAYS, REFIT_ERR_PIN);
    on.spoiled = 9000;
    step_all(&on);
    check_image(&on);
    step_all(&on);
    check_image(&on);
    assert_in_range(stats_of(&on).host_pageable_bytes, pageable + 8 * UNIT, UINT64_MAX);
    close_scene(&on);
}

/* ---- Weights that are others -----------------------------------------------------------------
 */

static void change_weight(scene *on, uint32_t region, uint64_t element)
{
    uint16_t weight = on->rounded[region][element] ^= 0x100;
    test_write(on->plain, (char *)on->weights[region] + 2 * element, &weight, sizeof weight);
}

static void changed_weights_are_found_before_the_step(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    fill(&on);
    change_weight(&on, 1, 77777);
    refit_window_view view = {.size = sizeof view};
    refit_status status = begin(&on);
    assert_true(status == REFIT_OK || status == REFIT_ERR_CORRUPT);
    if (status == REFIT_OK) {
        do {
            status = refit_window_next(on.window, &view, &on.error);
            if (status != REFIT_OK) break;
            step_window(&on, &view);
            status = refit_window_done(on.window, REFIT_STREAM_NONE, &on.error);
        } while (status == REFIT_OK && view.count > 0);
        assert_int_equal(status, REFIT_ERR_CORRUPT);
        assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_CORRUPT);
    }
    assert_non_null(strstr(on.error.text, "weights of region master.1"));
    uint32_t progress = refit_window_progress(on.window);
    assert_in_range(progress, 0, 1);
    assert_ok(refit_window_end(on.window, &on.error));
    settle(&on);
    /* A lease says the same; the others can be read. */
    refit_lease *lease;
    const void *bytes = NULL;
    uint64_t count;
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_int_equal(refit_lease_read(lease, 1, &bytes, &count, &on.error), REFIT_ERR_CORRUPT);
    check_region(&on, lease, 0);
    check_region(&on, lease, 2);
    refit_lease_release(lease);
    /* With the weights as they were, the step goes on. */
    change_weight(&on, 1, 77777);
    check_image(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

/* Each of the parts of one window, as it leaves and as it arrives. */
static void every_part_of_a_window_is_judged(void **state)
{
    (void)state;
    scene on;
    refit_window_view view = {.size = sizeof view};
    open_scene(&on, "2", NULL);
    fill(&on);
    on.count = 0;
    add_part(&on, 1, 0, 0, sizes[1]);
    add_part(&on, 2, REFIT_PART_TOGETHER, 0, sizes[2]);
    on.spoiled = 9000;
    step_all(&on);
    check_image(&on);
    on.spoiled = 0;
    step_all(&on);
    check_image(&on);
    change_weight(&on, 2, 3);
    assert_ok(begin(&on));
    assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_CORRUPT);
    assert_ok(refit_window_end(on.window, &on.error));
    change_weight(&on, 2, 3);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void weights_that_are_mended_let_the_step_go_on(void **state)
{
    (void)state;
    scene on;
    refit_window_view view = {.size = sizeof view};
    open_scene(&on, "1", NULL);
    fill(&on);
    on.count = 0;
    add_part(&on, 2, 0, 0, sizes[2]);
    add_part(&on, 0, 0, 0, sizes[0]);
    change_weight(&on, 0, 2 * UNIT + 5);
    assert_ok(begin(&on));
    assert_true(step_windows(&on, 1));
    for (int tries = 0; tries < 2; tries++) {
        assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_CORRUPT);
        assert_int_equal(refit_window_progress(on.window), 1);
    }
    change_weight(&on, 0, 2 * UNIT + 5);
    assert_false(step_windows(&on, UINT32_MAX));
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    uint64_t bytes = stats_of(&on).step_in_bytes_last;
    step_all(&on);
    settle(&on);
    assert_int_equal(stats_of(&on).step_in_bytes_last,
                     bytes); /* each try but the last is left out */
    close_scene(&on);
}

/* The units before those weights are in other places, which a later step changes. */
static void changed_weights_are_found_in_any_unit(void **state)
{
    (void)state;
    scene on;
    refit_window_view view = {.size = sizeof view};
    open_scene(&on, "2", NULL);
    fill(&on);
    step_unit(&on, 0, 9000);
    change_weight(&on, 0, 2 * UNIT + 5);
    list_first(&on);
    assert_ok(begin(&on));
    assert_int_equal(refit_window_next(on.window, &view, &on.error), REFIT_ERR_CORRUPT);
    assert_ok(refit_window_end(on.window, &on.error));
    change_weight(&on, 0, 2 * UNIT + 5);
    step_unit(&on, 0, 0);
    list_first(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void weights_may_move_between_steps(void **state)
{
    (void)state;
    scene on;
    void *elsewhere;
    refit_window_view view = {.size = sizeof view};
    open_scene(&on, "2", NULL);
    fill(&on);
    step_all(&on);
    settle(&on);
    assert_ok(refit_memory_alloc(on.plain, 2 * sizes[0], &elsewhere, &on.error));
    test_write(on.plain, elsewhere, on.rounded[0], 2 * sizes[0]);
    assert_ok(begin(&on));
    assert_ok(refit_window_next(on.window, &view, &on.error));
    assert_int_equal(refit_offloader_bind_weights(on.offloader, 0, elsewhere, &on.error),
                     REFIT_ERR_STATE);
    assert_ok(refit_window_end(on.window, &on.error));
    assert_ok(refit_offloader_bind_weights(on.offloader, 0, elsewhere, &on.error));
    assert_ok(refit_memory_free(on.plain, on.weights[0], &on.error));
    on.weights[0] = elsewhere;
    check_image(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

/* ---- Steps that end early, wrong calls, other schedules ---------------------------------------
 */

static void a_step_may_end_early(void **state)
{
    (void)state;
    for (uint32_t most = 0; most < 5; most++) {
        scene on;
        refit_window_view view = {.size = sizeof view};
        open_scene(&on, "3", NULL);
        fill(&on);
        on.spoiled = most == 2 ? 9000 : 0;
        assert_ok(begin(&on));
        step_windows(&on, most);
        assert_ok(refit_window_next(on.window, &view, &on.error)); /* in use, and given up */
        for (uint32_t at = 0; at < view.count; at++) {
            test_fill(on.plain, view.memory[at], 0x77, 4000);
        }
        assert_ok(refit_window_end(on.window, &on.error));
        check_image(&on);
        on.spoiled = 0;
        step_all(&on);
        check_image(&on);
        close_scene(&on);
    }
}

static void a_window_may_close_in_the_middle(void **state)
{
    (void)state;
    scene on;
    open_scene(&on, "2", NULL);
    fill(&on);
    on.spoiled = 9000;
    assert_ok(begin(&on));
    assert_true(step_windows(&on, 2));
    assert_ok(refit_window_close(on.window, &on.error));
    assert_ok(refit_window_open(on.offloader, &on.window, &on.error));
    check_image(&on);
    step_all(&on);
    check_image(&on);
    close_scene(&on);
}

static void a_lease_and_a_step_exclude_each_other(void **state)
{
    (void)state;
    scene on;
    refit_lease *lease;
    open_scene(&on, "2", NULL);
    fill(&on);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_int_equal(begin(&on), REFIT_ERR_BUSY);
    refit_lease_release(lease);
    assert_ok(begin(&on));
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_BUSY);
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    close_scene(&on);
}

static void check_memory(scene *on, void **memory)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_device_equal(on->plain, memory[at], on->expected[at], 4 * sizes[at]);
    }
}

static void bring_to_stay(scene *on, void **memory)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_memory_alloc(on->plain, 4 * sizes[at], &memory[at], &on->error));
        test_fill(on->plain, memory[at], 0x77, 4 * sizes[at]);
        assert_ok(refit_offloader_bind(on->offloader, at, memory[at], &on->error));
    }
    assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
    assert_ok(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error));
    check_memory(on, memory);
}

/* A step without windows: more weights that are no rounding than any offload made room for. */
static void step_there(scene *on, void **memory)
{
    on->spoiled = 40000;
    for (uint32_t at = 0; at < REGIONS; at++) {
        refit_window_part all = {.region = at, .bytes = 4 * sizes[at]};
        new_masters(on, &all);
        test_write(on->plain, memory[at], on->expected[at], all.bytes);
        write_weights(on, &all);
    }
}

static void send_away(scene *on, void **memory)
{
    refit_status status;
    do {
        assert_ok(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
        status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
    } while (status == REFIT_ERR_LIMIT); /* masters that do not fit into the plan */
    assert_ok(status);
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_offloader_unbind(on->offloader, at, &on->error));
        assert_ok(refit_memory_free(on->plain, memory[at], &on->error));
    }
}

static void masters_move_by_both_schedules(void **state)
{
    (void)state;
    static const char *const settings[][3] = {
        {"offload.verify=false", NULL},
        {"offload.verify=true", "offload.staging_bytes=1MiB", NULL},
    };
    for (uint64_t at = 0; at < 2; at++) {
        scene on;
        void *memory[REGIONS];
        open_scene(&on, "2", settings[at]);
        bring_to_stay(&on, memory); /* zeros */
        send_away(&on, memory);
        for (unsigned round = 0; round < 4; round++) {
            on.spoiled = round == 2 ? MOST : 0;
            if (round == 0) fill(&on);
            step_all(&on);
            settle(&on);
            bring_to_stay(&on, memory);
            assert_int_equal(begin(&on), REFIT_ERR_STATE);
            if (round == 1) { /* planned anew, while they are on the device */
                uint32_t calls = faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC);
                assert_ok(refit_offloader_unseal(on.offloader, &on.error));
                assert_ok(refit_offloader_seal(on.offloader, &on.error));
                assert_int_equal(faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC), calls);
                assert_in_range(host_bytes_of(&on, 0), 2 * MOST, 3 * MOST);
                step_there(&on, memory);
            }
            send_away(&on, memory);
            if (round == 1) { /* the plan made room */
                assert_in_range(host_bytes_of(&on, 0), 2 * MOST, 3 * MOST);
            }
            check_image(&on);
        }
        close_scene(&on);
    }
}

/* With offload.verify nothing is looked at meanwhile. */
static void await_copies(scene *on)
{
    for (int direction = RFT_OFFLOAD; direction <= RFT_RESTORE; direction++) {
        rft_mover *mover = on->offloader->movers[direction];
        assert_ok(rft_mover_wait(mover, PATIENCE_MS, &on->error));
    }
}

/* Verified: what came back whole, or from its own memory, is what was there. */
static void a_restore_after_steps_is_verified(void **state)
{
    (void)state;
    static const char *const verified[] = {"offload.verify=true", NULL};
    /* A byte of a unit that went whole, and one of a unit that is coded. */
    static const uint64_t at[] = {4 * UNIT + 400, 8 * UNIT + 400};
    for (int round = 0; round < 2; round++) {
        scene on;
        void *memory[REGIONS];
        open_scene(&on, "2", verified);
        fill(&on);
        on.spared = UNIT; /* so the second unit goes whole */
        on.spoiled = 9000;
        step_all(&on);
        settle(&on);
        for (uint32_t region = 0; region < REGIONS; region++) {
            void **to = &memory[region];
            assert_ok(refit_memory_alloc(on.plain, 4 * sizes[region], to, &on.error));
            assert_ok(refit_offloader_bind(on.offloader, region, *to, &on.error));
        }
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        await_copies(&on);
        test_fill(on.plain, (char *)memory[0] + at[round], 0x77, 1); /* behind the copies */
        assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error),
                         REFIT_ERR_CORRUPT);
        assert_non_null(strstr(on.error.text, "master.0"));
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
        check_memory(&on, memory);
        send_away(&on, memory);
        check_image(&on);
        close_scene(&on);
    }
}

static void device_memory_is_that_of_windows_and_of_the_staging(void **state)
{
    (void)state;
    static const char *const settings[] = {"offload.staging_bytes=4MiB", NULL};
    scene on;
    open_unsealed(&on, "2", settings);
    uint64_t before = used_bytes(&on);
    seal(&on);
    uint64_t staging = used_bytes(&on) - before;
    assert_in_range(staging, 1, UINT64_C(4) << 20);
    assert_in_range(stats_of(&on).window_bytes, 1, staging); /* in use: whole pages, or more */
    /* Both directions are under way at once. */
    char *out = rft_masters_staging(on.offloader, true),
         *in = rft_masters_staging(on.offloader, false);
    assert_true(in == out + on.offloader->staging_bytes);
    assert_int_equal(stats_of(&on).window_bytes, 2 * on.offloader->staging_bytes);
    list_all(&on, 0);
    step_all(&on);
    settle(&on);
    assert_in_range(stats_of(&on).window_bytes, 2 << 20, used_bytes(&on) - before);
    if (!test_on_cuda()) {
        assert_in_range(used_bytes(&on) - before, 0, stats_of(&on).window_bytes + 4096);
    }
    assert_ok(refit_window_trim(on.window, &on.error));
    assert_int_equal(used_bytes(&on) - before, staging);
    check_image(&on);
    close_scene(&on);
}

static void without_device_memory_for_the_staging_a_seal_fails(void **state)
{
    (void)state;
    scene on;
    open_unsealed(&on, "2", NULL);
    faulty_device_fail(on.device, FAULTY_MEMORY_ALLOC, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_offloader_seal(on.offloader, &on.error), REFIT_ERR_DEVICE_MEMORY);
    assert_non_null(strstr(on.error.text, "offload.masters"));
    seal(&on);
    fill(&on);
    check_image(&on);
    close_scene(&on);
}

static void bind_weights(scene *on, uint32_t region, void *weights)
{
    assert_ok(refit_offloader_bind_weights(on->offloader, region, weights, &on->error));
}

/* Side by side, but not the same. */
static void weights_have_masters_of_one_region(void **state)
{
    (void)state;
    scene on;
    void *joint;
    uint64_t host_bytes, budget;
    open_unsealed(&on, "2", NULL);
    assert_ok(refit_memory_alloc(on.plain, 2 * (UNIT + sizes[2]), &joint, &on.error));
    bind_weights(&on, 1, joint);
    bind_weights(&on, 2, (uint16_t *)joint + UNIT - 1);
    bind_weights(&on, 3, joint); /* its masters travel whole */
    for (int tries = 0; tries < 2; tries++) {
        assert_int_equal(refit_offloader_seal(on.offloader, &on.error), REFIT_ERR_INVALID);
        assert_non_null(strstr(on.error.text, "master.1 and master.2"));
    }
    bind_weights(&on, 2, (uint16_t *)joint + UNIT);
    assert_ok(refit_offloader_estimate(on.offloader, &host_bytes, &budget, &on.error));
    for (uint32_t at = 1; at < PLAIN; at++) {
        bind_weights(&on, at, on.weights[at]);
    }
    seal(&on);
    fill(&on);
    check_image(&on);
    assert_ok(refit_memory_free(on.plain, joint, &on.error));
    close_scene(&on);
}

/* ---- Arithmetic on a stream -------------------------------------------------------------------
 */

/* A scene that is filled and lists one unit of masters, and a stream. */
static void open_with_stream(scene *on, const char *windows, refit_stream_ref *stream)
{
    open_scene(on, windows, NULL);
    fill(on);
    on->count = 0;
    add_part(on, 1, 0, 0, UNIT);
    assert_ok(refit_stream_open(on->device, stream, &on->error));
}

static void close_with_stream(scene *on, refit_stream_ref stream)
{
    assert_ok(refit_stream_close(on->device, stream, &on->error));
    close_scene(on);
}

/* The first window of the list, up to refit_window_done. */
static void step_to_done(scene *on)
{
    refit_window_view view = {.size = sizeof view};
    assert_ok(begin(on));
    assert_ok(refit_window_next(on->window, &view, &on->error));
    step_window(on, &view);
}

/* Encoding waits for the work that the stream has queued: masters, and weights of them. */
static void encoding_follows_the_stream(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    refit_window_view view = {.size = sizeof view};
    open_with_stream(&on, "2", &stream);
    void *masters = test_host_alloc(on.plain, 4 * UNIT);
    void *weights = test_host_alloc(on.plain, 2 * UNIT);
    for (int step = 0; step < 3; step++) {
        assert_ok(begin(&on));
        assert_ok(refit_window_next(on.window, &view, &on.error));
        assert_device_equal(on.plain, view.memory[0], on.expected[1], 4 * UNIT);
        new_masters(&on, &on.parts[0]);
        memcpy(masters, on.expected[1], 4 * UNIT);
        memcpy(weights, on.rounded[1], 2 * UNIT);
        faulty_device_stop(on.device);
        assert_ok(
            refit_stream_copy(on.device, stream, view.memory[0], masters, 4 * UNIT, &on.error));
        assert_ok(
            refit_stream_copy(on.device, stream, on.weights[1], weights, 2 * UNIT, &on.error));
        assert_ok(refit_window_done(on.window, stream, &on.error));
        assert_ok(refit_window_end(on.window, &on.error));
        assert_int_equal(refit_window_wait(on.window, 0, &on.error), REFIT_ERR_TIMEOUT);
        faulty_device_go(on.device);
        check_image(&on);
    }
    test_host_free(on.plain, masters, 4 * UNIT);
    test_host_free(on.plain, weights, 2 * UNIT);
    close_with_stream(&on, stream);
}

/* The copies out are over. Weights that are written now are found, and the masters are there once
 * they are back. */
static void check_written(scene *on)
{
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_window_wait(on->window, 0, &on->error));
    change_weight(on, 1, 4711);
    assert_ok(refit_lease_acquire(on->offloader, &lease, &on->error));
    assert_int_equal(refit_lease_read(lease, 1, &bytes, &count, &on->error), REFIT_ERR_CORRUPT);
    refit_lease_release(lease);
    change_weight(on, 1, 4711);
    check_image(on);
}

/* The next work of its stream comes behind the copies that read weights. */
static void weights_may_be_written_behind_the_step(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    open_with_stream(&on, "2", &stream);
    step_to_done(&on);
    faulty_device_stop_until_awaited(on.device);
    assert_ok(refit_window_done(on.window, stream, &on.error));
    assert_ok(refit_window_end(on.window, &on.error));
    assert_int_equal(faulty_device_joins(on.device, stream), 1);
    assert_ok(refit_stream_wait(on.device, stream, PATIENCE_MS, &on.error));
    check_written(&on);
    close_with_stream(&on, stream);
}

static void other_copies_do_not_hold_the_stream(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref stream;
    open_with_stream(&on, "2", &stream);
    on.count = 0;
    add_part(&on, PLAIN, 0, 0, sizes[PLAIN]);
    step_to_done(&on);
    faulty_device_stop(on.device);
    assert_ok(refit_window_done(on.window, stream, &on.error));
    assert_ok(refit_window_end(on.window, &on.error));
    assert_ok(refit_stream_wait(on.device, stream, PATIENCE_MS, &on.error));
    assert_int_equal(refit_window_wait(on.window, 0, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    check_image(&on);
    close_with_stream(&on, stream);
}

/* A call of done that is repeated may name another stream. */
static void the_stream_of_a_repeated_call_waits(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref first, second;
    open_with_stream(&on, "2", &first);
    assert_ok(refit_stream_open(on.device, &second, &on.error));
    step_to_done(&on);
    faulty_device_fail(on.device, FAULTY_MASTER_ENCODE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_window_done(on.window, first, &on.error), REFIT_ERR_DEVICE);
    faulty_device_stop(on.device);
    assert_ok(refit_window_done(on.window, second, &on.error));
    assert_ok(refit_window_end(on.window, &on.error));
    assert_ok(refit_stream_wait(on.device, first, PATIENCE_MS, &on.error));
    assert_int_equal(faulty_device_joins(on.device, first), 0);
    assert_int_equal(faulty_device_joins(on.device, second), 1);
    faulty_device_stop_until_awaited(on.device);
    assert_ok(refit_stream_wait(on.device, second, PATIENCE_MS, &on.error));
    check_written(&on);
    assert_ok(refit_stream_close(on.device, first, &on.error));
    close_with_stream(&on, second);
}

/* Without a stream, and where a step ends before its last window, the end waits. */
static void the_end_of_a_step_waits_for_copies_that_read_weights(void **state)
{
    (void)state;
    scene on;
    refit_stream_ref streams[2] = {REFIT_STREAM_NONE};
    open_with_stream(&on, "1", &streams[1]);
    for (uint32_t at = 0; at < 2; at++) {
        if (at == 1) add_part(&on, PLAIN, 0, 0, sizes[PLAIN]);
        step_to_done(&on);
        faulty_device_stop_until_awaited(on.device);
        assert_ok(refit_window_done(on.window, streams[at], &on.error));
        assert_ok(refit_window_end(on.window, &on.error));
        assert_int_equal(refit_window_progress(on.window), 1);
        check_written(&on);
    }
    close_with_stream(&on, streams[1]);
}

/* The first window leaves, and masters of it do not fit, while the third arrives: both are over
 * before either is looked at. */
static void windows_that_come_and_go_at_once_are_judged_apart(void **state)
{
    (void)state;
    scene on;
    refit_window_view view = {.size = sizeof view};
    open_scene(&on, "3", NULL);
    fill(&on);
    on.count = 0;
    for (uint64_t unit = 0; unit < 3; unit++) {
        add_part(&on, 0, 0, unit * UNIT, UNIT);
    }
    on.spoiled = 9000;
    assert_ok(begin(&on));
    assert_ok(refit_window_next(on.window, &view, &on.error));
    step_window(&on, &view);
    await_copies(&on); /* of the second */
    faulty_device_stop(on.device);
    assert_ok(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_window_next(on.window, &view, &on.error));
    assert_int_equal(rft_mover_is_moving(on.offloader->movers[RFT_RESTORE]), true);
    faulty_device_go(on.device);
    await_copies(&on);
    step_window(&on, &view);
    assert_ok(refit_window_done(on.window, REFIT_STREAM_NONE, &on.error));
    assert_false(step_windows(&on, UINT32_MAX));
    assert_ok(refit_window_end(on.window, &on.error));
    check_image(&on);
    close_scene(&on);
}

/* ---- Failures ---------------------------------------------------------------------------------
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
    UNTIL_OK(on, failures, begin(on));
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

typedef void (*order_fault)(refit_device *device, faulty_slot slot, uint32_t nth,
                            refit_status status);

/* The smaller regions only, and the last unit of the largest. */
static void list_few(scene *on, uint32_t flags)
{
    on->count = 0;
    add_part(on, 0, flags, 4 * UNIT, MOST - 4 * UNIT);
    add_part(on, 2, flags, 0, sizes[2]);
    add_part(on, 3, flags | REFIT_PART_TOGETHER, 0, sizes[3]);
    add_part(on, PLAIN, flags, 0, sizes[PLAIN]);
}

static void fill_few(scene *on)
{
    list_few(on, REFIT_PART_BORN);
    step_all(on);
    settle(on);
    list_few(on, 0);
}

/* Steps with masters that fit, that do not, and that fit again meet each failure in turn. */
static void fail_each(faulty_slot slot, order_fault order, refit_status status)
{
    uint32_t calls = 1, failed = 0;
    for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
        scene on;
        open_scene(&on, nth % 2 == 0 ? "2" : "3", NULL);
        fill_few(&on);
        faulty_device_reset(on.device);
        if (nth > 0) order(on.device, slot, nth, status);
        uint32_t failures = step_stubbornly(&on);
        on.spoiled = 9000;
        failures += step_stubbornly(&on);
        on.spoiled = 0;
        failures += step_stubbornly(&on);
        if (nth == 0) calls = faulty_device_calls(on.device, slot);
        if (nth == 0) assert_int_equal(failures, 0);
        failed += failures > 0;
        faulty_device_reset(on.device);
        check_image(&on);
        step_all(&on);
        check_image(&on);
        close_scene(&on);
    }
    /* An event that cannot be waited for is asked again. */
    if (slot != FAULTY_EVENT_WAIT) assert_true(failed >= calls / 2);
}

static void every_failure_can_be_repeated(void **state)
{
    (void)state;
    static const faulty_slot slots[] = {FAULTY_MASTER_ENCODE, FAULTY_MASTER_DECODE,
                                        FAULTY_ZERO,          FAULTY_COPY_BATCH,
                                        FAULTY_EVENT_RECORD,  FAULTY_EVENT_WAIT};
    for (size_t at = 0; at < sizeof slots / sizeof slots[0]; at++) {
        fail_each(slots[at], faulty_device_fail, REFIT_ERR_DEVICE);
    }
}

static void every_copy_that_breaks_can_be_repeated(void **state)
{
    (void)state;
    fail_each(FAULTY_COPY_BATCH, faulty_device_fail_later, REFIT_ERR_COPY);
    fail_each(FAULTY_ZERO, faulty_device_fail_later, REFIT_ERR_COPY);
}

/* A step that meets a failure is given up: parts before it are stepped, those behind are not. */
static void a_failed_step_can_be_given_up(void **state)
{
    (void)state;
    uint32_t failed = 0;
    for (uint32_t nth = 1; nth < 14; nth++) {
        scene on;
        open_scene(&on, "2", NULL);
        fill_few(&on);
        on.spoiled = nth % 2 == 0 ? 9000 : 0;
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        refit_window_view view = {.size = sizeof view};
        refit_status status = begin(&on);
        while (status == REFIT_OK) {
            status = refit_window_next(on.window, &view, &on.error);
            if (status != REFIT_OK || view.count == 0) break;
            step_window(&on, &view);
            status = refit_window_done(on.window, REFIT_STREAM_NONE, &on.error);
        }
        uint32_t progress = refit_window_progress(on.window), failures = 0;
        UNTIL_OK(&on, failures, refit_window_end(on.window, &on.error));
        UNTIL_OK(&on, failures, refit_window_wait(on.window, PATIENCE_MS, &on.error));
        failed += progress < on.count || failures > 0;
        faulty_device_reset(on.device); /* there may have been fewer copies */
        check_image(&on);
        on.count -= progress;
        memmove(on.parts, on.parts + progress, on.count * sizeof on.parts[0]);
        if (on.count > 0) on.parts[0].flags = 0;
        step_all(&on);
        check_image(&on);
        close_scene(&on);
    }
    assert_in_range(failed, 6, 13);
}

static void a_step_allocates_nothing(void **state)
{
    (void)state;
    scene on;
    failing_alloc_begin(0);
    open_scene(&on, "3", NULL);
    fill(&on);
    step_all(&on);
    settle(&on);
    uint32_t calls = faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC);
    for (int step = 0; step < 3; step++) {
        failing_alloc_here(1);
        step_all(&on);
        settle(&on);
        assert_false(failing_alloc_stop_here());
    }
    assert_int_equal(faulty_device_calls(on.device, FAULTY_MEMORY_ALLOC), calls);
    check_image(&on);
    close_scene(&on);
    assert_false(failing_alloc_end());
}

static refit_status try_all(scene *on)
{
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    if (on->window == NULL) {
        RFT_TRY(refit_offloader_seal(on->offloader, &on->error));
        RFT_TRY(refit_window_open(on->offloader, &on->window, &on->error));
    }
    RFT_TRY(begin(on));
    for (refit_window_view view = {.size = sizeof view};;) {
        RFT_TRY(refit_window_next(on->window, &view, &on->error));
        if (view.count == 0) break;
        step_window(on, &view);
        RFT_TRY(refit_window_done(on->window, REFIT_STREAM_NONE, &on->error));
    }
    RFT_TRY(refit_window_end(on->window, &on->error));
    RFT_TRY(refit_window_wait(on->window, PATIENCE_MS, &on->error));
    RFT_TRY(refit_lease_acquire(on->offloader, &lease, &on->error));
    refit_status status = refit_lease_read(lease, 0, &bytes, &count, &on->error);
    if (status == REFIT_OK) assert_memory_equal(bytes, on->expected[0], count);
    refit_lease_release(lease);
    return status;
}

static void each_allocation_that_fails_loses_nothing(void **state)
{
    (void)state;
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        scene on;
        failing_alloc_begin(0);
        open_unsealed(&on, "2", NULL);
        list_few(&on, 0);
        on.spoiled = 9000;
        failing_alloc_here(nth);
        refit_status status = try_all(&on);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        if (on.window == NULL) seal(&on);
        assert_ok(refit_window_end(on.window, &on.error));
        check_image(&on);
        on.spoiled = 0;
        step_all(&on);
        check_image(&on);
        close_scene(&on);
        (void)failing_alloc_end();
        assert_in_range(nth, 1, 200);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masters_begin_as_zeros),
        cmocka_unit_test(half_of_the_bytes_travel_and_every_bit_is_there),
        cmocka_unit_test(parts_of_whole_units_are_stepped),
        cmocka_unit_test(a_part_has_units_in_any_places),
        cmocka_unit_test(other_parts_are_refused),
        cmocka_unit_test(host_views_are_refused),
        cmocka_unit_test(masters_travel_whole_where_that_is_wanted),
        cmocka_unit_test(masters_that_are_born_again_replace_those_before),
        cmocka_unit_test(masters_that_do_not_fit_go_whole_and_fit_again),
        cmocka_unit_test(masters_that_never_fit_travel_whole),
        cmocka_unit_test(without_memory_for_masters_that_do_not_fit_nothing_is_lost),
        cmocka_unit_test(without_page_locks_masters_go_whole_all_the_same),
        cmocka_unit_test(changed_weights_are_found_before_the_step),
        cmocka_unit_test(changed_weights_are_found_in_any_unit),
        cmocka_unit_test(every_part_of_a_window_is_judged),
        cmocka_unit_test(weights_that_are_mended_let_the_step_go_on),
        cmocka_unit_test(weights_may_move_between_steps),
        cmocka_unit_test(a_step_may_end_early),
        cmocka_unit_test(a_window_may_close_in_the_middle),
        cmocka_unit_test(a_lease_and_a_step_exclude_each_other),
        cmocka_unit_test(masters_move_by_both_schedules),
        cmocka_unit_test(a_restore_after_steps_is_verified),
        cmocka_unit_test(device_memory_is_that_of_windows_and_of_the_staging),
        cmocka_unit_test(without_device_memory_for_the_staging_a_seal_fails),
        cmocka_unit_test(weights_have_masters_of_one_region),
        cmocka_unit_test(encoding_follows_the_stream),
        cmocka_unit_test(weights_may_be_written_behind_the_step),
        cmocka_unit_test(other_copies_do_not_hold_the_stream),
        cmocka_unit_test(the_stream_of_a_repeated_call_waits),
        cmocka_unit_test(the_end_of_a_step_waits_for_copies_that_read_weights),
        cmocka_unit_test(windows_that_come_and_go_at_once_are_judged_apart),
        cmocka_unit_test(every_failure_can_be_repeated),
        cmocka_unit_test(every_copy_that_breaks_can_be_repeated),
        cmocka_unit_test(a_failed_step_can_be_given_up),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(each_allocation_that_fails_loses_nothing),
    };
    return cmocka_run_group_tests_name("window_masters", tests, NULL, NULL);
}
