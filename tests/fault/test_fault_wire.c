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

whole_test(a_full_queue_costs_at_most_one_refit)
{
    (void)state;
    fail_each(WHOLE_FRAMES, WIRE_FULL);
    fail_each(WHOLE_SHM, WIRE_FULL);
}

whole_test(a_connection_that_is_gone_costs_at_most_one_refit)
{
    (void)state;
    fail_each(WHOLE_FRAMES, WIRE_GONE);
    fail_each(WHOLE_SHM, WIRE_GONE);
}

whole_test(a_message_without_memory_costs_at_most_one_refit)
{
    (void)state;
    fail_each(WHOLE_FRAMES, WIRE_NO_MEMORY);
    fail_each(WHOLE_SHM, WIRE_NO_MEMORY);
}

whole_test(a_message_that_is_lost_costs_at_most_one_refit)
{
    (void)state;
    fail_each(WHOLE_FRAMES, WIRE_LOST);
    fail_each(WHOLE_SHM, WIRE_LOST);
}

whole_test(a_message_that_is_not_heard_costs_at_most_one_refit)
{
    (void)state;
    fail_each(WHOLE_FRAMES, WIRE_UNHEARD);
}

whole_test(a_frame_that_is_damaged_costs_no_refit)
{
    (void)state;
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
        rft_channel_poll(channel, -1, PATIENCE_MS / 10);
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

whole_test(a_message_that_cannot_be_made_leaves_the_next_one_whole)
{
    (void)state;
    rft_channel *trainer, *workers[2];
    rft_peer_id ids[2];
    refit_config config = quick_config();
    assert_ok(rft_channel_bind("tcp://127.0.0.1:0", &config, &trainer, NULL));
    for (int i = 0; i < 2; i++)
        workers[i] = join(trainer, &config, &ids[i]);
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
    for (int i = 0; i < 2; i++)
        rft_channel_close(workers[i]);
    rft_channel_close(trainer);
}

int main(void)
{
    return test_run("fault_wire");
}
