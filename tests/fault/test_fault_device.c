/* Each call of the device in a whole refit fails once: the failure is returned or made up for, no
 * byte of a state is lost, no worker sees a torn version, and the next refit succeeds. Where the
 * device is lost, no worker sees a torn version, and all is closed. */
#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"

#define MOST 500u /* more calls of one slot than a cycle can have */

static const struct {
    const char *name;
    faulty_order order;
} faults[] = {
    {"memory_alloc", {FAULTY_MEMORY_ALLOC, .status = REFIT_ERR_DEVICE_MEMORY}},
    {"memory_free", {FAULTY_MEMORY_FREE, .status = REFIT_ERR_DEVICE}},
    {"reserve", {FAULTY_RESERVE, .status = REFIT_ERR_DEVICE_MEMORY}},
    {"commit", {FAULTY_COMMIT, .status = REFIT_ERR_DEVICE_MEMORY}},
    {"decommit", {FAULTY_DECOMMIT, .status = REFIT_ERR_DEVICE}},
    {"host_pin", {FAULTY_HOST_PIN, .status = REFIT_ERR_PIN}},
    {"stream_open", {FAULTY_STREAM_OPEN, .status = REFIT_ERR_DEVICE}},
    {"stream_close", {FAULTY_STREAM_CLOSE, .status = REFIT_ERR_DEVICE}},
    {"copy_batch", {FAULTY_COPY_BATCH, .status = REFIT_ERR_COPY}},
    {"half of a copy_batch", {FAULTY_COPY_BATCH, .status = REFIT_ERR_COPY, .kind = FAULTY_HALVES}},
    {"zero", {FAULTY_ZERO, .status = REFIT_ERR_COPY}},
    {"half of a zero", {FAULTY_ZERO, .status = REFIT_ERR_COPY, .kind = FAULTY_HALVES}},
    {"event_open", {FAULTY_EVENT_OPEN, .status = REFIT_ERR_DEVICE}},
    {"event_record", {FAULTY_EVENT_RECORD, .status = REFIT_ERR_DEVICE}},
    {"event_join", {FAULTY_EVENT_JOIN, .status = REFIT_ERR_DEVICE}},
    {"lost amid a copy", {FAULTY_COPY_BATCH, .status = REFIT_ERR_DEVICE, .kind = FAULTY_LOSES}},
};

/* What the device said; a hook of the caller has nothing but its number. */
static void check_status(refit_status status, refit_status fault)
{
    bool known = status == REFIT_OK || status == fault || status == REFIT_ERR_CALLBACK;
    if (!known) fail_msg("the fault was told as %s", refit_status_name(status));
}

/* True if the call was made, and so failed: while opening, in the cycle, or while closing. */
static bool fail_one(const char *const *settings, const faulty_order *order)
{
    whole on;
    ledger_open();
    refit_status status = whole_open_ordered(&on, WHOLE_SHM, settings, order);
    bool opened = status == REFIT_OK;
    if (opened) status = whole_cycle(&on);
    check_status(status, order->status);
    bool met = whole_order_met(&on);
    if (met && order->kind != FAULTY_LOSES) {
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
        faulty_order order = faults[i].order;
        order.nth = 1;
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

whole_test(failing_device_costs_at_most_one_background_refit)
{
    static const char *const settings[] = {"offload.background", "true", "offload.pin", "require",
                                           NULL};
    fail_each(settings);
}

int main(void)
{
    return test_run("fault_device");
}
