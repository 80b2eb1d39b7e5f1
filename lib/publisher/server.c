/*
 * The workers of a publisher: what they are sent, when they are given up, and whose turn it is to
 * be sent a frame.
 *
 * A worker is turned out when it has been silent too long, misses a deadline, breaks the protocol,
 * or cannot be reached. It is told so if it can hear, and may come back with a new HELLO. A slot
 * that it may still be reading is tainted: the store gives it fresh memory before the next version
 * is written there, so bytes never change under a worker, not even under one that was stopped for
 * an hour.
 */
#include "publisher/server.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "wire/share.h"

void rft_server_init(rft_server *server, const refit_config *config, uint64_t epoch, int64_t now)
{
    *server = (rft_server){
        .config = config,
        .limits = rft_limits_from(config),
        .epoch = epoch,
        .current = {.epoch = epoch},
        .next_beat = rft_after_ms(now, config->broadcast_heartbeat_ms),
    };
}

uint32_t rft_server_close(rft_server *server, int64_t deadline)
{
    rft_peers_close(&server->peers);
    rft_send_queue_close(&server->send_queue);
    rft_bytes_close(&server->scratch);
    rft_cached_message_close(&server->manifest, &server->retired);
    rft_cached_message_close(&server->seal, &server->retired);
    rft_cached_message_close(&server->committed, &server->retired);
    return rft_retire_list_close(&server->retired, deadline);
}

/* ---- Offers */

bool rft_server_is_current(const rft_server *server, const rft_held *held)
{
    return held->version != 0 && held->version == server->current.version &&
           held->epoch == server->epoch &&
           rft_digest128_equal(&held->digest, &server->current.digest);
}

bool rft_server_is_committed(const rft_server *server, uint64_t version)
{
    return version != 0 && version == server->current.version &&
           version == server->store->committed.version;
}

/* Whether frames for it may build on the base. */
static bool holds_base(const rft_server *server, const rft_peer *peer)
{
    const rft_store *store = server->store;
    if (server->config->broadcast_delta == REFIT_DELTA_NEVER) return false;
    return store->base != 0 && peer->held.version == store->base &&
           peer->held.epoch == server->epoch &&
           rft_digest128_equal(&peer->held.digest, &store->base_digest);
}

static uint32_t offer_deadline(const rft_server *server, int64_t now)
{
    if (server->transaction.state == RFT_TRANSACTION_WRITING) return UINT32_MAX;
    if (server->transaction.state != RFT_TRANSACTION_STAGING)
        return server->config->broadcast_stage_timeout_ms;
    int64_t left = (server->transaction.deadline - now) / INT64_C(1000000);
    return left < 1 ? 1 : (uint32_t)left;
}

static void send_offer(rft_server *server, rft_peer *peer, int64_t now)
{
    const rft_store *store = server->store;
    rft_message message = {.kind = RFT_OFFER};
    message.as.offer.epoch = server->epoch;
    message.as.offer.version = peer->task.version;
    message.as.offer.base = peer->task.base;
    message.as.offer.manifest = store->manifest->digest;
    message.as.offer.bytes = store->manifest->payload_bytes;
    message.as.offer.frames = store->manifest->frame_count;
    message.as.offer.deadline_ms = offer_deadline(server, now);
    unsigned char share[RFT_SHARE_BYTES];
    if (peer->task.path == REFIT_PATH_SHM) {
        const rft_slot *slot = rft_store_served_slot(store);
        message.as.offer.segment = rft_view_text(slot->buffer->segment.name);
        message.as.offer.segment_offset = RFT_SEQLOCK_BYTES;
    }
    if (peer->task.path == REFIT_PATH_CUDA_IPC) {
        const rft_gpu_block *block = rft_gpu_store_find(server->gpu, peer->task.version);
        rft_share_write(&block->share, share);
        message.as.offer.share = (rft_view){share, sizeof share};
        message.as.offer.mark = rft_view_text(block->share_lock.segment.name);
    }
    (void)rft_server_send(server, peer, &message);
}

static bool offers_stand(const rft_server *server)
{
    rft_transaction_state state = server->transaction.state;
    return state != RFT_TRANSACTION_PREPARING && state != RFT_TRANSACTION_ABORTED;
}

static bool is_sealed(const rft_server *server)
{
    return server->transaction.state != RFT_TRANSACTION_WRITING;
}

void rft_server_offer(rft_server *server, rft_peer *peer, int64_t now)
{
    const rft_store *store = server->store;
    if (store == NULL || !offers_stand(server)) return;
    const rft_edition *edition = rft_store_served(store);
    if (edition == NULL || peer->failed_version == edition->version) return;
    if (edition->version == server->current.version && rft_server_is_current(server, &peer->held))
        return;
    refit_path path = rft_server_path(server, peer, edition->version);
    if (path == REFIT_PATH_NONE) return; /* it lay in the GPU's memory, and is gone from there */
    bool delta = !peer->shm && holds_base(server, peer);
    peer->path = path;
    peer->task = (rft_task){
        .stage = RFT_STAGE_OFFERED,
        .version = edition->version,
        .base = delta ? store->base : 0,
        .path = path,
    };
    rft_server_send_manifest(server, peer);
    send_offer(server, peer, now);
    if (is_sealed(server)) rft_server_send_seal(server, peer);
}

void rft_server_drop_task(rft_server *server, rft_peer *peer, refit_status code, const char *reason)
{
    rft_stage stage = peer->task.stage;
    if (stage == RFT_STAGE_OFFERED || stage == RFT_STAGE_STAGED) {
        rft_server_send_abort(server, peer, peer->task.version, code, reason);
        peer->task = (rft_task){0};
    }
}

void rft_server_adopt(rft_server *server, rft_store *store)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_server_drop_task(server, server->peers.live[i], REFIT_ERR_STALE,
                             "the tensors have changed");
    }
    server->store = store;
}

void rft_server_leave(rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_server_send_bye(server, server->peers.live[i], REFIT_OK, "the trainer closes");
    }
}

/* ---- Giving up on a worker */

void rft_server_reset_peer(rft_server *server, rft_peer *peer)
{
    for (uint32_t i = 0; server->store != NULL && i < server->store->slot_count; i++) {
        rft_slot *slot = &server->store->slots[i];
        if (rft_peer_reads(peer, slot->version) == REFIT_PATH_SHM) slot->tainted = true;
    }
    memset(peer->lends, 0, sizeof peer->lends);
    peer->task = (rft_task){0};
    peer->failed_version = 0;
    peer->has_manifest = false;
    peer->subscribed = false;
    /* What it had staged no longer counts: it must stage once more, in what time is left. */
    bool counts = server->transaction.state == RFT_TRANSACTION_STAGING && peer->member;
    if (counts && peer->status == REFIT_OK) peer->due = server->transaction.deadline;
}

void rft_server_note_gone(rft_server *server, const char *name, const char *reason)
{
    rft_text_say(server->gone, sizeof server->gone, "worker %s: %s", name, reason);
}

void rft_server_lose(rft_server *server, rft_peer *peer, refit_status status, const char *reason)
{
    rft_log(REFIT_LOG_INFO, "worker %s is gone: %s", peer->name, reason);
    rft_server_note_gone(server, peer->name, reason);
    rft_transaction_blame(server, peer, status, reason);
    rft_server_reset_peer(server, peer);
    rft_peers_lose(&server->peers, peer);
}

void rft_server_evict(rft_server *server, rft_peer *peer, refit_status status, const char *reason)
{
    rft_server_send_bye(server, peer, status, reason);
    server->counts.evicted++;
    rft_server_lose(server, peer, status, reason);
}

static const char *lost_reason(refit_status why)
{
    switch (why) {
    case REFIT_ERR_BUSY: return "it does not read what it is sent";
    case REFIT_ERR_HOST_MEMORY: return "there was no memory for a message to it";
    default: return "its connection is gone";
    }
}

void rft_server_unreachable(rft_server *server, const rft_peer_id *to, refit_status why,
                            int64_t now)
{
    rft_peer *peer = rft_peers_find(&server->peers, to);
    if (peer == NULL) return;
    bool told = why == REFIT_ERR_BUSY || why == REFIT_ERR_HOST_MEMORY;
    server->counts.evicted++;
    rft_server_lose(server, peer, told ? why : REFIT_ERR_PEER, lost_reason(why));
    rft_transaction_evaluate(server, now);
}

/* ---- Time */

static int64_t silence_at(const rft_server *server, const rft_peer *peer)
{
    return rft_after_ms(peer->heard, server->config->broadcast_heartbeat_timeout_ms);
}

/* Returns whether the worker was turned out. */
static bool tick_peer(rft_server *server, rft_peer *peer, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    if (peer->missed) {
        rft_server_evict(server, peer, REFIT_ERR_HOST_MEMORY,
                         "there was no memory for a message to it");
        return true;
    }
    if (now >= silence_at(server, peer)) {
        snprintf(reason, sizeof reason, "it was silent for %" PRIu32 " ms",
                 server->config->broadcast_heartbeat_timeout_ms);
        rft_server_evict(server, peer, REFIT_ERR_PEER, reason);
        return true;
    }
    if (peer->due == 0 || now < peer->due) return false;
    snprintf(reason, sizeof reason, "it had not %s version %" PRIu64 " in time",
             peer->awaited ? "applied" : "staged", server->transaction.version);
    rft_server_evict(server, peer, REFIT_ERR_TIMEOUT, reason);
    return true;
}

void rft_server_tick(rft_server *server, int64_t now)
{
    for (uint32_t i = 0; i < server->peers.count;) {
        if (!tick_peer(server, server->peers.live[i], now)) i++;
    }
    for (uint32_t i = 0; now >= server->next_beat && i < server->peers.count; i++) {
        if (server->peers.live[i]->subscribed) rft_server_send_beat(server, server->peers.live[i]);
    }
    if (now >= server->next_beat) {
        server->next_beat = rft_after_ms(now, server->config->broadcast_heartbeat_ms);
    }
    rft_transaction_evaluate(server, now);
}

int64_t rft_server_tick_at(const rft_server *server)
{
    int64_t at = server->next_beat;
    if (server->transaction.state == RFT_TRANSACTION_STAGING && server->transaction.deadline < at)
        at = server->transaction.deadline;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        if (peer->missed) return INT64_MIN;
        if (silence_at(server, peer) < at) at = silence_at(server, peer);
        if (peer->due != 0 && peer->due < at) at = peer->due;
    }
    return at;
}

/* ---- Frames */

bool rft_server_wants_frames(const rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        if (rft_peer_has_credit(peer) && peer->task.cursor < server->store->ready_count)
            return true;
    }
    return false;
}

static rft_coding coding_for(const rft_server *server, const rft_peer *peer)
{
    if (peer->task.base == 0) return RFT_CODING_WHOLE;
    if (!peer->delta) return RFT_CODING_SAME;
    bool packs = server->config->broadcast_compress != REFIT_COMPRESS_NONE && peer->zstd;
    return packs ? RFT_CODING_PACKED : RFT_CODING_SPARSE;
}

bool rft_server_next_frame(rft_server *server, rft_frame_order *out)
{
    if (server->store == NULL || !offers_stand(server)) return false;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        uint32_t at = (server->next_peer + i) % server->peers.count;
        rft_peer *peer = server->peers.live[at];
        if (!rft_peer_next_frame(peer, server->store, &out->sequence, &out->again)) continue;
        server->next_peer = (at + 1) % server->peers.count;
        server->counts.resent += out->again;
        out->to = peer->id;
        out->version = peer->task.version;
        out->coding = coding_for(server, peer);
        out->ready = server->store->ready_count;
        return true;
    }
    return false;
}

void rft_server_frame_sent(rft_server *server, const rft_frame_order *order, uint64_t payload)
{
    rft_peer *peer = rft_peers_find(&server->peers, &order->to);
    bool stands = peer != NULL && !order->again && peer->task.version == order->version;
    if (stands)
        rft_peer_refund(peer, payload, server->store->manifest->frames[order->sequence].bytes);
}
