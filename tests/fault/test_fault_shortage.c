/* Lasting shortages: device memory that another user has taken, a host budget, a limit on locked
 * memory, hooks that have no memory to give. Each is returned as an error, and is over when there
 * is more. */
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"

#define OTHER_USER 65534

/* ---- Device memory */

static void *take_all_but(whole *on, uint64_t left)
{
    void *memory = NULL;
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on->device, &info, &on->error));
    uint64_t bytes = (info.capacity_bytes - info.used_bytes - left) / 4096 * 4096;
    assert_ok(refit_memory_alloc(on->device, bytes, &memory, &on->error));
    return memory;
}

static refit_status clear(whole *on)
{
    return refit_controller_offload(on->controller, on->stream, &on->error);
}

static refit_status bring_back(whole *on)
{
    return refit_controller_restore(on->controller, on->stream, &on->error);
}

whole_test(memory_that_somebody_else_has_taken_delays_the_return)
{
    static const uint64_t left[] = {0, 40000, 100000, 380000, 390000};
    for (size_t i = 0; i < sizeof left / sizeof left[0]; i++) {
        whole on;
        whole_say("bytes left", left[i]);
        assert_ok(whole_open(&on, WHOLE_FRAMES, whole_patient));
        assert_ok(whole_step(&on));
        assert_ok(clear(&on));
        void *engine = take_all_but(&on, left[i]);
        for (int tries = 0; tries < 2; tries++) {
            refit_status status = bring_back(&on);
            assert_true(status == REFIT_ERR_DEVICE_MEMORY || status == REFIT_ERR_CALLBACK);
            whole_check_told(status, &on.error);
            assert_int_equal(refit_controller_get_state(on.controller), REFIT_CLEARED);
        }
        assert_ok(whole_publish(&on));
        assert_ok(refit_memory_free(on.device, engine, &on.error));
        assert_ok(bring_back(&on));
        whole_prove(&on);
        whole_close(&on);
    }
    whole_say(NULL, 0);
}

/* ---- Host memory */

whole_test(a_budget_that_is_too_small_is_told_with_its_numbers)
{
    static const char *const settings[] = {"offload.budget_bytes", "64KiB", NULL};
    whole on;
    ledger_open();
    assert_int_equal(whole_open(&on, WHOLE_FRAMES, settings), REFIT_ERR_BUDGET);
    assert_non_null(strstr(on.error.text, "65536"));
    ledger_check();
    assert_ok(whole_open(&on, WHOLE_FRAMES, whole_patient));
    whole_prove(&on);
    whole_close(&on);
}

/* What came of sealing one region of 1 MiB, in a process that must not assert. */
static refit_status seal_one(const char *pin, refit_stats *stats, refit_error *error)
{
    refit_device *device = NULL;
    refit_offloader *offloader = NULL;
    refit_region_desc region = {.size = sizeof region, .name = "r", .bytes = 1u << 20};
    refit_region_id id;
    refit_config config;
    refit_config_init(&config, sizeof config);
    RFT_TRY(refit_config_set(&config, "offload.pin", pin, error));
    RFT_TRY(refit_device_open("host", &config, &device, error));
    RFT_TRY(refit_memory_alloc(device, region.bytes, &region.memory, error));
    RFT_TRY(refit_offloader_open(device, &config, &offloader, error));
    RFT_TRY(refit_offloader_add(offloader, &region, &id, error));
    refit_status status = refit_offloader_seal(offloader, error);
    refit_stats_init(stats, sizeof *stats);
    RFT_TRY(refit_offloader_stats(offloader, stats, error));
    RFT_TRY(refit_offloader_close(offloader, error));
    RFT_TRY(refit_memory_free(device, region.memory, error));
    RFT_TRY(refit_device_close(device, error));
    return status;
}

#define CHILD_FINE    0
#define CHILD_SKIPPED 77

/* As an ordinary user that may lock 64 KiB. */
static int lock_little(void)
{
    refit_stats stats;
    refit_error error = {0};
    static char much[1 << 20];
    const struct rlimit little = {64 * 1024, 64 * 1024};
    if (setrlimit(RLIMIT_MEMLOCK, &little) != 0) return CHILD_SKIPPED;
    if (geteuid() == 0 && setuid(OTHER_USER) != 0) return CHILD_SKIPPED;
    if (mlock(much, sizeof much) == 0) return CHILD_SKIPPED; /* as under sanitizers */
    if (seal_one("require", &stats, &error) != REFIT_ERR_PIN) return 1;
    if (error.status != REFIT_ERR_PIN || strstr(error.text, "65536") == NULL) return 2;
    if (seal_one("prefer", &stats, &error) != REFIT_OK) return 3;
    if (stats.host_pinned_bytes != 0 || stats.host_pageable_bytes < 1u << 20) return 4;
    if (seal_one("off", &stats, &error) != REFIT_OK) return 5;
    return CHILD_FINE;
}

whole_test(locked_memory_that_is_not_allowed_is_told_or_done_without)
{
    int how;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(lock_little());
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    if (WEXITSTATUS(how) == CHILD_SKIPPED) skip();
    assert_int_equal(WEXITSTATUS(how), CHILD_FINE);
}

/* ---- Hooks */

whole_test(a_hook_that_fails_costs_one_refit)
{
    for (uint32_t call = 0; call < 4; call++) {
        whole on;
        whole_say("hooks", call);
        assert_ok(whole_open(&on, WHOLE_SHM, whole_patient));
        *(call < 2 ? &on.fail_release : &on.fail_acquire) = call % 2 + 1;
        assert_int_equal(whole_cycle(&on), REFIT_ERR_CALLBACK);
        whole_prove(&on);
        whole_close(&on);
    }
    whole_say(NULL, 0);
}

int main(void)
{
    return test_run("fault_shortage");
}
