/*
 * Masters whose weights stay on the device: half of their bytes leave, and every bit of them
 * returns, whatever the weights are and whatever fails; weights that were changed are found before
 * a master is lost.
 */
#include "tests/offload/windows.h"

#include "offload/masters.h"
#include "offload/offloader.h"
#include "tests/support/failing_alloc.h"

#define PLAIN 4u /* the region without weights */

static refit_status offload(scene *on)
{
    return offload_all(on->offloader, &on->error);
}

static refit_status restore(scene *on)
{
    return restore_all(on->offloader, &on->error);
}

static void leave(scene *on)
{
    assert_ok(offload(on));
    scrub(on);
}

static void come_back(scene *on)
{
    assert_ok(restore(on));
    check_device(on);
}

static void cycle(scene *on)
{
    leave(on);
    come_back(on);
}

static refit_region_info info_of(scene *on, uint32_t region)
{
    return region_of(on->offloader, region);
}

static refit_offloader_state state_of(scene *on)
{
    return refit_offloader_get_state(on->offloader);
}

SCENE(half_of_the_bytes_leave_and_all_return, .kind = MASTERS, .on_device = true)
{
    uint64_t all = 0, coded = 0, whole = 0;
    cycle(on);
    for (uint32_t at = 0; at < on->regions; at++) {
        uint64_t low = on->bytes[at] / 2, high = low + low / 40 + 1024;
        bool is_coded = at < on->coded;
        uint64_t host_bytes = info_of(on, at).host_bytes;
        assert_in_range(host_bytes, is_coded ? low : 2 * low, is_coded ? high : 2 * low);
        all += host_bytes;
        *(is_coded ? &coded : &whole) += on->bytes[at];
    }
    refit_stats stats = stats_of(on->offloader);
    assert_in_range(stats.offload_bytes_last, all - on->coded * RFT_MASTERS_HEAD, all);
    assert_int_equal(stats.restore_bytes_last, stats.offload_bytes_last);
    assert_in_range(stats.offload_bytes_last - whole, coded / 2, 205 * coded / 400);
    for (int round = 0; round < 3; round++) {
        renew(on);
        cycle(on);
    }
}

SCENE(whole_moves_all_bytes, .kind = MASTERS, .on_device = true,
      .settings = SETTINGS("offload.masters=whole"))
{
    uint64_t all = 0;
    cycle(on);
    for (uint32_t at = 0; at < on->regions; at++) {
        all += on->bytes[at];
        assert_int_equal(info_of(on, at).host_bytes, on->bytes[at]);
    }
    assert_int_equal(stats_of(on->offloader).offload_bytes_last, all);
}
SCENE_AGAIN(whole_moves_all_bytes, pageable, .kind = MASTERS, .on_device = true,
            .settings = SETTINGS("use_pinned_optimizer_offload=false"))

/* Chunks of one unit, in copies across many page-locks. */
SCENE(stretches_and_slabs_of_any_size_return, .kind = MASTERS, .on_device = true,
      .settings = SETTINGS("offload.staging_bytes=1MiB", "offload.slab_bytes=64KiB",
                           "offload.piece_bytes=36KiB", "offload.batch=2", "offload.verify=true"))
{
    cycle(on);
    renew(on);
    cycle(on);
}
SCENE_AGAIN(stretches_and_slabs_of_any_size_return, of_large_slabs, .kind = MASTERS,
            .on_device = true,
            .settings = SETTINGS("offload.staging_bytes=1MiB", "offload.slab_bytes=1MiB",
                                 "offload.alignment_bytes=16"))
SCENE_AGAIN(stretches_and_slabs_of_any_size_return, at_a_limited_rate, .kind = MASTERS,
            .on_device = true,
            .settings = SETTINGS("offload.rate_limit=800MiB", "offload.staging_bytes=2MiB"))

SCENE(some_weights_that_are_not_a_rounding_fit, .kind = MASTERS, .on_device = true)
{
    spoil(on, 0, 1500);
    spoil(on, 1, 4096);
    spoil(on, 2, 40);
    cycle(on);
}

static void check_misfit(scene *on, const char *name)
{
    assert_int_equal(offload(on), REFIT_ERR_LIMIT);
    assert_says(&on->error, name);
    assert_int_equal(state_of(on), REFIT_FAILED);
    for (uint32_t at = 0; at < on->regions; at++)
        assert_int_equal(info_of(on, at).place, REFIT_ON_DEVICE);
    check_device(on);
}

SCENE(masters_that_do_not_fit_stay_and_leave_by_the_next_plan, .kind = MASTERS, .on_device = true)
{
    uint64_t before = info_of(on, 1).host_bytes;
    spoil(on, 1, 8000);
    check_misfit(on, "region.1");
    cycle(on);
    assert_in_range(info_of(on, 1).host_bytes, before + 8000, on->bytes[1] * 3 / 4);
    for (uint32_t at = 0; at < on->coded; at++)
        spoil(on, at, on->bytes[at] / 4);
    check_misfit(on, "region.0");
    come_back(on);
    cycle(on);
    for (uint32_t at = 0; at < on->coded; at++)
        assert_int_equal(info_of(on, at).host_bytes, on->bytes[at]);
    assert_int_equal(stats_of(on->offloader).offload_failures, 2);
}

SCENE(a_plan_that_cannot_be_made_anew_is_told, .kind = MASTERS, .on_device = true)
{
    assert_ok(offload(on));
    change_weight(on, 1, 7);
    assert_int_equal(restore(on), REFIT_ERR_CORRUPT);
    spoil(on, 0, on->bytes[0] / 4); /* which is back */
    assert_int_equal(offload(on), REFIT_ERR_LIMIT);
    assert_int_equal(offload(on), REFIT_ERR_LIMIT);
    assert_says(&on->error, "restore first");
    change_weight(on, 1, 7);
    come_back(on);
    cycle(on);
}

SCENE(changed_weights_are_found_and_the_masters_can_still_return, .kind = MASTERS,
      .on_device = true)
{
    leave(on);
    change_weight(on, 0, 555555);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(restore(on), REFIT_ERR_CORRUPT);
        assert_says(&on->error, "weights of region region.0");
        assert_int_equal(state_of(on), REFIT_FAILED);
        assert_int_equal(info_of(on, 0).place, REFIT_ON_HOST);
        assert_int_equal(info_of(on, 1).place, REFIT_ON_DEVICE);
        assert_int_equal(info_of(on, 2).place, REFIT_ON_DEVICE);
    }
    for (uint32_t at = 1; at < on->regions; at++)
        assert_device_equal(on->plain, on->memory[at], on->expected[at], on->bytes[at]);
    /* The block of that weight was not written. */
    char untouched[4 * RFT_MASTER_BLOCK];
    uint64_t block = 555555 / RFT_MASTER_BLOCK * sizeof untouched;
    memset(untouched, 0x77, sizeof untouched);
    assert_device_equal(on->plain, (char *)on->memory[0] + block, untouched, sizeof untouched);
    change_weight(on, 0, 555555);
    come_back(on);
    cycle(on);
}

SCENE(waits_for_a_group_and_joins_tell_of_changed_weights, .kind = MASTERS, .on_device = true)
{
    enum { WAIT_GROUP, JOIN, JOIN_GROUP, WAYS };
    refit_future *future;
    for (int way = 0; way < WAYS; way++) {
        assert_ok(offload(on));
        change_weight(on, 1, 5);
        assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, &future, &on->error));
        assert_ok(refit_future_wait_group(future, 2, TIMEOUT_MS, &on->error));
        refit_status status =
            way == WAIT_GROUP ? refit_future_wait_group(future, 1, TIMEOUT_MS, &on->error)
            : way == JOIN     ? refit_future_join(future, on->stream, &on->error)
                              : refit_future_join_group(future, 1, on->stream, &on->error);
        assert_int_equal(status, REFIT_ERR_CORRUPT);
        assert_says(&on->error, "region.1");
        assert_int_equal(refit_future_wait(future, TIMEOUT_MS, &on->error), REFIT_ERR_CORRUPT);
        refit_future_close(future);
        change_weight(on, 1, 5);
        come_back(on);
    }
}

SCENE(weights_may_move, .kind = MASTERS, .on_device = true)
{
    void *elsewhere;
    uint64_t bytes = on->bytes[0] / 2;
    leave(on);
    assert_ok(refit_memory_alloc(on->plain, bytes, &elsewhere, &on->error));
    test_write(on->plain, elsewhere, on->rounded[0], bytes);
    test_fill(on->plain, on->weights[0], 0, bytes);
    assert_ok(refit_offloader_bind_weights(on->offloader, 0, elsewhere, &on->error));
    assert_ok(refit_memory_free(on->plain, on->weights[0], &on->error));
    on->weights[0] = elsewhere;
    come_back(on);
    renew(on);
    cycle(on);
}

SCENE(a_read_lock_reads_masters_whole, .kind = MASTERS, .on_device = true)
{
    refit_read_lock *held;
    const void *bytes, *again;
    uint64_t count;
    leave(on);
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    for (uint32_t at = 0; at < on->regions; at++) {
        check_region(on, held, at);
        assert_ok(refit_read_lock_read(held, at, &bytes, &count, &on->error));
        assert_ok(refit_read_lock_read(held, at, &again, &count, &on->error));
        assert_ptr_equal(bytes, again);
    }
    refit_read_lock_release(held);
    change_weight(on, 1, 0);
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    assert_int_equal(refit_read_lock_read(held, 1, &bytes, &count, &on->error), REFIT_ERR_CORRUPT);
    refit_read_lock_release(held);
}

/* What verify looks for: bytes of the image that are others. */
SCENE(verify_compares_the_coded_image, .kind = MASTERS, .on_device = true,
      .settings = SETTINGS("offload.verify=true", "offload.slab_bytes=256KiB"))
{
    cycle(on);
    assert_ok(offload(on));
    for (uint32_t at = 0; at < on->coded; at++) {
        const rft_region *region = &on->offloader->regions.items[at];
        assert_ok(rft_masters_compare(on->offloader, region, &on->error));
        char *image =
            (char *)rft_image_of(on->offloader, region) + region->host_bytes - region->room - 200;
        *image ^= 4;
        assert_int_equal(rft_masters_compare(on->offloader, region, &on->error), REFIT_ERR_CORRUPT);
        assert_says(&on->error, region->name);
        *image ^= 4;
    }
    const rft_region *region = &on->offloader->regions.items[2];
    char *low = (char *)rft_image_of(on->offloader, region) + RFT_MASTERS_HEAD + 1000;
    *low ^= 1;
    assert_int_equal(restore(on), REFIT_ERR_CORRUPT);
    assert_says(&on->error, "digest");
    *low ^= 1;
    come_back(on);
}

static refit_status bind_weights(scene *on, refit_offloader *offloader, uint32_t region,
                                 const void *weights)
{
    return refit_offloader_bind_weights(offloader, region, weights, &on->error);
}

SCENE(regions_with_impossible_weights_are_refused, .kind = MASTERS, .on_device = true,
      .unsealed = true)
{
    refit_offloader *offloader = on->offloader;
    refit_region_id id;
    char *memory = on->weights[0], *weights = on->weights[1];
    const struct {
        void *memory;
        uint64_t bytes;
        const void *weights;
        refit_status status;
    } rows[] = {{memory, 4098, weights, REFIT_ERR_INVALID},
                {memory, 40960, weights + 1, REFIT_ERR_INVALID},
                {memory + 2, 40960, weights, REFIT_ERR_INVALID},
                {memory, 40960, NULL, REFIT_OK}}; /* weights that leave themselves */
    for (size_t at = 0; at < COUNT_OF(rows); at++) {
        assert_int_equal(refit_offloader_count(offloader), on->regions);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = "new",
                                  .memory = rows[at].memory,
                                  .bytes = rows[at].bytes,
                                  .weights = rows[at].weights};
        refit_status status = refit_offloader_add(offloader, &desc, &id, &on->error);
        if (status != rows[at].status) print_error("row %zu: %s\n", at, on->error.text);
        assert_int_equal(status, rows[at].status);
        if (at == 0) assert_says(&on->error, "4098 bytes");
    }
    assert_invalid(bind_weights(on, offloader, PLAIN, memory));
    assert_invalid(bind_weights(on, offloader, 0, NULL));
    assert_int_equal(bind_weights(on, offloader, 99, memory), REFIT_ERR_NOT_FOUND);
    assert_invalid(bind_weights(on, NULL, 0, memory));
    assert_invalid(refit_offloader_seal(offloader, &on->error));
    assert_says(&on->error, "region.0");
    assert_int_equal(state_of(on), REFIT_OPEN);
}

SCENE(without_device_memory_for_the_staging_a_seal_fails, .kind = MASTERS, .on_device = true,
      .unsealed = true)
{
    faulty_device_fail(on->device, FAULTY_MEMORY_ALLOC, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_offloader_seal(on->offloader, &on->error), REFIT_ERR_DEVICE_MEMORY);
    assert_says(&on->error, "offload.masters");
    assert_int_equal(state_of(on), REFIT_OPEN);
    seal(on);
    cycle(on);
}

SCENE(the_staging_goes_with_the_plan, .kind = MASTERS, .on_device = true, .unsealed = true)
{
    uint64_t before = used_bytes(on->plain);
    seal(on);
    assert_in_range(used_bytes(on->plain) - before, 1, on->config.offload_staging_bytes);
    cycle(on);
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    assert_ok(refit_offloader_trim(on->offloader, &on->error));
    assert_int_equal(used_bytes(on->plain), before);
    assert_ok(refit_offloader_clear(on->offloader, &on->error));
    assert_ok(add_regions(on));
    seal(on);
    cycle(on);
}

SCENE(a_controller_makes_the_plan_anew_by_itself, .kind = MASTERS, .on_device = true)
{
    refit_controller *controller;
    assert_ok(refit_controller_open(on->offloader, NULL, &on->config, &controller, &on->error));
    for (uint64_t spoiled = 0; spoiled < on->bytes[1] / 4; spoiled += 130000) {
        spoil(on, 1, spoiled);
        assert_ok(refit_controller_offload(controller, REFIT_STREAM_NONE, &on->error));
        assert_int_equal(refit_controller_get_state(controller), REFIT_CLEARED);
        scrub(on);
        assert_ok(refit_controller_restore(controller, REFIT_STREAM_NONE, &on->error));
        assert_ok(refit_controller_wait(controller, REFIT_STREAM_NONE, &on->error));
        check_device(on);
    }
    refit_controller_close(controller);
}

/* Those that live on the host do visit it in windows: test_window_masters.c. */
SCENE(windows_refuse_masters_that_left_by_their_weights, .kind = MASTERS, .on_device = true)
{
    refit_window *window;
    void *bytes;
    uint64_t count;
    assert_ok(offload(on));
    assert_ok(refit_window_open(on->offloader, &window, &on->error));
    refit_window_part part = {.size = sizeof part, .region = 1, .bytes = 4096};
    assert_int_equal(refit_window_begin(window, &part, 1, REFIT_STREAM_NONE, &on->error),
                     REFIT_ERR_UNSUPPORTED);
    assert_says(&on->error, "region.1");
    assert_int_equal(refit_window_host(window, 1, &bytes, &count, &on->error),
                     REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_window_close(window, &on->error));
    come_back(on);
}

/* ---- Faults: every call of every slot fails in turn ------------------------------------------ */

static const char *const verified[] = {"offload.verify=true", "offload.staging_bytes=1MiB", NULL};

static refit_status try_cycle(scene *on)
{
    RFT_TRY(refit_offloader_seal(on->offloader, &on->error));
    RFT_TRY(offload(on));
    scrub(on);
    return restore(on);
}

static void recover(scene *on)
{
    faulty_device_reset(on->device);
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    refit_status status = refit_offloader_wait(on->offloader, TIMEOUT_MS, &on->error);
    (void)status; /* how the operation failed */
    for (uint32_t at = 0; at < on->regions; at++) {
        if (info_of(on, at).place != REFIT_ON_DEVICE) continue;
        assert_device_equal(on->plain, on->memory[at], on->expected[at], on->bytes[at]);
    }
    if (state_of(on) != REFIT_RESIDENT) assert_ok(restore(on));
    check_device(on);
    cycle(on);
}

TEST(each_call_that_fails_loses_nothing)
{
    static const fault faults[] = {
        {"masters are not encoded", FAULTY_MASTER_ENCODE, REFIT_ERR_DEVICE, false},
        {"masters are not decoded", FAULTY_MASTER_DECODE, REFIT_ERR_DEVICE, false},
        {"zeroing is refused", FAULTY_ZERO, REFIT_ERR_DEVICE, false},
        {"a copy is refused", FAULTY_COPY_BATCH, REFIT_ERR_DEVICE, false},
        {"no memory", FAULTY_MEMORY_ALLOC, REFIT_ERR_DEVICE, false},
        {"memory is not freed", FAULTY_MEMORY_FREE, REFIT_ERR_DEVICE, false},
        {"an event is not recorded", FAULTY_EVENT_RECORD, REFIT_ERR_DEVICE, false},
        {"a digest is not taken", FAULTY_DIGEST, REFIT_ERR_DEVICE, false}};
    static const opening how = {
        .kind = LITTLE, .on_device = true, .unsealed = true, .settings = verified};
    for (size_t at = 0; at < COUNT_OF(faults); at++) {
        uint32_t calls = 1;
        for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
            scene *on = open_scene(&how);
            faulty_device_reset(on->device);
            if (nth > 0) order_fault(on->device, &faults[at], nth);
            refit_status status = try_cycle(on);
            if (nth == 0) assert_ok(status);
            if (nth == 0) calls = faulty_device_calls(on->device, faults[at].slot);
            if (status == REFIT_OK) check_device(on);
            recover(on);
            close_scene(on);
        }
    }
}

static refit_status try_misfit(scene *on)
{
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    RFT_TRY(refit_offloader_seal(on->offloader, &on->error));
    refit_status status = offload(on);
    if (status == REFIT_ERR_LIMIT) status = offload(on);
    RFT_TRY(status);
    RFT_TRY(refit_read_lock_acquire(on->offloader, &held, &on->error));
    status = refit_read_lock_read(held, 0, &bytes, &count, &on->error);
    if (status == REFIT_OK) assert_memory_equal(bytes, on->expected[0], count);
    refit_read_lock_release(held);
    return status;
}

TEST(each_allocation_that_fails_loses_nothing)
{
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        scene *on = open_scene(&(opening){.kind = LITTLE, .on_device = true, .unsealed = true});
        spoil(on, 0, 9000);
        failing_alloc_here(nth);
        refit_status status = try_misfit(on);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        while (status == REFIT_ERR_HOST_MEMORY || status == REFIT_ERR_LIMIT)
            status = try_misfit(on);
        assert_ok(status);
        scrub(on);
        come_back(on);
        close_scene(on);
    }
}

int main(void)
{
    return test_run("masters");
}
