/* Rank 0 and the other ranks of a trainer: who joins, what a version comes to, and what is said
 * when one of them is lost, comes again, or is faster than the rest. */
#include "ranks_bench.h"

#include "base/clock.h"
#include "tests/support/test.h"

ON_RANKS(honest_ranks_publish)
{
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    ranks_bench_publish(bench);
}

/* Of another version, twice, or from a worker: not counted. */
ON_RANKS(sums_that_are_not_asked_for_are_passed_over)
{
    ranks_bench_join(bench);
    assert_true(ranks_bench_begin(bench));
    ranks_bench_write(bench);
    server_bench_seal(&bench->server);
    rft_message sums = ranks_bench_sums(bench, 1);
    for (uint64_t version = 1; version < 4; version++) {
        sums.as.sums.version = bench->version + version;
        ranks_bench_say(bench, SENDER + 1, sums);
    }
    assert_int_equal(bench->server.server.ranks.summed, 1);
    for (uint32_t i = 0; i < 5; i++)
        ranks_bench_say(bench, SENDER + 1, ranks_bench_sums(bench, 1));
    assert_int_equal(bench->server.server.ranks.summed, 2);
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_STAGING);
    ranks_bench_say(bench, SENDER + 2, ranks_bench_sums(bench, 2));
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_true(rft_digest128_equal(&bench->server.server.current.digest, &bench->sample.digest));
}

/* The process of before had the version under way, and this one has not. */
ON_RANKS(a_rank_that_another_process_takes_over_ends_the_version)
{
    ranks_bench_join(bench);
    assert_true(ranks_bench_begin(bench));
    ranks_bench_write(bench);
    server_bench_seal(&bench->server);
    ranks_bench_say(bench, SENDER + 1, ranks_bench_sums(bench, 1));
    ranks_bench_hello(bench, FIRST, 1, 5);
    ranks_bench_say(bench, FIRST, ranks_bench_shard(bench, 1));
    ranks_bench_expect_aborted(bench, "rank 1 has joined anew");
    assert_true(bench->server.server.ranks.complete);
}

/* It has lost a connection, and nothing else. */
ON_RANKS(a_rank_that_joins_again_keeps_the_version)
{
    ranks_bench_join(bench);
    assert_true(ranks_bench_begin(bench));
    ranks_bench_write(bench);
    server_bench_seal(&bench->server);
    ranks_bench_join(bench);
    for (uint32_t rank = 1; rank < RANKS; rank++)
        ranks_bench_say(bench, SENDER + rank, ranks_bench_sums(bench, rank));
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_true(rft_digest128_equal(&bench->server.server.current.digest, &bench->sample.digest));
}

static void say_failed(ranks_bench *bench, uint32_t rank, uint64_t version)
{
    rft_message failed = {.kind = RFT_FAILED};
    failed.as.failed.version = version;
    failed.as.failed.code = REFIT_ERR_TIMEOUT;
    failed.as.failed.kept = true;
    failed.as.failed.reason = rft_view_text("rank 0 has not decided in time");
    server_bench_forget(&bench->server);
    ranks_bench_say(bench, SENDER + rank, failed);
}

/* It was lost when that was told, and waits for it. */
ON_RANKS(a_rank_that_asks_is_told_what_became_of_a_version)
{
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    uint64_t committed = bench->version;
    say_failed(bench, 1, committed);
    const rft_message *told = server_bench_told(&bench->server, SENDER + 1, RFT_COMMIT);
    assert_int_equal(told->as.commit.version, committed);
    say_failed(bench, 1, committed + 1);
    told = server_bench_told(&bench->server, SENDER + 1, RFT_ABORT);
    assert_int_equal(told->as.failed.version, committed + 1);
    ranks_bench_publish(bench);
}

/* And may begin it. */
ON_RANKS(a_rank_that_joins_again_hears_of_the_version_under_way)
{
    ranks_bench_join(bench);
    assert_true(ranks_bench_begin(bench));
    server_bench_forget(&bench->server);
    ranks_bench_say(bench, SENDER + 1, ranks_bench_shard(bench, 1));
    const rft_message *told = server_bench_told(&bench->server, SENDER + 1, RFT_OFFER);
    assert_int_equal(told->as.offer.version, bench->version);
    ranks_bench_write(bench);
    server_bench_seal(&bench->server);
    for (uint32_t rank = 1; rank < RANKS; rank++)
        ranks_bench_say(bench, SENDER + rank, ranks_bench_sums(bench, rank));
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_IDLE);
}

/* ---- Who joins */

/* Sums of a version that was aborted while they were on their way. */
ON_RANKS(a_rank_that_is_late_is_told_that_the_version_is_over)
{
    ranks_bench_join(bench);
    assert_true(ranks_bench_begin(bench));
    rft_message sums = ranks_bench_sums(bench, 1);
    ranks_bench_settle(bench);
    server_bench_forget(&bench->server);
    ranks_bench_say(bench, SENDER + 1, sums);
    const rft_message *told = server_bench_told(&bench->server, SENDER + 1, RFT_ABORT);
    assert_int_equal(told->as.failed.version, bench->version);
    ranks_bench_publish(bench);
}

static const rft_message *refusal_of(ranks_bench *bench, unsigned sender, rft_message shard)
{
    server_bench_forget(&bench->server);
    ranks_bench_say(bench, sender, shard);
    return server_bench_told(&bench->server, sender, RFT_REFUSE);
}

/* Its user has called again, and rank 0's has not. */
ON_RANKS(a_rank_that_is_early_waits_for_rank_0)
{
    rft_message twice = ranks_bench_shard(bench, 1);
    ranks_bench_hello(bench, SENDER + 1, 1, 101);
    ranks_bench_hello(bench, SENDER + 2, 2, 102);
    twice.as.shard.rows = rft_bytes_view(&bench->rows[0]);
    ranks_bench_say(bench, SENDER + 2, ranks_bench_shard(bench, 2));
    assert_true(refusal_of(bench, SENDER + 1, twice)->as.refuse.final);
    ranks_bench_hello(bench, SENDER + 1, 1, 103);
    assert_false(refusal_of(bench, SENDER + 1, ranks_bench_shard(bench, 1))->as.refuse.final);
    assert_ok(rft_ranks_open(&bench->server.server, 0, RANKS, NULL));
    assert_false(refusal_of(bench, SENDER + 1, ranks_bench_shard(bench, 1))->as.refuse.final);
    ranks_bench_join(bench);
    /* Now the tensors are divided: other shards are a new division, of which rank 0 knows nothing
     * yet. */
    assert_false(refusal_of(bench, SENDER + 1, twice)->as.refuse.final);
    assert_true(bench->server.server.ranks.complete);
    ranks_bench_publish(bench);
}

/* One rank's user has called again; the other one would come by itself, with its old shard. */
ON_RANKS(ranks_of_before_hear_from_their_users_how_tensors_are_divided_anew)
{
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    ranks_bench_hello(bench, FIRST, 2, 5);
    ranks_bench_say(bench, FIRST, ranks_bench_shard(bench, 2));
    server_bench_forget(&bench->server);
    assert_ok(rft_ranks_open(&bench->server.server, 0, RANKS, NULL));
    server_bench_tick(&bench->server, 0);
    assert_true(server_bench_told(&bench->server, SENDER + 1, RFT_REFUSE)->as.refuse.final);
    assert_false(server_bench_told(&bench->server, FIRST, RFT_REFUSE)->as.refuse.final);
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
}

/* ---- A worker that loses a rank */

static void join_worker(ranks_bench *bench, unsigned sender)
{
    rft_message hello = {.kind = RFT_HELLO}, join = {.kind = RFT_JOIN};
    hello.as.hello.protocol = RFT_PROTOCOL;
    hello.as.hello.worker = rft_view_text("w");
    hello.as.hello.instance = sender;
    hello.as.hello.window = 1;
    hello.as.hello.shards = true;
    ranks_bench_say(bench, sender, hello);
    join.as.join.epoch = SERVER_EPOCH;
    ranks_bench_say(bench, sender, join);
}

/* Offers to the worker with the beats that follow. */
static uint32_t count_offers_later(ranks_bench *bench)
{
    server_bench_forget(&bench->server);
    server_bench_tick(&bench->server, bench->server.config.broadcast_heartbeat_ms);
    return server_bench_count(&bench->server, FIRST, RFT_OFFER);
}

/* A connection is lost, or the rank writes a newer version that comes to nothing. */
ON_RANKS(a_worker_that_lacks_a_rank_is_offered_the_version_with_the_next_beat)
{
    rft_message failed = {.kind = RFT_FAILED};
    static const refit_status reasons[] = {REFIT_ERR_PEER, REFIT_ERR_STALE, REFIT_ERR_STALE};
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    join_worker(bench, FIRST);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 1);
    failed.as.failed.version = bench->version;
    failed.as.failed.kept = true;
    failed.as.failed.reason = rft_view_text("rank 1 is not there");
    for (size_t i = 0; i < COUNT_OF(reasons); i++) {
        failed.as.failed.code = reasons[i];
        server_bench_forget(&bench->server);
        ranks_bench_say(bench, FIRST, failed);
        assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 0); /* not at once */
        assert_int_equal(count_offers_later(bench), 1);
        assert_int_equal(count_offers_later(bench), 0);
    }
    failed.as.failed.code = REFIT_ERR_HOST_MEMORY;
    ranks_bench_say(bench, FIRST, failed);
    assert_int_equal(count_offers_later(bench), 0);
}

/* Another process has taken its place, without the version. */
ON_RANKS(a_worker_is_not_offered_what_a_rank_does_not_have)
{
    rft_message shard = ranks_bench_shard(bench, 1);
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    ranks_bench_hello(bench, FIRST + 1, 1, 5);
    ranks_bench_say(bench, FIRST + 1, shard);
    assert_true(bench->server.server.ranks.complete);
    join_worker(bench, FIRST);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 0);
    shard.as.shard.held = bench->version; /* or it has come back with it */
    ranks_bench_say(bench, FIRST + 1, shard);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 1);
}

/* It had voted, and heard of the decision when it came back. */
ON_RANKS(a_version_is_offered_once_the_last_rank_knows_that_it_has_it)
{
    rft_message shard = ranks_bench_shard(bench, 1);
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    shard.as.shard.held = 0;
    ranks_bench_say(bench, SENDER + 1, shard);
    join_worker(bench, FIRST);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 0);
    say_failed(bench, 1, bench->version);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 1);
}

/* ---- A worker that fetches from this rank */

static rft_message first_pull(const ranks_bench *bench, uint64_t version)
{
    rft_message pull = server_pull(version, 1);
    const rft_digest128 *digest = &bench->server.store->manifest->digest;
    pull.as.pull.manifest = (rft_view){digest, sizeof *digest};
    return pull;
}

static void join_fetcher(ranks_bench *bench, unsigned sender)
{
    rft_message hello = {.kind = RFT_HELLO};
    hello.as.hello.protocol = RFT_PROTOCOL;
    hello.as.hello.worker = rft_view_text("f");
    hello.as.hello.instance = sender;
    hello.as.hello.window = 4;
    hello.as.hello.fetches = true;
    ranks_bench_say(bench, sender, hello);
}

ON_RANKS(a_version_that_is_over_is_not_waited_for)
{
    rft_server *server = &bench->server.server;
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    ranks_bench_publish(bench);
    join_fetcher(bench, FIRST);
    ranks_bench_say(bench, FIRST, first_pull(bench, bench->version - 1));
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_ABORT), 1);
    assert_false(rft_server_wants_frames(server));
    ranks_bench_say(bench, FIRST, first_pull(bench, bench->version));
    assert_true(rft_server_wants_frames(server));
    ranks_bench_say(bench, FIRST, first_pull(bench, bench->version + 1));
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_ABORT), 1);
    assert_false(rft_server_wants_frames(server)); /* this rank has not begun it */
    rft_message other = first_pull(bench, bench->version);
    const rft_digest128 unknown = {{1}};
    other.as.pull.manifest = (rft_view){&unknown, sizeof unknown};
    ranks_bench_say(bench, FIRST, other);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_ABORT), 2);
}

static rft_message want_of(const ranks_bench *bench, rft_view rows)
{
    rft_message want = {.kind = RFT_WANT};
    want.as.want.manifest = bench->server.store->manifest->digest;
    want.as.want.rows = rows;
    return want;
}

/* In two messages, of which the second comes twice. */
ON_RANKS(a_part_is_said_once_and_holds_for_the_versions_that_follow)
{
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    join_fetcher(bench, FIRST);
    rft_view all = rft_bytes_view(&bench->rows[0]);
    rft_message begin = want_of(bench, (rft_view){all.data, RFT_WANT_ENTRY_BYTES});
    rft_message rest = want_of(bench, (rft_view){(const char *)all.data + RFT_WANT_ENTRY_BYTES,
                                                 all.count - RFT_WANT_ENTRY_BYTES});
    begin.as.want.more = true;
    rest.as.want.from = 1;
    ranks_bench_say(bench, FIRST, begin);
    assert_null(server_bench_peer(&bench->server, FIRST)->want);
    ranks_bench_say(bench, FIRST, rest);
    ranks_bench_say(bench, FIRST, rest);
    const rft_want *want = server_bench_peer(&bench->server, FIRST)->want;
    assert_true(rft_want_equal(want, bench->shards[0]));
    for (uint32_t i = 0; i < 2; i++) {
        rft_message pull = first_pull(bench, bench->version);
        pull.as.pull.part = true;
        ranks_bench_say(bench, FIRST, pull);
        assert_ptr_equal(server_bench_peer(&bench->server, FIRST)->sent, want);
        assert_true(rft_server_wants_frames(&bench->server.server));
        ranks_bench_publish(bench);
    }
}

ON_RANKS(parts_of_others_and_parts_that_were_not_said_are_refused)
{
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
    join_fetcher(bench, FIRST);
    ranks_bench_say(bench, FIRST, want_of(bench, rft_bytes_view(&bench->rows[1])));
    assert_null(server_bench_peer(&bench->server, FIRST));
    join_fetcher(bench, FIRST);
    rft_message pull = first_pull(bench, bench->version);
    pull.as.pull.part = true;
    ranks_bench_say(bench, FIRST, pull);
    assert_null(server_bench_peer(&bench->server, FIRST));
    ranks_bench_publish(bench);
}

/* ---- Another rank, which loses rank 0 */

#define VERSION    3u
#define SILENCE_MS 500u

static void hear(ranks_bench *bench, rft_message message)
{
    rft_rank_link_message(&bench->server.server, &message, bench->server.now);
}

static void wait_ms(ranks_bench *bench, uint32_t ms)
{
    bench->server.now = rft_after_ms(bench->server.now, ms);
    rft_rank_link_tick(&bench->server.server, bench->server.now);
}

/* How many messages of the kind it has said to rank 0 since the last call. */
static uint32_t count_said(ranks_bench *bench, rft_message_kind kind)
{
    uint32_t count = 0;
    rft_outgoing next;
    rft_send_queue *queue = &bench->server.server.ranks.link.send_queue;
    while (rft_send_queue_take(queue, &next)) {
        rft_message message;
        assert_ok(rft_message_decode(next.message, &bench->server.server.limits, &message, NULL));
        count += message.kind == kind;
    }
    rft_send_queue_reset(queue);
    return count;
}

static void hear_welcome(ranks_bench *bench)
{
    rft_message welcome = {.kind = RFT_WELCOME};
    welcome.as.welcome.protocol = RFT_PROTOCOL;
    welcome.as.welcome.epoch = SERVER_EPOCH + 1;
    welcome.as.welcome.frame_bytes = bench->server.config.broadcast_frame_bytes;
    welcome.as.welcome.heartbeat_timeout_ms = SILENCE_MS;
    hear(bench, welcome);
}

static void hear_all_there(ranks_bench *bench)
{
    rft_message shard = {.kind = RFT_SHARD};
    shard.as.shard.epoch = SERVER_EPOCH + 1;
    hear(bench, shard);
    assert_int_equal(bench->server.server.ranks.link.state, RFT_LINK_JOINED);
}

static void hear_offer(ranks_bench *bench, uint64_t version)
{
    rft_message offer = {.kind = RFT_OFFER};
    offer.as.offer.epoch = SERVER_EPOCH + 1;
    offer.as.offer.version = version;
    hear(bench, offer);
    assert_int_equal(bench->server.server.ranks.link.offered, version);
}

static void hear_abort(ranks_bench *bench, uint64_t version)
{
    rft_message abort = {.kind = RFT_ABORT};
    abort.as.failed.version = version;
    abort.as.failed.reason = rft_view_text("a worker is lost");
    hear(bench, abort);
}

static void follow(ranks_bench *bench)
{
    assert_ok(rft_ranks_open(&bench->server.server, 1, RANKS, NULL));
    rft_rank_link_open(&bench->server.server, "tcp://127.0.0.1:1", 5, bench->server.now);
    hear_welcome(bench); /* of the channel before, which is still open */
    assert_int_equal(bench->server.server.ranks.link.state, RFT_LINK_CONNECTING);
    bench->server.server.ranks.link.reopen = false; /* as the service thread does */
    hear_welcome(bench);
    hear_all_there(bench);
    hear_offer(bench, VERSION);
}

static void begin_and_write(ranks_bench *bench)
{
    server_bench_begin(&bench->server, VERSION);
    ranks_bench_write(bench);
}

/* It has sent its sums. */
static void vote(ranks_bench *bench)
{
    follow(bench);
    begin_and_write(bench);
    server_bench_seal(&bench->server);
    assert_true(count_said(bench, RFT_SUMS) > 0);
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_STAGING);
}

/* Rank 0 has aborted the version, and could not say so. */
ON_RANKS(a_version_offered_before_rank_0_was_lost_is_not_begun_after)
{
    follow(bench);
    wait_ms(bench, SILENCE_MS);
    assert_int_equal(bench->server.server.ranks.link.state, RFT_LINK_CONNECTING);
    hear_welcome(bench);
    hear_all_there(bench);
    assert_int_equal(bench->server.server.ranks.link.offered, 0);
    hear_offer(bench, VERSION);
}

/* It may have been committed: that is asked for, and done. */
ON_RANKS(a_version_that_was_voted_for_is_kept_until_rank_0_is_back)
{
    const rft_server *server = &bench->server.server;
    vote(bench);
    wait_ms(bench, SILENCE_MS);
    assert_int_equal(server->ranks.link.state, RFT_LINK_CONNECTING);
    assert_int_equal(server->transaction.state, RFT_TRANSACTION_STAGING);
    hear_welcome(bench);
    assert_int_equal(count_said(bench, RFT_FAILED), 1);
    hear_all_there(bench);
    hear(bench, sample_seal(&bench->sample));
    rft_message commit = {.kind = RFT_COMMIT};
    commit.as.commit.version = VERSION;
    hear(bench, commit);
    assert_int_equal(server->transaction.state, RFT_TRANSACTION_IDLE);
    assert_int_equal(server->current.version, VERSION);
    assert_int_equal(server->current.epoch, SERVER_EPOCH + 1);
    assert_true(rft_digest128_equal(&server->current.digest, &bench->sample.digest));
}

ON_RANKS(a_version_that_was_voted_for_is_given_up_once_rank_0_stays_away)
{
    const rft_server *server = &bench->server.server;
    vote(bench);
    wait_ms(bench, SILENCE_MS);
    wait_ms(bench, SILENCE_MS - 1);
    assert_int_equal(server->transaction.state, RFT_TRANSACTION_STAGING);
    wait_ms(bench, 1);
    ranks_bench_expect_aborted(bench, "rank 0 (tcp://127.0.0.1:1) is gone");
    assert_int_equal(server->current.version, 0);
}

/* Sums would be a vote for the version. */
ON_RANKS(a_rank_whose_version_is_lost_does_not_vote)
{
    follow(bench);
    begin_and_write(bench);
    hear_abort(bench, VERSION);
    assert_int_equal(count_said(bench, RFT_SUMS), 0);
    server_bench_seal(&bench->server);
    assert_int_equal(count_said(bench, RFT_SUMS), 0);
    ranks_bench_expect_aborted(bench, "rank 0 has aborted version 3: a worker is lost");
}

/* The others would wait for it until the staging timeout. */
ON_RANKS(a_version_that_cannot_begin_fails_at_rank_0)
{
    follow(bench);
    server_bench_prepare(&bench->server, VERSION);
    assert_int_equal(count_said(bench, RFT_FAILED), 0);
    rft_transaction_expire(&bench->server.server, bench->server.now);
    assert_int_equal(count_said(bench, RFT_FAILED), 1);
}

/* Rank 0 has gone on while this one made room for the version. */
ON_RANKS(a_version_that_rank_0_has_left_is_not_written)
{
    follow(bench);
    server_bench_prepare(&bench->server, VERSION);
    hear_offer(bench, VERSION + 1);
    begin_and_write(bench);
    server_bench_seal(&bench->server);
    ranks_bench_expect_aborted(bench, "given it up");
    server_bench_begin(&bench->server, VERSION + 1);
    assert_false(bench->server.server.transaction.doomed);
    rft_transaction_abort(&bench->server.server, REFIT_ERR_CANCELLED, "the test ends");
    server_bench_settle(&bench->server);
}

/* It has not heard yet that it is to subscribe to rank 0. */
ON_RANKS(a_worker_of_before_is_offered_nothing_by_another_rank)
{
    ranks_bench_join(bench);
    join_worker(bench, FIRST);
    vote(bench);
    hear_abort(bench, VERSION);
    ranks_bench_expect_aborted(bench, "a worker is lost"); /* and all are offered the one before */
    hear_offer(bench, VERSION + 1);
    server_bench_begin(&bench->server, VERSION + 1);
    assert_int_equal(server_bench_count(&bench->server, FIRST, RFT_OFFER), 0);
}

/* Rank 0 does not have to find out by its silence. */
ON_RANKS(a_rank_that_has_other_tensors_says_so_and_numbers_its_own_versions)
{
    const rft_server *server = &bench->server.server;
    follow(bench);
    assert_int_equal(server->epoch, SERVER_EPOCH + 1);
    rft_server_adopt(&bench->server.server, bench->server.store);
    assert_int_equal(count_said(bench, RFT_BYE), 1);
    assert_int_equal(server->ranks.link.state, RFT_LINK_OFF);
    assert_int_equal(server->epoch, SERVER_EPOCH);
    assert_int_equal(server->current.epoch, SERVER_EPOCH);
}

int main(void)
{
    return test_run("server_ranks");
}
