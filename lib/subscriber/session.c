/*
 * The worker's state machine: it reacts to the time, the user's decisions and the publisher's
 * messages.
 *
 *   ┌─► CONNECTING ──WELCOME──► JOINING ──BEAT, MANIFEST, OFFER──► CURRENT ◄──────────────┐
 *   │                                                               │                    │
 *   │                                                             OFFER                  │
 *   │                                                               ▼   ABORT, FAILED    │
 *   │                                            ┌─OFFER─────────► STAGING ──────────────┤
 *   │                                            │                  │                    │
 *   │                                            │          all here, verified           │
 *   │                                            │                  ▼   ABORT            │
 *   │                                            │               STAGED ─────────────────┤
 *   │                                            │                  │                    │
 *   │                                            │                COMMIT                 │
 *   │   silence, BYE, REFUSE, a breach of        │                  ▼   the user decides │
 *   └── the protocol, WELCOME of another epoch   └───────────────APPLYING ───────────────┘
 *
 *   CONNECTING  HELLO every heartbeat; nothing is staged. What is held stays held.
 *   JOINING     WELCOME has been answered with JOIN; the publisher has not yet said more.
 *   CURRENT     Holds `held`, or nothing; beats.
 *   STAGING     A version is offered. It is being fetched, or waits for an image to become free.
 *   STAGED      It is complete and verified; nothing of it is visible. Every beat repeats it.
 *   APPLYING    It is committed and the user has it, or may take it; the user decides.
 *
 * A version that comes piece by piece (piece_queue.h) is with the user from its first piece on, in
 * STAGING. It becomes STAGED when the user has copied all and accepts it, and goes from there to
 * CURRENT with COMMIT. If it ends in another way, the user is told, and has nothing left.
 *
 * If the user refuses a committed version and has nothing left, the session goes from APPLYING to
 * CONNECTING, because that is how a worker comes to be offered the current version once more.
 *
 * The user takes a committed version when it suits it, and decides on it in any state (`applying`).
 * Meanwhile the next one may be offered and staged; where that ends, the session goes back to
 * APPLYING, not to CURRENT, as long as the trainer is owed an answer (`owes`). If the newer version
 * is committed first, it takes the place of one that the user has not taken (RELEASED says so), and
 * waits for the decision on one that it has (`told`). A version that was not taken is withdrawn
 * when the connection is lost: a worker that comes back is offered the current one anyway. An
 * accepted one becomes the held one, and the next HELLO or BEAT says so.
 */
#include "subscriber/session.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "device/device_uuid.h"
#include "subscriber/welcome.h"

#define PROOF_BYTES      8u
#define MESSAGES_WAITING 512u /* for a socket that takes none; a list of rows is many */

/* ---- Opening and closing */

/* A message that cannot be put in costs the connection, at the next tick. */
static void session_send(rft_session *session, const rft_message *message)
{
    (void)rft_send_queue_put(&session->send_queue, NULL, message, &session->limits, NULL);
}

static bool shares_images(const refit_config *config)
{
    return config->broadcast_host_image != REFIT_HOST_IMAGE_OFF &&
           config->broadcast_shm != REFIT_SHM_OFF;
}

void rft_session_init(rft_session *session, const refit_config *config,
                      const rft_session_identity *identity, rft_mailbox *mailbox, int64_t now)
{
    *session = (rft_session){
        .config = config,
        .identity = identity,
        .mailbox = mailbox,
        .limits = rft_limits_from(config),
        .send_queue.most = MESSAGES_WAITING,
        .heartbeat_ms = config->broadcast_heartbeat_ms,
        .next_beat = now,
        .heard = now,
    };
    session->limits.memory_bytes = rft_images_room();
    if (shares_images(config)) rft_segment_place(session->place);
    rft_shard_links_init(&session->links, config, &session->limits, identity->worker,
                         identity->instance, &session->receive.counts);
    rft_receive_init(&session->receive, config, &session->images, &session->links,
                     &session->send_queue, &session->limits);
}

void rft_session_close(rft_session *session)
{
    rft_receive_close(&session->receive);
    rft_shard_links_close(&session->links);
    rft_images_close(&session->images);
    rft_send_queue_close(&session->send_queue);
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

static bool is_joined(const rft_session *session)
{
    return session->report.state >= RFT_SESSION_JOINING;
}

bool rft_session_holds(const rft_session *session, uint64_t version)
{
    return version != 0 && session->held.version == version &&
           session->held.epoch == session->report.epoch;
}

/* ---- Messages of the worker */

static bool is_required(const rft_session *session)
{
    return session->config->broadcast_gpu == REFIT_GPU_REQUIRE;
}

/* Whether it may say HELLO: with broadcast.gpu: require not before it has a device. */
static bool is_ready(const rft_session *session)
{
    return session->images.gpu_memory.device != NULL || !is_required(session);
}

/* The GPU to name with HELLO; empty: none. */
static rft_view gpu_to_name(const rft_session *session)
{
    bool named = session->images.gpu_memory.device != NULL && session->no_gpu[0] == '\0';
    return named ? (rft_view){session->uuid, sizeof session->uuid} : (rft_view){0};
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
    message.as.hello.gpu = gpu_to_name(session);
    message.as.hello.delta = config->broadcast_delta != REFIT_DELTA_NEVER;
    message.as.hello.zstd = message.as.hello.delta;
    message.as.hello.image = rft_view_text(session->place);
    message.as.hello.shards = true;
    session->names_gpu = false;
    /* What the socket has not taken by now is of an earlier connection, or an earlier HELLO. */
    rft_send_queue_reset(&session->send_queue);
    session_send(session, &message);
}

static void send_staged(rft_session *session)
{
    rft_message message = {.kind = RFT_STAGED};
    message.as.staged.version = session->receive.version;
    message.as.staged.digest = session->receive.digest;
    session_send(session, &message);
}

/* Whether versions may come piece by piece, all of each: digests are needed to find out changed
 * ones. */
static bool takes_pieces(const rft_session *session)
{
    return session->on_gpu && !session->whole && session->selection == NULL &&
           rft_device_get_caps(session->images.gpu_memory.device).digests;
}

static void send_beat(rft_session *session, int64_t now)
{
    bool staged = session->report.state == RFT_SESSION_STAGED;
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.held = session->held;
    message.as.beat.staged = staged ? session->receive.version : 0;
    message.as.beat.pieces = takes_pieces(session);
    session_send(session, &message);
    if (staged) send_staged(session);
    session->next_beat = rft_after_ms(now, session->heartbeat_ms);
}

/* Says that a version failed. */
static void send_failed(rft_session *session, uint64_t version, const refit_error *why, bool kept)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(rft_view_text(why->text), reason, sizeof reason);
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = version;
    message.as.failed.code = (uint32_t)why->status;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text(reason);
    session_send(session, &message);
}

static void send_bye(rft_session *session, refit_status code, const char *words)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(rft_view_text(words), reason, sizeof reason);
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.code = (uint32_t)code;
    message.as.bye.reason = rft_view_text(reason);
    session_send(session, &message);
}

/* ---- Losing the version under way */

/* Whether the user copies it piece by piece, or has done so. */
static bool is_streaming(const rft_session *session)
{
    return session->applying != NULL && session->applying->pieces != NULL &&
           session->applying == session->receive.image;
}

/* The version in the mailbox leaves it, if the user has not taken it. */
static bool withdraw(rft_session *session)
{
    if (session->applying == NULL || !rft_mailbox_withdraw(session->mailbox)) return false;
    rft_image_drop_use(session->applying, RFT_IMAGE_LENT);
    session->applying = NULL;
    session->owes = false;
    return true;
}

/* The state while nothing is on its way in. */
static rft_session_state rest(const rft_session *session)
{
    return session->owes ? RFT_SESSION_APPLYING : RFT_SESSION_CURRENT;
}

/* Drops what was offered. False: the user has it piece by piece, and is told why it comes to
 * nothing. */
static bool drop_version(rft_session *session, refit_status code, const char *reason)
{
    bool kept = true;
    rft_image *streamed = is_streaming(session) ? session->applying : NULL;
    if (streamed != NULL && !withdraw(session)) {
        refit_error why;
        (void)rft_fail(&why, code, "version %" PRIu64 " ended while it was copied: %s",
                       session->receive.version, reason);
        rft_piece_queue_fail(streamed->pieces, &why);
        kept = false;
    }
    rft_receive_drop(&session->receive);
    session->told = false;
    return kept;
}

/* ---- Losing the publisher */

void rft_session_disconnect(rft_session *session, uint32_t pause_ms, int64_t now)
{
    (void)drop_version(session, REFIT_ERR_CLOSED, "the trainer is lost");
    (void)withdraw(session);
    session->owes = false;
    rft_images_trim_mappings(&session->images);
    session->report.state = RFT_SESSION_CONNECTING;
    session->report.path = REFIT_PATH_NONE;
    session->rejoins = false;
    session->no_gpu[0] = '\0';
    session->heartbeat_ms = session->config->broadcast_heartbeat_ms;
    session->next_beat = rft_after_ms(now, pause_ms);
}

static void lose_connection(rft_session *session, const char *why, int64_t now)
{
    if (!is_joined(session)) return;
    rft_log(REFIT_LOG_WARNING, "worker %s lost its trainer: %s", session->identity->worker, why);
    rft_session_disconnect(session, 0, now);
}

/* Counts and logs a breach of the protocol, says BYE, and connects again. */
static void break_off(rft_session *session, const refit_error *why, int64_t now)
{
    session->report.refused++;
    rft_log(REFIT_LOG_WARNING, "worker %s: the trainer broke the protocol: %s",
            session->identity->worker, why->text);
    if (is_joined(session)) send_bye(session, (refit_status)why->status, why->text);
    rft_session_disconnect(session, session->config->broadcast_heartbeat_ms, now);
}

/* Nothing is tried any more; the user is told. */
static void end_session(rft_session *session, refit_status status, const char *reason, int64_t now)
{
    (void)rft_fail(&session->report.final, status, "the trainer and this worker cannot agree: %s",
                   reason);
    if (is_joined(session)) send_bye(session, status, reason);
    rft_session_disconnect(session, 0, now);
}

/* The trainer does not take this worker for now: it is asked again later. */
static void defer(rft_session *session, const char *reason, int64_t now)
{
    bool known = strcmp(session->report.refusal, reason) == 0; /* it asks again and again */
    rft_log(known ? REFIT_LOG_DEBUG : REFIT_LOG_WARNING, "worker %s was refused for now: %s",
            session->identity->worker, reason);
    rft_text_say(session->report.refusal, sizeof session->report.refusal, "%s", reason);
    rft_session_disconnect(session, session->config->broadcast_heartbeat_ms, now);
}

/* Where the trainer has no keys, ZeroMQ reports a definite failure and an ambiguous one in turn,
 * again and again. Ignores an ambiguous failure that follows a definite one within the heartbeat
 * timeout. */
static bool is_explained(const rft_session *session, const refit_error *why, int64_t now)
{
    return why->status != REFIT_ERR_SECURITY && session->rejected_since != 0 &&
           now < rft_after_ms(session->rejected_last,
                              session->config->broadcast_heartbeat_timeout_ms);
}

/* A trainer may be started again with other keys while its workers look for it, so one failure ends
 * nothing. An ambiguous failure never does: a tunnel whose far end is away looks alike.
 */
void rft_session_reject(rft_session *session, const refit_error *why, int64_t now)
{
    bool joined = is_joined(session);
    if (session->report.final.status != REFIT_OK || is_explained(session, why, now)) return;
    char *refusal = session->report.refusal;
    if (strcmp(refusal, why->text) != 0) {
        rft_log(REFIT_LOG_WARNING, "worker %s: %s", session->identity->worker, why->text);
        rft_view_print(rft_view_text(why->text), refusal, sizeof session->report.refusal);
    }
    session->rejected_last = now;
    if (joined || why->status != REFIT_ERR_SECURITY) {
        session->rejected_since = 0;
    } else if (session->rejected_since == 0) {
        session->rejected_since = now;
    } else if (now >= rft_after_ms(session->rejected_since,
                                   session->config->broadcast_heartbeat_timeout_ms)) {
        end_session(session, REFIT_ERR_SECURITY, why->text, now);
    }
}

void rft_session_leave(rft_session *session)
{
    if (is_joined(session)) send_bye(session, REFIT_OK, "the worker closed");
    session->report.state = RFT_SESSION_CONNECTING;
    session->next_beat = INT64_MAX;
}

/*
 * ---- The GPU that worker and trainer may share
 *
 * The worker names its GPU with HELLO, and joins on it if WELCOME has a share of the same GPU that
 * can be mapped (not where another container or a driver prevents that), and the probe could be
 * opened: without shared memory the publisher would not know which workers read the GPU. Where the
 * memory of a version can then not be mapped after all, the worker joins once more without its GPU,
 * and takes its versions another way, unless its own broadcast.gpu is require.
 */

void rft_session_use_device(rft_session *session, refit_device *device, int64_t now)
{
    rft_device_caps caps = rft_device_get_caps(device);
    memcpy(session->uuid, caps.uuid, sizeof session->uuid);
    session->images.gpu_memory.device = device;
    session->no_gpu[0] = '\0';
    rft_session_disconnect(session, 0, now);
    session->names_gpu = true;
}

void rft_session_take_whole(rft_session *session, bool whole, int64_t now)
{
    if (session->whole == whole) return;
    session->whole = whole;
    if (is_joined(session)) send_beat(session, now);
}

/* Empty: the worker is on the trainer's GPU, and can share it. `share` is WELCOME's. */
static void find_obstacle(const rft_session *session, rft_view share, char *text, size_t room)
{
    char uuid[RFT_UUID_TEXT_BYTES];
    rft_share theirs;
    bool lends = rft_share_read(share, &theirs, NULL) == REFIT_OK;
    text[0] = '\0';
    if (session->no_gpu[0] != '\0') {
        rft_text_say(text, room, "%s", session->no_gpu);
    } else if (session->unmappable_epoch == session->report.epoch) {
        rft_text_say(text, room, "%s", session->unmappable);
    } else if (session->proof == 0) {
        rft_text_say(text, room, "no shared memory in which to mark readers of the GPU: %s",
                     session->why_not);
    } else if (!lends) {
        snprintf(text, room, "the trainer lends no GPU's memory");
    } else if (!rft_uuid_equal(theirs.uuid, session->uuid)) {
        rft_uuid_print(theirs.uuid, uuid);
        snprintf(text, room, "the trainer is on another GPU, %s", uuid);
    }
}

/* Whether memory that the trainer lends can be mapped here. */
static void try_share(rft_session *session, rft_view share, char *text, size_t room)
{
    rft_share theirs;
    refit_error why;
    (void)rft_share_read(share, &theirs, NULL);
    if (rft_gpu_memory_probe(&session->images.gpu_memory, &theirs, &why) == REFIT_OK) return;
    session->unmappable_epoch = session->report.epoch;
    rft_text_say(session->unmappable, sizeof session->unmappable, "%s", why.text);
    rft_text_say(text, room, "%s", why.text);
    rft_log(REFIT_LOG_WARNING, "worker %s takes its versions another way than from its GPU: %s",
            session->identity->worker, text);
}

/* Takes the trainer's GPU for the path if it is this worker's, else notes the reason in `why_not`.
 */
static void find_gpu(rft_session *session, rft_view share)
{
    char why[sizeof session->why_not];
    session->on_gpu = false;
    if (session->images.gpu_memory.device == NULL) return;
    find_obstacle(session, share, why, sizeof why);
    if (why[0] == '\0') try_share(session, share, why, sizeof why);
    session->on_gpu = why[0] == '\0';
    if (session->on_gpu) session->report.path = REFIT_PATH_CUDA_IPC;
    memcpy(session->why_not, why, sizeof why);
}

/* Whether it has joined another way, and a WELCOME that names this GPU shows that it could be on
 * it: the trainer said so between two HELLOs. */
static bool could_use_gpu(const rft_session *session, rft_view share)
{
    char why[sizeof session->why_not];
    if (session->on_gpu || session->images.gpu_memory.device == NULL) return false;
    find_obstacle(session, share, why, sizeof why);
    return why[0] == '\0';
}

/* With broadcast.gpu: require. True: there is no such path, and the connection has ended. */
static bool needs_gpu(rft_session *session, rft_view share, int64_t now)
{
    if (!is_required(session) || session->on_gpu) return false;
    bool later = share.count == 0 && session->proof != 0;
    if (later) {
        defer(session,
              "broadcast.gpu is require here, and the trainer lends no GPU's "
              "memory",
              now);
    } else {
        end_session(session, REFIT_ERR_UNSUPPORTED, session->why_not, now);
    }
    return true;
}

/* The GPU's memory could not be mapped: joins without it, or ends. */
static void leave_gpu(rft_session *session, const refit_error *why, int64_t now)
{
    if (is_required(session)) {
        uint64_t version = session->receive.version;
        bool kept = drop_version(session, (refit_status)why->status, why->text);
        send_failed(session, version, why, kept);
        end_session(session, (refit_status)why->status, why->text, now);
        return;
    }
    rft_log(REFIT_LOG_WARNING, "worker %s takes its versions another way than from its GPU: %s",
            session->identity->worker, why->text);
    rft_session_disconnect(session, 0, now);
    rft_text_say(session->no_gpu, sizeof session->no_gpu, "%s", why->text);
}

/* ---- The offered version */

/* Only bytes of the trainer's own epoch that nothing writes any more can be a base. */
static void hold_image(rft_session *session, rft_image *image)
{
    rft_image_drop_use(session->held_image, RFT_IMAGE_BASE);
    bool base = image != NULL && image->bytes != NULL && image->seqlock == NULL &&
                image->id.epoch == session->report.epoch;
    session->held_image = base ? image : NULL;
    if (base) rft_image_add_use(image, RFT_IMAGE_BASE);
}

void rft_session_select(rft_session *session, const rft_selection *selection, int64_t now)
{
    session->selection = selection;
    hold_image(session, NULL); /* of which another part is there */
    rft_session_disconnect(session, 0, now);
}

/* Refuses the offered version and drops it. */
static void abort_update(rft_session *session, uint64_t version, const refit_error *why,
                         int64_t now)
{
    bool broken = why->status == REFIT_ERR_PROTOCOL;
    rft_log(REFIT_LOG_WARNING, "worker %s could not stage version %llu: %s",
            session->identity->worker, (unsigned long long)version, why->text);
    bool kept = drop_version(session, (refit_status)why->status, why->text);
    send_failed(session, version, why, kept);
    session->report.state = rest(session);
    if (broken) break_off(session, why, now);
}

/* Whether the version is in the mailbox, or the user has it and has not decided. */
static bool is_undecided(const rft_session *session, uint64_t version)
{
    const rft_image *image = session->applying;
    return image != NULL && image->pieces == NULL && image->id.version == version &&
           image->id.epoch == session->report.epoch;
}

/* Whether the user has refused the version, and has not closed its update, whose RELEASED must not
 * be taken for that of another one. */
static bool is_open(const rft_session *session, uint64_t version)
{
    const rft_image *image = session->open;
    return image != NULL && image->id.version == version &&
           image->id.epoch == session->report.epoch && !rft_session_holds(session, version);
}

/* The offered version is here already: there is nothing to fetch. */
static refit_status recognise(const rft_session *session, const rft_digest128 *digest, bool *staged,
                              refit_error *error)
{
    *staged = false;
    if (!session->receive.sealed) return REFIT_OK;
    RFT_REFUSE_IF(!rft_digest128_equal(digest, &session->receive.digest), error, REFIT_ERR_CORRUPT,
                  "version %llu is here already, with another digest",
                  (unsigned long long)session->receive.version);
    *staged = true;
    return REFIT_OK;
}

static refit_status advance(rft_session *session, bool *staged, refit_error *error)
{
    rft_receive *receive = &session->receive;
    if (rft_session_holds(session, receive->version))
        return recognise(session, &session->held.digest, staged, error);
    if (is_undecided(session, receive->version))
        return recognise(session, &session->applying->id.digest, staged, error);
    *staged = false;
    if (is_open(session, receive->version)) return REFIT_OK; /* until it is closed */
    refit_status status = rft_receive_start(receive, session->held_image, error);
    bool full = status == REFIT_ERR_BUSY && session->applying != NULL;
    if (full && receive->base == 0 && session->held_image != NULL) {
        hold_image(session, NULL); /* nothing builds on it, and its memory is wanted */
        status = rft_receive_start(receive, NULL, error);
    }
    *staged = status == REFIT_OK && receive->phase == RFT_RECEIVE_COMPLETE;
    return status == REFIT_ERR_BUSY ? REFIT_OK : status;
}

static void lose_version(rft_session *session, const refit_error *why, int64_t now)
{
    if (session->receive.unmappable) {
        leave_gpu(session, why, now);
    } else {
        abort_update(session, session->receive.version, why, now);
    }
}

/* A version of which pieces have come is the user's, who copies it from now on, once the update
 * before it is decided. */
static void hand_over(rft_session *session)
{
    rft_image *image = session->receive.image;
    bool streams = image != NULL && image->pieces != NULL;
    if (!streams || session->applying != NULL) return;
    image->id = (rft_version_id){session->report.epoch, session->receive.version, {{0}}};
    rft_image_add_use(image, RFT_IMAGE_LENT);
    session->applying = image;
    rft_mailbox_deliver(session->mailbox, image, &session->report);
}

/* Whether the offered version has to wait for the user's decision: one of the two comes piece by
 * piece, through the user's hands. Otherwise one that is in the mailbox is superseded if the newer
 * one is committed first; one in the user's hands is decided before the newer one is delivered. */
static bool waits_for_user(const rft_session *session)
{
    const rft_image *image = session->applying, *next = session->receive.image;
    if (image == NULL) return false;
    return image->pieces != NULL || (next != NULL && next->pieces != NULL);
}

/* Goes as far with the offered version as it can: start, staged, or failed. */
static void proceed(rft_session *session, int64_t now)
{
    hand_over(session);
    bool idle = session->receive.phase == RFT_RECEIVE_NONE ||
                session->report.state == RFT_SESSION_STAGED || waits_for_user(session);
    if (idle) return;
    refit_error why;
    bool staged;
    session->report.state = RFT_SESSION_STAGING;
    refit_status status = advance(session, &staged, &why);
    if (status != REFIT_OK) {
        lose_version(session, &why, now);
    } else if (staged) {
        session->report.state = RFT_SESSION_STAGED;
        session->report.stage_seconds = rft_seconds(now - session->receive.offered_at);
        send_staged(session);
    }
}

/* ---- Decisions */

/* Puts the image into the mailbox; in the place of the one there, whose memory is the trainer's
 * again. False: the user has taken that one meanwhile. */
static bool put(rft_session *session, rft_image *image)
{
    rft_image *before = session->applying;
    rft_message message = {.kind = RFT_RELEASED};
    if (before == NULL) {
        rft_mailbox_deliver(session->mailbox, image, &session->report);
        return true;
    }
    if (!rft_mailbox_replace(session->mailbox, image, &session->report)) return false;
    message.as.commit.version = before->id.version;
    rft_image_drop_use(before, RFT_IMAGE_LENT);
    session_send(session, &message);
    return true;
}

/* What is staged and committed goes to the user, who may have the one before in hand: then it waits
 * until that is decided. */
static void deliver(rft_session *session, int64_t now)
{
    refit_error why;
    rft_image *image = session->receive.image;
    rft_session_state state = session->report.state;
    if (rft_image_lend(image, &why) != REFIT_OK) {
        abort_update(session, session->receive.version, &why, now);
        return;
    }
    image->id =
        (rft_version_id){session->report.epoch, session->receive.version, session->receive.digest};
    session->report.state = RFT_SESSION_APPLYING;
    session->told = !put(session, image);
    if (session->told) {
        session->report.state = state;
        rft_image_drop_use(image, RFT_IMAGE_LENT);
        return;
    }
    (void)rft_receive_take(&session->receive);
    rft_image_drop_use(image, RFT_IMAGE_STAGED);
    session->applying = image;
    session->owes = true;
}

/* The trainer says once more that the version is committed which the user is to decide on. */
static void owe_answer(rft_session *session)
{
    rft_receive_drop(&session->receive);
    session->owes = true;
    session->report.state = RFT_SESSION_APPLYING;
}

/* The user has decided about `applying`: its update stays open, and the next version may start. */
static void end_decision(rft_session *session, const rft_message *answer, int64_t now)
{
    bool owes = session->owes;
    session->open = session->applying;
    session->applying = NULL;
    session->owes = false;
    if (session->report.state == RFT_SESSION_APPLYING) session->report.state = RFT_SESSION_CURRENT;
    if (owes) {
        session_send(session, answer);
    } else if (is_joined(session)) {
        send_beat(session, now);
    }
    if (session->told) {
        deliver(session, now);
    } else {
        proceed(session, now);
    }
}

/* The user's engine runs on the version. */
static void keep_applied(rft_session *session, int64_t now)
{
    rft_image *image = session->applying;
    session->held = image->id;
    session->report.version = image->id.version;
    session->report.applied++;
    session->rejoins = false;
    hold_image(session, image);
    rft_message message = {.kind = RFT_COMMITTED};
    message.as.staged.version = image->id.version;
    message.as.staged.digest = image->id.digest;
    end_decision(session, &message, now);
}

/*
 * ---- Messages of the publisher
 *
 * One function for each kind. A message that names another epoch comes from a publisher that is not
 * the joined one (or from its past) and is passed over; so is a late one, about a version that was
 * dropped. A message that a publisher never sends, or one against its own manifest, breaks the
 * connection.
 */

/* ---- Joining */

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

/* That the probe can be opened shows that both ends share a host; addresses do not show it. */
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
    find_gpu(session, welcome->as.welcome.share);
}

/* Whether the trainer is asked for a part of each version. */
static bool selects(const rft_session *session)
{
    return session->selection != NULL && session->parts;
}

static void send_join(rft_session *session)
{
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = session->report.epoch;
    message.as.join.shm = session->proof != 0;
    message.as.join.proof = session->proof;
    message.as.join.reason = rft_view_text(session->why_not);
    message.as.join.gpu = session->on_gpu;
    message.as.join.pieces = takes_pieces(session);
    message.as.join.selects = selects(session);
    session_send(session, &message);
}

static void adopt(rft_session *session, const rft_message *welcome, int64_t now)
{
    uint32_t window = session->config->broadcast_window;
    session->report.epoch = welcome->as.welcome.epoch;
    session->parts = welcome->as.welcome.parts;
    session->frame_bytes = welcome->as.welcome.frame_bytes;
    rft_shard_links_follow(&session->links, session->report.epoch, session->frame_bytes);
    rft_shard_links_set_catalog(&session->links, NULL);
    session->window = welcome->as.welcome.window < window ? welcome->as.welcome.window : window;
    session->heartbeat_ms = welcome->as.welcome.heartbeat_ms;
    session->heartbeat_timeout_ms = welcome->as.welcome.heartbeat_timeout_ms;
    session->next_beat = rft_after_ms(now, session->heartbeat_ms);
    session->report.state = RFT_SESSION_JOINING;
    session->report.refusal[0] = '\0';
    session->rejected_since = 0;
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
    rft_image_drop_use(session->held_image, RFT_IMAGE_BASE);
    session->held_image = NULL;
    rft_images_trim_private(&session->images);
}

/* WELCOME to a HELLO that was sent twice. */
static void answer_again(rft_session *session, const rft_message *welcome, int64_t now)
{
    if (could_use_gpu(session, welcome->as.welcome.share)) {
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
        end_session(session, REFIT_ERR_PROTOCOL, why.text, now);
        return;
    }
    if (rft_welcome_check(message, &why) != REFIT_OK) {
        break_off(session, &why, now);
        return;
    }
    if (session->names_gpu) return;
    if (is_joined(session) && message->as.welcome.epoch == session->report.epoch) {
        answer_again(session, message, now);
        return;
    }
    if (is_joined(session)) rft_session_disconnect(session, 0, now);
    adopt(session, message, now);
    find_path(session, message);
    if (session->config->broadcast_shm == REFIT_SHM_REQUIRE && session->proof == 0) {
        end_session(session, REFIT_ERR_SYSTEM, session->why_not, now);
        return;
    }
    if (needs_gpu(session, message->as.welcome.share, now)) return;
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
        end_session(session, final_status(message->as.refuse.code), reason, now);
        return;
    }
    defer(session, reason, now);
}

static void answer_bye(rft_session *session, const rft_message *message, rft_view payload,
                       int64_t now)
{
    (void)payload;
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    rft_log(REFIT_LOG_INFO, "worker %s: the trainer says goodbye: %s", session->identity->worker,
            reason);
    if (is_joined(session)) send_bye(session, REFIT_OK, "the trainer closed");
    if (message->as.bye.final)
        (void)rft_fail(&session->report.final, REFIT_ERR_CLOSED, "the trainer has ended: %s",
                       reason);
    rft_session_disconnect(session, session->config->broadcast_heartbeat_ms, now);
}

/* ---- A version */

/* What is selected of the manifest's versions. */
static refit_status resolve_selection(rft_session *session, refit_error *error)
{
    const char *missing = NULL;
    rft_catalog *catalog = session->catalog;
    if (session->selection == NULL) return REFIT_OK;
    refit_status status = rft_selection_resolve(session->selection, catalog->manifest,
                                                &catalog->want, &missing, error);
    if (missing != NULL)
        rft_log(REFIT_LOG_WARNING, "worker %s selects '%.80s', which the trainer does not have",
                session->identity->worker, missing);
    if (status == REFIT_OK) return REFIT_OK;
    rft_catalog_release(catalog);
    session->catalog = NULL;
    return status;
}

/* The trainer is told, who offers nothing before. */
static void send_want(rft_session *session)
{
    rft_want_slice slice = {0};
    rft_message message = {.kind = RFT_WANT};
    message.as.want.manifest = session->catalog->manifest->digest;
    while (rft_want_slice_next(session->catalog->want, &session->limits, &slice)) {
        message.as.want.rows = slice.rows;
        message.as.want.from = slice.from;
        message.as.want.more = slice.more;
        session_send(session, &message);
    }
}

static void take_manifest(rft_session *session, const rft_message *message, refit_error *error)
{
    rft_manifest *manifest = NULL;
    rft_limits limits = session->limits;
    if (session->on_gpu || selects(session)) limits.memory_bytes = 0; /* it need not hold all */
    refit_status status = rft_manifest_decode(message->as.manifest.tensors, session->frame_bytes,
                                              &limits, &manifest, error);
    if (status == REFIT_OK &&
        !rft_digest128_equal(&manifest->digest, &message->as.manifest.digest)) {
        rft_manifest_close(manifest);
        status = rft_fail(error, REFIT_ERR_PROTOCOL, "a manifest does not match its digest");
    }
    if (status == REFIT_OK) status = rft_catalog_open(manifest, &session->catalog, error);
    if (status == REFIT_OK) status = resolve_selection(session, error);
    if (status == REFIT_OK) error->status = REFIT_OK;
}

/* The offer that WANT would bring does not come: the trainer is told why. */
static void refuse_manifest(rft_session *session)
{
    if (selects(session)) send_failed(session, 0, &session->manifest_failure, true);
}

static void answer_manifest(rft_session *session, const rft_message *message, rft_view payload,
                            int64_t now)
{
    (void)payload;
    refit_error *failure = &session->manifest_failure;
    rft_catalog_release(session->catalog);
    session->catalog = NULL;
    take_manifest(session, message, failure);
    rft_shard_links_set_catalog(&session->links, session->catalog);
    if (failure->status == REFIT_ERR_PROTOCOL) break_off(session, failure, now);
    if (session->catalog == NULL) {
        refuse_manifest(session);
        return;
    }
    if (selects(session)) send_want(session);
    rft_images_trim_private(&session->images);
    rft_images_trim_mappings(&session->images);
}

static void answer_shard(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    (void)payload;
    refit_error why;
    refit_status status = rft_shard_links_put(&session->links, message, now, &why);
    if (status == REFIT_ERR_PEER) {
        abort_update(session, session->receive.version, &why, now);
    } else if (status != REFIT_OK) {
        break_off(session, &why, now);
    }
}

static refit_status check_offer(const rft_session *session, const rft_message *offer,
                                refit_error *error)
{
    const rft_version_id *held = &session->held;
    uint64_t version = offer->as.offer.version;
    RFT_REFUSE_IF(version == 0 || (held->epoch == session->report.epoch && version < held->version),
                  error, REFIT_ERR_PROTOCOL,
                  "version %" PRIu64 " is offered after version %" PRIu64, version, held->version);
    bool able = offer->as.offer.neighbor ? session->place[0] != '\0' : session->proof != 0;
    RFT_REFUSE_IF(offer->as.offer.segment.count > 0 && !able, error, REFIT_ERR_PROTOCOL,
                  "shared memory is offered to a worker that cannot open it");
    RFT_REFUSE_IF(offer->as.offer.lent && !session->on_gpu, error, REFIT_ERR_PROTOCOL,
                  "a GPU's memory is lent to a worker that is not on it");
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
    rft_image *left = rft_receive_leave(&session->receive, message->as.offer.version);
    (void)drop_version(session, REFIT_ERR_STALE, "the trainer offers another one");
    session->report.state = rest(session);
    refit_status status = check_offer(session, message, &why);
    if (status == REFIT_OK) {
        rft_want *own = selects(session) ? session->catalog->want : NULL;
        status = rft_receive_offer(&session->receive, message, session->catalog, own,
                                   session->window, now, &why);
    }
    if (status != REFIT_OK) {
        rft_image_drop_use(left, RFT_IMAGE_STAGED);
        abort_update(session, message->as.offer.version, &why, now);
        return;
    }
    rft_receive_resume(&session->receive, left);
    session->report.path = session->receive.path;
    proceed(session, now);
}

static void note_counts(rft_session *session)
{
    session->report.bytes_received = session->receive.counts.bytes_received;
    session->report.bad_frames = session->receive.counts.bad_frames;
}

/* After a step of receiving: proceeds, perhaps later, or gives up the version. */
static void follow(rft_session *session, refit_status status, const refit_error *why, int64_t now)
{
    if (status != REFIT_OK && status != REFIT_ERR_BUSY) {
        lose_version(session, why, now);
    } else {
        proceed(session, now);
    }
}

static void answer_frame(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    refit_error why;
    refit_status status = rft_receive_frame(&session->receive, message, payload, &why);
    follow(session, status, &why, now);
}

static void answer_lend(rft_session *session, const rft_message *message, rft_view payload,
                        int64_t now)
{
    (void)payload;
    refit_error why;
    refit_status status = rft_receive_lend(&session->receive, message, &why);
    follow(session, status, &why, now);
}

static void answer_pieces(rft_session *session, const rft_message *message, rft_view payload,
                          int64_t now)
{
    (void)payload;
    refit_error why;
    refit_status status =
        rft_receive_pieces(&session->receive, message, session->mailbox->wake_fd, &why);
    if (status == REFIT_OK) {
        proceed(session, now);
    } else {
        lose_version(session, &why, now);
    }
}

static void answer_seal(rft_session *session, const rft_message *message, rft_view payload,
                        int64_t now)
{
    (void)payload;
    refit_error why;
    refit_status status = rft_receive_seal(&session->receive, message, &why);
    follow(session, status, &why, now);
}

/* ---- Links to other publishers of the version */

void rft_session_link_message(rft_session *session, rft_shard_link *link,
                              const rft_message *message, rft_view payload, int64_t now)
{
    refit_error why;
    refit_status status =
        rft_receive_link_message(&session->receive, link, message, payload, now, &why);
    follow(session, status, &why, now);
    note_counts(session);
}

void rft_session_link_failed(rft_session *session, rft_shard_link *link, const refit_error *why,
                             int64_t now)
{
    refit_error lost;
    if (rft_shard_link_lose(link, why->text, now, &lost) != REFIT_OK)
        lose_version(session, &lost, now);
}

/* ---- Commit and abort */

static void repeat_committed(rft_session *session, uint64_t version)
{
    if (session->receive.version == version) {
        rft_receive_drop(&session->receive);
        session->told = false;
        session->report.state = rest(session);
    }
    rft_message message = {.kind = RFT_COMMITTED};
    message.as.staged.version = version;
    message.as.staged.digest = session->held.digest;
    session_send(session, &message);
}

/* The user has copied it: it is in use. */
static void end_streaming(rft_session *session, int64_t now)
{
    rft_piece_queue *queue = session->applying->pieces;
    session->applying->id.digest = session->receive.digest;
    rft_image_drop_use(rft_receive_take(&session->receive), RFT_IMAGE_STAGED);
    session->report.state = RFT_SESSION_APPLYING;
    session->owes = true;
    keep_applied(session, now);
    rft_piece_queue_commit(queue);
}

static void answer_commit(rft_session *session, const rft_message *message, rft_view payload,
                          int64_t now)
{
    (void)payload;
    uint64_t version = message->as.commit.version;
    bool applying = session->owes && session->applying->id.version == version;
    if (rft_session_holds(session, version)) {
        repeat_committed(session, version);
    } else if (session->report.state == RFT_SESSION_STAGED && is_streaming(session) &&
               session->receive.version == version) {
        end_streaming(session, now);
    } else if (session->report.state == RFT_SESSION_STAGED && session->receive.version == version) {
        if (is_undecided(session, version)) {
            owe_answer(session);
        } else {
            deliver(session, now);
        }
    } else if (!applying) {
        refit_error why;
        (void)rft_fail(&why, REFIT_ERR_STATE, "version %" PRIu64 " is not staged here", version);
        send_failed(session, version, &why, true);
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
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(message->as.failed.reason, reason, sizeof reason);
    (void)drop_version(session, REFIT_ERR_CANCELLED, reason);
    session->report.aborted++;
    session->report.state = rest(session);
}

static void answer_beat(rft_session *session, const rft_message *message, rft_view payload,
                        int64_t now)
{
    (void)message;
    (void)payload;
    refit_error why;
    rft_images_trim_replaced(&session->images);
    refit_status status = rft_receive_beat(&session->receive, session->heartbeat_ms, now, &why);
    follow(session, status, &why, now);
}

/* ---- Dispatch */

typedef void (*answer_fn)(rft_session *session, const rft_message *message, rft_view payload,
                          int64_t now);

/* The messages that a publisher may send, and whether they are valid before the worker has joined.
 */
static const struct answer_rule {
    answer_fn answer;
    bool while_connecting;
} rules[RFT_MESSAGE_KINDS] = {
    [RFT_WELCOME] = {answer_welcome, true}, [RFT_REFUSE] = {answer_refuse, true},
    [RFT_BYE] = {answer_bye, true},         [RFT_MANIFEST] = {answer_manifest, false},
    [RFT_OFFER] = {answer_offer, false},    [RFT_FRAME] = {answer_frame, false},
    [RFT_LEND] = {answer_lend, false},      [RFT_PIECES] = {answer_pieces, false},
    [RFT_SEAL] = {answer_seal, false},      [RFT_COMMIT] = {answer_commit, false},
    [RFT_ABORT] = {answer_abort, false},    [RFT_BEAT] = {answer_beat, false},
    [RFT_SHARD] = {answer_shard, false},
};

/* The epoch that a message names, or ours if its kind names none. */
static uint64_t epoch_of(const rft_session *session, const rft_message *message)
{
    switch (message->kind) {
    case RFT_MANIFEST: return message->as.manifest.epoch;
    case RFT_OFFER: return message->as.offer.epoch;
    case RFT_BEAT: return message->as.beat.held.epoch;
    case RFT_SHARD: return message->as.shard.epoch;
    default: return session->report.epoch;
    }
}

/* Handles the publisher's message in the state that the session is in. */
static void answer_publisher(rft_session *session, const rft_message *message, rft_view payload,
                             int64_t now)
{
    const struct answer_rule *rule = &rules[message->kind];
    if (rule->answer == NULL) {
        refit_error why;
        (void)rft_fail(&why, REFIT_ERR_PROTOCOL, "a publisher does not say %s",
                       rft_message_kind_name(message->kind));
        break_off(session, &why, now);
        return;
    }
    if (!rule->while_connecting) {
        if (!is_joined(session)) return;
        if (epoch_of(session, message) != session->report.epoch) return;
        if (session->report.state == RFT_SESSION_JOINING) {
            session->report.state = RFT_SESSION_CURRENT;
        }
    }
    session->heard = now;
    session->asked = 0;
    rule->answer(session, message, payload, now);
}

void rft_session_message(rft_session *session, const rft_message *message, rft_view payload,
                         int64_t now)
{
    if (session->report.final.status == REFIT_OK) {
        answer_publisher(session, message, payload, now);
    }
    note_counts(session);
}

void rft_session_garbage(rft_session *session, const refit_error *why, int64_t now)
{
    if (session->report.final.status != REFIT_OK) return;
    if (why->status != REFIT_ERR_LIMIT || !is_joined(session)) {
        break_off(session, why, now);
        return;
    }
    /* The message is well formed, but larger than this worker may take, and would come again after
     * a new connection. Its kind is unknown. If it was a manifest, the offers that follow fail for
     * want of it; any other message costs the version under way. Where this session knows of none,
     * FAILED names version 0, and the publisher knows which one it is. */
    session->report.refused++;
    session->manifest_failure = *why;
    abort_update(session, session->receive.version, why, now);
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
        lose_connection(session, why, now);
        return;
    }
    if (has_deadline(session) && now >= session->receive.deadline) {
        refit_error why;
        (void)rft_fail(&why, REFIT_ERR_TIMEOUT, "not all of the version was here by its deadline");
        abort_update(session, session->receive.version, &why, now);
        return; /* HELLO, which would drop what was just said, comes with the next tick */
    }
    if (now < session->next_beat) return;
    if (rejoins_now(session)) {
        rft_session_disconnect(session, 0, now);
    } else {
        send_beat(session, now);
    }
}

/* One part a tick: beats, messages and the user's decisions come between two. */
static void tick_working(rft_session *session, int64_t now)
{
    refit_error why;
    if (!rft_receive_is_busy(&session->receive)) return;
    if (rft_receive_work(&session->receive, &why) != REFIT_OK) {
        abort_update(session, session->receive.version, &why, now);
    } else {
        proceed(session, now);
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
    if (is_ready(session)) {
        send_hello(session);
        if (session->asked == 0) session->asked = now;
    }
    session->next_beat = rft_after_ms(now, session->heartbeat_ms);
}

static void tick_links(rft_session *session, int64_t now)
{
    refit_error why;
    if (rft_shard_links_tick(&session->links, now, &why) != REFIT_OK)
        lose_version(session, &why, now);
}

/* Messages that were waiting are dropped with the one that was lost. */
static void tick_send_queue(rft_session *session, int64_t now)
{
    if (session->send_queue.failures == session->failures_seen) return;
    session->failures_seen = session->send_queue.failures;
    rft_send_queue_reset(&session->send_queue);
    lose_connection(session, "its messages could not be sent", now);
}

void rft_session_tick(rft_session *session, int64_t now)
{
    bool lives = session->report.final.status == REFIT_OK;
    if (!lives) rft_shard_links_close(&session->links);
    if (lives) tick_links(session, now);
    if (lives && is_joined(session)) tick_joined(session, now);
    if (lives) tick_working(session, now);
    tick_send_queue(session, now); /* before a HELLO, which it would drop */
    if (lives && !is_joined(session)) tick_connecting(session, now);
}

int64_t rft_session_tick_at(const rft_session *session)
{
    if (session->report.final.status != REFIT_OK) return INT64_MAX;
    int64_t at = session->next_beat, link = rft_shard_links_tick_at(&session->links);
    if (link < at) at = link;
    if (!is_joined(session)) return idle_at(session) < at ? idle_at(session) : at;
    if (rft_receive_is_busy(&session->receive)) return session->heard; /* that is: now */
    if (silence_at(session) < at) at = silence_at(session);
    if (has_deadline(session) && session->receive.deadline < at) at = session->receive.deadline;
    return at;
}

/* ---- The user */

void rft_session_accept(rft_session *session, int64_t now)
{
    if (session->applying->pieces == NULL) {
        keep_applied(session, now);
    } else if (is_streaming(session)) {
        session->report.state = RFT_SESSION_STAGED;
        session->report.stage_seconds = rft_seconds(now - session->receive.offered_at);
        send_staged(session);
    } /* else it has ended meanwhile, as the user is told */
}

void rft_session_refuse(rft_session *session, refit_status code, bool kept, const char *reason,
                        int64_t now)
{
    /* Where the version is offered once more, this answers the offer, too. */
    if (is_streaming(session) || is_undecided(session, session->receive.version)) {
        owe_answer(session);
    }
    if (!kept) {
        session->held = (rft_version_id){0};
        session->report.version = 0;
        hold_image(session, NULL);
    }
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = session->applying->id.version;
    message.as.failed.code = (uint32_t)code;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text(reason);
    end_decision(session, &message, now);
    session->rejoins = !kept && is_joined(session);
    if (session->rejoins) session->next_beat = rft_after_ms(now, session->heartbeat_ms);
}

void rft_session_release(rft_session *session, int64_t now)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = session->open->id.version;
    bool known = session->open->id.epoch == session->report.epoch;
    bool joined = is_joined(session);
    rft_image_drop_use(session->open, RFT_IMAGE_LENT);
    session->open = NULL;
    if (!joined)
        rft_images_trim_mappings(&session->images); /* a trainer that leaves waits for it */
    if (joined && known) session_send(session, &message);
    proceed(session, now);
}

void rft_session_collect(rft_session *session)
{
    if (session->applying == NULL || session->applying->pieces == NULL) return;
    uint32_t taken = rft_piece_queue_collect(session->applying->pieces);
    if (taken == 0 || !is_streaming(session)) return;
    rft_message message = {.kind = RFT_TAKEN};
    message.as.taken.version = session->receive.version;
    message.as.taken.sequence = taken;
    session_send(session, &message);
}
