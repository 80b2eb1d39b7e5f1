/*
 * Workers and their keys. The gate lets a connection in by its key; a key that is taken from the
 * allow list afterwards has a connection that stands. So every message is held against the list,
 * and all workers when the list changes: who is not in it is told so once, and then neither heard
 * nor spoken to. What a worker is called follows from its key (rft_peer_name_bind). ZeroMQ cannot
 * end one connection of many; it ends when its worker does. Until then what it sends costs time,
 * and memory if it never ends a message (channel.c).
 */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "publisher/server.h"

bool rft_server_admits(const rft_server *server, const rft_peer_id *from,
                       char key_name[RFT_KEY_NAME_BYTES])
{
    if (key_name != NULL) key_name[0] = '\0';
    return server->allow == NULL || rft_allow_list_has(server->allow, from->key, key_name);
}

static void banish(rft_server *server, rft_peer *peer)
{
    char reason[RFT_SENTENCE_BYTES];
    snprintf(reason, sizeof reason, "its key (%s) is no longer in the trainer's security.allow",
             peer->key_name);
    rft_server_refuse(server, &peer->id, REFIT_ERR_SECURITY, true, reason);
    server->counts.evicted++;
    rft_server_lose(server, peer, REFIT_ERR_SECURITY, reason);
}

void rft_server_turn_away(rft_server *server, rft_peer *peer, int64_t now)
{
    server->counts.refused++;
    if (peer == NULL) return;
    banish(server, peer);
    rft_transaction_evaluate(server, now);
}

/* Its key's file has another name: so has the worker. Whoever has that name already came by the
 * same key. */
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

/* Turns it out, names it anew, or does nothing. */
static void check_key(rft_server *server, rft_peer *peer)
{
    char key_name[RFT_KEY_NAME_BYTES];
    if (!rft_server_admits(server, &peer->id, key_name))
        banish(server, peer);
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
