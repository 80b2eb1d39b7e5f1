/*
 * How workers come and go: HELLO, JOIN, BYE.
 *
 *     (unknown) ──HELLO──► greeted ──JOIN──► subscribed ──BYE, eviction──► (unknown)
 *                             ▲                  │
 *                             └──────HELLO───────┘
 *
 * A name stands for one instance at a time. The same instance with a new connection gets its place
 * back, and stays a member of the version under way; another one waits until the place is free.
 */
#include <string.h>

#include "base/log.h"
#include "broadcast/hub.h"

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
    (void)rft_hub_send(hub, peer, &message);
}

static rft_peer *admit_new(rft_hub *hub, const rft_peer_id *from, const rft_message *hello)
{
    refit_error why;
    rft_peer *peer = NULL;
    if (hub->peers.count >= hub->config->limits_workers) {
        rft_hub_refuse(hub, from, REFIT_ERR_LIMIT, false,
                       "the trainer has as many workers as limits.workers allows");
        return NULL;
    }
    if (rft_peers_add(&hub->peers, &peer, &why) != REFIT_OK) {
        rft_hub_refuse(hub, from, REFIT_ERR_HOST_MEMORY, false, why.text);
        return NULL;
    }
    rft_view_print(hello->as.hello.worker, peer->name, sizeof peer->name);
    peer->instance = hello->as.hello.instance;
    return peer;
}

/* Gives the place that the sender has, gets back, or is given now; NULL: it was refused. */
static rft_peer *admit(rft_hub *hub, const rft_peer_id *from, const rft_message *hello)
{
    rft_peer *peer = rft_peers_find_name(&hub->peers, hello->as.hello.worker);
    if (peer == NULL) return admit_new(hub, from, hello);
    if (peer->instance == hello->as.hello.instance) {
        rft_hub_reset_peer(hub, peer);
        return peer;
    }
    rft_hub_send_beat(hub, peer); /* finds out whether the other can still be reached */
    rft_hub_refuse(hub, from, REFIT_ERR_EXISTS, false,
                   "another worker has this name: give it another, or wait until that one is gone");
    return NULL;
}

void rft_hub_answer_hello(rft_hub *hub, const rft_peer_id *from, rft_peer *known,
                          const rft_message *hello, int64_t now)
{
    if (hello->as.hello.protocol != RFT_PROTOCOL) {
        hub->counts.refused++;
        rft_hub_refuse(hub, from, REFIT_ERR_PROTOCOL, true,
                       "the trainer speaks another version of the protocol");
        return;
    }
    bool renamed =
        known != NULL && known != rft_peers_find_name(&hub->peers, hello->as.hello.worker);
    if (renamed) rft_hub_lose(hub, known, REFIT_ERR_CLOSED, "its connection speaks for another");
    rft_peer *peer = admit(hub, from, hello);
    if (peer == NULL) return;
    peer->id = *from;
    peer->heard = now;
    peer->window = window_for(hub, hello->as.hello.window);
    bool ours = hello->as.hello.held.epoch == hub->epoch;
    peer->held = ours ? hello->as.hello.held : (rft_held){0};
    send_welcome(hub, peer);
}

void rft_hub_answer_join(rft_hub *hub, rft_peer *peer, const rft_message *message, int64_t now)
{
    char reason[80];
    if (peer->subscribed) return;
    if (message->as.join.epoch != hub->epoch) {
        rft_hub_refuse(hub, &peer->id, REFIT_ERR_STALE, false, "this is another trainer");
        return;
    }
    if (message->as.join.shm && (hub->probe[0] == '\0' || message->as.join.proof != hub->proof)) {
        rft_hub_break_off(hub, peer, REFIT_ERR_SECURITY, "it has no proof that it shares memory");
        return;
    }
    peer->subscribed = true;
    peer->shm = message->as.join.shm;
    rft_view_print(message->as.join.reason, reason, sizeof reason);
    rft_log(REFIT_LOG_INFO, "worker %s joins through %s%s%s", peer->name,
            peer->shm ? "shared memory" : "the socket", reason[0] == '\0' ? "" : ": ", reason);
    rft_hub_send_beat(hub, peer);
    if (rft_hub_is_current(hub, &peer->held)) rft_round_applied(hub, peer);
    rft_hub_offer(hub, peer, now);
}

void rft_hub_answer_bye(rft_hub *hub, rft_peer *peer, const rft_message *message, int64_t now)
{
    char reason[160];
    (void)now;
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    rft_hub_lose(hub, peer, REFIT_ERR_CLOSED, reason[0] == '\0' ? "it left" : reason);
}
