/*
 * What a publisher makes of each message of a worker.
 *
 * One function a kind. Messages may come twice, or late: an answer is given again, and what has
 * been settled stays settled. What a worker never says, or says against what it was told, breaks
 * the protocol: it is counted, and the worker turned out; others do not notice. A message from
 * somebody who is not known (turned out, or of an earlier trainer) is answered REFUSE, not final:
 * the worker says HELLO again.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "publisher/server.h"

void rft_server_break_off(rft_server *server, rft_peer *peer, refit_status status,
                          const char *reason)
{
    server->counts.refused++;
    rft_log(REFIT_LOG_WARNING, "worker %s broke the protocol: %s", peer->name, reason);
    rft_server_evict(server, peer, status, reason);
}

/* ---- A version */

static bool is_task(const rft_peer *peer, uint64_t version)
{
    return peer->task.stage != RFT_STAGE_NONE && peer->task.version == version;
}

static void answer_pull(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    (void)server, (void)now;
    rft_task *task = &peer->task;
    if (!is_task(peer, message->as.pull.version)) return;
    int64_t most = (int64_t)peer->window * RFT_CREDIT;
    int64_t credits = task->credits + (int64_t)message->as.pull.credits * RFT_CREDIT;
    task->credits = (int32_t)(credits < most ? credits : most);
}

static uint32_t read_u32(const unsigned char *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static bool is_ready(const rft_store *store, uint32_t sequence)
{
    if (store->ready_count == store->manifest->frame_count) return true;
    for (uint32_t i = 0; i < store->ready_count; i++) {
        if (store->ready[i] == sequence) return true;
    }
    return false;
}

/* Every frame as often as broadcast.resend_limit says: a worker that keeps to it never asks for
 * more.
 */
static bool may_resend(const rft_server *server, const rft_task *task)
{
    uint64_t times = server->config->broadcast_resend_limit;
    return task->resent < times * server->store->manifest->frame_count;
}

static uint32_t resend_room(const rft_peer *peer)
{
    return peer->window < RFT_RESEND_ROOM ? peer->window : RFT_RESEND_ROOM;
}

/* No more wait than its window: so many can be lost at once, and what is missing beyond them is
 * asked for again. */
static void answer_resend(rft_server *server, rft_peer *peer, const rft_message *message,
                          int64_t now)
{
    (void)now;
    rft_task *task = &peer->task;
    rft_view wanted = message->as.resend.sequences;
    bool open = is_task(peer, message->as.resend.version) && task->stage == RFT_STAGE_OFFERED;
    if (!open) return;
    for (size_t i = 0; i + 4 <= wanted.count; i += 4) {
        uint32_t sequence = read_u32((const unsigned char *)wanted.data + i);
        if (sequence >= server->store->manifest->frame_count) {
            rft_server_break_off(server, peer, REFIT_ERR_PROTOCOL,
                                 "it asks for a frame that does not exist");
            return;
        }
        if (!may_resend(server, task)) {
            rft_server_break_off(
                server, peer, REFIT_ERR_LIMIT,
                "it asks for frames more often than broadcast.resend_limit allows");
            return;
        }
        task->resent++;
        bool room = task->resend_count < resend_room(peer) && is_ready(server->store, sequence);
        if (room) task->resend[task->resend_count++] = sequence;
    }
}

/* A version that is neither under way nor committed is not to be kept staged. */
static void answer_stray(rft_server *server, rft_peer *peer, uint64_t version)
{
    if (version == server->current.version && peer->task.stage == RFT_STAGE_NONE) {
        rft_server_send_commit(server, peer, version);
    } else {
        rft_server_send_abort(server, peer, version, REFIT_ERR_STALE,
                              "this version is not under way");
    }
}

static void fail_digest(rft_server *server, rft_peer *peer)
{
    uint64_t version = peer->task.version;
    const char *reason = "what it staged has another digest than what was written";
    rft_server_send_abort(server, peer, version, REFIT_ERR_CORRUPT, reason);
    peer->task = (rft_task){0};
    peer->failed_version = version;
    rft_transaction_blame(server, peer, REFIT_ERR_CORRUPT, reason);
}

static void answer_staged(rft_server *server, rft_peer *peer, const rft_message *message,
                          int64_t now)
{
    (void)now;
    uint64_t version = message->as.staged.version;
    const rft_transaction *transaction = &server->transaction;
    if (!is_task(peer, version)) {
        answer_stray(server, peer, version);
        return;
    }
    if (peer->task.stage == RFT_STAGE_COMMITTING) {
        rft_server_send_commit(server, peer, version);
        return;
    }
    if (transaction->state == RFT_TRANSACTION_WRITING && version == transaction->version) {
        rft_server_break_off(server, peer, REFIT_ERR_PROTOCOL,
                             "it has staged what is not yet written");
        return;
    }
    if (!rft_digest128_equal(&message->as.staged.digest,
                             &rft_store_served(server->store)->digest)) {
        fail_digest(server, peer);
        return;
    }
    peer->task.stage = RFT_STAGE_STAGED;
    if (version == transaction->version) rft_transaction_forgive(server, peer);
    if (!rft_server_is_committed(server, version)) {
        peer->due = 0;
        return;
    }
    peer->awaited =
        peer->member && peer->due != 0 && transaction->state == RFT_TRANSACTION_COMMITTING;
    rft_transaction_commit_peer(server, peer);
}

static void answer_committed(rft_server *server, rft_peer *peer, const rft_message *message,
                             int64_t now)
{
    (void)now;
    const rft_held held = {server->epoch, message->as.staged.version, message->as.staged.digest};
    bool newest = held.version == server->current.version;
    if (held.version > server->current.version) {
        rft_server_break_off(server, peer, REFIT_ERR_PROTOCOL,
                             "it applied a version that is not committed");
        return;
    }
    if (newest && !rft_server_is_current(server, &held)) {
        rft_server_break_off(server, peer, REFIT_ERR_CORRUPT,
                             "it applied other bytes than were committed");
        return;
    }
    peer->held = held;
    if (is_task(peer, held.version)) peer->task = (rft_task){0};
    if (newest) rft_transaction_applied(server, peer);
}

static void answer_released(rft_server *server, rft_peer *peer, const rft_message *message,
                            int64_t now)
{
    (void)server, (void)now;
    rft_peer_take_back(peer, message->as.commit.version);
}

/* Its base is not there after all, or not what was committed, as once somebody wrote into it. What
 * differs in a block that travels as the same is only seen by the digests at the end: CORRUPT. */
static bool has_bad_base(const rft_task *task, refit_status code)
{
    bool fetching = task->stage == RFT_STAGE_OFFERED && task->base != 0;
    return fetching && (code == REFIT_ERR_STALE || code == REFIT_ERR_CORRUPT);
}

/* The same version once more, built on nothing. */
static void offer_whole(rft_server *server, rft_peer *peer, int64_t now)
{
    peer->held = (rft_held){0};
    peer->task = (rft_task){0};
    rft_server_offer(server, peer, now);
}

/* It was told to apply a version that it had dropped: what it had said it staged was of an offer
 * that a newer version ended. */
static bool was_told_early(const rft_peer *peer, const rft_message *failed)
{
    return is_task(peer, failed->as.failed.version) && peer->task.stage != RFT_STAGE_STAGED &&
           failed->as.failed.code == REFIT_ERR_STATE && failed->as.failed.kept;
}

/* Told before it was offered the version once more, it is fetching it; told after that, it is not
 * sent it any more. */
static void offer_anew(rft_server *server, rft_peer *peer, int64_t now)
{
    if (peer->task.stage == RFT_STAGE_OFFERED) return;
    peer->task = (rft_task){0};
    rft_server_offer(server, peer, now);
}

static void answer_failed(rft_server *server, rft_peer *peer, const rft_message *message,
                          int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    uint64_t version = message->as.failed.version;
    refit_status code = (refit_status)message->as.failed.code;
    bool current = is_task(peer, version);
    if (was_told_early(peer, message)) {
        offer_anew(server, peer, now);
        return;
    }
    if (!message->as.failed.kept) peer->held = (rft_held){0};
    if (!current && version != 0) return;
    rft_view_print(message->as.failed.reason, reason, sizeof reason);
    if (current && has_bad_base(&peer->task, code)) {
        rft_log(REFIT_LOG_WARNING, "worker %s is sent version %" PRIu64 " whole: %s", peer->name,
                version, reason);
        offer_whole(server, peer, now);
        return;
    }
    rft_log(REFIT_LOG_WARNING, "worker %s failed with version %" PRIu64 ": %s", peer->name, version,
            reason);
    peer->failed_version = peer->task.version;
    peer->task = (rft_task){0};
    /* It may have been the manifest that it had no memory for: the next offer brings it again. */
    if (code == REFIT_ERR_HOST_MEMORY) peer->has_manifest = false;
    rft_transaction_blame(server, peer, code, reason);
}

/* A beat says again what other messages said, should one of them have been lost. */
static void answer_beat(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    (void)now;
    const rft_held *held = &message->as.beat.held;
    uint64_t staged = message->as.beat.staged;
    if (!peer->subscribed) return;
    bool applied = is_task(peer, held->version) && peer->task.stage == RFT_STAGE_COMMITTING;
    bool current = rft_server_is_current(server, held);
    if (current || held->version == 0) peer->held = *held;
    if (applied && current) {
        peer->task = (rft_task){0};
        rft_transaction_applied(server, peer);
        return;
    }
    bool settled = staged != 0 && is_task(peer, staged) && peer->task.stage < RFT_STAGE_COMMITTING;
    if (settled || staged == 0) return;
    if (is_task(peer, staged)) {
        rft_server_send_commit(server, peer, staged);
    } else {
        answer_stray(server, peer, staged);
    }
}

/* ---- All of them */

typedef void (*answer_fn)(rft_server *server, rft_peer *peer, const rft_message *message,
                          int64_t now);

/* Only from a subscribed worker, except for JOIN, BEAT and BYE. NULL: a worker never says it. */
static const answer_fn answers[RFT_MESSAGE_KINDS] = {
    [RFT_JOIN] = rft_server_answer_join, [RFT_PULL] = answer_pull,
    [RFT_RESEND] = answer_resend,        [RFT_STAGED] = answer_staged,
    [RFT_COMMITTED] = answer_committed,  [RFT_RELEASED] = answer_released,
    [RFT_FAILED] = answer_failed,        [RFT_BEAT] = answer_beat,
    [RFT_BYE] = rft_server_answer_bye,
};

static void answer_stranger(rft_server *server, const rft_peer_id *from, const rft_message *message)
{
    if (message->kind == RFT_BYE) return;
    server->counts.refused += answers[message->kind] == NULL;
    rft_server_refuse(server, from, REFIT_ERR_STALE, false,
                      "this worker is not subscribed: say hello");
}

static void answer_peer(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    rft_message_kind kind = message->kind;
    peer->heard = now;
    if (answers[kind] == NULL) {
        char reason[80];
        snprintf(reason, sizeof reason, "a worker never says %s", rft_message_kind_name(kind));
        rft_server_break_off(server, peer, REFIT_ERR_PROTOCOL, reason);
        return;
    }
    bool early = kind != RFT_JOIN && kind != RFT_BEAT && kind != RFT_BYE;
    if (early && !peer->subscribed) return;
    answers[kind](server, peer, message, now);
}

void rft_server_message(rft_server *server, const rft_peer_id *from, const rft_message *message,
                        int64_t now)
{
    rft_peer *peer = rft_peers_find(&server->peers, from);
    if (!rft_server_admits(server, from, NULL)) {
        rft_server_turn_away(server, peer, now);
        return;
    }
    if (message->kind == RFT_HELLO) {
        rft_server_answer_hello(server, from, peer, message, now);
    } else if (peer == NULL) {
        answer_stranger(server, from, message);
    } else {
        answer_peer(server, peer, message, now);
    }
    rft_transaction_evaluate(server, now);
}

void rft_server_garbage(rft_server *server, const rft_peer_id *from, const refit_error *why,
                        int64_t now)
{
    rft_peer *peer = rft_peers_find(&server->peers, from);
    if (!rft_server_admits(server, from, NULL)) {
        rft_server_turn_away(server, peer, now);
        return;
    }
    if (peer != NULL) {
        rft_server_break_off(server, peer, REFIT_ERR_PROTOCOL, why->text);
        rft_transaction_evaluate(server, now);
        return;
    }
    server->counts.refused++;
    if (from->count > 0) rft_server_refuse(server, from, REFIT_ERR_PROTOCOL, false, why->text);
}
