/* Host memory that is taken while its owner goes on: which calls wait for it, how it fails, and
 * what a close, a trim or a new plan does to it. */
#include "tests/offload/rig.h"

#include <errno.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/machine_lock.h"
#include "memory/procfile.h"
#include "offload/offloader.h"

static const char *const background[] = {"offload.background=true", "offload.pin=require",
                                         "offload.huge_pages=never", NULL};

/* Seals, and the nth slab's page-lock stands. */
static void seal_held(rig *on, uint32_t nth)
{
    faulty_device_hold_pins(on->device, nth);
    assert_ok(seal(on));
    faulty_device_await_pin(on->device);
}

/* A call that waits for memory which stands, and runs out of time; no other does. */
static refit_status hurry(rig *on, refit_status (*call)(rig *))
{
    on->offloader->config.offload_timeout_ms = 20;
    refit_status status = call(on);
    on->offloader->config.offload_timeout_ms = TIMEOUT_MS;
    return status;
}

static refit_status prepare_for(rig *on, uint32_t timeout_ms)
{
    return refit_offloader_prepare(on->offloader, timeout_ms, &on->error);
}

static refit_status prepare(rig *on)
{
    return prepare_for(on, TIMEOUT_MS);
}

static refit_status close_it(rig *on)
{
    return refit_offloader_close(on->offloader, &on->error);
}

static void prepare_and_cycle(rig *on)
{
    assert_ok(prepare(on));
    rig_cycle(on);
}

/* No memory was taken, and the states are where they were. */
static void check_untouched(rig *on, refit_offloader_state state)
{
    assert_int_equal(rig_state(on), state);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    rig_check_bytes(on, false);
}

/* ---- Waiting --------------------------------------------------------------------------------- */

SCENE(a_seal_returns_before_the_memory_is_there, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    seal_held(on, 3);
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    refit_stats stats = rig_stats(on);
    assert_true(stats.host_bytes >= rig_kept_bytes(on));
    assert_in_range(stats.host_ready_bytes, 1, stats.host_bytes - 1);
    assert_int_equal(stats.host_pinned_bytes + stats.host_pageable_bytes, 0);
    char ready[64];
    snprintf(ready, sizeof ready, " %llu of %llu bytes", (unsigned long long)stats.host_ready_bytes,
             (unsigned long long)stats.host_bytes);
    assert_int_equal(prepare_for(on, 0), REFIT_ERR_TIMEOUT);
    assert_says(&on->error, ready);
    assert_int_equal(prepare_for(on, 10), REFIT_ERR_TIMEOUT);
    faulty_device_let_pins(on->device);
    assert_ok(prepare(on));
    stats = rig_stats(on);
    assert_int_equal(stats.host_ready_bytes, stats.host_bytes);
    assert_int_equal(stats.host_pinned_bytes, stats.host_bytes);
    assert_true(stats.host_pin_seconds > 0);
    rig_cycle(on);
}

SCENE(the_first_offload_waits_and_later_ones_do_not, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    seal_held(on, 1);
    assert_int_equal(hurry(on, offload), REFIT_ERR_TIMEOUT);
    assert_true(strlen(on->error.text) > 20);
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    rig_check_bytes(on, false);
    faulty_device_let_pins(on->device);
    prepare_and_cycle(on);
    rig_fill(on);
    rig_cycle(on);
    assert_int_equal(rig_stats(on).offload_count, 2);
}

SCENE(an_offload_waits_for_memory_on_its_way, .memory = RIG_HOOKS,
      .settings = SETTINGS("offload.background=true"))
{
    for (int i = 0; i < 10; i++) {
        rig_cycle(on);
        assert_ok(trim(on));
        rig_fill(on);
    }
}

SCENE(there_is_nothing_to_prepare_on_the_pageable_path, .memory = RIG_HOOKS,
      .settings = SETTINGS("offload.background=true", "use_pinned_optimizer_offload=false"))
{
    assert_ok(prepare_for(on, 0));
    rig_cycle(on);
}

SCENE(without_background_all_is_ready_once_sealed, .memory = RIG_HOOKS)
{
    assert_ok(prepare_for(on, 0));
    uint64_t host_bytes = rig_stats(on).host_bytes;
    assert_int_equal(rig_stats(on).host_ready_bytes, host_bytes);
    assert_ok(trim(on));
    assert_int_equal(rig_stats(on).host_ready_bytes, 0);
    assert_ok(prepare_for(on, 0));
    assert_int_equal(rig_stats(on).host_ready_bytes, host_bytes);
    rig_cycle(on);
}

/* ---- Failing --------------------------------------------------------------------------------- */

SCENE(a_failure_is_told_to_the_first_call_that_needs_the_memory, .memory = RIG_HOOKS,
      .unsealed = true, .settings = background)
{
    refit_status (*const needs[])(rig *) = {prepare, offload};
    for (uint32_t run = 0; run < 6; run++) {
        uint32_t nth = 1 + run / 2;
        char slab[32];
        snprintf(slab, sizeof slab, "slab %u of", nth);
        faulty_device_fail(on->device, FAULTY_HOST_PIN, nth, REFIT_ERR_PIN);
        assert_ok(seal(on));
        assert_int_equal(needs[run % 2](on), REFIT_ERR_PIN);
        assert_int_equal(on->error.status, REFIT_ERR_PIN);
        assert_says(&on->error, slab);
        check_untouched(on, REFIT_RESIDENT);
        prepare_and_cycle(on); /* tries again */
        assert_ok(trim(on));
        assert_ok(unseal(on));
        rig_fill(on);
    }
}

SCENE(a_failure_that_lasts_is_returned_each_time, .memory = RIG_HOOKS,
      .settings = SETTINGS("offload.background=true", "offload.budget_bytes=64KiB"))
{
    assert_int_equal(prepare(on), REFIT_ERR_BUDGET);
    assert_int_equal(offload(on), REFIT_ERR_BUDGET);
    assert_says(&on->error, "offload.budget_bytes");
    check_untouched(on, REFIT_RESIDENT);
}

SCENE(a_preferred_lock_that_fails_is_visible, .unsealed = true,
      .settings = SETTINGS("offload.background=true", "offload.pin=prefer"))
{
    faulty_device_fail(on->device, FAULTY_HOST_PIN, 2, REFIT_ERR_PIN);
    assert_ok(seal(on));
    assert_ok(prepare(on));
    refit_stats stats = rig_stats(on);
    assert_int_equal(stats.host_pinned_bytes, 0);
    assert_int_equal(stats.host_pageable_bytes, stats.host_bytes);
    rig_cycle(on);
}

static bool refuse_threads;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user)
{
    return refuse_threads ? EAGAIN : __real_pthread_create(thread, attributes, run, user);
}

SCENE(a_thread_that_does_not_start_fails_the_seal, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    refuse_threads = true;
    assert_int_equal(seal(on), REFIT_ERR_SYSTEM);
    assert_says(&on->error, "refit-pin");
    refuse_threads = false;
    check_untouched(on, REFIT_OPEN);
    assert_ok(seal(on));
    rig_cycle(on);
}

/* ---- Breaking it off ------------------------------------------------------------------------- */

SCENE(a_close_ends_it_or_closes_nothing, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    seal_held(on, 2);
    assert_int_equal(hurry(on, close_it), REFIT_ERR_TIMEOUT);
    assert_true(strlen(on->error.text) > 20);
    faulty_device_let_pins(on->device);
    assert_int_equal(prepare(on), REFIT_ERR_CANCELLED);
    prepare_and_cycle(on);
}

TEST(a_close_at_any_moment_leaves_nothing)
{
    for (int i = 0; i < 30; i++) {
        rig *on = open_scene(&(opening){.settings = background});
        if (i % 3 == 1) (void)!prepare_for(on, 0);
        close_scene(on); /* the device would refuse to close */
    }
}

SCENE(a_trim_gives_up_what_is_being_taken, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    seal_held(on, 2);
    assert_int_equal(hurry(on, trim), REFIT_ERR_TIMEOUT);
    faulty_device_let_pins(on->device);
    assert_ok(trim(on));
    assert_int_equal(rig_stats(on).host_bytes, 0);
    prepare_and_cycle(on);
}

SCENE(a_new_plan_that_fits_keeps_what_is_being_taken, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    seal_held(on, 2);
    assert_ok(unseal(on));
    assert_int_equal(rig_state(on), REFIT_OPEN);
    assert_int_equal(prepare_for(on, 0), REFIT_ERR_STATE);
    assert_ok(seal(on));
    faulty_device_let_pins(on->device);
    assert_ok(prepare(on));
    uint32_t slabs = faulty_device_calls(on->device, FAULTY_HOST_PIN);
    rig_cycle(on);
    assert_ok(trim(on));
    faulty_device_reset(on->device);
    assert_ok(prepare(on));
    assert_int_equal(faulty_device_calls(on->device, FAULTY_HOST_PIN), slabs); /* none twice */
}

SCENE(a_new_plan_that_does_not_fit_takes_its_place, .settings = background)
{
    assert_ok(unseal(on));
    (void)rig_add(on, "large", rig_extra(on, 1 << 20), 1 << 20);
    assert_ok(seal(on));
    assert_ok(prepare(on));
    assert_true(rig_stats(on).host_bytes >= rig_kept_bytes(on) + (1 << 20));
    rig_cycle(on);
}

/* The failed one must not be kept because it would have fitted. */
SCENE(a_seal_after_a_failure_tries_again, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    faulty_device_fail(on->device, FAULTY_HOST_PIN, 1, REFIT_ERR_PIN);
    assert_ok(seal(on));
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (rig_stats(on).host_bytes > 0 && rft_now() < deadline) {
    }
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_ok(unseal(on));
    assert_ok(seal(on));
    prepare_and_cycle(on);
}

SCENE(a_fork_meanwhile_disturbs_nothing, .memory = RIG_HOOKS, .unsealed = true,
      .settings = background)
{
    int how;
    seal_held(on, 2);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(0);
    assert_int_equal(waitpid(child, &how, 0), child);
    faulty_device_let_pins(on->device);
    prepare_and_cycle(on);
}

/* ---- Turns ----------------------------------------------------------------------------------- */

/* Takes the machine's lock by an opening of the file of its own, which is as good as another
 * process's. REFIT_ERR_TIMEOUT: another has it. */
static refit_status take_lock(rft_machine_lock *machine_lock, uint32_t timeout_ms)
{
    rft_cancel_token token;
    assert_ok(rft_cancel_token_open(&token, NULL));
    rft_machine_lock_find(machine_lock, "");
    refit_status status = rft_machine_lock_take(machine_lock, timeout_ms, &token, NULL);
    rft_cancel_token_close(&token);
    return status;
}

/* Or the test is skipped: this machine has no place for it. */
static void take_lock_or_skip(rft_machine_lock *machine_lock)
{
    assert_ok(take_lock(machine_lock, TIMEOUT_MS));
    if (machine_lock->held == NULL) skip();
}

/* Does anyone claim host memory, and how much: the rig, or another test on this machine? */
static bool is_any_claimed(uint64_t *bytes)
{
    rft_machine_lock machine_lock;
    assert_ok(take_lock(&machine_lock, TIMEOUT_MS));
    bool claimed = rft_machine_lock_claimed(&machine_lock, bytes);
    rft_machine_lock_give(&machine_lock);
    return claimed;
}

SCENE(memory_is_claimed_and_the_lock_is_free_while_it_is_taken, .unsealed = true,
      .settings = SETTINGS("offload.background=true", "offload.take_turns=true",
                           "offload.pin=require"))
{
    rft_machine_lock machine_lock;
    take_lock_or_skip(&machine_lock);
    rft_machine_lock_give(&machine_lock);
    seal_held(on, 2);
    uint64_t bytes = 1;
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (bytes > 0 && rft_now() < deadline)
        assert_true(is_any_claimed(&bytes));
    assert_int_equal(bytes, 0); /* all is touched, and not yet page-locked */
    faulty_device_let_pins(on->device);
    assert_ok(prepare(on));
    bool claimed = true;
    while (claimed && rft_now() < deadline)
        claimed = is_any_claimed(&bytes);
    assert_false(claimed);
    rig_cycle(on);
}

SCENE(a_seal_that_never_gets_the_lock_fails, .unsealed = true,
      .settings = SETTINGS("offload.take_turns=true"))
{
    rft_machine_lock machine_lock;
    take_lock_or_skip(&machine_lock);
    refit_status status = hurry(on, seal);
    rft_machine_lock_give(&machine_lock);
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_says(&on->error, "offload.take_turns");
    check_untouched(on, REFIT_OPEN);
    assert_int_equal(faulty_device_calls(on->device, FAULTY_HOST_PIN), 0);
}

SCENE(a_wait_for_memory_says_that_it_waits_for_the_lock, .unsealed = true,
      .settings = SETTINGS("offload.background=true", "offload.take_turns=true"))
{
    rft_machine_lock machine_lock;
    take_lock_or_skip(&machine_lock);
    assert_ok(seal(on));
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    do {
        assert_int_equal(prepare_for(on, 1), REFIT_ERR_TIMEOUT);
    } while (strstr(on->error.text, "other processes") == NULL && rft_now() < deadline);
    assert_says(&on->error, "other processes");
    assert_ok(trim(on)); /* it does not wait for the lock */
    rft_machine_lock_give(&machine_lock);
    prepare_and_cycle(on);
}

/* ---- Memory that is its own ------------------------------------------------------------------ */

#define MACHINE GIB

static atomic_ullong fake_memory; /* so many bytes are always available, and no cgroup; 0: not */

bool __real_rft_procfile_read(const char *path, char *text, size_t room);
bool __wrap_rft_procfile_read(const char *path, char *text, size_t room);

bool __wrap_rft_procfile_read(const char *path, char *text, size_t room)
{
    unsigned long long bytes = atomic_load(&fake_memory);
    if (bytes == 0) return __real_rft_procfile_read(path, text, room);
    if (strcmp(path, "/proc/meminfo") != 0) return false;
    snprintf(text, room, "MemAvailable: %llu kB\n", bytes / KIB);
    return true;
}

SCENE(an_estimate_does_not_count_its_own_image_as_used, .unsealed = true,
      .settings = SETTINGS("offload.budget_share=0.5"))
{
    uint64_t need, budget;
    fake_memory = MACHINE;
    assert_ok(seal(on));
    rig_offload(on);
    assert_ok(refit_offloader_estimate(on->offloader, &need, &budget, &on->error));
    assert_int_equal(budget, (MACHINE + rig_stats(on).host_bytes) / 2);
    assert_true(rig_stats(on).host_bytes >= rig_kept_bytes(on));
    rig_restore(on);
    assert_ok(trim(on));
    assert_ok(refit_offloader_estimate(on->offloader, &need, &budget, &on->error));
    assert_int_equal(budget, MACHINE / 2);
    fake_memory = 0;
}
SCENE_AGAIN(an_estimate_does_not_count_its_own_image_as_used, pageable, .unsealed = true,
            .settings = SETTINGS("offload.budget_share=0.5", "use_pinned_optimizer_offload=false"))

/* ---- What others claim ----------------------------------------------------------------------- */

/* Another process claims all of it, and the rig's waits. */
static void seal_and_wait(rig *on, rft_machine_lock *other)
{
    take_lock_or_skip(other);
    rft_machine_lock_claim(other, MACHINE);
    fake_memory = MACHINE;
    assert_ok(seal(on));
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    do {
        assert_int_equal(prepare_for(on, 1), REFIT_ERR_TIMEOUT);
    } while (strstr(on->error.text, "other processes") == NULL && rft_now() < deadline);
    assert_says(&on->error, "other processes");
    assert_int_equal(faulty_device_calls(on->device, FAULTY_HOST_PIN), 0);
}

static const char *const turns[] = {"offload.background=true", "offload.take_turns=true", NULL};

SCENE(a_seal_waits_while_others_claim_too_much, .unsealed = true, .settings = turns)
{
    rft_machine_lock other;
    seal_and_wait(on, &other);
    atomic_store(other.claim, MACHINE / 2); /* it fits, although the other still takes memory */
    assert_ok(prepare(on));
    rft_machine_lock_give(&other);
    fake_memory = 0;
    rig_cycle(on);
}

/* One that has touched all may still fail, and give it back. */
SCENE(a_seal_is_not_refused_while_others_are_at_it, .unsealed = true, .settings = turns)
{
    rft_machine_lock other;
    seal_and_wait(on, &other);
    fake_memory = 64 * KIB;
    atomic_store(other.claim, 0);
    assert_int_equal(prepare_for(on, 100), REFIT_ERR_TIMEOUT);
    assert_says(&on->error, "other processes");
    fake_memory = MACHINE;
    rft_machine_lock_give(&other);
    assert_ok(prepare(on));
    fake_memory = 0;
    rig_cycle(on);
}

SCENE(a_wait_for_what_others_claim_can_be_ended, .unsealed = true, .settings = turns)
{
    rft_machine_lock other;
    seal_and_wait(on, &other);
    assert_ok(trim(on));
    rft_machine_lock_give(&other);
    fake_memory = 0;
    prepare_and_cycle(on);
}

SCENE(a_seal_for_which_others_never_leave_enough_fails, .unsealed = true,
      .settings = SETTINGS("offload.take_turns=true"))
{
    rft_machine_lock other;
    take_lock_or_skip(&other);
    rft_machine_lock_claim(&other, MACHINE);
    fake_memory = MACHINE;
    refit_status status = hurry(on, seal);
    fake_memory = 0;
    rft_machine_lock_give(&other);
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_says(&on->error, "offload.take_turns");
    check_untouched(on, REFIT_OPEN);
    assert_int_equal(faulty_device_calls(on->device, FAULTY_HOST_PIN), 0);
}

SCENE(what_exceeds_a_fixed_budget_waits_for_no_one, .unsealed = true,
      .settings = SETTINGS("offload.take_turns=true", "offload.budget_bytes=4096"))
{
    rft_machine_lock other;
    take_lock_or_skip(&other);
    rft_machine_lock_claim(&other, MACHINE);
    refit_status status = hurry(on, seal);
    rft_machine_lock_give(&other);
    assert_int_equal(status, REFIT_ERR_BUDGET);
    assert_says(&on->error, "4096");
    check_untouched(on, REFIT_OPEN);
}

/* One that goes on without turns asks no one. */
SCENE(without_turns_claims_do_not_count, .unsealed = true,
      .settings = SETTINGS("offload.take_turns=false"))
{
    rft_machine_lock other;
    take_lock_or_skip(&other);
    rft_machine_lock_claim(&other, MACHINE);
    fake_memory = MACHINE;
    refit_status status = seal(on);
    fake_memory = 0;
    rft_machine_lock_give(&other);
    assert_ok(status);
    rig_cycle(on);
}

/* As if no one had ever claimed anything: nothing of the other is left in the figures. */
SCENE(the_refusal_after_a_wait_has_the_figures_of_what_is_free, .unsealed = true,
      .settings = SETTINGS("offload.background=true", "offload.take_turns=true",
                           "offload.budget_share=0.5"))
{
    rft_machine_lock other;
    seal_and_wait(on, &other);
    fake_memory = 64 * KIB;
    rft_machine_lock_give(&other);
    assert_int_equal(prepare(on), REFIT_ERR_BUDGET);
    assert_says(&on->error, "the budget is 32768 (MemAvailable; 65536 free)");
    fake_memory = 0;
    check_untouched(on, REFIT_RESIDENT);
}

int main(void)
{
    return test_run("background");
}
