/*
 * refit_publisher_shard: a publisher becomes one of several (ranks.h).
 *
 * The store of before has all of the tensors, or another shard: a new one takes its place, with the
 * same list of tensors. Then this rank joins rank 0, or rank 0 waits for the others. The service
 * thread speaks; the caller's waits here.
 */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"
#include "publisher/publisher.h"
#include "wire/selection.h"

/* The list of tensors once more, for a store of its own. */
static refit_status copy_manifest(const refit_publisher *publisher, rft_manifest **out,
                                  refit_error *error)
{
    rft_limits limits = publisher->server.limits;
    limits.memory_bytes = 0; /* this rank has a part of it */
    return rft_manifest_decode(rft_bytes_view(&publisher->store->manifest->encoded),
                               publisher->config.broadcast_frame_bytes, &limits, out, error);
}

/* The boxes as bytes of the tensors. */
static refit_status resolve_shard(const refit_publisher *publisher, const refit_shards *shards,
                                  rft_want **out, refit_error *error)
{
    const char *missing = NULL;
    rft_selection *selection = NULL;
    const rft_manifest *manifest = publisher->store->manifest;
    if (shards->count == 0) return rft_want_open(manifest, (rft_view){0}, out, error);
    RFT_TRY(rft_selection_open(shards->list, shards->count, &selection, error));
    refit_status status = rft_selection_resolve(selection, manifest, out, &missing, error);
    if (status == REFIT_OK && missing != NULL) {
        rft_want_release(*out);
        status = rft_fail(error, REFIT_ERR_INVALID,
                          "a shard is of \"%.80s\", which was not declared", missing);
    }
    rft_selection_close(selection);
    return status;
}

/* A store of these tensors, or of a shard of them. Takes the manifest, on failure too. */
static refit_status open_store(refit_publisher *publisher, rft_manifest *manifest, rft_want *shard,
                               rft_store **store, refit_error *error)
{
    uint32_t slots = publisher->config.broadcast_slots;
    if (shard != NULL)
        return rft_store_open_shard(manifest, shard, slots, &publisher->retired, store, error);
    return rft_store_open(manifest, slots, publisher->probe.memory != NULL, &publisher->retired,
                          store, error);
}

static refit_status make_store(refit_publisher *publisher, const refit_shards *shards,
                               rft_store **store, rft_frames **frames, refit_error *error)
{
    rft_want *shard = NULL, *own = NULL;
    rft_manifest *manifest = NULL;
    if (shards->ranks > 1) RFT_TRY(resolve_shard(publisher, shards, &shard, error));
    refit_status status = copy_manifest(publisher, &manifest, error);
    if (status == REFIT_OK && shard != NULL)
        status = rft_want_open(manifest, rft_bytes_view(&shard->encoded), &own, error);
    rft_want_release(shard);
    if (status != REFIT_OK) {
        rft_manifest_close(manifest);
        return status;
    }
    status = open_store(publisher, manifest, own, store, error);
    rft_want_release(own);
    if (status != REFIT_OK) return status;
    status = rft_frames_open((*store)->manifest, &publisher->config, &publisher->encoders, frames,
                             error);
    if (status != REFIT_OK) rft_store_close(*store);
    return status;
}

/* Whether the wait is over. A rank that is gone again may come back, and so may rank 0, unless it
 * has refused this one for good. */
static bool is_settled(const rft_ranks *ranks)
{
    refit_status failure = (refit_status)ranks->failure.status;
    bool refused = ranks->rank > 0 && ranks->link.state == RFT_LINK_OFF;
    if (failure == REFIT_ERR_PEER && !refused) failure = REFIT_OK;
    return ranks->complete || failure != REFIT_OK;
}

/* Waits until all ranks are there. Called with the lock held. */
static refit_status await_ranks(refit_publisher *publisher, int64_t deadline, refit_error *error)
{
    char missing[80];
    const rft_ranks *ranks = &publisher->server.ranks;
    bool cancelled = rft_publisher_take_cancel(publisher);
    while (!cancelled && !is_settled(ranks) && rft_ms_until(deadline) > 0) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, deadline);
        cancelled = rft_publisher_take_cancel(publisher);
    }
    RFT_REFUSE_IF(cancelled, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel ended the wait for the other ranks");
    if (ranks->complete) return REFIT_OK;
    RFT_REFUSE_IF(is_settled(ranks), error, (refit_status)ranks->failure.status, "%s",
                  ranks->failure.text);
    RFT_REFUSE_IF(ranks->rank > 0, error, REFIT_ERR_TIMEOUT,
                  "rank 0 at %s has not said that all ranks are there: %s", ranks->link.endpoint,
                  ranks->link.why.status != REFIT_OK ? ranks->link.why.text
                                                     : "it does not answer, or others are missing");
    rft_ranks_list_missing(&publisher->server, missing, sizeof missing);
    return rft_fail(error, REFIT_ERR_TIMEOUT,
                    "not all of %" PRIu32 " ranks have joined %s: %s missing", ranks->count,
                    refit_publisher_endpoint(publisher), missing);
}

static refit_status check_shards(const refit_publisher *publisher, const refit_shards *shards,
                                 refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || shards == NULL || shards->size < sizeof *shards, error,
                  REFIT_ERR_INVALID, "shard needs a publisher and shards with their size set");
    RFT_REFUSE_IF(shards->ranks == 0 || shards->ranks > RFT_RANKS_MOST ||
                      shards->rank >= shards->ranks,
                  error, REFIT_ERR_INVALID,
                  "rank %" PRIu32 " of %" PRIu32 ": there are 1 to %u ranks, from 0 on",
                  shards->rank, shards->ranks, RFT_RANKS_MOST);
    RFT_REFUSE_IF(shards->rank > 0 && (shards->coordinator == NULL ||
                                       strlen(shards->coordinator) >= RFT_ENDPOINT_BYTES),
                  error, REFIT_ERR_INVALID, "rank %" PRIu32 " needs the endpoint of rank 0",
                  shards->rank);
    RFT_REFUSE_IF(shards->count > 0 && shards->list == NULL, error, REFIT_ERR_INVALID,
                  "%" PRIu32 " shards, and no list of them", shards->count);
    RFT_REFUSE_IF(publisher->config.broadcast_gpu == REFIT_GPU_REQUIRE && shards->ranks > 1, error,
                  REFIT_ERR_UNSUPPORTED,
                  "broadcast.gpu is require, and shards are not read in a GPU's memory");
    return REFIT_OK;
}

refit_status refit_publisher_shard(refit_publisher *publisher, const refit_shards *shards,
                                   uint32_t timeout_ms, refit_error *error)
{
    rft_store *store = NULL;
    rft_frames *frames = NULL;
    uint64_t instance = 0;
    int64_t deadline = rft_deadline(timeout_ms);
    RFT_TRY(check_shards(publisher, shards, error));
    RFT_TRY(rft_publisher_check_idle(publisher, error));
    RFT_REFUSE_IF(publisher->store == NULL, error, REFIT_ERR_STATE,
                  "declare all tensors before saying which shard of them is this rank's");
    if (shards->rank > 0) RFT_TRY(rft_random_u64(&instance, error));
    RFT_TRY(make_store(publisher, shards, &store, &frames, error));
    rft_publisher_adopt(publisher, store, frames);
    if (shards->ranks == 1) return REFIT_OK;
    rft_lock(&publisher->lock);
    refit_status status = rft_ranks_open(&publisher->server, shards->rank, shards->ranks, error);
    if (status == REFIT_OK && shards->rank > 0)
        rft_rank_link_open(&publisher->server, shards->coordinator, instance, rft_now());
    rft_wake_fd_set(publisher->wake);
    if (status == REFIT_OK) status = await_ranks(publisher, deadline, error);
    rft_unlock(&publisher->lock);
    return status;
}
