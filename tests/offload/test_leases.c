/* Leases: bytes under a lease are neither overwritten nor freed until the lease is released. */
#include "tests/offload/rig.h"

#include "base/thread.h"

static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};

static void check_image(rig *on, const refit_lease *lease)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        const void *bytes;
        uint64_t count;
        refit_status status = refit_lease_read(lease, at, &bytes, &count, &on->error);
        if (on->regions[at].policy != REFIT_KEEP) {
            assert_int_equal(status, REFIT_ERR_NOT_FOUND);
            continue;
        }
        assert_int_equal(status, REFIT_OK);
        assert_int_equal(count, on->regions[at].bytes);
        assert_memory_equal(bytes, on->regions[at].expected, count);
    }
}

static void a_lease_outlives_the_restore(const char *const *settings)
{
    rig on;
    refit_lease *first;
    refit_lease *second;
    rig_open(&on, RIG_HOOKS, settings);
    rig_offload(&on);
    assert_ok(refit_lease_acquire(on.offloader, &first, &on.error));
    assert_ok(refit_lease_acquire(on.offloader, &second, &on.error));
    assert_int_equal(rig_stats(&on).leases, 2);
    check_image(&on, first);
    rig_restore(&on);
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        test_fill(on.plain, on.regions[at].memory, 0xFF, on.regions[at].bytes);
    }
    check_image(&on, first);
    refit_lease_release(first);
    check_image(&on, second);
    assert_int_equal(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_unseal(on.offloader, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_trim(on.offloader, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_BUSY);
    check_image(&on, second);
    refit_lease_release(second);
    assert_int_equal(rig_stats(&on).leases, 0);
    rig_offload(&on);
    rig_restore(&on);
    rig_close(&on);
}

static void leases_hold_the_image(void **state)
{
    (void)state;
    a_lease_outlives_the_restore(NULL);
    a_lease_outlives_the_restore(pageable);
}

static void pageable_copies_are_freed_with_the_last_lease(void **state)
{
    (void)state;
    rig on;
    refit_lease *lease;
    rig_open(&on, RIG_BOUND, pageable);
    rig_offload(&on);
    assert_int_equal(rig_stats(&on).host_bytes, rig_kept_bytes(&on));
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    rig_restore(&on);
    assert_int_equal(rig_stats(&on).host_pageable_bytes, rig_kept_bytes(&on));
    refit_lease_release(lease);
    assert_int_equal(rig_stats(&on).host_pageable_bytes, 0);
    rig_close(&on);
}

static void a_lease_begins_only_with_a_whole_image(void **state)
{
    (void)state;
    rig on;
    refit_lease *lease = NULL;
    rig_open_unsealed(&on, RIG_BOUND, NULL);
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_STATE);
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_STATE);
    faulty_device_stop(on.device);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_STATE);
    assert_null(lease);
    faulty_device_go(on.device);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    faulty_device_stop(on.device);
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    check_image(&on, lease);
    faulty_device_go(on.device);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    check_image(&on, lease);
    refit_lease_release(lease);
    rig_close(&on);
}

static void *read_for_a_while(void *user)
{
    rig *on = user;
    for (int round = 0; round < 2000; round++) {
        refit_lease *lease;
        if (refit_lease_acquire(on->offloader, &lease, NULL) != REFIT_OK) continue;
        const void *bytes;
        uint64_t count;
        bool read = refit_lease_read(lease, 0, &bytes, &count, NULL) == REFIT_OK;
        bool right = read && *(const unsigned char *)bytes == on->regions[0].expected[0];
        refit_lease_release(lease);
        if (!right) return on;
    }
    return NULL;
}

static void other_threads_lease_while_states_move(void **state)
{
    (void)state;
    rig on;
    rft_thread thread;
    void *wrong;
    rig_open(&on, RIG_ARENA, NULL);
    assert_ok(rft_thread_start(&thread, "reader", read_for_a_while, &on, &on.error));
    for (int round = 0; round < 20; round++) {
        refit_status status =
            refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error);
        assert_true(status == REFIT_OK || status == REFIT_ERR_BUSY);
        assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
        rig_restore(&on);
    }
    assert_int_equal(pthread_join(thread, &wrong), 0);
    assert_null(wrong);
    rig_check_kept(&on);
    rig_close(&on);
}

static void arguments_are_checked(void **state)
{
    (void)state;
    rig on;
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    rig_open(&on, RIG_BOUND, NULL);
    rig_offload(&on);
    assert_int_equal(refit_lease_acquire(NULL, &lease, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_lease_acquire(on.offloader, NULL, &on.error), REFIT_ERR_INVALID);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_int_equal(refit_lease_read(lease, RIG_REGIONS, &bytes, &count, &on.error),
                     REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_lease_read(lease, 0, NULL, &count, &on.error), REFIT_ERR_INVALID);
    refit_lease_release(NULL);
    refit_lease_release(lease);
    rig_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leases_hold_the_image),
        cmocka_unit_test(pageable_copies_are_freed_with_the_last_lease),
        cmocka_unit_test(a_lease_begins_only_with_a_whole_image),
        cmocka_unit_test(other_threads_lease_while_states_move),
        cmocka_unit_test(arguments_are_checked),
    };
    return cmocka_run_group_tests_name("leases", tests, NULL, NULL);
}
