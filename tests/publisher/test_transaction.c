/* One version's states: each transition, what decides it, and which worker is blamed. */
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

static void open_with(server_bench *bench, uint32_t slots, unsigned workers, bool shm)
{
    server_bench_reopen(bench, slots, shm);
    for (unsigned worker = 1; worker <= workers; worker++)
        server_bench_join(bench, worker, shm);
}

static void set_quorum(server_bench *bench, uint32_t workers)
{
    bench->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench->config.broadcast_quorum = workers;
}

/* Workers 1 to `workers` stage and apply it. */
static void apply_version(server_bench *bench, uint64_t version, unsigned workers)
{
    server_bench_offer(bench, version);
    for (unsigned worker = 1; worker <= workers; worker++)
        server_bench_stage(bench, worker);
    for (unsigned worker = 1; worker <= workers; worker++)
        server_bench_apply(bench, worker);
}

static void stop_in(server_bench *bench, rft_transaction_state state)
{
    open_with(bench, 2, 2, false);
    if (state >= RFT_TRANSACTION_PREPARING) server_bench_prepare(bench, 1);
    if (state >= RFT_TRANSACTION_WRITING) server_bench_begin(bench, 1);
    if (state >= RFT_TRANSACTION_STAGING) server_bench_write(bench);
    if (state >= RFT_TRANSACTION_STAGING) server_bench_seal(bench);
    if (state == RFT_TRANSACTION_COMMITTING) server_bench_stage(bench, 1);
    if (state == RFT_TRANSACTION_COMMITTING) server_bench_stage(bench, 2);
    if (state == RFT_TRANSACTION_ABORTED)
        rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    assert_int_equal(bench->server.transaction.state, state);
}

static void assert_result(const server_bench *bench, rft_transaction_state state,
                          refit_status status)
{
    assert_int_equal(bench->server.transaction.state, state);
    assert_int_equal(bench->server.transaction.result.status, status);
}

ON_BENCH(good_version_goes_through_all_states)
{
    stop_in(bench, RFT_TRANSACTION_COMMITTING);
    assert_int_equal(server_bench_count(bench, 1, RFT_COMMIT), 1);
    assert_int_equal(bench->server.current.version, 1);
    server_bench_apply(bench, 1);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_COMMITTING);
    server_bench_apply(bench, 2);
    assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_OK);
    assert_int_equal(bench->server.counts.applied_last, 2);
}

ON_BENCH(begin_is_refused_unless_idle)
{
    for (rft_transaction_state at = RFT_TRANSACTION_PREPARING; at <= RFT_TRANSACTION_ABORTED;
         at++) {
        uint64_t version = 0;
        refit_error error;
        stop_in(bench, at);
        assert_int_equal(rft_transaction_prepare(&bench->server, &version, &error),
                         REFIT_ERR_STATE);
        assert_int_equal(version, 0);
    }
}

ON_BENCH(newcomer_is_offered_what_the_state_serves)
{
    static const bool offered[] = {
        [RFT_TRANSACTION_IDLE] = false,      [RFT_TRANSACTION_PREPARING] = false,
        [RFT_TRANSACTION_WRITING] = true,    [RFT_TRANSACTION_STAGING] = true,
        [RFT_TRANSACTION_COMMITTING] = true, [RFT_TRANSACTION_ABORTED] = false,
    };
    for (rft_transaction_state at = RFT_TRANSACTION_IDLE; at <= RFT_TRANSACTION_ABORTED; at++) {
        stop_in(bench, at);
        server_bench_join(bench, 9, false);
        bool sealed = offered[at] && at != RFT_TRANSACTION_WRITING;
        assert_int_equal(server_bench_count(bench, 9, RFT_OFFER), offered[at]);
        assert_int_equal(server_bench_count(bench, 9, RFT_SEAL), sealed);
        assert_false(server_bench_peer(bench, 9)->member);
    }
}

ON_BENCH(slot_that_cannot_be_had_leaves_all_as_it_was)
{
    stop_in(bench, RFT_TRANSACTION_COMMITTING);
    server_bench_apply(bench, 1);
    server_bench_apply(bench, 2);
    server_bench_prepare(bench, 2);
    server_bench_join(bench, 3, false);
    assert_int_equal(server_bench_count(bench, 3, RFT_OFFER), 0);
    rft_transaction_expire(&bench->server, bench->now);
    server_bench_tick(bench, 0);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_int_equal(server_bench_told(bench, 3, RFT_OFFER)->as.offer.version, 1);
}

/* ---- Each way in which a member can be lost */

static void lose_by_failure(server_bench *bench)
{
    server_bench_say(bench, 2, server_failed(1, REFIT_ERR_HOST_MEMORY, true));
}

/* Longer than a report holds, so that it is cut, and nothing in it where a word would end. */
static void lose_by_a_long_story(server_bench *bench)
{
    char story[3 * 80 + 1] = "";
    for (int i = 0; i < 80; i++)
        strcat(story, "\xe5\xb1\x82");
    rft_message message = server_failed(1, REFIT_ERR_HOST_MEMORY, true);
    message.as.failed.reason = rft_view_text(story);
    server_bench_say(bench, 2, message);
}

static void lose_by_goodbye(server_bench *bench)
{
    rft_message message = {.kind = RFT_BYE};
    server_bench_say(bench, 2, message);
}

static void lose_by_silence(server_bench *bench)
{
    server_bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms - 1);
    server_bench_say(bench, 1, server_beat(0, 0));
    server_bench_tick(bench, 1);
}

static void lose_by_unreachability(server_bench *bench)
{
    rft_peer_id id = server_bench_peer(bench, 2)->id;
    rft_server_unreachable(&bench->server, &id, REFIT_ERR_PEER, bench->now);
    server_bench_tick(bench, 0);
}

static void lose_by_garbage(server_bench *bench)
{
    refit_error why = {.text = "not a message"};
    rft_peer_id id = server_bench_peer(bench, 2)->id;
    rft_server_garbage(&bench->server, &id, &why, bench->now);
    server_bench_tick(bench, 0);
}

static void lose_by_a_wrong_digest(server_bench *bench)
{
    rft_message message = server_staged(1);
    message.as.staged.digest.bytes[3] ^= 1;
    server_bench_say(bench, 2, message);
}

static const struct loss {
    const char *name;
    void (*happen)(server_bench *bench);
    bool only_staging; /* it is the answer to a version that is sealed and not committed */
} LOSSES[] = {
    {"a failure", lose_by_failure, false},
    {"a goodbye", lose_by_goodbye, false},
    {"silence", lose_by_silence, false},
    {"a connection that is gone", lose_by_unreachability, false},
    {"garbage", lose_by_garbage, false},
    {"a wrong digest", lose_by_a_wrong_digest, true},
    {"a failure with a long reason", lose_by_a_long_story, false},
};

/* The sentence that the trainer is told. */
static void assert_told(const server_bench *bench, const char *part)
{
    const char *text = bench->server.transaction.result.text;
    if (strstr(text, part) == NULL || !rft_view_is_text(rft_view_text(text)))
        fail_msg("\"%s\" has no \"%s\", or is not text", text, part);
}

static void lose(server_bench *bench, const struct loss *loss)
{
    print_message("%s\n", loss->name);
    loss->happen(bench);
}

ON_BENCH(lost_member_aborts_while_staging)
{
    for (size_t i = 0; i < COUNT_OF(LOSSES); i++) {
        stop_in(bench, RFT_TRANSACTION_STAGING);
        server_bench_stage(bench, 1);
        lose(bench, &LOSSES[i]);
        assert_result(bench, RFT_TRANSACTION_ABORTED, REFIT_ERR_PEER);
        assert_told(bench, "w2");
        assert_told(
            bench,
            "; workers keep the version that they had: refit again, with those that are left");
        assert_int_equal(server_bench_told(bench, 1, RFT_ABORT)->as.failed.version, 1);
        server_bench_settle(bench);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_IDLE);
        assert_int_equal(bench->server.current.version, 0);
    }
}

ON_BENCH(lost_member_aborts_when_all_is_written)
{
    for (size_t i = 0; i < COUNT_OF(LOSSES); i++) {
        if (LOSSES[i].only_staging) continue;
        stop_in(bench, RFT_TRANSACTION_WRITING);
        lose(bench, &LOSSES[i]);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_WRITING);
        server_bench_write(bench);
        server_bench_seal(bench);
        assert_result(bench, RFT_TRANSACTION_ABORTED, REFIT_ERR_PEER);
        server_bench_settle(bench);
    }
}

ON_BENCH(lost_member_is_forgiven_by_a_quorum)
{
    for (size_t i = 0; i < COUNT_OF(LOSSES); i++) {
        stop_in(bench, RFT_TRANSACTION_STAGING);
        set_quorum(bench, 1);
        lose(bench, &LOSSES[i]);
        server_bench_stage(bench, 1);
        assert_result(bench, RFT_TRANSACTION_COMMITTING, REFIT_OK);
        server_bench_apply(bench, 1);
        assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_OK);
    }
}

ON_BENCH(deadline_evicts_late_workers)
{
    stop_in(bench, RFT_TRANSACTION_STAGING);
    bench->config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
    server_bench_stage(bench, 1);
    server_bench_tick(bench, bench->config.broadcast_stage_timeout_ms);
    assert_result(bench, RFT_TRANSACTION_ABORTED, REFIT_ERR_TIMEOUT);
    assert_non_null(server_bench_peer(bench, 1));
    assert_null(server_bench_peer(bench, 2));
    assert_int_equal(server_bench_count(bench, 2, RFT_BYE), 1);
    server_bench_settle(bench);
}

/* Its STAGED was the last answer that was waited for, and does not count any more. */
ON_BENCH(worker_that_starts_over_has_the_time_that_is_left)
{
    for (int joins = 0; joins < 2; joins++) {
        stop_in(bench, RFT_TRANSACTION_STAGING);
        bench->config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
        server_bench_stage(bench, 1);
        if (joins) server_bench_join(bench, 1, false);
        if (!joins) server_bench_hello(bench, 1);
        server_bench_stage(bench, 2);
        server_bench_tick(bench, bench->config.broadcast_stage_timeout_ms - 1);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_STAGING);
        server_bench_tick(bench, 1);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_ABORTED);
        assert_null(server_bench_peer(bench, 1));
        assert_non_null(server_bench_peer(bench, 2));
        server_bench_settle(bench);
        assert_true(rft_server_tick_at(&bench->server) > bench->now);
    }
}

ON_BENCH(staged_worker_that_fails_after_all_is_not_asked_again)
{
    open_with(bench, 2, 2, false);
    apply_version(bench, 1, 2);
    server_bench_offer(bench, 2);
    server_bench_stage(bench, 1);
    server_bench_say(bench, 1, server_failed(2, REFIT_ERR_STALE, true));
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_ABORTED);
    server_bench_settle(bench);
}

ON_BENCH(commit_stands_whatever_happens_after_it)
{
    for (size_t i = 0; i < COUNT_OF(LOSSES); i++) {
        if (LOSSES[i].only_staging) continue;
        stop_in(bench, RFT_TRANSACTION_COMMITTING);
        server_bench_apply(bench, 1);
        lose(bench, &LOSSES[i]);
        assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_ERR_PEER);
        assert_int_equal(bench->server.current.version, 1);
        assert_told(bench, "1 worker did not apply it: worker w2");
        assert_told(bench,
                    "go on with the others: one that joins again, or applies a later version, "
                    "catches up");
    }
}

ON_BENCH(worker_that_never_applies_is_evicted)
{
    stop_in(bench, RFT_TRANSACTION_COMMITTING);
    bench->config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
    server_bench_apply(bench, 1);
    server_bench_tick(bench, bench->config.broadcast_commit_timeout_ms);
    assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_ERR_PEER);
    assert_null(server_bench_peer(bench, 2));
}

ON_BENCH(straggler_has_until_the_commit_deadline)
{
    for (int late = 0; late < 2; late++) {
        stop_in(bench, RFT_TRANSACTION_STAGING);
        set_quorum(bench, 1);
        bench->config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
        server_bench_stage(bench, 1);
        server_bench_apply(bench, 1);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_IDLE);
        server_bench_tick(bench, bench->config.broadcast_commit_timeout_ms - 1);
        if (!late) server_bench_stage(bench, 2);
        assert_int_equal(server_bench_count(bench, 2, RFT_COMMIT), !late);
        if (!late) server_bench_apply(bench, 2);
        server_bench_tick(bench, 1);
        assert_int_equal(server_bench_peer(bench, 2) == NULL, late);
    }
}

/* A straggler that the quorum does not need says COMMITTED when the next version is under way. */
ON_BENCH(what_was_applied_late_counts_for_no_newer_version)
{
    refit_worker_info info = {.size = sizeof info};
    open_with(bench, 2, 2, false);
    set_quorum(bench, 1);
    apply_version(bench, 1, 1);
    server_bench_stage(bench, 2);
    server_bench_offer(bench, 2);
    rft_message late = server_committed(1);
    server_bench_say(bench, 2, late);
    rft_peer_describe(server_bench_peer(bench, 2), &info);
    assert_int_equal(info.version, 1);
    assert_int_equal(info.committed, 0);
    assert_int_equal(bench->server.counts.applied_last, 0);
    assert_int_equal(server_bench_peer(bench, 2)->due, bench->server.transaction.deadline);
    rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    server_bench_settle(bench);
    server_bench_say(bench, 2, late);
    rft_peer_describe(server_bench_peer(bench, 2), &info);
    assert_int_equal(info.committed, 0);
}

ON_BENCH(quorum_out_of_reach_is_not_waited_for)
{
    stop_in(bench, RFT_TRANSACTION_WRITING);
    set_quorum(bench, 3);
    server_bench_write(bench);
    server_bench_seal(bench);
    assert_result(bench, RFT_TRANSACTION_ABORTED, REFIT_ERR_PEER);
    server_bench_settle(bench);
}

/* Worker 1 of three fails, joins again and stages; two are a quorum. */
static void fail_and_stage_again(server_bench *bench, rft_message failed)
{
    open_with(bench, 2, 3, false);
    set_quorum(bench, 2);
    server_bench_offer(bench, 1);
    server_bench_say(bench, 1, failed);
    server_bench_join(bench, 1, false);
    server_bench_stage(bench, 1);
}

/* It has failed and staged: were it counted as both, a second failure would end the version. */
ON_BENCH(member_that_failed_and_then_staged_counts_as_staged)
{
    const rft_message failed = server_failed(1, REFIT_ERR_HOST_MEMORY, false);
    fail_and_stage_again(bench, failed);
    server_bench_say(bench, 2, failed);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_STAGING);
    assert_int_equal(bench->server.transaction.lost, 1);
    assert_ok(server_bench_peer(bench, 1)->status);
    server_bench_stage(bench, 3);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_COMMITTING);
    server_bench_apply(bench, 1);
    server_bench_apply(bench, 3);
    assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_OK);
}

ON_BENCH(member_that_fails_a_second_time_is_lost_again)
{
    const rft_message failed = server_failed(1, REFIT_ERR_HOST_MEMORY, false);
    fail_and_stage_again(bench, failed);
    server_bench_say(bench, 1, failed);
    assert_int_equal(bench->server.transaction.lost, 1);
    assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_STAGING);
    server_bench_say(bench, 2, failed);
    assert_result(bench, RFT_TRANSACTION_ABORTED, REFIT_ERR_PEER);
    server_bench_settle(bench);
}

ON_BENCH(readers_block_the_slot_that_comes_next)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        open_with(bench, slots, 2, true);
        for (uint64_t version = 1; version <= slots; version++)
            apply_version(bench, version, 2);
        server_bench_prepare(bench, slots + 1);
        assert_true(rft_server_has_readers(&bench->server));
        server_bench_say(bench, 1, server_released(1));
        assert_true(rft_server_has_readers(&bench->server));
        rft_server_evict_readers(&bench->server, bench->now);
        assert_false(rft_server_has_readers(&bench->server));
        assert_non_null(server_bench_peer(bench, 1));
        assert_null(server_bench_peer(bench, 2));
        assert_true(bench->store->slots[rft_store_target(bench->store)].tainted);
    }
}

ON_BENCH(newer_version_ends_what_is_still_fetched)
{
    open_with(bench, 2, 1, false);
    apply_version(bench, 1, 1);
    server_bench_join(bench, 2, false);
    server_bench_prepare(bench, 2);
    assert_int_equal(server_bench_told(bench, 2, RFT_ABORT)->as.failed.version, 1);
    assert_int_equal(server_bench_count(bench, 1, RFT_ABORT), 0);
    server_bench_begin(bench, 2);
    assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 1);
    assert_int_equal(server_bench_told(bench, 2, RFT_OFFER)->as.offer.base, 0);
    assert_true(server_bench_peer(bench, 2)->member);
}

ON_BENCH(workers_after_after_an_abort_catch_up)
{
    open_with(bench, 1, 1, false);
    apply_version(bench, 1, 1);
    server_bench_begin(bench, 2);
    server_bench_join(bench, 2, false);
    rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    server_bench_forget(bench);
    server_bench_settle(bench);
    assert_int_equal(server_bench_count(bench, 1, RFT_OFFER), 0);
    assert_int_equal(server_bench_told(bench, 2, RFT_OFFER)->as.offer.version, 1);
    assert_int_equal(server_bench_count(bench, 2, RFT_SEAL), 1);
    server_bench_stage(bench, 2); /* a late STAGED of the aborted version */
    assert_int_equal(server_bench_told(bench, 2, RFT_ABORT)->as.failed.version, 2);
    server_bench_say(bench, 2, server_staged(1));
    assert_int_equal(server_bench_told(bench, 2, RFT_COMMIT)->as.commit.version, 1);
}

/* The worker is offered a version, stages it, and is told to drop it for a newer one, which is
 * aborted. Its first STAGED arrives before it is offered the version again, or after that. */
ON_BENCH(staged_of_an_earlier_offer_loses_no_worker_the_version)
{
    for (int after = 0; after < 2; after++) {
        open_with(bench, 1, 1, false);
        apply_version(bench, 1, 1);
        server_bench_join(bench, 2, false);
        server_bench_begin(bench, 2);
        rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
        rft_message late = server_staged(1), failed = server_failed(1, REFIT_ERR_STATE, true);
        if (!after) server_bench_say(bench, 2, late);
        server_bench_settle(bench);
        if (after) server_bench_say(bench, 2, late);
        assert_int_equal(server_bench_count(bench, 2, RFT_COMMIT), 1);
        server_bench_forget(bench);
        server_bench_say(bench, 2, failed);
        assert_int_equal(server_bench_count(bench, 2, RFT_OFFER), after);
        assert_int_equal(server_bench_peer(bench, 2)->task.stage, RFT_STAGE_OFFERED);
        server_bench_say(bench, 2, late);
        assert_int_equal(server_bench_count(bench, 2, RFT_COMMIT), 1);
        server_bench_say(bench, 2, server_committed(1));
        assert_int_equal(server_bench_peer(bench, 2)->held.version, 1);
        assert_ok(server_bench_peer(bench, 2)->status);
    }
}

ON_BENCH(version_that_failed_is_not_offered_again)
{
    open_with(bench, 2, 1, false);
    server_bench_offer(bench, 1);
    server_bench_stage(bench, 1);
    server_bench_say(bench, 1, server_failed(1, REFIT_ERR_CALLBACK, false));
    assert_int_equal(bench->server.transaction.result.status, REFIT_ERR_PEER);
    server_bench_begin(bench, 2);
    assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.version, 2);
    rft_transaction_abort(&bench->server, REFIT_ERR_CANCELLED, "test");
    server_bench_forget(bench);
    server_bench_settle(bench);
    assert_int_equal(server_bench_count(bench, 1, RFT_OFFER), 0);
}

/* The base is gone, or was written over, which in blocks that travel as the same is only found at
 * the end. */
static const refit_status BAD_BASES[] = {REFIT_ERR_STALE, REFIT_ERR_CORRUPT};

/* Version 2 is offered as a change of version 1, and the worker fails with it. */
static void fail_on_a_base(server_bench *bench, refit_status code)
{
    open_with(bench, 2, 1, false);
    apply_version(bench, 1, 1);
    server_bench_offer(bench, 2);
    assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 1);
    server_bench_say(bench, 1, server_failed(2, code, true));
}

ON_BENCH(base_that_is_not_right_makes_the_offer_a_whole_one)
{
    for (size_t i = 0; i < COUNT_OF(BAD_BASES); i++) {
        fail_on_a_base(bench, BAD_BASES[i]);
        assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 0);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_STAGING);
        server_bench_stage(bench, 1);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_COMMITTING);
        server_bench_apply(bench, 1);
        server_bench_offer(bench, 3);
        assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 2);
    }
}

ON_BENCH(whole_version_that_fails_is_not_offered_again)
{
    for (size_t i = 0; i < COUNT_OF(BAD_BASES); i++) {
        fail_on_a_base(bench, BAD_BASES[i]);
        server_bench_forget(bench);
        server_bench_say(bench, 1, server_failed(2, BAD_BASES[i], true));
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_ABORTED);
        assert_int_equal(server_bench_count(bench, 1, RFT_OFFER), 0);
        server_bench_settle(bench);
    }
}

/* It says that it has refused the version, and then that it has staged it, of an offer that was on
 * its way. What it is told to apply then must not change while it reads. */
ON_BENCH(a_version_that_is_staged_after_all_is_lent)
{
    open_with(bench, 1, 1, true);
    server_bench_offer(bench, 1);
    server_bench_stage(bench, 1);
    server_bench_say(bench, 1, server_failed(1, REFIT_ERR_PEER, true));
    server_bench_say(bench, 1, server_released(1));
    assert_int_equal(rft_peer_reads(server_bench_peer(bench, 1), 1), REFIT_PATH_NONE);
    server_bench_stage(bench, 1);
    assert_non_null(server_bench_told(bench, 1, RFT_COMMIT));
    assert_int_equal(rft_peer_reads(server_bench_peer(bench, 1), 1), REFIT_PATH_SHM);
}

/* ---- Without a wait for workers to apply */

static void open_staged(server_bench *bench, uint32_t max_behind)
{
    open_with(bench, 2, 2, false);
    bench->config.broadcast_wait = REFIT_WAIT_STAGED;
    bench->config.broadcast_max_behind = max_behind;
}

/* Both workers are heard for so long, and say nothing new. */
static void wait_out(server_bench *bench, uint32_t ms)
{
    uint64_t held = server_bench_peer(bench, 1)->held.version;
    for (uint32_t step = 0; step < ms; step += bench->config.broadcast_heartbeat_ms) {
        server_bench_forget(bench);
        server_bench_say(bench, 1, server_beat(held, 0));
        server_bench_say(bench, 2, server_beat(0, 0));
        server_bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    }
}

/* Both workers have the version, and go on with the one that they have. */
static void stage_version(server_bench *bench, uint64_t version)
{
    server_bench_offer(bench, version);
    server_bench_stage(bench, 1);
    server_bench_stage(bench, 2);
}

ON_BENCH(version_is_over_when_all_have_it)
{
    open_staged(bench, 0);
    for (uint64_t version = 1; version <= 4; version++) {
        stage_version(bench, version);
        assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_OK);
        assert_int_equal(bench->server.current.version, version);
    }
    wait_out(bench, 2 * bench->config.broadcast_commit_timeout_ms);
    assert_int_equal(bench->server.counts.evicted, 0);
    server_bench_apply(bench, 1);
    assert_int_equal(server_bench_peer(bench, 1)->held.version, 4);
}

ON_BENCH(one_worker_may_fall_as_far_behind_as_is_allowed)
{
    open_staged(bench, 2);
    for (uint64_t version = 1; version <= 2; version++) {
        stage_version(bench, version);
        server_bench_apply(bench, 1);
        assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_OK);
    }
    stage_version(bench, 3);
    assert_result(bench, RFT_TRANSACTION_COMMITTING, REFIT_OK);
    assert_false(server_bench_peer(bench, 1)->awaited);
    assert_true(server_bench_peer(bench, 2)->awaited);
    server_bench_say(bench, 2, server_committed(2));
    assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_OK);
    assert_int_equal(server_bench_peer(bench, 2)->held.version, 2);
}

ON_BENCH(one_that_stays_too_far_behind_is_evicted)
{
    open_staged(bench, 1);
    stage_version(bench, 1);
    stage_version(bench, 2);
    assert_result(bench, RFT_TRANSACTION_COMMITTING, REFIT_OK);
    server_bench_apply(bench, 1);
    wait_out(bench, bench->config.broadcast_commit_timeout_ms);
    assert_result(bench, RFT_TRANSACTION_IDLE, REFIT_ERR_PEER);
    assert_int_equal(bench->server.counts.evicted, 1);
    assert_int_equal(bench->server.current.version, 2);
}

int main(void)
{
    return test_run("transaction");
}
