/* Each message of a whole refit meets each fault once (refused, lost, damaged, no memory): the
 * fault is made up for or returned within the deadlines, no worker sees a torn version, and the
 * next refit succeeds. */
#include <string.h>

#include "net/channel.h"
#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"
#include "tests/fault/wire_fault.h"
#include "tests/support/quick_config.h"

#define MOST 1000u /* more messages than a cycle can have */

static void check_status(refit_status status)
{
    bool known = status == REFIT_OK || status == REFIT_ERR_PEER || status == REFIT_ERR_TIMEOUT;
    if (!known) fail_msg("a fault of the wire was told as %s", refit_status_name(status));
}

/* True if there was an n-th message. */
static bool fail_one(whole_path path, wire_fault fault, uint64_t nth)
{
    whole on;
    ledger_open();
    wire_fail(fault, nth);
    assert_ok(whole_open(&on, path, NULL));
    check_status(whole_cycle(&on));
    bool met = wire_stop();
    whole_prove(&on);
    whole_close(&on);
    ledger_check();
    return met;
}

static void fail_each(whole_path path, wire_fault fault)
{
    uint64_t nth = 0;
    do {
        whole_say(wire_fault_name(fault), ++nth);
    } while (fail_one(path, fault, nth) && nth < MOST);
    whole_say(NULL, 0);
    assert_in_range(nth, 5, MOST - 1);
}

static void each_costs_at_most_one_refit(void **state)
{
    const wire_fault *fault = *state;
    fail_each(WHOLE_FRAMES, *fault);
    if (*fault != WIRE_UNHEARD) fail_each(WHOLE_SHM, *fault);
}

static void a_frame_that_is_damaged_costs_no_refit(void **state)
{
    for (uint64_t nth = 1; nth <= 6; nth++) {
        whole on;
        whole_say(wire_fault_name(WIRE_DAMAGED), nth);
        wire_fail(WIRE_DAMAGED, nth);
        assert_ok(whole_open(&on, WHOLE_FRAMES, whole_patient));
        assert_ok(whole_cycle(&on));
        assert_true(wire_stop());
        refit_stats stats;
        refit_stats_init(&stats, sizeof stats);
        assert_ok(refit_subscriber_stats(on.worker.subscriber, &stats, &on.error));
        assert_int_equal(stats.receive_bad_frames, 1);
        whole_prove(&on);
        whole_close(&on);
    }
    whole_say(NULL, 0);
}

/* Waits for one message, which fails the test if it is not `text` alone. */
static rft_peer_id expect(rft_channel *channel, const char *text)
{
    rft_envelope envelope;
    refit_status status = REFIT_ERR_TIMEOUT;
    for (int tries = 0; status == REFIT_ERR_TIMEOUT && tries < 10; tries++) {
        rft_channel_poll(channel, -1, LONG_MS / 10);
        status = rft_channel_receive(channel, &envelope, NULL);
    }
    assert_ok(status);
    assert_int_equal(envelope.message.count, strlen(text));
    assert_memory_equal(envelope.message.data, text, strlen(text));
    return envelope.from;
}

static rft_channel *join(rft_channel *trainer, const refit_config *config, rft_peer_id *id)
{
    rft_channel *worker;
    assert_ok(rft_channel_connect(rft_channel_endpoint(trainer), config, &worker, NULL));
    refit_status status = REFIT_ERR_BUSY;
    for (int tries = 0; status == REFIT_ERR_BUSY && tries < 1000; tries++) {
        rft_channel_poll(worker, -1, 10); /* until it is connected, its queue is full */
        status = rft_channel_send(worker, NULL, rft_view_text("here"), NULL, NULL);
    }
    assert_ok(status);
    *id = expect(trainer, "here");
    return worker;
}

static void a_message_that_cannot_be_made_leaves_the_next_one_whole(void **state)
{
    rft_channel *trainer, *workers[2];
    rft_peer_id ids[2];
    refit_config config = quick_config();
    assert_ok(rft_channel_bind("tcp://127.0.0.1:0", &config, &trainer, NULL));
    for (int i = 0; i < 2; i++) {
        workers[i] = join(trainer, &config, &ids[i]);
    }
    for (uint64_t part = 1; part <= 2; part++) {
        wire_fail(WIRE_NO_MEMORY, part);
        assert_int_equal(rft_channel_send(trainer, &ids[0], rft_view_text("first"), NULL, NULL),
                         REFIT_ERR_HOST_MEMORY);
        assert_true(wire_stop());
        assert_ok(rft_channel_send(trainer, &ids[1], rft_view_text("second"), NULL, NULL));
        (void)expect(workers[1], "second");
    }
    assert_ok(rft_channel_send(trainer, &ids[0], rft_view_text("third"), NULL, NULL));
    (void)expect(workers[0], "third");
    for (int i = 0; i < 2; i++) {
        rft_channel_close(workers[i]);
    }
    rft_channel_close(trainer);
}

#define EACH(name, fault)                                                                          \
    {                                                                                              \
        name, each_costs_at_most_one_refit, NULL, whole_tell, fault                                \
    }

int main(void)
{
    static wire_fault full = WIRE_FULL, gone = WIRE_GONE, no_memory = WIRE_NO_MEMORY,
                      lost = WIRE_LOST, unheard = WIRE_UNHEARD;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_message_that_cannot_be_made_leaves_the_next_one_whole,
                                  whole_tell),
        EACH("a full queue costs at most one refit", &full),
        EACH("a connection that is gone costs at most one refit", &gone),
        EACH("a message without memory costs at most one refit", &no_memory),
        EACH("a message that is lost costs at most one refit", &lost),
        EACH("a message that is not heard costs at most one refit", &unheard),
        cmocka_unit_test_teardown(a_frame_that_is_damaged_costs_no_refit, whole_tell),
    };
    return cmocka_run_group_tests_name("fault_wire", tests, NULL, NULL);
}
