/* Faults: each device call fails in turn; no byte is lost, and both verbs can be called again. */
#include "tests/offload/rig.h"

#include <string.h>

static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};

/* Out and back; the first failure ends it. Nothing is asserted about how it goes. */
static refit_status try_cycle(rig *on)
{
    refit_status status =
        refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
    if (status == REFIT_OK) status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
    if (status == REFIT_OK) {
        status = refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
    }
    if (status == REFIT_OK) status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
    return status;
}

/* An OFFLOADING or RESTORING that a wait could not see the end of: the next wait does. */
static void settle(rig *on)
{
    refit_offloader_state state = rig_state(on);
    if (state == REFIT_OFFLOADING || state == REFIT_RESTORING) {
        refit_status status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
        assert_true(status == REFIT_OK || rig_state(on) == REFIT_FAILED);
    }
}

/* A region that says its bytes are on the device has them there. */
static void check_places(rig *on)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        refit_region_info info = rig_region_info(on, at);
        if (info.place != REFIT_ON_DEVICE || info.policy != REFIT_KEEP) continue;
        assert_int_equal(info.bound, 1);
        assert_ptr_equal(info.memory, on->regions[at].memory);
        rig_check(on, at);
    }
}

/* After the failure: the states come home, and the next cycle is as if nothing had been. */
static void recover_by_restore(rig *on)
{
    check_places(on);
    if (rig_state(on) != REFIT_RESIDENT) rig_restore(on);
    rig_check_kept(on);
    rig_fill(on);
    rig_offload(on);
    rig_restore(on);
    rig_check_bytes(on, true);
}

/* Or they leave for good first. */
static void recover_by_offload(rig *on)
{
    check_places(on);
    rig_offload(on);
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        assert_int_equal(rig_region_info(on, at).place, REFIT_ON_HOST);
    }
    refit_lease *lease;
    assert_ok(refit_lease_acquire(on->offloader, &lease, &on->error));
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        const void *bytes;
        uint64_t count;
        if (on->regions[at].policy != REFIT_KEEP) continue;
        assert_ok(refit_lease_read(lease, at, &bytes, &count, &on->error));
        assert_memory_equal(bytes, on->regions[at].expected, count);
    }
    refit_lease_release(lease);
    rig_restore(on);
    rig_check_bytes(on, true);
}

typedef void (*order_fault)(rig *on, faulty_slot slot, uint32_t nth, refit_status status);

static void fail_at_once(rig *on, faulty_slot slot, uint32_t nth, refit_status status)
{
    faulty_device_fail(on->device, slot, nth, status);
}

static void fail_under_way(rig *on, faulty_slot slot, uint32_t nth, refit_status status)
{
    faulty_device_fail_later(on->device, slot, nth, status);
}

static uint32_t count_calls(rig_memory memory, const char *const *settings, faulty_slot slot)
{
    rig on;
    rig_open(&on, memory, settings);
    faulty_device_reset(on.device);
    assert_ok(try_cycle(&on));
    uint32_t calls = faulty_device_calls(on.device, slot);
    rig_close(&on);
    return calls;
}

/* Each call of one kind in a cycle fails in turn. */
typedef struct fault_case {
    const char *name;
    rig_memory memory;
    const char *const *settings;
    faulty_slot slot;
    order_fault order;
    refit_status fault;
} fault_case;

static const fault_case faults[] = {
    {"a copy is refused, memory bound", RIG_BOUND, NULL, FAULTY_COPY_BATCH, fail_at_once,
     REFIT_ERR_COPY},
    {"a copy is refused, with hooks", RIG_HOOKS, NULL, FAULTY_COPY_BATCH, fail_at_once,
     REFIT_ERR_COPY},
    {"a copy is refused, in an arena, verified", RIG_ARENA, verified, FAULTY_COPY_BATCH,
     fail_at_once, REFIT_ERR_COPY},
    {"a copy breaks, memory bound", RIG_BOUND, NULL, FAULTY_COPY_BATCH, fail_under_way,
     REFIT_ERR_COPY},
    {"a copy breaks, with hooks", RIG_HOOKS, NULL, FAULTY_COPY_BATCH, fail_under_way,
     REFIT_ERR_COPY},
    {"a copy breaks, in an arena", RIG_ARENA, NULL, FAULTY_COPY_BATCH, fail_under_way,
     REFIT_ERR_COPY},
    {"a copy breaks, in an arena, verified", RIG_ARENA, verified, FAULTY_COPY_BATCH, fail_under_way,
     REFIT_ERR_COPY},
    {"zeroing is refused", RIG_HOOKS, NULL, FAULTY_ZERO, fail_at_once, REFIT_ERR_COPY},
    {"zeroing breaks", RIG_HOOKS, NULL, FAULTY_ZERO, fail_under_way, REFIT_ERR_COPY},
    {"zeroing is refused, pageable", RIG_ARENA, pageable, FAULTY_ZERO, fail_at_once,
     REFIT_ERR_COPY},
    {"no device memory", RIG_ARENA, NULL, FAULTY_COMMIT, fail_at_once, REFIT_ERR_DEVICE_MEMORY},
    {"no device memory, pageable", RIG_ARENA, pageable, FAULTY_COMMIT, fail_at_once,
     REFIT_ERR_DEVICE_MEMORY},
    {"device memory is not given back", RIG_ARENA, NULL, FAULTY_DECOMMIT, fail_at_once,
     REFIT_ERR_DEVICE},
    {"no event is recorded", RIG_HOOKS, NULL, FAULTY_EVENT_RECORD, fail_at_once, REFIT_ERR_DEVICE},
    {"a wait for an event fails", RIG_HOOKS, NULL, FAULTY_EVENT_WAIT, fail_at_once,
     REFIT_ERR_DEVICE},
    {"a wait for an event fails, verified", RIG_ARENA, verified, FAULTY_EVENT_WAIT, fail_at_once,
     REFIT_ERR_DEVICE},
};
enum { FAULTS = sizeof faults / sizeof faults[0] };

static void recover(rig *on, bool by_offload)
{
    if (by_offload) {
        recover_by_offload(on);
    } else {
        recover_by_restore(on);
    }
}

static void fail_nth(const fault_case *it, uint32_t nth, bool by_offload)
{
    rig on;
    rig_open(&on, it->memory, it->settings);
    it->order(&on, it->slot, nth, it->fault);
    refit_status status = try_cycle(&on);
    if (it->slot != FAULTY_EVENT_WAIT) assert_int_equal(status, it->fault);
    if (status != REFIT_OK) assert_int_equal(on.error.status, status);
    faulty_device_reset(on.device);
    settle(&on);
    recover(&on, by_offload);
    rig_close(&on);
}

/* Recovers by a restore, then by an offload: no byte is lost. */
static void a_fault_loses_nothing(void **state)
{
    const fault_case *it = *state;
    uint32_t calls = count_calls(it->memory, it->settings, it->slot);
    assert_true(calls > 0);
    for (uint32_t nth = 1; nth <= calls; nth++) {
        fail_nth(it, nth, false);
        fail_nth(it, nth, true);
    }
}

static void hooks_that_fail_lose_nothing(bool release, const char *const *settings)
{
    for (uint32_t nth = 1; nth <= RIG_REGIONS; nth++) {
        for (int by_offload = 0; by_offload < 2; by_offload++) {
            rig on;
            rig_open(&on, RIG_HOOKS, settings);
            *(release ? &on.fail_release : &on.fail_acquire) = nth;
            assert_int_equal(try_cycle(&on), REFIT_ERR_CALLBACK);
            assert_int_equal(on.error.subsystem, release ? 17 : 18);
            assert_int_equal(rig_state(&on), REFIT_OFFLOADED);
            recover(&on, by_offload == 1);
            rig_close(&on);
        }
    }
}

static void failing_hooks_lose_nothing(void **state)
{
    (void)state;
    hooks_that_fail_lose_nothing(true, NULL);
    hooks_that_fail_lose_nothing(false, NULL);
    hooks_that_fail_lose_nothing(true, pageable);
    hooks_that_fail_lose_nothing(false, pageable);
}

/* A group that arrived may have been stepped: it must not be overwritten by a second restore. */
static void groups_that_arrived_are_not_restored_again(void **state)
{
    (void)state;
    rig on;
    refit_future *future;
    rig_open(&on, RIG_HOOKS, NULL);
    rig_offload(&on);
    faulty_device_reset(on.device);
    rig_restore(&on);
    uint32_t batches = faulty_device_calls(on.device, FAULTY_COPY_BATCH);
    rig_offload(&on);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, batches, REFIT_ERR_COPY);
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
    assert_ok(refit_future_wait_group(future, 0, PATIENCE_MS, &on.error));
    test_fill(on.plain, on.regions[8].memory, 0x11, on.regions[8].bytes);
    memset(on.regions[8].expected, 0x11, on.regions[8].bytes);
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    assert_int_equal(refit_future_wait(future, 0, &on.error), REFIT_ERR_COPY);
    assert_ok(refit_future_wait_group(future, 0, 0, &on.error));
    refit_future_close(future);
    assert_int_equal(rig_state(&on), REFIT_FAILED);
    assert_int_equal(rig_region_info(&on, 8).place, REFIT_ON_DEVICE);
    assert_int_equal(rig_region_info(&on, 7).place, REFIT_ON_HOST);
    assert_int_equal(rig_stats(&on).offload_failures, 1);
    refit_lease *lease;
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_STATE);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void a_stream_that_failed_before_is_not_copied_after(void **state)
{
    (void)state;
    rig on;
    refit_stream_ref stream;
    rig_open(&on, RIG_BOUND, NULL);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(
        refit_stream_copy(on.device, stream, rig_extra(&on, 16), "0123456789abcde", 16, &on.error));
    assert_ok(refit_offloader_offload(on.offloader, stream, NULL, &on.error));
    assert_int_equal(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error), REFIT_ERR_COPY);
    assert_int_equal(rig_state(&on), REFIT_FAILED);
    assert_int_equal(rig_region_info(&on, 0).place, REFIT_ON_DEVICE);
    rig_restore(&on);
    rig_check_bytes(&on, false);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    rig_close(&on);
}

/* The second copy is refused, and the first can neither be waited for nor does its stream close. */
static void order_hang(rig *on)
{
    faulty_device_fail(on->device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
    faulty_device_fail_times(on->device, FAULTY_EVENT_RECORD, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail(on->device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
}

static void assert_refused(rig *on, refit_status status)
{
    assert_int_equal(status, REFIT_ERR_DEVICE);
    assert_non_null(strstr(on->error.text, "close the offloader"));
}

/* Such copies may still write to the image and read the plan. */
static void copies_that_hang_keep_the_image_and_the_plan(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    uint64_t host_bytes = rig_stats(&on).host_bytes;
    order_hang(&on);
    assert_int_equal(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_COPY);
    faulty_device_reset(on.device);
    assert_refused(&on, refit_offloader_trim(on.offloader, &on.error));
    assert_refused(&on, refit_offloader_unseal(on.offloader, &on.error));
    assert_refused(&on, refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    assert_int_equal(rig_stats(&on).host_bytes, host_bytes);
    rig_check_bytes(&on, false);
    rig_close(&on);
}

static void copies_that_hang_on_the_restore_keep_the_image(void **state)
{
    (void)state;
    rig on;
    refit_lease *lease;
    rig_open(&on, RIG_BOUND, NULL);
    rig_offload(&on);
    order_hang(&on);
    assert_int_equal(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_COPY);
    faulty_device_reset(on.device);
    assert_refused(&on, refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_int_equal(rig_state(&on), REFIT_OFFLOADED);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error)); /* to save what can be */
    refit_lease_release(lease);
    rig_close(&on);
}

/* A test for each fault, with its name. */
static int run_faults(void)
{
    struct CMUnitTest tests[FAULTS] = {{0}};
    for (int i = 0; i < FAULTS; i++) {
        tests[i] = (struct CMUnitTest){.name = faults[i].name,
                                       .test_func = a_fault_loses_nothing,
                                       .initial_state = (void *)(uintptr_t)&faults[i]};
    }
    return cmocka_run_group_tests_name("device_faults", tests, NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(failing_hooks_lose_nothing),
        cmocka_unit_test(groups_that_arrived_are_not_restored_again),
        cmocka_unit_test(a_stream_that_failed_before_is_not_copied_after),
        cmocka_unit_test(copies_that_hang_keep_the_image_and_the_plan),
        cmocka_unit_test(copies_that_hang_on_the_restore_keep_the_image),
    };
    int failed = run_faults();
    return failed + cmocka_run_group_tests_name("offload_faults", tests, NULL, NULL);
}
