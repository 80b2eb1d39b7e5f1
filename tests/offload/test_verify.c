/* offload.verify: bytes that changed on their way or in the host image are found and named. */
#include "tests/offload/rig.h"

#include "offload/offloader.h"

static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const pageable[] = {"offload.verify=true", "use_pinned_optimizer_offload=false",
                                       NULL};

/* Reaches into the host image through a read lock, as a stray write would. */
static unsigned char *reach_image(rig *on, refit_region_id region)
{
    refit_read_lock *held;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    assert_ok(refit_read_lock_read(held, region, &bytes, &count, &on->error));
    refit_read_lock_release(held);
    return (unsigned char *)(uintptr_t)bytes;
}

/* State 3 has changed, and is where it was before. */
static void finish_corrupt(rig *on, refit_place place)
{
    assert_int_equal(finish(on), REFIT_ERR_CORRUPT);
    assert_says(&on->error, "state.3");
    assert_int_equal(rig_state(on), REFIT_FAILED);
    assert_int_equal(rig_region_info(on, 3).place, place);
}

SCENE(host_memory_that_changed_is_found, .memory = RIG_HOOKS, .settings = verified)
{
    rig_offload(on);
    unsigned char *image = reach_image(on, 3);
    image[70000] ^= 1;
    assert_ok(restore(on));
    finish_corrupt(on, REFIT_ON_HOST);
    assert_int_equal(rig_region_info(on, 2).place, REFIT_ON_DEVICE);
    image[70000] ^= 1;
    rig_restore(on);
    rig_check_bytes(on, true);
}
SCENE_AGAIN(host_memory_that_changed_is_found, pageable, .memory = RIG_HOOKS, .settings = pageable)

SCENE(a_wait_for_a_group_finds_what_changed_in_it, .memory = RIG_HOOKS, .settings = verified)
{
    refit_stream_ref stream;
    assert_ok(refit_stream_open(on->device, &stream, &on->error));
    rig_offload(on);
    unsigned char *image = reach_image(on, 3);
    image[0] ^= 0x80;
    refit_future *future = rig_start(on, true);
    assert_ok(refit_future_wait_group(future, 0, TIMEOUT_MS, &on->error));
    assert_ok(refit_future_join_group(future, 1, stream, &on->error));
    assert_int_equal(refit_future_wait_group(future, 3, TIMEOUT_MS, &on->error), REFIT_ERR_CORRUPT);
    assert_int_equal(refit_future_join(future, stream, &on->error), REFIT_ERR_CORRUPT);
    assert_ok(refit_future_wait_group(future, 0, 0, &on->error));
    refit_future_close(future);
    image[0] ^= 0x80;
    rig_restore(on);
    rig_check_bytes(on, true);
    assert_ok(refit_stream_close(on->device, stream, &on->error));
}

SCENE(only_a_call_that_waits_sees_the_end, .settings = verified)
{
    refit_future *future = rig_start(on, false);
    assert_int_equal(rig_state(on), REFIT_OFFLOADING);
    assert_int_equal(refit_future_done(future), 0);
    assert_int_equal(restore(on), REFIT_ERR_STATE);
    assert_ok(refit_future_wait(future, TIMEOUT_MS, &on->error));
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    assert_int_equal(refit_future_done(future), 1);
    refit_future_close(future);
    rig_restore(on);
    rig_check_bytes(on, true);
}

SCENE(a_copy_that_went_wrong_is_found, .settings = verified)
{
    assert_ok(offload(on));
    rig_flip(on, 70000);
    finish_corrupt(on, REFIT_ON_DEVICE);
    rig_flip(on, 70000);
    rig_offload(on);
    assert_ok(restore(on));
    rig_flip(on, 0);
    finish_corrupt(on, REFIT_ON_HOST);
    rig_restore(on);
    rig_check_bytes(on, true);
}
SCENE_AGAIN(a_copy_that_went_wrong_is_found, all_kept, .settings = verified, .all_kept = true)

/* Only what is on the device may leave: the image has the other bytes. */
SCENE(states_leave_again_after_a_restore_that_was_refused, .settings = verified)
{
    for (int cycle = 0; cycle < 2; cycle++) {
        rig_offload(on);
        assert_ok(restore(on));
        rig_flip(on, 0);
        finish_corrupt(on, REFIT_ON_HOST);
        rig_offload(on);
        rig_restore(on);
        rig_check_bytes(on, true);
    }
}
SCENE_AGAIN(states_leave_again_after_a_restore_that_was_refused, all_kept, .settings = verified,
            .all_kept = true)

/* Where the CPU cannot read the device, the device itself has to. */
SCENE(a_digest_that_cannot_be_taken_is_told_as_what_it_is, .settings = verified)
{
    if (on->offloader->caps.host_addressable) skip();
    faulty_device_fail(on->device, FAULTY_DIGEST, 2, REFIT_ERR_LIMIT);
    assert_ok(offload(on));
    assert_int_equal(finish(on), REFIT_ERR_LIMIT);
    assert_int_equal(rig_state(on), REFIT_FAILED);
    rig_offload(on);
    faulty_device_fail(on->device, FAULTY_DIGEST, 1, REFIT_ERR_TIMEOUT);
    assert_ok(restore(on));
    assert_int_equal(finish(on), REFIT_ERR_DEVICE);
    assert_says(&on->error, "could not be verified");
    rig_restore(on);
    rig_check_bytes(on, true);
}

int main(void)
{
    return test_run("verify");
}
