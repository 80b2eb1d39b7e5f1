/* offload.verify: bytes that changed on their way or in the host image are found and named. */
#include "tests/offload/rig.h"

#include <string.h>

#include "offload/offloader.h"

static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const verified_pageable[] = {"offload.verify=true",
                                                "use_pinned_optimizer_offload=false", NULL};

/* Reaches into the host image through a lease, as a stray write would. */
static unsigned char *reach_image(rig *on, refit_region_id region)
{
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_lease_acquire(on->offloader, &lease, &on->error));
    assert_ok(refit_lease_read(lease, region, &bytes, &count, &on->error));
    refit_lease_release(lease);
    return (unsigned char *)(uintptr_t)bytes;
}

static void a_changed_image_is_found(const char *const *settings)
{
    rig on;
    rig_open(&on, RIG_HOOKS, settings);
    rig_offload(&on);
    unsigned char *image = reach_image(&on, 3);
    image[70000] ^= 1;
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error),
                     REFIT_ERR_CORRUPT);
    assert_non_null(strstr(on.error.text, "state.3"));
    assert_int_equal(rig_state(&on), REFIT_FAILED);
    assert_int_equal(rig_region_info(&on, 3).place, REFIT_ON_HOST);
    assert_int_equal(rig_region_info(&on, 2).place, REFIT_ON_DEVICE);
    image[70000] ^= 1;
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void host_memory_that_changed_is_found(void **state)
{
    (void)state;
    a_changed_image_is_found(verified);
    a_changed_image_is_found(verified_pageable);
}

static void a_wait_for_a_group_finds_what_changed_in_it(void **state)
{
    (void)state;
    rig on;
    refit_future *future;
    refit_stream_ref stream;
    rig_open(&on, RIG_HOOKS, verified);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    rig_offload(&on);
    unsigned char *image = reach_image(&on, 3);
    image[0] ^= 0x80;
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_ok(refit_future_wait_group(future, 0, PATIENCE_MS, &on.error));
    assert_ok(refit_future_join_group(future, 1, stream, &on.error));
    assert_int_equal(refit_future_wait_group(future, 3, PATIENCE_MS, &on.error), REFIT_ERR_CORRUPT);
    assert_int_equal(refit_future_join(future, stream, &on.error), REFIT_ERR_CORRUPT);
    assert_ok(refit_future_wait_group(future, 0, 0, &on.error));
    refit_future_close(future);
    image[0] ^= 0x80;
    rig_restore(&on);
    rig_check_bytes(&on, true);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    rig_close(&on);
}

static void only_a_call_that_waits_sees_the_end(void **state)
{
    (void)state;
    rig on;
    refit_future *future;
    rig_open(&on, RIG_BOUND, verified);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_int_equal(rig_state(&on), REFIT_OFFLOADING);
    assert_int_equal(refit_future_done(future), 0);
    assert_int_equal(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_STATE);
    assert_ok(refit_future_wait(future, PATIENCE_MS, &on.error));
    assert_int_equal(rig_state(&on), REFIT_OFFLOADED);
    assert_int_equal(refit_future_done(future), 1);
    refit_future_close(future);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

/* Waits for the copies and takes no digests. */
static void wait_for_copies(rig *on)
{
    assert_ok(rft_mover_wait(on->offloader->operation.mover, PATIENCE_MS, &on->error));
}

/* One byte on the device, as a copy that went wrong would leave it. */
static void flip(rig *on, uint32_t region, uint64_t at)
{
    unsigned char byte;
    unsigned char *place = (unsigned char *)on->regions[region].memory + at;
    test_read(on->plain, &byte, place, 1);
    byte ^= 0x10;
    test_write(on->plain, place, &byte, 1);
}

static void a_copy_that_went_wrong_on_the_offload_is_found(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, verified);
    assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    wait_for_copies(&on);
    flip(&on, 3, 70000);
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error),
                     REFIT_ERR_CORRUPT);
    assert_non_null(strstr(on.error.text, "state.3"));
    assert_int_equal(rig_state(&on), REFIT_FAILED);
    assert_int_equal(rig_region_info(&on, 3).place, REFIT_ON_DEVICE);
    flip(&on, 3, 70000);
    rig_offload(&on);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void a_copy_that_went_wrong_on_the_restore_is_found(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, verified);
    rig_offload(&on);
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    wait_for_copies(&on);
    flip(&on, 3, 0);
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error),
                     REFIT_ERR_CORRUPT);
    assert_non_null(strstr(on.error.text, "state.3"));
    assert_int_equal(rig_region_info(&on, 3).place, REFIT_ON_HOST);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

/* Where the CPU cannot read the device, the device itself has to. */
static void a_digest_that_cannot_be_taken_is_told_as_what_it_is(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, verified);
    if (!on.offloader->caps.host_addressable) {
        faulty_device_fail(on.device, FAULTY_DIGEST, 2, REFIT_ERR_LIMIT);
        assert_ok(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error),
                         REFIT_ERR_LIMIT);
        assert_int_equal(rig_state(&on), REFIT_FAILED);
        rig_offload(&on);
        faulty_device_fail(on.device, FAULTY_DIGEST, 1, REFIT_ERR_TIMEOUT);
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
        assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error),
                         REFIT_ERR_DEVICE);
        assert_non_null(strstr(on.error.text, "could not be verified"));
        rig_restore(&on);
        rig_check_bytes(&on, true);
    }
    rig_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_memory_that_changed_is_found),
        cmocka_unit_test(a_wait_for_a_group_finds_what_changed_in_it),
        cmocka_unit_test(only_a_call_that_waits_sees_the_end),
        cmocka_unit_test(a_copy_that_went_wrong_on_the_offload_is_found),
        cmocka_unit_test(a_copy_that_went_wrong_on_the_restore_is_found),
        cmocka_unit_test(a_digest_that_cannot_be_taken_is_told_as_what_it_is),
    };
    return cmocka_run_group_tests_name("verify", tests, NULL, NULL);
}
