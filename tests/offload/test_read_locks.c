/* Read locks: bytes under a read lock are neither overwritten nor freed until the read lock is
 * released. */
#include "tests/offload/rig.h"

#include "base/thread.h"

static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};

static refit_read_lock *acquire(rig *on)
{
    refit_read_lock *taken;
    assert_ok(refit_read_lock_acquire(on->offloader, &taken, &on->error));
    return taken;
}

static void check_image(rig *on, const refit_read_lock *held)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        const void *bytes;
        uint64_t count;
        bool kept = on->regions[at].policy == REFIT_KEEP;
        assert_int_equal(refit_read_lock_read(held, at, &bytes, &count, &on->error),
                         kept ? REFIT_OK : REFIT_ERR_NOT_FOUND);
        if (!kept) continue;
        assert_int_equal(count, on->regions[at].bytes);
        assert_memory_equal(bytes, on->regions[at].expected, count);
    }
}

/* Pageable copies are freed with the last read lock. */
SCENE(read_locks_hold_the_image, .memory = RIG_HOOKS)
{
    bool is_pageable = !on->config.use_pinned_optimizer_offload;
    rig_offload(on);
    uint64_t host_bytes = rig_stats(on).host_bytes;
    refit_read_lock *first = acquire(on), *second = acquire(on);
    assert_int_equal(rig_stats(on).read_locks, 2);
    check_image(on, first);
    rig_restore(on);
    for (uint32_t at = 0; at < RIG_REGIONS; at++)
        test_fill(on->plain, on->regions[at].memory, 0xFF, on->regions[at].bytes);
    check_image(on, first);
    refit_read_lock_release(first);
    check_image(on, second);
    assert_int_equal(offload(on), REFIT_ERR_BUSY);
    assert_int_equal(unseal(on), REFIT_ERR_BUSY);
    assert_int_equal(trim(on), REFIT_ERR_BUSY);
    assert_int_equal(refit_offloader_close(on->offloader, &on->error), REFIT_ERR_BUSY);
    check_image(on, second);
    assert_int_equal(rig_stats(on).host_bytes, host_bytes);
    refit_read_lock_release(second);
    assert_int_equal(rig_stats(on).host_bytes, is_pageable ? 0 : host_bytes);
    assert_int_equal(rig_stats(on).read_locks, 0);
    rig_offload(on);
    rig_restore(on);
}
SCENE_AGAIN(read_locks_hold_the_image, pageable, .memory = RIG_HOOKS, .settings = pageable)

SCENE(a_read_lock_begins_only_with_a_whole_image, .unsealed = true)
{
    assert_int_equal(try_read_lock(on), REFIT_ERR_STATE);
    assert_ok(seal(on));
    assert_int_equal(try_read_lock(on), REFIT_ERR_STATE);
    faulty_device_stop(on->device);
    assert_ok(offload(on));
    assert_int_equal(try_read_lock(on), REFIT_ERR_STATE);
    faulty_device_go(on->device);
    assert_ok(finish(on));
    faulty_device_stop(on->device);
    assert_ok(restore(on));
    refit_read_lock *held = acquire(on);
    check_image(on, held);
    faulty_device_go(on->device);
    assert_ok(finish(on));
    check_image(on, held);
    refit_read_lock_release(held);
}

static void *read_for_a_while(void *user)
{
    rig *on = user;
    for (int round = 0; round < 2000; round++) {
        refit_read_lock *taken;
        if (refit_read_lock_acquire(on->offloader, &taken, NULL) != REFIT_OK) continue;
        const void *bytes;
        uint64_t count;
        bool read = refit_read_lock_read(taken, 0, &bytes, &count, NULL) == REFIT_OK;
        bool right = read && *(const unsigned char *)bytes == on->regions[0].expected[0];
        refit_read_lock_release(taken);
        if (!right) return on;
    }
    return NULL;
}

SCENE(other_threads_read_lock_while_states_move, .memory = RIG_ARENA)
{
    rft_thread thread;
    void *wrong;
    assert_ok(rft_thread_start(&thread, "reader", read_for_a_while, on, &on->error));
    for (int round = 0; round < 20; round++) {
        refit_status status = offload(on);
        assert_true(status == REFIT_OK || status == REFIT_ERR_BUSY);
        assert_ok(finish(on));
        rig_restore(on);
    }
    assert_int_equal(pthread_join(thread, &wrong), 0);
    assert_null(wrong);
    rig_check_kept(on);
}

SCENE(arguments_are_checked, 0)
{
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    rig_offload(on);
    assert_invalid(refit_read_lock_acquire(NULL, &held, &on->error));
    assert_invalid(refit_read_lock_acquire(on->offloader, NULL, &on->error));
    held = acquire(on);
    assert_int_equal(refit_read_lock_read(held, RIG_REGIONS, &bytes, &count, &on->error),
                     REFIT_ERR_NOT_FOUND);
    assert_invalid(refit_read_lock_read(held, 0, NULL, &count, &on->error));
    refit_read_lock_release(NULL);
    refit_read_lock_release(held);
}

int main(void)
{
    return test_run("read locks");
}
