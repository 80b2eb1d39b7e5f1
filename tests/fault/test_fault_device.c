/* Each call of the device in a whole refit is refused or broken once: the failure is returned or
 * made up for, no byte of a state is lost, no worker sees a torn version, and the next refit
 * succeeds. */
#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"

#define MOST 500u /* more calls of one slot than a cycle can have */

typedef struct device_fault {
    const char *name;
    uint32_t first; /* the step's own copy is not the library's */
    whole_order order;
} device_fault;

static const device_fault faults[] = {
    {"memory_alloc", 1, {FAULTY_MEMORY_ALLOC, 0, REFIT_ERR_DEVICE_MEMORY, false}},
    {"memory_free", 1, {FAULTY_MEMORY_FREE, 0, REFIT_ERR_DEVICE, false}},
    {"reserve", 1, {FAULTY_RESERVE, 0, REFIT_ERR_DEVICE_MEMORY, false}},
    {"commit", 1, {FAULTY_COMMIT, 0, REFIT_ERR_DEVICE_MEMORY, false}},
    {"decommit", 1, {FAULTY_DECOMMIT, 0, REFIT_ERR_DEVICE, false}},
    {"host_pin", 1, {FAULTY_HOST_PIN, 0, REFIT_ERR_PIN, false}},
    {"stream_open", 1, {FAULTY_STREAM_OPEN, 0, REFIT_ERR_DEVICE, false}},
    {"stream_close", 1, {FAULTY_STREAM_CLOSE, 0, REFIT_ERR_DEVICE, false}},
    {"copy_batch", 1, {FAULTY_COPY_BATCH, 0, REFIT_ERR_COPY, false}},
    {"copy_batch later", 2, {FAULTY_COPY_BATCH, 0, REFIT_ERR_COPY, true}},
    {"zero", 1, {FAULTY_ZERO, 0, REFIT_ERR_COPY, false}},
    {"zero later", 1, {FAULTY_ZERO, 0, REFIT_ERR_COPY, true}},
    {"event_open", 1, {FAULTY_EVENT_OPEN, 0, REFIT_ERR_DEVICE, false}},
    {"event_record", 1, {FAULTY_EVENT_RECORD, 0, REFIT_ERR_DEVICE, false}},
    {"event_join", 1, {FAULTY_EVENT_JOIN, 0, REFIT_ERR_DEVICE, false}},
    {"event_wait", 1, {FAULTY_EVENT_WAIT, 0, REFIT_ERR_DEVICE, false}},
};

/* What the device said; a hook of the caller has nothing but its number. */
static void check_status(refit_status status, refit_status fault)
{
    bool known = status == REFIT_OK || status == fault || status == REFIT_ERR_CALLBACK;
    if (!known) fail_msg("the fault was told as %s", refit_status_name(status));
}

/* True if the call was made, and so failed: while opening, in the cycle, or while closing. */
static bool fail_one(const char *const *settings, const whole_order *order)
{
    whole on;
    ledger_open();
    refit_status status = whole_open_ordered(&on, WHOLE_SHM, settings, order);
    bool opened = status == REFIT_OK;
    if (opened) status = whole_cycle(&on);
    check_status(status, order->status);
    bool met = whole_order_met(&on);
    if (met) {
        if (!opened) assert_ok(whole_open(&on, WHOLE_SHM, settings));
        faulty_device_reset(on.device);
        whole_prove(&on);
    }
    whole_close(&on);
    ledger_check();
    return met || on.order_met;
}

static void fail_each(const char *const *settings)
{
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        whole_order order = faults[i].order;
        order.nth = faults[i].first;
        do {
            whole_say(faults[i].name, order.nth);
        } while (fail_one(settings, &order) && ++order.nth < MOST);
        assert_true(order.nth < MOST);
    }
    whole_say(NULL, 0);
}

whole_test(a_device_that_fails_costs_at_most_one_refit)
{
    fail_each(NULL);
}

whole_test(a_device_that_fails_costs_at_most_one_verified_refit)
{
    static const char *const settings[] = {"offload.verify", "true", "offload.pin", "require",
                                           NULL};
    fail_each(settings);
}

whole_test(a_device_that_fails_costs_at_most_one_pageable_refit)
{
    static const char *const settings[] = {"use_pinned_optimizer_offload", "false", NULL};
    fail_each(settings);
}

whole_test(a_device_that_fails_costs_at_most_one_refit_with_memory_on_its_way)
{
    static const char *const settings[] = {"offload.background", "true", "offload.pin", "require",
                                           NULL};
    fail_each(settings);
}

int main(void)
{
    return test_run("fault_device");
}
