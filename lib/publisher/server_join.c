/*
 * How workers come and go: HELLO, JOIN, BYE.
 *
 *     (unknown) ──HELLO──► greeted ──JOIN──► subscribed ──BYE, eviction──► (unknown)
 *                             ▲                  │
 *                             └──────HELLO───────┘
 *
 * Who is on the publisher's GPU says so with HELLO, by its UUID, and joins there if it can open the
 * probe as well. With broadcast.gpu: require nobody else is taken: for now only, since a worker may
 * be told its device a moment after it began to look for the trainer; for good if it is on another
 * GPU.
 *
 * A name stands for one instance at a time, and with keys for one key. The same instance with a new
 * connection (and the same key) gets its place back, and stays a member of the version under way;
 * another one waits until the place is free.
 */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "device/device_uuid.h"
#include "publisher/server.h"

static uint32_t window_for(const rft_server *server, uint32_t asked)
{
    uint32_t most = server->config->broadcast_window;
    return asked < most ? asked : most;
}

static void send_welcome(rft_server *server, rft_peer *peer)
{
    rft_message message = {.kind = RFT_WELCOME};
    message.as.welcome.protocol = RFT_PROTOCOL;
    message.as.welcome.epoch = server->epoch;
    message.as.welcome.frame_bytes = server->config->broadcast_frame_bytes;
    message.as.welcome.window = peer->window;
    message.as.welcome.heartbeat_ms = server->config->broadcast_heartbeat_ms;
    message.as.welcome.heartbeat_timeout_ms = server->config->broadcast_heartbeat_timeout_ms;
    message.as.welcome.version = server->current.version;
    message.as.welcome.probe = rft_view_text(server->probe);
    if (server->gpu != NULL) {
        message.as.welcome.gpu = (rft_view){server->gpu->uuid, sizeof server->gpu->uuid};
    }
    (void)rft_server_send(server, peer, &message);
}

/* Who says HELLO. */
typedef struct caller {
    rft_peer_id id;
    uint64_t instance;
    char own_name[RFT_PEER_NAME_BYTES];
    char key_name[RFT_KEY_NAME_BYTES];
    char name[RFT_PEER_NAME_BYTES]; /* by which it is known, if it is let in */
} caller;

/* False: its key is no longer in the allow list. */
static bool identify(const rft_server *server, const rft_peer_id *from, const rft_message *hello,
                     caller *out)
{
    *out = (caller){.id = *from, .instance = hello->as.hello.instance};
    rft_view_print(hello->as.hello.worker, out->own_name, sizeof out->own_name);
    bool admitted = rft_server_admits(server, from, out->key_name);
    rft_peer_name_bind(out->key_name, out->own_name, out->name);
    return admitted;
}

/* Says no to a HELLO, and remembers it for who waits for workers. */
static void refuse_hello(rft_server *server, const caller *from, refit_status code, bool final,
                         const char *reason)
{
    rft_server_note_gone(server, from->name, reason);
    rft_server_refuse(server, &from->id, code, final, reason);
}

static rft_peer *admit_new(rft_server *server, const caller *from)
{
    refit_error why;
    rft_peer *peer = NULL;
    if (server->peers.count >= server->config->limits_workers) {
        refuse_hello(server, from, REFIT_ERR_LIMIT, false,
                     "the trainer has as many workers as limits.workers allows");
        return NULL;
    }
    if (rft_peers_add(&server->peers, &peer, &why) != REFIT_OK) {
        refuse_hello(server, from, REFIT_ERR_HOST_MEMORY, false, why.text);
        return NULL;
    }
    strcpy(peer->name, from->name);
    peer->instance = from->instance;
    return peer;
}

/* A key with a name so long that rft_peer_name_bind has no room for the worker's own behind it. */
static bool is_full(const char *key_name)
{
    return strlen(key_name) + 2 > RFT_PEER_NAME_BYTES - 1;
}

/* Gives the place that the sender has, gets back, or is given now; NULL: it was refused. */
static rft_peer *admit(rft_server *server, const caller *from)
{
    rft_peer *peer = rft_peers_find_name(&server->peers, from->name);
    if (peer == NULL) return admit_new(server, from);
    bool same = peer->instance == from->instance && strcmp(peer->id.key, from->id.key) == 0;
    if (same) {
        rft_server_reset_peer(server, peer);
        return peer;
    }
    rft_server_send_beat(server, peer); /* finds out whether the other can still be reached */
    refuse_hello(server, from, REFIT_ERR_EXISTS, false,
                 is_full(from->key_name)
                     ? "another worker uses this key: give this one a key of its own, or the key a "
                       "name of at most 61 characters, so that names fit behind it"
                     : "another worker goes by this name: give this one a name of its own, or wait "
                       "until that one is gone");
    return NULL;
}

/* With broadcast.gpu: require. Whether the worker may come in; if not it is told why. */
static bool admits_gpu(rft_server *server, const caller *from, const rft_message *hello)
{
    rft_view theirs = hello->as.hello.gpu;
    char ours[RFT_UUID_TEXT_BYTES], reason[RFT_SENTENCE_BYTES];
    if (server->config->broadcast_gpu != REFIT_GPU_REQUIRE) return true;
    if (server->gpu == NULL) {
        refuse_hello(server, from, REFIT_ERR_UNSUPPORTED, false,
                     "the trainer takes workers on its own GPU only, and has not said which");
        return false;
    }
    bool named = theirs.count == RFT_UUID_BYTES;
    if (named && rft_uuid_equal(theirs.data, server->gpu->uuid)) return true;
    rft_uuid_print(server->gpu->uuid, ours);
    snprintf(reason, sizeof reason,
             named ? "the trainer takes workers on %s only, and this one is on another GPU"
                   : "the trainer takes workers on %s only (refit_subscriber_use_device)",
             ours);
    server->counts.refused += named;
    refuse_hello(server, from, REFIT_ERR_UNSUPPORTED, named, reason);
    return false;
}

static void note_gpu(rft_peer *peer, const rft_message *hello)
{
    rft_view uuid = hello->as.hello.gpu;
    peer->named_gpu = uuid.count == sizeof peer->uuid;
    if (peer->named_gpu) memcpy(peer->uuid, uuid.data, sizeof peer->uuid);
}

/* Whether the worker has said that it is on this publisher's GPU. */
static bool on_gpu(const rft_server *server, const rft_peer *peer)
{
    return server->gpu != NULL && peer->named_gpu && rft_uuid_equal(peer->uuid, server->gpu->uuid);
}

void rft_server_use_gpu(rft_server *server, rft_gpu_store *gpu)
{
    server->gpu = gpu;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        if (!on_gpu(server, peer)) continue;
        rft_server_refuse(server, &peer->id, REFIT_ERR_STALE, false,
                          "the trainer has said which GPU it is on: join once more");
    }
}

void rft_server_recall_gpu(rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (peer->subscribed && peer->gpu) rft_server_send_beat(server, peer);
    }
}

/* Who only looks is told what is there, and no version waits for it. Who asks again at once is not
 * answered: its HELLO is short, and the manifest may be long. */
static void answer_observer(rft_server *server, const rft_peer_id *from, const rft_message *hello,
                            int64_t now)
{
    if (!rft_query_limit_admit(&server->query_limit, from, now)) return;
    rft_peer visitor = {.id = *from, .window = window_for(server, hello->as.hello.window)};
    send_welcome(server, &visitor);
    rft_server_send_committed(server, &visitor);
    rft_server_send_bye(server, &visitor, REFIT_OK, "that is all");
}

void rft_server_answer_hello(rft_server *server, const rft_peer_id *from, rft_peer *known,
                             const rft_message *hello, int64_t now)
{
    caller who;
    if (!identify(server, from, hello, &who)) {
        rft_server_turn_away(server, known, now);
        return;
    }
    if (hello->as.hello.protocol != RFT_PROTOCOL) {
        char reason[RFT_SENTENCE_BYTES];
        server->counts.refused++;
        rft_message_say_protocols(RFT_PROTOCOL, hello->as.hello.protocol, reason);
        refuse_hello(server, &who, REFIT_ERR_PROTOCOL, true, reason);
        return;
    }
    if (hello->as.hello.observer && known == NULL) {
        answer_observer(server, from, hello, now);
        return;
    }
    if (!admits_gpu(server, &who, hello)) {
        if (known != NULL) rft_server_lose(server, known, REFIT_ERR_UNSUPPORTED, "it left the GPU");
        return;
    }
    bool renamed = known != NULL && known != rft_peers_find_name(&server->peers, who.name);
    if (renamed)
        rft_server_lose(server, known, REFIT_ERR_CLOSED, "its connection speaks for another");
    rft_peer *peer = admit(server, &who);
    if (peer == NULL) return;
    peer->id = *from;
    strcpy(peer->own_name, who.own_name);
    strcpy(peer->key_name, who.key_name);
    peer->heard = now;
    peer->window = window_for(server, hello->as.hello.window);
    peer->delta = hello->as.hello.delta;
    peer->zstd = hello->as.hello.zstd;
    note_gpu(peer, hello);
    /* A version above the current one was never committed: no worker holds it. */
    bool ours = hello->as.hello.held.epoch == server->epoch &&
                hello->as.hello.held.version <= server->current.version;
    peer->held = ours ? hello->as.hello.held : (rft_held){0};
    send_welcome(server, peer);
}

/* ---- Paths */

refit_path rft_server_path(const rft_server *server, const rft_peer *peer, uint64_t version)
{
    const rft_store *store = server->store;
    if (peer->gpu && rft_gpu_store_find(server->gpu, version) != NULL) return REFIT_PATH_CUDA_IPC;
    if (store != NULL && !store->hosted) return REFIT_PATH_NONE;
    return peer->shm && (store == NULL || store->shared) ? REFIT_PATH_SHM : REFIT_PATH_SOCKET;
}

static const char *path_words(refit_path path)
{
    switch (path) {
    case REFIT_PATH_CUDA_IPC: return "the memory of its GPU";
    case REFIT_PATH_SHM: return "shared memory";
    case REFIT_PATH_SOCKET:
    case REFIT_PATH_NONE: break;
    }
    return "the socket";
}

void rft_server_answer_join(rft_server *server, rft_peer *peer, const rft_message *message,
                            int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    if (peer->subscribed) return;
    if (message->as.join.epoch != server->epoch) {
        rft_server_refuse(server, &peer->id, REFIT_ERR_STALE, false, "this is another trainer");
        return;
    }
    bool shares = message->as.join.shm || message->as.join.gpu;
    if (shares && (server->probe[0] == '\0' || message->as.join.proof != server->proof)) {
        rft_server_break_off(server, peer, REFIT_ERR_SECURITY,
                             "it has no proof that it shares memory");
        return;
    }
    if (message->as.join.gpu && !on_gpu(server, peer)) {
        rft_server_break_off(server, peer, REFIT_ERR_PROTOCOL,
                             "it joins on a GPU that is not its own");
        return;
    }
    rft_view_print(message->as.join.reason, reason, sizeof reason);
    if (server->config->broadcast_gpu == REFIT_GPU_REQUIRE && !message->as.join.gpu) {
        rft_server_refuse(server, &peer->id, REFIT_ERR_UNSUPPORTED, false, reason);
        rft_server_lose(server, peer, REFIT_ERR_UNSUPPORTED, reason);
        return;
    }
    peer->subscribed = true;
    peer->shm = message->as.join.shm;
    peer->gpu = message->as.join.gpu;
    peer->path = rft_server_path(server, peer, 0);
    if (peer->gpu) peer->path = REFIT_PATH_CUDA_IPC;
    rft_log(REFIT_LOG_INFO, "worker %s joins through %s%s%s%s%s", peer->name,
            path_words(peer->path), peer->key_name[0] == '\0' ? "" : ", with key ", peer->key_name,
            reason[0] == '\0' ? "" : ": ", reason);
    rft_server_send_beat(server, peer);
    if (rft_server_is_current(server, &peer->held)) rft_transaction_applied(server, peer);
    rft_server_offer(server, peer, now);
}

void rft_server_answer_bye(rft_server *server, rft_peer *peer, const rft_message *message,
                           int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    (void)now;
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    rft_server_lose(server, peer, REFIT_ERR_CLOSED, reason[0] == '\0' ? "it left" : reason);
}
