/* Every message in every state of its sender and of the version: nothing breaks, and other workers
 * do not notice; then beats, credits, and the order in which workers are sent frames. */
#include "base/alloc.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

enum { WITNESS = 1, SUBJECT = 2 };

typedef enum subject_state {
    SUBJECT_UNKNOWN,
    SUBJECT_GREETED,
    SUBJECT_SUBSCRIBED,
    SUBJECT_STAGED, /* as far as the version lets it */
    SUBJECT_STATES,
} subject_state;

/* The witness behaves correctly; version 1 is committed, 2 is brought to `transaction`. */
static void set_scene(server_bench *bench, subject_state subject, rft_transaction_state transaction)
{
    server_bench_reopen(bench, 2, false);
    server_bench_join(bench, WITNESS, false);
    server_bench_publish(bench, 1, WITNESS);
    if (subject == SUBJECT_GREETED) server_bench_hello(bench, SUBJECT);
    if (subject >= SUBJECT_SUBSCRIBED) server_bench_join(bench, SUBJECT, false);
    if (transaction >= RFT_TRANSACTION_PREPARING) server_bench_prepare(bench, 2);
    if (transaction >= RFT_TRANSACTION_WRITING) server_bench_begin(bench, 2);
    if (transaction >= RFT_TRANSACTION_STAGING) server_bench_write(bench);
    if (transaction >= RFT_TRANSACTION_STAGING) server_bench_seal(bench);
    if (transaction >= RFT_TRANSACTION_STAGING && subject == SUBJECT_STAGED)
        server_bench_stage(bench, SUBJECT);
    if (transaction == RFT_TRANSACTION_COMMITTING) server_bench_stage(bench, WITNESS);
    if (transaction == RFT_TRANSACTION_ABORTED)
        rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    server_bench_forget(bench);
}

static rft_message make_message(rft_message_kind kind, uint64_t version)
{
    static const unsigned char frame[4] = {1, 0, 0, 0};
    rft_message message = server_staged(version == 0 ? 1 : version);
    message.kind = kind;
    switch (kind) {
    case RFT_HELLO:
        message.as.hello.protocol = RFT_PROTOCOL;
        message.as.hello.worker = rft_view_text("w2");
        message.as.hello.instance = version;
        message.as.hello.window = 3;
        break;
    case RFT_JOIN:
        memset(&message.as.join, 0, sizeof message.as.join);
        message.as.join.epoch = SERVER_EPOCH + (version > 2);
        break;
    case RFT_RESEND: message.as.resend.sequences = (rft_view){frame, sizeof frame}; break;
    case RFT_FAILED: return server_failed(version, REFIT_ERR_IO, version != 1);
    case RFT_PULL: return server_pull(version, 2);
    case RFT_BEAT: return server_beat(version, version);
    case RFT_BYE: memset(&message.as.bye, 0, sizeof message.as.bye); break;
    default: break;
    }
    return message;
}

/* Must hold after any message of the subject. */
static void check_witness(server_bench *bench)
{
    rft_peer *witness = server_bench_peer(bench, WITNESS);
    assert_non_null(witness);
    assert_true(witness->subscribed);
    assert_ok(witness->status);
    assert_int_equal(server_bench_count(bench, WITNESS, RFT_BYE), 0);
    assert_int_equal(witness->held.version, 1);
}

/* The version can still be ended, and another one published to the witness. */
static void check_goes_on(server_bench *bench)
{
    rft_transaction_state state = bench->server.transaction.state;
    rft_message bye = {.kind = RFT_BYE};
    if (state == RFT_TRANSACTION_PREPARING) server_bench_begin(bench, 2);
    if (state == RFT_TRANSACTION_PREPARING || state == RFT_TRANSACTION_WRITING ||
        state == RFT_TRANSACTION_STAGING)
        rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    if (state == RFT_TRANSACTION_COMMITTING) server_bench_apply(bench, WITNESS);
    server_bench_say(bench, SUBJECT, bye);
    if (bench->server.transaction.state == RFT_TRANSACTION_ABORTED) server_bench_settle(bench);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_IDLE);
    server_bench_publish(bench, 3, WITNESS);
    assert_ok(bench->server.transaction.result.status);
    assert_int_equal(bench->server.current.version, 3);
}

ON_BENCH(any_message_in_any_state_concerns_its_sender_alone)
{
    for (subject_state subject = 0; subject < SUBJECT_STATES; subject++) {
        for (rft_transaction_state transaction = RFT_TRANSACTION_IDLE;
             transaction <= RFT_TRANSACTION_ABORTED; transaction++) {
            for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
                for (uint64_t version = 1; version <= 3; version++) {
                    set_scene(bench, subject, transaction);
                    rft_message message = make_message(kind, version);
                    server_bench_say(bench, SUBJECT, message);
                    server_bench_say(bench, SUBJECT, message);
                    check_witness(bench);
                    check_goes_on(bench);
                }
            }
        }
    }
}

ON_BENCH(stranger_is_refused_but_not_for_good)
{
    for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        if (kind == RFT_HELLO || kind == RFT_BYE) continue;
        server_bench_forget(bench);
        server_bench_say(bench, 5, make_message(kind, 1));
        const rft_message *refuse = server_bench_told(bench, 5, RFT_REFUSE);
        assert_int_equal(refuse->as.refuse.code, REFIT_ERR_STALE);
        assert_false(refuse->as.refuse.final);
    }
    assert_int_equal(bench->server.peers.count, 0);
}

ON_BENCH(what_only_publishers_say_turns_a_worker_out)
{
    static const rft_message_kind kinds[] = {RFT_WELCOME, RFT_REFUSE, RFT_MANIFEST, RFT_OFFER,
                                             RFT_FRAME,   RFT_SEAL,   RFT_COMMIT,   RFT_ABORT};
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        server_bench_reopen(bench, 2, false);
        server_bench_join(bench, SUBJECT, false);
        rft_message message = {.kind = kinds[i]};
        server_bench_say(bench, SUBJECT, message);
        assert_null(server_bench_peer(bench, SUBJECT));
        assert_int_equal(bench->server.counts.refused, 1);
        assert_int_equal(server_bench_count(bench, SUBJECT, RFT_BYE), 1);
    }
}

ON_BENCH(beats_come_in_time_and_only_to_the_subscribed)
{
    server_bench_join(bench, 1, false);
    server_bench_hello(bench, 2);
    server_bench_forget(bench);
    int64_t at = rft_server_tick_at(&bench->server);
    assert_true(at <= bench->now + (int64_t)bench->config.broadcast_heartbeat_ms * 1000000);
    server_bench_tick(bench, bench->config.broadcast_heartbeat_ms - 1);
    assert_int_equal(server_bench_count(bench, 1, RFT_BEAT), 0);
    server_bench_tick(bench, 1);
    assert_int_equal(server_bench_count(bench, 1, RFT_BEAT), 1);
    assert_int_equal(server_bench_count(bench, 2, RFT_BEAT), 0);
}

static uint32_t frames_for(server_bench *bench, unsigned worker)
{
    uint32_t count = 0;
    rft_frame_order order;
    while (rft_server_next_frame(&bench->server, &order))
        count += order.to.bytes[0] == worker;
    return count;
}

ON_BENCH(credits_bound_what_is_in_flight)
{
    server_bench_join(bench, 1, false);
    server_bench_begin(bench, 1);
    rft_message pull = server_pull(1, 3);
    server_bench_say(bench, 1, pull);
    assert_false(rft_server_wants_frames(&bench->server));
    assert_int_equal(frames_for(bench, 1), 0);
    server_bench_write(bench);
    assert_true(rft_server_wants_frames(&bench->server));
    assert_int_equal(frames_for(bench, 1), 3);
    for (int i = 0; i < 20; i++)
        server_bench_say(bench, 1, pull);
    assert_int_equal(server_bench_peer(bench, 1)->task.credits, 4 * RFT_CREDIT);
}

/* Of one credit: so many frames, of which each has `parts` sixteenths of its bytes to carry. */
static uint32_t frames_for_a_credit(server_bench *bench, uint64_t parts)
{
    rft_frame_order order;
    uint32_t count = 0;
    server_bench_say(bench, 1, server_pull(1, 1));
    while (rft_server_next_frame(&bench->server, &order)) {
        uint64_t bytes = bench->store->manifest->frames[order.sequence].bytes;
        rft_server_frame_sent(&bench->server, &order, bytes / RFT_CREDIT * parts);
        count++;
    }
    return count;
}

ON_BENCH(small_frames_share_a_credit_and_debts_are_paid)
{
    server_bench_join(bench, 1, false);
    server_bench_begin(bench, 1);
    server_bench_write(bench);
    const rft_task *task = &server_bench_peer(bench, 1)->task;
    assert_int_equal(frames_for_a_credit(bench, RFT_CREDIT), 1);
    assert_int_equal(task->credits, 0);
    assert_int_equal(frames_for_a_credit(bench, 9), 2);
    assert_int_equal(task->credits, -2);
    assert_int_equal(frames_for_a_credit(bench, 15), 1);
    assert_int_equal(task->credits, -1);
    uint32_t left = bench->store->manifest->frame_count - task->cursor;
    assert_true(left > 1 && left < RFT_CREDIT - 1);
    assert_int_equal(frames_for_a_credit(bench, 0), left);
}

/* Frames that are asked for again take no credit, and a version that is gone has none. */
ON_BENCH(only_frames_that_took_a_credit_give_some_of_it_back)
{
    rft_frame_order order = {.version = 1, .again = true};
    server_bench_join(bench, 1, false);
    server_bench_begin(bench, 1);
    order.to = server_bench_peer(bench, 1)->id;
    rft_server_frame_sent(&bench->server, &order, 0);
    order.again = false;
    order.version = 2;
    rft_server_frame_sent(&bench->server, &order, 0);
    assert_int_equal(server_bench_peer(bench, 1)->task.credits, 0);
    order.version = 1;
    rft_server_frame_sent(&bench->server, &order, 0);
    assert_int_equal(server_bench_peer(bench, 1)->task.credits, RFT_CREDIT - 1);
    memset(order.to.bytes, 0x5a, sizeof order.to.bytes);
    rft_server_frame_sent(&bench->server, &order, 0);
}

ON_BENCH(workers_take_turns)
{
    rft_frame_order order;
    unsigned before = 0;
    server_bench_join(bench, 1, false);
    server_bench_join(bench, 2, false);
    server_bench_begin(bench, 1);
    server_bench_write(bench);
    rft_message pull = server_pull(1, 2);
    server_bench_say(bench, 1, pull);
    server_bench_say(bench, 2, pull);
    for (int i = 0; i < 4; i++) {
        assert_true(rft_server_next_frame(&bench->server, &order));
        assert_int_not_equal(order.to.bytes[0], before);
        before = order.to.bytes[0];
    }
    assert_false(rft_server_next_frame(&bench->server, &order));
}

ON_BENCH(worker_that_comes_and_goes_is_remembered_once)
{
    rft_message bye = {.kind = RFT_BYE};
    for (int i = 0; i < 50; i++) {
        server_bench_join(bench, 1, false);
        server_bench_say(bench, 1, bye);
        server_bench_forget(bench);
    }
    assert_int_equal(bench->server.peers.count, 0);
    assert_int_equal(bench->server.peers.lost_count, 1);
    server_bench_begin(bench, 1);
    assert_int_equal(bench->server.peers.lost_count, 0);
}

ON_BENCH(lost_member_is_named_however_often_it_comes_back)
{
    rft_message bye = {.kind = RFT_BYE};
    server_bench_join(bench, 1, false);
    server_bench_begin(bench, 1);
    for (int i = 0; i < 5; i++) {
        server_bench_say(bench, 1, bye);
        server_bench_join(bench, 1, false);
    }
    assert_int_equal(bench->server.peers.lost_count, 2);
    assert_true(bench->server.peers.lost[0]->member);
    assert_int_equal(bench->server.peers.lost[0]->status, REFIT_ERR_CLOSED);
    assert_false(bench->server.peers.lost[1]->member);
}

/* Evicted while its user was loading, it joined again; then the user was done. */
ON_BENCH(beat_tells_what_was_applied_after_all)
{
    server_bench_offer(bench, 1);
    server_bench_join(bench, 1, false);
    assert_int_equal(server_bench_peer(bench, 1)->held.version, 0);
    server_bench_say(bench, 1, server_beat(1, 0));
    assert_int_equal(server_bench_peer(bench, 1)->held.version, 1);
    server_bench_say(bench, 1, server_beat(0, 0));
    assert_int_equal(server_bench_peer(bench, 1)->held.version, 0);
    server_bench_say(bench, 1, server_beat(2, 0));
    assert_int_equal(server_bench_peer(bench, 1)->held.version, 0);
}

static void set_written(server_bench *bench)
{
    server_bench_open(bench, 2, false);
    server_bench_join(bench, WITNESS, false);
    server_bench_begin(bench, 1);
    server_bench_write(bench);
}

/* The server's messages are not read from here on: the bench would need memory to decode them. */
static void go_through_the_rest(server_bench *bench)
{
    rft_message hello = make_message(RFT_HELLO, 1), join = make_message(RFT_JOIN, 1);
    rft_message staged = server_staged(1), committed = server_committed(1);
    rft_peer_id subject = {.bytes = {SUBJECT}, .count = 1};
    rft_peer_id witness = {.bytes = {WITNESS}, .count = 1};
    rft_server_message(&bench->server, &subject, &hello, bench->now);
    rft_server_message(&bench->server, &subject, &join, bench->now);
    assert_ok(rft_store_seal(bench->store, NULL));
    rft_transaction_seal(&bench->server, bench->now);
    rft_server_message(&bench->server, &witness, &staged, bench->now);
    rft_server_message(&bench->server, &witness, &committed, bench->now);
    rft_server_tick(&bench->server, bench->now);
}

/* A worker to which a message was lost is evicted by the next tick; the version is decided all the
 * same. */
TEST(failed_allocation_costs_at_most_its_worker)
{
    server_bench bench;
    server_samples_forget();
    uint64_t before = rft_alloc_count();
    set_written(&bench);
    uint64_t setting = rft_alloc_count() - before;
    server_bench_close(&bench);
    server_samples_forget();
    for (uint64_t nth = setting + 1;; nth++) {
        failing_alloc_begin(nth);
        set_written(&bench);
        go_through_the_rest(&bench);
        rft_transaction_state at = bench.server.transaction.state;
        assert_true(at == RFT_TRANSACTION_IDLE || at == RFT_TRANSACTION_ABORTED);
        for (uint32_t i = 0; i < bench.server.peers.count; i++)
            assert_false(bench.server.peers.live[i]->missed);
        server_bench_close(&bench);
        server_samples_forget();
        if (!failing_alloc_end()) break;
    }
}

int main(void)
{
    return test_run("server");
}
