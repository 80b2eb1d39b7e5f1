/*
 * Rank 0's table of the ranks, and what it says to them.
 *
 * Shards are held against each other once the last rank has said which one it has. The digests of a
 * version are sums to which each rank adds what it has (wire/shard.h); they are finished when the
 * last part has come, and that is when the version is sealed.
 */
#include "publisher/ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/text.h"
#include "kernels/digest.h"
#include "publisher/server.h"

bool rft_ranks_are_many(const rft_server *server)
{
    return server->ranks.count > 0;
}

bool rft_ranks_coordinates(const rft_server *server)
{
    return server->ranks.count > 0 && server->ranks.rank == 0;
}

bool rft_ranks_follows(const rft_server *server)
{
    return server->ranks.count > 0 && server->ranks.rank > 0;
}

/* What rank 0 knows of the peer, if that is one of the ranks. */
static rft_rank *rank_of(const rft_server *server, const rft_peer *peer)
{
    bool known =
        rft_ranks_coordinates(server) && peer->rank > 0 && peer->rank < server->ranks.count;
    rft_rank *rank = known ? &server->ranks.list[peer->rank] : NULL;
    return rank != NULL && rank->peer == peer ? rank : NULL;
}

/* ---- Opening and closing */

/* Workers and ranks join once more. A rank that has joined since may know already how the tensors
 * are divided now, and comes by itself; the others have to hear that from their users first. */
static void dismiss(rft_server *server)
{
    static const char reason[] = "rank 0 has divided the tensors anew, or not at all";
    for (uint32_t i = server->peers.count; i-- > 0;) {
        rft_peer *peer = server->peers.live[i];
        const rft_rank *rank = rank_of(server, peer);
        bool divided = rank != NULL && rank->instance == peer->instance;
        if (peer->subscribed || peer->rank > 0)
            rft_server_refuse(server, &peer->id, REFIT_ERR_STALE, divided, reason);
        if (peer->rank > 0) rft_peers_drop(&server->peers, peer);
    }
}

/* What is served from now on is numbered by this publisher. */
static void take_back_epoch(rft_server *server)
{
    rft_rank_link *link = &server->ranks.link;
    if (link->epoch == 0) return;
    server->epoch = link->own_epoch;
    server->current = (rft_version_id){.epoch = server->epoch};
    link->epoch = 0;
}

void rft_ranks_close(rft_server *server)
{
    rft_ranks *ranks = &server->ranks;
    uint64_t edition = ranks->edition;
    if (ranks->count > 0) dismiss(server);
    rft_rank_link_leave(server, "it has no shard of these tensors any more");
    take_back_epoch(server);
    rft_rank_link link = ranks->link;
    for (uint32_t i = 0; ranks->list != NULL && i < ranks->count; i++) {
        rft_want_release(ranks->list[i].shard);
        rft_want_release(ranks->list[i].agreed);
    }
    rft_free(ranks->list);
    rft_free(ranks->sums);
    rft_bytes_close(&ranks->words);
    *ranks = (rft_ranks){.link = link, .edition = edition};
}

refit_status rft_ranks_open(rft_server *server, uint32_t rank, uint32_t count, refit_error *error)
{
    rft_ranks *ranks = &server->ranks;
    rft_ranks_close(server);
    if (rank == 0) {
        ranks->list = rft_calloc(count, sizeof *ranks->list);
        ranks->sums = rft_calloc(server->store->manifest->count, sizeof *ranks->sums);
        if (ranks->list == NULL || ranks->sums == NULL) {
            rft_ranks_close(server);
            return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for %" PRIu32 " ranks", count);
        }
        ranks->list[0].shard = rft_want_acquire(server->store->shard);
    }
    ranks->count = count;
    ranks->rank = rank;
    for (uint32_t i = 0; i < server->peers.count; i++) { /* no single memory has a version */
        server->peers.live[i]->shm = false;
        server->peers.live[i]->gpu = false;
    }
    if (rank > 0) { /* rank 0 numbers the versions */
        server->transaction.last = 0;
        server->current = (rft_version_id){0};
    }
    return REFIT_OK;
}

static bool is_open(const rft_server *server, uint64_t version)
{
    const rft_transaction *transaction = &server->transaction;
    return transaction->version == version && (transaction->state == RFT_TRANSACTION_WRITING ||
                                               transaction->state == RFT_TRANSACTION_STAGING);
}

/* ---- Joining */

void rft_ranks_list_missing(const rft_server *server, char *text, size_t room)
{
    size_t used = 0;
    uint32_t more = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < server->ranks.count; i++) {
        if (server->ranks.list[i].shard != NULL) continue;
        if (used + 24 > room) {
            more++;
            continue;
        }
        used += (size_t)snprintf(text + used, room - used, "%s%" PRIu32, used == 0 ? "" : ", ", i);
    }
    if (more > 0) (void)snprintf(text + used, room - used, " and %" PRIu32 " more", more);
}

/* To a rank that has joined, or to all: that every shard is there. */
static void welcome(rft_server *server, rft_peer *peer)
{
    rft_message message = {.kind = RFT_SHARD};
    message.as.shard.epoch = server->epoch;
    message.as.shard.manifest = server->store->manifest->digest;
    message.as.shard.ranks = server->ranks.count;
    (void)rft_server_send(server, peer, &message);
}

static void tell_begin(rft_server *server, rft_peer *peer)
{
    const rft_manifest *manifest = server->store->manifest;
    rft_message message = {.kind = RFT_OFFER};
    message.as.offer.epoch = server->epoch;
    message.as.offer.version = server->transaction.version;
    message.as.offer.manifest = manifest->digest;
    message.as.offer.bytes = manifest->payload_bytes;
    message.as.offer.frames = manifest->frame_count;
    message.as.offer.deadline_ms = UINT32_MAX;
    message.as.offer.ranks = server->ranks.count;
    (void)rft_server_send(server, peer, &message);
}

static void each_rank(rft_server *server, void (*tell)(rft_server *server, rft_peer *peer))
{
    for (uint32_t i = 1; i < server->ranks.count; i++) {
        if (server->ranks.list[i].peer != NULL) tell(server, server->ranks.list[i].peer);
    }
}

static void refuse_failure(rft_server *server, rft_peer *peer)
{
    const refit_error *why = &server->ranks.failure;
    rft_server_refuse(server, &peer->id, (refit_status)why->status, true, why->text);
}

static refit_status check_shards(const rft_server *server, refit_error *error)
{
    const rft_ranks *ranks = &server->ranks;
    rft_want **shards = rft_calloc(ranks->count, sizeof *shards);
    RFT_REFUSE_IF(shards == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to compare the shards of %" PRIu32 " ranks", ranks->count);
    for (uint32_t i = 0; i < ranks->count; i++)
        shards[i] = ranks->list[i].shard;
    refit_status status = rft_shards_check(server->store->manifest, shards, ranks->count, error);
    rft_free(shards);
    return status;
}

/* Whether they are the tensors, once the last shard has come. */
static void compare(rft_server *server)
{
    rft_ranks *ranks = &server->ranks;
    for (uint32_t i = 0; i < ranks->count; i++) {
        if (ranks->list[i].shard == NULL) return;
    }
    ranks->edition++;
    ranks->complete = check_shards(server, &ranks->failure) == REFIT_OK;
    if (!ranks->complete) {
        each_rank(server, refuse_failure);
        return;
    }
    for (uint32_t i = 0; i < ranks->count; i++) {
        rft_rank *rank = &ranks->list[i];
        if (rank->agreed == NULL && rank->peer != NULL) rank->instance = rank->peer->instance;
        rft_want_release(rank->agreed);
        rank->agreed = rft_want_acquire(rank->shard);
    }
    ranks->failure.status = REFIT_OK;
    each_rank(server, welcome);
}

/* The sender's shard, if it can be; `*want` NULL: not all of it has come. */
static refit_status read_shard(rft_server *server, rft_peer *peer, const rft_message *shard,
                               rft_want **want, refit_error *error)
{
    bool whole;
    RFT_REFUSE_IF(!rft_ranks_coordinates(server), error, REFIT_ERR_STATE,
                  "the publisher that is to be rank 0 has not said that there are several "
                  "(refit_publisher_shard)");
    RFT_REFUSE_IF(shard->as.shard.ranks != server->ranks.count ||
                      shard->as.shard.rank != peer->rank || peer->rank >= server->ranks.count,
                  error, REFIT_ERR_INVALID,
                  "rank %" PRIu32 " of %" PRIu32 " joins, and rank 0 has %" PRIu32 " ranks",
                  peer->rank, shard->as.shard.ranks, server->ranks.count);
    const rft_manifest *manifest = server->store->manifest;
    RFT_REFUSE_IF(!rft_digest128_equal(&manifest->digest, &shard->as.shard.manifest), error,
                  REFIT_ERR_INVALID,
                  "rank %" PRIu32 " has declared other tensors than rank 0: names, types, shapes "
                  "and their order must be the same",
                  peer->rank);
    const rft_want_slice slice = {
        .from = shard->as.shard.from, .more = shard->as.shard.more, .rows = shard->as.shard.rows};
    RFT_TRY(rft_want_slice_add(&peer->rows, &slice, &server->limits, &whole, error));
    return whole ? rft_want_open(manifest, rft_bytes_view(&peer->rows), want, error) : REFIT_OK;
}

/* Another process has taken the rank's place, or it has another shard: the version under way was
 * not written to that. */
static void doom_replaced(rft_server *server, const rft_rank *rank, const rft_peer *peer,
                          const rft_want *shard)
{
    char text[RFT_SENTENCE_BYTES];
    bool replaced = rank->peer != NULL && rank->peer != peer;
    bool changed = rank->shard != NULL && !rft_want_equal(rank->shard, shard);
    if (!replaced && !changed) return;
    rft_text_say(text, sizeof text, "rank %" PRIu32 " has joined anew, without the version",
                 peer->rank);
    rft_transaction_doom(server, REFIT_ERR_PEER, text);
}

/* Whether the shards were not the tensors: only rank 0's user can begin once more. */
static bool has_failed(const rft_ranks *ranks)
{
    return ranks->failure.status != REFIT_OK && ranks->failure.status != REFIT_ERR_PEER;
}

/* Whether the tensors are divided anew by a rank that is faster than rank 0: it waits for that. So
 * it does where they were divided in a way that cannot be. */
static bool is_early(const rft_ranks *ranks, const rft_rank *rank, const rft_want *want)
{
    return has_failed(ranks) || (rank->agreed != NULL && !rft_want_equal(rank->agreed, want));
}

void rft_ranks_take_shard(rft_server *server, rft_peer *peer, const rft_message *shard)
{
    refit_error why;
    rft_want *want = NULL;
    refit_status status = read_shard(server, peer, shard, &want, &why);
    if (status != REFIT_OK) {
        rft_server_refuse(server, &peer->id, status, false, why.text);
        return;
    }
    if (want == NULL) return;
    rft_ranks *ranks = &server->ranks;
    rft_rank *rank = &ranks->list[peer->rank];
    if (is_early(ranks, rank, want)) {
        rft_want_release(want);
        rft_server_refuse(server, &peer->id, REFIT_ERR_STATE, false,
                          "rank 0 has to say once more which shard it has");
        return;
    }
    bool known = rank->peer == peer && rank->shard != NULL && rft_want_equal(rank->shard, want);
    bool again = known && ranks->complete;
    doom_replaced(server, rank, peer, want);
    rft_want_release(rank->shard);
    rank->shard = want;
    rank->peer = peer;
    rank->held = shard->as.shard.held;
    rft_view_print(shard->as.shard.endpoint, rank->endpoint, sizeof rank->endpoint);
    if (again) {
        welcome(server, peer);
        if (is_open(server, server->transaction.version)) tell_begin(server, peer);
        return;
    }
    ranks->complete = false;
    if (!known)
        rft_log(REFIT_LOG_INFO, "rank %" PRIu32 " of %" PRIu32 " joins, at %s", peer->rank,
                ranks->count, rank->endpoint);
    compare(server);
}

/* ---- Losing one */

void rft_ranks_lose(rft_server *server, rft_peer *peer, refit_status status, const char *reason)
{
    char text[RFT_SENTENCE_BYTES];
    rft_rank *rank = rank_of(server, peer);
    if (rank == NULL) return;
    rft_text_say(text, sizeof text, "rank %" PRIu32 " (%s) is gone: %s (%s)", peer->rank,
                 rank->endpoint, reason, refit_status_name(status));
    rft_log(REFIT_LOG_WARNING, "%s", text);
    rank->peer = NULL;
    rft_want_release(rank->shard);
    rank->shard = NULL;
    server->ranks.complete = false;
    if (!has_failed(&server->ranks))
        (void)rft_fail(&server->ranks.failure, REFIT_ERR_PEER, "%s", text);
    rft_transaction_doom(server, REFIT_ERR_PEER, text);
    /* The others join once more, and are told when all are there again. */
    for (uint32_t i = 1; i < server->ranks.count; i++) {
        const rft_peer *other = server->ranks.list[i].peer;
        if (other != NULL) rft_server_refuse(server, &other->id, REFIT_ERR_STALE, false, text);
    }
}

/* What a rank has not heard: it may have been lost when that was told. */
static void tell_outcome(rft_server *server, rft_peer *peer, uint64_t version)
{
    if (version == server->current.version) {
        server->ranks.list[peer->rank].held = version;
        server->regroup = true; /* workers may have waited for it */
        if (rft_store_served(server->store) == &server->store->committed)
            rft_server_send_seal(server, peer);
        rft_server_send_commit(server, peer, version);
    } else {
        rft_server_send_abort(server, peer, version, REFIT_ERR_PEER, "it is not under way");
    }
}

void rft_ranks_take_failed(rft_server *server, rft_peer *peer, const rft_message *failed)
{
    char reason[RFT_SENTENCE_BYTES], text[RFT_SENTENCE_BYTES];
    uint64_t version = failed->as.failed.version;
    if (rank_of(server, peer) == NULL) return;
    if (!is_open(server, version)) {
        tell_outcome(server, peer, version);
        return;
    }
    rft_view_print(failed->as.failed.reason, reason, sizeof reason);
    rft_text_say(text, sizeof text, "rank %" PRIu32 ": %s (%s)", peer->rank, reason,
                 refit_status_name((refit_status)failed->as.failed.code));
    rft_transaction_doom(server, REFIT_ERR_PEER, text);
}

/* ---- A version */

/* What came while a slot was being cleared for the version. */
static void check_begun(rft_server *server)
{
    const rft_ranks *ranks = &server->ranks;
    const rft_rank_link *link = &ranks->link;
    if (ranks->rank > 0 && link->aborted == server->transaction.version)
        rft_transaction_doom(server, REFIT_ERR_PEER, link->aborted_why.text);
    if (ranks->rank > 0 && link->offered != server->transaction.version)
        rft_transaction_doom(server, REFIT_ERR_PEER, "rank 0 has given it up meanwhile");
    if (!ranks->complete)
        rft_transaction_doom(server, REFIT_ERR_PEER,
                             ranks->failure.status == REFIT_OK ? "a rank joins again"
                                                               : ranks->failure.text);
}

void rft_ranks_begin(rft_server *server)
{
    rft_ranks *ranks = &server->ranks;
    ranks->concluded = false;
    ranks->summed = 0;
    ranks->link.reminded = false;
    rft_bytes_reset(&ranks->words);
    if (rft_ranks_are_many(server)) check_begun(server);
    if (!rft_ranks_coordinates(server)) return;
    memset(ranks->sums, 0, server->store->manifest->count * sizeof *ranks->sums);
    each_rank(server, tell_begin);
}

/* Adds sums of originals, from one of them on, and words. */
static refit_status add_part(rft_server *server, uint32_t from, rft_view sums, rft_view words,
                             refit_error *error)
{
    const rft_manifest *manifest = server->store->manifest;
    const unsigned char *next = sums.data;
    uint32_t original = 0, end = from + (uint32_t)(sums.count / 8);
    RFT_TRY(rft_bytes_append(&server->ranks.words, words.data, words.count, error));
    for (uint32_t i = 0; i < manifest->count && original < end; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        if (original++ < from) continue;
        server->ranks.sums[i] += rft_get_u64(next);
        next += 8;
    }
    return REFIT_OK;
}

refit_status rft_ranks_take_sums(rft_server *server, rft_peer *peer, const rft_message *sums,
                                 refit_error *error)
{
    rft_rank *rank = rank_of(server, peer);
    uint64_t version = sums->as.sums.version, most = server->limits.manifest_bytes;
    rft_view list = sums->as.sums.tensors, words = sums->as.sums.words;
    if (rank == NULL || rank->summed == version) return REFIT_OK;
    if (!is_open(server, version)) {
        if (!sums->as.sums.more) tell_outcome(server, peer, version);
        return REFIT_OK;
    }
    if (rank->version != version) rank->sums = 0;
    rank->version = version;
    uint64_t count = rank->sums + list.count / 8, originals = server->store->manifest->originals;
    bool last = !sums->as.sums.more;
    RFT_REFUSE_IF(sums->as.sums.from != rank->sums || count > originals ||
                      (last && count < originals),
                  error, REFIT_ERR_PROTOCOL, "it has sums of other tensors than there are");
    RFT_REFUSE_IF(server->ranks.words.count + words.count > most * server->ranks.count, error,
                  REFIT_ERR_LIMIT,
                  "its words that other ranks share are more than limits.manifest_bytes allows");
    RFT_TRY(add_part(server, rank->sums, list, words, error));
    rank->sums = (uint32_t)count;
    if (!last) return REFIT_OK;
    rank->summed = version;
    server->ranks.summed++;
    peer->due = 0;
    return REFIT_OK;
}

static refit_status write_sums(rft_server *server, rft_bytes *out, refit_error *error)
{
    const rft_store *store = server->store;
    rft_bytes_reset(out);
    for (uint32_t i = 0; i < store->manifest->originals; i++) {
        unsigned char sum[8];
        rft_put_u64(sum, store->next.tensor_sums[i]);
        RFT_TRY(rft_bytes_append(out, sum, sizeof sum, error));
    }
    return REFIT_OK;
}

/* To rank 0, in as many messages as it takes them: sums first, then words. */
static refit_status send_sums(rft_server *server, rft_view sums, rft_view words, refit_error *error)
{
    uint32_t sum_most = rft_message_entries(&server->limits, 8), from = 0;
    size_t word_most =
        (size_t)rft_message_entries(&server->limits, RFT_WORD_BYTES) * RFT_WORD_BYTES;
    uint32_t count = (uint32_t)(sums.count / 8);
    const unsigned char *word = words.data;
    size_t left = words.count;
    rft_message message = {.kind = RFT_SUMS};
    message.as.sums.version = server->transaction.version;
    do {
        uint32_t some = count - from < sum_most ? count - from : sum_most;
        size_t few = some > 0 ? 0 : left < word_most ? left : word_most;
        message.as.sums.from = from;
        message.as.sums.tensors =
            (rft_view){(const unsigned char *)sums.data + (size_t)from * 8, (size_t)some * 8};
        message.as.sums.words = (rft_view){word, few};
        from += some;
        left -= few;
        if (few > 0) word += few;
        message.as.sums.more = from < count || left > 0;
        RFT_TRY(rft_send_queue_put(&server->ranks.link.send_queue, NULL, &message, &server->limits,
                                   error));
    } while (message.as.sums.more);
    return REFIT_OK;
}

void rft_ranks_seal(rft_server *server, int64_t due)
{
    refit_error why;
    if (server->transaction.doomed) return; /* a part of it would be a vote for the version */
    refit_status status = write_sums(server, &server->scratch, &why);
    rft_view sums = rft_bytes_view(&server->scratch), words = rft_bytes_view(&server->store->words);
    if (status == REFIT_OK && rft_ranks_coordinates(server)) {
        status = add_part(server, 0, sums, words, &why);
        server->ranks.summed++;
    } else if (status == REFIT_OK) {
        status = send_sums(server, sums, words, &why);
    }
    if (status != REFIT_OK) rft_transaction_doom(server, status, why.text);
    for (uint32_t i = 1; rft_ranks_coordinates(server) && i < server->ranks.count; i++) {
        const rft_rank *rank = &server->ranks.list[i];
        if (rank->peer != NULL && rank->summed != server->transaction.version)
            rank->peer->due = due;
    }
}

bool rft_ranks_conclude(rft_server *server)
{
    refit_error why;
    rft_ranks *ranks = &server->ranks;
    const rft_manifest *manifest = server->store->manifest;
    if (ranks->concluded || ranks->summed < ranks->count) return ranks->concluded;
    refit_status status = rft_shards_add_words(manifest, &ranks->words, ranks->sums, &why);
    if (status != REFIT_OK) {
        rft_transaction_doom(server, status, why.text);
        return false;
    }
    uint32_t original = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        ranks->sums[original++] = rft_digest_finish(ranks->sums[i], manifest->tensors[i].bytes);
    }
    rft_store_conclude(server->store, ranks->sums);
    ranks->concluded = true;
    return true;
}

static void tell_seal(rft_server *server, rft_peer *peer)
{
    rft_server_send_seal(server, peer);
}

void rft_ranks_tell_seal(rft_server *server)
{
    if (rft_ranks_coordinates(server)) each_rank(server, tell_seal);
}

static void tell_commit(rft_server *server, rft_peer *peer)
{
    server->ranks.list[peer->rank].held = server->transaction.version;
    rft_server_send_commit(server, peer, server->transaction.version);
}

void rft_ranks_tell_commit(rft_server *server)
{
    if (rft_ranks_coordinates(server)) each_rank(server, tell_commit);
}

void rft_ranks_tell_abort(rft_server *server, refit_status status, const char *reason)
{
    for (uint32_t i = 1; rft_ranks_coordinates(server) && i < server->ranks.count; i++) {
        rft_peer *peer = server->ranks.list[i].peer;
        if (peer == NULL) continue;
        peer->due = 0;
        rft_server_send_abort(server, peer, server->transaction.version, status, reason);
    }
}

/* ---- To workers */

/* Whether each rank can serve the version. One that was lost may have come back without it. */
static bool have_version(const rft_server *server, uint64_t version)
{
    if (is_open(server, version)) return true;
    for (uint32_t i = 1; i < server->ranks.count; i++) {
        if (server->ranks.list[i].held != version) return false;
    }
    return true;
}

bool rft_ranks_introduce(rft_server *server, rft_peer *peer, uint64_t version)
{
    const rft_ranks *ranks = &server->ranks;
    if (ranks->count == 0) return true;
    if (ranks->rank > 0) return false; /* one that was subscribed before this was another rank */
    if (!ranks->complete || !have_version(server, version)) return false;
    if (peer->shards_edition == ranks->edition) return true;
    for (uint32_t i = 0; i < ranks->count; i++) {
        const rft_rank *rank = &ranks->list[i];
        rft_message message = {.kind = RFT_SHARD};
        message.as.shard.epoch = server->epoch;
        message.as.shard.manifest = server->store->manifest->digest;
        message.as.shard.rank = i;
        message.as.shard.ranks = ranks->count;
        message.as.shard.endpoint = rft_view_text(rank->endpoint);
        message.as.shard.rows = rft_bytes_view(&rank->shard->encoded);
        if (!rft_server_send(server, peer, &message)) return false;
    }
    peer->shards_edition = ranks->edition;
    return true;
}
