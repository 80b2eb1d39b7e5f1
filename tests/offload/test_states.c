/* Every verb in every state: its status, and the state that follows. */
#include "tests/offload/rig.h"

/* The calls, with arguments that are right. */

static refit_status look(rig *on)
{
    return refit_offloader_wait(on->offloader, 0, &on->error);
}

static refit_status bind_first(rig *on)
{
    return bind_region(on, 0, on->regions[0].memory);
}

static refit_status unbind_first(rig *on)
{
    return unbind_region(on, 0);
}

static refit_status hooks(rig *on)
{
    return refit_offloader_set_memory(on->offloader, NULL, &on->error);
}

static refit_status estimate(rig *on)
{
    uint64_t need, budget;
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

/* A fresh rig in a state; copies under way stand still. */
static rig *enter(refit_offloader_state wanted)
{
    static const char *const verified[] = {"offload.verify=true", NULL};
    rig *on = open_scene(&(opening){.unsealed = wanted == REFIT_OPEN,
                                    .settings = wanted == REFIT_FAILED ? verified : NULL});
    if (wanted == REFIT_OFFLOADED || wanted == REFIT_RESTORING) rig_offload(on);
    if (wanted == REFIT_OFFLOADING || wanted == REFIT_RESTORING) faulty_device_stop(on->device);
    if (wanted == REFIT_OFFLOADING) assert_ok(offload(on));
    if (wanted == REFIT_RESTORING) assert_ok(restore(on));
    if (wanted == REFIT_FAILED) rig_fail_offload(on);
    assert_int_equal(rig_state(on), wanted);
    return on;
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
    {"finish", look, {OK, OK, TIMEOUT, OK, TIMEOUT, REFIT_ERR_CORRUPT}, ALL_SAME},
    {"restore", restore, {STATE, OK, STATE, OK, OK, OK}, {SAME, SAME, SAME, -1, SAME, -1}},
    {"offload", offload, {STATE, OK, OK, OK, STATE, OK}, {SAME, -1, SAME, SAME, SAME, -1}},
    {"trim", trim, {OK, OK, STATE, STATE, STATE, OK}, ALL_SAME},
    {"clear", clear, {OK, STATE, STATE, STATE, STATE, STATE}, ALL_SAME},
    {"bind", bind_first, {OK, OK, STATE, OK, STATE, OK}, ALL_SAME},
    {"unbind", unbind_first, {STATE, STATE, STATE, OK, STATE, STATE}, ALL_SAME},
    {"hooks", hooks, {OK, OK, STATE, STATE, STATE, STATE}, ALL_SAME},
    {"read lock", try_read_lock, {STATE, STATE, STATE, OK, OK, STATE}, ALL_SAME},
    {"estimate", estimate, {OK, OK, OK, OK, OK, OK}, ALL_SAME},
    {"prepare", prepare, {STATE, OK, OK, OK, OK, OK}, ALL_SAME},
    {"accumulate", accumulate, {OK, OK, OK, OK, OK, OK}, ALL_SAME},
};

static void check_cell(const row *verb, refit_offloader_state from)
{
    rig *on = enter(from);
    refit_status status = verb->call(on);
    if (status != verb->answers[from]) {
        print_error("%s from %s: %s\n", verb->name, refit_offloader_state_name(from),
                    refit_status_name(status));
    }
    assert_int_equal(status, verb->answers[from]);
    if (status != REFIT_OK) assert_true(strlen(on->error.text) > 10);
    if (verb->follows[from] == SAME) assert_int_equal(rig_state(on), from);
    if (verb->follows[from] >= 0 && verb->follows[from] != SAME) {
        assert_int_equal(rig_state(on), verb->follows[from]);
    }
    close_scene(on); /* which works in every state */
}

TEST(every_verb_from_every_state)
{
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        for (int from = REFIT_OPEN; from <= REFIT_FAILED; from++)
            check_cell(&rows[i], (refit_offloader_state)from);
    }
}

SCENE(close_waits_for_copies_or_closes_nothing, 0)
{
    faulty_device_hang(on->device);
    assert_ok(offload(on));
    assert_hung(on, refit_offloader_close(on->offloader, &on->error));
    faulty_device_go(on->device);
    assert_ok(finish(on));
    rig_restore(on);
    rig_check_bytes(on, true);
}

/* One of its two streams is gone, the other is not: only closing it goes on. */
TEST(a_half_closed_offloader_can_only_be_closed)
{
    for (int away = 0; away < 2; away++) {
        rig *on = open_scene(&(opening){0});
        if (away) rig_offload(on);
        faulty_device_fail(on->device, FAULTY_STREAM_CLOSE, 2, REFIT_ERR_DEVICE);
        assert_int_equal(refit_offloader_close(on->offloader, &on->error), REFIT_ERR_DEVICE);
        assert_int_equal(away ? restore(on) : offload(on), REFIT_ERR_STATE);
        if (!away) assert_int_equal(prepare(on), REFIT_ERR_STATE);
        close_scene(on);
    }
}

TEST(nothing_is_done_to_no_offloader)
{
    rig none = {0};
    refit_offloader *offloader;
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        assert_invalid(rows[i].call(&none));
    assert_ok(refit_offloader_close(NULL, NULL));
    assert_int_equal(refit_offloader_get_state(NULL), REFIT_OPEN);
    assert_int_equal(refit_offloader_count(NULL), 0);
    assert_invalid(refit_offloader_open(NULL, NULL, &offloader, NULL));
}

TEST(states_have_names)
{
    static const char *const names[] = {[REFIT_OPEN] = "OPEN",
                                        [REFIT_RESIDENT] = "RESIDENT",
                                        [REFIT_OFFLOADING] = "OFFLOADING",
                                        [REFIT_OFFLOADED] = "OFFLOADED",
                                        [REFIT_RESTORING] = "RESTORING",
                                        [REFIT_FAILED] = "FAILED",
                                        "UNKNOWN"};
    for (size_t at = 0; at < COUNT_OF(names); at++)
        assert_string_equal(refit_offloader_state_name((refit_offloader_state)at), names[at]);
}

int main(void)
{
    return test_run("states");
}
