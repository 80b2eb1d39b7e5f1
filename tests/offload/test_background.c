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
#include "tests/support/failing_alloc.h"

static const char *const background[] = {"offload.background=true", "offload.pin=require",
                                         "offload.huge_pages=never", NULL};

/* The same with short waits. */
static const char *const impatient[] = {"offload.background=true", "offload.pin=require",
                                        "offload.huge_pages=never", "offload.timeout_ms=20ms",
                                        NULL};

/* Sealed, with the nth slab's page-lock standing. */
static void open_held(rig *on, const char *const *settings, uint32_t nth)
{
    rig_open_unsealed(on, RIG_HOOKS, settings);
    faulty_device_hold_pins(on->device, nth);
    assert_ok(seal(on));
    faulty_device_await_pin(on->device);
}

static refit_status prepare(rig *on, uint32_t timeout_ms)
{
    return refit_offloader_prepare(on->offloader, timeout_ms, &on->error);
}

static refit_status offload(rig *on)
{
    return offload(on);
}

static void check_cycle(rig *on)
{
    rig_cycle(on);
}

/* ---- Waiting */

static void a_seal_returns_before_the_memory_is_there(void **state)
{
    (void)state;
    rig on;
    open_held(&on, background, 3);
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    refit_stats stats = rig_stats(&on);
    assert_true(stats.host_bytes >= rig_kept_bytes(&on));
    assert_in_range(stats.host_ready_bytes, 1, stats.host_bytes - 1);
    assert_int_equal(stats.host_pinned_bytes + stats.host_pageable_bytes, 0);
    char ready[64];
    snprintf(ready, sizeof ready, " %llu of %llu bytes", (unsigned long long)stats.host_ready_bytes,
             (unsigned long long)stats.host_bytes);
    assert_int_equal(prepare(&on, 0), REFIT_ERR_TIMEOUT);
    assert_told(on.error, ready);
    assert_int_equal(prepare(&on, 10), REFIT_ERR_TIMEOUT);
    faulty_device_let_pins(on.device);
    assert_ok(prepare(&on, PATIENCE_MS));
    stats = rig_stats(&on);
    assert_int_equal(stats.host_ready_bytes, stats.host_bytes);
    assert_int_equal(stats.host_pinned_bytes, stats.host_bytes);
    assert_true(stats.host_pin_seconds > 0);
    check_cycle(&on);
    rig_close(&on);
}

static void the_first_offload_waits_and_later_ones_do_not(void **state)
{
    (void)state;
    rig on;
    open_held(&on, impatient, 1);
    assert_int_equal(offload(&on), REFIT_ERR_TIMEOUT);
    assert_true(strlen(on.error.text) > 20);
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    rig_check_bytes(&on, false);
    faulty_device_let_pins(on.device);
    assert_ok(prepare(&on, PATIENCE_MS));
    check_cycle(&on);
    check_cycle(&on);
    assert_int_equal(rig_stats(&on).offload_count, 2);
    rig_close(&on);
}

static void an_offload_waits_for_memory_on_its_way(void **state)
{
    (void)state;
    for (int i = 0; i < 10; i++) {
        rig on;
        rig_open(&on, RIG_HOOKS, background);
        check_cycle(&on);
        rig_close(&on);
    }
}

static void there_is_nothing_to_prepare_on_the_pageable_path(void **state)
{
    rig *on = *state;
    const char *const settings[] = {"offload.background=true", "use_pinned_optimizer_offload=false",
                                    NULL};
    assert_ok(prepare(on, 0));
    check_cycle(on);
}

static void without_background_all_is_ready_once_sealed(void **state)
{
    rig *on = *state;
    assert_ok(prepare(on, 0));
    uint64_t host_bytes = rig_stats(on).host_bytes;
    assert_int_equal(rig_stats(on).host_ready_bytes, host_bytes);
    assert_ok(trim(on));
    assert_int_equal(rig_stats(on).host_ready_bytes, 0);
    assert_ok(prepare(on, 0));
    assert_int_equal(rig_stats(on).host_ready_bytes, host_bytes);
    check_cycle(on);
}

/* ---- Failing */

static refit_status prepare_patiently(rig *on)
{
    return prepare(on, PATIENCE_MS);
}

static void a_failure_is_returned_to_the_first_call_that_needs_the_memory(void **state)
{
    (void)state;
    refit_status (*const needs[])(rig *) = {prepare_patiently, offload};
    for (size_t i = 0; i < 2; i++) {
        for (uint32_t nth = 1; nth <= 3; nth++) {
            rig on;
            rig_open_unsealed(&on, RIG_HOOKS, background);
            faulty_device_fail(on.device, FAULTY_HOST_PIN, nth, REFIT_ERR_PIN);
            assert_ok(seal(&on));
            assert_int_equal(needs[i](&on), REFIT_ERR_PIN);
            assert_int_equal(on.error.status, REFIT_ERR_PIN);
            char slab[32];
            snprintf(slab, sizeof slab, "slab %u of", nth);
            assert_told(on.error, slab);
            assert_int_equal(rig_state(&on), REFIT_RESIDENT);
            assert_int_equal(rig_stats(&on).host_bytes, 0);
            assert_ok(prepare(&on, PATIENCE_MS)); /* tries again */
            check_cycle(&on);
            rig_close(&on);
        }
    }
}

static void a_failure_that_lasts_is_returned_each_time(void **state)
{
    rig *on = *state;
    const char *const settings[] = {"offload.background=true", "offload.budget_bytes=64KiB", NULL};
    assert_int_equal(prepare(on, PATIENCE_MS), REFIT_ERR_BUDGET);
    assert_int_equal(offload(on), REFIT_ERR_BUDGET);
    assert_told(on->error, "offload.budget_bytes");
    assert_int_equal(rig_state(on), REFIT_RESIDENT);
    rig_check_bytes(on, false);
}

static void a_preferred_lock_that_fails_is_visible(void **state)
{
    rig *on = *state;
    const char *const settings[] = {"offload.background=true", "offload.pin=prefer", NULL};
    faulty_device_fail(on->device, FAULTY_HOST_PIN, 2, REFIT_ERR_PIN);
    assert_ok(seal(on));
    assert_ok(prepare(on, PATIENCE_MS));
    refit_stats stats = rig_stats(on);
    assert_int_equal(stats.host_pinned_bytes, 0);
    assert_int_equal(stats.host_pageable_bytes, stats.host_bytes);
    check_cycle(on);
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

static void a_thread_that_does_not_start_fails_the_seal(void **state)
{
    rig *on = *state;
    refuse_threads = true;
    assert_int_equal(seal(on), REFIT_ERR_SYSTEM);
    assert_told(on->error, "refit-pin");
    refuse_threads = false;
    assert_int_equal(rig_state(on), REFIT_OPEN);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_ok(seal(on));
    check_cycle(on);
}

/* ---- Breaking it off */

static void a_close_ends_it_or_closes_nothing(void **state)
{
    (void)state;
    rig on;
    open_held(&on, impatient, 2);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_TIMEOUT);
    assert_true(strlen(on.error.text) > 20);
    faulty_device_let_pins(on.device);
    refit_status given_up = prepare(&on, PATIENCE_MS);
    assert_int_equal(given_up, REFIT_ERR_CANCELLED);
    assert_ok(prepare(&on, PATIENCE_MS));
    check_cycle(&on);
    rig_close(&on);
}

static void a_close_at_any_moment_leaves_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < 30; i++) {
        rig on;
        rig_open(&on, RIG_BOUND, background);
        if (i % 3 == 1) (void)!prepare(&on, 0);
        rig_close(&on); /* the device would refuse to close */
    }
}

static void a_trim_gives_up_what_is_being_taken(void **state)
{
    (void)state;
    rig on;
    open_held(&on, impatient, 2);
    assert_int_equal(trim(&on), REFIT_ERR_TIMEOUT);
    faulty_device_let_pins(on.device);
    int64_t deadline = rft_deadline(PATIENCE_MS);
    refit_status status = REFIT_ERR_TIMEOUT;
    while (status == REFIT_ERR_TIMEOUT && rft_now() < deadline) {
        status = trim(&on);
    }
    assert_ok(status);
    assert_int_equal(rig_stats(&on).host_bytes, 0);
    assert_ok(prepare(&on, PATIENCE_MS));
    check_cycle(&on);
    rig_close(&on);
}

static void a_new_plan_that_fits_keeps_what_is_being_taken(void **state)
{
    (void)state;
    rig on;
    open_held(&on, background, 2);
    assert_ok(unseal(&on));
    assert_int_equal(rig_state(&on), REFIT_OPEN);
    assert_int_equal(prepare(&on, 0), REFIT_ERR_STATE);
    uint32_t calls = faulty_device_calls(on.device, FAULTY_HOST_PIN);
    assert_ok(seal(&on));
    faulty_device_let_pins(on.device);
    assert_ok(prepare(&on, PATIENCE_MS));
    assert_true(calls >= 1);
    uint32_t slabs = faulty_device_calls(on.device, FAULTY_HOST_PIN);
    check_cycle(&on);
    assert_ok(trim(&on));
    faulty_device_reset(on.device);
    assert_ok(prepare(&on, PATIENCE_MS));
    assert_int_equal(faulty_device_calls(on.device, FAULTY_HOST_PIN), slabs); /* none twice */
    rig_close(&on);
}

static void a_new_plan_that_does_not_fit_takes_its_place(void **state)
{
    rig *on = *state;
    refit_region_id id;
    refit_region_desc large = {.size = sizeof large, .name = "large", .bytes = 1 << 20};
    assert_ok(unseal(on));
    assert_ok(refit_memory_alloc(on->device, large.bytes, &large.memory, &on->error));
    assert_ok(refit_offloader_add(on->offloader, &large, &id, &on->error));
    assert_ok(seal(on));
    assert_ok(prepare(on, PATIENCE_MS));
    assert_true(rig_stats(on).host_bytes >= rig_kept_bytes(on) + large.bytes);
    check_cycle(on);
    assert_ok(unseal(on));
    assert_ok(clear(on));
    assert_ok(refit_memory_free(on->device, large.memory, &on->error));
}

/* The failed one must not be kept because it would have fitted. */
static void a_seal_after_a_failure_tries_again(void **state)
{
    rig *on = *state;
    faulty_device_fail(on->device, FAULTY_HOST_PIN, 1, REFIT_ERR_PIN);
    assert_ok(seal(on));
    int64_t deadline = rft_deadline(PATIENCE_MS);
    while (rig_stats(on).host_bytes > 0 && rft_now() < deadline) {
    }
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_ok(unseal(on));
    assert_ok(seal(on));
    assert_ok(prepare(on, PATIENCE_MS));
    check_cycle(on);
}

static void a_fork_meanwhile_disturbs_nothing(void **state)
{
    (void)state;
    rig on;
    open_held(&on, background, 2);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(0);
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    faulty_device_let_pins(on.device);
    assert_ok(prepare(&on, PATIENCE_MS));
    check_cycle(&on);
    rig_close(&on);
}

/* ---- Turns */

/* This process's own second opening of the file is as good as another process's. */
static void take_lock(rft_machine_lock *machine_lock)
{
    rft_cancel_token token;
    assert_ok(rft_cancel_token_open(&token, NULL));
    rft_machine_lock_find(machine_lock, "");
    assert_ok(rft_machine_lock_take(machine_lock, PATIENCE_MS, &token, NULL));
    rft_cancel_token_close(&token);
}

/* Tries the lock as another process would, without a wait. */
static bool is_taken(void)
{
    rft_machine_lock other;
    rft_cancel_token token;
    assert_ok(rft_cancel_token_open(&token, NULL));
    rft_machine_lock_find(&other, "");
    refit_status status = rft_machine_lock_take(&other, 0, &token, NULL);
    rft_machine_lock_give(&other);
    rft_cancel_token_close(&token);
    return status == REFIT_ERR_TIMEOUT;
}

static void the_machine_lock_is_held_while_memory_is_taken(void **state)
{
    (void)state;
    rig on;
    const char *const settings[] = {"offload.background=true", "offload.take_turns=true",
                                    "offload.pin=require", NULL};
    rft_machine_lock machine_lock;
    take_lock(&machine_lock);
    bool can = machine_lock.held != NULL;
    rft_machine_lock_give(&machine_lock);
    if (!can) skip(); /* this machine has no place for it */
    open_held(&on, settings, 2);
    assert_true(is_taken());
    faulty_device_let_pins(on.device);
    assert_ok(prepare(&on, PATIENCE_MS));
    take_lock(&machine_lock); /* it was given */
    rft_machine_lock_give(&machine_lock);
    check_cycle(&on);
    rig_close(&on);
}

static void a_seal_that_never_gets_the_lock_fails(void **state)
{
    rig *on = *state;
    rft_machine_lock machine_lock;
    const char *const settings[] = {"offload.take_turns=true", "offload.timeout_ms=20ms", NULL};
    take_lock(&machine_lock);
    if (machine_lock.held == NULL) skip();
    refit_status status = seal(on);
    rft_machine_lock_give(&machine_lock);
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_told(on->error, "offload.take_turns");
    assert_int_equal(rig_state(on), REFIT_OPEN);
    assert_int_equal(rig_stats(on).host_bytes, 0);
    assert_int_equal(faulty_device_calls(on->device, FAULTY_HOST_PIN), 0);
}

static void a_wait_for_memory_says_that_it_waits_for_the_lock(void **state)
{
    rig *on = *state;
    rft_machine_lock machine_lock;
    const char *const settings[] = {"offload.background=true", "offload.take_turns=true", NULL};
    take_lock(&machine_lock);
    if (machine_lock.held == NULL) skip();
    assert_ok(seal(on));
    int64_t deadline = rft_deadline(PATIENCE_MS);
    do {
        assert_int_equal(prepare(on, 1), REFIT_ERR_TIMEOUT);
    } while (strstr(on->error.text, "other processes") == NULL && rft_now() < deadline);
    assert_told(on->error, "other processes");
    assert_ok(trim(on)); /* it does not wait for the lock */
    rft_machine_lock_give(&machine_lock);
    assert_ok(prepare(on, PATIENCE_MS));
    check_cycle(on);
}

/* ---- Memory that is its own */

static bool fake_memory; /* the machine has always 1 GiB available, and no cgroup */

bool __real_rft_procfile_read(const char *path, char *text, size_t room);
bool __wrap_rft_procfile_read(const char *path, char *text, size_t room);

bool __wrap_rft_procfile_read(const char *path, char *text, size_t room)
{
    if (!fake_memory) return __real_rft_procfile_read(path, text, room);
    if (strcmp(path, "/proc/meminfo") != 0) return false;
    snprintf(text, room, "MemAvailable: 1048576 kB\n");
    return true;
}

static void an_estimate_does_not_count_its_own_image_as_used(void **state)
{
    (void)state;
    const char *const paths[] = {"use_pinned_optimizer_offload=true",
                                 "use_pinned_optimizer_offload=false"};
    for (size_t i = 0; i < 2; i++) {
        rig on;
        uint64_t need, budget;
        const char *const settings[] = {"offload.budget_share=0.5", paths[i], NULL};
        fake_memory = true;
        rig_open(&on, RIG_HOOKS, settings);
        rig_offload(&on);
        assert_ok(refit_offloader_estimate(on.offloader, &need, &budget, &on.error));
        assert_int_equal(budget, ((UINT64_C(1) << 30) + rig_stats(&on).host_bytes) / 2);
        assert_true(rig_stats(&on).host_bytes >= rig_kept_bytes(&on));
        rig_restore(&on);
        assert_ok(trim(&on));
        assert_ok(refit_offloader_estimate(on.offloader, &need, &budget, &on.error));
        assert_int_equal(budget, UINT64_C(1) << 29);
        rig_close(&on);
        fake_memory = false;
    }
}

/* ---- Memory for bookkeeping */

/* Opens, adds a region, seals, offloads and restores; the first failure. */
static refit_status live_once(refit_device *device, refit_error *error)
{
    static char memory[1000];
    refit_config config;
    refit_offloader *offloader;
    refit_region_id id;
    const refit_region_desc desc = {
        .size = sizeof desc, .name = "a", .memory = memory, .bytes = sizeof memory};
    refit_config_init(&config, sizeof config);
    config.offload_background = 1;
    refit_status status = refit_offloader_open(device, &config, &offloader, error);
    if (status != REFIT_OK) return status;
    status = refit_offloader_add(offloader, &desc, &id, error);
    if (status == REFIT_OK) status = refit_offloader_seal(offloader, error);
    if (status == REFIT_OK) status = refit_offloader_prepare(offloader, PATIENCE_MS, error);
    if (status == REFIT_OK) {
        status = refit_offloader_offload(offloader, REFIT_STREAM_NONE, NULL, error);
    }
    if (status == REFIT_OK) status = refit_offloader_finish(offloader, PATIENCE_MS, error);
    assert_ok(refit_offloader_close(offloader, NULL));
    return status;
}

static void every_failed_allocation_is_an_error_and_leaks_nothing(void **state)
{
    (void)state;
    for (uint64_t nth = 1;; nth++) {
        refit_error error = {0};
        refit_device *device = NULL;
        failing_alloc_begin(nth);
        refit_status status = refit_device_open("host", NULL, &device, &error);
        if (status == REFIT_OK) {
            status = live_once(device, &error);
            assert_ok(refit_device_close(device, NULL));
        }
        if (!failing_alloc_end()) {
            assert_int_equal(status, REFIT_OK);
            assert_true(nth > 10);
            break;
        }
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        assert_int_equal(error.status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_seal_returns_before_the_memory_is_there),
        cmocka_unit_test(the_first_offload_waits_and_later_ones_do_not),
        cmocka_unit_test(an_offload_waits_for_memory_on_its_way),
        TEST_WITH(there_is_nothing_to_prepare_on_the_pageable_path, .memory = RIG_HOOKS,
                  .settings = settings),
        TEST_WITH(without_background_all_is_ready_once_sealed, .memory = RIG_HOOKS),
        cmocka_unit_test(a_failure_is_returned_to_the_first_call_that_needs_the_memory),
        TEST_WITH(a_failure_that_lasts_is_returned_each_time, .memory = RIG_HOOKS,
                  .settings = settings),
        TEST_WITH(a_preferred_lock_that_fails_is_visible, .memory = RIG_HOOKS, .settings = settings,
                  .unsealed = true),
        TEST_WITH(a_thread_that_does_not_start_fails_the_seal, .memory = RIG_HOOKS,
                  .settings = background, .unsealed = true),
        cmocka_unit_test(a_close_ends_it_or_closes_nothing),
        cmocka_unit_test(a_close_at_any_moment_leaves_nothing),
        cmocka_unit_test(a_trim_gives_up_what_is_being_taken),
        cmocka_unit_test(a_new_plan_that_fits_keeps_what_is_being_taken),
        TEST_WITH(a_new_plan_that_does_not_fit_takes_its_place, .settings = background),
        TEST_WITH(a_seal_after_a_failure_tries_again, .memory = RIG_HOOKS, .settings = background,
                  .unsealed = true),
        cmocka_unit_test(a_fork_meanwhile_disturbs_nothing),
        cmocka_unit_test(the_machine_lock_is_held_while_memory_is_taken),
        TEST_WITH(a_seal_that_never_gets_the_lock_fails, .memory = RIG_HOOKS, .settings = settings,
                  .unsealed = true),
        TEST_WITH(a_wait_for_memory_says_that_it_waits_for_the_lock, .memory = RIG_HOOKS,
                  .settings = settings, .unsealed = true),
        cmocka_unit_test(an_estimate_does_not_count_its_own_image_as_used),
        cmocka_unit_test(every_failed_allocation_is_an_error_and_leaks_nothing),
    };
    return cmocka_run_group_tests_name("background", tests, NULL, NULL);
}
