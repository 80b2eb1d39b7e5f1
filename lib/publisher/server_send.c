/*
 * What a publisher tells its workers, message by message. A message goes into the outbox; who it is
 * for finds out later. Where there is no memory for one, the worker would wait for it in vain: it
 * is marked, and turned out by the next tick. What is large (the manifest, the seal) is the same
 * for all: it is encoded once, and only lent.
 */
#include <string.h>

#include "base/log.h"
#include "publisher/server.h"

/* A worker that a message is lost to would wait for it: it is turned out by the next tick. */
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

void rft_server_send_bye(rft_server *server, rft_peer *peer, refit_status code, const char *reason)
{
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.code = (uint32_t)code;
    message.as.bye.reason = rft_view_text(reason);
    (void)rft_send_queue_put(&server->send_queue, &peer->id, &message, &server->limits, NULL);
}

void rft_server_send_beat(rft_server *server, rft_peer *peer)
{
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.held = server->current;
    (void)rft_server_send(server, peer, &message);
}

/* Unless the notice says it already, it is written first. */
static bool send_notice(rft_server *server, rft_peer *peer, rft_cached_message *notice,
                        const rft_message *message, uint64_t version, const rft_digest128 *digest)
{
    refit_error why;
    refit_status status = REFIT_OK;
    if (!rft_cached_message_is_about(notice, version, digest)) {
        status = rft_cached_message_write(notice, message, version, digest, &server->limits,
                                          &server->retired, &why);
    }
    if (status == REFIT_OK) {
        status = rft_send_queue_put_notice(&server->send_queue, &peer->id, notice, &why);
    }
    if (status == REFIT_OK) return true;
    cannot_tell(peer, message, &why);
    return false;
}

void rft_server_send_manifest(rft_server *server, rft_peer *peer)
{
    const rft_manifest *manifest = server->store->manifest;
    if (peer->has_manifest && rft_digest128_equal(&peer->manifest, &manifest->digest)) return;
    rft_message message = {.kind = RFT_MANIFEST};
    message.as.manifest.epoch = server->epoch;
    message.as.manifest.digest = manifest->digest;
    message.as.manifest.tensors = (rft_view){manifest->encoded.data, manifest->encoded.count};
    peer->has_manifest =
        send_notice(server, peer, &server->manifest, &message, 0, &manifest->digest);
    peer->manifest = manifest->digest;
}

/* The tensors' digests, as they travel. */
static refit_status gather_sums(rft_server *server, const rft_edition *edition, refit_error *error)
{
    rft_bytes_reset(&server->scratch);
    for (uint32_t i = 0; i < server->store->manifest->originals; i++) {
        unsigned char sum[8];
        rft_put_u64(sum, edition->sums[i]);
        RFT_TRY(rft_bytes_append(&server->scratch, sum, sizeof sum, error));
    }
    return REFIT_OK;
}

static void send_sums(rft_server *server, rft_peer *peer, rft_cached_message *notice,
                      const rft_edition *edition)
{
    rft_message message = {.kind = RFT_SEAL};
    bool written = rft_cached_message_is_about(notice, edition->version, &edition->digest);
    if (!written && gather_sums(server, edition, NULL) != REFIT_OK) {
        peer->missed = true;
        return;
    }
    message.as.seal.version = edition->version;
    message.as.seal.digest = edition->digest;
    message.as.seal.tensors = rft_bytes_view(&server->scratch);
    (void)send_notice(server, peer, notice, &message, edition->version, &edition->digest);
}

void rft_server_send_seal(rft_server *server, rft_peer *peer)
{
    send_sums(server, peer, &server->seal, rft_store_served(server->store));
}

void rft_server_send_committed(rft_server *server, rft_peer *peer)
{
    const rft_store *store = server->store;
    if (store == NULL) return;
    rft_server_send_manifest(server, peer);
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
