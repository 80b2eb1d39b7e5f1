/* One version's states: each transition, who decides it, and who is blamed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "hub_bench.h"

static void open_with(hub_bench *bench, uint32_t slots, unsigned workers, bool shm)
{
    hub_bench_open(bench, slots, shm);
    for (unsigned worker = 1; worker <= workers; worker++) {
        hub_bench_join(bench, worker, shm);
    }
}

static void stop_in(hub_bench *bench, rft_round_state state)
{
    open_with(bench, 2, 2, false);
    if (state >= RFT_ROUND_PREPARING) hub_bench_prepare(bench, 1);
    if (state >= RFT_ROUND_WRITING) hub_bench_begin(bench, 1);
    if (state >= RFT_ROUND_STAGING) hub_bench_write(bench);
    if (state >= RFT_ROUND_STAGING) hub_bench_seal(bench);
    if (state == RFT_ROUND_COMMITTING) hub_bench_stage(bench, 1);
    if (state == RFT_ROUND_COMMITTING) hub_bench_stage(bench, 2);
    if (state == RFT_ROUND_ABORTED) rft_round_abort(&bench->hub, REFIT_ERR_CANCELLED, "test");
    assert_int_equal(bench->hub.round.state, state);
}

static void good_version_goes_through_all_states(void **state)
{
    (void)state;
    hub_bench bench;
    stop_in(&bench, RFT_ROUND_COMMITTING);
    assert_int_equal(hub_bench_count(&bench, 1, RFT_COMMIT), 1);
    assert_int_equal(bench.hub.current.version, 1);
    hub_bench_apply(&bench, 1);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_COMMITTING);
    hub_bench_apply(&bench, 2);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
    assert_int_equal(bench.hub.round.result.status, REFIT_OK);
    assert_int_equal(bench.hub.counts.applied_last, 2);
    hub_bench_close(&bench);
}

static void begin_is_refused_unless_idle(void **state)
{
    (void)state;
    for (rft_round_state at = RFT_ROUND_PREPARING; at <= RFT_ROUND_ABORTED; at++) {
        hub_bench bench;
        uint64_t version = 0;
        refit_error error;
        stop_in(&bench, at);
        assert_int_equal(rft_round_prepare(&bench.hub, &version, &error), REFIT_ERR_STATE);
        assert_int_equal(version, 0);
        hub_bench_close(&bench);
    }
}

static void newcomer_is_offered_what_the_state_serves(void **state)
{
    (void)state;
    static const bool offered[] = {
        [RFT_ROUND_IDLE] = false,   [RFT_ROUND_PREPARING] = false, [RFT_ROUND_WRITING] = true,
        [RFT_ROUND_STAGING] = true, [RFT_ROUND_COMMITTING] = true, [RFT_ROUND_ABORTED] = false,
    };
    for (rft_round_state at = RFT_ROUND_IDLE; at <= RFT_ROUND_ABORTED; at++) {
        hub_bench bench;
        stop_in(&bench, at);
        hub_bench_join(&bench, 9, false);
        bool sealed = offered[at] && at != RFT_ROUND_WRITING;
        assert_int_equal(hub_bench_count(&bench, 9, RFT_OFFER), offered[at]);
        assert_int_equal(hub_bench_count(&bench, 9, RFT_SEAL), sealed);
        assert_false(hub_bench_peer(&bench, 9)->member);
        hub_bench_close(&bench);
    }
}

static void slot_that_cannot_be_had_leaves_all_as_it_was(void **state)
{
    (void)state;
    hub_bench bench;
    stop_in(&bench, RFT_ROUND_COMMITTING);
    hub_bench_apply(&bench, 1);
    hub_bench_apply(&bench, 2);
    hub_bench_prepare(&bench, 2);
    hub_bench_join(&bench, 3, false);
    assert_int_equal(hub_bench_count(&bench, 3, RFT_OFFER), 0);
    rft_round_give_up(&bench.hub, bench.now);
    hub_bench_tick(&bench, 0);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
    assert_int_equal(hub_bench_told(&bench, 3, RFT_OFFER)->as.offer.version, 1);
    hub_bench_close(&bench);
}

/* Each way in which a member can fail to stage, and what the trainer is told. */
typedef struct loss {
    void (*happen)(hub_bench *bench);
    refit_status status;
} loss;

static void lose_by_failure(hub_bench *bench)
{
    rft_message message = hub_failed(1, REFIT_ERR_HOST_MEMORY, true);
    hub_bench_say(bench, 2, &message);
}

/* Longer than a report holds, so that it is cut, and nothing in it where a word would end. */
static void lose_by_a_long_story(hub_bench *bench)
{
    char story[3 * 80 + 1] = "";
    for (int i = 0; i < 80; i++)
        strcat(story, "\xe5\xb1\x82");
    rft_message message = hub_failed(1, REFIT_ERR_HOST_MEMORY, true);
    message.as.failed.reason = rft_view_text(story);
    hub_bench_say(bench, 2, &message);
}

static void lose_by_goodbye(hub_bench *bench)
{
    rft_message message = {.kind = RFT_BYE};
    hub_bench_say(bench, 2, &message);
}

static void lose_by_silence(hub_bench *bench)
{
    rft_message beat = hub_beat(0, 0);
    hub_bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms - 1);
    hub_bench_say(bench, 1, &beat);
    hub_bench_tick(bench, 1);
}

static void lose_by_unreachability(hub_bench *bench)
{
    rft_peer_id id = hub_bench_peer(bench, 2)->id;
    rft_hub_unreachable(&bench->hub, &id, REFIT_ERR_PEER, bench->now);
    hub_bench_tick(bench, 0);
}

static void lose_by_garbage(hub_bench *bench)
{
    refit_error why = {.text = "not a message"};
    rft_peer_id id = hub_bench_peer(bench, 2)->id;
    rft_hub_garbage(&bench->hub, &id, &why, bench->now);
    hub_bench_tick(bench, 0);
}

static void lose_by_a_wrong_digest(hub_bench *bench)
{
    rft_message message = hub_staged(1);
    message.as.staged.digest.bytes[3] ^= 1;
    hub_bench_say(bench, 2, &message);
}

static const loss LOSSES[] = {
    {lose_by_failure, REFIT_ERR_PEER},      {lose_by_goodbye, REFIT_ERR_PEER},
    {lose_by_silence, REFIT_ERR_PEER},      {lose_by_unreachability, REFIT_ERR_PEER},
    {lose_by_garbage, REFIT_ERR_PEER},      {lose_by_a_wrong_digest, REFIT_ERR_PEER},
    {lose_by_a_long_story, REFIT_ERR_PEER},
};

static void lost_member_aborts_while_staging(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof LOSSES / sizeof LOSSES[0]; i++) {
        hub_bench bench;
        stop_in(&bench, RFT_ROUND_STAGING);
        hub_bench_stage(&bench, 1);
        LOSSES[i].happen(&bench);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
        assert_int_equal(bench.hub.round.result.status, LOSSES[i].status);
        assert_non_null(strstr(bench.hub.round.result.text, "w2"));
        assert_true(rft_view_is_text(rft_view_text(bench.hub.round.result.text)));
        assert_non_null(
            strstr(bench.hub.round.result.text,
                   "; workers keep what they had: refit again, with those that are left"));
        assert_int_equal(hub_bench_told(&bench, 1, RFT_ABORT)->as.failed.version, 1);
        hub_bench_settle(&bench);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
        assert_int_equal(bench.hub.current.version, 0);
        hub_bench_close(&bench);
    }
}

static void lost_member_aborts_when_all_is_written(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof LOSSES / sizeof LOSSES[0]; i++) {
        hub_bench bench;
        if (LOSSES[i].happen == lose_by_a_wrong_digest) continue;
        stop_in(&bench, RFT_ROUND_WRITING);
        LOSSES[i].happen(&bench);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_WRITING);
        hub_bench_write(&bench);
        hub_bench_seal(&bench);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
        hub_bench_settle(&bench);
        hub_bench_close(&bench);
    }
}

static void lost_member_is_forgiven_by_a_quorum(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof LOSSES / sizeof LOSSES[0]; i++) {
        hub_bench bench;
        stop_in(&bench, RFT_ROUND_STAGING);
        bench.config.broadcast_commit = REFIT_COMMIT_QUORUM;
        bench.config.broadcast_quorum = 1;
        LOSSES[i].happen(&bench);
        hub_bench_stage(&bench, 1);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_COMMITTING);
        hub_bench_apply(&bench, 1);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
        assert_int_equal(bench.hub.round.result.status, REFIT_OK);
        hub_bench_close(&bench);
    }
}

static void deadline_evicts_whoever_is_late(void **state)
{
    (void)state;
    hub_bench bench;
    stop_in(&bench, RFT_ROUND_STAGING);
    bench.config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
    hub_bench_stage(&bench, 1);
    hub_bench_tick(&bench, bench.config.broadcast_stage_timeout_ms);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
    assert_int_equal(bench.hub.round.result.status, REFIT_ERR_TIMEOUT);
    assert_non_null(hub_bench_peer(&bench, 1));
    assert_null(hub_bench_peer(&bench, 2));
    assert_int_equal(hub_bench_count(&bench, 2, RFT_BYE), 1);
    hub_bench_settle(&bench);
    hub_bench_close(&bench);
}

/* Its STAGED was the last answer that was waited for, and is worth nothing any more. */
static void worker_that_starts_over_has_the_time_that_is_left(void **state)
{
    (void)state;
    for (int joins = 0; joins < 2; joins++) {
        hub_bench bench;
        stop_in(&bench, RFT_ROUND_STAGING);
        bench.config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
        hub_bench_stage(&bench, 1);
        if (joins) hub_bench_join(&bench, 1, false);
        if (!joins) hub_bench_hello(&bench, 1);
        hub_bench_stage(&bench, 2);
        hub_bench_tick(&bench, bench.config.broadcast_stage_timeout_ms - 1);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_STAGING);
        hub_bench_tick(&bench, 1);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
        assert_null(hub_bench_peer(&bench, 1));
        assert_non_null(hub_bench_peer(&bench, 2));
        hub_bench_settle(&bench);
        assert_true(rft_hub_tick_at(&bench.hub) > bench.now);
        hub_bench_close(&bench);
    }
}

static void staged_worker_that_fails_after_all_is_not_asked_again(void **state)
{
    (void)state;
    hub_bench bench;
    open_with(&bench, 2, 2, false);
    hub_bench_offer(&bench, 1);
    for (unsigned worker = 1; worker <= 2; worker++) {
        hub_bench_stage(&bench, worker);
    }
    for (unsigned worker = 1; worker <= 2; worker++) {
        hub_bench_apply(&bench, worker);
    }
    hub_bench_offer(&bench, 2);
    hub_bench_stage(&bench, 1);
    rft_message failed = hub_failed(2, REFIT_ERR_STALE, true);
    hub_bench_say(&bench, 1, &failed);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
    hub_bench_settle(&bench);
    hub_bench_close(&bench);
}

static void commit_stands_whatever_happens_after_it(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof LOSSES / sizeof LOSSES[0]; i++) {
        hub_bench bench;
        if (LOSSES[i].happen == lose_by_a_wrong_digest) continue;
        stop_in(&bench, RFT_ROUND_COMMITTING);
        hub_bench_apply(&bench, 1);
        LOSSES[i].happen(&bench);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
        assert_int_equal(bench.hub.round.result.status, REFIT_ERR_PEER);
        assert_int_equal(bench.hub.current.version, 1);
        const char *text = bench.hub.round.result.text;
        assert_non_null(strstr(text, "1 worker did not apply it: worker w2"));
        assert_non_null(strstr(text, "go on with the others: one that joins again, or "
                                     "applies a later version, catches up"));
        assert_true(rft_view_is_text(rft_view_text(text)));
        hub_bench_close(&bench);
    }
}

static void worker_that_never_applies_is_evicted(void **state)
{
    (void)state;
    hub_bench bench;
    stop_in(&bench, RFT_ROUND_COMMITTING);
    bench.config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
    hub_bench_apply(&bench, 1);
    hub_bench_tick(&bench, bench.config.broadcast_commit_timeout_ms);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
    assert_int_equal(bench.hub.round.result.status, REFIT_ERR_PEER);
    assert_null(hub_bench_peer(&bench, 2));
    hub_bench_close(&bench);
}

static void straggler_has_until_the_commit_deadline(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        hub_bench bench;
        stop_in(&bench, RFT_ROUND_STAGING);
        bench.config.broadcast_commit = REFIT_COMMIT_QUORUM;
        bench.config.broadcast_quorum = 1;
        bench.config.broadcast_heartbeat_timeout_ms = UINT32_MAX;
        hub_bench_stage(&bench, 1);
        hub_bench_apply(&bench, 1);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
        hub_bench_tick(&bench, bench.config.broadcast_commit_timeout_ms - 1);
        if (!late) hub_bench_stage(&bench, 2);
        assert_int_equal(hub_bench_count(&bench, 2, RFT_COMMIT), !late);
        if (!late) hub_bench_apply(&bench, 2);
        hub_bench_tick(&bench, 1);
        assert_int_equal(hub_bench_peer(&bench, 2) == NULL, late);
        hub_bench_close(&bench);
    }
}

/* A straggler, of whom a quorum has no need, says what it applied when the next version is under
 * way. */
static void what_was_applied_late_counts_for_no_newer_version(void **state)
{
    (void)state;
    hub_bench bench;
    refit_worker_info info = {.size = sizeof info};
    hub_bench_open(&bench, 2, false);
    bench.config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench.config.broadcast_quorum = 1;
    hub_bench_join(&bench, 1, false);
    hub_bench_join(&bench, 2, false);
    hub_bench_offer(&bench, 1);
    hub_bench_stage(&bench, 1);
    hub_bench_apply(&bench, 1);
    hub_bench_stage(&bench, 2);
    hub_bench_offer(&bench, 2);
    rft_message late = hub_committed(1);
    hub_bench_say(&bench, 2, &late);
    rft_peer_describe(hub_bench_peer(&bench, 2), &info);
    assert_int_equal(info.version, 1);
    assert_int_equal(info.committed, 0);
    assert_int_equal(bench.hub.counts.applied_last, 0);
    assert_int_equal(hub_bench_peer(&bench, 2)->due, bench.hub.round.deadline);
    rft_round_abort(&bench.hub, REFIT_ERR_CANCELLED, "test");
    hub_bench_settle(&bench);
    hub_bench_say(&bench, 2, &late);
    rft_peer_describe(hub_bench_peer(&bench, 2), &info);
    assert_int_equal(info.committed, 0);
    hub_bench_close(&bench);
}

static void quorum_out_of_reach_is_not_waited_for(void **state)
{
    (void)state;
    hub_bench bench;
    stop_in(&bench, RFT_ROUND_WRITING);
    bench.config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench.config.broadcast_quorum = 3;
    hub_bench_write(&bench);
    hub_bench_seal(&bench);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
    assert_int_equal(bench.hub.round.result.status, REFIT_ERR_PEER);
    hub_bench_settle(&bench);
    hub_bench_close(&bench);
}

/* It has failed and staged: were it counted as both, a second failure would end the version. */
static void member_that_failed_and_then_staged_counts_as_staged(void **state)
{
    (void)state;
    hub_bench bench;
    open_with(&bench, 2, 3, false);
    bench.config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench.config.broadcast_quorum = 2;
    hub_bench_offer(&bench, 1);
    rft_message failed = hub_failed(1, REFIT_ERR_HOST_MEMORY, false);
    hub_bench_say(&bench, 1, &failed);
    hub_bench_join(&bench, 1, false);
    hub_bench_stage(&bench, 1);
    hub_bench_say(&bench, 2, &failed);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_STAGING);
    assert_int_equal(bench.hub.round.lost, 1);
    assert_int_equal(hub_bench_peer(&bench, 1)->status, REFIT_OK);
    hub_bench_stage(&bench, 3);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_COMMITTING);
    hub_bench_apply(&bench, 1);
    hub_bench_apply(&bench, 3);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_IDLE);
    assert_int_equal(bench.hub.round.result.status, REFIT_OK);
    hub_bench_close(&bench);
}

static void member_that_fails_a_second_time_is_lost_again(void **state)
{
    (void)state;
    hub_bench bench;
    open_with(&bench, 2, 3, false);
    bench.config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench.config.broadcast_quorum = 2;
    hub_bench_offer(&bench, 1);
    rft_message failed = hub_failed(1, REFIT_ERR_HOST_MEMORY, false);
    hub_bench_say(&bench, 1, &failed);
    hub_bench_join(&bench, 1, false);
    hub_bench_stage(&bench, 1);
    hub_bench_say(&bench, 1, &failed);
    assert_int_equal(bench.hub.round.lost, 1);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_STAGING);
    hub_bench_say(&bench, 2, &failed);
    assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
    assert_int_equal(bench.hub.round.result.status, REFIT_ERR_PEER);
    hub_bench_settle(&bench);
    hub_bench_close(&bench);
}

static void readers_block_the_slot_that_comes_next(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        hub_bench bench;
        open_with(&bench, slots, 2, true);
        for (uint64_t version = 1; version <= slots; version++) {
            hub_bench_offer(&bench, version);
            hub_bench_stage(&bench, 1);
            hub_bench_stage(&bench, 2);
            hub_bench_apply(&bench, 1);
            hub_bench_apply(&bench, 2);
        }
        hub_bench_prepare(&bench, slots + 1);
        assert_true(rft_round_is_blocked(&bench.hub));
        rft_message released = hub_released(1);
        hub_bench_say(&bench, 1, &released);
        assert_true(rft_round_is_blocked(&bench.hub));
        rft_round_evict_readers(&bench.hub, bench.now);
        assert_false(rft_round_is_blocked(&bench.hub));
        assert_non_null(hub_bench_peer(&bench, 1));
        assert_null(hub_bench_peer(&bench, 2));
        assert_true(bench.store->slots[rft_store_target(bench.store)].tainted);
        hub_bench_close(&bench);
    }
}

static void newer_version_ends_what_is_still_fetched(void **state)
{
    (void)state;
    hub_bench bench;
    open_with(&bench, 2, 1, false);
    hub_bench_offer(&bench, 1);
    hub_bench_stage(&bench, 1);
    hub_bench_apply(&bench, 1);
    hub_bench_join(&bench, 2, false);
    hub_bench_prepare(&bench, 2);
    assert_int_equal(hub_bench_told(&bench, 2, RFT_ABORT)->as.failed.version, 1);
    assert_int_equal(hub_bench_count(&bench, 1, RFT_ABORT), 0);
    hub_bench_begin(&bench, 2);
    assert_int_equal(hub_bench_told(&bench, 1, RFT_OFFER)->as.offer.base, 1);
    assert_int_equal(hub_bench_told(&bench, 2, RFT_OFFER)->as.offer.base, 0);
    assert_true(hub_bench_peer(&bench, 2)->member);
    hub_bench_close(&bench);
}

static void whoever_is_behind_after_an_abort_is_brought_up(void **state)
{
    (void)state;
    hub_bench bench;
    open_with(&bench, 1, 1, false);
    hub_bench_offer(&bench, 1);
    hub_bench_stage(&bench, 1);
    hub_bench_apply(&bench, 1);
    hub_bench_begin(&bench, 2);
    hub_bench_join(&bench, 2, false);
    rft_round_abort(&bench.hub, REFIT_ERR_CANCELLED, "test");
    hub_bench_forget(&bench);
    hub_bench_settle(&bench);
    assert_int_equal(hub_bench_count(&bench, 1, RFT_OFFER), 0);
    assert_int_equal(hub_bench_told(&bench, 2, RFT_OFFER)->as.offer.version, 1);
    assert_int_equal(hub_bench_count(&bench, 2, RFT_SEAL), 1);
    hub_bench_stage(&bench, 2); /* a late STAGED of the aborted version */
    assert_int_equal(hub_bench_told(&bench, 2, RFT_ABORT)->as.failed.version, 2);
    rft_message staged = hub_staged(1);
    hub_bench_say(&bench, 2, &staged);
    assert_int_equal(hub_bench_told(&bench, 2, RFT_COMMIT)->as.commit.version, 1);
    hub_bench_close(&bench);
}

/* The worker is offered a version, staged it, is told to drop it for a newer one, which is aborted;
 * what it had said first comes before it is offered the version again, or after that. */
static void what_was_staged_of_an_earlier_offer_loses_nobody_the_version(void **state)
{
    (void)state;
    for (int after = 0; after < 2; after++) {
        hub_bench bench;
        open_with(&bench, 1, 1, false);
        hub_bench_offer(&bench, 1);
        hub_bench_stage(&bench, 1);
        hub_bench_apply(&bench, 1);
        hub_bench_join(&bench, 2, false);
        hub_bench_begin(&bench, 2);
        rft_round_abort(&bench.hub, REFIT_ERR_CANCELLED, "test");
        rft_message late = hub_staged(1), failed = hub_failed(1, REFIT_ERR_STATE, true);
        if (!after) hub_bench_say(&bench, 2, &late);
        hub_bench_settle(&bench);
        if (after) hub_bench_say(&bench, 2, &late);
        assert_int_equal(hub_bench_count(&bench, 2, RFT_COMMIT), 1);
        hub_bench_forget(&bench);
        hub_bench_say(&bench, 2, &failed);
        assert_int_equal(hub_bench_count(&bench, 2, RFT_OFFER), after);
        assert_int_equal(hub_bench_peer(&bench, 2)->task.stage, RFT_STAGE_OFFERED);
        hub_bench_say(&bench, 2, &late);
        assert_int_equal(hub_bench_count(&bench, 2, RFT_COMMIT), 1);
        rft_message applied = hub_committed(1);
        hub_bench_say(&bench, 2, &applied);
        assert_int_equal(hub_bench_peer(&bench, 2)->held.version, 1);
        assert_int_equal(hub_bench_peer(&bench, 2)->status, REFIT_OK);
        hub_bench_close(&bench);
    }
}

static void version_that_failed_is_not_offered_again(void **state)
{
    (void)state;
    hub_bench bench;
    open_with(&bench, 2, 1, false);
    hub_bench_offer(&bench, 1);
    hub_bench_stage(&bench, 1);
    rft_message failed = hub_failed(1, REFIT_ERR_CALLBACK, false);
    hub_bench_say(&bench, 1, &failed);
    assert_int_equal(bench.hub.round.result.status, REFIT_ERR_PEER);
    hub_bench_begin(&bench, 2);
    assert_int_equal(hub_bench_told(&bench, 1, RFT_OFFER)->as.offer.version, 2);
    rft_round_abort(&bench.hub, REFIT_ERR_CANCELLED, "test");
    hub_bench_forget(&bench);
    hub_bench_settle(&bench);
    assert_int_equal(hub_bench_count(&bench, 1, RFT_OFFER), 0);
    hub_bench_close(&bench);
}

/* Gone, or written over: its bytes in blocks that travel as the same are only seen at the end. */
static const refit_status BAD_BASES[] = {REFIT_ERR_STALE, REFIT_ERR_CORRUPT};

/* Version 2 is offered as a change of version 1, and the worker fails with it. */
static void fail_on_a_base(hub_bench *bench, refit_status code)
{
    open_with(bench, 2, 1, false);
    hub_bench_offer(bench, 1);
    hub_bench_stage(bench, 1);
    hub_bench_apply(bench, 1);
    hub_bench_offer(bench, 2);
    assert_int_equal(hub_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 1);
    rft_message failed = hub_failed(2, code, true);
    hub_bench_say(bench, 1, &failed);
}

static void base_that_is_not_right_makes_the_offer_a_whole_one(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof BAD_BASES / sizeof BAD_BASES[0]; i++) {
        hub_bench bench;
        fail_on_a_base(&bench, BAD_BASES[i]);
        assert_int_equal(hub_bench_told(&bench, 1, RFT_OFFER)->as.offer.base, 0);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_STAGING);
        hub_bench_stage(&bench, 1);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_COMMITTING);
        hub_bench_apply(&bench, 1);
        hub_bench_offer(&bench, 3);
        assert_int_equal(hub_bench_told(&bench, 1, RFT_OFFER)->as.offer.base, 2);
        hub_bench_close(&bench);
    }
}

static void whole_version_that_fails_is_not_offered_again(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof BAD_BASES / sizeof BAD_BASES[0]; i++) {
        hub_bench bench;
        fail_on_a_base(&bench, BAD_BASES[i]);
        hub_bench_forget(&bench);
        rft_message failed = hub_failed(2, BAD_BASES[i], true);
        hub_bench_say(&bench, 1, &failed);
        assert_int_equal(bench.hub.round.state, RFT_ROUND_ABORTED);
        assert_int_equal(hub_bench_count(&bench, 1, RFT_OFFER), 0);
        hub_bench_settle(&bench);
        hub_bench_close(&bench);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_version_goes_through_all_states),
        cmocka_unit_test(begin_is_refused_unless_idle),
        cmocka_unit_test(newcomer_is_offered_what_the_state_serves),
        cmocka_unit_test(slot_that_cannot_be_had_leaves_all_as_it_was),
        cmocka_unit_test(lost_member_aborts_while_staging),
        cmocka_unit_test(lost_member_aborts_when_all_is_written),
        cmocka_unit_test(lost_member_is_forgiven_by_a_quorum),
        cmocka_unit_test(deadline_evicts_whoever_is_late),
        cmocka_unit_test(worker_that_starts_over_has_the_time_that_is_left),
        cmocka_unit_test(staged_worker_that_fails_after_all_is_not_asked_again),
        cmocka_unit_test(commit_stands_whatever_happens_after_it),
        cmocka_unit_test(worker_that_never_applies_is_evicted),
        cmocka_unit_test(straggler_has_until_the_commit_deadline),
        cmocka_unit_test(what_was_applied_late_counts_for_no_newer_version),
        cmocka_unit_test(quorum_out_of_reach_is_not_waited_for),
        cmocka_unit_test(member_that_failed_and_then_staged_counts_as_staged),
        cmocka_unit_test(member_that_fails_a_second_time_is_lost_again),
        cmocka_unit_test(readers_block_the_slot_that_comes_next),
        cmocka_unit_test(newer_version_ends_what_is_still_fetched),
        cmocka_unit_test(whoever_is_behind_after_an_abort_is_brought_up),
        cmocka_unit_test(what_was_staged_of_an_earlier_offer_loses_nobody_the_version),
        cmocka_unit_test(version_that_failed_is_not_offered_again),
        cmocka_unit_test(base_that_is_not_right_makes_the_offer_a_whole_one),
        cmocka_unit_test(whole_version_that_fails_is_not_offered_again),
    };
    return cmocka_run_group_tests_name("round", tests, NULL, NULL);
}
