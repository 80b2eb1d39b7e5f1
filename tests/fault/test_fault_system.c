/* Each system call of a whole refit is refused once (memory, descriptors, threads, shared memory,
 * locking): the failure is returned or made up for, and the next refit succeeds. */
#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"

#include <string.h>

#define MOST 1000u /* more calls than a cycle can have */

static void check_status(refit_status status)
{
    switch (status) {
    case REFIT_OK:
    case REFIT_ERR_BUSY: /* a lock that is refused is taken for a held one */
    case REFIT_ERR_HOST_MEMORY:
    case REFIT_ERR_DEVICE_MEMORY:
    case REFIT_ERR_DEVICE:
    case REFIT_ERR_PIN:
    case REFIT_ERR_SYSTEM:
    case REFIT_ERR_CALLBACK:
    case REFIT_ERR_PEER:
    case REFIT_ERR_TIMEOUT: return;
    default: fail_msg("%s was told as %s", ledger_refused(), refit_status_name(status));
    }
}

/* True if there was an n-th call. */
static bool refuse_one(whole_path path, const char *const *settings, uint64_t nth)
{
    whole on;
    ledger_open();
    ledger_refuse(nth);
    refit_status status = whole_open(&on, path, settings);
    bool opened = status == REFIT_OK;
    if (opened) status = whole_cycle(&on);
    check_status(status);
    bool met = ledger_stop();
    if (!opened) assert_ok(whole_open(&on, path, settings));
    whole_prove(&on);
    whole_close(&on);
    ledger_check();
    return met;
}

static void refuse_each(whole_path path, const char *const *settings)
{
    uint64_t nth = 0;
    do {
        whole_say("system calls", ++nth);
    } while (refuse_one(path, settings, nth) && nth < MOST);
    whole_say(NULL, 0);
    assert_in_range(nth, 10, MOST - 1);
}

whole_test(a_refusal_costs_at_most_one_refit_through_frames)
{
    (void)state;
    refuse_each(WHOLE_FRAMES, NULL);
}

whole_test(a_refusal_costs_at_most_one_refit_through_shared_memory)
{
    (void)state;
    refuse_each(WHOLE_SHM, NULL);
}

whole_test(a_refusal_costs_at_most_one_refit_where_all_is_required)
{
    static const char *const settings[] = {"broadcast.shm",   "require", "offload.pin", "require",
                                           "broadcast.slots", "1",       NULL};
    (void)state;
    refuse_each(WHOLE_SHM, settings);
}

whole_test(a_refusal_costs_at_most_one_pageable_refit)
{
    static const char *const settings[] = {"use_pinned_optimizer_offload", "false", NULL};
    (void)state;
    refuse_each(WHOLE_FRAMES, settings);
}

whole_test(a_refusal_costs_at_most_one_refit_with_memory_on_its_way)
{
    static const char *const settings[] = {"offload.background", "true", "offload.pin", "require",
                                           NULL};
    (void)state;
    refuse_each(WHOLE_SHM, settings);
}

int main(void)
{
    return test_run("fault_system");
}
