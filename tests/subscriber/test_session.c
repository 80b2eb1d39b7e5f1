/* The worker's session: joining, every message in every state, and the passing of time. */
#include <stdio.h>
#include <unistd.h>

#include <refit/host.h>

#include "tests/support/session_bench.h"
#include "tests/support/test.h"

/* ---- Joining */

BENCH_TEST(hello_is_repeated_until_welcome)
{
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

BENCH_TEST(a_second_welcome_is_answered_and_changes_nothing)
{
    bench_reach(bench, RFT_SESSION_STAGED);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    assert_int_equal(bench_state(bench), RFT_SESSION_STAGED);
    assert_int_equal(bench_count(bench, RFT_JOIN), 2);
}

BENCH_TEST(a_welcome_from_before_the_gpu_was_named_is_passed_over)
{
    refit_device *device = NULL;
    assert_ok(refit_device_open("host", NULL, &device, NULL));
    bench_tick(bench, 0);
    rft_session_use_device(&bench->session, device, bench->now);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    assert_int_equal(bench_state(bench), RFT_SESSION_CONNECTING);
    assert_int_equal(bench_count(bench, RFT_JOIN), 0);
    bench_tick(bench, 0);
    assert_int_equal(bench_count(bench, RFT_HELLO), 2);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.gpu.count, RFT_UUID_BYTES);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    assert_int_equal(bench_state(bench), RFT_SESSION_JOINING);
    bench->session.images.gpu_memory.device = NULL;
    assert_ok(refit_device_close(device, NULL));
}

BENCH_TEST(an_impossible_welcome_breaks_the_connection)
{
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

BENCH_TEST(a_version_that_the_machine_cannot_hold_is_refused)
{
    assert_true(bench->session.limits.memory_bytes > 1 << 20);
    bench->session.limits.memory_bytes = 64;
    bench_reach(bench, STAGING);
    const rft_message *failed = bench_said(bench, RFT_FAILED);
    assert_non_null(failed);
    assert_int_equal(failed->as.failed.code, REFIT_ERR_HOST_MEMORY);
    assert_int_equal(bench_state(bench), RFT_SESSION_CURRENT);
}

BENCH_TEST(another_protocol_ends_everything)
{
    rft_message welcome = sample_welcome(BENCH_EPOCH, NULL);
    welcome.as.welcome.protocol = 99;
    bench_tick(bench, 0);
    bench_hear(bench, welcome);
    assert_int_equal(bench->session.report.final.status, REFIT_ERR_PROTOCOL);
    assert_non_null(strstr(bench->session.report.final.text,
                           "the trainer speaks protocol 99 and this worker protocol 1: install the "
                           "trainer's release of refit on the worker's side"));
    assert_int_equal(bench_state(bench), RFT_SESSION_CONNECTING);
    assert_int_equal(bench_count(bench, RFT_JOIN), 0);
}

BENCH_TEST(a_refusal_for_now_is_tried_again_after_a_pause)
{
    bench_tick(bench, 0);
    bench_hear(bench, sample_refuse(REFIT_ERR_STALE, false));
    bench_forget(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms - 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 0);
    bench_tick(bench, 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 1);
}

BENCH_TEST(a_final_refusal_ends_everything)
{
    bench_tick(bench, 0);
    bench_hear(bench, sample_refuse(REFIT_ERR_SECURITY, true));
    assert_int_equal(bench->session.report.final.status, REFIT_ERR_SECURITY);
    assert_non_null(strstr(bench->session.report.final.text, "no room for you"));
    bench_forget(bench);
    bench_tick(bench, 60000);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    rft_session_garbage(&bench->session, &(refit_error){.status = REFIT_ERR_PROTOCOL}, bench->now);
    assert_int_equal(bench_count_all(bench), 0);
    assert_int_equal(bench_state(bench), RFT_SESSION_CONNECTING);
}

/* ---- A trainer that stays away */

static bool has_ended(const session_bench *bench)
{
    return bench->session.report.final.status != REFIT_OK;
}

/* Ticks as the service thread would, until just before `ms` from now; 0 ms: the moment itself. */
static void wait_for(session_bench *bench, uint32_t ms)
{
    const int64_t end = bench->now + (int64_t)ms * 1000000;
    while (!has_ended(bench) && rft_session_tick_at(&bench->session) < end) {
        if (rft_session_tick_at(&bench->session) > bench->now)
            bench->now = rft_session_tick_at(&bench->session);
        rft_session_tick(&bench->session, bench->now);
        bench_forget(bench);
    }
    if (!has_ended(bench)) bench->now = end;
}

BENCH_TEST(a_worker_without_a_trainer_ends_after_the_idle_timeout)
{
    bench->config.broadcast_idle_timeout_ms = 60000;
    wait_for(bench, 60000);
    assert_false(has_ended(bench));
    bench_tick(bench, 0);
    assert_int_equal(bench->session.report.final.status, REFIT_ERR_CLOSED);
    assert_non_null(strstr(bench->session.report.final.text, "no trainer was heard for 60000 ms"));
    bench_forget(bench);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
    bench_tick(bench, 60000);
    assert_int_equal(bench_count_all(bench), 0);
    assert_int_equal(rft_session_tick_at(&bench->session), INT64_MAX);
}

BENCH_TEST(without_an_idle_timeout_it_waits_for_ever)
{
    for (int hours = 0; hours < 48; hours++)
        bench_tick(bench, 3600u * 1000);
    assert_false(has_ended(bench));
}

BENCH_TEST(a_trainer_that_only_beats_is_heard)
{
    bench->config.broadcast_idle_timeout_ms = 60000;
    bench_join(bench, BENCH_EPOCH);
    for (int i = 0; i < 3600; i++) {
        bench_tick(bench, bench->session.heartbeat_ms);
        bench_hear(bench, sample_beat(BENCH_EPOCH));
        bench_forget(bench);
    }
    assert_int_equal(bench_state(bench), CURRENT);
    wait_for(bench, 60000); /* from the last beat on, although it was lost before */
    assert_int_equal(bench_state(bench), CONNECTING);
    assert_false(has_ended(bench));
    bench_tick(bench, 0);
    assert_int_equal(bench->session.report.final.status, REFIT_ERR_CLOSED);
}

BENCH_TEST(a_trainer_that_takes_it_not_yet_is_heard)
{
    bench->config.broadcast_idle_timeout_ms = 60000;
    for (int i = 0; i < 10; i++) {
        bench_tick(bench, 20000);
        bench_hear(bench, sample_refuse(REFIT_ERR_STALE, false));
    }
    assert_false(has_ended(bench));
    wait_for(bench, 60000);
    bench_tick(bench, 0);
    assert_non_null(strstr(bench->session.report.final.text, ": no room for you"));
}

/* A worker that was stopped for an hour has not heard its trainer, and says HELLO before it ends.
 */
BENCH_TEST(a_worker_that_was_stopped_asks_before_it_ends)
{
    bench->config.broadcast_idle_timeout_ms = 60000;
    bench_join(bench, BENCH_EPOCH);
    bench_forget(bench);
    bench_tick(bench, 3600u * 1000);
    assert_int_equal(bench_count(bench, RFT_HELLO), 1);
    wait_for(bench, bench->config.broadcast_heartbeat_timeout_ms);
    assert_false(has_ended(bench));
    bench_tick(bench, 0);
    assert_true(has_ended(bench));
}

/* ---- Keys that do not fit */

static const refit_error known = {.status = REFIT_ERR_SECURITY, .text = "it uses no keys"};
static const refit_error guessed = {.status = REFIT_ERR_PEER, .text = "the other side ended it"};

static void rejection(session_bench *bench, const refit_error *why, uint32_t later_ms)
{
    bench->now += (int64_t)later_ms * 1000000;
    rft_session_reject(&bench->session, why, bench->now);
}

static void count_line(void *user, refit_log_level level, const char *line)
{
    (void)level;
    (void)line;
    (*(uint32_t *)user)++;
}

BENCH_TEST(known_reason_is_said_once_and_ends_session_despite_guesses)
{
    uint32_t lines = 0;
    const uint32_t step = bench->config.broadcast_heartbeat_timeout_ms / 10;
    refit_set_log(count_line, &lines, REFIT_LOG_WARNING);
    rejection(bench, &guessed, 0);
    for (uint32_t i = 0; i < 5; i++) {
        rejection(bench, &known, step);
        rejection(bench, &guessed, step);
        assert_string_equal(bench->session.report.refusal, known.text);
    }
    assert_ok(bench->session.report.final.status);
    rejection(bench, &known, step);
    refit_set_log(NULL, NULL, REFIT_LOG_WARNING);
    assert_int_equal(bench->session.report.final.status, REFIT_ERR_SECURITY);
    assert_int_equal(lines, 2); /* what was guessed first, and what became known */
}

BENCH_TEST(what_is_guessed_alone_ends_nothing)
{
    const uint32_t timeout = bench->config.broadcast_heartbeat_timeout_ms;
    rejection(bench, &known, 0);
    rejection(bench, &guessed, timeout);
    assert_string_equal(bench->session.report.refusal, guessed.text);
    rejection(bench, &known, timeout);
    rejection(bench, &known, timeout - 1);
    assert_ok(bench->session.report.final.status);
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
    case RFT_LEND: message.as.lend.version = other->version; return message;
    case RFT_PIECES: message.as.pieces.version = other->version; return message;
    case RFT_SHARD:
        message.as.shard.epoch = BENCH_EPOCH;
        message.as.shard.manifest = other->manifest->digest;
        message.as.shard.ranks = 2;
        return message;
    case RFT_SEAL: return sample_seal(other);
    case RFT_COMMIT: return sample_commit(other);
    case RFT_ABORT: return sample_abort(other);
    case RFT_BEAT: return sample_beat(BENCH_EPOCH);
    case RFT_BYE: return sample_bye();
    default: return message;
    }
}

/* Where each message, about version 4 where it names one, leads from each state. Version 1 is under
 * way from STAGING on. What only workers say leads back to CONNECTING. */
static const rft_session_state leads_to[RFT_MESSAGE_KINDS][STATES] = {
    [RFT_WELCOME] = {JOINING, JOINING, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_MANIFEST] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    /* Without a manifest an OFFER breaks the protocol; in place of another version it replaces it;
     * while one lies in the mailbox it is fetched, too. */
    [RFT_OFFER] = {CONNECTING, CONNECTING, CONNECTING, STAGING, STAGING, STAGING},
    [RFT_FRAME] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_LEND] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_PIECES] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_SHARD] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_SEAL] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_COMMIT] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_ABORT] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
    [RFT_BEAT] = {CONNECTING, CURRENT, CURRENT, STAGING, STAGED, APPLYING},
};

BENCH_TEST(every_message_in_every_state_leads_where_it_should)
{
    for (rft_session_state from = 0; from < STATES; from++) {
        for (rft_message_kind kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
            bench_renew(bench);
            bench_reach(bench, from);
            assert_int_equal(bench_state(bench), from);
            bench_hear(bench, message_of(bench, kind));
            if (bench_state(bench) != leads_to[kind][from]) {
                fail_msg("%s in state %s leads to %s", rft_message_kind_name(kind),
                         rft_session_state_name(from), rft_session_state_name(bench_state(bench)));
            }
            bool there = bench_state(bench) == APPLYING || (from == APPLYING && kind == RFT_OFFER);
            assert_int_equal(bench->mailbox.ready != NULL, there);
        }
    }
}

BENCH_TEST(messages_of_another_epoch_are_passed_over)
{
    bench_reach(bench, STAGED);
    bench_forget(bench);
    int64_t heard = bench->session.heard;
    bench->now += 1000;
    bench_hear(bench, sample_beat(BENCH_EPOCH + 1));
    bench_hear(bench, sample_manifest(bench_sample(bench, 1), BENCH_EPOCH + 1));
    bench_hear(bench, sample_offer(bench_sample(bench, 2), BENCH_EPOCH + 1, 0, NULL, 0));
    assert_int_equal(bench_state(bench), STAGED);
    assert_int_equal(bench_count_all(bench), 0);
    assert_int_equal(bench->session.heard, heard);
}

BENCH_TEST(garbage_costs_the_connection_in_every_state)
{
    for (rft_session_state from = 0; from < STATES; from++) {
        refit_error why = {.status = REFIT_ERR_PROTOCOL, .text = "rubbish \xff"};
        bench_renew(bench);
        bench_reach(bench, from);
        rft_session_garbage(&bench->session, &why, bench->now);
        assert_int_equal(bench_state(bench), CONNECTING);
        assert_int_equal(bench->session.report.refused, 1);
        assert_int_equal(bench_count(bench, RFT_BYE), from == CONNECTING ? 0 : 1);
        assert_null(bench->mailbox.ready);
    }
}

BENCH_TEST(a_message_above_a_limit_costs_the_version_only)
{
    refit_error why = {.status = REFIT_ERR_LIMIT, .text = "too much"};
    bench_reach(bench, STAGING);
    rft_session_garbage(&bench->session, &why, bench->now);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_failed(bench), REFIT_ERR_LIMIT);
    assert_int_equal(bench_said(bench, RFT_FAILED)->as.failed.version, 1);
}

/* ---- Time */

BENCH_TEST(silence_is_noticed_in_every_state)
{
    for (rft_session_state from = JOINING; from < STATES; from++) {
        bench_renew(bench);
        bench_hold(bench, 1);
        bench_hear(bench, sample_bye());
        bench_tick(bench, bench->config.broadcast_heartbeat_ms);
        bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
        if (from > JOINING) bench_hear(bench, sample_beat(BENCH_EPOCH));
        if (from == STAGING) bench_offer(bench, 2, 1);
        if (from >= STAGED) bench_stage(bench, 2, 1);
        if (from == APPLYING) bench_commit(bench, 2);
        assert_int_equal(bench_state(bench), from);
        bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms - 1);
        assert_int_equal(bench_state(bench), from);
        bench_forget(bench);
        bench_tick(bench, 1);
        assert_int_equal(bench_state(bench), CONNECTING);
        assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 1);
        assert_null(bench->mailbox.ready);
    }
}

/* The send queue is not emptied here, as by a socket that takes nothing. */
BENCH_TEST(a_message_that_cannot_be_queued_costs_the_connection)
{
    bench_reach(bench, CURRENT);
    bench_forget(bench);
    const rft_message beat = sample_beat(BENCH_EPOCH);
    uint32_t most = bench->session.send_queue.most;
    for (uint32_t i = 0; i <= most; i++) {
        assert_int_equal(bench_state(bench), CURRENT);
        assert_int_equal(bench->session.send_queue.count, i);
        bench->now += (int64_t)bench->config.broadcast_heartbeat_ms * 1000000;
        rft_session_message(&bench->session, &beat, (rft_view){0}, bench->now);
        rft_session_tick(&bench->session, bench->now);
    }
    assert_int_equal(bench_state(bench), CONNECTING);
    assert_int_equal(bench->session.send_queue.count, 1);
    assert_int_equal(bench_count(bench, RFT_HELLO), 1);
}

BENCH_TEST(a_hello_replaces_what_waits_to_be_sent)
{
    for (uint32_t i = 0; i < 3; i++) {
        rft_session_tick(&bench->session, bench->now);
        assert_int_equal(bench->session.send_queue.count, 1);
        bench->now += (int64_t)bench->config.broadcast_heartbeat_ms * 1000000;
    }
    assert_int_equal(bench_count(bench, RFT_HELLO), 1);
}

BENCH_TEST(a_sign_of_life_defers_the_silence)
{
    bench_reach(bench, CURRENT);
    for (int i = 0; i < 5; i++) {
        bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms - 1);
        assert_int_equal(bench_state(bench), CURRENT);
        bench_hear(bench, sample_beat(BENCH_EPOCH));
    }
}

BENCH_TEST(beats_say_what_is_held_and_repeat_what_is_staged)
{
    bench_hold(bench, 1);
    bench_stage(bench, 2, 1);
    bench_forget(bench);
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    const rft_message *beat = bench_said(bench, RFT_BEAT);
    assert_int_equal(beat->as.beat.held.version, 1);
    assert_int_equal(beat->as.beat.held.epoch, BENCH_EPOCH);
    assert_int_equal(beat->as.beat.staged, 2);
    assert_int_equal(bench_said(bench, RFT_STAGED)->as.staged.version, 2);
}

BENCH_TEST(an_offer_that_is_not_filled_by_its_deadline_fails)
{
    bench_join(bench, BENCH_EPOCH);
    sample_version *sample = bench_sample(bench, 1);
    bench_hear(bench, sample_manifest(sample, BENCH_EPOCH));
    rft_message offer = sample_offer(sample, BENCH_EPOCH, 0, NULL, 0);
    offer.as.offer.deadline_ms = 50;
    bench_hear(bench, offer);
    assert_true(rft_session_tick_at(&bench->session) <= bench->now + 50 * 1000000);
    bench_tick(bench, 50);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_failed(bench), REFIT_ERR_TIMEOUT);
    assert_true(bench_said(bench, RFT_FAILED)->as.failed.kept);
}

/* ---- A new trainer */

BENCH_TEST(a_new_epoch_is_told_the_old_and_builds_on_nothing)
{
    bench_hold(bench, 2);
    bench_hear(bench, sample_bye());
    bench_forget(bench);
    bench_join(bench, BENCH_EPOCH + 1);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.epoch, BENCH_EPOCH);
    assert_int_equal(bench_said(bench, RFT_HELLO)->as.hello.held.version, 2);
    bench_offer(bench, 3, 2);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STALE);
    bench_apply(bench, 1, 0); /* its numbers start again */
    assert_int_equal(bench->session.held.epoch, BENCH_EPOCH + 1);
    assert_int_equal(bench->session.held.version, 1);
}

BENCH_TEST(a_new_epoch_in_every_state_starts_over)
{
    for (rft_session_state from = 0; from < STATES; from++) {
        bench_renew(bench);
        bench_reach(bench, from);
        bench_hear(bench, sample_welcome(BENCH_EPOCH + 1, NULL));
        assert_int_equal(bench_state(bench), JOINING);
        assert_int_equal(bench_said(bench, RFT_JOIN)->as.join.epoch, BENCH_EPOCH + 1);
        assert_null(bench->mailbox.ready);
        bench_hear(bench, sample_beat(BENCH_EPOCH + 1));
        bench_apply(bench, 1, 0);
    }
}

/* ---- A path that is lost ---- */

static uint32_t warnings;

static void count_warnings(void *user, refit_log_level level, const char *line)
{
    (void)user;
    if (level == REFIT_LOG_WARNING && strstr(line, "takes versions through the socket: ") != NULL)
        warnings++;
}

static uint32_t warnings_of(session_bench *bench, const char *probe)
{
    warnings = 0;
    bench_hear(bench, sample_welcome(BENCH_EPOCH, probe));
    rft_session_disconnect(&bench->session, 0, bench->now);
    return warnings;
}

BENCH_TEST(a_worker_of_this_host_warns_once_why_it_takes_the_socket)
{
    char gone[RFT_SEGMENT_NAME_BYTES];
    (void)snprintf(gone, sizeof gone, "/proc/%ld/fd/9999:1", (long)getpid());
    refit_set_log(count_warnings, NULL, REFIT_LOG_WARNING);
    assert_int_equal(warnings_of(bench, gone), 0); /* broadcast.shm is off here */
    bench->config.broadcast_shm = REFIT_SHM_AUTO;
    assert_int_equal(warnings_of(bench, gone), 0); /* the trainer may be anywhere */
    bench->identity.near = true;
    assert_int_equal(warnings_of(bench, gone), 1);
    assert_int_equal(warnings_of(bench, gone), 0);
    assert_int_equal(warnings_of(bench, ""), 0);           /* broadcast.shm is off there */
    assert_int_equal(warnings_of(bench, "refit-4711"), 1); /* another cause */
    refit_set_log(NULL, NULL, REFIT_LOG_WARNING);
}

int main(void)
{
    return test_run("session");
}
