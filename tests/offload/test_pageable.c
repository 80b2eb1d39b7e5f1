/* use_pinned_optimizer_offload: false: the same states, a fresh copy a tensor, freed afterwards. */
#include "tests/offload/rig.h"

#include <stdlib.h>
#include <string.h>

static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};

static void it_goes_through_the_same_states(void **state)
{
    (void)state;
    rig on;
    refit_future *future;
    rig_open(&on, RIG_HOOKS, pageable);
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_int_equal(refit_future_done(future), 1);
    assert_int_equal(rig_state(&on), REFIT_OFFLOADED);
    assert_int_equal(on.releases, 0);
    assert_ok(refit_offloader_finish(on.offloader, 0, &on.error));
    assert_int_equal(on.releases, RIG_REGIONS);
    refit_future_close(future);
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    assert_ok(refit_future_wait_group(future, 1, 0, &on.error));
    assert_ok(refit_future_wait(future, 0, &on.error));
    refit_future_close(future);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void copies_are_counted_while_they_exist(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, pageable);
    assert_int_equal(rig_stats(&on).host_bytes, 0);
    rig_offload(&on);
    refit_stats stats = rig_stats(&on);
    assert_int_equal(stats.host_bytes, rig_kept_bytes(&on));
    assert_int_equal(stats.host_pageable_bytes, rig_kept_bytes(&on));
    assert_int_equal(stats.host_pinned_bytes, 0);
    assert_int_equal(stats.offload_copies_per_cycle, RIG_REGIONS - 2);
    assert_int_equal(stats.offload_bytes_last, rig_kept_bytes(&on));
    rig_restore(&on);
    assert_int_equal(rig_stats(&on).host_bytes, 0);
    assert_int_equal(rig_stats(&on).restore_bytes_last, rig_kept_bytes(&on));
    rig_close(&on);
}

static void it_waits_for_the_callers_stream(void **state)
{
    (void)state;
    rig on;
    refit_stream_ref stream;
    rig_open(&on, RIG_BOUND, pageable);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    unsigned char *late = test_host_alloc(on.plain, on.regions[8].bytes);
    memset(late, 0x3C, on.regions[8].bytes);
    assert_ok(refit_stream_copy(on.device, stream, on.regions[8].memory, late, on.regions[8].bytes,
                                &on.error));
    assert_ok(refit_offloader_offload(on.offloader, stream, NULL, &on.error));
    test_fill(on.plain, on.regions[8].memory, 0, on.regions[8].bytes);
    memcpy(on.regions[8].expected, late, on.regions[8].bytes);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    test_host_free(on.plain, late, on.regions[8].bytes);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    rig_close(&on);
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

static void a_copy_that_finds_no_memory_changes_nothing(void **state)
{
    (void)state;
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        rig on;
        rig_open(&on, RIG_HOOKS, pageable);
        if (on.regions[at].policy == REFIT_KEEP && on.regions[at].bytes > 1) {
            failing_bytes = on.regions[at].bytes;
            refit_status status =
                refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error);
            failing_bytes = 0;
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
            assert_non_null(strstr(on.error.text, "state."));
            assert_int_equal(rig_state(&on), REFIT_RESIDENT);
            assert_int_equal(rig_stats(&on).host_bytes, 0);
            assert_int_equal(rig_region_info(&on, 0).place, REFIT_ON_DEVICE);
            rig_check_bytes(&on, false);
        }
        rig_offload(&on);
        rig_restore(&on);
        rig_check_bytes(&on, true);
        rig_close(&on);
    }
}

static void offload_and_restore_are_idempotent(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_ARENA, pageable);
    rig_offload(&on);
    rig_offload(&on);
    rig_restore(&on);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    assert_ok(refit_offloader_trim(on.offloader, &on.error));
    rig_close(&on);
}

static void closing_while_away_frees_the_copies(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_HOOKS, pageable);
    rig_offload(&on);
    rig_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_goes_through_the_same_states),
        cmocka_unit_test(copies_are_counted_while_they_exist),
        cmocka_unit_test(it_waits_for_the_callers_stream),
        cmocka_unit_test(a_copy_that_finds_no_memory_changes_nothing),
        cmocka_unit_test(offload_and_restore_are_idempotent),
        cmocka_unit_test(closing_while_away_frees_the_copies),
    };
    return cmocka_run_group_tests_name("pageable", tests, NULL, NULL);
}
