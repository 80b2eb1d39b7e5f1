/* The worker's session in every state: what each message, the clock and the user make of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "session_bench.h"
#include "tests/support/failing_alloc.h"

#define STATES (RFT_SESSION_APPLYING + 1)

static int open_bench(void **state)
{
    static session_bench bench;
    bench_open(&bench);
    *state = &bench;
    return 0;
}

static int close_bench(void **state)
{
    bench_close(*state);
    return 0;
}

static void assert_image_is(const rft_image *image, const sample_version *sample)
{
    for (uint32_t i = 0; i < sample->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &sample->manifest->tensors[i];
        assert_memory_equal(image->bytes + tensor->offset, sample->image + tensor->offset,
                            tensor->bytes);
    }
}

/* ---- Joining */

static void hello_is_repeated_until_welcome(void **state)
{
    session_bench *bench = *state;
    bench_tick(bench, 0);
    const rft_message *hello = bench_said(bench, RFT_HELLO);
    assert_non_null(hello);
    assert_int_equal(hello->as.hello.instance, 5);
    assert_int_equal(hello->as.hello.held.version, 0);
    assert_false(hello->as.hello.shm);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms - 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 1);
    bench_tick(bench, 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 2);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    assert_int_equal(bench_state(bench), RFT_SESSION_JOINING);
    assert_int_equal(bench_said(bench, RFT_JOIN)->as.join.epoch, BENCH_EPOCH);
    assert_false(bench_said(bench, RFT_JOIN)->as.join.shm);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_int_equal(bench_count(bench, RFT_HELLO), 2);
    assert_int_equal(bench_count(bench, RFT_BEAT), 1);
}

static void a_second_welcome_is_answered_and_changes_nothing(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, RFT_SESSION_STAGED);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    assert_int_equal(bench_state(bench), RFT_SESSION_STAGED);
    assert_int_equal(bench_count(bench, RFT_JOIN), 2);
}

static void an_impossible_welcome_breaks_the_connection(void **state)
{
    session_bench *bench = *state;
    for (int i = 0; i < 5; i++) {
        rft_message welcome = sample_welcome(BENCH_EPOCH, NULL);
        if (i == 0) welcome.as.welcome.epoch = 0;
        if (i == 1) welcome.as.welcome.frame_bytes = 0;
        if (i == 2) welcome.as.welcome.window = 0;
        if (i == 3) welcome.as.welcome.heartbeat_ms = welcome.as.welcome.heartbeat_timeout_ms;
        if (i == 4) welcome.as.welcome.heartbeat_timeout_ms = UINT32_MAX;
        bench_hear(bench, welcome);
        assert_int_equal(bench_state(bench), RFT_SESSION_CONNECTING);
        assert_int_equal(bench->session.report.refused, i + 1);
    }
}

static void a_refusal_for_now_is_tried_again_after_a_pause(void **state)
{
    session_bench *bench = *state;
    bench_tick(bench, 0);
    bench_hear(bench, sample_refuse(REFIT_ERR_STALE, false));
    bench_forget(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms - 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 0);
    bench_tick(bench, 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 1);
}

static void a_final_refusal_ends_everything(void **state)
{
    session_bench *bench = *state;
    bench_tick(bench, 0);
    bench_hear(bench, sample_refuse(REFIT_ERR_SECURITY, true));
    assert_int_equal(bench->session.report.final.status, REFIT_ERR_SECURITY);
    assert_non_null(strstr(bench->session.report.final.text, "no room for you"));
    bench_forget(bench);
    bench_tick(bench, 60000);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    rft_session_garbage(&bench->session, &(refit_error){.status = REFIT_ERR_PROTOCOL}, bench->now);
    assert_int_equal(bench->said_count, 0);
    assert_int_equal(bench_state(bench), RFT_SESSION_CONNECTING);
}

/* ---- Every message in every state */

static rft_message message_of(session_bench *bench, rft_message_kind kind)
{
    sample_version *other = bench_sample(bench, 4);
    rft_message message = {.kind = kind};
    switch (kind) {
    case RFT_WELCOME: return sample_welcome(BENCH_EPOCH, NULL);
    case RFT_REFUSE: return sample_refuse(REFIT_ERR_STALE, false);
    case RFT_MANIFEST: return sample_manifest(other, BENCH_EPOCH);
    case RFT_OFFER: return sample_offer(other, BENCH_EPOCH, 0, NULL, 0);
    case RFT_FRAME: message.as.frame.version = other->version; return message;
    case RFT_SEAL: return sample_seal(other);
    case RFT_COMMIT: return sample_commit(other);
    case RFT_ABORT: return sample_abort(other);
    case RFT_BEAT: return sample_beat(BENCH_EPOCH);
    case RFT_BYE: return sample_bye();
    default: return message;
    }
}

#define CONNECTING RFT_SESSION_CONNECTING
#define JOINING    RFT_SESSION_JOINING
#define CURRENT    RFT_SESSION_CURRENT
#define STAGING    RFT_SESSION_STAGING
#define STAGED     RFT_SESSION_STAGED
#define APPLYING   RFT_SESSION_APPLYING

/* Where each message, about version 4 where it names one, leads from each state. Version 1 is under
 * way from STAGING on. What only workers say leads back to CONNECTING. */
static const rft_session_state leads_to[RFT_MESSAGE_KINDS][STATES] = {
    [RFT_WELCOME] = {JOINING, JOINING, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_MANIFEST] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    /* Without a manifest an OFFER breaks the protocol; in place of another version it replaces it;
     * while one is applied it waits. */
    [RFT_OFFER] = {CONNECTING, CONNECTING, CONNECTING, STAGING, STAGING, APPLYING},
    [RFT_FRAME] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_SEAL] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_COMMIT] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_ABORT] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_BEAT] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
};

static void every_message_in_every_state_leads_where_it_should(void **state)
{
    (void)state;
    for (rft_session_state from = 0; from < STATES; from++) {
        for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
            static session_bench bench;
            bench_open(&bench);
            bench_reach(&bench, from);
            assert_int_equal(bench_state(&bench), from);
            bench_hear(&bench, message_of(&bench, kind));
            if (bench_state(&bench) != leads_to[kind][from]) {
                fail_msg("%s in state %s leads to %s", rft_message_kind_name(kind),
                         rft_session_state_name(from), rft_session_state_name(bench_state(&bench)));
            }
            assert_int_equal(bench.ready != NULL, bench_state(&bench) == APPLYING);
            bench_close(&bench);
        }
    }
}

static void messages_of_another_epoch_are_passed_over(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, STAGED);
    bench_forget(bench);
    int64_t heard = bench->session.heard;
    bench->now += 1000;
    bench_hear(bench, sample_beat(BENCH_EPOCH + 1));
    bench_hear(bench, sample_manifest(bench_sample(bench, 1), BENCH_EPOCH + 1));
    bench_hear(bench, sample_offer(bench_sample(bench, 2), BENCH_EPOCH + 1, 0, NULL, 0));
    assert_int_equal(bench_state(bench), STAGED);
    assert_int_equal(bench->said_count, 0);
    assert_int_equal(bench->session.heard, heard);
}

static void garbage_costs_the_connection_in_every_state(void **state)
{
    (void)state;
    for (rft_session_state from = 0; from < STATES; from++) {
        static session_bench bench;
        refit_error why = {.status = REFIT_ERR_PROTOCOL, .text = "rubbish \xff"};
        bench_open(&bench);
        bench_reach(&bench, from);
        rft_session_garbage(&bench.session, &why, bench.now);
        assert_int_equal(bench_state(&bench), CONNECTING);
        assert_int_equal(bench.session.report.refused, 1);
        assert_int_equal(bench_count(&bench, RFT_BYE), from == CONNECTING ? 0 : 1);
        assert_null(bench.ready);
        bench_close(&bench);
    }
}

static void a_message_above_a_limit_costs_the_version_only(void **state)
{
    session_bench *bench = *state;
    refit_error why = {.status = REFIT_ERR_LIMIT, .text = "too much"};
    bench_reach(bench, STAGING);
    rft_session_garbage(&bench->session, &why, bench->now);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_LIMIT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 1);
}

/* ---- Time */

static void silence_is_noticed_in_every_state(void **state)
{
    (void)state;
    for (rft_session_state from = JOINING; from < STATES; from++) {
        static session_bench bench;
        bench_open(&bench);
        bench_join(&bench, BENCH_EPOCH);
        bench_apply(&bench, 1, 0);
        bench_hear(&bench, sample_bye());
        bench_tick(&bench, bench.config.broadcast_heartbeat_ms);
        bench_hear(&bench, sample_welcome(BENCH_EPOCH, NULL));
        if (from > JOINING) bench_hear(&bench, sample_beat(BENCH_EPOCH));
        if (from == STAGING) bench_offer(&bench, 2, 1);
        if (from >= STAGED) bench_stage(&bench, 2, 1);
        if (from == APPLYING) bench_commit(&bench, 2);
        assert_int_equal(bench_state(&bench), from);
        bench_tick(&bench, bench.config.broadcast_heartbeat_timeout_ms - 1);
        assert_int_equal(bench_state(&bench), from);
        bench_forget(&bench);
        bench_tick(&bench, 1);
        assert_int_equal(bench_state(&bench), CONNECTING);
        assert_int_equal(bench_said(&bench, RFT_HELLO)->as.hello.held.version, 1);
        assert_null(bench.ready);
        bench_close(&bench);
    }
}

static void a_sign_of_life_defers_the_silence(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, CURRENT);
    for (int i = 0; i < 5; i++) {
        bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms - 1);
        assert_int_equal(bench_state(bench), CURRENT);
        bench_hear(bench, sample_beat(BENCH_EPOCH));
    }
}

static void beats_say_what_is_held_and_repeat_what_is_staged(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    bench_stage(bench, 2, 1);
    bench_forget(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    const rft_message *beat = bench_said(bench, RFT_BEAT);
    assert_int_equal(beat->as.beat.held.version, 1);
    assert_int_equal(beat->as.beat.held.epoch, BENCH_EPOCH);
    assert_int_equal(beat->as.beat.staged, 2);
    assert_int_equal(bench_said(bench, RFT_STAGED)->as.staged.version, 2);
}

static void an_offer_that_is_not_filled_by_its_deadline_fails(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    sample_version *sample = bench_sample(bench, 1);
    bench_hear(bench, sample_manifest(sample, BENCH_EPOCH));
    rft_message offer = sample_offer(sample, BENCH_EPOCH, 0, NULL, 0);
    offer.as.offer.deadline_ms = 50;
    bench_hear(bench, offer);
    assert_true(rft_session_tick_at(&bench->session) <= bench->now + 50 * 1000000);
    bench_tick(bench, 50);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_TIMEOUT);
    assert_true(bench_said(bench, RFT_FAILED)->as.failed.kept);
}

/* ---- A version */

static void a_version_is_staged_committed_and_applied(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_stage(bench, 1, 0);
    const rft_message *staged = bench_said(bench, RFT_STAGED);
    assert_int_equal(staged->as.staged.version, 1);
    assert_memory_equal(&staged->as.staged.digest, &bench_sample(bench, 1)->digest, 16);
    assert_null(bench->ready);
    bench_commit(bench, 1);
    assert_int_equal(bench_state(bench), APPLYING);
    const rft_image *image = bench_take(bench);
    assert_image_is(image, bench_sample(bench, 1));
    assert_null(bench_said(bench, RFT_COMMITTED));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_int_equal(bench->session.report.version, 1);
    assert_null(bench_said(bench, RFT_RELEASED));
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_RELEASED)->as.commit.version, 1);
}

static void credits_fill_the_window_and_ask_for_each_frame_once(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    uint32_t frames = bench_sample(bench, 1)->manifest->frame_count;
    assert_true(frames > 4);
    for (uint32_t i = 0; i < frames; i++) {
        uint32_t asked = 0;
        for (uint32_t m = 0; m < bench->said_count; m++) {
            if (bench->said[m].kind == RFT_PULL) asked += bench->said[m].as.pull.credits;
        }
        assert_true(asked > i);
        assert_true(asked - i <= 4);
        bench_frame(bench, 1, 0, i, false);
    }
    assert_int_equal(bench->session.intake.asked, frames);
    assert_int_equal(bench->session.intake.in_flight, 0);
}

static void frames_come_in_any_order_and_twice(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    for (uint32_t i = bench_sample(bench, 1)->manifest->frame_count; i > 0; i--) {
        assert_int_equal(bench_state(bench), STAGING);
        bench_frame(bench, 1, 0, i - 1, false);
        bench_frame(bench, 1, 0, i - 1, false);
    }
    assert_int_equal(bench_state(bench), STAGED);
}

static void same_blocks_come_from_the_version_held(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 2, 0);
    uint64_t before = bench->session.report.bytes_received;
    bench_stage(bench, 3, 2);
    uint64_t payload = bench_sample(bench, 3)->manifest->payload_bytes;
    assert_true(bench->session.report.bytes_received - before <= payload - 65536 * 2 + 128);
    bench_commit(bench, 3);
    assert_image_is(bench_take(bench), bench_sample(bench, 3));
    rft_session_accept(&bench->session, bench->now);
}

static void a_base_that_is_not_held_fails_as_stale(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 3, 2);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_STALE);
    assert_int_equal(bench_state(bench), CURRENT);
    bench_stage(bench, 3, 0);
}

static void a_damaged_frame_is_asked_for_again(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    bench_frame(bench, 1, 0, 2, true);
    assert_int_equal(bench->resent_count, 1);
    assert_int_equal(bench->resent[0], 2);
    assert_int_equal(bench->session.report.bad_frames, 1);
    bench_frames(bench, 1, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    assert_int_equal(bench_state(bench), STAGED);
}

static void a_frame_that_stays_damaged_fails_the_version(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    for (uint32_t i = 0; i < bench->config.broadcast_resend_limit; i++) {
        bench_frame(bench, 1, 0, 2, true);
        assert_int_equal(bench_count(bench, RFT_RESEND), i + 1);
    }
    bench_frame(bench, 1, 0, 2, true);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_CORRUPT);
    assert_int_equal(bench_state(bench), CURRENT);
}

static void lost_frames_are_asked_for_when_beats_pass_without_one(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    uint32_t frames = bench_sample(bench, 1)->manifest->frame_count;
    for (uint32_t i = 0; i < frames; i++) {
        if (i != 1 && i != 3) bench_frame(bench, 1, 0, i, false);
    }
    for (int i = 0; i < 3; i++) {
        bench_hear(bench, sample_beat(BENCH_EPOCH));
    }
    assert_int_equal(bench_count(bench, RFT_RESEND), 0); /* not all is written: nothing is lost */
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    bench_hear(bench, sample_beat(BENCH_EPOCH));
    assert_int_equal(bench_count(bench, RFT_RESEND), 0);
    bench_hear(bench, sample_beat(BENCH_EPOCH));
    assert_int_equal(bench->resent_count, 2);
    assert_int_equal(bench->resent[0], 1);
    assert_int_equal(bench->resent[1], 3);
    bench_frame(bench, 1, 0, 1, false);
    bench_frame(bench, 1, 0, 3, false);
    assert_int_equal(bench_state(bench), STAGED);
}

static void frames_that_never_come_fail_the_version(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    for (uint32_t i = 0; i < 2 * (bench->config.broadcast_resend_limit + 1); i++) {
        assert_int_equal(bench_state(bench), STAGING);
        bench_hear(bench, sample_beat(BENCH_EPOCH));
    }
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_CORRUPT);
}

static void an_abort_keeps_what_was_held(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 2, 0);
    bench_stage(bench, 3, 2);
    bench_hear(bench, sample_abort(bench_sample(bench, 3)));
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench->session.held.version, 2);
    assert_int_equal(bench->session.report.aborted, 1);
    bench_apply(bench, 4, 2);
    assert_int_equal(bench->session.held.version, 4);
}

static void a_commit_of_what_is_held_is_confirmed_again(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    bench_forget(bench);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_null(bench->ready);
}

static void a_commit_of_what_is_not_staged_fails(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, STAGING);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_STATE);
    assert_null(bench->ready);
}

static void an_offer_of_what_is_held_needs_no_frames(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    bench_forget(bench);
    bench_offer(bench, 1, 0);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    assert_int_equal(bench_said(bench, RFT_STAGED)->as.staged.version, 1);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_null(bench->ready);
}

/* ---- The user */

static void a_refusal_that_keeps_leaves_the_version_before(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 2, 0);
    bench_stage(bench, 3, 2);
    bench_commit(bench, 3);
    bench_take(bench);
    rft_session_refuse(&bench->session, REFIT_ERR_PEER, true, "engine is busy", bench->now);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 3);
    assert_true(bench_said(bench, RFT_FAILED)->as.failed.kept);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench->session.held.version, 2);
    rft_session_release(&bench->session, bench->now);
    bench_apply(bench, 3, 0);
    assert_int_equal(bench->session.held.version, 3);
}

static void a_refusal_that_does_not_keep_leaves_nothing(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 2, 0);
    bench_stage(bench, 3, 2);
    bench_commit(bench, 3);
    bench_take(bench);
    rft_session_refuse(&bench->session, REFIT_ERR_PEER, false, "half loaded", bench->now);
    assert_false(bench_said(bench, RFT_FAILED)->as.failed.kept);
    rft_session_release(&bench->session, bench->now);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_int_equal(bench_said(bench, RFT_BEAT)->as.beat.held.version, 0);
    bench_offer(bench, 4, 2);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_STALE);
    bench_apply(bench, 4, 0);
}

static void an_open_update_is_not_written_while_the_next_is_staged(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    bench_stage(bench, 2, 1);
    bench_commit(bench, 2);
    const rft_image *open = bench_take(bench);
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

static void an_offer_waits_while_an_update_is_undecided(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    bench_stage(bench, 2, 1);
    bench_commit(bench, 2);
    const rft_image *open = bench_take(bench);
    bench_hear(bench, sample_bye());
    bench_join(bench, BENCH_EPOCH);
    bench_forget(bench);
    bench_offer(bench, 3, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 3)));
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    assert_image_is(open, bench_sample(bench, 2));
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_said(bench, RFT_BEAT)->as.beat.held.version, 2);
    assert_int_equal(bench_count(bench, RFT_PULL), 1);
    bench_frames(bench, 3, 0);
    assert_int_equal(bench_state(bench), STAGED);
    assert_image_is(open, bench_sample(bench, 2));
    rft_session_release(&bench->session, bench->now);
}

static void an_offer_waits_until_a_refused_update_is_closed(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    bench_stage(bench, 2, 1);
    bench_commit(bench, 2);
    bench_take(bench);
    rft_session_refuse(&bench->session, REFIT_ERR_PEER, true, "no", bench->now);
    bench_forget(bench);
    bench_offer(bench, 2, 0);
    assert_int_equal(bench_state(bench), STAGING);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_count(bench, RFT_PULL), 1);
    bench_offer(bench, 2, 1); /* the publisher thinks again: version 1 is still there as a base */
    assert_int_equal(bench_count(bench, RFT_FAILED), 0);
}

static void a_waiting_offer_has_a_deadline(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, APPLYING);
    bench_take(bench);
    bench_offer(bench, 2, 0);
    assert_int_equal(bench_state(bench), APPLYING);
    for (int i = 0; i < 10; i++) {
        bench_hear(bench, sample_beat(BENCH_EPOCH));
        bench_tick(bench, 1000);
    }
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_TIMEOUT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 2);
    assert_int_equal(bench_state(bench), APPLYING);
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench->session.held.version, 1);
}

static void an_update_taken_before_the_connection_was_lost_can_be_accepted(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, APPLYING);
    const rft_image *image = bench_take(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms);
    assert_int_equal(bench_state(bench), CONNECTING);
    bench_forget(bench);
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench->said_count, 0);
    assert_image_is(image, bench_sample(bench, 1));
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 1);
    rft_session_release(&bench->session, bench->now);
}

static void the_version_that_was_missed_is_recognised(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, APPLYING);
    bench_take(bench);
    bench_hear(bench, sample_bye());
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 1, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    bench_forget(bench);
    rft_session_accept(&bench->session, bench->now);
    assert_int_equal(bench_state(bench), STAGED);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_null(bench->ready);
}

/* ---- A new trainer */

static void a_new_epoch_is_told_the_old_and_builds_on_nothing(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 2, 0);
    bench_hear(bench, sample_bye());
    bench_forget(bench);
    bench_join(bench, BENCH_EPOCH + 1);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.epoch, BENCH_EPOCH);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 2);
    bench_offer(bench, 3, 2);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_STALE);
    bench_apply(bench, 1, 0); /* its numbers start anew */
    assert_int_equal(bench->session.held.epoch, BENCH_EPOCH + 1);
    assert_int_equal(bench->session.held.version, 1);
}

static void a_new_epoch_in_every_state_starts_over(void **state)
{
    (void)state;
    for (rft_session_state from = 0; from < STATES; from++) {
        static session_bench bench;
        bench_open(&bench);
        bench_reach(&bench, from);
        bench_hear(&bench, sample_welcome(BENCH_EPOCH + 1, NULL));
        assert_int_equal(bench_state(&bench), JOINING);
        assert_int_equal(bench_said(&bench, RFT_JOIN)->as.join.epoch, BENCH_EPOCH + 1);
        assert_null(bench.ready);
        bench_hear(&bench, sample_beat(BENCH_EPOCH + 1));
        bench_apply(&bench, 1, 0);
        bench_close(&bench);
    }
}

/* ---- Lies */

static void a_seal_that_does_not_fit_the_bytes_fails_the_version(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, 1, 0);
    for (int i = 0; i < 2; i++) {
        bench_offer(bench, 2, 1);
        bench_frames(bench, 2, 1);
        rft_message seal = sample_seal(bench_sample(bench, i == 0 ? 3 : 2));
        seal.as.seal.version = 2;
        if (i == 1) seal.as.seal.digest.bytes[3] ^= 1;
        bench_hear(bench, seal);
        assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_CORRUPT);
        assert_int_equal(bench_state(bench), CURRENT);
        assert_int_equal(bench->session.held.version, 1);
        bench_forget(bench);
    }
    bench_apply(bench, 2, 1);
}

static void an_offer_against_its_manifest_breaks_the_connection(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        static session_bench bench;
        bench_open(&bench);
        bench_join(&bench, BENCH_EPOCH);
        bench_apply(&bench, 2, 0);
        bench_forget(&bench);
        rft_message offer = sample_offer(bench_sample(&bench, 3), BENCH_EPOCH, 0, NULL, 0);
        if (i == 0) offer.as.offer.bytes++;
        if (i == 1) offer.as.offer.frames++;
        if (i == 2) offer.as.offer.manifest.bytes[0] ^= 1;
        if (i == 3) offer.as.offer.version = 0;
        if (i == 4) offer.as.offer.version = 1;
        if (i == 5) offer.as.offer.segment = rft_view_text("/refit-none");
        bench_hear(&bench, offer);
        assert_int_equal(bench_state(&bench), CONNECTING);
        assert_int_equal(bench_said(&bench, RFT_FAILED)->as.failed.code, REFIT_ERR_PROTOCOL);
        assert_int_equal(bench_said(&bench, RFT_BYE)->as.bye.code, REFIT_ERR_PROTOCOL);
        assert_int_equal(bench.session.held.version, 2);
        bench_close(&bench);
    }
}

static void a_frame_against_its_manifest_breaks_the_connection(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        static session_bench bench;
        bench_open(&bench);
        bench_reach(&bench, STAGING);
        rft_view payload;
        unsigned char modes[2] = {RFT_BLOCK_SAME, 9};
        rft_message frame = sample_frame(bench_sample(&bench, 1), 0, NULL, &payload);
        if (i == 0) frame.as.frame.sequence = 1000000;
        if (i == 1) payload.count--;
        if (i == 2) frame.as.frame.modes = (rft_view){modes, 1};
        if (i == 3) frame.as.frame.modes = (rft_view){modes + 1, 1};
        rft_session_message(&bench.session, &frame, payload, bench.now);
        assert_int_equal(bench_state(&bench), CONNECTING);
        assert_int_equal(bench_said(&bench, RFT_FAILED)->as.failed.code, REFIT_ERR_PROTOCOL);
        bench_close(&bench);
    }
}

static void a_seal_of_the_wrong_length_breaks_the_connection(void **state)
{
    session_bench *bench = *state;
    bench_reach(bench, STAGING);
    rft_message seal = sample_seal(bench_sample(bench, 1));
    seal.as.seal.tensors.count -= 8;
    bench_hear(bench, seal);
    assert_int_equal(bench_state(bench), CONNECTING);
}

static void a_manifest_that_lies_breaks_the_connection(void **state)
{
    session_bench *bench = *state;
    bench_join(bench, BENCH_EPOCH);
    rft_message manifest = sample_manifest(bench_sample(bench, 1), BENCH_EPOCH);
    manifest.as.manifest.digest.bytes[5] ^= 1;
    bench_hear(bench, manifest);
    assert_int_equal(bench_state(bench), CONNECTING);
    bench_join(bench, BENCH_EPOCH);
    manifest = sample_manifest(bench_sample(bench, 1), BENCH_EPOCH);
    manifest.as.manifest.tensors.count--;
    bench_hear(bench, manifest);
    assert_int_equal(bench_state(bench), CONNECTING);
}

static void a_manifest_above_the_limits_fails_its_versions(void **state)
{
    session_bench *bench = *state;
    bench->session.limits.version_bytes = 100000;
    bench_join(bench, BENCH_EPOCH);
    bench_hear(bench, sample_manifest(bench_sample(bench, 1), BENCH_EPOCH));
    assert_int_equal(bench_state(bench), CURRENT);
    bench_hear(bench, sample_offer(bench_sample(bench, 1), BENCH_EPOCH, 0, NULL, 0));
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.code, REFIT_ERR_LIMIT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 1);
}

/* ---- No memory */

/* Until the bench is open nothing may fail: it holds the samples. */
static uint64_t requests_of_opening(void)
{
    static session_bench bench;
    failing_alloc_begin(0);
    uint64_t before = rft_alloc_count();
    bench_open(&bench);
    uint64_t requests = rft_alloc_count() - before;
    bench_close(&bench);
    (void)failing_alloc_end();
    return requests;
}

static void every_failed_allocation_fails_the_version_and_nothing_else(void **state)
{
    (void)state;
    bool failed = true;
    for (uint64_t nth = requests_of_opening() + 1; failed; nth++) {
        static session_bench bench;
        failing_alloc_begin(nth);
        bench_open(&bench);
        bench_join(&bench, BENCH_EPOCH);
        bench_offer(&bench, 1, 0);
        bench_frames(&bench, 1, 0);
        bench_hear(&bench, sample_seal(bench_sample(&bench, 1)));
        const rft_message *said = bench_said(&bench, RFT_FAILED);
        if (said != NULL) {
            assert_int_equal(said->as.failed.code, REFIT_ERR_HOST_MEMORY);
            assert_int_equal(bench_state(&bench), CURRENT);
            bench_stage(&bench, 1, 0);
        }
        assert_int_equal(bench_state(&bench), STAGED);
        bench_close(&bench);
        failed = failing_alloc_end();
        assert_true(failed == (said != NULL));
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_bench, close_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(hello_is_repeated_until_welcome),
        TEST(a_second_welcome_is_answered_and_changes_nothing),
        TEST(an_impossible_welcome_breaks_the_connection),
        TEST(a_refusal_for_now_is_tried_again_after_a_pause),
        TEST(a_final_refusal_ends_everything),
        cmocka_unit_test(every_message_in_every_state_leads_where_it_should),
        TEST(messages_of_another_epoch_are_passed_over),
        cmocka_unit_test(garbage_costs_the_connection_in_every_state),
        TEST(a_message_above_a_limit_costs_the_version_only),
        cmocka_unit_test(silence_is_noticed_in_every_state),
        TEST(a_sign_of_life_defers_the_silence),
        TEST(beats_say_what_is_held_and_repeat_what_is_staged),
        TEST(an_offer_that_is_not_filled_by_its_deadline_fails),
        TEST(a_version_is_staged_committed_and_applied),
        TEST(credits_fill_the_window_and_ask_for_each_frame_once),
        TEST(frames_come_in_any_order_and_twice),
        TEST(same_blocks_come_from_the_version_held),
        TEST(a_base_that_is_not_held_fails_as_stale),
        TEST(a_damaged_frame_is_asked_for_again),
        TEST(a_frame_that_stays_damaged_fails_the_version),
        TEST(lost_frames_are_asked_for_when_beats_pass_without_one),
        TEST(frames_that_never_come_fail_the_version),
        TEST(an_abort_keeps_what_was_held),
        TEST(a_commit_of_what_is_held_is_confirmed_again),
        TEST(a_commit_of_what_is_not_staged_fails),
        TEST(an_offer_of_what_is_held_needs_no_frames),
        TEST(a_refusal_that_keeps_leaves_the_version_before),
        TEST(a_refusal_that_does_not_keep_leaves_nothing),
        TEST(an_open_update_is_not_written_while_the_next_is_staged),
        TEST(an_offer_waits_while_an_update_is_undecided),
        TEST(an_offer_waits_until_a_refused_update_is_closed),
        TEST(a_waiting_offer_has_a_deadline),
        TEST(an_update_taken_before_the_connection_was_lost_can_be_accepted),
        TEST(the_version_that_was_missed_is_recognised),
        TEST(a_new_epoch_is_told_the_old_and_builds_on_nothing),
        cmocka_unit_test(a_new_epoch_in_every_state_starts_over),
        TEST(a_seal_that_does_not_fit_the_bytes_fails_the_version),
        cmocka_unit_test(an_offer_against_its_manifest_breaks_the_connection),
        cmocka_unit_test(a_frame_against_its_manifest_breaks_the_connection),
        TEST(a_seal_of_the_wrong_length_breaks_the_connection),
        TEST(a_manifest_that_lies_breaks_the_connection),
        TEST(a_manifest_above_the_limits_fails_its_versions),
        cmocka_unit_test(every_failed_allocation_fails_the_version_and_nothing_else),
    };
    return cmocka_run_group_tests_name("session", tests, NULL, NULL);
}
