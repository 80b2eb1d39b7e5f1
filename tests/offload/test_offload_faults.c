/* Faults: each device call fails in turn; no byte is lost, and both verbs can be called again. A
 * device that is lost leaves what was away in the image. */
#include "tests/offload/rig.h"

static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};

/* Out and back; the first failure ends it. Nothing is asserted about how it goes. */
static refit_status try_cycle(rig *on)
{
    RFT_TRY(offload_all(on->offloader, &on->error));
    return restore_all(on->offloader, &on->error);
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
    rig_cycle(on);
}

static void check_locked(rig *on)
{
    refit_read_lock *lock;
    assert_ok(refit_read_lock_acquire(on->offloader, &lock, &on->error));
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        const void *bytes;
        uint64_t count;
        if (on->regions[at].policy != REFIT_KEEP) continue;
        assert_ok(refit_read_lock_read(lock, at, &bytes, &count, &on->error));
        assert_memory_equal(bytes, on->regions[at].expected, count);
    }
    refit_read_lock_release(lock);
}

static void check_all_at(rig *on, refit_place place)
{
    for (uint32_t at = 0; at < RIG_REGIONS; at++)
        assert_int_equal(rig_region_info(on, at).place, place);
}

/* Or they leave for good first. */
static void recover_by_offload(rig *on)
{
    check_places(on);
    rig_offload(on);
    check_all_at(on, REFIT_ON_HOST);
    check_locked(on);
    rig_restore(on);
    rig_check_bytes(on, true);
}

/* Each call of one kind in a cycle fails in turn. */
typedef struct fault_case {
    fault is;
    rig_memory memory;
    const char *const *settings;
} fault_case;

static const fault_case faults[] = {
    {{"a copy is refused, memory bound", FAULTY_COPY_BATCH, REFIT_ERR_COPY, false},
     RIG_BOUND,
     NULL},
    {{"a copy is refused, with hooks", FAULTY_COPY_BATCH, REFIT_ERR_COPY, false}, RIG_HOOKS, NULL},
    {{"a copy is refused, in an arena, verified", FAULTY_COPY_BATCH, REFIT_ERR_COPY, false},
     RIG_ARENA,
     verified},
    {{"zeroing is refused", FAULTY_ZERO, REFIT_ERR_COPY, false}, RIG_HOOKS, NULL},
    {{"zeroing is refused, pageable", FAULTY_ZERO, REFIT_ERR_COPY, false}, RIG_ARENA, pageable},
    {{"no device memory", FAULTY_COMMIT, REFIT_ERR_DEVICE_MEMORY, false}, RIG_ARENA, NULL},
    {{"no device memory, pageable", FAULTY_COMMIT, REFIT_ERR_DEVICE_MEMORY, false},
     RIG_ARENA,
     pageable},
    {{"device memory is not given back", FAULTY_DECOMMIT, REFIT_ERR_DEVICE, false},
     RIG_ARENA,
     NULL},
    {{"no event is recorded", FAULTY_EVENT_RECORD, REFIT_ERR_DEVICE, false}, RIG_HOOKS, NULL},
};

static void recover(rig *on, bool by_offload)
{
    (by_offload ? recover_by_offload : recover_by_restore)(on);
}

static rig *open_case(const fault_case *it)
{
    return open_scene(&(opening){.memory = it->memory, .settings = it->settings});
}

static uint32_t count_calls(const fault_case *it)
{
    rig *on = open_case(it);
    faulty_device_reset(on->device);
    assert_ok(try_cycle(on));
    uint32_t calls = faulty_device_calls(on->device, it->is.slot);
    close_scene(on);
    return calls;
}

/* Recovers by a restore, then by an offload: no byte is lost. */
static void a_fault_loses_nothing(void **state)
{
    const fault_case *it = *state;
    uint32_t calls = count_calls(it);
    assert_true(calls > 0);
    for (uint32_t run = 0; run < 2 * calls; run++) {
        rig *on = open_case(it);
        order_fault(on->device, &it->is, 1 + run / 2);
        refit_status status = try_cycle(on);
        if (!it->is.may_succeed) assert_int_equal(status, it->is.status);
        if (status != REFIT_OK) assert_int_equal(on->error.status, status);
        faulty_device_reset(on->device);
        recover(on, run % 2 == 1);
        close_scene(on);
    }
}

TEST(failing_hooks_lose_nothing)
{
    static const char *const *const all_settings[] = {NULL, pageable};
    for (uint32_t run = 0; run < 8 * RIG_REGIONS; run++) {
        bool release = run % 2 == 0, by_offload = run / 2 % 2 == 1;
        uint32_t nth = 1 + run / 8;
        rig *on =
            open_scene(&(opening){.memory = RIG_HOOKS, .settings = all_settings[run / 4 % 2]});
        *(release ? &on->fail_release : &on->fail_acquire) = nth;
        assert_int_equal(try_cycle(on), REFIT_ERR_CALLBACK);
        assert_int_equal(on->error.subsystem, release ? 17 : 18);
        assert_int_equal(rig_state(on), REFIT_OFFLOADED);
        recover(on, by_offload);
        close_scene(on);
    }
}

/* All copies are on the streams before one of them may lose the device. */
static refit_status start_and_finish(rig *on, bool back)
{
    faulty_device_stop(on->device);
    assert_ok(back ? restore(on) : offload(on));
    faulty_device_go(on->device);
    return finish(on);
}

/* Each copy of a cycle loses the device in turn: nothing is repeated, and what was away can be
 * read. */
static void a_loss_leaves_what_was_away(const opening *how)
{
    rig *on = open_scene(how);
    assert_ok(try_cycle(on));
    uint32_t copies = faulty_device_calls(on->device, FAULTY_COPY_BATCH);
    assert_true(copies > 1);
    close_scene(on);
    for (uint32_t nth = 1; nth <= copies; nth++) {
        on = open_scene(how);
        faulty_device_lose(on->device, FAULTY_COPY_BATCH, nth);
        bool away = start_and_finish(on, false) == REFIT_OK;
        if (away) assert_int_equal(start_and_finish(on, true), REFIT_ERR_DEVICE);
        assert_says(&on->error, "lost");
        assert_int_equal(rig_state(on), REFIT_FAILED);
        check_all_at(on, away ? REFIT_ON_HOST : REFIT_ON_DEVICE);
        assert_int_equal(finish(on), REFIT_ERR_DEVICE);
        assert_int_equal(offload(on), REFIT_ERR_DEVICE);
        assert_int_equal(restore(on), REFIT_ERR_DEVICE);
        assert_says(&on->error, "lost");
        if (away) check_locked(on);
        if (!away) assert_int_equal(try_read_lock(on), REFIT_ERR_STATE);
        close_scene(on);
    }
}

TEST(a_loss_leaves_what_was_away_memory_bound)
{
    a_loss_leaves_what_was_away(&(opening){.memory = RIG_BOUND});
}

TEST(a_loss_leaves_what_was_away_verified)
{
    a_loss_leaves_what_was_away(&(opening){.memory = RIG_BOUND, .settings = verified});
}

/* As when other work on the device has lost it, while states are away. */
SCENE(a_device_lost_while_states_are_away_leaves_them, .memory = RIG_ARENA)
{
    rig_offload(on);
    faulty_device_lose(on->device, FAULTY_ZERO, 1);
    assert_int_equal(rft_device_zero(on->device, REFIT_STREAM_NONE, rig_extra(on, 16), 16, NULL),
                     REFIT_ERR_DEVICE);
    check_locked(on);
    assert_int_equal(restore(on), REFIT_ERR_DEVICE);
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    check_locked(on);
}

/* The second copy is refused, and the first can neither be waited for nor does its stream close. */
static void order_hang(rig *on)
{
    faulty_device_fail(on->device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
    faulty_device_fail_times(on->device, FAULTY_EVENT_RECORD, 1, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail(on->device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
}

static void assert_no_way_out(rig *on, refit_status status)
{
    assert_int_equal(status, REFIT_ERR_DEVICE);
    assert_says(&on->error, "could not be waited for");
}

/* Such copies may still write to the image and read the plan. */
SCENE(copies_that_hang_keep_the_image_and_the_plan, 0)
{
    uint64_t host_bytes = rig_stats(on).host_bytes;
    order_hang(on);
    assert_int_equal(offload(on), REFIT_ERR_COPY);
    faulty_device_reset(on->device);
    assert_no_way_out(on, trim(on));
    assert_no_way_out(on, unseal(on));
    assert_no_way_out(on, offload(on));
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    assert_int_equal(rig_stats(on).host_bytes, host_bytes);
    rig_check_bytes(on, false);
}

SCENE(copies_that_hang_on_the_restore_keep_the_image, 0)
{
    rig_offload(on);
    order_hang(on);
    assert_int_equal(restore(on), REFIT_ERR_COPY);
    faulty_device_reset(on->device);
    assert_no_way_out(on, restore(on));
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    assert_ok(try_read_lock(on)); /* to save what can be */
}

int main(void)
{
    for (size_t i = 0; i < COUNT_OF(faults); i++) { /* a test for each, with its name */
        test_list((struct CMUnitTest){.name = faults[i].is.name,
                                      .test_func = a_fault_loses_nothing,
                                      .initial_state = (void *)(uintptr_t)&faults[i]});
    }
    return test_run("offload_faults");
}
