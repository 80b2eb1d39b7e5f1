/* The cycle, with page-locked and with pageable host memory: bytes leave and return bit for bit as
 * the policy of their region says, memory is really given back, nothing is allocated. */
#include "tests/offload/rig.h"

#include <sched.h>
#include <stdlib.h>

#include "base/alloc.h"

#define DISCARDED 5

static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};
static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const large_slabs[] = {"offload.slab_bytes=64MiB", NULL};
static const char *const *const all_settings[] = {NULL, pageable, verified};

static void await_and_close(rig *on, refit_future *future)
{
    assert_ok(refit_future_wait(future, TIMEOUT_MS, &on->error));
    refit_future_close(future);
}

TEST(bytes_return_exactly)
{
    for (size_t at = 0; at < COUNT_OF(all_settings); at++) {
        for (int memory = RIG_BOUND; memory <= RIG_ARENA; memory++) {
            rig *on =
                open_scene(&(opening){.memory = (rig_memory)memory, .settings = all_settings[at]});
            for (int round = 0; round < 3; round++) {
                rig_fill(on);
                rig_offload(on);
                for (uint32_t i = 0; memory == RIG_BOUND && i < RIG_REGIONS; i++)
                    test_fill(on->plain, on->regions[i].memory, 0xCC, on->regions[i].bytes);
                rig_restore(on);
                rig_check_bytes(on, true);
                /* The hooks hand out memory full of 0xEE, which nothing overwrites. */
                if (memory == RIG_HOOKS)
                    assert_device_equal(on->plain, on->regions[DISCARDED].memory, "\xEE", 1);
            }
            close_scene(on);
        }
    }
}

SCENE(device_memory_is_given_back, .memory = RIG_HOOKS)
{
    uint64_t before = used_bytes(on->device);
    bool arena = on->arena != NULL;
    assert_true(before >= rig_all_bytes(on));
    rig_offload(on);
    assert_int_equal(used_bytes(on->device), 0);
    assert_int_equal(rig_stats(on).offload_reclaimed_bytes_last,
                     arena ? before : rig_all_bytes(on));
    if (arena) assert_null(rig_region_info(on, 3).memory);
    rig_restore(on);
    assert_int_equal(used_bytes(on->device), before);
    for (uint32_t at = 0; at < RIG_REGIONS; at++) { /* those of an arena never change */
        assert_ptr_equal(rig_region_info(on, at).memory, on->regions[at].memory);
    }
}
SCENE_AGAIN(device_memory_is_given_back, in_an_arena, .memory = RIG_ARENA)

SCENE(memory_goes_only_in_finish, .memory = RIG_ARENA)
{
    await_and_close(on, rig_start(on, false));
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    assert_true(used_bytes(on->device) > 0);
    assert_ok(refit_offloader_wait(on->offloader, 0, &on->error));
    assert_int_equal(used_bytes(on->device), 0);
    rig_restore(on);
    rig_check_bytes(on, true);
}

SCENE(restore_without_release_is_harmless, .memory = RIG_HOOKS)
{
    await_and_close(on, rig_start(on, false));
    rig_restore(on);
    assert_int_equal(on->releases, 0);
    rig_check_bytes(on, true);
}

/* One by one, or many in one call; twice is once. */
SCENE(a_caller_frees_and_binds_again, 0)
{
    refit_region_id ids[RIG_REGIONS];
    void *memory[RIG_REGIONS];
    for (int many = 0; many < 2; many++) {
        rig_offload(on);
        for (uint32_t at = 0; at < RIG_REGIONS; at++) {
            rig_free(on, at);
            ids[at] = at;
            for (int twice = 0; !many && twice < 2; twice++)
                assert_ok(unbind_region(on, at));
        }
        for (int twice = 0; many && twice < 2; twice++)
            assert_ok(refit_offloader_unbind_each(on->offloader, ids, RIG_REGIONS, &on->error));
        assert_int_equal(rig_stats(on).offload_reclaimed_bytes_last, rig_all_bytes(on));
        for (uint32_t at = RIG_REGIONS; at-- > 0;) {
            memory[at] = rig_take(on, at);
            if (!many) assert_ok(bind_region(on, at, memory[at]));
        }
        if (many)
            assert_ok(
                refit_offloader_bind_each(on->offloader, ids, memory, RIG_REGIONS, &on->error));
        rig_restore(on);
        rig_check_bytes(on, true);
    }
}

SCENE(many_stop_at_the_first_that_cannot, 0)
{
    refit_offloader *offloader = on->offloader;
    const refit_region_id ids[] = {0, RIG_REGIONS, 1};
    void *const memory[] = {on->regions[0].memory, on->regions[1].memory, on->regions[1].memory};
    assert_int_equal(refit_offloader_unbind_each(offloader, ids, 3, &on->error), REFIT_ERR_STATE);
    assert_invalid(refit_offloader_unbind_each(offloader, NULL, 1, &on->error));
    assert_invalid(refit_offloader_bind_each(offloader, ids, NULL, 1, &on->error));
    assert_invalid(refit_offloader_unbind_each(NULL, ids, 1, &on->error));
    assert_invalid(refit_offloader_bind_each(NULL, ids, memory, 1, &on->error));
    assert_ok(refit_offloader_unbind_each(offloader, NULL, 0, &on->error));
    assert_ok(refit_offloader_bind_each(offloader, NULL, NULL, 0, &on->error));
    rig_offload(on);
    assert_int_equal(refit_offloader_unbind_each(offloader, ids, 3, &on->error),
                     REFIT_ERR_NOT_FOUND);
    assert_int_equal(rig_region_info(on, 0).bound, 0);
    assert_int_equal(rig_region_info(on, 1).bound, 1);
    assert_int_equal(refit_offloader_bind_each(offloader, ids, memory, 3, &on->error),
                     REFIT_ERR_NOT_FOUND);
    assert_int_equal(rig_region_info(on, 0).bound, 1);
    rig_restore(on);
    rig_check_bytes(on, true);
}

/* Pageable copies are made by the call, which waits for the stream itself. */
SCENE(copies_wait_for_the_callers_stream, 0)
{
    refit_stream_ref stream;
    rig_region *region = &on->regions[8];
    bool by_the_call = !on->config.use_pinned_optimizer_offload;
    assert_ok(refit_stream_open(on->device, &stream, &on->error));
    unsigned char *late = test_host_alloc(on->plain, region->bytes);
    memset(late, 0x77, region->bytes);
    faulty_device_hang(on->device);
    assert_ok(
        refit_stream_copy(on->device, stream, region->memory, late, region->bytes, &on->error));
    if (by_the_call) {
        assert_hung(on, refit_offloader_offload(on->offloader, stream, NULL, &on->error));
        assert_int_equal(rig_state(on), REFIT_RESIDENT);
        faulty_device_go(on->device);
    }
    assert_ok(refit_offloader_offload(on->offloader, stream, NULL, &on->error));
    if (by_the_call) {
        test_fill(on->plain, region->memory, 0, region->bytes);
    } else {
        assert_int_equal(rig_state(on), REFIT_OFFLOADING);
        assert_int_equal(refit_offloader_wait(on->offloader, 0, &on->error), REFIT_ERR_TIMEOUT);
        faulty_device_go(on->device);
    }
    assert_ok(finish(on));
    if (by_the_call) {
        faulty_device_hang(on->device);
        assert_ok(refit_stream_copy(on->device, stream, rig_extra(on, 16), late, 16, &on->error));
        assert_hung(on, refit_offloader_restore(on->offloader, stream, NULL, &on->error));
        faulty_device_go(on->device);
    }
    rig_restore(on);
    memcpy(region->expected, late, region->bytes);
    rig_check_bytes(on, true);
    assert_ok(refit_stream_wait(on->device, stream, TIMEOUT_MS, &on->error));
    test_host_free(on->plain, late, region->bytes);
    assert_ok(refit_stream_close(on->device, stream, &on->error));
}
SCENE_AGAIN(copies_wait_for_the_callers_stream, pageable, .settings = pageable)

SCENE(nothing_is_allocated, .memory = RIG_ARENA)
{
    rig_cycle(on);
    uint64_t before = rft_alloc_count();
    for (int round = 0; round < 5; round++) {
        refit_future *future = rig_start(on, false);
        assert_ok(finish(on));
        refit_future_close(future);
        future = rig_start(on, true);
        assert_ok(refit_future_wait_group(future, 1, TIMEOUT_MS, &on->error));
        await_and_close(on, future);
    }
    assert_int_equal(rft_alloc_count(), before);
}
SCENE_AGAIN(nothing_is_allocated, verified, .memory = RIG_ARENA, .settings = verified)

/* ---- Figures --------------------------------------------------------------------------------- */

SCENE(figures_add_up, .memory = RIG_HOOKS)
{
    rig_offload(on);
    assert_true(rig_stats(on).offload_copies_per_cycle >= RIG_REGIONS - 2);
    rig_restore(on);
    rig_offload(on);
    refit_stats stats = rig_stats(on);
    assert_int_equal(stats.offload_regions, RIG_REGIONS);
    assert_int_equal(stats.offload_count, 2);
    assert_int_equal(stats.restore_count, 1);
    assert_int_equal(stats.offload_failures, 0);
    assert_int_equal(stats.host_payload_bytes, rig_kept_bytes(on));
    assert_int_equal(stats.host_bytes, stats.host_pinned_bytes + stats.host_pageable_bytes);
    assert_int_equal(stats.offload_bytes_last, rig_kept_bytes(on));
    assert_int_equal(stats.offload_bytes_total, 2 * rig_kept_bytes(on));
    assert_int_equal(stats.restore_bytes_total, stats.restore_bytes_last);
    assert_true(stats.offload_seconds_last > 0);
    assert_true(stats.offload_blocked_seconds_last > 0);
    assert_true(stats.restore_seconds_last > 0);
    assert_true(stats.restore_blocked_seconds_last > 0);
}

SCENE(host_bytes_exceed_the_payload_by_less_than_a_percent, .unsealed = true,
      .settings = large_slabs)
{
    char *memory = rig_extra(on, 100 * 100000);
    assert_ok(clear(on));
    for (uint64_t i = 0; i < 100; i++) {
        const char name[] = {(char)('0' + i / 10), (char)('0' + i % 10), '\0'};
        (void)rig_add(on, name, memory + i * 100000, 80000 + i * 131);
    }
    assert_ok(seal(on));
    refit_stats stats = rig_stats(on);
    uint64_t payload = stats.host_payload_bytes;
    assert_in_range(stats.host_bytes, payload, payload + payload / 100);
}

static double blocked(rig *on, bool back)
{
    refit_stats stats = rig_stats(on);
    return back ? stats.restore_blocked_seconds_last : stats.offload_blocked_seconds_last;
}

/* What a caller waits for is counted at once, also where the wait ended too early; between calls
 * nothing is. */
SCENE(time_spent_waiting_is_blocked, .memory = RIG_HOOKS)
{
    for (int back = 0; back < 2; back++) {
        faulty_device_stop(on->device);
        refit_future *future = rig_start(on, back);
        double last = blocked(on, back);
        assert_int_equal(refit_future_wait(future, 30, &on->error), REFIT_ERR_TIMEOUT);
        assert_true(blocked(on, back) >= last + 0.029);
        last = blocked(on, back);
        assert_int_equal(refit_future_wait_group(future, 2, 30, &on->error), REFIT_ERR_TIMEOUT);
        assert_true(blocked(on, back) >= last + 0.029);
        last = blocked(on, back);
        faulty_device_go(on->device);
        while (refit_future_done(future) == 0)
            sched_yield();
        assert_true(blocked(on, back) == last);
        refit_future_close(future);
        assert_ok(finish(on));
    }
}

SCENE(figures_fill_a_shorter_struct_of_an_older_caller, 0)
{
    refit_stats stats;
    memset(&stats, 0xAB, sizeof stats);
    stats.size = offsetof(refit_stats, offload_count);
    assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    assert_int_equal(stats.offload_regions, RIG_REGIONS);
    assert_int_equal(stats.offload_count, UINT64_C(0xABABABABABABABAB));
    stats.size = 0;
    assert_invalid(refit_offloader_stats(on->offloader, &stats, &on->error));
}

/* ---- Accumulation ---------------------------------------------------------------------------- */

static void accumulate(rig *on, int accumulating)
{
    assert_ok(refit_offloader_set_accumulating(on->offloader, accumulating, &on->error));
}

SCENE(an_open_accumulation_keeps_grads_from_being_lost, .memory = RIG_HOOKS)
{
    refit_future *future = NULL;
    accumulate(on, 1);
    assert_int_equal(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, &future, &on->error),
                     REFIT_ERR_STATE);
    assert_says(&on->error, "state.5");
    assert_null(future);
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    rig_check_bytes(on, false);
    accumulate(on, 0);
    rig_offload(on);
    accumulate(on, 1);
    rig_restore(on);
}

SCENE(kept_regions_may_leave_while_accumulating, .unsealed = true)
{
    const unsigned char right[1000] = {[999] = 0x21};
    assert_ok(clear(on));
    void *grads = rig_extra(on, sizeof right);
    (void)rig_add(on, "grads", grads, sizeof right);
    assert_ok(seal(on));
    accumulate(on, 1);
    test_write(on->plain, grads, right, sizeof right);
    rig_offload(on);
    test_fill(on->plain, grads, 0xEE, sizeof right);
    rig_restore(on);
    assert_device_equal(on->plain, grads, right, sizeof right);
}

/* ---- Pageable host memory: a fresh copy a tensor, freed afterwards --------------------------- */

SCENE(pageable_states_go_through_the_same_states, .memory = RIG_HOOKS, .settings = pageable)
{
    refit_future *future = rig_start(on, false);
    assert_int_equal(refit_future_done(future), 1);
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    assert_int_equal(on->releases, 0);
    assert_ok(refit_offloader_wait(on->offloader, 0, &on->error));
    assert_int_equal(on->releases, RIG_REGIONS);
    refit_future_close(future);
    assert_ok(offload(on)); /* again is nothing */
    assert_ok(refit_offloader_wait(on->offloader, 0, &on->error));
    future = rig_start(on, true);
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    assert_ok(refit_future_wait_group(future, 1, 0, &on->error));
    assert_ok(refit_future_wait(future, 0, &on->error));
    refit_future_close(future);
    rig_restore(on);
    rig_check_bytes(on, true);
    assert_ok(trim(on));
    rig_offload(on); /* and closed while away */
}

SCENE(pageable_copies_are_counted_while_they_exist, .settings = pageable)
{
    assert_int_equal(rig_stats(on).host_bytes, 0);
    rig_offload(on);
    refit_stats stats = rig_stats(on);
    assert_int_equal(stats.host_bytes, rig_kept_bytes(on));
    assert_int_equal(stats.host_pageable_bytes, rig_kept_bytes(on));
    assert_int_equal(stats.host_pinned_bytes, 0);
    assert_int_equal(stats.offload_copies_per_cycle, RIG_REGIONS - 2);
    assert_int_equal(stats.offload_bytes_last, rig_kept_bytes(on));
    rig_restore(on);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_int_equal(rig_stats(on).restore_bytes_last, rig_kept_bytes(on));
}

/* A malloc that fails on order: the linker puts it in front of the real one (CMakeLists.txt). */
static uint64_t failing_bytes;

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    if (bytes != 0 && bytes == failing_bytes) return NULL;
    return __real_malloc(bytes);
}

SCENE(a_pageable_copy_that_finds_no_memory_changes_nothing, .memory = RIG_HOOKS,
      .settings = pageable)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        if (on->regions[at].policy != REFIT_KEEP || on->regions[at].bytes == 1) continue;
        failing_bytes = on->regions[at].bytes;
        refit_status status = offload(on);
        failing_bytes = 0;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        assert_says(&on->error, "state.");
        assert_int_equal(rig_state(on), REFIT_RESIDENT);
        assert_int_equal(rig_stats(on).host_bytes, 0);
        assert_int_equal(rig_region_info(on, 0).place, REFIT_ON_DEVICE);
        rig_check_bytes(on, false);
        rig_cycle(on);
        rig_fill(on);
    }
}

int main(void)
{
    return test_run("cycle");
}
