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
    return !peer->shm && !peer->gpu && !fetches && peer->held.version != version &&
           peer->alone != version && peer->failed_version != version;
}

rft_neighbor_role rft_neighbors_role(const rft_peers *peers, const rft_peer *peer, uint64_t version,
                                     const rft_shared_image **image)
{
    rft_neighbor_role role = RFT_NEIGHBOR_NONE;
    if (peer->place[0] == '\0' || peer->alone == version) return role;
    for (uint32_t i = 0; i < peers->count; i++) {
        const rft_peer *other = peers->live[i];
        if (!are_neighbors(peer, other)) continue;
        if (other->image.version == version) {
            if (image != NULL) *image = &other->image;
            return RFT_NEIGHBOR_MAPS;
        }
        if (is_receiving(other, version)) {
            role = RFT_NEIGHBOR_WAITS;
        } else if (role == RFT_NEIGHBOR_NONE && may_map(other, version)) {
            role = RFT_NEIGHBOR_RECEIVES;
        }
    }
    return role;
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

bool rft_neighbors_withdraw(rft_peer *peer)
{
    bool counted_on = peer->image.version != 0 || peer->task.share;
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
        const rft_shared_image *image = NULL;
        bool there =
            rft_neighbors_role(peers, peer, peer->task.version, &image) == RFT_NEIGHBOR_MAPS &&
            strcmp(image->segment, peer->task.segment) == 0;
        if (there) continue;
        peer->unmapped = peer->task.version;
        peer->task = (rft_task){0};
    }
}
