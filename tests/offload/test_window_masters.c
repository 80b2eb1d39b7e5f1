/*
 * fp32 masters that live on the host and visit the device in windows, as what their bf16 weights
 * lack: every bit is there in each step, about half of the bytes cross the link, and nothing is
 * lost, whatever the weights are, whatever fails, and whenever a step ends. What holds of all
 * regions is in test_window.c.
 */
#include "tests/offload/windows.h"

#include <string.h>

#include "offload/masters.h"
#include "offload/offloader.h"
#include "tests/support/failing_alloc.h"

#define PLAIN  4u   /* the region without weights */
#define MISFIT 9000 /* weights of a unit that are not its rounding: it goes whole */

static uint64_t came(scene *on)
{
    return stats_of(on->offloader).step_in_bytes_last;
}

static uint64_t host_bytes(scene *on, uint32_t region)
{
    return region_of(on->offloader, region).host_bytes;
}

static uint64_t bytes_of_all(const scene *on)
{
    return bytes_of_list(on, true, true) + bytes_of_list(on, false, true);
}

static void step_and_check(scene *on)
{
    step_all(on);
    check_image(on);
}

static void step_spoiled(scene *on, uint64_t spoiled)
{
    on->spoiled = spoiled;
    step_and_check(on);
    on->spoiled = 0;
}

static void list_region(scene *on, uint32_t region)
{
    list_part(on, region, 0, 0, on->bytes[region]);
}

/* ---- What holds ------------------------------------------------------------------------------ */

SCENE(half_of_the_bytes_travel_and_every_bit_is_there, .kind = MASTERS, .windows = "1")
{
    for (uint32_t region = 0; region < on->regions; region++) {
        uint64_t low = on->bytes[region] / (region < on->coded ? 2 : 1);
        uint64_t high = region < on->coded ? low + low / 40 + 1024 : low;
        assert_in_range(host_bytes(on, region), low, high);
    }
    uint64_t plain = bytes_of_list(on, false, true), coded = bytes_of_list(on, true, true);
    for (int step = 0; step < 4; step++) {
        step_and_check(on);
        refit_stats stats = stats_of(on->offloader);
        assert_int_equal(stats.step_in_bytes_last, stats.step_out_bytes_last);
        assert_in_range(stats.step_in_bytes_last - plain, coded / 2, 0.51 * (double)coded);
    }
}
SCENE_AGAIN(half_of_the_bytes_travel_and_every_bit_is_there, in_4_windows, .kind = MASTERS,
            .windows = "4")

/* Steps one unit of the first region. */
static void step_unit(scene *on, uint64_t number, uint64_t spoiled)
{
    on->spoiled = spoiled;
    list_part(on, 0, 0, number * UNIT, UNIT);
    step_all(on);
    settle(on);
    on->spoiled = 0;
}

/* In the image, in memory of their own, and zeros. */
SCENE(a_part_has_units_in_any_places, .kind = MASTERS, .empty = true)
{
    step_unit(on, 0, 0);
    step_unit(on, 2, MISFIT);
    list_region(on, 0);
    step_and_check(on);
    assert_in_range(came(on), UNIT * 3 / 2, UNIT * 3 / 2 + UNIT / 16);
    step_unit(on, 1, MISFIT);
    step_unit(on, 3, MISFIT);
    list_region(on, 0);
    step_and_check(on);
}

SCENE(what_does_not_go_by_weights_is_refused, .kind = MASTERS)
{
    static const struct {
        uint32_t region;
        uint64_t offset, bytes;
    } parts[] = {{0, 16384, UNIT}, {0, 0, UNIT - 4}, {0, UNIT, UNIT + 16384}, {2, 0, 16380}};
    void *bytes;
    uint64_t count;
    for (size_t at = 0; at < COUNT_OF(parts); at++) {
        list_part(on, parts[at].region, 0, parts[at].offset, parts[at].bytes);
        assert_invalid(begin(on));
        assert_says(&on->error, "1048576");
        assert_invalid(refit_window_measure(on->window, on->parts, 1, &count, &on->error));
    }
    list_part(on, PLAIN, 0, 7, 400); /* of which any part may be stepped */
    step_and_check(on);
    assert_int_equal(refit_window_host(on->window, 0, &bytes, &count, &on->error),
                     REFIT_ERR_UNSUPPORTED);
    assert_says(&on->error, "refit_read_lock_read");
    assert_ok(refit_window_host(on->window, PLAIN, &bytes, &count, &on->error));
    assert_memory_equal(bytes, on->expected[PLAIN], count);
}

/* Their whole bytes lie in the image, also where memory was bound before the plan was made. */
SCENE(masters_are_whole_where_that_is_wanted, .kind = MASTERS, .unsealed = true,
      .settings = SETTINGS("offload.masters=whole"))
{
    void *bytes;
    uint64_t count;
    bind_all(on);
    seal(on);
    fill(on);
    step_and_check(on);
    assert_int_equal(came(on), bytes_of_all(on));
    assert_ok(refit_window_host(on->window, 0, &bytes, &count, &on->error));
    assert_memory_equal(bytes, on->expected[0], count);
    assert_ok(restore_all(on->offloader, &on->error));
    check_device(on);
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_int_equal(host_bytes(on, 1), on->bytes[1]);
    assert_ok(offload_all(on->offloader, &on->error));
    check_image(on);
}

SCENE(masters_that_are_born_again_replace_those_before, .kind = MASTERS)
{
    for (int round = 0; round < 3; round++) {
        on->spoiled = round == 1 ? 20000 : 0;
        fill(on);
        check_image(on);
    }
    list_part(on, 0, REFIT_PART_NEW, UNIT, UNIT);
    assert_ok(begin(on));
    assert_ok(next(on));
    assert_invalid(refit_window_place(on->window, 0, (char *)on->born[1] + 2, &on->error));
    assert_says(&on->error, "multiple of 4");
    step_window(on);
    assert_ok(done(on));
    assert_ok(end(on));
    check_image(on);
}

/* ---- Weights that are not a rounding --------------------------------------------------------- */

SCENE(masters_that_do_not_fit_go_whole_and_fit_again, .kind = MASTERS)
{
    refit_stats before = stats_of(on->offloader);
    step_and_check(on);
    uint64_t usual = came(on);
    step_spoiled(on, 5000); /* of the first unit of each region, if it has so many */
    refit_stats stats = stats_of(on->offloader);
    assert_int_equal(stats.step_in_bytes_last, usual);
    uint64_t units = 2 * UNIT + on->bytes[2]; /* one of each region */
    assert_int_equal(stats.step_out_bytes_last, usual + units);
    assert_in_range(stats.host_bytes, before.host_bytes + units,
                    before.host_bytes + units + 3 * 65536);
    assert_int_equal(stats.host_pinned_bytes + stats.host_pageable_bytes, stats.host_bytes);
    const rft_unit *unit = &on->offloader->regions.items[0].units[0];
    assert_int_equal((uintptr_t)unit->whole % 4096, 0); /* pages of its own, as the image's are: */
    uint64_t pinned = before.host_pinned_bytes;
    assert_in_range(stats.host_pinned_bytes - pinned, pinned > 0 ? units : 0,
                    pinned > 0 ? UINT64_MAX : 0);
    step_and_check(on);
    assert_in_range(came(on), usual + 1, usual + units);
    assert_int_equal(stats_of(on->offloader).step_out_bytes_last, usual);
    assert_int_equal(stats_of(on->offloader).host_bytes, stats.host_bytes); /* it is kept */
    step_and_check(on);
    assert_int_equal(came(on), usual);
    assert_ok(refit_window_trim(on->window, &on->error));
    assert_int_equal(stats_of(on->offloader).host_bytes, before.host_bytes);
    step_and_check(on);
}

/* Weights that stay no rounding are not encoded each time. */
SCENE(masters_that_never_fit_travel_whole, .kind = LITTLE, .windows = "3")
{
    uint64_t all = bytes_of_all(on), coded = bytes_of_list(on, true, true);
    uint32_t plain = 0;
    on->spoiled = on->bytes[0];
    fill(on);
    for (int step = 0; step < 12; step++) {
        step_and_check(on);
        refit_stats stats = stats_of(on->offloader);
        assert_int_equal(stats.step_in_bytes_last, all);
        assert_in_range(stats.step_out_bytes_last, all, 2 * all);
        plain += stats.step_out_bytes_last == all;
        if (step == 6) assert_ok(refit_window_trim(on->window, &on->error)); /* which frees none */
    }
    assert_in_range(plain, 6, 11);
    on->spoiled = 0;
    for (int step = 0; step < 20; step++)
        step_all(on);
    check_image(on);
    assert_in_range(came(on), all - coded / 2, all - 47 * coded / 100);
}

SCENE(without_memory_for_masters_that_do_not_fit_nothing_is_lost, .kind = MASTERS)
{
    on->spoiled = MISFIT;
    list_region(on, 0);
    add_part(on, 1, 0, 0, on->bytes[1]);
    assert_ok(begin(on));
    step_next(on);
    assert_ok(done(on));
    for (int tries = 0; tries < 3; tries++) {
        failing_alloc_here(1);
        assert_int_equal(wait_for(on, TIMEOUT_MS), REFIT_ERR_HOST_MEMORY);
        assert_true(failing_alloc_stop_here());
        assert_says(&on->error, "region.0");
    }
    step_rest(on);
    check_image(on);
    /* What is copied again counts once. */
    assert_int_equal(stats_of(on->offloader).step_out_bytes_last, came(on) + 2 * UNIT);
}

/* Page-locks that fail leave that memory pageable. */
SCENE(without_page_locks_masters_go_whole_all_the_same, .kind = MASTERS)
{
    uint64_t pageable = stats_of(on->offloader).host_pageable_bytes;
    faulty_device_fail_times(on->device, FAULTY_HOST_PIN, 1, FAULTY_ALWAYS, REFIT_ERR_PIN);
    on->spoiled = MISFIT;
    step_and_check(on);
    step_and_check(on);
    assert_in_range(stats_of(on->offloader).host_pageable_bytes, pageable + 2 * UNIT, UINT64_MAX);
}

/* ---- Weights that are others ----------------------------------------------------------------- */

/* Steps up to a window whose weights were changed, and ends the step. */
static void step_to_corrupt(scene *on, uint32_t before)
{
    assert_ok(begin(on));
    if (before > 0) assert_true(step_windows(on, before));
    for (int tries = 0; tries < 2; tries++) {
        assert_int_equal(next(on), REFIT_ERR_CORRUPT);
        assert_int_equal(refit_window_progress(on->window), before);
    }
}

/* A read lock says so, too; the others can be read. */
static void check_corrupt(scene *on, uint32_t region)
{
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    assert_says(&on->error, "weights of region region.");
    settle(on);
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    for (uint32_t at = 0; at < on->regions; at++) {
        if (at != region) check_region(on, held, at);
    }
    assert_int_equal(refit_read_lock_read(held, region, &bytes, &count, &on->error),
                     REFIT_ERR_CORRUPT);
    refit_read_lock_release(held);
}

/* The second part of one window, as it leaves and as it arrives; a unit in the middle, the units
 * before which are in other places, which a later step changes; after another window. With the
 * weights as they were, the step goes on. */
SCENE(changed_weights_are_found_before_the_step, .kind = MASTERS, .windows = "1")
{
    static const struct {
        uint32_t region;
        uint64_t element;
        uint32_t first; /* another region of the list */
        uint32_t flags;
        uint32_t before; /* windows */
    } rows[] = {{2, 3, 1, REFIT_PART_SAME_WINDOW, 0},
                {0, UNIT / 2 + 5, PLAIN, REFIT_PART_SAME_WINDOW, 0},
                {0, UNIT / 2 + 5, 2, 0, 1},
                {1, 77777, 2, 0, 1}};
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        uint32_t region = rows[at].region;
        assert_ok(refit_window_trim(on->window, &on->error)); /* back to small windows */
        list_region(on, rows[at].first);
        add_part(on, region, rows[at].flags, 0, on->bytes[region]);
        step_spoiled(on, at == 0 ? MISFIT : 0);
        step_and_check(on);
        if (at == 1) step_unit(on, 0, MISFIT);
        list_region(on, rows[at].first);
        add_part(on, region, rows[at].flags, 0, on->bytes[region]);
        change_weight(on, region, rows[at].element);
        step_to_corrupt(on, rows[at].before);
        if (at % 2 == 0) { /* the step is given up */
            assert_ok(end(on));
            check_corrupt(on, region);
        }
        change_weight(on, region, rows[at].element);
        if (at % 2 == 1) step_rest(on);
        check_image(on);
        uint64_t bytes = came(on);
        step_and_check(on);
        if (at == 3) assert_int_equal(came(on), bytes); /* each try but the last is left out */
    }
}

SCENE(weights_may_move_between_steps, .kind = LITTLE)
{
    void *elsewhere;
    step_and_check(on);
    assert_ok(refit_memory_alloc(on->plain, on->bytes[0] / 2, &elsewhere, &on->error));
    test_write(on->plain, elsewhere, on->rounded[0], on->bytes[0] / 2);
    assert_ok(begin(on));
    assert_ok(next(on));
    assert_int_equal(refit_offloader_bind_weights(on->offloader, 0, elsewhere, &on->error),
                     REFIT_ERR_STATE);
    assert_ok(end(on));
    assert_ok(refit_offloader_bind_weights(on->offloader, 0, elsewhere, &on->error));
    assert_ok(refit_memory_free(on->plain, on->weights[0], &on->error));
    on->weights[0] = elsewhere;
    check_image(on);
    step_and_check(on);
}

/* ---- The other schedule ---------------------------------------------------------------------- */

static void bring_to_stay(scene *on)
{
    bind_all(on);
    assert_ok(restore_all(on->offloader, &on->error));
    check_device(on);
}

static void send_away(scene *on)
{
    refit_status status = REFIT_ERR_LIMIT;
    while (status == REFIT_ERR_LIMIT) { /* masters that do not fit into the plan */
        status = offload_all(on->offloader, &on->error);
    }
    assert_ok(status);
    unbind_all(on);
}

SCENE(masters_move_by_both_schedules, .kind = MASTERS, .empty = true)
{
    bring_to_stay(on); /* zeros */
    send_away(on);
    for (unsigned round = 0; round < 4; round++) {
        on->spoiled = round == 2 ? on->bytes[0] : 0;
        if (round == 0) fill(on);
        step_all(on);
        settle(on);
        bring_to_stay(on);
        assert_int_equal(begin(on), REFIT_ERR_STATE);
        if (round == 1) { /* planned anew, while they are on the device */
            uint32_t calls = faulty_device_calls(on->device, FAULTY_MEMORY_ALLOC);
            assert_ok(refit_offloader_unseal(on->offloader, &on->error));
            assert_ok(refit_offloader_seal(on->offloader, &on->error));
            assert_int_equal(faulty_device_calls(on->device, FAULTY_MEMORY_ALLOC), calls);
            assert_in_range(host_bytes(on, 0), on->bytes[0] / 2, on->bytes[0] * 3 / 4);
            /* More weights that are not a rounding than any offload made room for. */
            on->spoiled = 40000;
            renew(on);
        }
        send_away(on);
        if (round == 1) /* the plan made room */
            assert_in_range(host_bytes(on, 0), on->bytes[0] / 2, on->bytes[0] * 3 / 4);
        check_image(on);
    }
}
SCENE_AGAIN(masters_move_by_both_schedules, verified, .kind = MASTERS, .empty = true,
            .settings = SETTINGS("offload.verify=true", "offload.staging_bytes=1MiB"))

/* With offload.verify nothing is looked at meanwhile. */
static void await_copies(scene *on)
{
    for (int direction = RFT_OFFLOAD; direction <= RFT_RESTORE; direction++)
        assert_ok(rft_mover_wait(on->offloader->movers[direction], TIMEOUT_MS, &on->error));
}

/* Verified: what came back whole, or from its own memory, is what was there. */
SCENE(a_restore_after_steps_is_verified, .kind = MASTERS,
      .settings = SETTINGS("offload.verify=true"))
{
    /* A byte of a unit that went whole, and one of a unit that is coded. */
    static const uint64_t at[] = {UNIT + 400, 2 * UNIT + 400};
    on->spared = UNIT / 4; /* so the second unit goes whole */
    for (int round = 0; round < 2; round++) {
        on->spoiled = MISFIT;
        step_all(on);
        settle(on);
        bind_all(on);
        assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
        await_copies(on);
        test_fill(on->plain, (char *)on->memory[0] + at[round], 0x77, 1); /* after the copies */
        assert_int_equal(refit_offloader_wait(on->offloader, TIMEOUT_MS, &on->error),
                         REFIT_ERR_CORRUPT);
        assert_says(&on->error, "region.0");
        assert_ok(restore_all(on->offloader, &on->error));
        check_device(on);
        send_away(on);
        check_image(on);
    }
}

SCENE(device_memory_is_that_of_windows_and_of_the_staging, .kind = MASTERS, .unsealed = true,
      .settings = SETTINGS("offload.staging_bytes=4MiB"))
{
    uint64_t before = used_bytes(on->device);
    seal(on);
    uint64_t staging = used_bytes(on->device) - before;
    assert_in_range(staging, 1, UINT64_C(4) << 20);
    /* In use: whole pages, or more. */
    assert_in_range(stats_of(on->offloader).window_bytes, 1, staging);
    /* Both directions are under way at once. */
    char *out = rft_masters_staging(on->offloader, true);
    char *in = rft_masters_staging(on->offloader, false);
    assert_true(in == out + on->offloader->staging_bytes);
    assert_int_equal(stats_of(on->offloader).window_bytes, 2 * on->offloader->staging_bytes);
    list_all(on, 0);
    step_and_check(on);
    uint64_t window_bytes = stats_of(on->offloader).window_bytes;
    assert_in_range(window_bytes, 2 << 20, used_bytes(on->device) - before);
    if (!test_on_cuda()) {
        assert_in_range(used_bytes(on->device) - before, 0, window_bytes + 4096);
    }
    assert_ok(refit_window_trim(on->window, &on->error));
    assert_int_equal(used_bytes(on->device) - before, staging);
}

static void bind_weights(scene *on, uint32_t region, void *weights)
{
    assert_ok(refit_offloader_bind_weights(on->offloader, region, weights, &on->error));
}

/* Side by side, but not the same. */
SCENE(weights_have_masters_of_one_region, .kind = MASTERS, .unsealed = true, .windows = "2")
{
    void *joint;
    uint64_t need, budget;
    assert_ok(refit_memory_alloc(on->plain, (on->bytes[1] + on->bytes[2]) / 2, &joint, &on->error));
    bind_weights(on, 1, joint);
    bind_weights(on, 2, (char *)joint + UNIT / 2 - 2);
    bind_weights(on, 3, joint); /* its masters travel whole */
    for (int tries = 0; tries < 2; tries++) {
        assert_invalid(refit_offloader_seal(on->offloader, &on->error));
        assert_says(&on->error, "region.1 and region.2");
    }
    bind_weights(on, 2, (char *)joint + UNIT / 2);
    assert_ok(refit_offloader_estimate(on->offloader, &need, &budget, &on->error));
    for (uint32_t at = 1; at < PLAIN; at++)
        bind_weights(on, at, on->weights[at]);
    seal(on);
    fill(on);
    check_image(on);
    assert_ok(refit_memory_free(on->plain, joint, &on->error));
}

/* ---- Arithmetic on a stream ------------------------------------------------------------------ */

/* A list of one region, whose first window next hands out. */
static void step_one(scene *on)
{
    list_region(on, 1);
    assert_ok(begin(on));
    step_next(on);
}

static refit_status done_on(scene *on, refit_stream_ref stream)
{
    return refit_window_done(on->window, stream, &on->error);
}

static void await_stream(scene *on, refit_stream_ref stream)
{
    assert_ok(refit_stream_wait(on->device, stream, TIMEOUT_MS, &on->error));
}

/* Encoding waits for the work that the stream has queued: masters, and weights of them. */
SCENE(encoding_follows_the_stream, .kind = LITTLE)
{
    const uint64_t bytes = on->bytes[1];
    void *masters = test_host_alloc(on->plain, bytes);
    void *weights = test_host_alloc(on->plain, bytes / 2);
    for (int step = 0; step < 3; step++) {
        list_region(on, 1);
        assert_ok(begin(on));
        assert_ok(next(on));
        assert_device_equal(on->plain, on->view.memory[0], on->expected[1], bytes);
        new_bytes(on, &on->parts[0]);
        memcpy(masters, on->expected[1], bytes);
        memcpy(weights, on->rounded[1], bytes / 2);
        faulty_device_stop(on->device);
        assert_ok(refit_stream_copy(on->device, on->stream, on->view.memory[0], masters, bytes,
                                    &on->error));
        assert_ok(refit_stream_copy(on->device, on->stream, on->weights[1], weights, bytes / 2,
                                    &on->error));
        assert_ok(done_on(on, on->stream));
        assert_ok(end(on));
        assert_int_equal(wait_for(on, 0), REFIT_ERR_TIMEOUT);
        faulty_device_go(on->device);
        check_image(on);
    }
    test_host_free(on->plain, masters, bytes);
    test_host_free(on->plain, weights, bytes / 2);
}

/* The copies out are over. Weights that are written now are found, and the masters are there once
 * they are back. */
static void check_written(scene *on)
{
    assert_ok(wait_for(on, 0));
    change_weight(on, 1, 4711);
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    assert_int_equal(refit_read_lock_read(held, 1, &bytes, &count, &on->error), REFIT_ERR_CORRUPT);
    refit_read_lock_release(held);
    change_weight(on, 1, 4711);
    check_image(on);
}

/* The next work of its stream comes after the copies that read weights. */
SCENE(weights_may_be_written_after_the_step, .kind = LITTLE)
{
    step_one(on);
    faulty_device_stop_until_awaited(on->device);
    assert_ok(done_on(on, on->stream));
    assert_ok(end(on));
    assert_int_equal(faulty_device_joins(on->device, on->stream), 1);
    await_stream(on, on->stream);
    check_written(on);
}

SCENE(other_copies_do_not_hold_the_stream, .kind = LITTLE)
{
    list_region(on, PLAIN);
    assert_ok(begin(on));
    step_next(on);
    faulty_device_stop(on->device);
    assert_ok(done_on(on, on->stream));
    assert_ok(end(on));
    await_stream(on, on->stream);
    assert_int_equal(wait_for(on, 0), REFIT_ERR_TIMEOUT);
    faulty_device_go(on->device);
    check_image(on);
}

/* A call of done that is repeated may name another stream. */
SCENE(the_stream_of_a_repeated_call_waits, .kind = LITTLE)
{
    refit_stream_ref second;
    assert_ok(refit_stream_open(on->device, &second, &on->error));
    step_one(on);
    faulty_device_fail(on->device, FAULTY_MASTER_ENCODE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(done_on(on, on->stream), REFIT_ERR_DEVICE);
    faulty_device_stop(on->device);
    assert_ok(done_on(on, second));
    assert_ok(end(on));
    await_stream(on, on->stream);
    assert_int_equal(faulty_device_joins(on->device, on->stream), 0);
    assert_int_equal(faulty_device_joins(on->device, second), 1);
    faulty_device_stop_until_awaited(on->device);
    await_stream(on, second);
    check_written(on);
    assert_ok(refit_stream_close(on->device, second, &on->error));
}

/* Without a stream, and where a step ends before its last window, the end waits. */
SCENE(the_end_of_a_step_waits_for_copies_that_read_weights, .kind = LITTLE, .windows = "1")
{
    for (int early = 0; early < 2; early++) {
        list_region(on, 1);
        if (early) add_part(on, PLAIN, 0, 0, on->bytes[PLAIN]);
        assert_ok(begin(on));
        step_next(on);
        faulty_device_stop_until_awaited(on->device);
        assert_ok(done_on(on, early ? on->stream : REFIT_STREAM_NONE));
        assert_ok(end(on));
        assert_int_equal(refit_window_progress(on->window), 1);
        check_written(on);
    }
}

/* The first window leaves, and masters of it do not fit, while the third arrives: both are over
 * before either is looked at. */
SCENE(windows_that_come_and_go_at_once_are_checked_apart, .kind = MASTERS, .windows = "3")
{
    on->count = 0;
    for (uint64_t unit = 0; unit < 3; unit++)
        add_part(on, 0, 0, unit * UNIT, UNIT);
    on->spoiled = MISFIT;
    assert_ok(begin(on));
    step_next(on);
    await_copies(on); /* of the second */
    faulty_device_stop(on->device);
    assert_ok(done(on));
    assert_ok(next(on));
    assert_true(rft_mover_is_moving(on->offloader->movers[RFT_RESTORE]));
    faulty_device_go(on->device);
    await_copies(on);
    step_window(on);
    assert_ok(done(on));
    step_rest(on);
    check_image(on);
}

TEST(every_failure_of_masters_can_be_repeated)
{
    fail_each(LITTLE);
}

int main(void)
{
    return test_run("window_masters");
}
