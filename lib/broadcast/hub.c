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
#include "broadcast/hub.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "wire/share.h"

void rft_hub_init(rft_hub *hub, const refit_config *config, uint64_t epoch, int64_t now)
{
    *hub = (rft_hub){
        .config = config,
        .limits = rft_limits_from(config),
        .epoch = epoch,
        .current = {.epoch = epoch},
        .next_beat = rft_after_ms(now, config->broadcast_heartbeat_ms),
    };
}

uint32_t rft_hub_close(rft_hub *hub, int64_t deadline)
{
    rft_peers_close(&hub->peers);
    rft_outbox_close(&hub->outbox);
    rft_bytes_close(&hub->scratch);
    rft_notice_close(&hub->manifest, &hub->attic);
    rft_notice_close(&hub->seal, &hub->attic);
    rft_notice_close(&hub->committed, &hub->attic);
    return rft_attic_close(&hub->attic, deadline);
}

/* ---- Offers */

bool rft_hub_is_current(const rft_hub *hub, const rft_held *held)
{
    return held->version != 0 && held->version == hub->current.version &&
           held->epoch == hub->epoch && rft_digest128_equal(&held->digest, &hub->current.digest);
}

bool rft_hub_is_committed(const rft_hub *hub, uint64_t version)
{
    return version != 0 && version == hub->current.version &&
           version == hub->store->committed.version;
}

/* Whether frames for it may build on the base. */
static bool holds_base(const rft_hub *hub, const rft_peer *peer)
{
    const rft_store *store = hub->store;
    if (hub->config->broadcast_delta == REFIT_DELTA_NEVER) return false;
    return store->base != 0 && peer->held.version == store->base &&
           peer->held.epoch == hub->epoch &&
           rft_digest128_equal(&peer->held.digest, &store->base_digest);
}

static uint32_t offer_deadline(const rft_hub *hub, int64_t now)
{
    if (hub->round.state == RFT_ROUND_WRITING) return UINT32_MAX;
    if (hub->round.state != RFT_ROUND_STAGING) return hub->config->broadcast_stage_timeout_ms;
    int64_t left = (hub->round.deadline - now) / INT64_C(1000000);
    return left < 1 ? 1 : (uint32_t)left;
}

static void send_offer(rft_hub *hub, rft_peer *peer, int64_t now)
{
    const rft_store *store = hub->store;
    rft_message message = {.kind = RFT_OFFER};
    message.as.offer.epoch = hub->epoch;
    message.as.offer.version = peer->task.version;
    message.as.offer.base = peer->task.base;
    message.as.offer.manifest = store->manifest->digest;
    message.as.offer.bytes = store->manifest->payload_bytes;
    message.as.offer.frames = store->manifest->frame_count;
    message.as.offer.deadline_ms = offer_deadline(hub, now);
    unsigned char share[RFT_SHARE_BYTES];
    if (peer->task.path == REFIT_PATH_SHM) {
        const rft_slot *slot = rft_store_served_slot(store);
        message.as.offer.segment = rft_view_text(slot->loan->segment.name);
        message.as.offer.segment_offset = RFT_MARK_BYTES;
    }
    if (peer->task.path == REFIT_PATH_CUDA_IPC) {
        const rft_gpu_block *block = rft_gpu_store_find(hub->gpu, peer->task.version);
        rft_share_write(&block->share, share);
        message.as.offer.share = (rft_view){share, sizeof share};
        message.as.offer.mark = rft_view_text(block->leash.segment.name);
    }
    (void)rft_hub_send(hub, peer, &message);
}

static bool offers_stand(const rft_hub *hub)
{
    rft_round_state state = hub->round.state;
    return state != RFT_ROUND_PREPARING && state != RFT_ROUND_ABORTED;
}

static bool is_sealed(const rft_hub *hub)
{
    return hub->round.state != RFT_ROUND_WRITING;
}

void rft_hub_offer(rft_hub *hub, rft_peer *peer, int64_t now)
{
    const rft_store *store = hub->store;
    if (store == NULL || !offers_stand(hub)) return;
    const rft_edition *edition = rft_store_served(store);
    if (edition == NULL || peer->failed_version == edition->version) return;
    if (edition->version == hub->current.version && rft_hub_is_current(hub, &peer->held)) return;
    refit_path path = rft_hub_path(hub, peer, edition->version);
    if (path == REFIT_PATH_NONE) return; /* it lay in the GPU's memory, and is gone from there */
    bool delta = !peer->shm && holds_base(hub, peer);
    peer->path = path;
    peer->task = (rft_task){
        .stage = RFT_STAGE_OFFERED,
        .version = edition->version,
        .base = delta ? store->base : 0,
        .path = path,
    };
    rft_hub_send_manifest(hub, peer);
    send_offer(hub, peer, now);
    if (is_sealed(hub)) rft_hub_send_seal(hub, peer);
}

void rft_hub_drop_task(rft_hub *hub, rft_peer *peer, refit_status code, const char *reason)
{
    rft_stage stage = peer->task.stage;
    if (stage == RFT_STAGE_OFFERED || stage == RFT_STAGE_STAGED) {
        rft_hub_send_abort(hub, peer, peer->task.version, code, reason);
        peer->task = (rft_task){0};
    }
}

void rft_hub_adopt(rft_hub *hub, rft_store *store)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_hub_drop_task(hub, hub->peers.live[i], REFIT_ERR_STALE, "the tensors have changed");
    }
    hub->store = store;
}

void rft_hub_leave(rft_hub *hub)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_hub_send_bye(hub, hub->peers.live[i], REFIT_OK, "the trainer closes");
    }
}

/* ---- Giving up on a worker */

void rft_hub_reset_peer(rft_hub *hub, rft_peer *peer)
{
    for (uint32_t i = 0; hub->store != NULL && i < hub->store->slot_count; i++) {
        rft_slot *slot = &hub->store->slots[i];
        if (rft_peer_reads(peer, slot->version) == REFIT_PATH_SHM) slot->tainted = true;
    }
    memset(peer->lends, 0, sizeof peer->lends);
    peer->task = (rft_task){0};
    peer->failed_version = 0;
    peer->has_manifest = false;
    peer->subscribed = false;
    /* What it had staged no longer counts: it must stage once more, in what time is left. */
    bool counts = hub->round.state == RFT_ROUND_STAGING && peer->member;
    if (counts && peer->status == REFIT_OK) peer->due = hub->round.deadline;
}

void rft_hub_note_gone(rft_hub *hub, const char *name, const char *reason)
{
    rft_text_say(hub->gone, sizeof hub->gone, "worker %s: %s", name, reason);
}

void rft_hub_lose(rft_hub *hub, rft_peer *peer, refit_status status, const char *reason)
{
    rft_log(REFIT_LOG_INFO, "worker %s is gone: %s", peer->name, reason);
    rft_hub_note_gone(hub, peer->name, reason);
    rft_round_blame(hub, peer, status, reason);
    rft_hub_reset_peer(hub, peer);
    rft_peers_lose(&hub->peers, peer);
}

void rft_hub_evict(rft_hub *hub, rft_peer *peer, refit_status status, const char *reason)
{
    rft_hub_send_bye(hub, peer, status, reason);
    hub->counts.evicted++;
    rft_hub_lose(hub, peer, status, reason);
}

static const char *lost_reason(refit_status why)
{
    switch (why) {
    case REFIT_ERR_BUSY: return "it does not read what it is sent";
    case REFIT_ERR_HOST_MEMORY: return "there was no memory for a message to it";
    default: return "its connection is gone";
    }
}

void rft_hub_unreachable(rft_hub *hub, const rft_peer_id *to, refit_status why, int64_t now)
{
    rft_peer *peer = rft_peers_find(&hub->peers, to);
    if (peer == NULL) return;
    bool told = why == REFIT_ERR_BUSY || why == REFIT_ERR_HOST_MEMORY;
    hub->counts.evicted++;
    rft_hub_lose(hub, peer, told ? why : REFIT_ERR_PEER, lost_reason(why));
    rft_round_evaluate(hub, now);
}

/* ---- Time */

static int64_t silence_at(const rft_hub *hub, const rft_peer *peer)
{
    return rft_after_ms(peer->heard, hub->config->broadcast_heartbeat_timeout_ms);
}

/* Returns whether the worker was turned out. */
static bool tick_peer(rft_hub *hub, rft_peer *peer, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    if (peer->missed) {
        rft_hub_evict(hub, peer, REFIT_ERR_HOST_MEMORY, "there was no memory for a message to it");
        return true;
    }
    if (now >= silence_at(hub, peer)) {
        snprintf(reason, sizeof reason, "it was silent for %" PRIu32 " ms",
                 hub->config->broadcast_heartbeat_timeout_ms);
        rft_hub_evict(hub, peer, REFIT_ERR_PEER, reason);
        return true;
    }
    if (peer->due == 0 || now < peer->due) return false;
    snprintf(reason, sizeof reason, "it had not %s version %" PRIu64 " in time",
             peer->awaited ? "applied" : "staged", hub->round.version);
    rft_hub_evict(hub, peer, REFIT_ERR_TIMEOUT, reason);
    return true;
}

void rft_hub_tick(rft_hub *hub, int64_t now)
{
    for (uint32_t i = 0; i < hub->peers.count;) {
        if (!tick_peer(hub, hub->peers.live[i], now)) i++;
    }
    for (uint32_t i = 0; now >= hub->next_beat && i < hub->peers.count; i++) {
        if (hub->peers.live[i]->subscribed) rft_hub_send_beat(hub, hub->peers.live[i]);
    }
    if (now >= hub->next_beat) {
        hub->next_beat = rft_after_ms(now, hub->config->broadcast_heartbeat_ms);
    }
    rft_round_evaluate(hub, now);
}

int64_t rft_hub_tick_at(const rft_hub *hub)
{
    int64_t at = hub->next_beat;
    if (hub->round.state == RFT_ROUND_STAGING && hub->round.deadline < at) at = hub->round.deadline;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        const rft_peer *peer = hub->peers.live[i];
        if (peer->missed) return INT64_MIN;
        if (silence_at(hub, peer) < at) at = silence_at(hub, peer);
        if (peer->due != 0 && peer->due < at) at = peer->due;
    }
    return at;
}

/* ---- Frames */

bool rft_hub_wants_frames(const rft_hub *hub)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        const rft_peer *peer = hub->peers.live[i];
        if (rft_peer_has_credit(peer) && peer->task.cursor < hub->store->ready_count) return true;
    }
    return false;
}

static rft_coding coding_for(const rft_hub *hub, const rft_peer *peer)
{
    if (peer->task.base == 0) return RFT_CODING_WHOLE;
    if (!peer->delta) return RFT_CODING_SAME;
    bool packs = hub->config->broadcast_compress != REFIT_COMPRESS_NONE && peer->zstd;
    return packs ? RFT_CODING_PACKED : RFT_CODING_SPARSE;
}

bool rft_hub_next_frame(rft_hub *hub, rft_frame_order *out)
{
    if (hub->store == NULL || !offers_stand(hub)) return false;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        uint32_t at = (hub->next_peer + i) % hub->peers.count;
        rft_peer *peer = hub->peers.live[at];
        if (!rft_peer_next_frame(peer, hub->store, &out->sequence, &out->again)) continue;
        hub->next_peer = (at + 1) % hub->peers.count;
        hub->counts.resent += out->again;
        out->to = peer->id;
        out->version = peer->task.version;
        out->coding = coding_for(hub, peer);
        out->ready = hub->store->ready_count;
        return true;
    }
    return false;
}

void rft_hub_frame_sent(rft_hub *hub, const rft_frame_order *order, uint64_t payload)
{
    rft_peer *peer = rft_peers_find(&hub->peers, &order->to);
    bool stands = peer != NULL && !order->again && peer->task.version == order->version;
    if (stands) rft_peer_refund(peer, payload, hub->store->manifest->frames[order->sequence].bytes);
}
