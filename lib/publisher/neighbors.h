/*
 * neighbors: workers of one host that have a version received once. One of them, the receiver, is
 * sent its frames, and shares the image that they go to; the others map that.
 *
 *   receiver                            another one
 *   OFFER (share) ─►                    (is offered nothing)
 *                 ◄─ PULL (image)
 *                                       OFFER (neighbor, segment) ─►     maps it
 *   frames ─►
 *   SEAL ─►
 *                 ◄─ STAGED
 *                                       SEAL ─►                          verifies
 *                                                                     ◄─ STAGED
 *
 * Neighbors are workers that say the same place with HELLO and take the version from the socket.
 * Which of them receives it is settled when it is offered: the first. Where it is lost or fails, or
 * shares nothing after all, the next one is offered the version instead, and has in the mapped
 * image what came so far. One that cannot map the image receives the version for itself.
 *
 * Knows the table of workers, and decides nothing about a transaction.
 */
#ifndef RFT_NEIGHBORS_H
#define RFT_NEIGHBORS_H

#include "publisher/peer.h"

typedef enum rft_neighbor_role {
    RFT_NEIGHBOR_NONE,     /* it has no neighbors, or does not share with them */
    RFT_NEIGHBOR_RECEIVES, /* for others, which are there */
    RFT_NEIGHBOR_WAITS,    /* another one was offered the version, and has not said where it goes */
    RFT_NEIGHBOR_MAPS,     /* another one's image */
} rft_neighbor_role;

/* What the worker does for the version. `receiver` (may be NULL) is set with MAPS: it has the
 * image. One that would receive WAITS for neighbors that have not said what they want, if they were
 * sent the manifest after `since`. */
rft_neighbor_role rft_neighbors_role(const rft_peers *peers, const rft_peer *peer, uint64_t version,
                                     int64_t since, const rft_peer **receiver);

/* What the worker and those that may map its image want together, as a new list; NULL: all of the
 * version. REFIT_ERR_HOST_MEMORY. */
refit_status rft_neighbors_want(const rft_peers *peers, const rft_peer *peer, uint64_t version,
                                rft_want **out, refit_error *error);

/* A worker of the same machine that cannot share with this one: another user's, or in another PID
 * namespace. NULL: none. */
const rft_peer *rft_neighbors_apart(const rft_peers *peers, const rft_peer *peer);

/* The image that the worker was offered for its task; NULL: it is not there any more. */
const rft_shared_image *rft_neighbors_mapped(const rft_peers *peers, const rft_peer *peer);

/* The worker's image, if it has one, is not there any more, or is not going to be: true if others
 * may have counted on it. */
bool rft_neighbors_withdraw(rft_peer *peer);

/* The path that remains is the socket's: workers offered a neighbor's image that is gone before it
 * was whole have no task any more. */
void rft_neighbors_drop_lost(rft_peers *peers);

#endif
