/*
 * The publisher's service thread. One pass of its loop:
 *
 *     wait for a message, the wake descriptor, or the server's next moment
 *     hand every message to the server, then the time
 *     send the messages in the server's send queue
 *     send a few frames, and look for messages again before more
 *
 * Messages are received before the time is handed in: a trainer that was stopped and goes on must
 * not take its workers' queued beats for silence. Nothing is sent under the lock.
 *
 * At the end the workers' goodbyes are awaited: where a connection ends, ZeroMQ drops what the
 * other side has received but not read, ours among it.
 */
#include "publisher/publisher.h"

#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/thread.h"

#define FRAMES_PER_PASS   8u
#define MESSAGES_PER_PASS 256u

/* ---- Messages in */

static void hand_in(refit_publisher *publisher, const rft_envelope *envelope, refit_status received,
                    refit_error *why)
{
    rft_message message;
    refit_status status = received;
    if (status == REFIT_OK) {
        status = rft_message_decode(envelope->message, &publisher->server.limits, &message, why);
    }
    rft_lock(&publisher->lock);
    if (publisher->stopping && (status != REFIT_OK || message.kind != RFT_BYE)) {
        rft_unlock(&publisher->lock); /* nobody is let in any more */
        return;
    }
    if (status == REFIT_OK) {
        rft_server_message(&publisher->server, &envelope->from, &message, rft_now());
    } else {
        rft_server_garbage(&publisher->server, &envelope->from, why, rft_now());
    }
    bool worker = rft_peers_find(&publisher->server.peers, &envelope->from) != NULL;
    rft_unlock(&publisher->lock);
    if (worker) rft_channel_claim(publisher->channel, envelope->connection);
}

static void receive_all(refit_publisher *publisher)
{
    for (uint32_t i = 0; i < MESSAGES_PER_PASS; i++) {
        rft_envelope envelope;
        refit_error why;
        refit_status status = rft_channel_receive(publisher->channel, &envelope, &why);
        if (status == REFIT_ERR_TIMEOUT) break;
        hand_in(publisher, &envelope, status, &why);
    }
}

/* ---- Rank 0, where this is another one */

/* The channel to rank 0, once it is known where that is; again each time it could not be opened. */
static void open_link(refit_publisher *publisher)
{
    refit_error why;
    char endpoint[RFT_ENDPOINT_BYTES];
    rft_rank_link *link = &publisher->server.ranks.link;
    rft_lock(&publisher->lock);
    bool reopen = link->reopen;
    link->reopen = false;
    strcpy(endpoint, link->endpoint);
    rft_unlock(&publisher->lock);
    if (!reopen) return;
    rft_channel_close(publisher->link);
    publisher->link = NULL;
    refit_status status = rft_channel_connect(endpoint, &publisher->config, &publisher->link, &why);
    rft_lock(&publisher->lock);
    link->unopened = status != REFIT_OK;
    if (status != REFIT_OK) rft_rank_link_fail(&publisher->server, &why, rft_now());
    rft_unlock(&publisher->lock);
}

static void hear_link(refit_publisher *publisher, refit_status status, const rft_envelope *envelope,
                      refit_error *why)
{
    rft_message message;
    if (status == REFIT_OK)
        status = rft_message_decode(envelope->message, &publisher->server.limits, &message, why);
    rft_lock(&publisher->lock);
    if (status == REFIT_OK)
        rft_rank_link_message(&publisher->server, &message, rft_now());
    else
        rft_rank_link_fail(&publisher->server, why, rft_now());
    rft_unlock(&publisher->lock);
}

static void receive_link(refit_publisher *publisher)
{
    rft_envelope envelope;
    refit_error why;
    if (publisher->link == NULL) return;
    if (rft_channel_take_failure(publisher->link, &why) != REFIT_OK) {
        rft_lock(&publisher->lock);
        rft_rank_link_fail(&publisher->server, &why, rft_now());
        rft_unlock(&publisher->lock);
    }
    for (uint32_t i = 0; i < MESSAGES_PER_PASS; i++) {
        refit_status status = rft_channel_receive(publisher->link, &envelope, &why);
        if (status == REFIT_ERR_TIMEOUT) return;
        hear_link(publisher, status, &envelope, &why);
    }
}

/* ---- Messages out */

static void unreachable(refit_publisher *publisher, const rft_peer_id *to, refit_status why)
{
    rft_lock(&publisher->lock);
    rft_server_unreachable(&publisher->server, to, why, rft_now());
    rft_unlock(&publisher->lock);
}

static refit_status send_one(refit_publisher *publisher, const rft_outgoing *next)
{
    if (next->shared == NULL) {
        return rft_channel_send(publisher->channel, &next->to, next->message, NULL, NULL);
    }
    const rft_payload lent = {next->message, next->shared};
    return rft_channel_send_lent(publisher->channel, &next->to, &lent, NULL);
}

/* `spare` is empty and stays so: the server gets it while the messages in its own queue are sent.
 */
static void send_all(refit_publisher *publisher, rft_send_queue *spare)
{
    rft_outgoing next;
    rft_lock(&publisher->lock);
    rft_send_queue full = publisher->server.send_queue;
    publisher->server.send_queue = *spare;
    rft_unlock(&publisher->lock);
    while (rft_send_queue_take(&full, &next)) {
        refit_status status = send_one(publisher, &next);
        if (status != REFIT_OK) unreachable(publisher, &next.to, status);
    }
    rft_send_queue_reset(&full);
    *spare = full;
    if (publisher->link == NULL) return;
    rft_lock(&publisher->lock); /* a few messages, which a DEALER takes or leaves */
    (void)rft_send_queue_flush(&publisher->server.ranks.link.send_queue, publisher->link);
    rft_unlock(&publisher->lock);
}

/* ---- Frames */

static refit_status send_frame(refit_publisher *publisher, const rft_frame_order *order,
                               uint64_t *bytes)
{
    rft_encoded frame;
    refit_error why;
    refit_status status = rft_frames_encode(publisher->frames, publisher->store, order->sequence,
                                            order->coding, order->want, order->ready, &frame, &why);
    if (status != REFIT_OK) {
        rft_log(REFIT_LOG_ERROR, "a frame could not be encoded: %s", why.text);
        return status;
    }
    *bytes = frame.payload.bytes.count;
    return rft_channel_send(publisher->channel, &order->to, frame.message, &frame.payload, NULL);
}

/* Returns whether there may be more. */
static bool send_frames(refit_publisher *publisher)
{
    rft_frame_order order;
    bool more = true;
    rft_lock(&publisher->lock);
    for (uint32_t i = 0; more && i < FRAMES_PER_PASS; i++) {
        more = rft_server_next_frame(&publisher->server, &order);
        if (!more) break;
        publisher->sending = true;
        rft_unlock(&publisher->lock);
        uint64_t bytes = 0;
        refit_status status = send_frame(publisher, &order, &bytes);
        rft_want_release(order.want);
        rft_lock(&publisher->lock);
        publisher->sending = false;
        publisher->coded = rft_frames_count(publisher->frames);
        rft_cond_wake_all(&publisher->changed);
        if (status == REFIT_OK) {
            publisher->sent_bytes += bytes;
            rft_server_frame_sent(&publisher->server, &order, bytes);
        } else {
            rft_server_unreachable(&publisher->server, &order.to, status, rft_now());
        }
    }
    more = more || !rft_send_queue_is_empty(&publisher->server.send_queue);
    rft_unlock(&publisher->lock);
    return more;
}

/* ---- The loop */

static bool is_over(refit_publisher *publisher, int64_t *tick_at)
{
    rft_lock(&publisher->lock);
    bool waits =
        rft_peers_count_subscribed(&publisher->server.peers) > 0 && rft_now() < publisher->leave_at;
    bool over =
        publisher->stopping && !waits && rft_send_queue_is_empty(&publisher->server.send_queue);
    /* A beat shows who has gone without a word. */
    *tick_at = rft_server_tick_at(&publisher->server);
    int64_t link_at = rft_rank_link_tick_at(&publisher->server);
    if (link_at < *tick_at) *tick_at = link_at;
    if (publisher->stopping && publisher->leave_at < *tick_at) *tick_at = publisher->leave_at;
    rft_unlock(&publisher->lock);
    return over;
}

static void tick(refit_publisher *publisher)
{
    rft_lock(&publisher->lock);
    int64_t now = rft_now();
    rft_server_check_keys(&publisher->server, now);
    if (now >= rft_server_tick_at(&publisher->server)) rft_server_tick(&publisher->server, now);
    rft_rank_link_tick(&publisher->server, now);
    publisher->connections = rft_channel_count_connections(publisher->channel);
    rft_cond_wake_all(&publisher->changed);
    rft_unlock(&publisher->lock);
}

void *rft_publisher_serve(void *user)
{
    refit_publisher *publisher = user;
    rft_send_queue spare = {0};
    bool more = false;
    int64_t tick_at;
    while (!is_over(publisher, &tick_at)) {
        int wait = more ? 0 : rft_ms_until(tick_at);
        rft_channel *const channels[] = {publisher->channel, publisher->link};
        rft_channels_poll(channels, publisher->link == NULL ? 1 : 2, publisher->wake, wait);
        rft_wake_fd_clear(publisher->wake);
        open_link(publisher);
        receive_all(publisher);
        receive_link(publisher);
        tick(publisher);
        send_all(publisher, &spare);
        more = send_frames(publisher);
    }
    rft_send_queue_close(&spare);
    return NULL;
}
