/*
 * Everything that a publisher sends to its workers: offers of versions and other messages.
 *
 * A message goes into the send queue; its receiver is looked up when it is sent. If there is no
 * memory for a message, the worker would wait for it in vain: it is marked, and the next tick
 * evicts it. Large messages (the manifest, the seal) are the same for all workers: each is encoded
 * once and lent to the transport.
 *
 * This file changes no transaction and evicts no worker: server.c and transaction.c call it.
 */
#include <inttypes.h>
#include <string.h>

#include "base/log.h"
#include "publisher/server.h"

/* ---- Messages */

/* A worker that a message is lost to would wait for it: the next tick evicts it. */
static void cannot_tell(rft_peer *peer, const rft_message *message, const refit_error *why)
{
    rft_log(REFIT_LOG_ERROR, "worker %s cannot be told %s: %s", peer->name,
            rft_message_kind_name(message->kind), why->text);
    peer->missed = true;
}

bool rft_server_send(rft_server *server, rft_peer *peer, const rft_message *message)
{
    refit_error why;
    if (rft_send_queue_put(&server->send_queue, &peer->id, message, &server->limits, &why) ==
        REFIT_OK) {
        return true;
    }
    cannot_tell(peer, message, &why);
    return false;
}

void rft_server_refuse(rft_server *server, const rft_peer_id *to, refit_status code, bool final,
                       const char *reason)
{
    rft_message message = {.kind = RFT_REFUSE};
    message.as.refuse.code = (uint32_t)code;
    message.as.refuse.final = final;
    message.as.refuse.reason = rft_view_text(reason);
    (void)rft_send_queue_put(&server->send_queue, to, &message, &server->limits, NULL);
}

static void send_bye(rft_server *server, rft_peer *peer, refit_status code, const char *reason,
                     bool final)
{
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.code = (uint32_t)code;
    message.as.bye.reason = rft_view_text(reason);
    message.as.bye.final = final;
    (void)rft_send_queue_put(&server->send_queue, &peer->id, &message, &server->limits, NULL);
}

void rft_server_send_bye(rft_server *server, rft_peer *peer, refit_status code, const char *reason)
{
    send_bye(server, peer, code, reason, false);
}

void rft_server_send_end(rft_server *server, rft_peer *peer)
{
    send_bye(server, peer, REFIT_ERR_CLOSED, "the training has ended", true);
}

void rft_server_send_beat(rft_server *server, rft_peer *peer)
{
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.held = server->current;
    (void)rft_server_send(server, peer, &message);
}

/* Writes the cached message first, unless it says the same already. */
static bool send_cached(rft_server *server, rft_peer *peer, rft_cached_message *cached,
                        const rft_message *message, uint64_t version, const rft_digest128 *digest)
{
    refit_error why;
    refit_status status = REFIT_OK;
    if (!rft_cached_message_is_about(cached, version, digest)) {
        status = rft_cached_message_write(cached, message, version, digest, &server->limits,
                                          &server->retired, &why);
    }
    if (status == REFIT_OK) {
        status = rft_send_queue_put_shared(&server->send_queue, &peer->id,
                                           rft_bytes_view(&cached->buffer->gathered),
                                           &cached->buffer->pending, &why);
    }
    if (status == REFIT_OK) return true;
    cannot_tell(peer, message, &why);
    return false;
}

/* Unless it was sent this one already. */
static void send_manifest(rft_server *server, rft_peer *peer, int64_t now)
{
    const rft_manifest *manifest = server->store->manifest;
    if (peer->has_manifest && rft_digest128_equal(&peer->manifest, &manifest->digest)) return;
    rft_message message = {.kind = RFT_MANIFEST};
    message.as.manifest.epoch = server->epoch;
    message.as.manifest.digest = manifest->digest;
    message.as.manifest.tensors = (rft_view){manifest->encoded.data, manifest->encoded.count};
    peer->has_manifest =
        send_cached(server, peer, &server->manifest, &message, 0, &manifest->digest);
    peer->manifest = manifest->digest;
    peer->manifest_at = now;
    peer->shards_edition = 0; /* shards are of the manifest that was sent last */
}

/* The tensors' digests, as they travel. */
static refit_status gather_sums(rft_server *server, const rft_version_digests *digests,
                                refit_error *error)
{
    rft_bytes_reset(&server->scratch);
    for (uint32_t i = 0; i < server->store->manifest->originals; i++) {
        unsigned char sum[8];
        rft_put_u64(sum, digests->tensor_sums[i]);
        RFT_TRY(rft_bytes_append(&server->scratch, sum, sizeof sum, error));
    }
    return REFIT_OK;
}

static void send_sums(rft_server *server, rft_peer *peer, rft_cached_message *cached,
                      const rft_version_digests *digests)
{
    rft_message message = {.kind = RFT_SEAL};
    bool written = rft_cached_message_is_about(cached, digests->version, &digests->digest);
    if (!written && gather_sums(server, digests, NULL) != REFIT_OK) {
        peer->missed = true;
        return;
    }
    message.as.seal.version = digests->version;
    message.as.seal.digest = digests->digest;
    message.as.seal.tensors = rft_bytes_view(&server->scratch);
    (void)send_cached(server, peer, cached, &message, digests->version, &digests->digest);
}

/* Where the version lies in the GPU's memory. */
static void send_lend(rft_server *server, rft_peer *peer, const rft_version_digests *digests)
{
    rft_message message = {.kind = RFT_LEND};
    const rft_gpu_block *block = rft_gpu_store_find(server->gpu, digests->version);
    uint32_t shares = 0;
    rft_bytes_reset(&server->scratch);
    if (rft_gpu_store_describe(server->gpu, digests->version, &server->scratch, &shares, NULL) !=
        REFIT_OK) {
        peer->missed = true;
        return;
    }
    rft_view all = rft_bytes_view(&server->scratch);
    size_t areas_bytes = (size_t)shares * RFT_SHARE_BYTES;
    message.as.lend.version = digests->version;
    message.as.lend.lock = rft_view_text(block->share_lock.segment.name);
    message.as.lend.areas = (rft_view){all.data, areas_bytes};
    message.as.lend.places =
        (rft_view){(const unsigned char *)all.data + areas_bytes, all.count - areas_bytes};
    (void)rft_server_send(server, peer, &message);
}

/* Whether the worker maps a neighbor's image that is not whole: it is sent SEAL once it is. */
static bool maps_partial(const rft_server *server, const rft_peer *peer)
{
    if (peer->task.path != REFIT_PATH_NEIGHBOR) return false;
    const rft_shared_image *image = rft_neighbors_mapped(&server->peers, peer);
    return image == NULL || !image->whole;
}

void rft_server_send_seal(rft_server *server, rft_peer *peer)
{
    if (maps_partial(server, peer)) return;
    peer->task.sealed = true;
    if (peer->task.path == REFIT_PATH_CUDA_IPC && peer->task.pieces_sent == 0)
        send_lend(server, peer, rft_store_served(server->store));
    send_sums(server, peer, &server->seal, rft_store_served(server->store));
}

void rft_server_send_committed(rft_server *server, rft_peer *peer, int64_t now)
{
    const rft_store *store = server->store;
    if (store == NULL) return;
    send_manifest(server, peer, now);
    uint64_t version = server->current.version;
    if (version != 0 && store->committed.version == version) {
        send_sums(server, peer, &server->committed, &store->committed);
    }
}

void rft_server_send_commit(rft_server *server, rft_peer *peer, uint64_t version)
{
    rft_message message = {.kind = RFT_COMMIT};
    message.as.commit.version = version;
    (void)rft_server_send(server, peer, &message);
}

void rft_server_send_abort(rft_server *server, rft_peer *peer, uint64_t version, refit_status code,
                           const char *reason)
{
    rft_message message = {.kind = RFT_ABORT};
    message.as.failed.version = version;
    message.as.failed.code = (uint32_t)code;
    message.as.failed.kept = true;
    message.as.failed.reason = rft_view_text(reason);
    (void)rft_server_send(server, peer, &message);
}

/* ---- Offers */

refit_path rft_server_path(const rft_server *server, const rft_peer *peer, uint64_t version)
{
    const rft_store *store = server->store;
    bool on_gpu = rft_gpu_store_find(server->gpu, version) != NULL &&
                  !rft_gpu_store_is_streamed(server->gpu, version);
    if (peer->gpu && on_gpu) return REFIT_PATH_CUDA_IPC;
    if (version != 0 && !rft_store_served_slot(store)->hosted) return REFIT_PATH_NONE;
    return peer->shm && (store == NULL || store->shared) ? REFIT_PATH_SHM : REFIT_PATH_SOCKET;
}

bool rft_server_is_current(const rft_server *server, const rft_version_id *held)
{
    return held->version != 0 && held->version == server->current.version &&
           held->epoch == server->epoch &&
           rft_digest128_equal(&held->digest, &server->current.digest);
}

/* Whether frames for it may build on the base. */
static bool holds_base(const rft_server *server, const rft_peer *peer)
{
    const rft_store *store = server->store;
    if (server->config->broadcast_delta == REFIT_DELTA_NEVER) return false;
    return store->base != 0 && peer->held.version == store->base &&
           peer->held.epoch == server->epoch &&
           rft_digest128_equal(&peer->held.digest, &store->base_digest) &&
           rft_want_equal(peer->base, peer->sent);
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
    message.as.offer.ranks = server->ranks.count;
    message.as.offer.deadline_ms = offer_deadline(server, now);
    message.as.offer.lent = peer->task.path == REFIT_PATH_CUDA_IPC;
    message.as.offer.share = peer->task.share;
    message.as.offer.neighbor = peer->task.path == REFIT_PATH_NEIGHBOR;
    message.as.offer.segment = rft_view_text(peer->task.segment);
    bool framed = peer->task.path == REFIT_PATH_SOCKET || peer->task.path == REFIT_PATH_NEIGHBOR;
    if (framed && !rft_want_equal(peer->sent, peer->want)) {
        message.as.offer.whole = peer->sent == NULL;
        if (peer->sent != NULL) message.as.offer.want = rft_bytes_view(&peer->sent->encoded);
    }
    if (peer->task.path == REFIT_PATH_SHM) {
        const rft_slot *slot = rft_store_served_slot(store);
        message.as.offer.segment = rft_view_text(slot->buffer->segment.name);
        message.as.offer.segment_offset = RFT_SEQLOCK_BYTES;
    }
    (void)rft_server_send(server, peer, &message);
}

bool rft_server_offers_stand(const rft_server *server)
{
    rft_transaction_state state = server->transaction.state;
    return state != RFT_TRANSACTION_PREPARING && state != RFT_TRANSACTION_ABORTED;
}

static bool is_sealed(const rft_server *server)
{
    rft_transaction_state state = server->transaction.state;
    bool waits = rft_ranks_are_many(server) && !server->ranks.concluded; /* for other ranks */
    return state != RFT_TRANSACTION_WRITING && !(state == RFT_TRANSACTION_STAGING && waits);
}

/* Finds the worker's role in the version, the receiver whose image it maps, and what it is sent of
 * the version (peer->sent); false if it cannot be offered the version yet. */
static bool find_role(rft_server *server, rft_peer *peer, uint64_t version, int64_t now,
                      rft_neighbor_role *role, const rft_peer **receiver)
{
    int64_t since = now - (int64_t)server->config->broadcast_heartbeat_timeout_ms * 1000000;
    rft_want *sent = NULL;
    refit_error why;
    if (peer->selects && peer->want == NULL) return false; /* WANT is on its way */
    if (server->store->manifest->frame_count > 0)
        *role = rft_neighbors_role(&server->peers, peer, version, since, receiver);
    if (*role == RFT_NEIGHBOR_WAITS) return false;
    refit_status status = REFIT_OK;
    if (*role == RFT_NEIGHBOR_RECEIVES) {
        status = rft_neighbors_want(&server->peers, peer, version, &sent, &why);
    } else {
        sent = rft_want_acquire(*role == RFT_NEIGHBOR_MAPS ? (*receiver)->image.want : peer->want);
    }
    if (status != REFIT_OK) {
        rft_log(REFIT_LOG_WARNING, "worker %s is not sent what others of its host want: %s",
                peer->name, why.text);
        *role = RFT_NEIGHBOR_NONE;
        sent = rft_want_acquire(peer->want);
    }
    rft_peer_set_want(&peer->sent, sent);
    return true;
}

void rft_server_offer(rft_server *server, rft_peer *peer, int64_t now)
{
    const rft_store *store = server->store;
    if (store == NULL || !rft_server_offers_stand(server)) return;
    const rft_version_digests *digests = rft_store_served(store);
    if (digests == NULL || peer->failed_version == digests->version) return;
    if (peer->later && peer->retried == digests->version) return;
    if (digests->version == server->current.version && rft_server_is_current(server, &peer->held))
        return;
    refit_path path = rft_server_path(server, peer, digests->version);
    if (path == REFIT_PATH_NONE) {
        rft_log(REFIT_LOG_INFO,
                "worker %s waits for the next version: version %" PRIu64
                " lies in the memory of a GPU alone, or is gone from there",
                peer->name, digests->version);
        return;
    }
    const rft_peer *receiver = NULL;
    rft_neighbor_role role = RFT_NEIGHBOR_NONE;
    if (path == REFIT_PATH_SOCKET) {
        send_manifest(server, peer, now);
        if (!rft_ranks_introduce(server, peer, digests->version)) return;
        if (!find_role(server, peer, digests->version, now, &role, &receiver)) {
            peer->task = (rft_task){0}; /* of an older version, about which it may still decide */
            return;
        }
    }
    if (role == RFT_NEIGHBOR_MAPS) path = REFIT_PATH_NEIGHBOR;
    bool delta = path == REFIT_PATH_SOCKET && !peer->shm && holds_base(server, peer);
    peer->path = path;
    peer->task = (rft_task){
        .stage = RFT_STAGE_OFFERED,
        .version = digests->version,
        .base = delta ? store->base : 0,
        .path = path,
        .share = role == RFT_NEIGHBOR_RECEIVES,
        .asked = now,
    };
    if (receiver != NULL) strcpy(peer->task.segment, receiver->image.segment);
    rft_bytes_reset(&peer->have);
    send_manifest(server, peer, now);
    send_offer(server, peer, now);
    if (is_sealed(server)) rft_server_send_seal(server, peer);
}

void rft_server_drop_task(rft_server *server, rft_peer *peer, refit_status code, const char *reason)
{
    rft_stage stage = peer->task.stage;
    if (stage == RFT_STAGE_OFFERED || stage == RFT_STAGE_STAGED) {
        rft_server_send_abort(server, peer, peer->task.version, code, reason);
        if (peer->image.version == peer->task.version)
            (void)rft_neighbors_withdraw(peer); /* the others drop the version, too */
        peer->task = (rft_task){0};
    }
}
