/* A version that a session receives: frames, gaps, damage, false messages and no memory. */
#include <stdlib.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/session_bench.h"
#include "tests/support/test.h"
#include "wire/frame.h"

/* ---- A version */

BENCH_TEST(a_version_is_staged_committed_and_applied)
{
    bench_join(bench, BENCH_EPOCH);
    bench_stage(bench, 1, 0);
    const rft_message *staged = bench_said(bench, RFT_STAGED);
    assert_int_equal(staged->as.staged.version, 1);
    assert_memory_equal(&staged->as.staged.digest, &bench_sample(bench, 1)->digest, 16);
    assert_null(bench->mailbox.ready);
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

static uint32_t credits_granted(const session_bench *bench)
{
    uint32_t credits = 0;
    for (uint32_t i = 0; i < bench->said_count; i++)
        if (bench->said[i].kind == RFT_PULL) credits += bench->said[i].as.pull.credits;
    return credits;
}

BENCH_TEST(credits_fill_the_window_and_ask_for_each_frame_once)
{
    bench_reach(bench, STAGING);
    uint32_t frames = bench_sample(bench, 1)->manifest->frame_count;
    assert_true(frames > 4);
    for (uint32_t i = 0; i < frames; i++) {
        uint32_t credits = credits_granted(bench);
        assert_true(credits > i);
        assert_true(credits - i <= 4);
        bench_frame(bench, 1, 0, i, false);
    }
    assert_int_equal(credits_granted(bench), frames);
    assert_int_equal(bench->session.receive.fetch.in_flight, 0);
}

/* Of the first tensor nothing changed, and its two frames have no payload. */
BENCH_TEST(small_frames_take_a_part_of_a_credit)
{
    bench_hold(bench, 2);
    bench_forget(bench);
    bench_offer(bench, 3, 2);
    assert_int_equal(credits_granted(bench), 4);
    bench_frame(bench, 3, 2, 0, false);
    bench_frame(bench, 3, 2, 1, false);
    assert_int_equal(credits_granted(bench), 4);
    assert_int_equal(bench->session.receive.fetch.in_flight, 4 * RFT_CREDIT - 2);
    bench_frame(bench, 3, 2, 2, false);
    bench_frame(bench, 3, 2, 3, true);
    assert_int_equal(bench->session.receive.fetch.in_flight, 3 * RFT_CREDIT - 2);
    for (uint32_t i = 3; i < bench_sample(bench, 3)->manifest->frame_count; i++)
        bench_frame(bench, 3, 2, i, false);
    bench_hear(bench, sample_seal(bench_sample(bench, 3)));
    assert_int_equal(bench_state(bench), STAGED);
}

BENCH_TEST(frames_come_in_any_order_and_twice)
{
    bench_reach(bench, STAGING);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    for (uint32_t i = bench_sample(bench, 1)->manifest->frame_count; i > 0; i--) {
        assert_int_equal(bench_state(bench), STAGING);
        bench_frame(bench, 1, 0, i - 1, false);
        bench_frame(bench, 1, 0, i - 1, false);
    }
    assert_int_equal(bench_state(bench), STAGED);
}

BENCH_TEST(same_blocks_come_from_the_version_held)
{
    bench_hold(bench, 2);
    uint64_t before = bench->session.report.bytes_received;
    bench_stage(bench, 3, 2);
    uint64_t payload = bench_sample(bench, 3)->manifest->payload_bytes;
    assert_true(bench->session.report.bytes_received - before <= payload - 65536 * 2 + 128);
    bench_commit(bench, 3);
    assert_image_is(bench_take(bench), bench_sample(bench, 3));
    rft_session_accept(&bench->session, bench->now);
}

BENCH_TEST(a_base_that_is_not_held_fails_as_stale)
{
    bench_join(bench, BENCH_EPOCH);
    bench_offer(bench, 3, 2);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STALE);
    assert_int_equal(bench_state(bench), CURRENT);
    bench_stage(bench, 3, 0);
}

/* The trainer is wrong about the version that this worker holds: changes are not applied to other
 * bytes, and the version is fetched whole. */
BENCH_TEST(changes_of_another_base_fail_as_stale)
{
    bench_hold(bench, 2);
    bench_offer(bench, 3, 2);
    sample_version *now = bench_sample(bench, 3);
    unsigned char *other = malloc(now->manifest->store_bytes);
    assert_non_null(other);
    memcpy(other, now->image, now->manifest->store_bytes);
    other[5] ^= 1;
    const rft_frame_source source = {.image = now->image, .base = other};
    rft_frame frame;
    assert_ok(
        rft_frame_encode(now->manifest, 0, &source, &now->modes, &now->scratch, &frame, NULL));
    assert_int_equal(frame.counts.sparse, 1);
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.version = 3;
    message.as.frame.hash = frame.hash;
    message.as.frame.modes = rft_bytes_view(&now->modes);
    rft_session_message(&bench->session, &message, frame.payload, bench->now);
    free(other);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STALE);
    assert_true(bench_said(bench, RFT_FAILED)->as.failed.kept);
    assert_int_equal(bench_state(bench), CURRENT);
    bench_stage(bench, 3, 0);
}

BENCH_TEST(a_damaged_frame_is_asked_for_again)
{
    bench_reach(bench, STAGING);
    bench_frame(bench, 1, 0, 2, true);
    assert_int_equal(bench->resent_count, 1);
    assert_int_equal(bench->resent[0], 2);
    assert_int_equal(bench->session.report.bad_frames, 1);
    bench_frames(bench, 1, 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    assert_int_equal(bench_state(bench), STAGED);
}

BENCH_TEST(a_frame_that_stays_damaged_fails_the_version)
{
    bench_reach(bench, STAGING);
    for (uint32_t i = 0; i < bench->config.broadcast_resend_limit; i++) {
        bench_frame(bench, 1, 0, 2, true);
        assert_int_equal(bench_count(bench, RFT_RESEND), i + 1);
    }
    bench_frame(bench, 1, 0, 2, true);
    assert_int_equal(bench_failed(bench), REFIT_ERR_CORRUPT);
    assert_int_equal(bench_state(bench), CURRENT);
}

/* A heartbeat later, so many of the publisher's beats are read at once. */
static void hear_beats(session_bench *bench, uint32_t count)
{
    bench->now = rft_after_ms(bench->now, bench->session.heartbeat_ms);
    for (uint32_t i = 0; i < count; i++)
        bench_hear(bench, sample_beat(BENCH_EPOCH));
}

BENCH_TEST(lost_frames_are_asked_for_when_beats_pass_without_one)
{
    bench_reach(bench, STAGING);
    uint32_t frames = bench_sample(bench, 1)->manifest->frame_count;
    for (uint32_t i = 0; i < frames; i++)
        if (i != 1 && i != 3) bench_frame(bench, 1, 0, i, false);
    for (int i = 0; i < 3; i++)
        hear_beats(bench, 1);
    assert_int_equal(bench_count(bench, RFT_RESEND), 0); /* not all is written: nothing is lost */
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    hear_beats(bench, 1);
    hear_beats(bench, 1);
    assert_int_equal(bench_count(bench, RFT_RESEND), 0);
    hear_beats(bench, 1);
    assert_int_equal(bench->resent_count, 2);
    assert_int_equal(bench->resent[0], 1);
    assert_int_equal(bench->resent[1], 3);
    bench_frame(bench, 1, 0, 1, false);
    bench_frame(bench, 1, 0, 3, false);
    assert_int_equal(bench_state(bench), STAGED);
}

/* A worker that was stopped hears all the beats of that time at once. */
BENCH_TEST(beats_that_queued_up_ask_for_lost_frames_once)
{
    uint32_t many = 2 * (bench->config.broadcast_resend_limit + 2);
    bench_reach(bench, STAGING);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    hear_beats(bench, many); /* what it asked for right before may still be on its way */
    assert_int_equal(bench_count(bench, RFT_RESEND), 0);
    hear_beats(bench, 1);
    bench->now = rft_after_ms(bench->now, 20 * bench->session.heartbeat_ms);
    hear_beats(bench, many);
    assert_int_equal(bench_count(bench, RFT_RESEND), 1);
    hear_beats(bench, many);
    assert_int_equal(bench_count(bench, RFT_RESEND), 1);
    hear_beats(bench, many);
    assert_int_equal(bench_count(bench, RFT_RESEND), 2);
    bench_frames(bench, 1, 0);
    assert_int_equal(bench_state(bench), STAGED);
}

BENCH_TEST(frames_that_never_come_fail_the_version)
{
    bench_reach(bench, STAGING);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    for (uint32_t i = 0; i < 2 * (bench->config.broadcast_resend_limit + 1) + 1; i++) {
        assert_int_equal(bench_state(bench), STAGING);
        hear_beats(bench, 1);
    }
    assert_int_equal(bench_failed(bench), REFIT_ERR_CORRUPT);
}

BENCH_TEST(an_abort_keeps_what_was_held)
{
    bench_hold(bench, 2);
    bench_stage(bench, 3, 2);
    bench_hear(bench, sample_abort(bench_sample(bench, 3)));
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench->session.held.version, 2);
    assert_int_equal(bench->session.report.aborted, 1);
    bench_apply(bench, 4, 2);
    assert_int_equal(bench->session.held.version, 4);
}

BENCH_TEST(a_commit_of_what_is_held_is_confirmed_again)
{
    bench_hold(bench, 1);
    bench_forget(bench);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_null(bench->mailbox.ready);
}

BENCH_TEST(a_commit_of_what_is_not_staged_fails)
{
    bench_reach(bench, STAGING);
    bench_commit(bench, 1);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STATE);
    assert_null(bench->mailbox.ready);
}

BENCH_TEST(an_offer_of_what_is_held_needs_no_frames)
{
    bench_hold(bench, 1);
    bench_forget(bench);
    bench_offer(bench, 1, 0);
    assert_int_equal(bench_count(bench, RFT_PULL), 0);
    bench_hear(bench, sample_seal(bench_sample(bench, 1)));
    assert_int_equal(bench_said(bench, RFT_STAGED)->as.staged.version, 1);
    bench_commit(bench, 1);
    assert_int_equal(bench_said(bench, RFT_COMMITTED)->as.staged.version, 1);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_null(bench->mailbox.ready);
}

BENCH_TEST(other_bytes_under_the_number_held_fail_the_version)
{
    bench_hold(bench, 1);
    bench_forget(bench);
    bench_offer(bench, 1, 0);
    rft_message seal = sample_seal(bench_sample(bench, 2));
    seal.as.seal.version = 1;
    bench_hear(bench, seal);
    assert_int_equal(bench_failed(bench), REFIT_ERR_CORRUPT);
    assert_null(bench_said(bench, RFT_STAGED));
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench->session.held.version, 1);
    bench_apply(bench, 2, 1);
}

/* ---- Lies */

BENCH_TEST(a_seal_that_does_not_fit_the_bytes_fails_the_version)
{
    bench_hold(bench, 1);
    for (int i = 0; i < 2; i++) {
        bench_offer(bench, 2, 1);
        bench_frames(bench, 2, 1);
        rft_message seal = sample_seal(bench_sample(bench, i == 0 ? 3 : 2));
        seal.as.seal.version = 2;
        if (i == 1) seal.as.seal.digest.bytes[3] ^= 1;
        bench_hear(bench, seal);
        assert_int_equal(bench_failed(bench), REFIT_ERR_CORRUPT);
        assert_int_equal(bench_state(bench), CURRENT);
        assert_int_equal(bench->session.held.version, 1);
        bench_forget(bench);
    }
    bench_apply(bench, 2, 1);
}

BENCH_TEST(an_offer_against_its_manifest_breaks_the_connection)
{
    for (int i = 0; i < 6; i++) {
        bench_renew(bench);
        bench_hold(bench, 2);
        bench_forget(bench);
        rft_message offer = sample_offer(bench_sample(bench, 3), BENCH_EPOCH, 0, NULL, 0);
        if (i == 0) offer.as.offer.bytes++;
        if (i == 1) offer.as.offer.frames++;
        if (i == 2) offer.as.offer.manifest.bytes[0] ^= 1;
        if (i == 3) offer.as.offer.version = 0;
        if (i == 4) offer.as.offer.version = 1;
        if (i == 5) offer.as.offer.segment = rft_view_text("/proc/1/fd/3:1");
        bench_hear(bench, offer);
        assert_int_equal(bench_state(bench), CONNECTING);
        assert_int_equal(bench_failed(bench), REFIT_ERR_PROTOCOL);
        assert_int_equal(bench_said(bench, RFT_BYE)->as.bye.code, REFIT_ERR_PROTOCOL);
        assert_int_equal(bench->session.held.version, 2);
    }
}

BENCH_TEST(a_frame_against_its_manifest_breaks_the_connection)
{
    for (int i = 0; i < 4; i++) {
        bench_renew(bench);
        bench_reach(bench, STAGING);
        rft_view payload;
        unsigned char modes[2] = {RFT_BLOCK_SAME, 9};
        rft_message frame = sample_frame(bench_sample(bench, 1), 0, NULL, &payload);
        if (i == 0) frame.as.frame.sequence = 1000000;
        if (i == 1) payload.count--;
        if (i == 2) frame.as.frame.modes = (rft_view){modes, 1};
        if (i == 3) frame.as.frame.modes = (rft_view){modes + 1, 1};
        rft_session_message(&bench->session, &frame, payload, bench->now);
        assert_int_equal(bench_state(bench), CONNECTING);
        assert_int_equal(bench_failed(bench), REFIT_ERR_PROTOCOL);
    }
}

BENCH_TEST(a_seal_of_the_wrong_length_breaks_the_connection)
{
    bench_reach(bench, STAGING);
    rft_message seal = sample_seal(bench_sample(bench, 1));
    seal.as.seal.tensors.count -= 8;
    bench_hear(bench, seal);
    assert_int_equal(bench_state(bench), CONNECTING);
}

BENCH_TEST(a_manifest_that_lies_breaks_the_connection)
{
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

BENCH_TEST(a_manifest_above_the_limits_fails_its_versions)
{
    bench->session.limits.version_bytes = 100000;
    bench_join(bench, BENCH_EPOCH);
    bench_hear(bench, sample_manifest(bench_sample(bench, 1), BENCH_EPOCH));
    assert_int_equal(bench_state(bench), CURRENT);
    bench_hear(bench, sample_offer(bench_sample(bench, 1), BENCH_EPOCH, 0, NULL, 0));
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_failed(bench), REFIT_ERR_LIMIT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 1);
}

/* The message itself is above limits.manifest_bytes: it cannot be known that it was a manifest. */
BENCH_TEST(a_manifest_too_large_to_be_read_fails_its_versions)
{
    refit_error why = {.status = REFIT_ERR_LIMIT, .text = "a message of 9 bytes"};
    bench_join(bench, BENCH_EPOCH);
    bench_forget(bench);
    rft_session_garbage(&bench->session, &why, bench->now);
    assert_int_equal(bench->session.report.refused, 1);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version,
                     0); /* it is not known which */
    for (uint64_t version = 1; version <= 2; version++) {
        bench_hear(bench, sample_offer(bench_sample(bench, version), BENCH_EPOCH, 0, NULL, 0));
        assert_int_equal(bench_state(bench), CURRENT);
        assert_int_equal(bench_failed(bench), REFIT_ERR_LIMIT);
        assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, version);
    }
    bench_stage(bench, 3, 0); /* with a manifest that can be read */
}

/* A new manifest that cannot be read leaves the versions of the one before as they were. */
BENCH_TEST(a_message_above_a_limit_leaves_the_known_manifest)
{
    refit_error why = {.status = REFIT_ERR_LIMIT, .text = "a message of 9 bytes"};
    bench_hold(bench, 1);
    rft_session_garbage(&bench->session, &why, bench->now);
    rft_message other = sample_offer(bench_sample(bench, 2), BENCH_EPOCH, 0, NULL, 0);
    other.as.offer.manifest.bytes[0] ^= 1;
    bench_hear(bench, other);
    assert_int_equal(bench_failed(bench), REFIT_ERR_LIMIT);
    assert_int_equal(bench_state(bench), CURRENT);
    bench_stage(bench, 2, 1);
}

/* ---- No memory */

/* Until the bench is open nothing may fail: it holds the samples. With the first HELLO the send
 * queue takes the memory that it keeps. */
static uint64_t requests_until(rft_session_state reached)
{
    static session_bench bench;
    failing_alloc_begin(0);
    uint64_t before = rft_alloc_count();
    bench_open(&bench);
    bench_reach(&bench, reached);
    uint64_t requests = rft_alloc_count() - before;
    bench_close(&bench);
    (void)failing_alloc_end();
    return requests;
}

TEST(hello_without_memory_is_said_one_heartbeat_later)
{
    uint64_t first = requests_until(CONNECTING) + 1, last = requests_until(JOINING);
    assert_true(first <= last);
    for (uint64_t nth = first; nth <= last; nth++) {
        static session_bench bench;
        failing_alloc_begin(nth);
        bench_open(&bench);
        bench_tick(&bench, 0);
        assert_null(bench_said(&bench, RFT_HELLO));
        assert_int_equal(bench_state(&bench), CONNECTING);
        bench_join(&bench, BENCH_EPOCH);
        bench_close(&bench);
        assert_true(failing_alloc_end());
    }
}

TEST(every_failed_allocation_fails_the_version_and_nothing_else)
{
    bool failed = true;
    for (uint64_t nth = requests_until(CURRENT) + 1; failed; nth++) {
        static session_bench bench;
        failing_alloc_begin(nth);
        bench_open(&bench);
        bench_reach(&bench, STAGING);
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

int main(void)
{
    return test_run("session_version");
}
