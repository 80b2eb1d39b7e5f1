/* The cycle: bytes leave and return bit for bit, memory is really given back, nothing is allocated.
 */
#include "tests/offload/rig.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};
static const char *const verified[] = {"offload.verify=true", NULL};

static void cycle_three_times(rig_memory memory, const char *const *settings)
{
    rig on;
    rig_open(&on, memory, settings);
    for (int round = 0; round < 3; round++) {
        rig_fill(&on);
        rig_offload(&on);
        if (memory == RIG_BOUND) {
            for (uint32_t at = 0; at < RIG_REGIONS; at++) {
                test_fill(on.plain, on.regions[at].memory, 0xCC, on.regions[at].bytes);
            }
        }
        rig_restore(&on);
        rig_check_bytes(&on, true);
    }
    rig_close(&on);
}

static void bytes_return_exactly(void **state)
{
    (void)state;
    const char *const *const settings[] = {NULL, pageable, verified};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        cycle_three_times(RIG_BOUND, settings[i]);
        cycle_three_times(RIG_HOOKS, settings[i]);
        cycle_three_times(RIG_ARENA, settings[i]);
    }
}

static void memory_is_given_back_while_away(rig_memory memory)
{
    rig on;
    rig_open(&on, memory, NULL);
    uint64_t before = rig_device_used(&on);
    assert_true(before >= rig_all_bytes(&on));
    rig_offload(&on);
    assert_int_equal(rig_device_used(&on), 0);
    uint64_t expected = memory == RIG_ARENA ? before : rig_all_bytes(&on);
    assert_int_equal(rig_stats(&on).offload_reclaimed_bytes_last, expected);
    rig_restore(&on);
    assert_int_equal(rig_device_used(&on), before);
    rig_close(&on);
}

static void device_memory_is_given_back(void **state)
{
    (void)state;
    memory_is_given_back_while_away(RIG_HOOKS);
    memory_is_given_back_while_away(RIG_ARENA);
}

static void arena_addresses_never_change(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_ARENA, NULL);
    rig_offload(&on);
    assert_null(rig_region_info(&on, 3).memory);
    rig_restore(&on);
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        assert_ptr_equal(rig_region_info(&on, at).memory, on.regions[at].memory);
    }
    rig_close(&on);
}

static void memory_comes_back_only_in_finish(void **state)
{
    (void)state;
    rig on;
    refit_future *future;
    rig_open(&on, RIG_ARENA, NULL);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_ok(refit_future_wait(future, PATIENCE_MS, &on.error));
    refit_future_close(future);
    assert_int_equal(rig_state(&on), REFIT_OFFLOADED);
    assert_true(rig_device_used(&on) > 0);
    assert_ok(refit_offloader_finish(on.offloader, 0, &on.error));
    assert_int_equal(rig_device_used(&on), 0);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void caller_frees_and_binds_again(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    rig_offload(&on);
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        assert_ok(refit_memory_free(on.device, on.regions[at].memory, &on.error));
        assert_ok(refit_offloader_unbind(on.offloader, at, &on.error));
        assert_ok(refit_offloader_unbind(on.offloader, at, &on.error));
    }
    assert_int_equal(rig_stats(&on).offload_reclaimed_bytes_last, rig_all_bytes(&on));
    for (uint32_t at = RIG_REGIONS; at-- > 0;) {
        void *memory;
        assert_ok(refit_memory_alloc(on.device, on.regions[at].bytes, &memory, &on.error));
        on.regions[at].memory = memory;
        assert_ok(refit_offloader_bind(on.offloader, at, memory, &on.error));
    }
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void many_are_bound_in_one_call(void **state)
{
    (void)state;
    rig on;
    refit_region_id ids[RIG_REGIONS];
    void *memory[RIG_REGIONS];
    rig_open(&on, RIG_BOUND, NULL);
    rig_offload(&on);
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        assert_ok(refit_memory_free(on.device, on.regions[at].memory, &on.error));
        ids[at] = at;
    }
    assert_ok(refit_offloader_unbind_each(on.offloader, ids, RIG_REGIONS, &on.error));
    assert_ok(refit_offloader_unbind_each(on.offloader, ids, RIG_REGIONS, &on.error));
    assert_int_equal(rig_stats(&on).offload_reclaimed_bytes_last, rig_all_bytes(&on));
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        assert_ok(refit_memory_alloc(on.device, on.regions[at].bytes, &memory[at], &on.error));
        on.regions[at].memory = memory[at];
    }
    assert_ok(refit_offloader_bind_each(on.offloader, ids, memory, RIG_REGIONS, &on.error));
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void many_stop_at_the_first_that_cannot(void **state)
{
    (void)state;
    rig on;
    refit_region_info info = {.size = sizeof info};
    rig_open(&on, RIG_BOUND, NULL);
    const refit_region_id ids[] = {0, RIG_REGIONS, 1};
    void *const memory[] = {on.regions[0].memory, on.regions[1].memory, on.regions[1].memory};
    assert_int_equal(refit_offloader_unbind_each(on.offloader, ids, 3, &on.error), REFIT_ERR_STATE);
    assert_int_equal(refit_offloader_unbind_each(on.offloader, NULL, 1, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_offloader_bind_each(on.offloader, ids, NULL, 1, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_offloader_unbind_each(NULL, ids, 1, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_offloader_bind_each(NULL, ids, memory, 1, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_offloader_unbind_each(on.offloader, NULL, 0, &on.error));
    assert_ok(refit_offloader_bind_each(on.offloader, NULL, NULL, 0, &on.error));
    rig_offload(&on);
    assert_int_equal(refit_offloader_unbind_each(on.offloader, ids, 3, &on.error),
                     REFIT_ERR_NOT_FOUND);
    assert_ok(refit_offloader_region(on.offloader, 0, &info, &on.error));
    assert_int_equal(info.bound, 0);
    assert_ok(refit_offloader_region(on.offloader, 1, &info, &on.error));
    assert_int_equal(info.bound, 1);
    assert_int_equal(refit_offloader_bind_each(on.offloader, ids, memory, 3, &on.error),
                     REFIT_ERR_NOT_FOUND);
    assert_ok(refit_offloader_region(on.offloader, 0, &info, &on.error));
    assert_int_equal(info.bound, 1);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void restore_without_release_is_harmless(void **state)
{
    (void)state;
    rig on;
    refit_future *future;
    rig_open(&on, RIG_HOOKS, NULL);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_ok(refit_future_wait(future, PATIENCE_MS, &on.error));
    refit_future_close(future);
    rig_restore(&on);
    assert_int_equal(on.releases, 0);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void copies_wait_for_the_callers_stream(void **state)
{
    (void)state;
    rig on;
    refit_stream_ref stream;
    rig_open(&on, RIG_BOUND, NULL);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    unsigned char *late = test_host_alloc(on.plain, on.regions[3].bytes);
    memset(late, 0x77, on.regions[3].bytes);
    faulty_device_stop(on.device);
    assert_ok(refit_stream_copy(on.device, stream, on.regions[3].memory, late, on.regions[3].bytes,
                                &on.error));
    assert_ok(refit_offloader_offload(on.offloader, stream, NULL, &on.error));
    assert_int_equal(rig_state(&on), REFIT_OFFLOADING);
    assert_int_equal(refit_offloader_finish(on.offloader, 0, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    rig_restore(&on);
    memcpy(on.regions[3].expected, late, on.regions[3].bytes);
    rig_check_bytes(&on, true);
    test_host_free(on.plain, late, on.regions[3].bytes);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    rig_close(&on);
}

static void warm_cycles_allocate_nothing(const char *const *settings)
{
    rig on;
    refit_future *future;
    rig_open(&on, RIG_ARENA, settings);
    rig_offload(&on);
    rig_restore(&on);
    uint64_t before = rft_alloc_count();
    for (int round = 0; round < 5; round++) {
        assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
        assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
        refit_future_close(future);
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
        assert_ok(refit_future_wait_group(future, 1, PATIENCE_MS, &on.error));
        assert_ok(refit_future_wait(future, PATIENCE_MS, &on.error));
        refit_future_close(future);
    }
    assert_int_equal(rft_alloc_count(), before);
    rig_close(&on);
}

static void nothing_is_allocated(void **state)
{
    (void)state;
    warm_cycles_allocate_nothing(NULL);
    warm_cycles_allocate_nothing(verified);
}

static void host_bytes_exceed_the_payload_by_less_than_a_percent(void **state)
{
    (void)state;
    enum { COUNT = 60 };
    refit_device *device;
    refit_offloader *offloader;
    refit_error error;
    void *memory[COUNT];
    assert_ok(test_device_open("host", &device, &error));
    assert_ok(refit_offloader_open(device, NULL, &offloader, &error));
    for (uint32_t i = 0; i < COUNT; i++) {
        char name[8] = {(char)('A' + i / 10), (char)('0' + i % 10), '\0'};
        uint64_t bytes = 512 + (uint64_t)i * i * 131;
        refit_region_id id;
        assert_ok(refit_memory_alloc(device, bytes, &memory[i], &error));
        refit_region_desc desc = {
            .size = sizeof desc, .name = name, .memory = memory[i], .bytes = bytes};
        assert_ok(refit_offloader_add(offloader, &desc, &id, &error));
    }
    assert_ok(refit_offloader_seal(offloader, &error));
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(offloader, &stats, &error));
    assert_true(stats.host_bytes >= stats.host_payload_bytes);
    assert_true(stats.host_bytes - stats.host_payload_bytes < stats.host_payload_bytes / 100);
    assert_int_equal(stats.host_bytes, stats.host_pinned_bytes + stats.host_pageable_bytes);
    assert_ok(refit_offloader_close(offloader, &error));
    for (uint32_t i = 0; i < COUNT; i++) {
        assert_ok(refit_memory_free(device, memory[i], &error));
    }
    assert_ok(refit_device_close(device, &error));
}

static double exposed(rig *on, int direction)
{
    refit_stats stats = rig_stats(on);
    return direction == 0 ? stats.offload_exposed_seconds_last : stats.restore_exposed_seconds_last;
}

static void figures_add_up(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_HOOKS, NULL);
    rig_offload(&on);
    assert_true(rig_stats(&on).offload_copies_per_cycle >= RIG_REGIONS - 2);
    rig_restore(&on);
    rig_offload(&on);
    refit_stats stats = rig_stats(&on);
    assert_int_equal(stats.offload_regions, RIG_REGIONS);
    assert_int_equal(stats.offload_count, 2);
    assert_int_equal(stats.restore_count, 1);
    assert_int_equal(stats.offload_failures, 0);
    assert_int_equal(stats.host_payload_bytes, rig_kept_bytes(&on));
    assert_int_equal(stats.offload_bytes_last, rig_kept_bytes(&on));
    assert_int_equal(stats.offload_bytes_total, 2 * rig_kept_bytes(&on));
    assert_int_equal(stats.restore_bytes_total, stats.restore_bytes_last);
    assert_true(stats.offload_seconds_last > 0);
    assert_true(stats.offload_exposed_seconds_last > 0);
    assert_true(stats.restore_seconds_last > 0);
    assert_true(stats.restore_exposed_seconds_last > 0);
    rig_restore(&on);
    rig_close(&on);
}

/* What a caller waits for is counted at once, also where the wait ended too early; between calls
 * nothing is. */
static void time_spent_waiting_is_exposed(void **state)
{
    (void)state;
    for (int direction = 0; direction < 2; direction++) {
        rig on;
        refit_future *future;
        rig_open(&on, RIG_HOOKS, NULL);
        if (direction == 1) rig_offload(&on);
        faulty_device_stop(on.device);
        assert_ok(
            direction == 0
                ? refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error)
                : refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
        double last = exposed(&on, direction);
        assert_int_equal(refit_future_wait(future, 30, &on.error), REFIT_ERR_TIMEOUT);
        assert_true(exposed(&on, direction) >= last + 0.029);
        last = exposed(&on, direction);
        assert_int_equal(refit_future_wait_group(future, 2, 30, &on.error), REFIT_ERR_TIMEOUT);
        assert_true(exposed(&on, direction) >= last + 0.029);
        last = exposed(&on, direction);
        faulty_device_go(on.device);
        while (refit_future_done(future) == 0) {
            sched_yield();
        }
        assert_true(exposed(&on, direction) == last);
        refit_future_close(future);
        if (direction == 0) rig_restore(&on);
        rig_close(&on);
    }
}

static void figures_fill_a_shorter_struct_of_an_older_caller(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    refit_stats stats;
    memset(&stats, 0xAB, sizeof stats);
    stats.size = offsetof(refit_stats, offload_count);
    assert_ok(refit_offloader_stats(on.offloader, &stats, &on.error));
    assert_int_equal(stats.offload_regions, RIG_REGIONS);
    assert_int_equal(stats.offload_count, UINT64_C(0xABABABABABABABAB));
    stats.size = 0;
    assert_int_equal(refit_offloader_stats(on.offloader, &stats, &on.error), REFIT_ERR_INVALID);
    rig_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_return_exactly),
        cmocka_unit_test(device_memory_is_given_back),
        cmocka_unit_test(arena_addresses_never_change),
        cmocka_unit_test(memory_comes_back_only_in_finish),
        cmocka_unit_test(caller_frees_and_binds_again),
        cmocka_unit_test(many_are_bound_in_one_call),
        cmocka_unit_test(many_stop_at_the_first_that_cannot),
        cmocka_unit_test(restore_without_release_is_harmless),
        cmocka_unit_test(copies_wait_for_the_callers_stream),
        cmocka_unit_test(nothing_is_allocated),
        cmocka_unit_test(host_bytes_exceed_the_payload_by_less_than_a_percent),
        cmocka_unit_test(figures_add_up),
        cmocka_unit_test(time_spent_waiting_is_exposed),
        cmocka_unit_test(figures_fill_a_shorter_struct_of_an_older_caller),
    };
    return cmocka_run_group_tests_name("cycle", tests, NULL, NULL);
}
