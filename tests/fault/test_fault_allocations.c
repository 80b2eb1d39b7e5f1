/* Each allocation of a whole refit fails once: the call returns the failure or does without,
 * nothing leaks, no worker sees a torn version, and the next refit succeeds. */
#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"
#include "tests/support/failing_alloc.h"

#define MOST 5000u /* more allocations than a cycle can have */

/* The call that was refused memory says so; a call that waited for it reports a timeout or a
 * failure; and a hook of the caller returns only its number. */
static void check_status(refit_status status)
{
    bool known = status == REFIT_OK || status == REFIT_ERR_HOST_MEMORY ||
                 status == REFIT_ERR_PEER || status == REFIT_ERR_TIMEOUT ||
                 status == REFIT_ERR_CALLBACK;
    if (!known) fail_msg("a failed allocation was told as %s", refit_status_name(status));
}

/* True if the n-th allocation was made, and so failed. */
static bool fail_one(whole_path path, const char *const *settings, uint64_t nth)
{
    whole on;
    ledger_open();
    failing_alloc_begin(nth);
    refit_status status = whole_open(&on, path, settings);
    bool opened = status == REFIT_OK;
    if (opened) status = whole_cycle(&on);
    check_status(status);
    bool met = failing_alloc_stop();
    if (!opened) assert_ok(whole_open(&on, path, settings));
    whole_prove(&on);
    whole_close(&on);
    (void)failing_alloc_end();
    ledger_check();
    return met;
}

static void fail_each(whole_path path, const char *const *settings)
{
    uint64_t nth = 0;
    do {
        whole_say("allocations", ++nth);
    } while (nth < MOST && fail_one(path, settings, nth));
    whole_say(NULL, 0);
    assert_in_range(nth, 10, MOST - 1);
}

whole_test(an_allocation_that_fails_costs_at_most_one_refit_through_frames)
{
    (void)state;
    fail_each(WHOLE_FRAMES, NULL);
}

whole_test(an_allocation_that_fails_costs_at_most_one_refit_through_shared_memory)
{
    (void)state;
    fail_each(WHOLE_SHM, NULL);
}

whole_test(an_allocation_that_fails_costs_at_most_one_verified_refit_with_one_slot)
{
    static const char *const settings[] = {
        "offload.verify", "true", "broadcast.verify", "always", "broadcast.slots", "1", NULL};
    (void)state;
    fail_each(WHOLE_SHM, settings);
}

whole_test(an_allocation_that_fails_costs_at_most_one_pageable_refit)
{
    static const char *const settings[] = {"use_pinned_optimizer_offload", "false", NULL};
    (void)state;
    fail_each(WHOLE_FRAMES, settings);
}

whole_test(an_allocation_that_fails_costs_at_most_one_refit_with_memory_on_its_way)
{
    static const char *const settings[] = {"offload.background", "true", NULL};
    (void)state;
    fail_each(WHOLE_SHM, settings);
}

int main(void)
{
    return test_run("fault_allocations");
}
