/*
 * One version, from begin to the answer of every worker that counts on it.
 *
 *            prepare               begin               seal
 *     IDLE ───────────► PREPARING ───────► WRITING ───────────► STAGING
 *      ▲ ▲                  │ expire          │ abort              │
 *      │ └──────────────────┘                 ▼                    │ too few can stage it,
 *      │            end_rollback ┌───────── ABORTED ◄──────────────┤ or the deadline
 *      ├─────────────────────────┘                                 │
 *      │                 all have answered                         │ all, or the quorum, staged
 *      └────────────────────────────────────── COMMITTING ◄────────┘
 *
 *   IDLE        The committed version, if any, is served: workers that lag are offered it.
 *   PREPARING   Nothing is served: a slot must become free. Newcomers wait.
 *   WRITING     Members have been offered the version and fetch ready frames. Newcomers are
 *               offered it as guests that do not count.
 *   STAGING     All is written, SEAL went out; STAGED, FAILED and losses decide.
 *   COMMITTING  The version is committed. Staged members have until their due to say COMMITTED;
 *               a worker that stages only now is told COMMIT at once. Unless broadcast.wait is
 *               applied, only those are awaited whose version is too old.
 *               A cancel ends this, too, and no worker is awaited any more.
 *   ABORTED     All workers were told ABORT; the store is being rolled back. Nothing is served.
 *
 * With commit: all, one member lost or failed ends STAGING at once: nothing waits for a version
 * that cannot succeed. With a quorum, it ends when too few are left; a member that failed, joined
 * again and staged after all is one of those left.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "publisher/server.h"

/* ---- Beginning */

refit_status rft_transaction_prepare(rft_server *server, uint64_t *version, refit_error *error)
{
    rft_transaction *transaction = &server->transaction;
    RFT_REFUSE_IF(server->store == NULL, error, REFIT_ERR_STATE,
                  "no tensors are declared: call refit_publisher_declare first");
    RFT_REFUSE_IF(transaction->state != RFT_TRANSACTION_IDLE, error, REFIT_ERR_STATE,
                  "version %" PRIu64 " is under way: commit or abort it first",
                  transaction->version);
    RFT_REFUSE_IF(rft_ranks_are_many(server) && !server->ranks.complete, error, REFIT_ERR_PEER,
                  "the ranks are not all there: %s",
                  server->ranks.failure.status != REFIT_OK ? server->ranks.failure.text
                                                           : "one has not joined again");
    uint64_t number = *version == 0 ? transaction->last + 1 : *version;
    RFT_REFUSE_IF(number == 0, error, REFIT_ERR_STALE,
                  "no number is left above %" PRIu64 ", the last one used: open another publisher, "
                  "whose versions begin at 1",
                  transaction->last);
    RFT_REFUSE_IF(number <= transaction->last, error, REFIT_ERR_STALE,
                  "version %" PRIu64 " is not above %" PRIu64 ", the last one used", number,
                  transaction->last);
    *version = number;
    transaction->state = RFT_TRANSACTION_PREPARING;
    transaction->version = number;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        bool ahead =
            peer->fetches && peer->task.version >= number; /* rank 0 has begun it already */
        if (!ahead) rft_server_drop_task(server, peer, REFIT_ERR_STALE, "a newer version begins");
    }
    return REFIT_OK;
}

static void offer_all(rft_server *server, int64_t now)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (peer->subscribed && peer->task.stage == RFT_STAGE_NONE)
            rft_server_offer(server, peer, now);
    }
}

void rft_transaction_expire(rft_server *server, int64_t now)
{
    server->transaction.state = RFT_TRANSACTION_IDLE;
    if (rft_ranks_follows(server))
        rft_rank_link_send_failed(server, REFIT_ERR_PEER, "it could not begin the version");
    offer_all(server, now);
}

void rft_transaction_begin(rft_server *server, int64_t now)
{
    rft_transaction *transaction = &server->transaction;
    rft_peers_forget_lost(&server->peers);
    server->gone[0] = '\0';
    *transaction = (rft_transaction){
        .state = RFT_TRANSACTION_WRITING,
        .version = transaction->version,
        .last = transaction->version,
        .began = now,
    };
    rft_ranks_begin(server);
    server->counts.applied_last = 0;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        /* One that joined when it was settled where the version lies may not be able to have it. */
        peer->member = peer->subscribed &&
                       rft_server_path(server, peer, transaction->version) != REFIT_PATH_NONE;
        peer->awaited = false;
        peer->committed = false;
        peer->status = REFIT_OK;
        peer->reason[0] = '\0';
        peer->due = 0;
        transaction->members += peer->member;
        if (peer->subscribed) rft_server_offer(server, peer, now);
        /* It was told so of an earlier version, or of none. */
        if (peer->unfit != REFIT_OK)
            rft_transaction_blame(server, peer, peer->unfit, peer->unfit_reason);
    }
}

/* ---- Deciding */

static uint32_t members_staged(const rft_server *server)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        count += peer->member && peer->task.stage == RFT_STAGE_STAGED &&
                 peer->task.version == server->transaction.version;
    }
    return count;
}

static bool any_awaited(const rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        if (server->peers.live[i]->awaited) return true;
    }
    return false;
}

/* The digests are known: workers can verify. */
static void tell_seal(rft_server *server)
{
    const rft_transaction *transaction = &server->transaction;
    rft_ranks_tell_seal(server);
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        bool ours = peer->subscribed && peer->task.stage == RFT_STAGE_OFFERED &&
                    peer->task.version == transaction->version;
        if (ours) rft_server_send_seal(server, peer);
    }
}

void rft_transaction_seal(rft_server *server, int64_t now)
{
    rft_transaction *transaction = &server->transaction;
    transaction->state = RFT_TRANSACTION_STAGING;
    transaction->deadline = rft_after_ms(now, server->config->broadcast_stage_timeout_ms);
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (peer->member && peer->status == REFIT_OK) peer->due = transaction->deadline;
    }
    if (rft_ranks_are_many(server))
        rft_ranks_seal(server, transaction->deadline);
    else
        tell_seal(server);
    rft_transaction_evaluate(server, now);
}

void rft_transaction_doom(rft_server *server, refit_status status, const char *reason)
{
    rft_transaction *transaction = &server->transaction;
    bool open = transaction->state == RFT_TRANSACTION_WRITING ||
                transaction->state == RFT_TRANSACTION_STAGING;
    if (!open || transaction->doomed) return;
    transaction->doomed = true;
    (void)rft_fail(&transaction->result, status, "%s", reason);
    rft_ranks_tell_abort(server, status, reason);
}

/* Whether the outcome of the version depends on the worker. */
static bool counts(const rft_server *server, const rft_peer *peer)
{
    rft_transaction_state state = server->transaction.state;
    if (state == RFT_TRANSACTION_COMMITTING) return peer->awaited;
    return peer->member && (state == RFT_TRANSACTION_WRITING || state == RFT_TRANSACTION_STAGING);
}

void rft_transaction_blame(rft_server *server, rft_peer *peer, refit_status status,
                           const char *reason)
{
    rft_transaction *transaction = &server->transaction;
    bool late = status == REFIT_ERR_TIMEOUT && transaction->state == RFT_TRANSACTION_STAGING;
    if (peer->status == REFIT_OK) {
        if (counts(server, peer)) {
            transaction->lost++;
            if (transaction->result.status == REFIT_OK) {
                (void)rft_fail(&transaction->result, late ? REFIT_ERR_TIMEOUT : REFIT_ERR_PEER,
                               "worker %s: %s (%s)", peer->name, reason, refit_status_name(status));
            }
            if (!late) transaction->result.status = REFIT_ERR_PEER;
        }
        peer->status = status;
        rft_text_say(peer->reason, sizeof peer->reason, "%s", reason);
    }
    peer->awaited = false;
    peer->due = 0;
}

void rft_transaction_forgive(rft_server *server, rft_peer *peer)
{
    rft_transaction *transaction = &server->transaction;
    bool counted =
        transaction->state == RFT_TRANSACTION_STAGING && peer->member && peer->status != REFIT_OK;
    if (!counted) return;
    transaction->lost--;
    if (transaction->lost == 0) transaction->result = (refit_error){0};
    peer->status = REFIT_OK;
    peer->reason[0] = '\0';
}

void rft_transaction_applied(rft_server *server, rft_peer *peer)
{
    if (server->transaction.decided == 0)
        return; /* the version before, while a newer one is under way */
    if (!peer->committed) server->counts.applied_last++;
    peer->committed = true;
    peer->awaited = false;
    peer->due = 0;
}

/* By how many versions the worker's is older than the newest one; 65 stands for more. */
static uint32_t age_of(const rft_server *server, const rft_peer *peer)
{
    uint64_t held = peer->held.epoch == server->epoch ? peer->held.version : 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < RFT_RECENT_MOST; i++) {
        count += server->recent[i] > held;
    }
    return count;
}

bool rft_transaction_awaits(const rft_server *server, const rft_peer *peer)
{
    uint32_t most = server->config->broadcast_max_behind;
    if (!peer->member) return false;
    if (server->config->broadcast_wait == REFIT_WAIT_APPLIED) return true;
    return most != 0 && age_of(server, peer) > most;
}

void rft_transaction_caught_up(rft_server *server, rft_peer *peer)
{
    if (!peer->awaited || rft_transaction_awaits(server, peer)) return;
    peer->awaited = false;
    peer->due = 0;
}

static void note_recent(rft_server *server, uint64_t version)
{
    server->recent[server->recent_next] = version;
    server->recent_next = (server->recent_next + 1) % RFT_RECENT_MOST;
}

void rft_transaction_commit_peer(rft_server *server, rft_peer *peer)
{
    uint64_t bytes = server->store->manifest->payload_bytes;
    refit_path path = peer->task.path;
    peer->task.stage = RFT_STAGE_COMMITTING;
    if (rft_path_reads_slot(path)) rft_peer_lend(peer, peer->task.version, path);
    if (path == REFIT_PATH_SHM) server->counts.shm_bytes += bytes;
    if (path == REFIT_PATH_CUDA_IPC) server->counts.gpu_bytes += bytes;
    rft_server_send_commit(server, peer, peer->task.version);
}

/* A member that has come back without its GPU, where the version lies alone. */
static bool needs_host(const rft_server *server, const rft_peer *peer)
{
    bool waits =
        peer->member && peer->subscribed && peer->status == REFIT_OK && peer->task.version == 0;
    return waits && rft_server_path(server, peer, server->transaction.version) == REFIT_PATH_NONE;
}

static void commit_version(rft_server *server, int64_t now)
{
    rft_transaction *transaction = &server->transaction;
    int64_t deadline = rft_after_ms(now, server->config->broadcast_commit_timeout_ms);
    rft_ranks_tell_commit(server);
    rft_store_commit(server->store);
    if (server->gpu != NULL) rft_gpu_store_commit(server->gpu);
    server->current =
        (rft_version_id){server->epoch, transaction->version, server->store->committed.digest};
    note_recent(server, transaction->version);
    transaction->state = RFT_TRANSACTION_COMMITTING;
    transaction->decided = now;
    transaction->result =
        (refit_error){0}; /* with a quorum, workers that were lost before do not count */
    transaction->lost = 0;
    server->counts.committed++;
    server->counts.same_blocks = server->store->same_blocks;
    server->counts.stage_seconds = rft_seconds(now - transaction->began);
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (peer->due != 0) peer->due = needs_host(server, peer) ? 0 : deadline;
        bool staged =
            peer->task.stage == RFT_STAGE_STAGED && peer->task.version == transaction->version;
        if (!staged) continue;
        peer->awaited = rft_transaction_awaits(server, peer);
        peer->due = peer->awaited ? deadline : 0;
        rft_transaction_commit_peer(server, peer);
    }
}

/* Tells workers on the GPU to drop a version that they have not read. */
static void drop_gpu_tasks(rft_server *server, const char *reason)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        bool ours = peer->task.version == server->transaction.version &&
                    peer->task.path == REFIT_PATH_CUDA_IPC;
        if (!ours) continue;
        rft_server_drop_task(server, peer, REFIT_ERR_STALE, reason);
        peer->due = 0; /* nothing is expected of it any more */
    }
}

/* Those that are offered nothing so far. */
static void offer_rest(rft_server *server, int64_t now)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (peer->subscribed && peer->task.version == 0) rft_server_offer(server, peer, now);
    }
}

void rft_transaction_leave_gpu(rft_server *server, int64_t now)
{
    drop_gpu_tasks(server, "it comes another way");
    rft_gpu_store_rollback(server->gpu);
    offer_rest(server, now);
}

/* ---- Piece by piece */

/* Whether the worker is offered the version under way in the GPU's memory. */
static bool takes_from_gpu(const rft_server *server, const rft_peer *peer)
{
    return peer->task.version == server->transaction.version &&
           peer->task.path == REFIT_PATH_CUDA_IPC && peer->task.stage == RFT_STAGE_OFFERED;
}

bool rft_transaction_may_stream(const rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        if (takes_from_gpu(server, peer) && !peer->pieces) return false;
    }
    return true;
}

void rft_transaction_send_pieces(rft_server *server, const rft_message *pieces)
{
    uint32_t sequence = pieces->as.pieces.sequence;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        bool goes_on =
            takes_from_gpu(server, peer) && peer->pieces && peer->task.pieces_sent == sequence - 1;
        if (!goes_on) continue;
        peer->task.pieces_sent = sequence;
        (void)rft_server_send(server, peer, pieces);
    }
}

static bool still_reads(const rft_server *server, const rft_peer *peer, uint32_t sequence)
{
    return takes_from_gpu(server, peer) && peer->task.pieces_sent >= sequence &&
           peer->task.pieces_taken < sequence;
}

bool rft_transaction_pieces_taken(const rft_server *server, uint32_t sequence)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        if (still_reads(server, server->peers.live[i], sequence)) return false;
    }
    return true;
}

void rft_transaction_evict_slow(rft_server *server, uint32_t sequence, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    snprintf(reason, sizeof reason, "it had not copied its pieces of version %" PRIu64 " in time",
             server->transaction.version);
    for (uint32_t i = 0; i < server->peers.count;) {
        rft_peer *peer = server->peers.live[i];
        if (still_reads(server, peer, sequence)) {
            rft_server_evict(server, peer, REFIT_ERR_TIMEOUT, reason);
        } else {
            i++;
        }
    }
    rft_transaction_evaluate(server, now);
}

/* ---- To the host after all */

bool rft_transaction_wants_host(const rft_server *server)
{
    if (server->transaction.state != RFT_TRANSACTION_STAGING) return false;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        if (needs_host(server, server->peers.live[i])) return true;
    }
    return false;
}

void rft_transaction_serve_host(rft_server *server, const refit_error *failure, int64_t now)
{
    server->transaction.undecided = false;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (needs_host(server, peer))
            rft_transaction_blame(server, peer, (refit_status)failure->status, failure->text);
    }
    offer_rest(server, now);
    rft_transaction_evaluate(server, now);
}

void rft_transaction_end_lending(rft_server *server, int64_t now)
{
    if (server->gpu == NULL || !rft_gpu_store_lends(server->gpu)) return;
    drop_gpu_tasks(server, "the trainer goes on");
    rft_gpu_store_end_lending(server->gpu);
    offer_rest(server, now); /* it may be on the host, too */
}

void rft_transaction_abort(rft_server *server, refit_status status, const char *reason)
{
    rft_transaction *transaction = &server->transaction;
    transaction->state = RFT_TRANSACTION_ABORTED;
    server->counts.aborted++;
    rft_log(REFIT_LOG_INFO, "version %" PRIu64 " is aborted: %s", transaction->version, reason);
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        peer->due = 0;
        if (peer->task.version == transaction->version)
            rft_server_drop_task(server, peer, status, reason);
    }
    rft_ranks_tell_abort(server, status, reason);
    if (rft_ranks_follows(server)) rft_rank_link_send_failed(server, status, reason);
}

/* No worker is waited for any more; returns how many were. */
static uint32_t dismiss_all(rft_server *server)
{
    uint32_t silent = 0;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        silent += peer->awaited;
        peer->awaited = false;
        peer->due = 0;
    }
    return silent;
}

void rft_transaction_cancel(rft_server *server, int64_t now)
{
    rft_transaction *transaction = &server->transaction;
    if (transaction->state == RFT_TRANSACTION_COMMITTING) {
        transaction->state = RFT_TRANSACTION_IDLE;
        server->counts.commit_seconds = rft_seconds(now - transaction->decided);
        (void)rft_fail(&transaction->result, REFIT_ERR_CANCELLED,
                       "version %" PRIu64 " is committed, but refit_publisher_cancel ended the "
                       "wait for %" PRIu32 " of its workers to apply it",
                       transaction->version, dismiss_all(server));
    } else {
        (void)rft_fail(&transaction->result, REFIT_ERR_CANCELLED,
                       "version %" PRIu64 " is aborted: refit_publisher_cancel ended its commit",
                       transaction->version);
        rft_transaction_abort(server, REFIT_ERR_CANCELLED, "the trainer cancelled it");
    }
}

/* How many members must stage. */
static uint32_t needed(const rft_server *server)
{
    return server->config->broadcast_commit == REFIT_COMMIT_ALL ? server->transaction.members
                                                                : server->config->broadcast_quorum;
}

static void abort_doomed(rft_server *server)
{
    char text[sizeof server->transaction.result.text];
    rft_transaction *transaction = &server->transaction;
    refit_status status = (refit_status)transaction->result.status;
    rft_text_say(text, sizeof text, "%s", transaction->result.text);
    (void)rft_fail(&transaction->result, status,
                   "version %" PRIu64 " is aborted on all ranks: %s; workers keep the one before",
                   transaction->version, text);
    rft_transaction_abort(server, status, text);
}

/* Of one publisher of several. Whether workers' answers decide now. */
static bool evaluate_ranks(rft_server *server, int64_t now)
{
    const rft_transaction *transaction = &server->transaction;
    bool concluded = server->ranks.concluded;
    if (rft_ranks_coordinates(server) && !concluded && rft_ranks_conclude(server))
        tell_seal(server);
    if (rft_ranks_follows(server) && server->ranks.link.decided == transaction->version) {
        commit_version(server, now);
    } else if (transaction->doomed) {
        abort_doomed(server);
    }
    return transaction->state == RFT_TRANSACTION_STAGING && rft_ranks_coordinates(server) &&
           server->ranks.concluded;
}

static void evaluate_staging(rft_server *server, int64_t now)
{
    if (rft_ranks_are_many(server) && !evaluate_ranks(server, now)) return;
    rft_transaction *transaction = &server->transaction;
    bool all = server->config->broadcast_commit == REFIT_COMMIT_ALL;
    uint32_t staged = members_staged(server);
    if (staged >= needed(server) && (!all || transaction->lost == 0)) {
        commit_version(server, now);
    } else if (transaction->members < needed(server) + transaction->lost) {
        char text[sizeof transaction->result.text], kept[32] = "the version that they had";
        uint64_t before = server->current.version;
        bool blamed = transaction->result.status != REFIT_OK;
        rft_text_say(text, sizeof text, "%s",
                     blamed ? transaction->result.text
                            : "fewer workers are subscribed than the quorum needs");
        if (before != 0) snprintf(kept, sizeof kept, "version %" PRIu64, before);
        (void)rft_fail(&transaction->result,
                       blamed ? (refit_status)transaction->result.status : REFIT_ERR_PEER,
                       "version %" PRIu64 " is aborted, %" PRIu32 " of %" PRIu32
                       " workers had staged it: %s; workers keep %s: refit again, with those "
                       "that are left",
                       transaction->version, staged, needed(server), text, kept);
        rft_transaction_abort(server, (refit_status)transaction->result.status, text);
    }
}

/* Whether nobody can be served the committed version any more once its lending has ended. */
static bool is_gone(const rft_server *server)
{
    return server->gpu != NULL && rft_gpu_store_lends(server->gpu) &&
           !rft_store_served_slot(server->store)->hosted;
}

static void evaluate_committing(rft_server *server, int64_t now)
{
    if (any_awaited(server)) return;
    rft_transaction *transaction = &server->transaction;
    transaction->state = RFT_TRANSACTION_IDLE;
    server->counts.commit_seconds = rft_seconds(now - transaction->decided);
    if (transaction->result.status == REFIT_OK) return;
    (void)rft_fail(&transaction->result, REFIT_ERR_PEER,
                   "version %" PRIu64 " is committed, but %" PRIu32
                   " worker%s did not apply it: %s; go on with the others: one that joins "
                   "again, or applies a later version, catches up%s",
                   transaction->version, transaction->lost, transaction->lost == 1 ? "" : "s",
                   transaction->result.text, is_gone(server) ? " with the next one" : "");
}

static void decide(rft_server *server, int64_t now)
{
    if (server->transaction.undecided) return;
    if (server->transaction.state == RFT_TRANSACTION_STAGING) evaluate_staging(server, now);
    if (server->transaction.state == RFT_TRANSACTION_COMMITTING) evaluate_committing(server, now);
}

/* An image came, which others wait for, or one is gone, and another worker has to receive it. */
static void regroup(rft_server *server, int64_t now)
{
    if (!server->regroup) return;
    server->regroup = false;
    rft_neighbors_drop_lost(&server->peers);
    offer_rest(server, now);
}

void rft_transaction_evaluate(rft_server *server, int64_t now)
{
    decide(server, now);
    regroup(server, now);
}

void rft_transaction_end_rollback(rft_server *server, int64_t now)
{
    server->transaction.state = RFT_TRANSACTION_IDLE;
    offer_all(server, now);
}
