/*
 * One version, from begin to the moment all who count have answered.
 *
 *            prepare               begin               seal
 *     IDLE ───────────► PREPARING ───────► WRITING ───────────► STAGING
 *      ▲ ▲                  │ give_up         │ abort              │
 *      │ └──────────────────┘                 ▼                    │ too few can stage it,
 *      │                  settle ┌───────── ABORTED ◄──────────────┤ or the deadline
 *      ├─────────────────────────┘                                 │
 *      │                 all have answered                         │ all, or the quorum, staged
 *      └────────────────────────────────────── COMMITTING ◄────────┘
 *
 *   IDLE        The committed version, if any, is served: who is behind is offered it.
 *   PREPARING   Nothing is served: a slot must become free. Newcomers wait.
 *   WRITING     Members have been offered the version and fetch what is ready. Newcomers are
 *               offered it as guests, who do not count.
 *   STAGING     All is written, SEAL went out; STAGED, FAILED and losses decide.
 *   COMMITTING  The version is committed. Staged members have until their due to say COMMITTED;
 *               who stages only now is told COMMIT at once.
 *               A cancel ends this, too, and nobody is awaited any more.
 *   ABORTED     Everybody was told ABORT; the store is being rolled back. Nothing is served.
 *
 * With commit: all, one member lost or failed ends STAGING at once: what cannot succeed is not
 * waited for. With a quorum, it ends when too few are left; a member that failed, joined anew and
 * staged after all is one of those left.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "broadcast/hub.h"

/* ---- Beginning */

refit_status rft_round_prepare(rft_hub *hub, uint64_t *version, refit_error *error)
{
    rft_round *round = &hub->round;
    RFT_REFUSE_IF(hub->store == NULL, error, REFIT_ERR_STATE,
                  "no tensors are declared: call refit_publisher_declare first");
    RFT_REFUSE_IF(round->state != RFT_ROUND_IDLE, error, REFIT_ERR_STATE,
                  "version %" PRIu64 " is under way: commit or abort it first", round->version);
    uint64_t number = *version == 0 ? round->last + 1 : *version;
    RFT_REFUSE_IF(number == 0, error, REFIT_ERR_STALE,
                  "no number is left above %" PRIu64 ", the last one used: open another publisher, "
                  "whose versions begin at 1",
                  round->last);
    RFT_REFUSE_IF(number <= round->last, error, REFIT_ERR_STALE,
                  "version %" PRIu64 " is not above %" PRIu64 ", the last one used", number,
                  round->last);
    *version = number;
    round->state = RFT_ROUND_PREPARING;
    round->version = number;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_hub_drop_task(hub, hub->peers.live[i], REFIT_ERR_STALE, "a newer version begins");
    }
    return REFIT_OK;
}

static uint64_t target_version(const rft_hub *hub)
{
    return hub->store->slots[rft_store_target(hub->store)].version;
}

static bool is_reader(const rft_hub *hub, const rft_peer *peer)
{
    return rft_peer_reads(peer, target_version(hub)) != REFIT_PATH_NONE;
}

bool rft_round_is_blocked(const rft_hub *hub)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        if (is_reader(hub, hub->peers.live[i])) return true;
    }
    return false;
}

void rft_round_evict_readers(rft_hub *hub, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    snprintf(reason, sizeof reason, "it did not close its update to version %" PRIu64 " in time",
             target_version(hub));
    for (uint32_t i = 0; i < hub->peers.count;) {
        rft_peer *peer = hub->peers.live[i];
        if (is_reader(hub, peer)) {
            rft_hub_evict(hub, peer, REFIT_ERR_TIMEOUT, reason);
        } else {
            i++;
        }
    }
    rft_round_evaluate(hub, now);
}

static void offer_all(rft_hub *hub, int64_t now)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        if (peer->subscribed && peer->task.stage == RFT_STAGE_NONE) rft_hub_offer(hub, peer, now);
    }
}

void rft_round_give_up(rft_hub *hub, int64_t now)
{
    hub->round.state = RFT_ROUND_IDLE;
    offer_all(hub, now);
}

void rft_round_begin(rft_hub *hub, int64_t now)
{
    rft_round *round = &hub->round;
    rft_peers_forget_lost(&hub->peers);
    hub->gone[0] = '\0';
    *round = (rft_round){
        .state = RFT_ROUND_WRITING,
        .version = round->version,
        .last = round->version,
        .began = now,
    };
    hub->counts.applied_last = 0;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        peer->member = peer->subscribed;
        peer->awaited = false;
        peer->committed = false;
        peer->status = REFIT_OK;
        peer->reason[0] = '\0';
        peer->due = 0;
        round->members += peer->member;
        if (peer->subscribed) rft_hub_offer(hub, peer, now);
    }
}

/* ---- Deciding */

static uint32_t members_staged(const rft_hub *hub)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        const rft_peer *peer = hub->peers.live[i];
        count += peer->member && peer->task.stage == RFT_STAGE_STAGED &&
                 peer->task.version == hub->round.version;
    }
    return count;
}

static bool any_awaited(const rft_hub *hub)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        if (hub->peers.live[i]->awaited) return true;
    }
    return false;
}

void rft_round_seal(rft_hub *hub, int64_t now)
{
    rft_round *round = &hub->round;
    round->state = RFT_ROUND_STAGING;
    round->deadline = rft_after_ms(now, hub->config->broadcast_stage_timeout_ms);
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        if (peer->member && peer->status == REFIT_OK) peer->due = round->deadline;
        if (peer->task.stage == RFT_STAGE_OFFERED && peer->task.version == round->version) {
            rft_hub_send_seal(hub, peer);
        }
    }
    rft_round_evaluate(hub, now);
}

/* Whether the outcome of the version hangs on the worker. */
static bool counts(const rft_hub *hub, const rft_peer *peer)
{
    rft_round_state state = hub->round.state;
    if (state == RFT_ROUND_COMMITTING) return peer->awaited;
    return peer->member && (state == RFT_ROUND_WRITING || state == RFT_ROUND_STAGING);
}

void rft_round_blame(rft_hub *hub, rft_peer *peer, refit_status status, const char *reason)
{
    rft_round *round = &hub->round;
    bool late = status == REFIT_ERR_TIMEOUT && round->state == RFT_ROUND_STAGING;
    if (peer->status == REFIT_OK) {
        if (counts(hub, peer)) {
            round->lost++;
            if (round->result.status == REFIT_OK) {
                (void)rft_fail(&round->result, late ? REFIT_ERR_TIMEOUT : REFIT_ERR_PEER,
                               "worker %s: %s (%s)", peer->name, reason, refit_status_name(status));
            }
            if (!late) round->result.status = REFIT_ERR_PEER;
        }
        peer->status = status;
        rft_text_say(peer->reason, sizeof peer->reason, "%s", reason);
    }
    peer->awaited = false;
    peer->due = 0;
}

void rft_round_forgive(rft_hub *hub, rft_peer *peer)
{
    rft_round *round = &hub->round;
    bool counted = round->state == RFT_ROUND_STAGING && peer->member && peer->status != REFIT_OK;
    if (!counted) return;
    round->lost--;
    if (round->lost == 0) round->result = (refit_error){0};
    peer->status = REFIT_OK;
    peer->reason[0] = '\0';
}

void rft_round_applied(rft_hub *hub, rft_peer *peer)
{
    if (hub->round.decided == 0) return; /* the version before, while a newer one is under way */
    if (!peer->committed) hub->counts.applied_last++;
    peer->committed = true;
    peer->awaited = false;
    peer->due = 0;
}

void rft_round_commit_peer(rft_hub *hub, rft_peer *peer)
{
    uint64_t bytes = hub->store->manifest->payload_bytes;
    refit_path path = peer->task.path;
    peer->task.stage = RFT_STAGE_COMMITTING;
    if (path != REFIT_PATH_SOCKET) rft_peer_lend(peer, peer->task.version, path);
    if (path == REFIT_PATH_SHM) hub->counts.shm_bytes += bytes;
    if (path == REFIT_PATH_CUDA_IPC) hub->counts.gpu_bytes += bytes;
    rft_hub_send_commit(hub, peer, peer->task.version);
}

static void round_commit(rft_hub *hub, int64_t now)
{
    rft_round *round = &hub->round;
    int64_t deadline = rft_after_ms(now, hub->config->broadcast_commit_timeout_ms);
    rft_store_commit(hub->store);
    if (hub->gpu != NULL) rft_gpu_store_commit(hub->gpu);
    hub->current = (rft_held){hub->epoch, round->version, hub->store->committed.digest};
    round->state = RFT_ROUND_COMMITTING;
    round->decided = now;
    round->result = (refit_error){0}; /* a quorum forgives those who were lost before */
    round->lost = 0;
    hub->counts.committed++;
    hub->counts.same_blocks = hub->store->same_blocks;
    hub->counts.stage_seconds = rft_seconds(now - round->began);
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        if (peer->due != 0) peer->due = deadline;
        bool staged = peer->task.stage == RFT_STAGE_STAGED && peer->task.version == round->version;
        if (!staged) continue;
        peer->awaited = peer->member;
        peer->due = peer->member ? deadline : 0;
        rft_round_commit_peer(hub, peer);
    }
}

void rft_round_abort(rft_hub *hub, refit_status status, const char *reason)
{
    rft_round *round = &hub->round;
    round->state = RFT_ROUND_ABORTED;
    hub->counts.aborted++;
    rft_log(REFIT_LOG_INFO, "version %" PRIu64 " is aborted: %s", round->version, reason);
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        peer->due = 0;
        if (peer->task.version == round->version) rft_hub_drop_task(hub, peer, status, reason);
    }
}

/* Nobody is waited for any more; how many were. */
static uint32_t dismiss_all(rft_hub *hub)
{
    uint32_t silent = 0;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        silent += peer->awaited;
        peer->awaited = false;
        peer->due = 0;
    }
    return silent;
}

void rft_round_cancel(rft_hub *hub, int64_t now)
{
    rft_round *round = &hub->round;
    if (round->state == RFT_ROUND_COMMITTING) {
        round->state = RFT_ROUND_IDLE;
        hub->counts.commit_seconds = rft_seconds(now - round->decided);
        (void)rft_fail(&round->result, REFIT_ERR_CANCELLED,
                       "version %" PRIu64 " is committed, but refit_publisher_cancel ended the "
                       "wait for %" PRIu32 " of its workers to apply it",
                       round->version, dismiss_all(hub));
    } else {
        (void)rft_fail(&round->result, REFIT_ERR_CANCELLED,
                       "version %" PRIu64 " is aborted: refit_publisher_cancel ended its commit",
                       round->version);
        rft_round_abort(hub, REFIT_ERR_CANCELLED, "the trainer cancelled it");
    }
}

/* How many members must stage. */
static uint32_t needed(const rft_hub *hub)
{
    return hub->config->broadcast_commit == REFIT_COMMIT_ALL ? hub->round.members
                                                             : hub->config->broadcast_quorum;
}

static void evaluate_staging(rft_hub *hub, int64_t now)
{
    rft_round *round = &hub->round;
    bool all = hub->config->broadcast_commit == REFIT_COMMIT_ALL;
    uint32_t staged = members_staged(hub);
    if (staged >= needed(hub) && (!all || round->lost == 0)) {
        round_commit(hub, now);
    } else if (round->members < needed(hub) + round->lost) {
        char text[sizeof round->result.text], kept[32] = "what they had";
        uint64_t before = hub->current.version;
        bool blamed = round->result.status != REFIT_OK;
        rft_text_say(text, sizeof text, "%s",
                     blamed ? round->result.text
                            : "fewer workers are subscribed than the quorum needs");
        if (before != 0) snprintf(kept, sizeof kept, "version %" PRIu64, before);
        (void)rft_fail(&round->result, blamed ? (refit_status)round->result.status : REFIT_ERR_PEER,
                       "version %" PRIu64 " is aborted, %" PRIu32 " of %" PRIu32
                       " workers had staged it: %s; workers keep %s: refit again, with those "
                       "that are left",
                       round->version, staged, needed(hub), text, kept);
        rft_round_abort(hub, (refit_status)round->result.status, text);
    }
}

static void evaluate_committing(rft_hub *hub, int64_t now)
{
    if (any_awaited(hub)) return;
    rft_round *round = &hub->round;
    round->state = RFT_ROUND_IDLE;
    hub->counts.commit_seconds = rft_seconds(now - round->decided);
    if (round->result.status == REFIT_OK) return;
    (void)rft_fail(&round->result, REFIT_ERR_PEER,
                   "version %" PRIu64 " is committed, but %" PRIu32
                   " worker%s did not apply it: %s; go on with the others: one that joins "
                   "again, or applies a later version, catches up",
                   round->version, round->lost, round->lost == 1 ? "" : "s", round->result.text);
}

void rft_round_evaluate(rft_hub *hub, int64_t now)
{
    if (hub->round.state == RFT_ROUND_STAGING) evaluate_staging(hub, now);
    if (hub->round.state == RFT_ROUND_COMMITTING) evaluate_committing(hub, now);
}

void rft_round_settle(rft_hub *hub, int64_t now)
{
    hub->round.state = RFT_ROUND_IDLE;
    offer_all(hub, now);
}
