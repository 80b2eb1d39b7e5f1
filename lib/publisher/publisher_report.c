/*
 * What a publisher tells about itself: its endpoint and version, its workers, its figures. Copies
 * taken under the lock; nothing here changes anything.
 */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "publisher/publisher.h"

const char *refit_publisher_endpoint(const refit_publisher *publisher)
{
    return publisher == NULL ? NULL : rft_channel_endpoint(publisher->channel);
}

uint64_t refit_publisher_version(refit_publisher *publisher)
{
    if (publisher == NULL) return 0;
    rft_lock(&publisher->lock);
    uint64_t version = publisher->server.current.version;
    rft_unlock(&publisher->lock);
    return version;
}

refit_status refit_publisher_wait_workers(refit_publisher *publisher, uint32_t count,
                                          uint32_t timeout_ms, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "wait_workers needs a publisher");
    int64_t deadline = rft_deadline(timeout_ms);
    rft_lock(&publisher->lock);
    bool cancelled = rft_publisher_take_cancel(publisher);
    uint32_t there = rft_peers_count_subscribed(&publisher->server.peers);
    while (!cancelled && there < count && rft_ms_until(deadline) > 0) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, deadline);
        cancelled = rft_publisher_take_cancel(publisher);
        there = rft_peers_count_subscribed(&publisher->server.peers);
    }
    char gone[sizeof publisher->server.gone];
    memcpy(gone, publisher->server.gone, sizeof gone);
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(cancelled, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel ended the wait for workers");
    RFT_REFUSE_IF(there < count, error, REFIT_ERR_TIMEOUT,
                  "%" PRIu32 " of %" PRIu32 " worker%s subscribed to %s in time: %s%s", there,
                  count, count == 1 ? " has" : "s have", refit_publisher_endpoint(publisher),
                  gone[0] == '\0' ? "see whether the others run, and what they say"
                                  : "the last one lost or refused is ",
                  gone);
    return REFIT_OK;
}

/* ---- Workers */

/* Live ones first, then the lost. A worker that joins for the first time is neither; one that joins
 * anew has had its part in the version that counted on it. */
static const rft_peer *peer_at(const rft_peers *peers, uint32_t index)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        const rft_peer *peer = peers->live[i];
        if ((peer->subscribed || peer->member) && index-- == 0) return peer;
    }
    return index < peers->lost_count ? peers->lost[index] : NULL;
}

refit_status refit_publisher_worker(refit_publisher *publisher, uint32_t index,
                                    refit_worker_info *info, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || info == NULL || info->size < sizeof info->size, error,
                  REFIT_ERR_INVALID,
                  "worker needs a publisher and an info with its size filled in");
    refit_worker_info full = {0};
    rft_lock(&publisher->lock);
    const rft_peer *peer = peer_at(&publisher->server.peers, index);
    if (peer != NULL) rft_peer_describe(peer, &full);
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(peer == NULL, error, REFIT_ERR_NOT_FOUND, "there is no worker %" PRIu32, index);
    full.size = info->size;
    memcpy(info, &full, full.size < sizeof full ? full.size : sizeof full);
    return REFIT_OK;
}

/* ---- Figures */

static void stats_fill_coded(const refit_publisher *publisher, refit_stats *stats)
{
    const rft_frames_counts *coded = &publisher->coded;
    if (coded->version != publisher->server.current.version) return;
    stats->publish_sparse_blocks_last = coded->blocks.sparse;
    stats->publish_dense_blocks_last = coded->blocks.dense;
    stats->publish_changed_elements_last = coded->blocks.changed;
    stats->publish_delta_bytes_last = coded->bytes;
    stats->publish_encode_seconds_last = coded->seconds;
}

/* Called with the lock held. */
static void stats_fill(const refit_publisher *publisher, refit_stats *stats)
{
    const rft_server *server = &publisher->server;
    const rft_store *store = publisher->store;
    stats->publish_version = server->current.version;
    stats->publish_count += server->counts.committed;
    stats->publish_aborts += server->counts.aborted;
    stats->publish_sent_bytes_total += publisher->sent_bytes;
    stats->publish_resent_frames += server->counts.resent;
    stats->publish_write_seconds_last = publisher->write_seconds;
    stats->publish_stage_seconds_last = server->counts.stage_seconds;
    stats->publish_commit_seconds_last = server->counts.commit_seconds;
    stats->workers = rft_peers_count_subscribed(&server->peers);
    stats->workers_shm = rft_peers_count_path(&server->peers, REFIT_PATH_SHM);
    stats->workers_gpu = rft_peers_count_path(&server->peers, REFIT_PATH_CUDA_IPC);
    stats->publish_shm_bytes_total += server->counts.shm_bytes;
    stats->publish_gpu_bytes_total += server->counts.gpu_bytes;
    stats->publish_pinned_bytes = publisher->pinned_bytes;
    stats->publish_gpu_bytes = publisher->gpu_bytes;
    stats->workers_committed_last = server->counts.applied_last;
    stats->workers_evicted += server->counts.evicted;
    stats->messages_refused += server->counts.refused;
    stats->connections_unclaimed = publisher->connections.unclaimed;
    stats->connections_ended += publisher->connections.ended;
    stats->connections_refused += publisher->connections.refused;
    stats->connections_held_off += publisher->connections.pauses;
    if (store == NULL || store->committed.version == 0) return;
    stats->publish_bytes_last = store->manifest->payload_bytes;
    stats->publish_same_blocks_last = server->counts.same_blocks;
    stats_fill_coded(publisher, stats);
}

refit_status refit_publisher_stats(refit_publisher *publisher, refit_stats *stats,
                                   refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || stats == NULL || stats->size < sizeof stats->size, error,
                  REFIT_ERR_INVALID, "stats needs a publisher and a stats with its size filled in");
    refit_stats full = {0};
    size_t size = stats->size < sizeof full ? stats->size : sizeof full;
    memcpy(&full, stats, size);
    rft_lock(&publisher->lock);
    stats_fill(publisher, &full);
    rft_unlock(&publisher->lock);
    memcpy(stats, &full, size);
    return REFIT_OK;
}
