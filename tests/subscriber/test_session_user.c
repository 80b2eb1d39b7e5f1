/* The decisions of a worker's user, and what the session does then, also when the connection is
 * lost. */
#include "tests/support/session_bench.h"
#include "tests/support/test.h"

/* The worker holds `version`, and its user has taken the next one and not decided. */
static const rft_image *hold_and_take_next(session_bench *bench, uint64_t version)
{
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, version, 0);
    bench_stage(bench, version + 1, version);
    bench_commit(bench, version + 1);
    return bench_take(bench);
}

BENCH_TEST(a_refusal_that_keeps_leaves_the_version_before)
{
    (void)hold_and_take_next(bench, 2);
    rft_session_refuse(&bench->session, REFIT_ERR_PEER, true, "engine is busy", bench->now);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 3);
    assert_true(bench_said(bench, RFT_FAILED)->as.failed.kept);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench->session.held.version, 2);
    rft_session_release(&bench->session, bench->now);
    bench_apply(bench, 3, 0);
    assert_int_equal(bench->session.held.version, 3);
}

BENCH_TEST(a_refusal_that_does_not_keep_leaves_nothing)
{
    (void)hold_and_take_next(bench, 2);
    rft_session_refuse(&bench->session, REFIT_ERR_PEER, false, "half loaded", bench->now);
    assert_false(bench_said(bench, RFT_FAILED)->as.failed.kept);
    rft_session_release(&bench->session, bench->now);
    assert_non_null(bench_said(bench, RFT_RELEASED));
    bench_join(bench, BENCH_EPOCH); /* to be offered the current version again */
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 0);
    bench_forget(bench);
    bench_offer(bench, 4, 2);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STALE);
    bench_apply(bench, 4, 0);
}

/* A version that it refused is offered again only after a HELLO. */
BENCH_TEST(worker_without_version_says_hello_after_aborted_version)
{
    bench_reach(bench, APPLYING);
    bench_take(bench);
    rft_session_refuse(&bench->session, REFIT_ERR_CALLBACK, false, "lost", bench->now);
    rft_session_release(&bench->session, bench->now);
    bench_offer(bench, 2, 0);
    assert_int_equal(bench_state(bench), STAGING);
    bench_forget(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_null(bench_said(bench, RFT_HELLO));
    bench_hear(bench, sample_abort(bench_sample(bench, 2)));
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_non_null(bench_said(bench, RFT_HELLO));
}

/* Nor while its user has a newer one. */
BENCH_TEST(hello_waits_until_a_newer_update_is_decided)
{
    (void)hold_and_take_next(bench, 1);
    rft_session_refuse(&bench->session, REFIT_ERR_CALLBACK, false, "lost", bench->now);
    rft_session_release(&bench->session, bench->now);
    bench_stage(bench, 3, 0);
    bench_commit(bench, 3);
    (void)bench_take(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_int_equal(bench_state(bench), APPLYING);
    rft_session_refuse(&bench->session, REFIT_ERR_CALLBACK, false, "lost", bench->now);
    rft_session_release(&bench->session, bench->now);
    bench_forget(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_non_null(bench_said(bench, RFT_HELLO));
}

BENCH_TEST(an_open_update_is_not_written_while_the_next_is_staged)
{
    const rft_image *open = hold_and_take_next(bench, 1);
    rft_session_accept(&bench->session, bench->now);
    bench_stage(bench, 3, 2);
    assert_image_is(open, bench_sample(bench, 2));
    bench_commit(bench, 3);
    assert_int_equal(bench_state(bench), APPLYING);
    assert_image_is(open, bench_sample(bench, 2));
    rft_session_release(&bench->session, bench->now);
    assert_image_is(bench_take(bench), bench_sample(bench, 3));
    rft_session_accept(&bench->session, bench->now);
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench->session.held.version, 3);
}

BENCH_TEST(an_offer_is_fetched_while_an_update_is_undecided)
{
    const rft_image *open = hold_and_take_next(bench, 1);
    bench_hear(bench, sample_bye());
    bench_join(bench, BENCH_EPOCH);
    bench_forget(bench);
    bench_offer(bench, 3, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 3)));
    assert_int_equal(bench_count(bench, RFT_PULL), 1);
    bench_frames(bench, 3, 0);
    assert_int_equal(bench_state(bench), STAGED);
    assert_image_is(open, bench_sample(bench, 2));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_BEAT)->as.beat.held.version, 2);
    assert_int_equal(bench_state(bench), STAGED);
    assert_image_is(open, bench_sample(bench, 2));
    rft_session_release(&bench->session, bench->now);
}

BENCH_TEST(an_offer_waits_until_a_refused_update_is_closed)
{
    (void)hold_and_take_next(bench, 1);
    rft_session_refuse(&bench->session, REFIT_ERR_PEER, true, "no", bench->now);
    bench_forget(bench);
    bench_offer(bench, 2, 0);
    assert_int_equal(bench_state(bench), STAGING);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_count(bench, RFT_PULL), 1);
    bench_offer(bench, 2, 1); /* offered again: version 1 is still there as a base */
    assert_int_equal(bench_count(bench, RFT_FAILED), 0);
}

BENCH_TEST(an_offer_during_an_update_has_a_deadline)
{
    bench_reach(bench, APPLYING);
    bench_take(bench);
    bench_offer(bench, 2, 0);
    assert_int_equal(bench_state(bench), STAGING);
    for (int i = 0; i < 30; i++) {
        bench_hear(bench, sample_beat(BENCH_EPOCH));
        bench_tick(bench, 1000);
    }
    assert_int_equal(bench_failed(bench), REFIT_ERR_TIMEOUT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 2);
    assert_int_equal(bench_state(bench), APPLYING);
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench->session.held.version, 1);
}

BENCH_TEST(update_taken_before_connection_loss_can_be_accepted)
{
    bench_reach(bench, APPLYING);
    const rft_image *image = bench_take(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms);
    assert_int_equal(bench_state(bench), CONNECTING);
    bench_forget(bench);
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_count_all(bench), 0);
    assert_image_is(image, bench_sample(bench, 1));
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 1);
    rft_session_release(&bench->session, bench->now);
}

BENCH_TEST(the_version_that_was_missed_is_recognised)
{
    bench_reach(bench, APPLYING);
    bench_take(bench);
    bench_hear(bench, sample_bye());
    bench_reach(bench, STAGING);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    assert_int_equal(bench_state(bench), STAGED);
    bench_forget(bench);
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_state(bench), STAGED);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_null(bench->mailbox.ready);
}

/* The service thread publishes its report once a pass, and one pass may bring all of a version. */
BENCH_TEST(a_report_comes_with_the_version)
{
    rft_session_report report;
    bench_reach(bench, APPLYING);
    (void)bench_take(bench);
    rft_mailbox_read(&bench->mailbox, &report);
    assert_int_equal(report.epoch, BENCH_EPOCH);
    assert_int_equal(report.state, APPLYING);
    assert_int_equal(report.path, REFIT_PATH_SOCKET);
    assert_int_equal(report.version, 0);
}

/* ---- A user who takes versions late */

/* A worker that holds version 1 and has version 2 in its mailbox. */
static void leave_in_mailbox(session_bench *bench)
{
    bench_hold(bench, 1);
    bench_stage(bench, 2, 0);
    bench_commit(bench, 2);
    assert_int_equal(bench_state(bench), APPLYING);
    bench_forget(bench);
}

BENCH_TEST(a_version_that_was_not_taken_is_superseded_by_the_next)
{
    leave_in_mailbox(bench);
    const rft_image *older = bench->mailbox.ready;
    bench_stage(bench, 3, 0);
    assert_ptr_equal(bench->mailbox.ready, older); /* the newest that is committed */
    assert_null(bench_said(bench, RFT_RELEASED));
    bench_commit(bench, 3);
    assert_int_equal(bench_said(bench, RFT_RELEASED)->as.commit.version, 2);
    assert_null(bench_said(bench, RFT_COMMITTED));
    assert_int_equal(bench_state(bench), APPLYING);
    assert_image_is(bench_take(bench), bench_sample(bench, 3));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 3);
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_state(bench), CURRENT);
}

/* From the call on, since it has not what is selected. */
BENCH_TEST(a_version_that_was_not_taken_gives_way_to_a_selection)
{
    rft_selection *selection = NULL;
    const refit_selection one = {.size = sizeof one, .name = "*"};
    rft_image *image = NULL;
    leave_in_mailbox(bench);
    assert_ok(rft_selection_open(&one, 1, &selection, NULL));
    rft_mailbox_select(&bench->mailbox, selection);
    assert_int_equal(rft_mailbox_take(&bench->mailbox, 0, &image, NULL), REFIT_ERR_TIMEOUT);
    selection = rft_mailbox_take_selection(&bench->mailbox);
    assert_int_equal(rft_mailbox_take(&bench->mailbox, 0, &image, NULL), REFIT_ERR_TIMEOUT);
    rft_session_select(&bench->session, selection, bench->now);
    assert_null(bench->session.applying);
    assert_int_equal(bench->session.held.version, 1); /* the engine runs on it all the same */
    assert_null(bench->session.held_image);
    bench_join(bench, BENCH_EPOCH);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 1);
    rft_session_select(&bench->session, NULL, bench->now);
    rft_selection_close(selection);
    bench_join(bench, BENCH_EPOCH);
    bench_forget(bench);
    bench_stage(bench, 2, 0);
    bench_commit(bench, 2);
    assert_image_is(bench_take(bench), bench_sample(bench, 2));
}

BENCH_TEST(a_version_stays_in_the_mailbox_when_the_next_is_aborted)
{
    leave_in_mailbox(bench);
    bench_stage(bench, 3, 0);
    bench_hear(bench, sample_abort(bench_sample(bench, 3)));
    assert_int_equal(bench_state(bench), APPLYING);
    assert_image_is(bench_take(bench), bench_sample(bench, 2));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 2);
}

/* The user takes the older one after the next has come, and before it is committed. */
BENCH_TEST(a_version_in_hand_is_decided_before_the_next_comes)
{
    leave_in_mailbox(bench);
    bench_stage(bench, 3, 0);
    assert_image_is(bench_take(bench), bench_sample(bench, 2));
    bench_commit(bench, 3);
    assert_null(bench->mailbox.ready);
    assert_null(bench_said(bench, RFT_RELEASED));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 2);
    assert_image_is(bench->mailbox.ready, bench_sample(bench, 3));
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_RELEASED)->as.commit.version, 2);
    assert_image_is(bench_take(bench), bench_sample(bench, 3));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 3);
    assert_int_equal(bench->session.report.version, 3);
}

/* Its offer waits, as one that comes while the user decides. */
BENCH_TEST(a_version_that_is_refused_makes_room_for_the_next)
{
    leave_in_mailbox(bench);
    bench_stage(bench, 3, 0);
    assert_image_is(bench_take(bench), bench_sample(bench, 2));
    bench_commit(bench, 3);
    rft_session_refuse(&bench->session, REFIT_ERR_CORRUPT, true, "no", bench->now);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 2);
    assert_image_is(bench->mailbox.ready, bench_sample(bench, 3));
}

/* Offers version 2, which is in the mailbox, once more. */
static void offer_again(session_bench *bench)
{
    leave_in_mailbox(bench);
    bench_offer(bench, 2, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 2)));
    assert_int_equal(bench_state(bench), STAGED);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    assert_non_null(bench_said(bench, RFT_STAGED));
}

BENCH_TEST(the_version_in_the_mailbox_is_not_fetched_again)
{
    offer_again(bench);
    bench_commit(bench, 2);
    assert_int_equal(bench_state(bench), APPLYING);
    bench_take(bench);
    assert_null(bench_said(bench, RFT_COMMITTED));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 2);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_null(bench->mailbox.ready);
}

/* However long it is until the user asks for it. */
BENCH_TEST(the_version_in_the_mailbox_has_no_deadline)
{
    offer_again(bench);
    for (int i = 0; i < 200; i++) {
        bench_forget(bench);
        bench_hear(bench, sample_beat(BENCH_EPOCH));
        bench_tick(bench, 1000);
        assert_null(bench_said(bench, RFT_FAILED));
    }
    bench_take(bench);
    rft_session_accept(&bench->session, bench->now);
    bench_commit(bench, 2); /* the user was faster */
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 2);
    assert_int_equal(bench_state(bench), CURRENT);
}

/* The trainer's COMMIT may be on its way, to what it takes for staged. */
BENCH_TEST(refusing_a_version_that_was_recognised_ends_its_offer)
{
    offer_again(bench);
    bench_take(bench);
    rft_session_refuse(&bench->session, REFIT_ERR_CORRUPT, true, "no", bench->now);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 2);
    assert_int_equal(bench_state(bench), CURRENT);
    bench_forget(bench);
    bench_commit(bench, 2);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STATE);
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    assert_null(bench->mailbox.ready);
}

BENCH_TEST(another_digest_of_the_version_in_the_mailbox_is_refused)
{
    rft_message seal;
    leave_in_mailbox(bench);
    bench_offer(bench, 2, 0);
    seal = sample_seal(bench_sample(bench, 2));
    seal.as.seal.digest.bytes[0] ^= 1;
    bench_hear(bench, seal);
    assert_int_equal(bench_failed(bench), REFIT_ERR_CORRUPT);
    assert_int_equal(bench_state(bench), APPLYING);
}

BENCH_TEST(a_lost_trainer_takes_back_what_was_not_taken_and_what_was_staged)
{
    leave_in_mailbox(bench);
    bench_stage(bench, 3, 0);
    bench_take(bench);
    bench_commit(bench, 3);
    bench_hear(bench, sample_bye());
    assert_int_equal(bench_state(bench), CONNECTING);
    assert_null(bench->mailbox.ready);
    rft_session_accept(&bench->session, bench->now);
    assert_null(bench->mailbox.ready);
    assert_null(bench_said(bench, RFT_COMMITTED));
    rft_session_release(&bench->session, bench->now);
    bench_join(bench, BENCH_EPOCH);
    assert_int_equal(bench->session.report.version, 2);
    bench_apply(bench, 3, 0);
    assert_int_equal(bench->session.report.version, 3);
}

int main(void)
{
    return test_run("session_user");
}
