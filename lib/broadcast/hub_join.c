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
#include "broadcast/hub.h"
#include "device/device_uuid.h"

static uint32_t window_for(const rft_hub *hub, uint32_t asked)
{
    uint32_t most = hub->config->broadcast_window;
    return asked < most ? asked : most;
}

static void send_welcome(rft_hub *hub, rft_peer *peer)
{
    rft_message message = {.kind = RFT_WELCOME};
    message.as.welcome.protocol = RFT_PROTOCOL;
    message.as.welcome.epoch = hub->epoch;
    message.as.welcome.frame_bytes = hub->config->broadcast_frame_bytes;
    message.as.welcome.window = peer->window;
    message.as.welcome.heartbeat_ms = hub->config->broadcast_heartbeat_ms;
    message.as.welcome.heartbeat_timeout_ms = hub->config->broadcast_heartbeat_timeout_ms;
    message.as.welcome.version = hub->current.version;
    message.as.welcome.probe = rft_view_text(hub->probe);
    if (hub->gpu != NULL) {
        message.as.welcome.gpu = (rft_view){hub->gpu->uuid, sizeof hub->gpu->uuid};
    }
    (void)rft_hub_send(hub, peer, &message);
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
static bool identify(const rft_hub *hub, const rft_peer_id *from, const rft_message *hello,
                     caller *out)
{
    *out = (caller){.id = *from, .instance = hello->as.hello.instance};
    rft_view_print(hello->as.hello.worker, out->own_name, sizeof out->own_name);
    bool admitted = rft_hub_admits(hub, from, out->key_name);
    rft_peer_name_bind(out->key_name, out->own_name, out->name);
    return admitted;
}

/* Says no to a HELLO, and remembers it for who waits for workers. */
static void refuse_hello(rft_hub *hub, const caller *from, refit_status code, bool final,
                         const char *reason)
{
    rft_hub_note_gone(hub, from->name, reason);
    rft_hub_refuse(hub, &from->id, code, final, reason);
}

static rft_peer *admit_new(rft_hub *hub, const caller *from)
{
    refit_error why;
    rft_peer *peer = NULL;
    if (hub->peers.count >= hub->config->limits_workers) {
        refuse_hello(hub, from, REFIT_ERR_LIMIT, false,
                     "the trainer has as many workers as limits.workers allows");
        return NULL;
    }
    if (rft_peers_add(&hub->peers, &peer, &why) != REFIT_OK) {
        refuse_hello(hub, from, REFIT_ERR_HOST_MEMORY, false, why.text);
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
static rft_peer *admit(rft_hub *hub, const caller *from)
{
    rft_peer *peer = rft_peers_find_name(&hub->peers, from->name);
    if (peer == NULL) return admit_new(hub, from);
    bool same = peer->instance == from->instance && strcmp(peer->id.key, from->id.key) == 0;
    if (same) {
        rft_hub_reset_peer(hub, peer);
        return peer;
    }
    rft_hub_send_beat(hub, peer); /* finds out whether the other can still be reached */
    refuse_hello(hub, from, REFIT_ERR_EXISTS, false,
                 is_full(from->key_name)
                     ? "another worker uses this key: give this one a key of its own, or the key a "
                       "name of at most 61 characters, so that names fit behind it"
                     : "another worker goes by this name: give this one a name of its own, or wait "
                       "until that one is gone");
    return NULL;
}

/* With broadcast.gpu: require. Whether the worker may come in; if not it is told why. */
static bool admits_gpu(rft_hub *hub, const caller *from, const rft_message *hello)
{
    rft_view theirs = hello->as.hello.gpu;
    char ours[RFT_UUID_TEXT_BYTES], reason[RFT_SENTENCE_BYTES];
    if (hub->config->broadcast_gpu != REFIT_GPU_REQUIRE) return true;
    if (hub->gpu == NULL) {
        refuse_hello(hub, from, REFIT_ERR_UNSUPPORTED, false,
                     "the trainer takes workers on its own GPU only, and has not said which");
        return false;
    }
    bool named = theirs.count == RFT_UUID_BYTES;
    if (named && rft_uuid_equal(theirs.data, hub->gpu->uuid)) return true;
    rft_uuid_print(hub->gpu->uuid, ours);
    snprintf(reason, sizeof reason,
             named ? "the trainer takes workers on %s only, and this one is on another GPU"
                   : "the trainer takes workers on %s only (refit_subscriber_use_device)",
             ours);
    hub->counts.refused += named;
    refuse_hello(hub, from, REFIT_ERR_UNSUPPORTED, named, reason);
    return false;
}

static void note_gpu(rft_peer *peer, const rft_message *hello)
{
    rft_view uuid = hello->as.hello.gpu;
    peer->named_gpu = uuid.count == sizeof peer->uuid;
    if (peer->named_gpu) memcpy(peer->uuid, uuid.data, sizeof peer->uuid);
}

/* Whether the worker has said that it is on this publisher's GPU. */
static bool on_gpu(const rft_hub *hub, const rft_peer *peer)
{
    return hub->gpu != NULL && peer->named_gpu && rft_uuid_equal(peer->uuid, hub->gpu->uuid);
}

void rft_hub_use_gpu(rft_hub *hub, rft_gpu_store *gpu)
{
    hub->gpu = gpu;
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        const rft_peer *peer = hub->peers.live[i];
        if (!on_gpu(hub, peer)) continue;
        rft_hub_refuse(hub, &peer->id, REFIT_ERR_STALE, false,
                       "the trainer has said which GPU it is on: join once more");
    }
}

void rft_hub_recall_gpu(rft_hub *hub)
{
    for (uint32_t i = 0; i < hub->peers.count; i++) {
        rft_peer *peer = hub->peers.live[i];
        if (peer->subscribed && peer->gpu) rft_hub_send_beat(hub, peer);
    }
}

/* Who only looks is told what is there, and no version waits for it. Who asks again at once is not
 * answered: its HELLO is short, and the manifest may be long. */
static void answer_observer(rft_hub *hub, const rft_peer_id *from, const rft_message *hello,
                            int64_t now)
{
    if (!rft_visits_admit(&hub->visits, from, now)) return;
    rft_peer visitor = {.id = *from, .window = window_for(hub, hello->as.hello.window)};
    send_welcome(hub, &visitor);
    rft_hub_send_committed(hub, &visitor);
    rft_hub_send_bye(hub, &visitor, REFIT_OK, "that is all");
}

void rft_hub_answer_hello(rft_hub *hub, const rft_peer_id *from, rft_peer *known,
                          const rft_message *hello, int64_t now)
{
    caller who;
    if (!identify(hub, from, hello, &who)) {
        rft_hub_turn_away(hub, known, now);
        return;
    }
    if (hello->as.hello.protocol != RFT_PROTOCOL) {
        char reason[RFT_SENTENCE_BYTES];
        hub->counts.refused++;
        rft_message_say_protocols(RFT_PROTOCOL, hello->as.hello.protocol, reason);
        refuse_hello(hub, &who, REFIT_ERR_PROTOCOL, true, reason);
        return;
    }
    if (hello->as.hello.observer && known == NULL) {
        answer_observer(hub, from, hello, now);
        return;
    }
    if (!admits_gpu(hub, &who, hello)) {
        if (known != NULL) rft_hub_lose(hub, known, REFIT_ERR_UNSUPPORTED, "it left the GPU");
        return;
    }
    bool renamed = known != NULL && known != rft_peers_find_name(&hub->peers, who.name);
    if (renamed) rft_hub_lose(hub, known, REFIT_ERR_CLOSED, "its connection speaks for another");
    rft_peer *peer = admit(hub, &who);
    if (peer == NULL) return;
    peer->id = *from;
    strcpy(peer->own_name, who.own_name);
    strcpy(peer->key_name, who.key_name);
    peer->heard = now;
    peer->window = window_for(hub, hello->as.hello.window);
    peer->delta = hello->as.hello.delta;
    peer->zstd = hello->as.hello.zstd;
    note_gpu(peer, hello);
    /* A version above the current one was never committed: no worker holds it. */
    bool ours = hello->as.hello.held.epoch == hub->epoch &&
                hello->as.hello.held.version <= hub->current.version;
    peer->held = ours ? hello->as.hello.held : (rft_held){0};
    send_welcome(hub, peer);
}

/* ---- Paths */

refit_path rft_hub_path(const rft_hub *hub, const rft_peer *peer, uint64_t version)
{
    const rft_store *store = hub->store;
    if (peer->gpu && rft_gpu_store_find(hub->gpu, version) != NULL) return REFIT_PATH_CUDA_IPC;
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

void rft_hub_answer_join(rft_hub *hub, rft_peer *peer, const rft_message *message, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    if (peer->subscribed) return;
    if (message->as.join.epoch != hub->epoch) {
        rft_hub_refuse(hub, &peer->id, REFIT_ERR_STALE, false, "this is another trainer");
        return;
    }
    bool shares = message->as.join.shm || message->as.join.gpu;
    if (shares && (hub->probe[0] == '\0' || message->as.join.proof != hub->proof)) {
        rft_hub_break_off(hub, peer, REFIT_ERR_SECURITY, "it has no proof that it shares memory");
        return;
    }
    if (message->as.join.gpu && !on_gpu(hub, peer)) {
        rft_hub_break_off(hub, peer, REFIT_ERR_PROTOCOL, "it joins on a GPU that is not its own");
        return;
    }
    rft_view_print(message->as.join.reason, reason, sizeof reason);
    if (hub->config->broadcast_gpu == REFIT_GPU_REQUIRE && !message->as.join.gpu) {
        rft_hub_refuse(hub, &peer->id, REFIT_ERR_UNSUPPORTED, false, reason);
        rft_hub_lose(hub, peer, REFIT_ERR_UNSUPPORTED, reason);
        return;
    }
    peer->subscribed = true;
    peer->shm = message->as.join.shm;
    peer->gpu = message->as.join.gpu;
    peer->path = rft_hub_path(hub, peer, 0);
    if (peer->gpu) peer->path = REFIT_PATH_CUDA_IPC;
    rft_log(REFIT_LOG_INFO, "worker %s joins through %s%s%s%s%s", peer->name,
            path_words(peer->path), peer->key_name[0] == '\0' ? "" : ", with key ", peer->key_name,
            reason[0] == '\0' ? "" : ": ", reason);
    rft_hub_send_beat(hub, peer);
    if (rft_hub_is_current(hub, &peer->held)) rft_round_applied(hub, peer);
    rft_hub_offer(hub, peer, now);
}

void rft_hub_answer_bye(rft_hub *hub, rft_peer *peer, const rft_message *message, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    (void)now;
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    rft_hub_lose(hub, peer, REFIT_ERR_CLOSED, reason[0] == '\0' ? "it left" : reason);
}
