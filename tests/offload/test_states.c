/* Every verb in every state: its status, and the state that follows. */
#include "tests/offload/rig.h"

#include <string.h>

static refit_status seal(rig *on)
{
    return refit_offloader_seal(on->offloader, &on->error);
}

static refit_status unseal(rig *on)
{
    return refit_offloader_unseal(on->offloader, &on->error);
}

static refit_status offload(rig *on)
{
    return refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
}

static refit_status restore(rig *on)
{
    return refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
}

static refit_status finish(rig *on)
{
    return refit_offloader_finish(on->offloader, 0, &on->error);
}

static refit_status trim(rig *on)
{
    return refit_offloader_trim(on->offloader, &on->error);
}

static refit_status clear(rig *on)
{
    return refit_offloader_clear(on->offloader, &on->error);
}

static refit_status bind(rig *on)
{
    return refit_offloader_bind(on->offloader, 0, on->regions[0].memory, &on->error);
}

static refit_status unbind(rig *on)
{
    return refit_offloader_unbind(on->offloader, 0, &on->error);
}

static refit_status hooks(rig *on)
{
    return refit_offloader_set_memory(on->offloader, NULL, &on->error);
}

static refit_status lease(rig *on)
{
    refit_lease *taken = NULL;
    refit_status status = refit_lease_acquire(on->offloader, &taken, &on->error);
    refit_lease_release(taken);
    return status;
}

static refit_status estimate(rig *on)
{
    uint64_t need;
    uint64_t budget;
    return refit_offloader_estimate(on->offloader, &need, &budget, &on->error);
}

static refit_status prepare(rig *on)
{
    return refit_offloader_prepare(on->offloader, 0, &on->error);
}

static refit_status accumulate(rig *on)
{
    return refit_offloader_set_accumulating(on->offloader, 0, &on->error);
}

/* Brings a fresh rig into a state; copies under way stand still. */
static void enter(rig *on, refit_offloader_state wanted)
{
    rig_open_unsealed(on, RIG_BOUND, NULL);
    if (wanted == REFIT_OPEN) return;
    assert_ok(seal(on));
    if (wanted == REFIT_OFFLOADING) faulty_device_stop(on->device);
    if (wanted == REFIT_OFFLOADING) assert_ok(offload(on));
    if (wanted == REFIT_OFFLOADED || wanted == REFIT_RESTORING) rig_offload(on);
    if (wanted == REFIT_RESTORING) faulty_device_stop(on->device);
    if (wanted == REFIT_RESTORING) assert_ok(restore(on));
    if (wanted == REFIT_FAILED) {
        faulty_device_fail_later(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        assert_ok(offload(on));
        assert_int_equal(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error),
                         REFIT_ERR_COPY);
    }
    assert_int_equal(rig_state(on), wanted);
}

#define SAME 99 /* the state stays; without copies standing still that can be said of it */

typedef struct row {
    const char *name;
    refit_status (*call)(rig *on);
    /* By state: OPEN, RESIDENT, OFFLOADING, OFFLOADED, RESTORING, FAILED. */
    refit_status answers[6];
    int follows[6];
} row;

#define OK      REFIT_OK
#define STATE   REFIT_ERR_STATE
#define TIMEOUT REFIT_ERR_TIMEOUT
#define ALL_SAME                                                                                   \
    {                                                                                              \
        SAME, SAME, SAME, SAME, SAME, SAME                                                         \
    }

static const row rows[] = {
    {"seal", seal, {OK, OK, OK, OK, OK, OK}, {REFIT_RESIDENT, SAME, SAME, SAME, SAME, SAME}},
    {"unseal",
     unseal,
     {STATE, OK, STATE, STATE, STATE, STATE},
     {SAME, REFIT_OPEN, SAME, SAME, SAME, SAME}},
    {"finish", finish, {OK, OK, TIMEOUT, OK, TIMEOUT, REFIT_ERR_COPY}, ALL_SAME},
    {"restore", restore, {STATE, OK, STATE, OK, OK, OK}, {SAME, SAME, SAME, -1, SAME, -1}},
    {"offload", offload, {STATE, OK, OK, OK, STATE, OK}, {SAME, -1, SAME, SAME, SAME, -1}},
    {"trim", trim, {OK, OK, STATE, STATE, STATE, OK}, ALL_SAME},
    {"clear", clear, {OK, STATE, STATE, STATE, STATE, STATE}, ALL_SAME},
    {"bind", bind, {OK, OK, STATE, OK, STATE, OK}, ALL_SAME},
    {"unbind", unbind, {STATE, STATE, STATE, OK, STATE, STATE}, ALL_SAME},
    {"hooks", hooks, {OK, OK, STATE, STATE, STATE, STATE}, ALL_SAME},
    {"lease", lease, {STATE, STATE, STATE, OK, OK, STATE}, ALL_SAME},
    {"estimate", estimate, {OK, OK, OK, OK, OK, OK}, ALL_SAME},
    {"prepare", prepare, {STATE, OK, OK, OK, OK, OK}, ALL_SAME},
    {"accumulate", accumulate, {OK, OK, OK, OK, OK, OK}, ALL_SAME},
};

static void check_cell(const row *verb, refit_offloader_state from)
{
    rig on;
    enter(&on, from);
    refit_status status = verb->call(&on);
    if (status != verb->answers[from]) {
        print_error("%s from %s: %s\n", verb->name, refit_offloader_state_name(from),
                    refit_status_name(status));
    }
    assert_int_equal(status, verb->answers[from]);
    if (status != REFIT_OK) assert_true(strlen(on.error.text) > 10);
    if (verb->follows[from] == SAME) assert_int_equal(rig_state(&on), from);
    if (verb->follows[from] >= 0 && verb->follows[from] != SAME) {
        assert_int_equal(rig_state(&on), verb->follows[from]);
    }
    rig_close(&on);
}

static void every_verb_from_every_state(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (int from = REFIT_OPEN; from <= REFIT_FAILED; from++) {
            check_cell(&rows[i], (refit_offloader_state)from);
        }
    }
}

static void close_works_in_every_state(void **state)
{
    (void)state;
    for (int from = REFIT_OPEN; from <= REFIT_FAILED; from++) {
        rig on;
        enter(&on, (refit_offloader_state)from);
        rig_close(&on);
    }
}

static void close_waits_for_copies_or_closes_nothing(void **state)
{
    (void)state;
    rig on;
    const char *const settings[] = {"offload.timeout_ms=1s", NULL};
    rig_open(&on, RIG_BOUND, settings);
    faulty_device_stop(on.device);
    assert_ok(offload(&on));
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_TIMEOUT);
    faulty_device_go(on.device);
    assert_ok(refit_offloader_finish(on.offloader, PATIENCE_MS, &on.error));
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

/* One of its two streams is gone, the other is not: only closing it goes on. */
static void a_half_closed_offloader_can_only_be_closed(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    faulty_device_fail(on.device, FAULTY_STREAM_CLOSE, 2, REFIT_ERR_DEVICE);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_DEVICE);
    assert_int_equal(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_STATE);
    assert_int_equal(refit_offloader_prepare(on.offloader, 0, &on.error), REFIT_ERR_STATE);
    rig_close(&on);

    rig_open(&on, RIG_BOUND, NULL);
    rig_offload(&on);
    faulty_device_fail(on.device, FAULTY_STREAM_CLOSE, 2, REFIT_ERR_DEVICE);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_DEVICE);
    assert_int_equal(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error),
                     REFIT_ERR_STATE);
    rig_close(&on);
}

static void nothing_is_done_to_no_offloader(void **state)
{
    (void)state;
    rig none = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_int_equal(rows[i].call(&none), REFIT_ERR_INVALID);
    }
    assert_int_equal(refit_offloader_close(NULL, NULL), REFIT_OK);
    assert_int_equal(refit_offloader_get_state(NULL), REFIT_OPEN);
    assert_int_equal(refit_offloader_count(NULL), 0);
    refit_offloader *offloader;
    assert_int_equal(refit_offloader_open(NULL, NULL, &offloader, NULL), REFIT_ERR_INVALID);
}

static void states_have_names(void **state)
{
    (void)state;
    assert_string_equal(refit_offloader_state_name(REFIT_OPEN), "OPEN");
    assert_string_equal(refit_offloader_state_name(REFIT_RESIDENT), "RESIDENT");
    assert_string_equal(refit_offloader_state_name(REFIT_OFFLOADING), "OFFLOADING");
    assert_string_equal(refit_offloader_state_name(REFIT_OFFLOADED), "OFFLOADED");
    assert_string_equal(refit_offloader_state_name(REFIT_RESTORING), "RESTORING");
    assert_string_equal(refit_offloader_state_name(REFIT_FAILED), "FAILED");
    assert_string_equal(refit_offloader_state_name((refit_offloader_state)77), "UNKNOWN");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_verb_from_every_state),
        cmocka_unit_test(close_works_in_every_state),
        cmocka_unit_test(close_waits_for_copies_or_closes_nothing),
        cmocka_unit_test(a_half_closed_offloader_can_only_be_closed),
        cmocka_unit_test(nothing_is_done_to_no_offloader),
        cmocka_unit_test(states_have_names),
    };
    return cmocka_run_group_tests_name("states", tests, NULL, NULL);
}
