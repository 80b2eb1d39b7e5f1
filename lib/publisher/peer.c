/*
 * The table of workers. It is small and searched from end to end; the most frequent search, for the
 * sender of a message, compares eight bytes.
 *
 * The lost are kept until the next version begins, so that a report can name them. Their room is
 * taken when they come, not when they go: evicting a worker must never fail.
 */
#include "publisher/peer.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"

static bool is_bound(const char *key_name, const char *own_name)
{
    size_t length = strlen(key_name);
    if (length == 0) return true;
    if (strncmp(own_name, key_name, length) != 0) return false;
    return own_name[length] == '\0' || own_name[length] == RFT_PEER_NAME_MARK;
}

/* The last bytes of a text, at most `most`, from the beginning of a character on. */
static const char *tail_of(const char *text, size_t most)
{
    size_t length = strlen(text);
    if (length > most) text += length - most;
    while (((unsigned char)*text & 0xc0) == 0x80)
        text++;
    return text;
}

void rft_peer_name_bind(const char *key_name, const char *own_name, char name[RFT_PEER_NAME_BYTES])
{
    size_t room = RFT_PEER_NAME_BYTES - 1 - strlen(key_name);
    if (is_bound(key_name, own_name)) {
        strcpy(name, own_name);
    } else if (room < 2) {
        strcpy(name, key_name);
    } else {
        snprintf(name, RFT_PEER_NAME_BYTES, "%s%c%s", key_name, RFT_PEER_NAME_MARK,
                 tail_of(own_name, room - 1));
    }
}

void rft_peer_set_want(rft_want **place, rft_want *want)
{
    rft_want_release(*place);
    *place = want;
}

void rft_peer_drop_wants(rft_peer *peer)
{
    peer->unfit = REFIT_OK;
    rft_peer_set_want(&peer->want, NULL);
    rft_peer_set_want(&peer->sent, NULL);
    rft_peer_set_want(&peer->base, NULL);
}

static void peer_free(rft_peer *peer)
{
    rft_peer_drop_wants(peer);
    rft_want_release(peer->image.want);
    rft_bytes_close(&peer->have);
    rft_bytes_close(&peer->rows);
    rft_free(peer);
}

void rft_peers_close(rft_peers *peers)
{
    rft_peers_forget_lost(peers);
    while (peers->count > 0) {
        peer_free(peers->live[--peers->count]);
    }
    rft_free(peers->live);
    rft_free(peers->lost);
    *peers = (rft_peers){0};
}

rft_peer *rft_peers_find(const rft_peers *peers, const rft_peer_id *id)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        if (rft_peer_id_equal(&peers->live[i]->id, id)) return peers->live[i];
    }
    return NULL;
}

rft_peer *rft_peers_find_name(const rft_peers *peers, const char *name)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        if (strcmp(peers->live[i]->name, name) == 0) return peers->live[i];
    }
    return NULL;
}

uint32_t rft_peers_count_subscribed(const rft_peers *peers)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < peers->count; i++) {
        count += peers->live[i]->subscribed;
    }
    return count;
}

uint32_t rft_peers_count_path(const rft_peers *peers, refit_path path)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < peers->count; i++) {
        count += peers->live[i]->subscribed && peers->live[i]->path == path;
    }
    return count;
}

static bool list_reserve(rft_peer ***list, uint32_t *room, uint32_t needed)
{
    if (needed <= *room) return true;
    uint32_t larger = needed + needed / 2 + 4;
    rft_peer **grown = rft_realloc(*list, larger, sizeof *grown);
    if (grown == NULL) return false;
    *list = grown;
    *room = larger;
    return true;
}

refit_status rft_peers_add(rft_peers *peers, rft_peer **out, refit_error *error)
{
    uint32_t all = peers->count + peers->lost_count + 1;
    bool room = list_reserve(&peers->live, &peers->room, peers->count + 1) &&
                list_reserve(&peers->lost, &peers->lost_room, all);
    rft_peer *peer = room ? rft_calloc(1, sizeof *peer) : NULL;
    RFT_REFUSE_IF(peer == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for another worker");
    peers->live[peers->count++] = peer;
    *out = peer;
    return REFIT_OK;
}

static void list_remove(rft_peer **list, uint32_t *count, const rft_peer *peer)
{
    uint32_t at = 0;
    while (list[at] != peer) {
        at++;
    }
    memmove(&list[at], &list[at + 1], (*count - at - 1) * sizeof list[0]);
    --*count;
}

static void forget_one(rft_peers *peers, rft_peer *lost)
{
    list_remove(peers->lost, &peers->lost_count, lost);
    peer_free(lost);
}

/* A worker that comes and goes all the time while no version begins is remembered once. Members are
 * not forgotten: the report of the version names them. */
static void make_room(rft_peers *peers, const char *name)
{
    rft_peer *oldest = NULL;
    for (uint32_t i = 0; i < peers->lost_count; i++) {
        rft_peer *lost = peers->lost[i];
        if (lost->member) continue;
        if (strcmp(lost->name, name) == 0) {
            forget_one(peers, lost);
            return;
        }
        if (oldest == NULL) oldest = lost;
    }
    if (peers->lost_count >= RFT_LOST_MOST && oldest != NULL) forget_one(peers, oldest);
}

void rft_peers_lose(rft_peers *peers, rft_peer *peer)
{
    list_remove(peers->live, &peers->count, peer);
    make_room(peers, peer->name);
    peer->subscribed = false;
    peers->lost[peers->lost_count++] = peer;
}

void rft_peers_drop(rft_peers *peers, rft_peer *peer)
{
    list_remove(peers->live, &peers->count, peer);
    peer_free(peer);
}

void rft_peers_forget_lost(rft_peers *peers)
{
    while (peers->lost_count > 0) {
        peer_free(peers->lost[--peers->lost_count]);
    }
}

refit_path rft_peer_reads(const rft_peer *peer, uint64_t version)
{
    for (uint32_t i = 0; version != 0 && i < RFT_SLOTS_MOST; i++) {
        if (peer->lends[i].version == version) return peer->lends[i].path;
    }
    return REFIT_PATH_NONE;
}

/* A worker has at most one open update for each slot: a third would take the place of one whose
 * slot was renewed. */
void rft_peer_lend(rft_peer *peer, uint64_t version, refit_path path)
{
    if (rft_peer_reads(peer, version) != REFIT_PATH_NONE) return;
    uint32_t oldest = peer->lends[1].version < peer->lends[0].version ? 1 : 0;
    peer->lends[oldest] = (rft_lend){version, path};
}

void rft_peer_take_back(rft_peer *peer, uint64_t version)
{
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++) {
        if (peer->lends[i].version == version) peer->lends[i] = (rft_lend){0};
    }
}

bool rft_path_reads_slot(refit_path path)
{
    return path == REFIT_PATH_SHM || path == REFIT_PATH_CUDA_IPC;
}

static bool has_frame(const rft_peer *peer, uint32_t sequence)
{
    const unsigned char *bits = peer->have.data;
    if (rft_want_frame(peer->sent, sequence) == RFT_WANT_NONE) return true;
    return sequence / 8 < peer->have.count && (bits[sequence / 8] >> sequence % 8 & 1) != 0;
}

bool rft_peer_takes_frame(rft_peer *peer, const rft_store *store)
{
    rft_task *task = &peer->task;
    bool open = task->stage == RFT_STAGE_OFFERED && task->path == REFIT_PATH_SOCKET;
    if (!open || task->credits <= 0) return false;
    while (task->cursor < store->ready_count && has_frame(peer, store->ready[task->cursor]))
        task->cursor++;
    return task->cursor < store->ready_count;
}

bool rft_peer_next_frame(rft_peer *peer, const rft_store *store, uint32_t *sequence, bool *again)
{
    rft_task *task = &peer->task;
    bool open = task->stage == RFT_STAGE_OFFERED && task->path == REFIT_PATH_SOCKET;
    *again = open && task->resend_count > 0;
    if (*again) {
        *sequence = task->resend[0];
        memmove(task->resend, task->resend + 1, --task->resend_count * sizeof task->resend[0]);
        return true;
    }
    if (!rft_peer_takes_frame(peer, store)) return false;
    task->credits -= RFT_CREDIT;
    *sequence = store->ready[task->cursor++];
    return true;
}

void rft_peer_refund(rft_peer *peer, uint64_t payload, uint64_t bytes)
{
    peer->task.credits += RFT_CREDIT - rft_credit_cost(payload, bytes);
}

void rft_peer_describe(const rft_peer *peer, refit_worker_info *info)
{
    memcpy(info->name, peer->name, sizeof info->name);
    info->path = peer->subscribed ? peer->path : REFIT_PATH_NONE;
    info->version = peer->held.version;
    info->subscribed = peer->subscribed;
    info->member = peer->member;
    info->committed = peer->committed;
    info->status = peer->status;
    memcpy(info->reason, peer->reason, sizeof info->reason);
}
