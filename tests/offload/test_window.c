/* Windows: parts of the host image visit the device, are stepped there once, and return. */
#include "tests/offload/windows.h"

#include <string.h>

#include "base/clock.h"
#include "tests/support/failing_alloc.h"

#define WINDOW UINT64_C(131072) /* bytes */

/* ---- What holds, of states and of masters ---------------------------------------------------- */

SCENE(regions_begin_as_zeros, .empty = true)
{
    check_image(on);
    refit_region_info info = region_of(on->offloader, 1);
    assert_int_equal(info.place, REFIT_ON_HOST);
    assert_null(info.memory);
    assert_int_equal(info.bound, 0);
    list_all(on, 0);
    step_all(on); /* which finds zeros */
    check_image(on);
    /* Zeros of masters do not travel. */
    assert_int_equal(stats_of(on->offloader).step_in_bytes_last, bytes_of_list(on, false, false));
}
SCENE_AGAIN(regions_begin_as_zeros, of_masters, .kind = LITTLE, .empty = true)

SCENE(each_byte_of_any_list_is_stepped_once, .windows = "1")
{
    bool masters = on->coded > 0; /* which take longer */
    for (uint64_t count = 1; count <= (masters ? 1 : 3); count++) {
        step_all(on);
        check_image(on);
        refit_stats stats = stats_of(on->offloader);
        assert_true(stats.step_seconds_last > 0);
        if (masters) continue;
        assert_int_equal(stats.step_count, count);
        assert_int_equal(stats.step_in_bytes_last, bytes_of_list(on, false, false));
        assert_int_equal(stats.step_out_bytes_last, bytes_of_list(on, false, true));
    }
    for (unsigned step = 0; step < (masters ? 5 : 12); step++) {
        list_some(on, step % 2 == 1);
        on->spoiled = step % 3 == 2 ? seeded_below(&on->seed, 9000) : 0;
        step_all(on);
        if (step % 3 == 0) check_image(on);
    }
    check_image(on);
}
SCENE_AGAIN(each_byte_of_any_list_is_stepped_once, in_2_windows, .windows = "2")
SCENE_AGAIN(each_byte_of_any_list_is_stepped_once, in_3_windows, .windows = "3")
SCENE_AGAIN(each_byte_of_any_list_is_stepped_once, in_4_windows, .windows = "4")
SCENE_AGAIN(each_byte_of_any_list_is_stepped_once, of_masters_in_small_pieces, .kind = MASTERS,
            .windows = "2",
            .settings = SETTINGS("offload.staging_bytes=1MiB", "offload.slab_bytes=64KiB",
                                 "offload.piece_bytes=36KiB", "offload.batch=2"))
SCENE_AGAIN(each_byte_of_any_list_is_stepped_once, of_masters_in_large_windows, .kind = MASTERS,
            .windows = "3",
            .settings = SETTINGS("offload.staging_bytes=4MiB", "offload.slab_bytes=1MiB",
                                 "offload.window_bytes=4MiB"))
SCENE_AGAIN(each_byte_of_any_list_is_stepped_once, of_masters_at_a_limited_rate, .kind = MASTERS,
            .windows = "3",
            .settings = SETTINGS("offload.rate_limit=800MiB", "offload.alignment_bytes=16",
                                 "offload.window_bytes=3MiB"))

SCENE(a_step_may_end_early, .windows = "3")
{
    for (uint32_t most = 0; most < 4; most++) {
        list_all(on, 0);
        on->spoiled = most == 2 ? 9000 : 0;
        assert_ok(begin(on));
        (void)step_windows(on, most);
        uint32_t progress = refit_window_progress(on->window);
        if (most % 2 == 1) assert_ok(next(on));
        if (most % 2 == 1 && on->view.count > 0) { /* a window in use keeps its bytes */
            refit_window_view before = on->view;
            assert_ok(next(on));
            assert_ptr_equal(on->view.memory, before.memory);
            assert_int_equal(on->view.first, before.first);
            test_fill(on->plain, before.memory[0], 0xCC, on->parts[before.first].bytes);
        }
        assert_ok(end(on));
        assert_int_equal(refit_window_progress(on->window), progress);
        check_image(on);
        /* The rest, once. */
        on->spoiled = 0;
        on->count -= progress;
        memmove(on->parts, on->parts + progress, on->count * sizeof on->parts[0]);
        step_all(on);
        check_image(on);
    }
}
SCENE_AGAIN(a_step_may_end_early, of_masters, .kind = LITTLE, .windows = "3")

SCENE(a_step_allocates_nothing, .windows = "3")
{
    step_all(on);
    settle(on);
    uint32_t calls = faulty_device_calls(on->device, FAULTY_MEMORY_ALLOC);
    for (int step = 0; step < 3; step++) {
        failing_alloc_here(1);
        step_all(on);
        settle(on);
        assert_false(failing_alloc_stop_here());
        check_image(on);
    }
    assert_int_equal(faulty_device_calls(on->device, FAULTY_MEMORY_ALLOC), calls);
}
SCENE_AGAIN(a_step_allocates_nothing, of_masters, .kind = LITTLE, .windows = "3")

/* ---- What holds ------------------------------------------------------------------------------ */

SCENE(device_memory_is_that_of_the_windows, .windows = "3")
{
    on->count = 0; /* none is larger than a window */
    for (uint32_t at = 0; at < on->regions; at++)
        add_parts(on, at, 65536);
    assert_ok(begin(on));
    while (step_windows(on, 1)) {
        assert_int_equal(used_bytes(on->device), 3 * WINDOW);
        assert_int_equal(stats_of(on->offloader).window_bytes, 3 * WINDOW);
    }
    assert_true(on->windows > 6);
    assert_ok(end(on));
    check_image(on);
    assert_ok(refit_window_trim(on->window, &on->error));
    assert_int_equal(used_bytes(on->device), 0);
    assert_int_equal(stats_of(on->offloader).window_bytes, 0);
    step_all(on);
    check_image(on);
}

SCENE(windows_grow_to_parts_that_stay_together, 0)
{
    uint64_t least;
    list_all(on, REFIT_PART_SAME_WINDOW);
    on->parts[0].flags = 0;
    assert_ok(refit_window_measure(on->window, on->parts, on->count, &least, &on->error));
    assert_true(least >= bytes_of_list(on, false, true));
    assert_int_equal(least % 512, 0);
    step_all(on);
    assert_int_equal(on->windows, 1);
    check_image(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, least); /* there is one window */
}

SCENE(a_short_list_takes_no_more_memory_than_it_needs, .windows = "4")
{
    list_part(on, 0, 0, 0, 4096);
    step_all(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 4096);
    add_part(on, 1, 0, 0, 70000);
    add_part(on, 4, 0, 0, 100000);
    step_all(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 2 * WINDOW);
    on->count = 1;
    step_all(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 2 * WINDOW);
    check_image(on);
}

#define GIVEN UINT64_C(700416) /* bytes that the caller gives for each window */

static refit_status give(scene *on, void *memory, uint64_t bytes, uint32_t windows)
{
    return refit_window_set_memory(on->window, memory, bytes, windows, &on->error);
}

SCENE(memory_of_the_caller_is_used, 0)
{
    void *memory;
    assert_ok(refit_memory_alloc(on->device, 3 * GIVEN, &memory, &on->error));
    assert_invalid(give(on, (char *)memory + 1, 512, 1));
    assert_invalid(give(on, memory, 513, 1));
    assert_invalid(give(on, memory, 512, 5));
    assert_invalid(give(on, memory, 512, 0));
    assert_ok(give(on, memory, 65536, 3));
    assert_int_equal(begin(on), REFIT_ERR_LIMIT);
    assert_ok(give(on, memory, GIVEN, 3));
    assert_int_equal(stats_of(on->offloader).window_bytes, 3 * GIVEN);
    assert_ok(begin(on));
    assert_int_equal(give(on, NULL, 0, 0), REFIT_ERR_STATE);
    step_rest(on);
    check_image(on);
    assert_ok(give(on, NULL, 0, 0));
    assert_ok(refit_memory_free(on->device, memory, &on->error));
    step_all(on);
    check_image(on);
}

SCENE(born_parts_need_no_memory_of_the_window, .empty = true)
{
    void *first;
    list_all(on, REFIT_PART_NEW);
    assert_ok(begin(on));
    assert_ok(next(on));
    assert_invalid(done(on));
    uint32_t at = on->view.first;
    assert_invalid(refit_window_place(on->window, at + on->view.count, &on->view, &on->error));
    assert_true(on->view.count > 1);
    assert_ok(refit_memory_alloc(on->device, on->parts[at].bytes, &first, &on->error));
    assert_ok(refit_window_place(on->window, at, first, &on->error));
    assert_invalid(done(on));
    assert_ok(end(on));
    assert_ok(refit_memory_free(on->device, first, &on->error));
    step_all(on);
    assert_true(on->windows > 4);
    check_image(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 0);
    assert_int_equal(stats_of(on->offloader).step_in_bytes_last, 0);
    list_part(on, 0, REFIT_PART_NEW, 0, 4096); /* and one that comes */
    add_part(on, 4, 0, 0, 100000);
    step_all(on);
    check_image(on);
    assert_int_equal(stats_of(on->offloader).step_in_bytes_last, 100000);
}

/* Memory that other regions have used does not show through. */
SCENE(regions_that_are_added_again_begin_as_zeros, .empty = true)
{
    list_all(on, 0);
    step_all(on); /* written by windows alone */
    check_image(on);
    bind_all(on);
    assert_ok(restore_all(on->offloader, &on->error));
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    assert_ok(refit_offloader_clear(on->offloader, &on->error));
    assert_ok(add_regions(on));
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    for (uint32_t at = 0; at < on->regions; at++)
        memset(on->expected[at], 0, on->bytes[at]);
    check_image(on);
    step_all(on);
    check_image(on);
}
SCENE_AGAIN(regions_that_are_added_again_begin_as_zeros, of_masters, .kind = LITTLE, .empty = true)

/* Neither longer than the step itself, however long the one before has waited. */
SCENE(times_are_those_of_the_last_step, 0)
{
    for (int step = 0; step < 4; step++) {
        int64_t began = rft_now();
        faulty_device_hang(on->device);
        assert_ok(begin(on));
        for (int tries = 0; step % 2 == 0 && tries < 5; tries++)
            assert_hung(on, next(on));
        faulty_device_go(on->device);
        step_rest(on);
        settle(on);
        double elapsed = rft_seconds(rft_now() - began);
        refit_stats stats = stats_of(on->offloader);
        assert_true(stats.step_blocked_seconds_last > (step % 2 == 0 ? 0.09 : 0));
        assert_true(stats.step_blocked_seconds_last < elapsed);
        assert_true(stats.step_seconds_last > 0 && stats.step_seconds_last < elapsed);
    }
    check_image(on);
}

/* Regions that lie side by side in the image: one copy of both, cut at offload.piece_bytes. */
SCENE(neighbours_are_one_copy, .windows = "1", .settings = SETTINGS("offload.batch=1"))
{
    list_part(on, 0, 0, 0, 4096);
    add_part(on, 1, 0, 0, 70000);
    faulty_device_reset(on->device);
    step_all(on);
    check_image(on);
    assert_int_equal(on->windows, 1);
    assert_int_equal(faulty_device_calls(on->device, FAULTY_COPY_BATCH), 2 + 2);
}

/* ---- What is refused ------------------------------------------------------------------------- */

#define PART(...)                                                                                  \
    {                                                                                              \
        sizeof(refit_window_part), __VA_ARGS__                                                     \
    }

SCENE(a_wrong_list_is_refused, 0)
{
    static const struct {
        const char *name;
        refit_window_part part;
        refit_status status;
    } rows[] = {
        {"a region that there is not", PART(10, 0, 0, 1), REFIT_ERR_NOT_FOUND},
        {"no bytes", PART(1, 0, 0, 0), REFIT_ERR_INVALID},
        {"bytes after the end", PART(1, 0, 69999, 2), REFIT_ERR_INVALID},
        {"bytes far after the end", PART(1, 0, UINT64_MAX, 2), REFIT_ERR_INVALID},
        {"an unknown flag", PART(1, 4, 0, 1), REFIT_ERR_INVALID},
        {"bytes given twice", PART(0, 0, 4095, 1), REFIT_ERR_INVALID},
        {"another size", {sizeof(refit_window_part) + 8, 1, 0, 0, 1}, REFIT_ERR_INVALID},
    };
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        list_part(on, 0, 0, 0, 4096);
        on->parts[on->count++] = rows[at].part;
        refit_status status = begin(on);
        if (status != rows[at].status) print_error("%s: %s\n", rows[at].name, on->error.text);
        assert_int_equal(status, rows[at].status);
        assert_true(on->error.text[0] != '\0');
    }
    list_part(on, 0, REFIT_PART_SAME_WINDOW, 0, 4096);
    assert_invalid(begin(on));
    assert_invalid(refit_window_begin(on->window, NULL, 1, REFIT_STREAM_NONE, &on->error));
    list_all(on, 0);
    step_all(on);
    check_image(on);
    on->count = 0;
    step_all(on); /* of no part */
    check_image(on);
}

SCENE(calls_in_a_wrong_state_are_refused, 0)
{
    refit_window *second;
    refit_read_lock *held;
    void *bytes;
    uint64_t count;
    assert_int_equal(refit_window_open(on->offloader, &second, &on->error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on->offloader, &on->error), REFIT_ERR_BUSY);
    assert_int_equal(next(on), REFIT_ERR_STATE);
    assert_int_equal(done(on), REFIT_ERR_STATE);
    assert_int_equal(refit_window_place(on->window, 0, &bytes, &on->error), REFIT_ERR_STATE);
    assert_ok(end(on));

    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    assert_int_equal(begin(on), REFIT_ERR_BUSY);
    assert_int_equal(refit_window_host(on->window, 0, &bytes, &count, &on->error), REFIT_ERR_BUSY);
    refit_read_lock_release(held);

    assert_ok(begin(on));
    assert_int_equal(begin(on), REFIT_ERR_STATE);
    assert_int_equal(done(on), REFIT_ERR_STATE);
    assert_int_equal(refit_window_trim(on->window, &on->error), REFIT_ERR_STATE);
    assert_int_equal(refit_window_host(on->window, 0, &bytes, &count, &on->error), REFIT_ERR_STATE);
    assert_int_equal(try_read_lock(on), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error),
                     REFIT_ERR_BUSY);
    on->view.size = 8;
    assert_invalid(next(on));
    on->view.size = sizeof on->view;
    step_rest(on);
    check_image(on);
}

SCENE(homes_do_not_mix, 0)
{
    void *memory;
    refit_offloader *other;
    assert_ok(refit_offloader_open(on->device, &on->config, &other, &on->error));
    assert_ok(refit_memory_alloc(on->device, 4096, &memory, &on->error));
    const struct {
        void *memory;
        refit_placement placement;
        refit_policy policy;
        refit_status status;
    } rows[] = {{memory, REFIT_PLACEMENT_HOST, REFIT_KEEP, REFIT_ERR_INVALID},
                {memory, (refit_placement)2, REFIT_KEEP, REFIT_ERR_INVALID},
                {NULL, REFIT_PLACEMENT_HOST, REFIT_ZERO, REFIT_ERR_INVALID},
                {memory, REFIT_PLACEMENT_DEVICE, REFIT_KEEP, REFIT_OK},
                {NULL, REFIT_PLACEMENT_HOST, REFIT_KEEP, REFIT_ERR_INVALID}};
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        refit_region_id id;
        const char name[] = {(char)('a' + at), '\0'};
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .memory = rows[at].memory,
                                  .bytes = 4096,
                                  .policy = rows[at].policy,
                                  .placement = rows[at].placement};
        refit_status status = refit_offloader_add(other, &desc, &id, &on->error);
        if (status != rows[at].status) print_error("row %zu: %s\n", at, on->error.text);
        assert_int_equal(status, rows[at].status);
    }
    assert_ok(refit_offloader_close(other, &on->error));
    assert_ok(refit_memory_free(on->device, memory, &on->error));
}

SCENE(a_pageable_offloader_has_no_windows, 0)
{
    refit_window *window;
    refit_offloader *other;
    on->config.use_pinned_optimizer_offload = 0;
    assert_ok(refit_offloader_open(on->device, &on->config, &other, &on->error));
    assert_int_equal(refit_window_open(other, &window, &on->error), REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_offloader_close(other, &on->error));
    assert_invalid(refit_window_open(NULL, &window, &on->error));
    assert_ok(refit_window_close(NULL, &on->error));
    assert_int_equal(refit_window_progress(NULL), 0);
}

/* ---- Arithmetic on a stream ------------------------------------------------------------------ */

/* One part, stepped in stream order. Host device: its memory is read and written by the stream. */
typedef struct queued_part {
    unsigned char *memory;
    uint64_t bytes;
} queued_part;

static void step_queued(void *user)
{
    const queued_part *queued = user;
    for (uint64_t i = 0; i < queued->bytes; i++)
        queued->memory[i] = stepped(queued->memory[i], i);
}

SCENE(copies_out_follow_the_stream, .windows = "1")
{
    queued_part queued[PARTS_MOST];
    if (test_on_cuda()) skip(); /* its memory is not the CPU's */
    for (int step = 0; step < 6; step++) {
        list_some(on, false);
        assert_ok(refit_window_begin(on->window, on->parts, on->count, on->stream, &on->error));
        for (;;) {
            assert_ok(next(on));
            if (on->view.count == 0) break;
            for (uint32_t i = 0; i < on->view.count; i++) {
                queued_part *one = &queued[on->view.first + i];
                *one = (queued_part){on->view.memory[i], on->parts[on->view.first + i].bytes};
                assert_ok(refit_stream_call(on->device, on->stream, step_queued, one, &on->error));
            }
            assert_ok(refit_window_done(on->window, on->stream, &on->error));
        }
        assert_ok(end(on));
        for (uint32_t part = 0; part < on->count; part++)
            new_bytes(on, &on->parts[part]);
        check_image(on);
    }
}
SCENE_AGAIN(copies_out_follow_the_stream, in_2_windows, .windows = "2")
SCENE_AGAIN(copies_out_follow_the_stream, in_3_windows, .windows = "3")
SCENE_AGAIN(copies_out_follow_the_stream, in_4_windows, .windows = "4")

/* The first copies in wait for what used the windows' memory last. */
SCENE(copies_in_follow_the_stream, 0)
{
    void *memory;
    assert_ok(refit_memory_alloc(on->device, 2 * GIVEN, &memory, &on->error));
    assert_ok(give(on, memory, GIVEN, 2));
    void *other = test_host_alloc(on->plain, 2 * GIVEN);
    memset(other, 0xCC, 2 * GIVEN);
    faulty_device_stop(on->device);
    assert_ok(refit_stream_copy(on->device, on->stream, memory, other, 2 * GIVEN, &on->error));
    assert_ok(refit_window_begin(on->window, on->parts, on->count, on->stream,
                                 &on->error)); /* does not block */
    faulty_device_go(on->device);
    step_rest(on);
    check_image(on);
    assert_ok(give(on, NULL, 0, 0));
    assert_ok(refit_memory_free(on->device, memory, &on->error));
    test_host_free(on->plain, other, 2 * GIVEN);
}

/* ---- Failures -------------------------------------------------------------------------------- */

TEST(every_failure_can_be_repeated)
{
    fail_each(STATES);
}

/* A step that meets a failure is given up: parts before it are stepped, those after it are not. */
TEST(a_failed_step_can_be_given_up)
{
    uint32_t failed = 0;
    for (uint32_t run = 0; run < 24; run++) {
        scene *on = open_scene(&(opening){.kind = run % 2 == 0 ? STATES : LITTLE});
        on->spoiled = run % 4 == 3 ? 9000 : 0;
        faulty_device_fail(on->device, FAULTY_COPY_BATCH, 1 + run / 2, REFIT_ERR_COPY);
        refit_status status = begin(on);
        while (status == REFIT_OK) {
            status = next(on);
            if (status != REFIT_OK || on->view.count == 0) break;
            step_window(on);
            status = done(on);
        }
        uint32_t progress = refit_window_progress(on->window), failures = 0;
        UNTIL_OK(on, failures, end(on));
        UNTIL_OK(on, failures, wait_for(on, TIMEOUT_MS));
        failed += stats_of(on->offloader).step_failures > 0;
        faulty_device_reset(on->device); /* there may have been fewer copies */
        check_image(on);
        on->count -= progress;
        memmove(on->parts, on->parts + progress, on->count * sizeof on->parts[0]);
        step_all(on);
        check_image(on);
        close_scene(on);
    }
    assert_in_range(failed, 16, 24);
}

TEST(too_little_memory_makes_fewer_and_smaller_windows)
{
    /* Capacity, and what is taken of it: windows are 128 KiB, the largest part needs 64 KiB. */
    static const struct {
        const char *device;
        uint64_t taken;
    } rows[] = {
        {"host:capacity=1MiB", 4 * WINDOW},   {"host:capacity=512KiB", 4 * WINDOW},
        {"host:capacity=400KiB", 3 * WINDOW}, {"host:capacity=260KiB", 2 * WINDOW},
        {"host:capacity=200KiB", WINDOW},     {"host:capacity=100KiB", WINDOW / 2},
        {"host:capacity=60KiB", 0},
    };
    if (test_on_cuda()) skip(); /* a GPU's memory comes in larger pieces */
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        scene *on = open_scene(&(opening){.device = rows[at].device, .windows = "4"});
        on->count = 0;
        add_parts(on, 8, 65536);
        for (int step = 0; step < 2; step++) {
            if (rows[at].taken == 0) assert_int_equal(begin(on), REFIT_ERR_DEVICE_MEMORY);
            if (rows[at].taken > 0) step_all(on);
            check_image(on);
            assert_int_equal(stats_of(on->offloader).window_bytes, rows[at].taken);
        }
        close_scene(on);
    }
}

/* A step does not ask for more each time; after a trim it does. */
SCENE(a_trim_lets_the_windows_be_as_configured_again, .windows = "3")
{
    on->count = 0;
    add_parts(on, 8, 65536);
    faulty_device_fail(on->device, FAULTY_MEMORY_ALLOC, 1, REFIT_ERR_DEVICE_MEMORY);
    step_all(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 2 * WINDOW);
    uint32_t calls = faulty_device_calls(on->device, FAULTY_MEMORY_ALLOC);
    step_all(on);
    assert_int_equal(faulty_device_calls(on->device, FAULTY_MEMORY_ALLOC), calls);
    assert_ok(refit_window_trim(on->window, &on->error));
    step_all(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 3 * WINDOW);
    check_image(on);
}

SCENE(a_device_lost_before_a_part_is_stepped_leaves_the_image, 0)
{
    faulty_device_lose(on->device, FAULTY_COPY_BATCH, 1);
    faulty_device_stop(on->device);
    assert_ok(begin(on));
    faulty_device_go(on->device);
    assert_int_equal(next(on), REFIT_ERR_DEVICE);
    assert_says(&on->error, "lost");
    assert_int_equal(next(on), REFIT_ERR_DEVICE);
    assert_ok(end(on));
    assert_int_equal(begin(on), REFIT_ERR_DEVICE);
    check_image(on);
}

/* What was stepped and has not arrived is lost; no reader is given a mixture. */
TEST(a_device_lost_while_a_part_leaves_ends_the_step)
{
    for (int closed = 0; closed < 2; closed++) {
        scene *on = open_scene(&(opening){0});
        assert_ok(begin(on));
        step_next(on);
        faulty_device_lose(on->device, FAULTY_COPY_BATCH, 1);
        faulty_device_stop(on->device);
        assert_ok(done(on));
        faulty_device_go(on->device);
        assert_int_equal(wait_for(on, TIMEOUT_MS), REFIT_ERR_DEVICE);
        assert_int_equal(next(on), REFIT_ERR_DEVICE);
        assert_int_equal(end(on), REFIT_ERR_DEVICE);
        assert_int_not_equal(refit_window_progress(on->window), 0);
        if (closed) {
            assert_ok(refit_window_close(on->window, &on->error));
            on->window = NULL;
        }
        assert_int_equal(try_read_lock(on), REFIT_ERR_DEVICE);
        assert_says(&on->error, "during a step");
        close_scene(on);
    }
}

/* A done that ran out of time is repeated, as often as it takes. */
SCENE(done_is_repeated_after_its_deadline, 0)
{
    list_part(on, 5, 0, 0, 65536);
    add_part(on, 6, 0, 0, 65536);
    void *memory;
    assert_ok(refit_memory_alloc(on->device, 2 * 65536, &memory, &on->error));
    assert_ok(give(on, memory, 65536, 2));
    assert_ok(begin(on));
    step_next(on);
    faulty_device_hang(on->device);
    assert_ok(done(on));
    step_next(on);
    for (int tries = 0; tries < 2; tries++) {
        assert_hung(on, done(on));
        assert_int_equal(refit_window_progress(on->window), 2);
    }
    faulty_device_go(on->device);
    assert_ok(done(on));
    assert_ok(end(on));
    check_image(on);
    assert_ok(give(on, NULL, 0, 0));
    assert_ok(refit_memory_free(on->device, memory, &on->error));
}

SCENE(copies_that_hang_end_by_the_deadline, 0)
{
    faulty_device_hang(on->device);
    assert_ok(begin(on));
    assert_hung(on, next(on));
    assert_hung(on, end(on));
    assert_hung(on, refit_window_close(on->window, &on->error));
    faulty_device_go(on->device);
    assert_true(step_windows(on, 1));
    assert_ok(next(on));
    step_window(on);
    faulty_device_hang(on->device);
    refit_status status = done(on);
    assert_true(status == REFIT_OK || status == REFIT_ERR_TIMEOUT);
    assert_int_equal(wait_for(on, 0), REFIT_ERR_TIMEOUT);
    faulty_device_go(on->device);
    step_rest(on);
    check_image(on);
}

/* Seals, steps and reads; the first failure. */
static refit_status try_all(scene *on)
{
    if (on->window == NULL) {
        RFT_TRY(refit_offloader_seal(on->offloader, &on->error));
        RFT_TRY(refit_window_open(on->offloader, &on->window, &on->error));
    }
    RFT_TRY(begin(on));
    do {
        RFT_TRY(next(on));
        step_window(on);
        if (on->view.count > 0) RFT_TRY(done(on));
    } while (on->view.count > 0);
    RFT_TRY(end(on));
    RFT_TRY(wait_for(on, TIMEOUT_MS));
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    RFT_TRY(refit_read_lock_acquire(on->offloader, &held, &on->error));
    refit_status status = refit_read_lock_read(held, 0, &bytes, &count, &on->error);
    refit_read_lock_release(held);
    return status;
}

TEST(each_allocation_that_fails_loses_nothing)
{
    for (int kind = 0; kind < 2; kind++) {
        bool came = true;
        uint32_t refused = 0;
        for (uint64_t nth = 1; came; nth++) {
            scene *on =
                open_scene(&(opening){.kind = kind == 0 ? STATES : LITTLE, .unsealed = true});
            list_all(on, 0);
            on->spoiled = 9000;
            failing_alloc_here(nth);
            refit_status status = try_all(on);
            came = failing_alloc_stop_here();
            bool made_up = status == REFIT_OK && test_on_cuda(); /* test_device.c's copies are */
            assert_true(made_up || status == (came ? REFIT_ERR_HOST_MEMORY : REFIT_OK));
            refused += status != REFIT_OK;
            if (on->window == NULL) seal(on);
            assert_ok(end(on));
            check_image(on);
            on->spoiled = 0;
            step_all(on);
            check_image(on);
            close_scene(on);
        }
        assert_in_range(refused, 28, 100);
    }
}

/* The copies of one direction can be waited for no more: the window closes all the same, and
 * nothing reads the bytes that did not come back. */
SCENE(a_window_over_copies_that_hang_closes, 0)
{
    if (test_on_cuda()) skip(); /* its driver drains a stream that is closed */
    assert_ok(begin(on));
    step_next(on);
    faulty_device_fail_times(on->device, FAULTY_COPY_BATCH, 1, FAULTY_ALWAYS, REFIT_ERR_COPY);
    faulty_device_fail_times(on->device, FAULTY_EVENT_RECORD, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail_times(on->device, FAULTY_STREAM_CLOSE, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    assert_true(done(on) != REFIT_OK);
    faulty_device_reset(on->device);
    assert_true(end(on) != REFIT_OK);
    assert_ok(refit_window_close(on->window, &on->error));
    on->window = NULL;
    assert_int_equal(try_read_lock(on), REFIT_ERR_BUSY);
}

int main(void)
{
    return test_run("window");
}
