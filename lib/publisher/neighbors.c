/*
 * The roles follow from what the workers were offered and have said; nothing else is kept. A host
 * has few workers, and each is looked at once for each of the others when a version is offered.
 */
#include "publisher/neighbors.h"

#include <string.h>

static bool are_neighbors(const rft_peer *one, const rft_peer *other)
{
    return one != other && other->subscribed && one->place[0] != '\0' &&
           strcmp(one->place, other->place) == 0;
}

static bool is_offered(const rft_peer *peer, uint64_t version)
{
    return peer->task.stage == RFT_STAGE_OFFERED && peer->task.version == version;
}

static bool is_receiving(const rft_peer *peer, uint64_t version)
{
    return is_offered(peer, version) && peer->task.share;
}

/* It may want the version, and map what another one receives. */
static bool may_map(const rft_peer *peer, uint64_t version)
{
    bool fetches = is_offered(peer, version) && peer->task.path == REFIT_PATH_SOCKET;
    return !peer->shm && !peer->gpu && !fetches && peer->unfit == REFIT_OK &&
           peer->held.version != version && peer->alone != version &&
           peer->failed_version != version;
}

/* It wants a part, has not said which, and was asked a moment ago. */
static bool is_asked(const rft_peer *peer, int64_t since)
{
    return peer->selects && peer->want == NULL && peer->has_manifest && peer->manifest_at > since;
}

static bool has_image_for(const rft_peer *receiver, const rft_peer *peer, uint64_t version)
{
    return receiver->image.version == version &&
           rft_want_includes(receiver->image.want, peer->want);
}

rft_neighbor_role rft_neighbors_role(const rft_peers *peers, const rft_peer *peer, uint64_t version,
                                     int64_t since, const rft_peer **receiver)
{
    rft_neighbor_role role = RFT_NEIGHBOR_NONE;
    bool waits = false;
    if (peer->place[0] == '\0' || peer->alone == version) return role;
    for (uint32_t i = 0; i < peers->count; i++) {
        const rft_peer *other = peers->live[i];
        if (!are_neighbors(peer, other)) continue;
        if (has_image_for(other, peer, version)) {
            if (receiver != NULL) *receiver = other;
            return RFT_NEIGHBOR_MAPS;
        }
        waits = waits || is_asked(other, since);
        if (is_receiving(other, version) && rft_want_includes(other->sent, peer->want)) {
            role = RFT_NEIGHBOR_WAITS;
        } else if (role == RFT_NEIGHBOR_NONE && may_map(other, version)) {
            role = RFT_NEIGHBOR_RECEIVES;
        }
    }
    return role == RFT_NEIGHBOR_RECEIVES && waits ? RFT_NEIGHBOR_WAITS : role;
}

/* Adds what a worker wants to what others want; NULL stands for everything. */
static refit_status add_want(const rft_manifest *manifest, rft_want **all, const rft_want *more,
                             refit_error *error)
{
    rft_bytes list = {0};
    rft_want *merged = NULL;
    refit_status status = REFIT_OK;
    if (*all == NULL || rft_want_includes(*all, more)) return REFIT_OK;
    if (more != NULL) {
        status = rft_want_merge(*all, more, &list, error);
        if (status == REFIT_OK)
            status = rft_want_open(manifest, rft_bytes_view(&list), &merged, error);
    }
    rft_bytes_close(&list);
    if (status != REFIT_OK) return status;
    rft_want_release(*all);
    *all = merged;
    return REFIT_OK;
}

refit_status rft_neighbors_want(const rft_peers *peers, const rft_peer *peer, uint64_t version,
                                rft_want **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    rft_want *all = rft_want_acquire(peer->want);
    for (uint32_t i = 0; all != NULL && status == REFIT_OK && i < peers->count; i++) {
        const rft_peer *other = peers->live[i];
        if (are_neighbors(peer, other) && may_map(other, version))
            status = add_want(all->manifest, &all, other->want, error);
    }
    if (status != REFIT_OK) {
        rft_want_release(all);
        return status;
    }
    *out = all;
    return REFIT_OK;
}

const rft_peer *rft_neighbors_apart(const rft_peers *peers, const rft_peer *peer)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        const rft_peer *other = peers->live[i];
        bool apart = other->subscribed && strcmp(other->place, peer->place) != 0 &&
                     rft_segment_place_is_near(peer->place, other->place);
        if (apart) return other;
    }
    return NULL;
}

const rft_shared_image *rft_neighbors_mapped(const rft_peers *peers, const rft_peer *peer)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        const rft_shared_image *image = &peers->live[i]->image;
        bool same =
            image->version == peer->task.version && strcmp(image->segment, peer->task.segment) == 0;
        if (same && are_neighbors(peer, peers->live[i])) return image;
    }
    return NULL;
}

bool rft_neighbors_withdraw(rft_peer *peer)
{
    bool counted_on = peer->image.version != 0 || peer->task.share;
    rft_want_release(peer->image.want);
    peer->image = (rft_shared_image){0};
    peer->task.share = false;
    return counted_on;
}

void rft_neighbors_drop_lost(rft_peers *peers)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        rft_peer *peer = peers->live[i];
        bool maps = peer->task.stage == RFT_STAGE_OFFERED &&
                    peer->task.path == REFIT_PATH_NEIGHBOR && !peer->task.sealed;
        if (!maps) continue;
        if (rft_neighbors_mapped(peers, peer) != NULL) continue;
        peer->unmapped = peer->task.version;
        peer->task = (rft_task){0};
    }
}
