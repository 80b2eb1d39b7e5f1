/*
 * The workers of a publisher: how they come and go, the answer to each of their messages, when they
 * are evicted, and which of them is sent the next frame.
 *
 *     (unknown) ──HELLO──► greeted ──JOIN──► subscribed ──BYE, eviction──► (unknown)
 *                             ▲                  │
 *                             └──────HELLO───────┘
 *
 * A worker is evicted when it has been silent too long, misses a deadline, breaks the protocol,
 * or cannot be reached. It is told so if it can hear, and may come back with a new HELLO. A slot
 * that it may still be reading is tainted: the store gives it fresh memory before the next version
 * is written there, so bytes never change under a worker, however long it was stopped.
 *
 * Calls go one way: this file takes steps of the transaction (transaction.c), and both put messages
 * into the send queue (server_send.c).
 */
#include "publisher/server.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "device/device_uuid.h"

/* ---- Opening and closing */

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
    rft_ranks_close(server);
    rft_send_queue_close(&server->ranks.link.send_queue);
    rft_send_queue_close(&server->send_queue);
    rft_bytes_close(&server->scratch);
    rft_cached_message_close(&server->manifest, &server->retired);
    rft_cached_message_close(&server->seal, &server->retired);
    rft_cached_message_close(&server->committed, &server->retired);
    return rft_retire_list_close(&server->retired, deadline);
}

void rft_server_adopt(rft_server *server, rft_store *store)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_server_drop_task(server, server->peers.live[i], REFIT_ERR_STALE,
                             "the tensors have changed");
        (void)rft_neighbors_withdraw(server->peers.live[i]);
        rft_peer_drop_wants(server->peers.live[i]);
    }
    rft_ranks_close(server);
    server->store = store;
}

void rft_server_leave(rft_server *server, bool final)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        if (final)
            rft_server_send_end(server, server->peers.live[i]);
        else
            rft_server_send_bye(server, server->peers.live[i], REFIT_OK, "the trainer closes");
    }
}

/* ---- Giving up a worker */

/* Forgets what the worker had under way; slots that it may be reading become tainted. */
static void reset_peer(rft_server *server, rft_peer *peer)
{
    for (uint32_t i = 0; server->store != NULL && i < server->store->slot_count; i++) {
        rft_slot *slot = &server->store->slots[i];
        if (rft_peer_reads(peer, slot->version) == REFIT_PATH_SHM) slot->tainted = true;
    }
    memset(peer->lends, 0, sizeof peer->lends);
    server->regroup |= rft_neighbors_withdraw(peer) || peer->selects;
    peer->task = (rft_task){0};
    rft_peer_drop_wants(peer);
    peer->selects = false;
    peer->alone = 0;
    peer->failed_version = 0;
    peer->later = false;
    peer->retried = 0;
    peer->has_manifest = false;
    peer->shards_edition = 0;
    peer->subscribed = false;
    /* Its staged version no longer counts: it must stage once more, in the time that is left. */
    bool counts = server->transaction.state == RFT_TRANSACTION_STAGING && peer->member;
    if (counts && peer->status == REFIT_OK) peer->due = server->transaction.deadline;
}

/* Notes in `gone` that a worker was lost or refused. */
static void note_gone(rft_server *server, const char *name, const char *reason)
{
    rft_text_say(server->gone, sizeof server->gone, "worker %s: %s", name, reason);
}

/* The worker is gone; a member counts as lost in the transaction. The reason is copied. */
static void lose(rft_server *server, rft_peer *peer, refit_status status, const char *reason)
{
    if (peer->rank > 0 || peer->fetches) {
        rft_ranks_lose(server, peer, status, reason);
        rft_peers_drop(&server->peers, peer);
        return;
    }
    rft_log(REFIT_LOG_INFO, "worker %s is gone: %s", peer->name, reason);
    note_gone(server, peer->name, reason);
    rft_transaction_blame(server, peer, status, reason);
    reset_peer(server, peer);
    rft_peers_lose(&server->peers, peer);
}

void rft_server_evict(rft_server *server, rft_peer *peer, refit_status status, const char *reason)
{
    rft_server_send_bye(server, peer, status, reason);
    server->counts.evicted++;
    lose(server, peer, status, reason);
}

/* The worker broke the protocol: it is counted and evicted. */
static void break_off(rft_server *server, rft_peer *peer, refit_status status, const char *reason)
{
    server->counts.refused++;
    rft_log(REFIT_LOG_WARNING, "worker %s broke the protocol: %s", peer->name, reason);
    rft_server_evict(server, peer, status, reason);
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
    lose(server, peer, told ? why : REFIT_ERR_PEER, lost_reason(why));
    rft_transaction_evaluate(server, now);
}

/* ---- Readers of the slot that comes next */

static uint64_t target_version(const rft_server *server)
{
    return server->store->slots[rft_store_target(server->store)].version;
}

static bool is_reader(const rft_server *server, const rft_peer *peer)
{
    return rft_peer_reads(peer, target_version(server)) != REFIT_PATH_NONE;
}

bool rft_server_has_readers(const rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        if (is_reader(server, server->peers.live[i])) return true;
    }
    return false;
}

void rft_server_evict_readers(rft_server *server, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    snprintf(reason, sizeof reason, "it did not close its update to version %" PRIu64 " in time",
             target_version(server));
    for (uint32_t i = 0; i < server->peers.count;) {
        rft_peer *peer = server->peers.live[i];
        if (is_reader(server, peer)) {
            rft_server_evict(server, peer, REFIT_ERR_TIMEOUT, reason);
        } else {
            i++;
        }
    }
    rft_transaction_evaluate(server, now);
}

/*
 * ---- Keys
 *
 * The ZAP handler admits a connection by its key. The connection of a key that is taken from the
 * allow list afterwards stays. So every message is checked against the list, and all workers when
 * the list changes: a worker without an entry is told so once, and then neither heard nor spoken
 * to. The name of a worker follows from its key (rft_peer_name_bind). ZeroMQ cannot end one
 * connection of many; it ends when its worker does. Until then its messages cost time, and memory
 * if it never ends a message (channel.c).
 */

bool rft_server_admits(const rft_server *server, const rft_peer_id *from,
                       char key_name[RFT_KEY_NAME_BYTES])
{
    if (key_name != NULL) key_name[0] = '\0';
    return server->allow == NULL || rft_allow_list_has(server->allow, from->key, key_name);
}

static void evict_key(rft_server *server, rft_peer *peer)
{
    char reason[RFT_SENTENCE_BYTES];
    snprintf(reason, sizeof reason, "its key (%s) is no longer in the trainer's security.allow",
             peer->key_name);
    rft_server_refuse(server, &peer->id, REFIT_ERR_SECURITY, true, reason);
    server->counts.evicted++;
    lose(server, peer, REFIT_ERR_SECURITY, reason);
}

static void reject_key(rft_server *server, rft_peer *peer, int64_t now)
{
    server->counts.refused++;
    if (peer == NULL) return;
    evict_key(server, peer);
    rft_transaction_evaluate(server, now);
}

/* The file of the worker's key has another name, so the worker has. A worker that has that name
 * already came by the same key. */
static void rename_peer(rft_server *server, rft_peer *peer, const char *key_name)
{
    char name[RFT_PEER_NAME_BYTES];
    rft_peer_name_bind(key_name, peer->own_name, name);
    const rft_peer *other = rft_peers_find_name(&server->peers, name);
    if (other != NULL && other != peer) {
        rft_server_evict(server, peer, REFIT_ERR_EXISTS,
                         "its key has another name now, and another worker goes by the name that "
                         "follows from it");
        return;
    }
    rft_log(REFIT_LOG_INFO, "worker %s is called %s now: the file of its key is called %s",
            peer->name, name, key_name);
    strcpy(peer->name, name);
    strcpy(peer->key_name, key_name);
}

/* Evicts the worker, renames it, or does nothing. */
static void check_key(rft_server *server, rft_peer *peer)
{
    char key_name[RFT_KEY_NAME_BYTES];
    if (!rft_server_admits(server, &peer->id, key_name))
        evict_key(server, peer);
    else if (strcmp(key_name, peer->key_name) != 0)
        rename_peer(server, peer, key_name);
}

void rft_server_check_keys(rft_server *server, int64_t now)
{
    if (server->allow == NULL) return;
    uint64_t edition = rft_allow_list_edition(server->allow);
    if (edition == server->keys_edition) return;
    server->keys_edition = edition;
    for (uint32_t i = 0; i < server->peers.count;) {
        const uint32_t count = server->peers.count;
        check_key(server, server->peers.live[i]);
        i += server->peers.count == count;
    }
    rft_transaction_evaluate(server, now);
}

/* ---- The GPU that versions are shown on */

/* Whether the worker has said that it is on this publisher's GPU. */
static bool on_gpu(const rft_server *server, const rft_peer *peer)
{
    return server->gpu != NULL && peer->named_gpu &&
           rft_uuid_equal(peer->uuid, server->gpu->probe_share.uuid);
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

/*
 * ---- HELLO
 *
 * A worker on the publisher's GPU says so with HELLO, by its UUID, and joins there if it can open
 * the probe as well. With broadcast.gpu: require no other worker is taken: for now only, since a
 * worker may be told its device a moment after it began to look for the trainer; for good if it is
 * on another GPU.
 *
 * A name stands for one instance at a time, and with keys for one key. The same instance with a new
 * connection (and the same key) gets its place back, and stays a member of the version under way;
 * another one waits until the place is free.
 */

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
    message.as.welcome.parts = true;
    unsigned char share[RFT_SHARE_BYTES];
    if (server->gpu != NULL) {
        rft_share_write(&server->gpu->probe_share, share);
        message.as.welcome.share = (rft_view){share, sizeof share};
    }
    (void)rft_server_send(server, peer, &message);
}

/* The sender of a HELLO. */
typedef struct caller {
    rft_peer_id id;
    uint64_t instance;
    char own_name[RFT_PEER_NAME_BYTES];
    char key_name[RFT_KEY_NAME_BYTES];
    char name[RFT_PEER_NAME_BYTES]; /* by which it is known, if it is let in */
    uint32_t rank;
    bool fetches;
} caller;

/* False: the key of the sender is no longer in the allow list. */
static bool identify(const rft_server *server, const rft_peer_id *from, const rft_message *hello,
                     caller *out)
{
    *out = (caller){.id = *from,
                    .instance = hello->as.hello.instance,
                    .rank = hello->as.hello.rank,
                    .fetches = hello->as.hello.fetches};
    rft_view_print(hello->as.hello.worker, out->own_name, sizeof out->own_name);
    bool admitted = rft_server_admits(server, from, out->key_name);
    rft_peer_name_bind(out->key_name, out->own_name, out->name);
    return admitted;
}

/* Refuses a HELLO, and notes it for a caller that waits for workers. */
static void refuse_hello(rft_server *server, const caller *from, refit_status code, bool final,
                         const char *reason)
{
    note_gone(server, from->name, reason);
    rft_server_refuse(server, &from->id, code, final, reason);
}

/* A worker has a further connection to each rank. */
static uint32_t count_alike(const rft_server *server, const caller *from)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        count += peer->fetches == from->fetches && (peer->rank > 0) == (from->rank > 0);
    }
    return count;
}

static rft_peer *admit_new(rft_server *server, const caller *from)
{
    refit_error why;
    rft_peer *peer = NULL;
    uint32_t most = from->rank > 0 ? RFT_RANKS_MOST : server->config->limits_workers;
    if (count_alike(server, from) >= most) {
        refuse_hello(server, from, REFIT_ERR_LIMIT, false,
                     from->rank > 0 ? "the trainer has as many ranks as it can have"
                                    : "the trainer has as many workers as limits.workers allows");
        return NULL;
    }
    if (rft_peers_add(&server->peers, &peer, &why) != REFIT_OK) {
        refuse_hello(server, from, REFIT_ERR_HOST_MEMORY, false, why.text);
        return NULL;
    }
    strcpy(peer->name, from->name);
    peer->instance = from->instance;
    peer->rank = from->rank;
    peer->fetches = from->fetches;
    return peer;
}

/* A key with a name so long that rft_peer_name_bind has no room for the worker's own after it. */
static bool is_full(const char *key_name)
{
    return strlen(key_name) + 2 > RFT_PEER_NAME_BYTES - 1;
}

/* Returns the place that the sender has, gets back, or is given now; NULL: it was refused. */
static rft_peer *admit(rft_server *server, const caller *from)
{
    rft_peer *peer = rft_peers_find_name(&server->peers, from->name);
    if (peer == NULL) return admit_new(server, from);
    bool same = peer->instance == from->instance && strcmp(peer->id.key, from->id.key) == 0 &&
                peer->rank == from->rank && peer->fetches == from->fetches;
    if (same) {
        reset_peer(server, peer);
        return peer;
    }
    rft_server_send_beat(server, peer); /* finds out whether the other can still be reached */
    refuse_hello(server, from, REFIT_ERR_EXISTS, false,
                 is_full(from->key_name)
                     ? "another worker uses this key: give this one a key of its own, or the key a "
                       "name of at most 61 characters, so that names fit after it"
                     : "another worker goes by this name: give this one a name of its own, or wait "
                       "until that one is gone");
    return NULL;
}

/* With broadcast.gpu: require. Whether the worker may come in; if not it is told the reason. */
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
    if (named && rft_uuid_equal(theirs.data, server->gpu->probe_share.uuid)) return true;
    rft_uuid_print(server->gpu->probe_share.uuid, ours);
    snprintf(reason, sizeof reason,
             named ? "the trainer takes workers on %s only, and this one is on another GPU"
                   : "the trainer takes workers on %s only (refit_subscriber_use_device)",
             ours);
    server->counts.refused += named;
    refuse_hello(server, from, REFIT_ERR_UNSUPPORTED, named, reason);
    return false;
}

/* Whether the sender may come as what it is: a worker, one of another rank's, or a rank. */
static bool admits_kind(rft_server *server, const caller *from, const rft_message *hello)
{
    char reason[RFT_SENTENCE_BYTES];
    if (from->rank > 0) {
        if (strcmp(server->key, from->id.key) == 0) return true;
        server->counts.refused++;
        refuse_hello(server, from, REFIT_ERR_SECURITY, true,
                     "a rank has to have the key of rank 0: give all ranks one security.key, its "
                     "public half as security.server_key, and put that into security.allow");
        return false;
    }
    if (from->fetches || !rft_ranks_are_many(server)) return true;
    if (rft_ranks_follows(server)) {
        rft_text_say(reason, sizeof reason,
                     "this is rank %" PRIu32 " of a trainer: subscribe to rank 0, at %s",
                     server->ranks.rank, server->ranks.link.endpoint);
        refuse_hello(server, from, REFIT_ERR_STATE, false, reason);
        return false;
    }
    if (hello->as.hello.shards) return true;
    refuse_hello(server, from, REFIT_ERR_UNSUPPORTED, false,
                 "the trainer publishes from several ranks, which this worker's release of refit "
                 "does not know: install that of the trainer");
    return false;
}

static void note_gpu(rft_peer *peer, const rft_message *hello)
{
    rft_view uuid = hello->as.hello.gpu;
    peer->named_gpu = uuid.count == sizeof peer->uuid;
    if (peer->named_gpu) memcpy(peer->uuid, uuid.data, sizeof peer->uuid);
}

static void note_place(const rft_server *server, rft_peer *peer, const rft_message *hello)
{
    bool shares = server->config->broadcast_host_image != REFIT_HOST_IMAGE_OFF;
    rft_view_print(shares ? hello->as.hello.image : (rft_view){0}, peer->place, sizeof peer->place);
}

/* What the sender is and takes. */
static void note_hello(const rft_server *server, rft_peer *peer, const caller *who,
                       const rft_message *hello)
{
    peer->id = who->id;
    strcpy(peer->own_name, who->own_name);
    strcpy(peer->key_name, who->key_name);
    peer->window = window_for(server, hello->as.hello.window);
    peer->delta = hello->as.hello.delta;
    peer->zstd = hello->as.hello.zstd;
    note_place(server, peer, hello);
    note_gpu(peer, hello);
    /* A version above the current one was never committed: no worker holds it. */
    bool ours = hello->as.hello.held.epoch == server->epoch &&
                hello->as.hello.held.version <= server->current.version;
    peer->held = ours ? hello->as.hello.held : (rft_version_id){0};
}

static bool is_recent(int64_t at, int64_t now)
{
    return at != 0 && now < rft_after_ms(at, RFT_QUERY_LIMIT_MS);
}

/* Whether this observer is answered now; notes that it was. It may ask again later. The oldest
 * place goes to the next observer. */
static bool query_limit_admit(rft_query_limit *query_limit, const rft_peer_id *from, int64_t now)
{
    uint32_t oldest = 0;
    for (uint32_t i = 0; i < RFT_QUERY_LIMIT_MOST; i++) {
        if (is_recent(query_limit->at[i], now) && rft_peer_id_equal(&query_limit->ids[i], from))
            return false;
        if (query_limit->at[i] < query_limit->at[oldest]) oldest = i;
    }
    if (is_recent(query_limit->at[oldest], now)) return false;
    query_limit->ids[oldest] = *from;
    query_limit->at[oldest] = now;
    return true;
}

/* An observer is told the committed version, and no version waits for it. One that asks again at
 * once is not answered: its HELLO is short, and the manifest may be long. */
static void answer_observer(rft_server *server, const rft_peer_id *from, const rft_message *hello,
                            int64_t now)
{
    if (!query_limit_admit(&server->query_limit, from, now)) return;
    rft_peer observer = {.id = *from, .window = window_for(server, hello->as.hello.window)};
    send_welcome(server, &observer);
    rft_server_send_committed(server, &observer, now);
    rft_server_send_bye(server, &observer, REFIT_OK, "that is all");
}

static void answer_hello(rft_server *server, const rft_peer_id *from, rft_peer *known,
                         const rft_message *hello, int64_t now)
{
    caller who;
    if (!identify(server, from, hello, &who)) {
        reject_key(server, known, now);
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
    if (!admits_kind(server, &who, hello)) return;
    bool worker = who.rank == 0 && !who.fetches;
    if (worker && !admits_gpu(server, &who, hello)) {
        if (known != NULL) lose(server, known, REFIT_ERR_UNSUPPORTED, "it left the GPU");
        return;
    }
    bool renamed = known != NULL && known != rft_peers_find_name(&server->peers, who.name);
    if (renamed) lose(server, known, REFIT_ERR_CLOSED, "its connection speaks for another");
    rft_peer *peer = admit(server, &who);
    if (peer == NULL) return;
    peer->heard = now;
    note_hello(server, peer, &who, hello);
    send_welcome(server, peer);
}

/* ---- JOIN and BYE */

static const char *path_words(refit_path path)
{
    switch (path) {
    case REFIT_PATH_CUDA_IPC: return "the memory of its GPU";
    case REFIT_PATH_SHM: return "shared memory";
    case REFIT_PATH_NEIGHBOR:
    case REFIT_PATH_SOCKET:
    case REFIT_PATH_ARCHIVE: /* of no worker of a trainer */
    case REFIT_PATH_NONE: break;
    }
    return "the socket";
}

/* A member that lost its GPU while it applied a version that lies there alone cannot get it again.
 */
static void blame_for_gpu(rft_server *server, rft_peer *peer, const char *reason)
{
    bool applying = server->transaction.state == RFT_TRANSACTION_COMMITTING && peer->awaited;
    if (!applying || peer->task.version != 0) return;
    if (rft_server_path(server, peer, server->transaction.version) != REFIT_PATH_NONE) return;
    rft_transaction_blame(server, peer, REFIT_ERR_UNSUPPORTED, reason);
}

/* That a worker of the machine of another one receives versions for itself, and why. */
static void tell_apart(const rft_server *server, const rft_peer *peer)
{
    const rft_peer *other = rft_neighbors_apart(&server->peers, peer);
    if (other == NULL || peer->path != REFIT_PATH_SOCKET || other->shm) return;
    rft_log(REFIT_LOG_WARNING,
            "worker %s is on the machine of worker %s, but of another user or in another PID "
            "namespace: each receives versions for itself (broadcast.host_image)",
            peer->name, other->name);
}

static void answer_join(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    if (peer->subscribed) return;
    if (message->as.join.epoch != server->epoch) {
        rft_server_refuse(server, &peer->id, REFIT_ERR_STALE, false, "this is another trainer");
        return;
    }
    bool shares = message->as.join.shm || message->as.join.gpu;
    if (shares && (server->probe[0] == '\0' || message->as.join.proof != server->proof)) {
        break_off(server, peer, REFIT_ERR_SECURITY, "it has no proof that it shares memory");
        return;
    }
    if (message->as.join.gpu && !on_gpu(server, peer)) {
        break_off(server, peer, REFIT_ERR_PROTOCOL, "it joins on a GPU that is not its own");
        return;
    }
    rft_view_print(message->as.join.reason, reason, sizeof reason);
    if (server->config->broadcast_gpu == REFIT_GPU_REQUIRE && !message->as.join.gpu) {
        rft_server_refuse(server, &peer->id, REFIT_ERR_UNSUPPORTED, false, reason);
        lose(server, peer, REFIT_ERR_UNSUPPORTED, reason);
        return;
    }
    peer->subscribed = true;
    bool alone = !rft_ranks_are_many(server); /* several have the version in no single memory */
    peer->shm = alone && message->as.join.shm;
    peer->gpu = alone && message->as.join.gpu;
    peer->pieces = message->as.join.pieces;
    peer->selects = message->as.join.selects;
    peer->path = rft_server_path(server, peer, 0);
    if (peer->gpu) peer->path = REFIT_PATH_CUDA_IPC;
    rft_log(REFIT_LOG_INFO, "worker %s joins through %s%s%s%s%s", peer->name,
            path_words(peer->path), peer->key_name[0] == '\0' ? "" : ", with key ", peer->key_name,
            reason[0] == '\0' ? "" : ": ", reason);
    tell_apart(server, peer);
    rft_server_send_beat(server, peer);
    if (rft_server_is_current(server, &peer->held)) rft_transaction_applied(server, peer);
    rft_transaction_caught_up(server, peer);
    rft_server_offer(server, peer, now);
    if (!peer->gpu) blame_for_gpu(server, peer, reason);
}

static void answer_bye(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    (void)now;
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    lose(server, peer, REFIT_ERR_CLOSED, reason[0] == '\0' ? "it left" : reason);
}

/*
 * ---- The other messages
 *
 * One function for each kind. Messages may come twice, or late: an answer is given again, and a
 * decision stays. A message that a worker never sends, or one that contradicts what it was told,
 * breaks the protocol: it is counted and the worker evicted; others do not notice. A message
 * of an unknown sender (evicted, or of an earlier trainer) is answered REFUSE, not final: the
 * worker says HELLO again.
 */

static bool is_committed(const rft_server *server, uint64_t version)
{
    return version != 0 && version == server->current.version &&
           version == server->store->committed.version;
}

static bool is_task(const rft_peer *peer, uint64_t version)
{
    return peer->task.stage != RFT_STAGE_NONE && peer->task.version == version;
}

/* What a peer wants of the manifest that it was sent; `*want` NULL: not all of the list has come,
 * or it is of another manifest. */
static refit_status read_want(rft_server *server, rft_peer *peer, const rft_message *message,
                              rft_want **want, refit_error *error)
{
    bool whole;
    const rft_want_slice slice = {.from = message->as.want.from,
                                  .more = message->as.want.more,
                                  .rows = message->as.want.rows};
    const rft_manifest *manifest = server->store->manifest;
    *want = NULL;
    if (!rft_digest128_equal(&message->as.want.manifest, &manifest->digest)) return REFIT_OK;
    RFT_TRY(rft_want_slice_add(&peer->rows, &slice, &server->limits, &whole, error));
    return whole ? rft_want_open(manifest, rft_bytes_view(&peer->rows), want, error) : REFIT_OK;
}

/* The worker says what it wants of the manifest; or once more, of another one. */
static void answer_want(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    refit_error why;
    rft_want *want = NULL;
    if (server->store == NULL || !peer->selects) return;
    refit_status status = read_want(server, peer, message, &want, &why);
    if (status != REFIT_OK) {
        break_off(server, peer, status, why.text);
        return;
    }
    if (want == NULL) return;
    rft_peer_set_want(&peer->want, want);
    peer->unfit = REFIT_OK;
    server->regroup = true;
    if (peer->task.stage == RFT_STAGE_NONE) rft_server_offer(server, peer, now);
}

/* What the first PULL of a worker says that is to share its image. */
static void note_image(rft_server *server, rft_peer *peer, rft_view segment)
{
    rft_task *task = &peer->task;
    if (!task->share || peer->image.version == task->version) return;
    server->regroup = true;
    if (segment.count == 0 || segment.count >= RFT_SEGMENT_NAME_BYTES) {
        task->share = false;
        return;
    }
    (void)rft_neighbors_withdraw(peer);
    task->share = true;
    peer->image.version = task->version;
    rft_view_print(segment, peer->image.segment, sizeof peer->image.segment);
    peer->image.want = rft_want_acquire(peer->sent);
}

/* Notes the frames that the worker has already. Without memory for that it is sent them again. */
static bool note_have(const rft_server *server, rft_peer *peer, rft_view have)
{
    rft_bytes_reset(&peer->have);
    if (have.count != ((size_t)server->store->manifest->frame_count + 7) / 8) return false;
    if (peer->alone == peer->task.version) return true; /* they were damaged before */
    (void)rft_bytes_append(&peer->have, have.data, have.count, NULL);
    return true;
}

/* No more than its window has. */
static void add_credits(rft_peer *peer, const rft_message *pull)
{
    int64_t most = (int64_t)peer->window * RFT_CREDIT;
    int64_t credits = peer->task.credits + (int64_t)pull->as.pull.credits * RFT_CREDIT;
    peer->task.credits = (int32_t)(credits < most ? credits : most);
}

static void answer_pull(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    (void)now;
    rft_task *task = &peer->task;
    rft_view have = message->as.pull.have;
    if (!is_task(peer, message->as.pull.version)) return;
    bool fetching = task->stage == RFT_STAGE_OFFERED && task->path == REFIT_PATH_SOCKET;
    if (fetching) note_image(server, peer, message->as.pull.image);
    if (fetching && have.count > 0 && !note_have(server, peer, have)) {
        break_off(server, peer, REFIT_ERR_PROTOCOL,
                  "it has other frames of a version than there are");
        return;
    }
    add_credits(peer, message);
}

/* REFIT_ERR_PROTOCOL: some of it is not this rank's. */
static refit_status check_fetched(const rft_store *store, const rft_want *want, refit_error *error)
{
    rft_want *known = NULL;
    rft_bytes encoded = {0};
    refit_status status = rft_want_intersect(store->shard, want, &encoded, error);
    if (status == REFIT_OK)
        status = rft_want_open(store->manifest, rft_bytes_view(&encoded), &known, error);
    if (status == REFIT_OK && known->bytes != want->bytes)
        status = rft_fail(error, REFIT_ERR_PROTOCOL,
                          "it asks for bytes that this rank does not publish");
    rft_bytes_close(&encoded);
    rft_want_release(known);
    return status;
}

/* A worker of rank 0 says what of this rank's shard it fetches from now on. */
static void answer_fetch_want(rft_server *server, rft_peer *peer, const rft_message *message,
                              int64_t now)
{
    (void)now;
    refit_error why;
    rft_want *want = NULL;
    if (server->store == NULL || server->store->shard == NULL) return;
    refit_status status = read_want(server, peer, message, &want, &why);
    if (status == REFIT_OK && want != NULL) status = check_fetched(server->store, want, &why);
    if (status == REFIT_OK && want != NULL) rft_peer_set_want(&peer->want, rft_want_acquire(want));
    rft_want_release(want);
    if (status != REFIT_OK) break_off(server, peer, status, why.text);
}

/* What the first PULL of a version says that comes from several publishers. */
static refit_status note_part(const rft_server *server, rft_peer *peer, bool part,
                              refit_error *error)
{
    RFT_REFUSE_IF(part && peer->want == NULL, error, REFIT_ERR_PROTOCOL,
                  "it asks for a part of a version, and has not said for which");
    rft_peer_set_want(&peer->sent, rft_want_acquire(part ? peer->want : server->store->shard));
    return REFIT_OK;
}

/* Whether the version is gone, or is of other tensors. It may not have begun here. */
static bool is_past(const rft_server *server, const rft_message *pull)
{
    const rft_store *store = server->store;
    rft_view digest = pull->as.pull.manifest;
    uint64_t version = pull->as.pull.version;
    if (store == NULL || store->shard == NULL) return true;
    if (digest.count != sizeof store->manifest->digest ||
        memcmp(digest.data, &store->manifest->digest, digest.count) != 0)
        return true;
    const rft_transaction *transaction = &server->transaction;
    const rft_version_digests *served = rft_store_served(store);
    bool comes = transaction->state != RFT_TRANSACTION_IDLE && transaction->version == version;
    bool here = served != NULL && served->version == version;
    return !here && !comes && version <= transaction->last;
}

/* False: the peer was evicted. */
static bool answer_first_pull(rft_server *server, rft_peer *peer, const rft_message *message)
{
    refit_error why;
    uint64_t version = message->as.pull.version;
    rft_view have = message->as.pull.have;
    peer->task = (rft_task){0};
    if (is_past(server, message)) {
        rft_server_send_abort(server, peer, version, REFIT_ERR_STALE,
                              "this rank does not have the version any more");
        return true;
    }
    refit_status status = note_part(server, peer, message->as.pull.part, &why);
    if (status == REFIT_OK && have.count > 0 && !note_have(server, peer, have))
        status =
            rft_fail(&why, REFIT_ERR_PROTOCOL, "it has other frames of a version than there are");
    if (status != REFIT_OK) {
        break_off(server, peer, status, why.text);
        return false;
    }
    if (have.count == 0) rft_bytes_reset(&peer->have);
    peer->path = REFIT_PATH_SOCKET;
    peer->task = (rft_task){.stage = RFT_STAGE_OFFERED,
                            .version = version,
                            .base = message->as.pull.base,
                            .path = REFIT_PATH_SOCKET};
    return true;
}

/* A worker of rank 0 asks this rank for frames. */
static void answer_fetch(rft_server *server, rft_peer *peer, const rft_message *message,
                         int64_t now)
{
    (void)now;
    bool first = message->as.pull.manifest.count > 0;
    if (first && !answer_first_pull(server, peer, message)) return;
    if (is_task(peer, message->as.pull.version)) add_credits(peer, message);
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

/* A worker may ask for as many frames as if each were asked for broadcast.resend_limit times. */
static bool may_resend(const rft_server *server, const rft_task *task)
{
    uint64_t times = server->config->broadcast_resend_limit;
    return task->resent < times * server->store->manifest->frame_count;
}

static uint32_t resend_room(const rft_peer *peer)
{
    return peer->window < RFT_RESEND_ROOM ? peer->window : RFT_RESEND_ROOM;
}

/* No more frames wait than its window has: so many can be lost at once, and others that are missing
 * are asked for again. */
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
            break_off(server, peer, REFIT_ERR_PROTOCOL, "it asks for a frame that does not exist");
            return;
        }
        if (!may_resend(server, task)) {
            break_off(server, peer, REFIT_ERR_LIMIT,
                      "it asks for frames more often than broadcast.resend_limit allows");
            return;
        }
        task->resent++;
        bool room = task->resend_count < resend_room(peer) && is_ready(server->store, sequence) &&
                    rft_want_frame(peer->sent, sequence) != RFT_WANT_NONE;
        if (room) task->resend[task->resend_count++] = sequence;
    }
}

/* A version that is neither under way nor committed is not to be kept staged. */
static void answer_stray(rft_server *server, rft_peer *peer, uint64_t version)
{
    if (version == server->current.version && peer->task.stage == RFT_STAGE_NONE) {
        if (rft_path_reads_slot(peer->path)) rft_peer_lend(peer, version, peer->path);
        rft_server_send_commit(server, peer, version);
    } else {
        rft_server_send_abort(server, peer, version, REFIT_ERR_STALE,
                              "this version is not under way");
    }
}

static void fail_digest(rft_server *server, rft_peer *peer)
{
    uint64_t version = peer->task.version;
    const char *reason = "its staged version has another digest than the written one";
    rft_server_send_abort(server, peer, version, REFIT_ERR_CORRUPT, reason);
    peer->task = (rft_task){0};
    peer->failed_version = version;
    rft_transaction_blame(server, peer, REFIT_ERR_CORRUPT, reason);
}

/* The worker has the version without frames, so that others wait for an image in vain. */
static void end_sharing(rft_server *server, rft_peer *peer)
{
    if (!peer->task.share || peer->image.version == peer->task.version) return;
    peer->task.share = false;
    server->regroup = true;
}

/* The worker has verified what it received: others that mapped it may look. */
static void show_image(rft_server *server, rft_peer *receiver)
{
    if (receiver->image.version != receiver->task.version) return;
    receiver->image.whole = true;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        bool maps = peer->task.stage == RFT_STAGE_OFFERED &&
                    peer->task.version == receiver->image.version &&
                    peer->task.path == REFIT_PATH_NEIGHBOR && !peer->task.sealed;
        if (maps) rft_server_send_seal(server, peer);
    }
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
        break_off(server, peer, REFIT_ERR_PROTOCOL,
                  "it has staged a version that is not yet written");
        return;
    }
    if (!rft_digest128_equal(&message->as.staged.digest,
                             &rft_store_served(server->store)->digest)) {
        fail_digest(server, peer);
        return;
    }
    end_sharing(server, peer);
    peer->task.stage = RFT_STAGE_STAGED;
    show_image(server, peer);
    if (version == transaction->version) rft_transaction_forgive(server, peer);
    if (!is_committed(server, version)) {
        peer->due = 0;
        return;
    }
    peer->awaited = peer->due != 0 && transaction->state == RFT_TRANSACTION_COMMITTING &&
                    rft_transaction_awaits(server, peer);
    bool late = server->config->broadcast_wait != REFIT_WAIT_APPLIED;
    if (late && !peer->awaited) peer->due = 0;
    rft_transaction_commit_peer(server, peer);
}

static void answer_committed(rft_server *server, rft_peer *peer, const rft_message *message,
                             int64_t now)
{
    (void)now;
    const rft_version_id held = {server->epoch, message->as.staged.version,
                                 message->as.staged.digest};
    bool newest = held.version == server->current.version;
    if (held.version > server->current.version) {
        break_off(server, peer, REFIT_ERR_PROTOCOL, "it applied a version that is not committed");
        return;
    }
    if (newest && !rft_server_is_current(server, &held)) {
        break_off(server, peer, REFIT_ERR_CORRUPT, "it applied other bytes than were committed");
        return;
    }
    peer->held = held;
    if (is_task(peer, held.version)) {
        rft_peer_set_want(&peer->base, rft_want_acquire(peer->sent));
        end_sharing(server, peer);
        peer->task = (rft_task){0};
    }
    if (newest) {
        rft_transaction_applied(server, peer);
    } else {
        rft_transaction_caught_up(server, peer);
    }
}

static void answer_released(rft_server *server, rft_peer *peer, const rft_message *message,
                            int64_t now)
{
    (void)server, (void)now;
    rft_peer_take_back(peer, message->as.commit.version);
}

/* Of an offer that has ended, perhaps: then it means nothing. */
static void answer_taken(rft_server *server, rft_peer *peer, const rft_message *message,
                         int64_t now)
{
    (void)now;
    uint32_t sequence = message->as.taken.sequence;
    if (!is_task(peer, message->as.taken.version)) return;
    if (sequence > peer->task.pieces_sent) {
        break_off(server, peer, REFIT_ERR_PROTOCOL, "it took pieces that it was not sent");
        return;
    }
    if (sequence > peer->task.pieces_taken) peer->task.pieces_taken = sequence;
}

/* Its base is not there after all, or is not the committed one, for example because the caller
 * wrote into it. A difference in a block that travels as the same is only found by the digests at
 * the end: CORRUPT. So is one in what it had from another worker. */
static bool has_bad_base(const rft_peer *peer, refit_status code)
{
    bool builds = peer->task.base != 0 || peer->have.count > 0;
    bool fetching = peer->task.stage == RFT_STAGE_OFFERED && builds;
    return fetching && (code == REFIT_ERR_STALE || code == REFIT_ERR_CORRUPT);
}

/* A neighbor's image is not to be had, or not what it should be: the worker receives the version
 * for itself. */
static void offer_alone(rft_server *server, rft_peer *peer, int64_t now)
{
    peer->alone = peer->task.version;
    peer->task = (rft_task){0};
    rft_server_offer(server, peer, now);
}

/* The same version once more, built on nothing. */
static void offer_whole(rft_server *server, rft_peer *peer, int64_t now)
{
    if (peer->have.count > 0) peer->alone = peer->task.version;
    peer->held = (rft_version_id){0};
    peer->task = (rft_task){0};
    rft_server_offer(server, peer, now);
}

/* It was told to apply a version that it had dropped: its STAGED was about an offer that a newer
 * version ended. */
static bool was_told_early(const rft_peer *peer, const rft_message *failed)
{
    return is_task(peer, failed->as.failed.version) && peer->task.stage != RFT_STAGE_STAGED &&
           failed->as.failed.code == REFIT_ERR_STATE && failed->as.failed.kept;
}

/* It could not map an image that was gone by then, and has been offered the version in frames
 * since.
 */
static bool was_unmapped(const rft_peer *peer, const rft_message *failed)
{
    return is_task(peer, failed->as.failed.version) && peer->task.path == REFIT_PATH_SOCKET &&
           peer->unmapped == peer->task.version && failed->as.failed.code == REFIT_ERR_UNSUPPORTED;
}

/* Told before the new offer of the version, it is fetching it; told after that, it is no longer
 * sent its frames. */
static void offer_anew(rft_server *server, rft_peer *peer, int64_t now)
{
    if (peer->task.stage == RFT_STAGE_OFFERED) return;
    server->regroup |= rft_neighbors_withdraw(peer);
    peer->task = (rft_task){0};
    rft_server_offer(server, peer, now);
}

/* Whether the worker lacks the version for a rank's sake, and can have it in a moment: once the two
 * are connected again; or once the rank, which writes a newer version, has heard that this came to
 * nothing. A version that is staged lacks nothing of a rank: then the worker's user refuses it. */
static bool lacks_a_rank(const rft_server *server, const rft_peer *peer, refit_status code)
{
    bool late = code == REFIT_ERR_STALE && peer->task.version == server->current.version;
    return rft_ranks_coordinates(server) && peer->task.stage == RFT_STAGE_OFFERED &&
           (late || code == REFIT_ERR_PEER);
}

/* It goes without the version, unless that can come another way. */
static void fail_task(rft_server *server, rft_peer *peer, refit_status code, const char *reason,
                      int64_t now)
{
    uint64_t version = peer->task.version;
    bool known = peer->retried == version; /* it fails with every beat until the rank is there */
    rft_log(known ? REFIT_LOG_DEBUG : REFIT_LOG_WARNING,
            "worker %s failed with version %" PRIu64 ": %s", peer->name, version, reason);
    /* What was lent may have come too late, and be there another way. */
    bool again = code == REFIT_ERR_STALE && peer->task.path == REFIT_PATH_CUDA_IPC;
    peer->later = lacks_a_rank(server, peer, code);
    peer->retried = peer->later ? version : 0;
    peer->failed_version = again || peer->later ? 0 : version;
    peer->task = (rft_task){0};
    /* It may have been the manifest that it had no memory for: the next offer brings it again. */
    if (code == REFIT_ERR_HOST_MEMORY) peer->has_manifest = false;
    rft_transaction_blame(server, peer, code, reason);
    if (again) rft_server_offer(server, peer, now);
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
    if (!message->as.failed.kept) peer->held = (rft_version_id){0};
    if (was_unmapped(peer, message)) {
        peer->unmapped = 0;
        return;
    }
    /* Version 0 may stand for any. */
    if (version == 0 || version == peer->image.version || (current && peer->task.share))
        server->regroup |= rft_neighbors_withdraw(peer);
    if (!current && version != 0) return;
    rft_view_print(message->as.failed.reason, reason, sizeof reason);
    if (version == 0 && peer->selects && peer->want == NULL) {
        peer->unfit = code;
        rft_text_say(peer->unfit_reason, sizeof peer->unfit_reason, "%s", reason);
        server->regroup = true;
    }
    if (current && peer->task.path == REFIT_PATH_NEIGHBOR &&
        peer->task.stage == RFT_STAGE_OFFERED) {
        rft_log(REFIT_LOG_WARNING, "worker %s receives version %" PRIu64 " for itself: %s",
                peer->name, version, reason);
        offer_alone(server, peer, now);
        return;
    }
    if (current && has_bad_base(peer, code)) {
        rft_log(REFIT_LOG_WARNING, "worker %s is sent version %" PRIu64 " whole: %s", peer->name,
                version, reason);
        offer_whole(server, peer, now);
        return;
    }
    fail_task(server, peer, code, reason, now);
}

/* A beat repeats the state that other messages reported, in case one of them was lost. */
static void answer_beat(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    (void)now;
    const rft_version_id *held = &message->as.beat.held;
    uint64_t staged = message->as.beat.staged;
    if (!peer->subscribed) return;
    peer->pieces = message->as.beat.pieces;
    bool applied = is_task(peer, held->version) && peer->task.stage == RFT_STAGE_COMMITTING;
    bool current = rft_server_is_current(server, held);
    bool ours = held->epoch == server->epoch && held->version < server->current.version;
    if (current || ours || held->version == 0) peer->held = *held;
    rft_transaction_caught_up(server, peer);
    if (applied && current) {
        peer->task = (rft_task){0};
        rft_transaction_applied(server, peer);
        return;
    }
    bool undecided =
        staged != 0 && is_task(peer, staged) && peer->task.stage < RFT_STAGE_COMMITTING;
    if (undecided || staged == 0) return;
    if (is_task(peer, staged)) {
        rft_server_send_commit(server, peer, staged);
    } else {
        answer_stray(server, peer, staged);
    }
}

/* ---- Dispatch */

typedef void (*answer_fn)(rft_server *server, rft_peer *peer, const rft_message *message,
                          int64_t now);

/* Only from a subscribed worker, except for JOIN, BEAT and BYE. NULL: a worker never sends it. */
static const answer_fn answers[RFT_MESSAGE_KINDS] = {
    [RFT_JOIN] = answer_join,           [RFT_PULL] = answer_pull,
    [RFT_RESEND] = answer_resend,       [RFT_STAGED] = answer_staged,
    [RFT_COMMITTED] = answer_committed, [RFT_RELEASED] = answer_released,
    [RFT_TAKEN] = answer_taken,         [RFT_FAILED] = answer_failed,
    [RFT_BEAT] = answer_beat,           [RFT_BYE] = answer_bye,
    [RFT_WANT] = answer_want,
};

static void answer_fetcher_bye(rft_server *server, rft_peer *peer, const rft_message *message,
                               int64_t now)
{
    (void)message, (void)now;
    lose(server, peer, REFIT_ERR_CLOSED, "it left");
}

static void answer_nothing(rft_server *server, rft_peer *peer, const rft_message *message,
                           int64_t now)
{
    (void)server, (void)peer, (void)message, (void)now;
}

/* From a worker of rank 0 that fetches here. */
static const answer_fn fetch_answers[RFT_MESSAGE_KINDS] = {
    [RFT_WANT] = answer_fetch_want, [RFT_PULL] = answer_fetch,      [RFT_RESEND] = answer_resend,
    [RFT_BEAT] = answer_nothing,    [RFT_BYE] = answer_fetcher_bye,
};

static void answer_shard(rft_server *server, rft_peer *peer, const rft_message *message,
                         int64_t now)
{
    (void)now;
    rft_ranks_take_shard(server, peer, message);
    server->regroup = true; /* workers may have waited for it */
}

static void answer_sums(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    (void)now;
    refit_error why;
    refit_status status = rft_ranks_take_sums(server, peer, message, &why);
    if (status != REFIT_OK) break_off(server, peer, status, why.text);
}

static void answer_rank_failed(rft_server *server, rft_peer *peer, const rft_message *message,
                               int64_t now)
{
    (void)now;
    rft_ranks_take_failed(server, peer, message);
}

/* From another rank. */
static const answer_fn rank_answers[RFT_MESSAGE_KINDS] = {
    [RFT_SHARD] = answer_shard,  [RFT_SUMS] = answer_sums, [RFT_FAILED] = answer_rank_failed,
    [RFT_BEAT] = answer_nothing, [RFT_BYE] = answer_bye,
};

static const answer_fn *answers_of(const rft_peer *peer)
{
    return peer->rank > 0 ? rank_answers : peer->fetches ? fetch_answers : answers;
}

static void answer_unknown_peer(rft_server *server, const rft_peer_id *from,
                                const rft_message *message)
{
    if (message->kind == RFT_BYE) return;
    rft_message_kind kind = message->kind;
    server->counts.refused += answers[kind] == NULL && rank_answers[kind] == NULL;
    rft_server_refuse(server, from, REFIT_ERR_STALE, false,
                      "this worker is not subscribed: say hello");
}

static void answer_peer(rft_server *server, rft_peer *peer, const rft_message *message, int64_t now)
{
    rft_message_kind kind = message->kind;
    answer_fn answer = answers_of(peer)[kind];
    peer->heard = now;
    if (answer == NULL) {
        char reason[80];
        snprintf(reason, sizeof reason, "a worker never says %s", rft_message_kind_name(kind));
        break_off(server, peer, REFIT_ERR_PROTOCOL, reason);
        return;
    }
    bool early = kind != RFT_JOIN && kind != RFT_BEAT && kind != RFT_BYE;
    if (early && answers_of(peer) == answers && !peer->subscribed) return;
    answer(server, peer, message, now);
}

void rft_server_message(rft_server *server, const rft_peer_id *from, const rft_message *message,
                        int64_t now)
{
    rft_peer *peer = rft_peers_find(&server->peers, from);
    if (!rft_server_admits(server, from, NULL)) {
        reject_key(server, peer, now);
        return;
    }
    if (message->kind == RFT_HELLO) {
        answer_hello(server, from, peer, message, now);
    } else if (peer == NULL) {
        answer_unknown_peer(server, from, message);
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
        reject_key(server, peer, now);
        return;
    }
    if (peer != NULL) {
        break_off(server, peer, REFIT_ERR_PROTOCOL, why->text);
        rft_transaction_evaluate(server, now);
        return;
    }
    server->counts.refused++;
    if (from->count > 0) rft_server_refuse(server, from, REFIT_ERR_PROTOCOL, false, why->text);
}

/* ---- Time */

static int64_t silence_at(const rft_server *server, const rft_peer *peer)
{
    return rft_after_ms(peer->heard, server->config->broadcast_heartbeat_timeout_ms);
}

/* Whether the others wait for a worker that does not say where its frames go: it has no room for
 * the version now, perhaps. */
static bool names_nothing(const rft_server *server, const rft_peer *peer, int64_t now)
{
    int64_t due = rft_after_ms(peer->task.asked, server->config->broadcast_heartbeat_timeout_ms);
    return peer->task.share && peer->image.version != peer->task.version && now >= due;
}

/* Whether they wait for one that does not get done: while there is time for another one. */
static bool is_slow(const rft_server *server, const rft_peer *peer, int64_t now)
{
    const rft_transaction *transaction = &server->transaction;
    int64_t half = (int64_t)server->config->broadcast_stage_timeout_ms * 500000;
    return transaction->state == RFT_TRANSACTION_STAGING && peer->image.version != 0 &&
           peer->image.version == transaction->version && !peer->image.whole &&
           now >= transaction->deadline - half;
}

static void tick_receiver(rft_server *server, rft_peer *peer, int64_t now)
{
    if (!names_nothing(server, peer, now) && !is_slow(server, peer, now)) return;
    (void)rft_neighbors_withdraw(peer);
    server->regroup = true;
}

/* Returns whether the worker was evicted. */
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
             peer->rank > 0  ? "written"
             : peer->awaited ? "applied"
                             : "staged",
             server->transaction.version);
    rft_server_evict(server, peer, REFIT_ERR_TIMEOUT, reason);
    return true;
}

/* It has said what it wants, and was offered nothing because others had not: for long enough now,
 * perhaps. */
static bool is_waiting(const rft_server *server, const rft_peer *peer)
{
    return peer->want != NULL && peer->task.stage == RFT_STAGE_NONE &&
           !rft_server_is_current(server, &peer->held);
}

void rft_server_tick(rft_server *server, int64_t now)
{
    for (uint32_t i = 0; i < server->peers.count;) {
        if (tick_peer(server, server->peers.live[i], now)) continue;
        tick_receiver(server, server->peers.live[i], now);
        i++;
    }
    for (uint32_t i = 0; now >= server->next_beat && i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        server->regroup |= is_waiting(server, peer) || peer->later;
        peer->later = false;
        if (peer->subscribed || peer->fetches || peer->rank > 0) rft_server_send_beat(server, peer);
    }
    if (now >= server->next_beat) {
        server->next_beat = rft_after_ms(now, server->config->broadcast_heartbeat_ms);
    }
    rft_transaction_evaluate(server, now);
}

int64_t rft_server_tick_at(const rft_server *server)
{
    int64_t at = server->next_beat;
    const rft_transaction *transaction = &server->transaction;
    bool staging = transaction->state == RFT_TRANSACTION_STAGING && !transaction->undecided;
    if (staging && transaction->deadline < at) at = transaction->deadline;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        const rft_peer *peer = server->peers.live[i];
        if (peer->missed) return INT64_MIN;
        if (silence_at(server, peer) < at) at = silence_at(server, peer);
        if (peer->due != 0 && peer->due < at) at = peer->due;
    }
    return at;
}

/* ---- Frames */

/* Whether frames that are served now are those that the peer is to be sent. */
static bool is_served(const rft_server *server, const rft_peer *peer)
{
    if (!rft_ranks_are_many(server)) return !peer->fetches;
    const rft_version_digests *served = rft_store_served(server->store);
    return peer->fetches && served != NULL && served->version == peer->task.version;
}

bool rft_server_wants_frames(const rft_server *server)
{
    for (uint32_t i = 0; i < server->peers.count; i++) {
        rft_peer *peer = server->peers.live[i];
        if (is_served(server, peer) && rft_peer_takes_frame(peer, server->store)) return true;
    }
    return false;
}

static rft_coding coding_for(const rft_server *server, const rft_peer *peer)
{
    if (peer->task.base == 0) return RFT_CODING_WHOLE;
    if (peer->fetches && peer->task.base != server->store->base) return RFT_CODING_WHOLE;
    if (!peer->delta) return RFT_CODING_SAME;
    bool packs = server->config->broadcast_compress != REFIT_COMPRESS_NONE && peer->zstd;
    return packs ? RFT_CODING_PACKED : RFT_CODING_SPARSE;
}

bool rft_server_next_frame(rft_server *server, rft_frame_order *out)
{
    if (server->store == NULL || !rft_server_offers_stand(server)) return false;
    for (uint32_t i = 0; i < server->peers.count; i++) {
        uint32_t at = (server->next_peer + i) % server->peers.count;
        rft_peer *peer = server->peers.live[at];
        if (!is_served(server, peer)) continue;
        if (!rft_peer_next_frame(peer, server->store, &out->sequence, &out->again)) continue;
        server->next_peer = (at + 1) % server->peers.count;
        server->counts.resent += out->again;
        out->to = peer->id;
        out->version = peer->task.version;
        out->coding = coding_for(server, peer);
        out->want = rft_want_acquire(peer->sent);
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
