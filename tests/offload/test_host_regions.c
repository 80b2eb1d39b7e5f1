/*
 * Regions that live on the host, at the edges of their life: host memory that is still coming or
 * does not come, digests of what never left, read locks while a step begins, a second seal.
 */
#include "tests/offload/windows.h"

#include "base/clock.h"
#include "base/thread.h"
#include "offload/offloader.h"

static const char *const verified[] = {"offload.verify=true", NULL};
static const char *const background[] = {"offload.background=true", NULL};
static const char *const pageable[] = {"use_pinned_optimizer_offload=false", "offload.pin=auto",
                                       NULL};

static refit_offloader_state state_of(scene *on)
{
    return refit_offloader_get_state(on->offloader);
}

static refit_status restore(scene *on)
{
    return restore_all(on->offloader, &on->error);
}

/* ---- Where they are -------------------------------------------------------------------------- */

/* Zeros that no step has changed come to the device, and are found to be right. */
SCENE(what_was_never_stepped_is_restored_verified, .kind = THREE, .empty = true,
      .settings = verified)
{
    bind_all(on);
    assert_ok(restore(on));
    check_device(on);
}

SCENE(a_second_seal_leaves_them_where_they_are, .kind = THREE, .windows = "2")
{
    bind_all(on);
    assert_ok(restore(on));
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_int_equal(state_of(on), REFIT_RESIDENT);
    assert_int_equal(begin(on), REFIT_ERR_STATE); /* the image has none of their bytes */
    assert_ok(offload_all(on->offloader, &on->error));
    check_image(on);
}

/* One that is new begins in the image, where those before it are not. */
SCENE(regions_in_two_places_are_not_sealed, .kind = THREE, .windows = "2")
{
    refit_region_id id;
    refit_region_desc desc = {
        .size = sizeof desc, .name = "new", .bytes = 512, .placement = REFIT_PLACEMENT_HOST};
    bind_all(on);
    assert_ok(restore(on));
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
    assert_int_equal(refit_offloader_seal(on->offloader, &on->error), REFIT_ERR_STATE);
    assert_says(&on->error, "new");
    assert_int_equal(state_of(on), REFIT_OPEN);
    assert_ok(refit_offloader_clear(on->offloader, &on->error));
    assert_ok(add_regions(on));
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_int_equal(state_of(on), REFIT_OFFLOADED);
}

SCENE(a_pageable_offloader_refuses_them, .kind = THREE, .unsealed = true, .settings = pageable)
{
    assert_int_equal(refit_offloader_seal(on->offloader, &on->error), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(state_of(on), REFIT_OPEN);
}

/* ---- Host memory that is still coming -------------------------------------------------------- */

static void seal_waiting(scene *on)
{
    faulty_device_hold_pins(on->device, 1);
    seal(on);
    faulty_device_await_pin(on->device);
}

SCENE(a_restore_waits_for_the_host_memory, .kind = THREE, .unsealed = true, .settings = background)
{
    seal_waiting(on);
    bind_all(on);
    on->offloader->config.offload_timeout_ms = 20;
    assert_int_equal(restore(on), REFIT_ERR_TIMEOUT);
    on->offloader->config.offload_timeout_ms = TIMEOUT_MS;
    assert_int_equal(state_of(on), REFIT_OFFLOADED);
    faulty_device_let_pins(on->device);
    assert_ok(restore(on));
    assert_ok(refit_offloader_prepare(on->offloader, 0, &on->error)); /* it is there by now */
    check_device(on);                                                 /* zeros */
}

SCENE(a_read_lock_needs_the_host_memory, .kind = THREE, .unsealed = true, .settings = background)
{
    seal_waiting(on);
    assert_int_equal(try_read_lock(on), REFIT_ERR_BUSY);
    faulty_device_let_pins(on->device);
    assert_ok(refit_offloader_prepare(on->offloader, TIMEOUT_MS, &on->error));
    check_image(on);
}

/* Each call that needs the memory says that it did not come, and the next one tries again. */
SCENE(host_memory_that_fails_is_taken_by_the_next_call, .kind = THREE, .unsealed = true,
      .settings = background)
{
    faulty_device_fail_times(on->device, FAULTY_HOST_PIN, 1, FAULTY_ALWAYS, REFIT_ERR_PIN);
    seal(on);
    bind_all(on);
    list_all(on, 0);
    assert_int_equal(refit_offloader_prepare(on->offloader, TIMEOUT_MS, &on->error), REFIT_ERR_PIN);
    assert_int_equal(try_read_lock(on), REFIT_ERR_BUSY);
    assert_int_equal(begin(on), REFIT_ERR_PIN);
    assert_int_equal(restore(on), REFIT_ERR_PIN);
    assert_int_equal(state_of(on), REFIT_OFFLOADED);
    faulty_device_reset(on->device);
    assert_ok(restore(on));
    check_device(on);
}

/* ---- Read locks and a step that begins
 * ----------------------------------------------------------- */

typedef struct step_call {
    scene *on;
    refit_error error;
    refit_status status;
} step_call;

static void *begin_elsewhere(void *user)
{
    step_call *call = user;
    scene *on = call->on;
    call->status =
        refit_window_begin(on->window, on->parts, on->count, REFIT_STREAM_NONE, &call->error);
    return NULL;
}

/* While a step begins, which may take as long as host memory does, no read lock does. */
SCENE(no_read_lock_slips_into_a_step_that_begins, .kind = THREE, .unsealed = true,
      .settings = background)
{
    rft_thread thread;
    seal_waiting(on);
    list_all(on, 0);
    step_call call = {.on = on};
    assert_ok(rft_thread_start(&thread, "step", begin_elsewhere, &call, &on->error));
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    do { /* until it is the step that a read lock would disturb */
        assert_int_equal(try_read_lock(on), REFIT_ERR_BUSY);
    } while (strstr(on->error.text, "a step changes") == NULL && rft_now() < deadline);
    assert_says(&on->error, "a step changes");
    faulty_device_let_pins(on->device);
    rft_thread_join(thread);
    assert_ok(call.status);
    assert_ok(end(on));
    assert_ok(try_read_lock(on));
}

/* A step that could not begin is none. */
SCENE(a_begin_that_fails_lets_read_locks_and_restores_go_on, .kind = THREE, .windows = "2")
{
    on->parts[2].bytes++;
    assert_invalid(begin(on));
    assert_ok(try_read_lock(on));
    bind_all(on);
    assert_ok(restore(on));
    check_device(on);
}

int main(void)
{
    return test_run("host_regions");
}
