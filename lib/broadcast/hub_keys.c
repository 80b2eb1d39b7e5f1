/*
 * Workers and their keys. The gate lets a connection in by its key; a key that is taken from the
 * allow list afterwards has a connection that stands. So every message is held against the list,
 * and all workers when the list changes: who is not in it is told so once, and then neither heard
 * nor spoken to. ZeroMQ cannot end one connection of many; it ends when its worker does. Until then
 * what it sends costs time, and memory if it never ends a message (channel.c).
 */
#include <stdio.h>

#include "broadcast/hub.h"

bool rft_hub_admits(const rft_hub *hub, const rft_peer_id *from)
{
    return hub->allow == NULL || rft_allow_list_has(hub->allow, from->key, NULL);
}

void rft_hub_name_key(const rft_hub *hub, rft_peer *peer)
{
    peer->key_name[0] = '\0';
    if (hub->allow != NULL) (void)rft_allow_list_has(hub->allow, peer->id.key, peer->key_name);
}

static void banish(rft_hub *hub, rft_peer *peer)
{
    char reason[RFT_SENTENCE_BYTES];
    snprintf(reason, sizeof reason, "its key (%s) is no longer in the trainer's security.allow",
             peer->key_name);
    rft_hub_refuse(hub, &peer->id, REFIT_ERR_SECURITY, true, reason);
    hub->counts.evicted++;
    rft_hub_lose(hub, peer, REFIT_ERR_SECURITY, reason);
}

void rft_hub_turn_away(rft_hub *hub, rft_peer *peer, int64_t now)
{
    hub->counts.refused++;
    if (peer == NULL) return;
    banish(hub, peer);
    rft_round_evaluate(hub, now);
}

void rft_hub_check_keys(rft_hub *hub, int64_t now)
{
    if (hub->allow == NULL) return;
    uint64_t edition = rft_allow_list_edition(hub->allow);
    if (edition == hub->keys_edition) return;
    hub->keys_edition = edition;
    for (uint32_t i = 0; i < hub->peers.count;) {
        rft_peer *peer = hub->peers.live[i];
        if (rft_hub_admits(hub, &peer->id)) {
            i++;
        } else {
            banish(hub, peer);
        }
    }
    rft_round_evaluate(hub, now);
}
