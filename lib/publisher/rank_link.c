/*
 * What another rank than 0 hears from rank 0, and says to it. The states are drawn in ranks.h.
 *
 * A version is this rank's own transaction, which rank 0 decides: COMMIT and ABORT are noted here,
 * and transaction.c acts on them. Rank 0 that is lost ends a version that it has not decided. What
 * it decided before it was lost, and did not tell, is not known here: workers then have the
 * version, and this rank has not.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "publisher/server.h"

static void link_send(rft_server *server, const rft_message *message)
{
    rft_rank_link *link = &server->ranks.link;
    (void)rft_send_queue_put(&link->send_queue, NULL, message, &server->limits, NULL);
}

static bool is_connected(const rft_rank_link *link)
{
    return link->state >= RFT_LINK_JOINING;
}

void rft_rank_link_open(rft_server *server, const char *endpoint, uint64_t instance, int64_t now)
{
    rft_rank_link *link = &server->ranks.link;
    rft_log(REFIT_LOG_INFO, "rank %" PRIu32 " of %" PRIu32 " looks for rank 0 at %s",
            server->ranks.rank, server->ranks.count, endpoint);
    rft_send_queue_reset(&link->send_queue);
    link->reopen = true;
    link->state = RFT_LINK_CONNECTING;
    link->instance = instance;
    link->epoch = link->offered = link->decided = link->aborted = 0;
    link->next_beat = now;
    link->why = (refit_error){0};
    rft_text_say(link->endpoint, sizeof link->endpoint, "%s", endpoint);
}

/* ---- Losing rank 0 */

/* Whether rank 0 may have this rank's part of the version, and decides. */
static bool has_voted(const rft_server *server)
{
    return server->transaction.state == RFT_TRANSACTION_STAGING;
}

static void lose(rft_server *server, refit_status status, const char *reason, int64_t now)
{
    char text[RFT_SENTENCE_BYTES];
    rft_rank_link *link = &server->ranks.link;
    rft_text_say(text, sizeof text, "rank 0 (%s) is gone: %s", link->endpoint, reason);
    if (is_connected(link)) {
        rft_log(REFIT_LOG_WARNING, "%s", text);
        link->lost_at = now;
    }
    if (link->state == RFT_LINK_JOINED)
        (void)rft_fail(&server->ranks.failure, REFIT_ERR_PEER, "%s", text);
    link->state = RFT_LINK_CONNECTING;
    link->offered = 0; /* rank 0 may end it, and cannot say so */
    link->next_beat = rft_after_ms(now, server->config->broadcast_heartbeat_ms);
    (void)rft_fail(&link->why, status, "%s", text);
    server->ranks.complete = false;
    if (!has_voted(server)) rft_transaction_doom(server, REFIT_ERR_PEER, text);
}

/* For good: the user has to say once more what the rank is. */
static void end(rft_server *server, refit_status status, const char *reason)
{
    rft_rank_link *link = &server->ranks.link;
    link->state = RFT_LINK_OFF;
    (void)rft_fail(&link->why, status, "%s", reason);
    server->ranks.complete = false;
    (void)rft_fail(&server->ranks.failure, status, "%s", reason);
    rft_transaction_doom(server, REFIT_ERR_PEER, reason);
}

/* Whether what comes is not for this link: it was closed, or its channel is that of the one before.
 */
static bool is_deaf(const rft_server *server)
{
    const rft_rank_link *link = &server->ranks.link;
    return link->state == RFT_LINK_OFF || link->reopen || !rft_ranks_follows(server);
}

void rft_rank_link_fail(rft_server *server, const refit_error *why, int64_t now)
{
    if (is_deaf(server)) return;
    lose(server, (refit_status)why->status, why->text, now);
}

/* ---- What is said */

static void send_hello(rft_server *server)
{
    char name[64];
    const rft_rank_link *link = &server->ranks.link;
    rft_message message = {.kind = RFT_HELLO};
    snprintf(name, sizeof name, "rank-%" PRIu32 ":%016" PRIx64, server->ranks.rank, link->instance);
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(name);
    message.as.hello.instance = link->instance;
    message.as.hello.window = 1;
    message.as.hello.rank = server->ranks.rank;
    rft_send_queue_reset(&server->ranks.link.send_queue);
    link_send(server, &message);
}

/* In as many messages as rank 0 takes them. */
static void send_shard(rft_server *server)
{
    rft_want_slice slice = {0};
    rft_message message = {.kind = RFT_SHARD};
    message.as.shard.epoch = server->ranks.link.epoch;
    message.as.shard.manifest = server->store->manifest->digest;
    message.as.shard.rank = server->ranks.rank;
    message.as.shard.ranks = server->ranks.count;
    message.as.shard.endpoint = rft_view_text(server->endpoint);
    message.as.shard.held = server->current.version;
    while (rft_want_slice_next(server->store->shard, &server->limits, &slice)) {
        message.as.shard.from = slice.from;
        message.as.shard.rows = slice.rows;
        message.as.shard.more = slice.more;
        link_send(server, &message);
    }
}

void rft_rank_link_send_failed(rft_server *server, refit_status status, const char *reason)
{
    rft_message message = {.kind = RFT_FAILED};
    if (!is_connected(&server->ranks.link)) return;
    message.as.failed.version = server->transaction.version;
    message.as.failed.code = (uint32_t)status;
    message.as.failed.kept = true;
    message.as.failed.reason = rft_view_text(reason);
    link_send(server, &message);
}

void rft_rank_link_leave(rft_server *server, const char *reason)
{
    rft_message message = {.kind = RFT_BYE};
    rft_rank_link *link = &server->ranks.link;
    bool connected = is_connected(link);
    link->state = RFT_LINK_OFF;
    if (!connected) return;
    message.as.bye.reason = rft_view_text(reason);
    link_send(server, &message);
}

/* ---- What is heard */

static void answer_welcome(rft_server *server, const rft_message *message)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_rank_link *link = &server->ranks.link;
    if (message->as.welcome.protocol != RFT_PROTOCOL) {
        end(server, REFIT_ERR_PROTOCOL,
            "rank 0 speaks another protocol: install one release of refit on all ranks");
        return;
    }
    if (message->as.welcome.frame_bytes != server->config->broadcast_frame_bytes) {
        snprintf(reason, sizeof reason,
                 "broadcast.frame_bytes is %" PRIu64 " at rank 0 and %" PRIu64 " at rank %" PRIu32
                 ": set the same on all ranks",
                 message->as.welcome.frame_bytes, server->config->broadcast_frame_bytes,
                 server->ranks.rank);
        end(server, REFIT_ERR_INVALID, reason);
        return;
    }
    if (link->epoch != 0 && link->epoch != message->as.welcome.epoch) {
        end(server, REFIT_ERR_PEER,
            "rank 0 is another publisher than the one joined: say on all ranks once more what "
            "their shards are (refit_publisher_shard)");
        return;
    }
    if (link->epoch == 0) link->own_epoch = server->epoch;
    link->epoch = message->as.welcome.epoch;
    server->epoch = link->epoch;
    if (server->current.version == 0) server->current.epoch = link->epoch;
    link->silence_ms = message->as.welcome.heartbeat_timeout_ms;
    link->state = RFT_LINK_JOINING;
    send_shard(server);
    if (has_voted(server) || server->transaction.doomed)
        rft_rank_link_send_failed(server, REFIT_ERR_PEER, "rank 0 was lost meanwhile");
}

/* All ranks are there. */
static void answer_shard(rft_server *server)
{
    rft_rank_link *link = &server->ranks.link;
    if (link->state != RFT_LINK_JOINING) return;
    link->state = RFT_LINK_JOINED;
    link->why = (refit_error){0};
    server->ranks.complete = true;
    server->ranks.failure = (refit_error){0};
    rft_log(REFIT_LOG_INFO, "rank %" PRIu32 " of %" PRIu32 " has joined rank 0 at %s",
            server->ranks.rank, server->ranks.count, link->endpoint);
}

static void answer_seal(rft_server *server, const rft_message *message)
{
    const rft_transaction *transaction = &server->transaction;
    const rft_manifest *manifest = server->store->manifest;
    const unsigned char *digest = message->as.seal.tensors.data;
    bool ours = transaction->state == RFT_TRANSACTION_STAGING &&
                message->as.seal.version == transaction->version &&
                message->as.seal.tensors.count == (size_t)manifest->originals * 8;
    if (!ours) return;
    for (uint32_t i = 0; i < manifest->originals; i++)
        server->store->next.tensor_sums[i] = rft_get_u64(digest + (size_t)i * 8);
    server->store->next.digest = message->as.seal.digest;
    server->ranks.concluded = true;
}

static void answer_abort(rft_server *server, const rft_message *message)
{
    char reason[RFT_SENTENCE_BYTES], text[RFT_SENTENCE_BYTES];
    uint64_t version = message->as.failed.version;
    rft_rank_link *link = &server->ranks.link;
    rft_view_print(message->as.failed.reason, reason, sizeof reason);
    rft_text_say(text, sizeof text, "rank 0 has aborted version %" PRIu64 ": %s", version, reason);
    if (link->offered == version) link->offered = 0;
    link->aborted = version;
    (void)rft_fail(&link->aborted_why, REFIT_ERR_PEER, "%s", text);
    if (version == server->transaction.version) rft_transaction_doom(server, REFIT_ERR_PEER, text);
}

static void answer_refuse(rft_server *server, const rft_message *message, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_rank_link *link = &server->ranks.link;
    refit_status status = (refit_status)message->as.refuse.code;
    rft_view_print(message->as.refuse.reason, reason, sizeof reason);
    if (message->as.refuse.final) {
        end(server, status, reason);
    } else if (link->state == RFT_LINK_JOINED) {
        lose(server, status, reason, now);
    } else {
        link->state = RFT_LINK_CONNECTING;
        (void)rft_fail(&link->why, status, "%s", reason);
    }
}

static void answer_bye(rft_server *server, const rft_message *message, int64_t now)
{
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(message->as.bye.reason, reason, sizeof reason);
    lose(server, REFIT_ERR_PEER, reason, now);
    rft_transaction_doom(server, REFIT_ERR_PEER, server->ranks.link.why.text);
}

static void answer(rft_server *server, const rft_message *message, int64_t now)
{
    rft_rank_link *link = &server->ranks.link;
    bool connected = is_connected(link);
    switch (message->kind) {
    case RFT_WELCOME:
        if (!connected) answer_welcome(server, message);
        break;
    case RFT_REFUSE: answer_refuse(server, message, now); break;
    case RFT_BYE: answer_bye(server, message, now); break;
    case RFT_SHARD:
        if (message->as.shard.epoch == link->epoch) answer_shard(server);
        break;
    case RFT_OFFER:
        if (connected && message->as.offer.epoch == link->epoch)
            link->offered = message->as.offer.version;
        break;
    case RFT_SEAL:
        if (connected) answer_seal(server, message);
        break;
    case RFT_COMMIT:
        if (connected) link->decided = message->as.commit.version;
        break;
    case RFT_ABORT:
        if (connected) answer_abort(server, message);
        break;
    default: break;
    }
}

void rft_rank_link_message(rft_server *server, const rft_message *message, int64_t now)
{
    if (is_deaf(server)) return;
    server->ranks.link.heard = now;
    answer(server, message, now);
    rft_transaction_evaluate(server, now);
}

/* ---- Time */

static int64_t silence_at(const rft_server *server)
{
    return rft_after_ms(server->ranks.link.heard, server->ranks.link.silence_ms);
}

/* When a version is given up that rank 0 was to decide. */
static int64_t given_up_at(const rft_server *server)
{
    const rft_rank_link *link = &server->ranks.link;
    if (!has_voted(server) || is_connected(link)) return INT64_MAX;
    return rft_after_ms(link->lost_at, link->silence_ms);
}

/* When rank 0 should have decided: it may write, and wait for workers, as long as its timeouts let
 * it. */
static int64_t undecided_at(const rft_server *server)
{
    const rft_transaction *transaction = &server->transaction;
    if (transaction->state != RFT_TRANSACTION_STAGING || server->ranks.link.reminded)
        return INT64_MAX;
    return rft_after_ms(transaction->deadline, server->config->broadcast_stage_timeout_ms);
}

void rft_rank_link_tick(rft_server *server, int64_t now)
{
    char why[64];
    rft_rank_link *link = &server->ranks.link;
    if (link->state == RFT_LINK_OFF || !rft_ranks_follows(server)) return;
    if (now >= undecided_at(server)) {
        link->reminded = true; /* it aborts the version, unless it has decided */
        rft_rank_link_send_failed(server, REFIT_ERR_TIMEOUT, "rank 0 has not decided in time");
    }
    if (is_connected(link) && now >= silence_at(server)) {
        snprintf(why, sizeof why, "it was silent for %" PRIu32 " ms", link->silence_ms);
        lose(server, REFIT_ERR_PEER, why, now);
        rft_transaction_evaluate(server, now);
    }
    if (now >= given_up_at(server)) {
        rft_transaction_doom(server, REFIT_ERR_PEER, link->why.text);
        rft_transaction_evaluate(server, now);
    }
    if (now < link->next_beat) return;
    link->next_beat = rft_after_ms(now, server->config->broadcast_heartbeat_ms);
    rft_message message = {.kind = RFT_BEAT};
    switch (link->state) {
    case RFT_LINK_CONNECTING:
        link->reopen = link->reopen || link->unopened;
        send_hello(server);
        break;
    case RFT_LINK_JOINING: send_shard(server); break;
    case RFT_LINK_JOINED: link_send(server, &message); break;
    case RFT_LINK_OFF: break;
    }
}

int64_t rft_rank_link_tick_at(const rft_server *server)
{
    const rft_rank_link *link = &server->ranks.link;
    if (link->state == RFT_LINK_OFF || !rft_ranks_follows(server)) return INT64_MAX;
    int64_t at = link->next_beat;
    if (undecided_at(server) < at) at = undecided_at(server);
    if (given_up_at(server) < at) at = given_up_at(server);
    return is_connected(link) && silence_at(server) < at ? silence_at(server) : at;
}
