/* Workers of one host: which of them receives a version, who is offered what it received, and what
 * becomes of the others when it is lost. */
#include "tests/support/heard.h"
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

#define HERE    "machine/1000/4026531836"
#define THERE   "other/1000/4026531836"
#define SEGMENT "/proc/1/fd/5:9"

static void join(server_bench *bench, unsigned worker, const char *place)
{
    bench->place = place;
    server_bench_join(bench, worker, false);
}

/* Workers 1 to `workers` of one host; a version needs one of them alone. */
static void open_host(server_bench *bench, unsigned workers)
{
    server_bench_reopen(bench, 2, false);
    bench->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench->config.broadcast_quorum = 1;
    for (unsigned worker = 1; worker <= workers; worker++)
        join(bench, worker, HERE);
    server_bench_forget(bench);
}

static void pull_into(server_bench *bench, unsigned worker, uint64_t version, const char *segment)
{
    rft_message message = server_pull(version, 4);
    message.as.pull.image = rft_view_text(segment);
    server_bench_say(bench, worker, message);
}

/* What the worker was offered since the last forget: 's'hare, 'n'eighbor, 'f'rames; '-': nothing.
 */
static char offered(server_bench *bench, unsigned worker)
{
    if (server_bench_count(bench, worker, RFT_OFFER) == 0) return '-';
    const rft_message *offer = server_bench_told(bench, worker, RFT_OFFER);
    if (offer->as.offer.neighbor) return 'n';
    return offer->as.offer.share ? 's' : 'f';
}

static void assert_offered(server_bench *bench, const char *expected)
{
    for (unsigned worker = 1; expected[worker - 1] != '\0'; worker++) {
        if (offered(bench, worker) != expected[worker - 1])
            fail_msg("worker %u was offered '%c' instead of '%c'", worker, offered(bench, worker),
                     expected[worker - 1]);
    }
    server_bench_forget(bench);
}

static uint32_t count_frames(server_bench *bench)
{
    uint32_t count = 0;
    rft_frame_order order;
    while (rft_server_next_frame(&bench->server, &order))
        count++;
    return count;
}

/* ---- In good order */

ON_BENCH(one_of_a_host_receives_and_the_others_map)
{
    open_host(bench, 3);
    bench->config.broadcast_commit = REFIT_COMMIT_ALL;
    server_bench_begin(bench, 1);
    assert_offered(bench, "s--");
    pull_into(bench, 1, 1, SEGMENT);
    assert_offered(bench, "-nn");
    assert_string_equal(server_bench_peer(bench, 2)->task.segment, SEGMENT);
    server_bench_write(bench);
    server_bench_say(bench, 2, server_pull(1, 4)); /* in vain: it maps */
    assert_int_equal(count_frames(bench), 4);
    server_bench_seal(bench);
    assert_int_equal(server_bench_count(bench, 1, RFT_SEAL), 1);
    assert_int_equal(server_bench_count(bench, 2, RFT_SEAL), 0);
    server_bench_stage(bench, 1);
    assert_int_equal(server_bench_count(bench, 2, RFT_SEAL), 1);
    server_bench_stage(bench, 2);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_STAGING);
    server_bench_stage(bench, 3);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_COMMITTING);
    for (unsigned worker = 1; worker <= 3; worker++)
        server_bench_apply(bench, worker);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_int_equal(rft_peers_count_path(&bench->server.peers, REFIT_PATH_NEIGHBOR), 2);
    server_bench_begin(bench, 2);
    assert_false(rft_server_has_readers(&bench->server)); /* they read no slot */
    assert_offered(bench, "s--");
}

ON_BENCH(workers_that_share_nothing_receive_for_themselves)
{
    static const char *const places[][2] = {{HERE, THERE}, {HERE, ""}, {"", ""}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        open_host(bench, 0);
        join(bench, 1, places[i][0]);
        join(bench, 2, places[i][1]);
        server_bench_begin(bench, 1);
        assert_offered(bench, "ff");
    }
    open_host(bench, 0);
    bench->config.broadcast_host_image = REFIT_HOST_IMAGE_OFF;
    join(bench, 1, HERE);
    join(bench, 2, HERE);
    server_bench_begin(bench, 1);
    assert_offered(bench, "ff");
}

ON_BENCH(workers_of_a_machine_that_cannot_share_are_told_of)
{
    static const char *const places[] = {"machine/1001/4026531836", "machine/1000/7", THERE, ""};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        open_host(bench, 1);
        heard_begin(REFIT_LOG_WARNING);
        join(bench, 2, places[i]);
        assert_int_equal(heard_count("worker w2 is on the machine of worker w1"), i < 2);
        heard_end();
    }
}

ON_BENCH(hosts_have_a_receiver_each)
{
    open_host(bench, 2);
    join(bench, 3, THERE);
    join(bench, 4, THERE);
    server_bench_begin(bench, 1);
    assert_offered(bench, "s-s-");
    pull_into(bench, 3, 1, SEGMENT);
    assert_offered(bench, "---n");
}

ON_BENCH(a_newcomer_maps_what_is_there)
{
    open_host(bench, 2);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_forget(bench);
    join(bench, 3, HERE); /* while it is written */
    assert_offered(bench, "--n");
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1);
    join(bench, 4, HERE); /* once it is committed */
    assert_int_equal(offered(bench, 4), 'n');
    assert_int_equal(server_bench_count(bench, 4, RFT_SEAL), 1);
}

ON_BENCH(one_that_has_not_decided_on_the_version_before_waits_too)
{
    open_host(bench, 2);
    bench->config.broadcast_wait = REFIT_WAIT_STAGED;
    bench->config.broadcast_quorum = 2;
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_stage(bench, 2);
    assert_int_equal(bench->server.current.version, 1);
    server_bench_begin(bench, 2); /* no one has said that it applied version 1 */
    server_bench_forget(bench);
    pull_into(bench, 1, 2, SEGMENT "0");
    assert_offered(bench, "-n");
}

/* ---- The receiver is lost, or fails */

ON_BENCH(another_one_receives_where_the_receiver_is_lost)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    assert_offered(bench, "snn");
    rft_server_evict(&bench->server, server_bench_peer(bench, 1), REFIT_ERR_PEER, "test");
    server_bench_tick(bench, 0);
    assert_offered(bench, "-s-");
    pull_into(bench, 2, 1, SEGMENT "0");
    assert_offered(bench, "--n");
    assert_string_equal(server_bench_peer(bench, 3)->task.segment, SEGMENT "0");
}

ON_BENCH(nothing_is_offered_again_where_the_image_was_whole)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    bench->config.broadcast_quorum = 3;
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_stage(bench, 2);
    bench->config.broadcast_quorum = 2;
    server_bench_forget(bench);
    rft_server_evict(&bench->server, server_bench_peer(bench, 1), REFIT_ERR_PEER, "test");
    server_bench_tick(bench, 0);
    assert_offered(bench, "---");
    server_bench_stage(bench, 3);
    assert_int_equal(bench->server.current.version, 1);
}

ON_BENCH(a_receiver_without_an_image_is_not_waited_for)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    assert_offered(bench, "s--");
    server_bench_say(bench, 1, server_pull(1, 4)); /* it has no memory that can be shared */
    assert_offered(bench, "-s-");
    server_bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms / 2);
    server_bench_say(bench, 1, server_beat(0, 0));
    server_bench_say(bench, 2, server_beat(0, 0));
    server_bench_say(bench, 3, server_beat(0, 0));
    server_bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms / 2 + 1);
    assert_offered(bench, "--f"); /* nor is one that says nothing of it */
    pull_into(bench, 2, 1, SEGMENT);
    assert_offered(bench, "---");
}

ON_BENCH(a_receiver_that_fails_is_replaced)
{
    open_host(bench, 2);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_forget(bench);
    server_bench_say(bench, 1, server_failed(1, REFIT_ERR_HOST_MEMORY, true));
    assert_offered(bench, "-f"); /* there is none left to share with */
    join(bench, 3, HERE);
    assert_int_equal(offered(bench, 3), 'f');
}

ON_BENCH(a_receiver_that_starts_over_has_another_image)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_forget(bench);
    join(bench, 1, HERE); /* its connection was lost */
    assert_offered(bench, "-s-");
    pull_into(bench, 2, 1, SEGMENT "0");
    assert_offered(bench, "n-n");
}

ON_BENCH(an_aborted_version_leaves_no_image)
{
    open_host(bench, 2);
    bench->config.broadcast_wait = REFIT_WAIT_STAGED;
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1); /* and not the other, who is staging */
    server_bench_begin(bench, 2);
    server_bench_forget(bench);
    rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    server_bench_settle(bench);
    assert_offered(bench, "-n"); /* version 1, whose image is there */
    server_bench_begin(bench, 3);
    pull_into(bench, 1, 3, SEGMENT "0");
    server_bench_forget(bench);
    rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    server_bench_settle(bench);
    assert_offered(bench, "-f"); /* whether it still is, is not known any more */
}

ON_BENCH(a_version_that_its_receiver_refused_is_not_mapped)
{
    open_host(bench, 2);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_say(bench, 1, server_failed(1, REFIT_ERR_PEER, false));
    server_bench_forget(bench);
    join(bench, 3, HERE);
    assert_int_not_equal(offered(bench, 3), 'n');
}

ON_BENCH(one_that_has_the_version_without_frames_shares_nothing)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_forget(bench);
    server_bench_stage(bench, 1); /* it is with its user since an earlier offer */
    assert_offered(bench, "-s-");
    open_host(bench, 3);
    bench->config.broadcast_quorum = 3;
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_forget(bench);
    server_bench_stage(bench, 1);
    assert_offered(bench, "---");
}

ON_BENCH(a_receiver_that_does_not_get_done_is_not_waited_for)
{
    open_host(bench, 3);
    bench->config.broadcast_quorum = 2;
    bench->config.broadcast_heartbeat_timeout_ms = 600000;
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_forget(bench);
    server_bench_tick(bench, bench->config.broadcast_stage_timeout_ms / 2 - 1);
    assert_offered(bench, "---");
    server_bench_tick(bench, 1);
    assert_offered(bench, "-s-");
    pull_into(bench, 2, 1, SEGMENT "0");
    server_bench_stage(bench, 2);
    server_bench_stage(bench, 3);
    assert_int_equal(bench->server.current.version, 1);
}

/* ---- Those that map */

ON_BENCH(one_that_could_not_map_what_is_gone_is_not_blamed)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    rft_server_evict(&bench->server, server_bench_peer(bench, 1), REFIT_ERR_PEER, "test");
    server_bench_tick(bench, 0);
    server_bench_forget(bench);
    server_bench_say(bench, 2, server_failed(1, REFIT_ERR_UNSUPPORTED, true)); /* of the image */
    assert_int_equal(server_bench_peer(bench, 2)->task.stage, RFT_STAGE_OFFERED);
    assert_int_equal(server_bench_peer(bench, 2)->status, REFIT_OK);
    server_bench_say(bench, 2, server_failed(1, REFIT_ERR_UNSUPPORTED, true)); /* of the frames */
    assert_int_equal(server_bench_peer(bench, 2)->status, REFIT_ERR_UNSUPPORTED);
}

ON_BENCH(one_that_cannot_map_receives_for_itself)
{
    open_host(bench, 3);
    server_bench_begin(bench, 1);
    pull_into(bench, 1, 1, SEGMENT);
    server_bench_forget(bench);
    server_bench_say(bench, 2, server_failed(1, REFIT_ERR_UNSUPPORTED, true));
    assert_offered(bench, "-f-");
    assert_int_equal(server_bench_peer(bench, 2)->status, REFIT_OK);
    assert_int_equal(bench->server.transaction.lost, 0);
    rft_server_evict(&bench->server, server_bench_peer(bench, 1), REFIT_ERR_PEER, "test");
    server_bench_tick(bench, 0);
    assert_int_equal(offered(bench, 2), '-');
    assert_int_not_equal(offered(bench, 3), '-');
}

ON_BENCH(frames_that_a_worker_has_are_not_sent)
{
    unsigned char have[8] = {0};
    open_host(bench, 2);
    server_bench_begin(bench, 1);
    server_bench_write(bench);
    uint32_t frames = bench->store->manifest->frame_count;
    assert_in_range(frames, 3, 64);
    have[0] = 0x2; /* frame 1 */
    rft_message message = server_pull(1, 1);
    message.as.pull.have = (rft_view){have, (frames + 7) / 8};
    bench->config.broadcast_window = frames;
    server_bench_peer(bench, 1)->window = frames;
    message.as.pull.credits = frames;
    message.as.pull.image = rft_view_text(SEGMENT);
    server_bench_say(bench, 1, message);
    rft_frame_order order;
    uint32_t sent = 0;
    while (rft_server_wants_frames(&bench->server)) {
        assert_true(rft_server_next_frame(&bench->server, &order));
        assert_int_not_equal(order.sequence, 1);
        sent++;
    }
    assert_int_equal(sent, frames - 1);
    /* What it said it had was damaged: it is sent all. */
    server_bench_seal(bench);
    server_bench_forget(bench);
    server_bench_say(bench, 1, server_failed(1, REFIT_ERR_CORRUPT, true));
    assert_int_not_equal(offered(bench, 1), '-');
    server_bench_say(bench, 1, message); /* what it says it has counts no more */
    assert_int_equal(count_frames(bench), frames);
    server_bench_say(bench, 1, server_failed(1, REFIT_ERR_CORRUPT, true));
    assert_int_equal(server_bench_peer(bench, 1)->status, REFIT_ERR_CORRUPT);
}

ON_BENCH(a_worker_that_has_other_frames_is_evicted)
{
    const unsigned char have[64] = {1};
    open_host(bench, 2);
    server_bench_begin(bench, 1);
    rft_message message = server_pull(1, 1);
    message.as.pull.have = (rft_view){have, sizeof have};
    server_bench_say(bench, 1, message);
    assert_null(server_bench_peer(bench, 1));
    assert_int_equal(offered(bench, 2), 'f');
}

int main(void)
{
    return test_run("neighbors");
}
