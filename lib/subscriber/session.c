/*
 * The worker's state machine: what time and the user bring. What the publisher's messages bring is
 * in session_answer.c.
 *
 *   ┌─► CONNECTING ──WELCOME──► JOINING ──BEAT, MANIFEST, OFFER──► CURRENT ◄──────────────┐
 *   │                                                               │                    │
 *   │                                                             OFFER                  │
 *   │                                                               ▼   ABORT, FAILED    │
 *   │                                                            STAGING ────────────────┤
 *   │                                                               │                    │
 *   │                                                       all here, verified           │
 *   │                                                               ▼   ABORT            │
 *   │                                                            STAGED ─────────────────┤
 *   │                                                               │                    │
 *   │                                                             COMMIT                 │
 *   │   silence, BYE, REFUSE, a breach of                           ▼   the user decides │
 *   └── the protocol, WELCOME of another epoch                   APPLYING ───────────────┘
 *
 *   CONNECTING  HELLO every heartbeat; nothing is staged. What is held stays held.
 *   JOINING     WELCOME has been answered with JOIN; the publisher has not yet said more.
 *   CURRENT     Holds `held`, or nothing; beats.
 *   STAGING     A version is offered. It is being fetched, or waits for an image to become free.
 *   STAGED      It is complete and verified; nothing of it is visible. Every beat repeats it.
 *   APPLYING    It is committed and the user has it, or may take it; the user decides.
 *
 * A user who refuses a version and has nothing left goes from APPLYING to CONNECTING, for that is
 * how a worker comes to be offered the current version once more.
 *
 * A committed version that the user has not taken is withdrawn when the connection is lost: who
 * comes back is offered the current version anyway. One that the user has taken stays his to decide
 * on in any state (`applying`); accepting it makes it what is held, and the next HELLO or BEAT says
 * so. While it is undecided no other version is started: the offer waits, within its deadline.
 */
#include "subscriber/session.h"

#include <stdio.h>
#include <string.h>
#include <sys/sysinfo.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"

static void intake_send(void *user, const rft_message *message)
{
    rft_session_send(user, message);
}

/* What no version can be larger than, wherever it lies: shared memory can be swapped out. */
static uint64_t machine_memory(void)
{
    struct sysinfo info;
    if (sysinfo(&info) != 0) return 0;
    return ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
}

void rft_session_init(rft_session *session, const refit_config *config,
                      const rft_session_identity *identity, rft_session_host host, int64_t now)
{
    *session = (rft_session){
        .config = config,
        .identity = identity,
        .host = host,
        .limits = rft_limits_from(config),
        .heartbeat_ms = config->broadcast_heartbeat_ms,
        .next_beat = now,
        .heard = now,
    };
    session->limits.memory_bytes = machine_memory();
    rft_receive_init(&session->receive, config, &session->images,
                     (rft_sender){intake_send, session});
}

void rft_session_close(rft_session *session)
{
    rft_receive_close(&session->receive);
    rft_images_close(&session->images);
    rft_catalog_release(session->catalog);
    session->catalog = NULL;
}

const char *rft_session_state_name(rft_session_state state)
{
    static const char *const names[] = {
        [RFT_SESSION_CONNECTING] = "connecting", [RFT_SESSION_JOINING] = "joining",
        [RFT_SESSION_CURRENT] = "current",       [RFT_SESSION_STAGING] = "staging",
        [RFT_SESSION_STAGED] = "staged",         [RFT_SESSION_APPLYING] = "applying",
    };
    return names[state];
}

bool rft_session_is_joined(const rft_session *session)
{
    return session->report.state >= RFT_SESSION_JOINING;
}

bool rft_session_holds(const rft_session *session, uint64_t version)
{
    return version != 0 && session->held.version == version &&
           session->held.epoch == session->report.epoch;
}

/* ---- What the worker says */

void rft_session_send(rft_session *session, const rft_message *message)
{
    session->host.send(session->host.user, message);
}

static void send_hello(rft_session *session)
{
    const refit_config *config = session->config;
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(session->identity->worker);
    message.as.hello.instance = session->identity->instance;
    message.as.hello.host = rft_view_text(session->identity->host);
    message.as.hello.shm = config->broadcast_shm != REFIT_SHM_OFF;
    message.as.hello.window = config->broadcast_window;
    message.as.hello.held = session->held;
    message.as.hello.gpu = rft_session_gpu(session);
    message.as.hello.delta = config->broadcast_delta != REFIT_DELTA_NEVER;
    message.as.hello.zstd = message.as.hello.delta;
    session->names_gpu = false;
    rft_session_send(session, &message);
}

static void send_staged(rft_session *session)
{
    rft_message message = {.kind = RFT_STAGED};
    message.as.staged.version = session->receive.version;
    message.as.staged.digest = session->receive.digest;
    rft_session_send(session, &message);
}

void rft_session_send_beat(rft_session *session, int64_t now)
{
    bool staged = session->report.state == RFT_SESSION_STAGED;
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.held = session->held;
    message.as.beat.staged = staged ? session->receive.version : 0;
    rft_session_send(session, &message);
    if (staged) send_staged(session);
    session->next_beat = rft_after_ms(now, session->heartbeat_ms);
}

void rft_session_send_failed(rft_session *session, uint64_t version, const refit_error *why,
                             bool kept)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(rft_view_text(why->text), reason, sizeof reason);
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = version;
    message.as.failed.code = (uint32_t)why->status;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text(reason);
    rft_session_send(session, &message);
}

static void send_bye(rft_session *session, refit_status code, const char *words)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(rft_view_text(words), reason, sizeof reason);
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.code = (uint32_t)code;
    message.as.bye.reason = rft_view_text(reason);
    rft_session_send(session, &message);
}

/* ---- Losing the publisher */

void rft_session_disconnect(rft_session *session, uint32_t pause_ms, int64_t now)
{
    rft_receive_drop(&session->receive);
    if (session->report.state == RFT_SESSION_APPLYING &&
        session->host.withdraw(session->host.user)) {
        rft_image_drop_use(session->applying, RFT_IMAGE_LENT);
        session->applying = NULL;
    }
    rft_images_trim_mapped(&session->images);
    session->report.state = RFT_SESSION_CONNECTING;
    session->report.path = REFIT_PATH_NONE;
    session->rejoins = false;
    session->no_gpu[0] = '\0';
    session->heartbeat_ms = session->config->broadcast_heartbeat_ms;
    session->next_beat = rft_after_ms(now, pause_ms);
}

void rft_session_lost(rft_session *session, const char *why, int64_t now)
{
    if (!rft_session_is_joined(session)) return;
    rft_log(REFIT_LOG_WARNING, "worker %s lost its trainer: %s", session->identity->worker, why);
    rft_session_disconnect(session, 0, now);
}

void rft_session_break(rft_session *session, const refit_error *why, int64_t now)
{
    session->report.refused++;
    rft_log(REFIT_LOG_WARNING, "worker %s: the trainer broke the protocol: %s",
            session->identity->worker, why->text);
    if (rft_session_is_joined(session)) send_bye(session, (refit_status)why->status, why->text);
    rft_session_disconnect(session, session->config->broadcast_heartbeat_ms, now);
}

void rft_session_end(rft_session *session, refit_status status, const char *reason, int64_t now)
{
    (void)rft_fail(&session->report.final, status, "the trainer and this worker cannot agree: %s",
                   reason);
    if (rft_session_is_joined(session)) send_bye(session, status, reason);
    rft_session_disconnect(session, 0, now);
}

void rft_session_put_off(rft_session *session, const char *reason, int64_t now)
{
    bool known = strcmp(session->report.refusal, reason) == 0; /* it asks again and again */
    rft_log(known ? REFIT_LOG_DEBUG : REFIT_LOG_WARNING, "worker %s was refused for now: %s",
            session->identity->worker, reason);
    rft_text_say(session->report.refusal, sizeof session->report.refusal, "%s", reason);
    rft_session_disconnect(session, session->config->broadcast_heartbeat_ms, now);
}

/* Where the trainer has no keys, ZeroMQ tells of what is known and of what may be a thousand things
 * in turn, again and again: what was known a moment ago explains the other. */
static bool is_explained(const rft_session *session, const refit_error *why, int64_t now)
{
    return why->status != REFIT_ERR_SECURITY && session->shut_out_since != 0 &&
           now < rft_after_ms(session->shut_out_heard,
                              session->config->broadcast_heartbeat_timeout_ms);
}

/* A trainer may be started again with other keys while its workers look for it, so one failure ends
 * nothing. What only may be the keys' fault never does: a tunnel whose far end is away looks alike.
 */
void rft_session_shut_out(rft_session *session, const refit_error *why, int64_t now)
{
    bool joined = rft_session_is_joined(session);
    if (session->report.final.status != REFIT_OK || is_explained(session, why, now)) return;
    char *refusal = session->report.refusal;
    if (strcmp(refusal, why->text) != 0) {
        rft_log(REFIT_LOG_WARNING, "worker %s: %s", session->identity->worker, why->text);
        rft_view_print(rft_view_text(why->text), refusal, sizeof session->report.refusal);
    }
    session->shut_out_heard = now;
    if (joined || why->status != REFIT_ERR_SECURITY) {
        session->shut_out_since = 0;
    } else if (session->shut_out_since == 0) {
        session->shut_out_since = now;
    } else if (now >= rft_after_ms(session->shut_out_since,
                                   session->config->broadcast_heartbeat_timeout_ms)) {
        rft_session_end(session, REFIT_ERR_SECURITY, why->text, now);
    }
}

void rft_session_leave(rft_session *session)
{
    if (rft_session_is_joined(session)) send_bye(session, REFIT_OK, "the worker closed");
    session->report.state = RFT_SESSION_CONNECTING;
    session->next_beat = INT64_MAX;
}

/* ---- The offered version */

void rft_session_give_up(rft_session *session, uint64_t version, const refit_error *why,
                         int64_t now)
{
    bool broken = why->status == REFIT_ERR_PROTOCOL;
    rft_log(REFIT_LOG_WARNING, "worker %s could not stage version %llu: %s",
            session->identity->worker, (unsigned long long)version, why->text);
    rft_session_send_failed(session, version, why, true);
    rft_receive_drop(&session->receive);
    if (session->report.state != RFT_SESSION_APPLYING) session->report.state = RFT_SESSION_CURRENT;
    if (broken) rft_session_break(session, why, now);
}

/* Whether the version offered is what the worker holds: then there is nothing to fetch. */
static refit_status recognise_held(rft_session *session, bool *staged, refit_error *error)
{
    *staged = false;
    if (!session->receive.sealed) return REFIT_OK;
    RFT_REFUSE_IF(!rft_digest128_equal(&session->held.digest, &session->receive.digest), error,
                  REFIT_ERR_CORRUPT, "version %llu is held already, with another digest",
                  (unsigned long long)session->receive.version);
    *staged = true;
    return REFIT_OK;
}

static refit_status advance(rft_session *session, bool *staged, refit_error *error)
{
    rft_receive *receive = &session->receive;
    if (rft_session_holds(session, receive->version)) return recognise_held(session, staged, error);
    refit_status status = rft_receive_start(receive, session->held_image, error);
    *staged = status == REFIT_OK && receive->phase == RFT_RECEIVE_COMPLETE;
    return status == REFIT_ERR_BUSY ? REFIT_OK : status;
}

void rft_session_proceed(rft_session *session, int64_t now)
{
    bool idle = session->receive.phase == RFT_RECEIVE_NONE ||
                session->report.state == RFT_SESSION_STAGED || session->applying != NULL;
    if (idle) return;
    refit_error why;
    bool staged;
    session->report.state = RFT_SESSION_STAGING;
    refit_status status = advance(session, &staged, &why);
    if (status != REFIT_OK && rft_receive_is_unmappable(&session->receive, &why)) {
        rft_session_leave_gpu(session, &why, now);
    } else if (status != REFIT_OK) {
        rft_session_give_up(session, session->receive.version, &why, now);
    } else if (staged) {
        session->report.state = RFT_SESSION_STAGED;
        session->report.stage_seconds = rft_seconds(now - session->receive.offered_at);
        send_staged(session);
    }
}

/* ---- Time */

static int64_t silence_at(const rft_session *session)
{
    return rft_after_ms(session->heard, session->heartbeat_timeout_ms);
}

static bool has_deadline(const rft_session *session)
{
    rft_receive_phase phase = session->receive.phase;
    bool unfinished = phase != RFT_RECEIVE_NONE && phase != RFT_RECEIVE_COMPLETE;
    return unfinished && session->report.state != RFT_SESSION_STAGED;
}

/* A newer version that was offered meanwhile may end without being applied. */
static bool rejoins_now(const rft_session *session)
{
    return session->rejoins && session->receive.phase == RFT_RECEIVE_NONE &&
           session->applying == NULL;
}

static void tick_joined(rft_session *session, int64_t now)
{
    if (now >= silence_at(session)) {
        char why[64];
        snprintf(why, sizeof why, "silent for %u ms", session->heartbeat_timeout_ms);
        rft_session_lost(session, why, now);
        return;
    }
    if (has_deadline(session) && now >= session->receive.deadline) {
        refit_error why;
        (void)rft_fail(&why, REFIT_ERR_TIMEOUT, "not all of the version was here by its deadline");
        rft_session_give_up(session, session->receive.version, &why, now);
    }
    if (now < session->next_beat) return;
    if (rejoins_now(session)) {
        rft_session_disconnect(session, 0, now);
    } else {
        rft_session_send_beat(session, now);
    }
}

/* One part a tick: beats, messages and the user's decisions have their turn between two. */
static void tick_verifying(rft_session *session, int64_t now)
{
    refit_error why;
    if (session->receive.phase != RFT_RECEIVE_VERIFYING) return;
    if (rft_receive_verify(&session->receive, &why) != REFIT_OK) {
        rft_session_give_up(session, session->receive.version, &why, now);
    } else {
        rft_session_proceed(session, now);
    }
}

/* Silence alone does not end it: a worker that was stopped itself, or whose machine slept, has
 * first to ask, and a trainer then has the time to answer that it always has. */
static int64_t idle_at(const rft_session *session)
{
    const refit_config *config = session->config;
    if (config->broadcast_idle_timeout_ms == 0 || session->asked == 0) return INT64_MAX;
    int64_t silent = rft_after_ms(session->heard, config->broadcast_idle_timeout_ms);
    int64_t unanswered = rft_after_ms(session->asked, config->broadcast_heartbeat_timeout_ms);
    return silent > unanswered ? silent : unanswered;
}

static void tick_connecting(rft_session *session, int64_t now)
{
    if (now >= idle_at(session)) {
        const char *refusal = session->report.refusal;
        (void)rft_fail(&session->report.final, REFIT_ERR_CLOSED,
                       "no trainer was heard for %u ms (broadcast.idle_timeout_ms)%s%s",
                       session->config->broadcast_idle_timeout_ms, refusal[0] == '\0' ? "" : ": ",
                       refusal);
        return;
    }
    if (now < session->next_beat) return;
    if (rft_session_is_ready(session)) {
        send_hello(session);
        if (session->asked == 0) session->asked = now;
    }
    session->next_beat = rft_after_ms(now, session->heartbeat_ms);
}

void rft_session_tick(rft_session *session, int64_t now)
{
    if (session->report.final.status != REFIT_OK) return;
    if (rft_session_is_joined(session)) tick_joined(session, now);
    tick_verifying(session, now);
    if (!rft_session_is_joined(session)) tick_connecting(session, now);
}

int64_t rft_session_tick_at(const rft_session *session)
{
    if (session->report.final.status != REFIT_OK) return INT64_MAX;
    int64_t at = session->next_beat;
    if (!rft_session_is_joined(session)) return idle_at(session) < at ? idle_at(session) : at;
    if (session->receive.phase == RFT_RECEIVE_VERIFYING) return session->heard; /* that is: now */
    if (silence_at(session) < at) at = silence_at(session);
    if (has_deadline(session) && session->receive.deadline < at) at = session->receive.deadline;
    return at;
}

/* ---- The user */

/* Only bytes of the trainer's own epoch, in this process's memory, can be a base. */
static void hold_image(rft_session *session, rft_image *image)
{
    rft_image_drop_use(session->held_image, RFT_IMAGE_HELD);
    bool base = image != NULL && image->mark == NULL && image->held.epoch == session->report.epoch;
    session->held_image = base ? image : NULL;
    if (base) rft_image_add_use(image, RFT_IMAGE_HELD);
}

/* The user has decided about `applying`: its update stays open, and the next version may start. */
static void settle_decision(rft_session *session, const rft_message *answer, int64_t now)
{
    session->open = session->applying;
    session->applying = NULL;
    if (session->report.state == RFT_SESSION_APPLYING) {
        session->report.state = RFT_SESSION_CURRENT;
        rft_session_send(session, answer);
    } else if (rft_session_is_joined(session)) {
        rft_session_send_beat(session, now);
    }
    rft_session_proceed(session, now);
}

void rft_session_accept(rft_session *session, int64_t now)
{
    rft_image *image = session->applying;
    session->held = image->held;
    session->report.version = image->held.version;
    session->report.applied++;
    session->rejoins = false;
    hold_image(session, image);
    rft_message message = {.kind = RFT_COMMITTED};
    message.as.staged.version = image->held.version;
    message.as.staged.digest = image->held.digest;
    settle_decision(session, &message, now);
}

void rft_session_refuse(rft_session *session, refit_status code, bool kept, const char *reason,
                        int64_t now)
{
    if (!kept) {
        session->held = (rft_held){0};
        session->report.version = 0;
        hold_image(session, NULL);
    }
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = session->applying->held.version;
    message.as.failed.code = (uint32_t)code;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text(reason);
    settle_decision(session, &message, now);
    session->rejoins = !kept && rft_session_is_joined(session);
    if (session->rejoins) session->next_beat = rft_after_ms(now, session->heartbeat_ms);
}

void rft_session_release(rft_session *session, int64_t now)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = session->open->held.version;
    bool known = session->open->held.epoch == session->report.epoch;
    bool joined = rft_session_is_joined(session);
    rft_image_drop_use(session->open, RFT_IMAGE_LENT);
    session->open = NULL;
    if (!joined) rft_images_trim_mapped(&session->images); /* a trainer that leaves waits for it */
    if (joined && known) rft_session_send(session, &message);
    rft_session_proceed(session, now);
}

/* ---- The publisher */

void rft_session_message(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    if (session->report.final.status == REFIT_OK) {
        rft_session_answer(session, message, payload, now);
    }
    session->report.bytes_received = session->receive.bytes_received;
    session->report.bad_frames = session->receive.bad_frames;
}

void rft_session_garbage(rft_session *session, const refit_error *why, int64_t now)
{
    if (session->report.final.status != REFIT_OK) return;
    if (why->status != REFIT_ERR_LIMIT || !rft_session_is_joined(session)) {
        rft_session_break(session, why, now);
        return;
    }
    /* Well formed, but more than this worker may take: connecting anew would bring it again. What
     * it was cannot be known: a manifest is missed by the offers that follow, and anything else
     * costs the version under way, which the publisher knows (0) if this session does not. */
    session->report.refused++;
    session->manifest_failure = *why;
    rft_session_give_up(session, session->receive.version, why, now);
}
