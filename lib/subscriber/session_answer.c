/*
 * What a session makes of each message of the publisher. The states are drawn in session.c.
 *
 * One function a kind. Messages that name another epoch come from a publisher that is not the one
 * we joined (or from its past) and are passed over; so are late ones, about a version that was
 * dropped. What a publisher never says, or says against its own manifest, breaks the connection.
 */
#include "subscriber/session.h"

#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"

#define HEARTBEAT_MOST_MS (60u * 60 * 1000)
#define PROOF_BYTES       8u

/* ---- Joining */

static refit_status check_welcome(const rft_message *welcome, refit_error *error)
{
    uint32_t beat = welcome->as.welcome.heartbeat_ms;
    uint32_t timeout = welcome->as.welcome.heartbeat_timeout_ms;
    RFT_REFUSE_IF(welcome->as.welcome.epoch == 0 || welcome->as.welcome.frame_bytes == 0 ||
                      welcome->as.welcome.window == 0,
                  error, REFIT_ERR_PROTOCOL,
                  "a welcome without an epoch, a frame size or a window");
    RFT_REFUSE_IF(
        beat == 0 || timeout <= beat || timeout > HEARTBEAT_MOST_MS, error, REFIT_ERR_PROTOCOL,
        "a welcome asks for a heartbeat of %" PRIu32 " ms with a timeout of %" PRIu32 " ms", beat,
        timeout);
    return REFIT_OK;
}

static refit_status read_proof(rft_view name, uint64_t *proof, refit_error *error)
{
    char text[RFT_SEGMENT_NAME_BYTES];
    RFT_REFUSE_IF(name.count == 0, error, REFIT_ERR_UNSUPPORTED,
                  "the trainer does not share memory (its broadcast.shm is off)");
    RFT_REFUSE_IF(name.count >= sizeof text, error, REFIT_ERR_PROTOCOL,
                  "the probe's name is too long");
    rft_view_print(name, text, sizeof text);
    rft_segment probe;
    RFT_TRY(rft_segment_attach(&probe, text, PROOF_BYTES, error));
    memcpy(proof, probe.memory, sizeof *proof);
    rft_segment_close(&probe);
    return REFIT_OK;
}

/* On one host shared memory is expected to work. The trainer is joined again and again, and the
 * cause stays the same. */
static void warn_of_socket(rft_session *session)
{
    if (!session->identity->near || strcmp(session->warned, session->why_not) == 0) return;
    strcpy(session->warned, session->why_not);
    rft_log(REFIT_LOG_WARNING, "worker %s takes versions through the socket: %s",
            session->identity->worker, session->why_not);
}

/* Opening the probe is what shows that both ends share a host; addresses lie. */
static void find_path(rft_session *session, const rft_message *welcome)
{
    refit_error why = {.text = "broadcast.shm is off here"};
    session->proof = 0;
    session->report.path = REFIT_PATH_SOCKET;
    if (session->config->broadcast_shm != REFIT_SHM_OFF &&
        read_proof(welcome->as.welcome.probe, &session->proof, &why) == REFIT_OK) {
        session->report.path = REFIT_PATH_SHM;
        why.text[0] = '\0';
    }
    rft_view_print(rft_view_text(why.text), session->why_not, sizeof session->why_not);
    bool chosen = session->config->broadcast_shm == REFIT_SHM_OFF ||
                  welcome->as.welcome.probe.count == 0; /* by the configuration of an end */
    if (session->proof == 0 && !chosen) warn_of_socket(session);
    rft_session_find_gpu(session, welcome->as.welcome.gpu);
}

static void send_join(rft_session *session)
{
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = session->report.epoch;
    message.as.join.shm = session->proof != 0;
    message.as.join.proof = session->proof;
    message.as.join.reason = rft_view_text(session->why_not);
    message.as.join.gpu = session->on_gpu;
    rft_session_send(session, &message);
}

static void adopt(rft_session *session, const rft_message *welcome, int64_t now)
{
    uint32_t window = session->config->broadcast_window;
    session->report.epoch = welcome->as.welcome.epoch;
    session->frame_bytes = welcome->as.welcome.frame_bytes;
    session->window = welcome->as.welcome.window < window ? welcome->as.welcome.window : window;
    session->heartbeat_ms = welcome->as.welcome.heartbeat_ms;
    session->heartbeat_timeout_ms = welcome->as.welcome.heartbeat_timeout_ms;
    session->next_beat = rft_after_ms(now, session->heartbeat_ms);
    session->report.state = RFT_SESSION_JOINING;
    session->report.refusal[0] = '\0';
    session->shut_out_since = 0;
    rft_catalog_release(session->catalog);
    session->catalog = NULL;
    session->manifest_failure.status = REFIT_OK;
}

/* Bytes of another epoch, or of a path that does not build on them, are a base for nothing. */
static void drop_useless_base(rft_session *session)
{
    bool useful =
        session->held.epoch == session->report.epoch && session->report.path == REFIT_PATH_SOCKET;
    if (useful || session->held_image == NULL) return;
    rft_image_drop_use(session->held_image, RFT_IMAGE_HELD);
    session->held_image = NULL;
    rft_images_trim_owned(&session->images);
}

/* WELCOME to a HELLO that was said twice. */
static void answer_again(rft_session *session, const rft_message *welcome, int64_t now)
{
    if (rft_session_could_use_gpu(session, welcome->as.welcome.gpu)) {
        rft_session_disconnect(session, 0, now);
    } else {
        send_join(session);
    }
}

static void answer_welcome(rft_session *session, const rft_message *message, rft_view payload,
                           int64_t now)
{
    (void)payload;
    refit_error why;
    if (message->as.welcome.protocol != RFT_PROTOCOL) {
        rft_message_say_protocols(message->as.welcome.protocol, RFT_PROTOCOL, why.text);
        rft_session_end(session, REFIT_ERR_PROTOCOL, why.text, now);
        return;
    }
    if (check_welcome(message, &why) != REFIT_OK) {
        rft_session_break(session, &why, now);
        return;
    }
    if (session->names_gpu) return;
    if (rft_session_is_joined(session) && message->as.welcome.epoch == session->report.epoch) {
        answer_again(session, message, now);
        return;
    }
    if (rft_session_is_joined(session)) rft_session_disconnect(session, 0, now);
    adopt(session, message, now);
    find_path(session, message);
    if (session->config->broadcast_shm == REFIT_SHM_REQUIRE && session->proof == 0) {
        rft_session_end(session, REFIT_ERR_SYSTEM, session->why_not, now);
        return;
    }
    if (rft_session_needs_gpu(session, message->as.welcome.gpu, now)) return;
    drop_useless_base(session);
    send_join(session);
}

static refit_status final_status(uint32_t code)
{
    return code == REFIT_ERR_SECURITY ? REFIT_ERR_SECURITY : REFIT_ERR_PROTOCOL;
}

static void answer_refuse(rft_session *session, const rft_message *message, rft_view payload,
                          int64_t now)
{
    (void)payload;
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(message->as.refuse.reason, reason, sizeof reason);
    if (message->as.refuse.final) {
        rft_session_end(session, final_status(message->as.refuse.code), reason, now);
        return;
    }
    rft_session_put_off(session, reason, now);
}

static void answer_bye(rft_session *session, const rft_message *message, rft_view payload,
                       int64_t now)
{
    (void)payload;
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    rft_log(REFIT_LOG_INFO, "worker %s: the trainer says goodbye: %s", session->identity->worker,
            reason);
    rft_session_disconnect(session, session->config->broadcast_heartbeat_ms, now);
}

/* ---- A version */

static void take_manifest(rft_session *session, const rft_message *message, refit_error *error)
{
    rft_manifest *manifest = NULL;
    rft_limits limits = session->limits;
    if (session->on_gpu) limits.memory_bytes = 0; /* the GPU's memory holds it */
    refit_status status = rft_manifest_decode(message->as.manifest.tensors, session->frame_bytes,
                                              &limits, &manifest, error);
    if (status == REFIT_OK &&
        !rft_digest128_equal(&manifest->digest, &message->as.manifest.digest)) {
        rft_manifest_close(manifest);
        status = rft_fail(error, REFIT_ERR_PROTOCOL, "a manifest does not match its digest");
    }
    if (status == REFIT_OK) status = rft_catalog_open(manifest, &session->catalog, error);
    if (status == REFIT_OK) error->status = REFIT_OK;
}

static void answer_manifest(rft_session *session, const rft_message *message, rft_view payload,
                            int64_t now)
{
    (void)payload;
    refit_error *failure = &session->manifest_failure;
    rft_catalog_release(session->catalog);
    session->catalog = NULL;
    take_manifest(session, message, failure);
    if (failure->status == REFIT_ERR_PROTOCOL) rft_session_break(session, failure, now);
    if (failure->status != REFIT_OK) return;
    rft_images_trim_owned(&session->images);
    rft_images_trim_mapped(&session->images);
}

static refit_status check_offer(const rft_session *session, const rft_message *offer,
                                refit_error *error)
{
    const rft_held *held = &session->held;
    uint64_t version = offer->as.offer.version;
    RFT_REFUSE_IF(version == 0 || (held->epoch == session->report.epoch && version < held->version),
                  error, REFIT_ERR_PROTOCOL,
                  "version %" PRIu64 " is offered after version %" PRIu64, version, held->version);
    RFT_REFUSE_IF(offer->as.offer.segment.count > 0 && session->proof == 0, error,
                  REFIT_ERR_PROTOCOL, "shared memory is offered to a worker that cannot open it");
    RFT_REFUSE_IF(offer->as.offer.share.count > 0 && !session->on_gpu, error, REFIT_ERR_PROTOCOL,
                  "a GPU's memory is offered to a worker that is not on it");
    bool known =
        session->catalog != NULL &&
        rft_digest128_equal(&session->catalog->manifest->digest, &offer->as.offer.manifest);
    RFT_REFUSE_IF(!known && session->manifest_failure.status != REFIT_OK, error,
                  (refit_status)session->manifest_failure.status, "%s",
                  session->manifest_failure.text);
    RFT_REFUSE_IF(!known, error, REFIT_ERR_PROTOCOL,
                  "version %" PRIu64 " is offered without its manifest", version);
    return REFIT_OK;
}

static void answer_offer(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    (void)payload;
    refit_error why;
    rft_receive_drop(&session->receive);
    if (session->report.state != RFT_SESSION_APPLYING) session->report.state = RFT_SESSION_CURRENT;
    refit_status status = check_offer(session, message, &why);
    if (status == REFIT_OK) {
        status = rft_receive_offer(&session->receive, message, session->catalog, session->window,
                                   now, &why);
    }
    if (status == REFIT_OK) {
        session->report.path = session->receive.path;
        rft_session_proceed(session, now);
        return;
    }
    rft_session_give_up(session, message->as.offer.version, &why, now);
}

/* After a step of the intake: on, or the version is given up. */
static void follow(rft_session *session, refit_status status, const refit_error *why, int64_t now)
{
    if (status != REFIT_OK) {
        rft_session_give_up(session, session->receive.version, why, now);
    } else {
        rft_session_proceed(session, now);
    }
}

static void answer_frame(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    refit_error why;
    refit_status status = rft_receive_frame(&session->receive, message, payload, &why);
    follow(session, status, &why, now);
}

static void answer_seal(rft_session *session, const rft_message *message, rft_view payload,
                        int64_t now)
{
    (void)payload;
    refit_error why;
    refit_status status = rft_receive_seal(&session->receive, message, &why);
    follow(session, status, &why, now);
}

/* ---- Commit and abort */

static void deliver(rft_session *session, int64_t now)
{
    refit_error why;
    rft_held held = {session->report.epoch, session->receive.version, session->receive.digest};
    if (rft_image_lend(session->receive.image, &why) != REFIT_OK) {
        session->report.state = RFT_SESSION_CURRENT;
        rft_session_give_up(session, session->receive.version, &why, now);
        return;
    }
    rft_image *image = rft_receive_take(&session->receive);
    image->held = held;
    rft_image_drop_use(image, RFT_IMAGE_STAGED);
    session->applying = image;
    session->report.state = RFT_SESSION_APPLYING;
    session->host.deliver(session->host.user, image);
}

static void repeat_committed(rft_session *session, uint64_t version)
{
    if (session->receive.version == version) {
        rft_receive_drop(&session->receive);
        if (session->report.state != RFT_SESSION_APPLYING) {
            session->report.state = RFT_SESSION_CURRENT;
        }
    }
    rft_message message = {.kind = RFT_COMMITTED};
    message.as.staged.version = version;
    message.as.staged.digest = session->held.digest;
    rft_session_send(session, &message);
}

static void answer_commit(rft_session *session, const rft_message *message, rft_view payload,
                          int64_t now)
{
    (void)payload;
    uint64_t version = message->as.commit.version;
    bool applying =
        session->report.state == RFT_SESSION_APPLYING && session->applying->held.version == version;
    if (rft_session_holds(session, version)) {
        repeat_committed(session, version);
    } else if (session->report.state == RFT_SESSION_STAGED && session->receive.version == version) {
        deliver(session, now);
    } else if (!applying) {
        refit_error why;
        (void)rft_fail(&why, REFIT_ERR_STATE, "version %" PRIu64 " is not staged here", version);
        rft_session_send_failed(session, version, &why, true);
    }
}

static void answer_abort(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    (void)payload;
    (void)now;
    bool ours = session->receive.phase != RFT_RECEIVE_NONE &&
                session->receive.version == message->as.failed.version;
    if (!ours) return;
    rft_receive_drop(&session->receive);
    session->report.aborted++;
    if (session->report.state != RFT_SESSION_APPLYING) session->report.state = RFT_SESSION_CURRENT;
}

static void answer_beat(rft_session *session, const rft_message *message, rft_view payload,
                        int64_t now)
{
    (void)message;
    (void)payload;
    refit_error why;
    rft_images_trim_retired(&session->images);
    rft_images_trim_replaced(&session->images);
    refit_status status = rft_receive_beat(&session->receive, session->heartbeat_ms, now, &why);
    follow(session, status, &why, now);
}

/* ---- All of them */

typedef void (*answer_fn)(rft_session *session, const rft_message *message, rft_view payload,
                          int64_t now);

/* The messages that a publisher may say, and whether they mean anything to who has not joined. */
static const struct answer_rule {
    answer_fn answer;
    bool while_connecting;
} rules[RFT_MESSAGE_KINDS] = {
    [RFT_WELCOME] = {answer_welcome, true}, [RFT_REFUSE] = {answer_refuse, true},
    [RFT_BYE] = {answer_bye, true},         [RFT_MANIFEST] = {answer_manifest, false},
    [RFT_OFFER] = {answer_offer, false},    [RFT_FRAME] = {answer_frame, false},
    [RFT_SEAL] = {answer_seal, false},      [RFT_COMMIT] = {answer_commit, false},
    [RFT_ABORT] = {answer_abort, false},    [RFT_BEAT] = {answer_beat, false},
};

/* The epoch that a message names, or ours if its kind names none. */
static uint64_t epoch_of(const rft_session *session, const rft_message *message)
{
    switch (message->kind) {
    case RFT_MANIFEST: return message->as.manifest.epoch;
    case RFT_OFFER: return message->as.offer.epoch;
    case RFT_BEAT: return message->as.beat.held.epoch;
    default: return session->report.epoch;
    }
}

void rft_session_answer(rft_session *session, const rft_message *message, rft_view payload,
                        int64_t now)
{
    const struct answer_rule *rule = &rules[message->kind];
    if (rule->answer == NULL) {
        refit_error why;
        (void)rft_fail(&why, REFIT_ERR_PROTOCOL, "a publisher does not say %s",
                       rft_message_kind_name(message->kind));
        rft_session_break(session, &why, now);
        return;
    }
    if (!rule->while_connecting) {
        if (!rft_session_is_joined(session)) return;
        if (epoch_of(session, message) != session->report.epoch) return;
        if (session->report.state == RFT_SESSION_JOINING) {
            session->report.state = RFT_SESSION_CURRENT;
        }
    }
    session->heard = now;
    session->asked = 0;
    rule->answer(session, message, payload, now);
}
