/* Windows: parts of the host image visit the device, are stepped there once, and return. */
#include "tests/offload/windows.h"

#include <string.h>

#include "base/clock.h"
#include "tests/support/failing_alloc.h"

#define WINDOW UINT64_C(131072) /* bytes */

/* ---- What holds, of states and of masters ---------------------------------------------------- */

static void regions_begin_as_zeros(void **state)
{
    scene *on = *state;
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

static void each_byte_of_any_list_is_stepped_once(void **state)
{
    scene *on = *state;
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

static void a_step_may_end_early(void **state)
{
    scene *on = *state;
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

static void a_step_allocates_nothing(void **state)
{
    scene *on = *state;
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

/* ---- What holds ------------------------------------------------------------------------------ */

static void device_memory_is_that_of_the_windows(void **state)
{
    scene *on = *state;
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

static void windows_grow_to_parts_that_stay_together(void **state)
{
    scene *on = *state;
    uint64_t least;
    list_all(on, REFIT_PART_TOGETHER);
    on->parts[0].flags = 0;
    assert_ok(refit_window_measure(on->window, on->parts, on->count, &least, &on->error));
    assert_true(least >= bytes_of_list(on, false, true));
    assert_int_equal(least % 512, 0);
    step_all(on);
    assert_int_equal(on->windows, 1);
    check_image(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, least); /* there is one window */
}

static void a_short_list_takes_no_more_memory_than_it_needs(void **state)
{
    scene *on = *state;
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

static void memory_of_the_caller_is_used(void **state)
{
    scene *on = *state;
    void *memory;
    assert_ok(refit_memory_alloc(on->device, 3 * GIVEN, &memory, &on->error));
    assert_int_equal(give(on, (char *)memory + 1, 512, 1), REFIT_ERR_INVALID);
    assert_int_equal(give(on, memory, 513, 1), REFIT_ERR_INVALID);
    assert_int_equal(give(on, memory, 512, 5), REFIT_ERR_INVALID);
    assert_int_equal(give(on, memory, 512, 0), REFIT_ERR_INVALID);
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

static void born_parts_need_no_memory_of_the_window(void **state)
{
    scene *on = *state;
    void *first;
    list_all(on, REFIT_PART_BORN);
    assert_ok(begin(on));
    assert_ok(next(on));
    assert_int_equal(done(on), REFIT_ERR_INVALID);
    uint32_t at = on->view.first;
    assert_int_equal(refit_window_place(on->window, at + on->view.count, &on->view, &on->error),
                     REFIT_ERR_INVALID);
    assert_true(on->view.count > 1);
    assert_ok(refit_memory_alloc(on->device, on->parts[at].bytes, &first, &on->error));
    assert_ok(refit_window_place(on->window, at, first, &on->error));
    assert_int_equal(done(on), REFIT_ERR_INVALID);
    assert_ok(end(on));
    assert_ok(refit_memory_free(on->device, first, &on->error));
    step_all(on);
    assert_true(on->windows > 4);
    check_image(on);
    assert_int_equal(stats_of(on->offloader).window_bytes, 0);
    assert_int_equal(stats_of(on->offloader).step_in_bytes_last, 0);
    list_part(on, 0, REFIT_PART_BORN, 0, 4096); /* and one that comes */
    add_part(on, 4, 0, 0, 100000);
    step_all(on);
    check_image(on);
    assert_int_equal(stats_of(on->offloader).step_in_bytes_last, 100000);
}

/* Memory that other regions have used does not show through. */
static void regions_that_are_added_again_begin_as_zeros(void **state)
{
    scene *on = *state;
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

/* Neither longer than the step itself, however long the one before has waited. */
static void times_are_those_of_the_last_step(void **state)
{
    scene *on = *state;
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
        assert_true(stats.step_exposed_seconds_last > (step % 2 == 0 ? 0.09 : 0));
        assert_true(stats.step_exposed_seconds_last < elapsed);
        assert_true(stats.step_seconds_last > 0 && stats.step_seconds_last < elapsed);
    }
    check_image(on);
}

/* Regions that lie side by side in the image: one copy of both, cut at offload.piece_bytes. */
static void neighbours_are_one_copy(void **state)
{
    scene *on = *state;
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

static void a_wrong_list_is_refused(void **state)
{
    scene *on = *state;
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
    for (size_t at = 0; at < LENGTH(rows); at++) {
        list_part(on, 0, 0, 0, 4096);
        on->parts[on->count++] = rows[at].part;
        refit_status status = begin(on);
        if (status != rows[at].status) print_error("%s: %s\n", rows[at].name, on->error.text);
        assert_int_equal(status, rows[at].status);
        assert_true(on->error.text[0] != '\0');
    }
    list_part(on, 0, REFIT_PART_TOGETHER, 0, 4096);
    assert_int_equal(begin(on), REFIT_ERR_INVALID);
    assert_int_equal(refit_window_begin(on->window, NULL, 1, REFIT_STREAM_NONE, &on->error),
                     REFIT_ERR_INVALID);
    list_all(on, 0);
    step_all(on);
    check_image(on);
    on->count = 0;
    step_all(on); /* of no part */
    check_image(on);
}

static void calls_in_a_wrong_state_are_refused(void **state)
{
    scene *on = *state;
    refit_window *second;
    refit_lease *held;
    void *bytes;
    uint64_t count;
    assert_int_equal(refit_window_open(on->offloader, &second, &on->error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on->offloader, &on->error), REFIT_ERR_BUSY);
    assert_int_equal(next(on), REFIT_ERR_STATE);
    assert_int_equal(done(on), REFIT_ERR_STATE);
    assert_int_equal(refit_window_place(on->window, 0, &bytes, &on->error), REFIT_ERR_STATE);
    assert_ok(end(on));

    assert_ok(refit_lease_acquire(on->offloader, &held, &on->error));
    assert_int_equal(begin(on), REFIT_ERR_BUSY);
    assert_int_equal(refit_window_host(on->window, 0, &bytes, &count, &on->error), REFIT_ERR_BUSY);
    refit_lease_release(held);

    assert_ok(begin(on));
    assert_int_equal(begin(on), REFIT_ERR_STATE);
    assert_int_equal(done(on), REFIT_ERR_STATE);
    assert_int_equal(refit_window_trim(on->window, &on->error), REFIT_ERR_STATE);
    assert_int_equal(refit_window_host(on->window, 0, &bytes, &count, &on->error), REFIT_ERR_STATE);
    assert_int_equal(lease(on), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error),
                     REFIT_ERR_BUSY);
    on->view.size = 8;
    assert_int_equal(next(on), REFIT_ERR_INVALID);
    on->view.size = sizeof on->view;
    step_rest(on);
    check_image(on);
}

static void homes_do_not_mix(void **state)
{
    scene *on = *state;
    void *memory;
    refit_offloader *other;
    assert_ok(refit_offloader_open(on->device, &on->config, &other, &on->error));
    assert_ok(refit_memory_alloc(on->device, 4096, &memory, &on->error));
    const struct {
        void *memory;
        refit_home home;
        refit_policy policy;
        refit_status status;
    } rows[] = {{memory, REFIT_HOME_HOST, REFIT_KEEP, REFIT_ERR_INVALID},
                {memory, (refit_home)2, REFIT_KEEP, REFIT_ERR_INVALID},
                {NULL, REFIT_HOME_HOST, REFIT_ZERO, REFIT_ERR_INVALID},
                {memory, REFIT_HOME_DEVICE, REFIT_KEEP, REFIT_OK},
                {NULL, REFIT_HOME_HOST, REFIT_KEEP, REFIT_ERR_INVALID}};
    for (size_t at = 0; at < LENGTH(rows); at++) {
        refit_region_id id;
        const char name[] = {(char)('a' + at), '\0'};
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .memory = rows[at].memory,
                                  .bytes = 4096,
                                  .policy = rows[at].policy,
                                  .home = rows[at].home};
        refit_status status = refit_offloader_add(other, &desc, &id, &on->error);
        if (status != rows[at].status) print_error("row %zu: %s\n", at, on->error.text);
        assert_int_equal(status, rows[at].status);
    }
    assert_ok(refit_offloader_close(other, &on->error));
    assert_ok(refit_memory_free(on->device, memory, &on->error));
}

static void a_pageable_offloader_has_no_windows(void **state)
{
    scene *on = *state;
    refit_window *window;
    refit_offloader *other;
    on->config.use_pinned_optimizer_offload = 0;
    assert_ok(refit_offloader_open(on->device, &on->config, &other, &on->error));
    assert_int_equal(refit_window_open(other, &window, &on->error), REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_offloader_close(other, &on->error));
    assert_int_equal(refit_window_open(NULL, &window, &on->error), REFIT_ERR_INVALID);
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

static void copies_out_follow_the_stream(void **state)
{
    scene *on = *state;
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

/* The first copies in wait for what used the windows' memory last. */
static void copies_in_follow_the_stream(void **state)
{
    scene *on = *state;
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

/* Steps meet each failure in turn: each part is stepped once all the same. Masters fit, do not fit,
 * and fit again. */
static void fail_each(const fault *it, scene_kind kind)
{
    uint32_t calls = 1, failed = 0;
    for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
        scene *on = open_scene(&(opening){.kind = kind, .windows = nth % 2 == 0 ? "2" : "3"});
        if (kind == LITTLE) on->parts[2].flags = REFIT_PART_TOGETHER;
        faulty_device_reset(on->device);
        if (nth > 0) order_fault(on->device, it, nth);
        uint32_t failures = step_stubbornly(on);
        for (int round = 0; kind == LITTLE && round < 2; round++) {
            on->spoiled = round == 0 ? 9000 : 0;
            failures += step_stubbornly(on);
        }
        refit_stats stats = stats_of(on->offloader);
        assert_int_equal(stats.step_failures, failures);
        if (kind == STATES) {
            assert_int_equal(stats.step_in_bytes_last, bytes_of_list(on, false, false));
            assert_int_equal(stats.step_out_bytes_last, bytes_of_list(on, false, true));
        }
        if (nth == 0) calls = faulty_device_calls(on->device, it->slot);
        if (nth == 0) assert_int_equal(failures, 0);
        failed += failures > 0;
        faulty_device_reset(on->device); /* this time there may have been fewer calls */
        check_image(on);
        step_all(on);
        check_image(on);
        close_scene(on);
    }
    if (!it->may_pass && failed < calls / 2) print_error("%s: %u\n", it->name, failed);
    assert_true(it->may_pass || failed >= calls / 2);
}

static void every_failure_can_be_repeated(void **state)
{
    (void)state;
    static const fault faults[] = {
        {"a copy is refused", FAULTY_COPY_BATCH, false, REFIT_ERR_COPY, false},
        {"a copy breaks", FAULTY_COPY_BATCH, true, REFIT_ERR_COPY, false},
        {"an event cannot be recorded", FAULTY_EVENT_RECORD, false, REFIT_ERR_DEVICE, false},
        {"an event cannot be waited for", FAULTY_EVENT_WAIT, false, REFIT_ERR_DEVICE, true},
        {"no memory for windows", FAULTY_MEMORY_ALLOC, false, REFIT_ERR_DEVICE_MEMORY, true},
        /* Of masters alone. */
        {"masters are not encoded", FAULTY_MASTER_ENCODE, false, REFIT_ERR_DEVICE, false},
        {"masters are not decoded", FAULTY_MASTER_DECODE, false, REFIT_ERR_DEVICE, false},
        {"zeroing is refused", FAULTY_ZERO, false, REFIT_ERR_DEVICE, false},
        {"zeroing breaks", FAULTY_ZERO, true, REFIT_ERR_COPY, false},
    };
    for (size_t at = 0; at < LENGTH(faults); at++) {
        if (at < 5) fail_each(&faults[at], STATES);
        if (at != 4) fail_each(&faults[at], LITTLE);
    }
}

/* A step that meets a failure is given up: parts before it are stepped, those after it are not. */
static void a_failed_step_can_be_given_up(void **state)
{
    (void)state;
    uint32_t failed = 0;
    for (uint32_t run = 0; run < 24; run++) {
        scene *on = open_scene(&(opening){.kind = run % 2 == 0 ? STATES : LITTLE});
        on->spoiled = run % 4 == 3 ? 9000 : 0;
        faulty_device_fail_later(on->device, FAULTY_COPY_BATCH, 1 + run / 2, REFIT_ERR_COPY);
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

static void too_little_memory_makes_fewer_and_smaller_windows(void **state)
{
    (void)state;
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
    for (size_t at = 0; at < LENGTH(rows); at++) {
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
static void a_trim_lets_the_windows_be_as_configured_again(void **state)
{
    scene *on = *state;
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

/* Copies that are repeated do not need the stream of the arithmetic, which may be closed by then.
 */
static void copies_are_repeated_without_the_stream(void **state)
{
    scene *on = *state;
    list_part(on, 5, 0, 0, 65536);
    assert_ok(begin(on));
    step_next(on);
    faulty_device_fail_later(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    faulty_device_stop(on->device);
    assert_ok(refit_window_done(on->window, on->stream, &on->error));
    assert_ok(end(on));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    faulty_device_go(on->device);
    assert_int_equal(wait_for(on, TIMEOUT_MS), REFIT_ERR_COPY);
    check_image(on);
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
}

/* A done that ran out of time is repeated, as often as it takes. */
static void done_is_repeated_after_its_deadline(void **state)
{
    scene *on = *state;
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

static void copies_that_hang_end_by_the_deadline(void **state)
{
    scene *on = *state;
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
    refit_lease *held;
    const void *bytes;
    uint64_t count;
    RFT_TRY(refit_lease_acquire(on->offloader, &held, &on->error));
    refit_status status = refit_lease_read(held, 0, &bytes, &count, &on->error);
    refit_lease_release(held);
    return status;
}

static void each_allocation_that_fails_loses_nothing(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        bool came = true;
        for (uint64_t nth = 1; came; nth++) {
            scene *on =
                open_scene(&(opening){.kind = kind == 0 ? STATES : LITTLE, .unsealed = true});
            list_all(on, 0);
            on->spoiled = 9000;
            failing_alloc_here(nth);
            refit_status status = try_all(on);
            came = failing_alloc_stop_here();
            /* It may have been one of the test's own, which are repeated. */
            assert_true(status == REFIT_OK || (came && status == REFIT_ERR_HOST_MEMORY));
            if (on->window == NULL) seal(on);
            assert_ok(end(on));
            check_image(on);
            on->spoiled = 0;
            step_all(on);
            check_image(on);
            close_scene(on);
        }
    }
}

/* The copies of one direction can be waited for no more: the window closes all the same, and
 * nothing reads the bytes that did not come back. */
static void a_window_over_copies_that_hang_closes(void **state)
{
    scene *on = *state;
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
    assert_int_equal(lease(on), REFIT_ERR_BUSY);
}

#define BOTH(name, ...)                                                                            \
    TEST_WITH(name, __VA_ARGS__), TEST_AS(#name ", of masters", name, .kind = LITTLE, __VA_ARGS__)

#define IN_WINDOWS(name, count) TEST_AS(#name ", windows: " count, name, .windows = count)

int main(void)
{
    const struct CMUnitTest tests[] = {
        BOTH(regions_begin_as_zeros, .empty = true),
        IN_WINDOWS(each_byte_of_any_list_is_stepped_once, "1"),
        IN_WINDOWS(each_byte_of_any_list_is_stepped_once, "2"),
        IN_WINDOWS(each_byte_of_any_list_is_stepped_once, "3"),
        IN_WINDOWS(each_byte_of_any_list_is_stepped_once, "4"),
        TEST_AS("each byte of masters is stepped once, in small pieces",
                each_byte_of_any_list_is_stepped_once, .kind = MASTERS, .windows = "2",
                .settings = SETTINGS("offload.staging_bytes=1MiB", "offload.slab_bytes=64KiB",
                                     "offload.piece_bytes=36KiB", "offload.batch=2")),
        TEST_AS("each byte of masters is stepped once, in large windows",
                each_byte_of_any_list_is_stepped_once, .kind = MASTERS, .windows = "3",
                .settings = SETTINGS("offload.staging_bytes=4MiB", "offload.slab_bytes=1MiB",
                                     "offload.window_bytes=4MiB")),
        TEST_AS("each byte of masters is stepped once, at a limited rate",
                each_byte_of_any_list_is_stepped_once, .kind = MASTERS, .windows = "3",
                .settings = SETTINGS("offload.rate_limit=800MiB", "offload.alignment_bytes=16",
                                     "offload.window_bytes=3MiB")),
        BOTH(a_step_may_end_early, .windows = "3"),
        BOTH(a_step_allocates_nothing, .windows = "3"),
        TEST_WITH(device_memory_is_that_of_the_windows, .windows = "3"),
        TEST(windows_grow_to_parts_that_stay_together),
        TEST_WITH(a_short_list_takes_no_more_memory_than_it_needs, .windows = "4"),
        TEST(memory_of_the_caller_is_used),
        TEST_WITH(born_parts_need_no_memory_of_the_window, .empty = true),
        BOTH(regions_that_are_added_again_begin_as_zeros, .empty = true),
        TEST(times_are_those_of_the_last_step),
        TEST_WITH(neighbours_are_one_copy, .windows = "1", .settings = SETTINGS("offload.batch=1")),
        TEST(a_wrong_list_is_refused),
        TEST(calls_in_a_wrong_state_are_refused),
        TEST(homes_do_not_mix),
        TEST(a_pageable_offloader_has_no_windows),
        IN_WINDOWS(copies_out_follow_the_stream, "1"),
        IN_WINDOWS(copies_out_follow_the_stream, "2"),
        IN_WINDOWS(copies_out_follow_the_stream, "3"),
        IN_WINDOWS(copies_out_follow_the_stream, "4"),
        TEST(copies_in_follow_the_stream),
        cmocka_unit_test(every_failure_can_be_repeated),
        cmocka_unit_test(a_failed_step_can_be_given_up),
        cmocka_unit_test(too_little_memory_makes_fewer_and_smaller_windows),
        TEST_WITH(a_trim_lets_the_windows_be_as_configured_again, .windows = "3"),
        TEST(copies_are_repeated_without_the_stream),
        TEST(done_is_repeated_after_its_deadline),
        TEST(copies_that_hang_end_by_the_deadline),
        cmocka_unit_test(each_allocation_that_fails_loses_nothing),
        TEST(a_window_over_copies_that_hang_closes),
    };
    return cmocka_run_group_tests_name("window", tests, NULL, NULL);
}
