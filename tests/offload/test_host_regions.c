/*
 * Regions that live on the host, at the edges of their life: host memory that is still coming or
 * does not come, digests of what never left, leases beside a step that begins, a second seal.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <refit.h>

#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define REGIONS     3
#define BYTES       70000u /* of each; the image has a slab for each */
#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

typedef struct scene {
    refit_device *device;
    refit_device *plain; /* the one in it, for the test's own copies */
    refit_config config;
    refit_offloader *offloader;
    refit_window *window;
    void *memory[REGIONS]; /* of regions that were bound */
    void *weights;
    unsigned char expected[REGIONS][BYTES];
    refit_window_part parts[REGIONS];
    refit_error error;
} scene;

static void set(scene *on, const char *key, const char *value)
{
    assert_ok(refit_config_set(&on->config, key, value, &on->error));
}

static void open_device(scene *on)
{
    memset(on, 0, sizeof *on);
    refit_config_init(&on->config, sizeof on->config);
    set(on, "offload.slab_bytes", "64KiB");
    set(on, "offload.timeout_ms", "20s");
    set(on, "offload.take_turns", "false");
    set(on, "offload.pin", "require");
    set(on, "offload.window_bytes", "128KiB");
    set(on, "offload.windows", "2");
    assert_ok(faulty_device_open(test_device_spec("host"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
}

static refit_status add_region(scene *on, uint32_t at, const uint16_t *weights)
{
    static const char *const names[REGIONS] = {"state.0", "state.1", "state.2"};
    refit_region_desc desc = {.size = sizeof desc,
                              .name = names[at],
                              .bytes = BYTES,
                              .group = at,
                              .home = REFIT_HOME_HOST,
                              .weights = weights};
    refit_region_id id;
    return refit_offloader_add(on->offloader, &desc, &id, &on->error);
}

static void open_offloader(scene *on)
{
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(add_region(on, at, NULL));
        on->parts[at] =
            (refit_window_part){.size = sizeof on->parts[0], .region = at, .bytes = BYTES};
    }
}

static void seal(scene *on)
{
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
}

static void open_scene(scene *on)
{
    open_device(on);
    open_offloader(on);
    seal(on);
}

static void close_scene(scene *on)
{
    faulty_device_let_pins(on->device);
    faulty_device_go(on->device);
    faulty_device_reset(on->device);
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_memory_free(on->device, on->memory[at], &on->error));
    }
    assert_ok(refit_memory_free(on->device, on->weights, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

static void fill(scene *on)
{
    uint64_t seed = 88172645463325252u;
    for (uint32_t at = 0; at < REGIONS; at++) {
        void *bytes;
        uint64_t count;
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        for (uint64_t i = 0; i < count; i++) {
            on->expected[at][i] = (unsigned char)seeded_next(&seed);
        }
        memcpy(bytes, on->expected[at], count);
    }
}

/* Device memory for all regions, filled with what is none of their bytes. */
static void bind(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        if (on->memory[at] == NULL) {
            assert_ok(refit_memory_alloc(on->device, BYTES, &on->memory[at], &on->error));
        }
        test_fill(on->plain, on->memory[at], 0x77, BYTES);
        assert_ok(refit_offloader_bind(on->offloader, at, on->memory[at], &on->error));
    }
}

static refit_status restore(scene *on)
{
    refit_status status =
        refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
    return status != REFIT_OK ? status
                              : refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
}

static refit_status offload(scene *on)
{
    refit_status status =
        refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
    return status != REFIT_OK ? status
                              : refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
}

static void check_device(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_device_equal(on->plain, on->memory[at], on->expected[at], BYTES);
    }
}

static void check_image(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        void *bytes;
        uint64_t count;
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        assert_memory_equal(bytes, on->expected[at], count);
    }
}

static refit_status begin(scene *on)
{
    return refit_window_begin(on->window, on->parts, REGIONS, REFIT_STREAM_NONE, &on->error);
}

/* ---- Where they are ----------------------------------------------------------------------------
 */

/* Zeros that no step has changed come to the device, and are found to be right. */
static void what_was_never_stepped_is_restored_verified(void **state)
{
    (void)state;
    scene on;
    open_device(&on);
    set(&on, "offload.verify", "true");
    open_offloader(&on);
    seal(&on);
    bind(&on);
    assert_ok(restore(&on));
    check_device(&on);
    close_scene(&on);
}

/* Some groups have returned when a restore fails, and leave again; the others stayed. All of them
 * still pass the digests. */
static void what_stayed_behind_a_failed_restore_is_restored_verified(void **state)
{
    (void)state;
    scene on;
    open_device(&on);
    set(&on, "offload.verify", "true");
    open_offloader(&on);
    seal(&on);
    fill(&on);
    bind(&on);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
    assert_int_equal(restore(&on), REFIT_ERR_COPY);
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_FAILED);
    assert_ok(offload(&on));
    bind(&on);
    assert_ok(restore(&on));
    check_device(&on);
    close_scene(&on);
}

static void a_second_seal_leaves_them_where_they_are(void **state)
{
    (void)state;
    scene on;
    open_scene(&on);
    fill(&on);
    bind(&on);
    assert_ok(restore(&on));
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_RESIDENT);
    assert_int_equal(begin(&on), REFIT_ERR_STATE); /* the image has none of their bytes */
    assert_ok(offload(&on));
    check_image(&on);
    close_scene(&on);
}

/* One that is new begins in the image, where those before it are not. */
static void regions_in_two_places_are_not_sealed(void **state)
{
    (void)state;
    scene on;
    open_device(&on);
    assert_ok(refit_offloader_open(on.device, &on.config, &on.offloader, &on.error));
    assert_ok(add_region(&on, 0, NULL));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_ok(refit_memory_alloc(on.device, BYTES, &on.memory[0], &on.error));
    assert_ok(refit_offloader_bind(on.offloader, 0, on.memory[0], &on.error));
    assert_ok(restore(&on));
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(add_region(&on, 1, NULL));
    assert_int_equal(refit_offloader_seal(on.offloader, &on.error), REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "state.1"));
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_OPEN);
    assert_ok(refit_offloader_clear(on.offloader, &on.error));
    assert_ok(add_region(&on, 0, NULL));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_OFFLOADED);
    close_scene(&on);
}

static void a_pageable_offloader_refuses_them(void **state)
{
    (void)state;
    scene on;
    open_device(&on);
    set(&on, "use_pinned_optimizer_offload", "false");
    set(&on, "offload.pin", "auto");
    open_offloader(&on);
    assert_int_equal(refit_offloader_seal(on.offloader, &on.error), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_OPEN);
    close_scene(&on);
}

/* Their whole bytes lie in the image, also where weights were named and memory bound before. */
static void masters_on_the_host_are_whole_if_wanted(void **state)
{
    (void)state;
    scene on;
    open_device(&on);
    set(&on, "offload.masters", "whole");
    assert_ok(refit_memory_alloc(on.device, BYTES / 2, &on.weights, &on.error));
    assert_ok(refit_offloader_open(on.device, &on.config, &on.offloader, &on.error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(add_region(&on, at, at == 1 ? on.weights : NULL));
    }
    bind(&on);
    seal(&on);
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(on.offloader, 1, &info, &on.error));
    assert_int_equal(info.host_bytes, BYTES);
    fill(&on);
    check_image(&on);
    assert_ok(restore(&on));
    check_device(&on);
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_ok(refit_offloader_region(on.offloader, 1, &info, &on.error));
    assert_int_equal(info.host_bytes, BYTES);
    assert_ok(offload(&on));
    check_image(&on);
    close_scene(&on);
}

/* ---- Host memory that is still coming ----------------------------------------------------------
 */

static void open_waiting(scene *on)
{
    open_device(on);
    set(on, "offload.background", "true");
    open_offloader(on);
    faulty_device_hold_pins(on->device, 1);
    seal(on);
    faulty_device_await_pin(on->device);
}

static void stand_still(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
}

static void *let_pins_soon(void *device)
{
    stand_still();
    faulty_device_let_pins(device);
    return NULL;
}

static void a_restore_waits_for_the_host_memory(void **state)
{
    (void)state;
    scene on;
    pthread_t thread;
    open_waiting(&on);
    bind(&on);
    assert_int_equal(pthread_create(&thread, NULL, let_pins_soon, on.device), 0);
    assert_ok(restore(&on));
    assert_ok(refit_offloader_prepare(on.offloader, 0, &on.error)); /* it is there by now */
    check_device(&on);                                              /* zeros */
    assert_int_equal(pthread_join(thread, NULL), 0);
    close_scene(&on);
}

static void a_lease_needs_the_host_memory(void **state)
{
    (void)state;
    scene on;
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    open_waiting(&on);
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_BUSY);
    faulty_device_let_pins(on.device);
    assert_ok(refit_offloader_prepare(on.offloader, PATIENCE_MS, &on.error));
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_ok(refit_lease_read(lease, 1, &bytes, &count, &on.error));
    assert_memory_equal(bytes, on.expected[1], count);
    refit_lease_release(lease);
    close_scene(&on);
}

/* Each call that needs the memory says that it did not come, and the next one tries again. */
static void host_memory_that_fails_is_taken_by_the_next_call(void **state)
{
    (void)state;
    scene on;
    refit_lease *lease;
    open_device(&on);
    set(&on, "offload.background", "true");
    open_offloader(&on);
    faulty_device_fail_times(on.device, FAULTY_HOST_PIN, 1, FAULTY_ALWAYS, REFIT_ERR_PIN);
    seal(&on);
    bind(&on);
    assert_int_equal(refit_offloader_prepare(on.offloader, PATIENCE_MS, &on.error), REFIT_ERR_PIN);
    assert_int_equal(refit_lease_acquire(on.offloader, &lease, &on.error), REFIT_ERR_BUSY);
    assert_int_equal(begin(&on), REFIT_ERR_PIN);
    assert_int_equal(restore(&on), REFIT_ERR_PIN);
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_OFFLOADED);
    faulty_device_reset(on.device);
    assert_ok(restore(&on));
    check_device(&on);
    close_scene(&on);
}

/* ---- Leases and a step that begins -------------------------------------------------------------
 */

typedef struct step_call {
    scene *on;
    refit_status status;
} step_call;

static void *begin_elsewhere(void *call)
{
    step_call *step = call;
    step->status = begin(step->on);
    return NULL;
}

/* While a step begins, which may take as long as host memory does, no lease does. */
static void no_lease_slips_into_a_step_that_begins(void **state)
{
    (void)state;
    scene on;
    pthread_t thread;
    refit_lease *lease = NULL;
    refit_error error;
    open_waiting(&on);
    step_call step = {.on = &on};
    assert_int_equal(pthread_create(&thread, NULL, begin_elsewhere, &step), 0);
    stand_still(); /* it waits for the host memory now */
    refit_status leased = refit_lease_acquire(on.offloader, &lease, &error);
    faulty_device_let_pins(on.device);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(step.status);
    assert_int_equal(leased, REFIT_ERR_BUSY);
    assert_ok(refit_window_end(on.window, &on.error));
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    refit_lease_release(lease);
    close_scene(&on);
}

/* A step that could not begin is none. */
static void a_begin_that_fails_lets_leases_and_restores_go_on(void **state)
{
    (void)state;
    scene on;
    refit_lease *lease;
    open_scene(&on);
    fill(&on);
    on.parts[2].bytes = BYTES + 1;
    assert_int_equal(begin(&on), REFIT_ERR_INVALID);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    refit_lease_release(lease);
    bind(&on);
    assert_ok(restore(&on));
    check_device(&on);
    close_scene(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_never_stepped_is_restored_verified),
        cmocka_unit_test(what_stayed_behind_a_failed_restore_is_restored_verified),
        cmocka_unit_test(a_second_seal_leaves_them_where_they_are),
        cmocka_unit_test(regions_in_two_places_are_not_sealed),
        cmocka_unit_test(a_pageable_offloader_refuses_them),
        cmocka_unit_test(masters_on_the_host_are_whole_if_wanted),
        cmocka_unit_test(a_restore_waits_for_the_host_memory),
        cmocka_unit_test(a_lease_needs_the_host_memory),
        cmocka_unit_test(host_memory_that_fails_is_taken_by_the_next_call),
        cmocka_unit_test(no_lease_slips_into_a_step_that_begins),
        cmocka_unit_test(a_begin_that_fails_lets_leases_and_restores_go_on),
    };
    return cmocka_run_group_tests_name("host_regions", tests, NULL, NULL);
}
