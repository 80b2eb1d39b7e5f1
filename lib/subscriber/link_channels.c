/*
 * Channels by rank. A channel belongs to the link whose serial it has: if the rank has another link
 * meanwhile, the channel is closed, and another one opened.
 */
#include "subscriber/link_channels.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

/* As many as of the session's own channel: orders and beats do not wait for a long stream. */
#define MESSAGES_PER_PASS 16u

/* ---- Opening and closing */

void rft_link_channels_init(rft_link_channels *channels, const refit_config *config,
                            const char *endpoint, rft_channel *own)
{
    *channels = (rft_link_channels){.config = config, .own = own};
    (void)snprintf(channels->endpoint, sizeof channels->endpoint, "%s", endpoint);
}

static void say_bye(const rft_link_channels *channels, rft_channel *channel)
{
    rft_send_queue queue = {0};
    rft_limits limits = rft_limits_from(channels->config);
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.reason = rft_view_text("the worker closed");
    (void)rft_send_queue_put(&queue, NULL, &message, &limits, NULL);
    (void)rft_send_queue_flush(&queue, channel);
    rft_send_queue_close(&queue);
}

static void close_channel(const rft_link_channels *channels, rft_link_channel *place)
{
    if (place->channel == NULL) return;
    say_bye(channels, place->channel);
    rft_channel_close(place->channel);
    place->channel = NULL;
}

void rft_link_channels_close(rft_link_channels *channels)
{
    for (uint32_t i = 0; i < channels->count; i++)
        close_channel(channels, &channels->list[i]);
    rft_free(channels->list);
    rft_free(channels->open);
    channels->list = NULL;
    channels->open = NULL;
    channels->count = 0;
    channels->open_count = 0;
}

/* ---- As the session has them */

/* Room for so many. Without memory there are as many as before, and the next pass tries again. */
static void set_count(rft_link_channels *channels, uint32_t count)
{
    if (count == channels->count) return;
    rft_link_channel *list = rft_calloc((size_t)count + 1, sizeof *list);
    rft_channel **open = rft_calloc((size_t)count + 1, sizeof(rft_channel *));
    if (list == NULL || open == NULL) {
        rft_free(list);
        rft_free(open);
        return;
    }
    for (uint32_t i = 0; i < channels->count; i++) {
        if (i < count)
            list[i] = channels->list[i];
        else
            close_channel(channels, &channels->list[i]);
    }
    rft_free(channels->list);
    rft_free(channels->open);
    channels->list = list;
    channels->open = open;
    channels->count = count;
}

static void open_channel(rft_link_channels *channels, rft_link_channel *place, rft_session *session,
                         rft_shard_link *link)
{
    refit_error why;
    const char *endpoint = link->endpoint[0] == '\0' ? channels->endpoint : link->endpoint;
    if (rft_now() < place->retry_at) return;
    if (rft_channel_connect(endpoint, channels->config, &place->channel, &why) == REFIT_OK) return;
    place->retry_at = rft_after_ms(rft_now(), channels->config->broadcast_heartbeat_ms);
    rft_session_link_failed(session, link, &why, rft_now());
}

/* The channel is the link's, if that has one now. */
static void match(rft_link_channels *channels, rft_link_channel *place, rft_session *session,
                  rft_shard_link *link)
{
    uint64_t serial = link == NULL ? 0 : link->serial;
    if (place->serial != serial) {
        close_channel(channels, place);
        *place = (rft_link_channel){.serial = serial};
    }
    if (link != NULL && place->channel == NULL) open_channel(channels, place, session, link);
}

/* A handshake that failed, for want of the right keys, say. */
static void hear_failure(const rft_link_channel *place, rft_session *session, rft_shard_link *link)
{
    refit_error why;
    if (rft_channel_take_failure(place->channel, &why) != REFIT_OK)
        rft_session_link_failed(session, link, &why, rft_now());
}

void rft_link_channels_tend(rft_link_channels *channels, rft_session *session)
{
    set_count(channels, session->links.count);
    channels->open_count = 0;
    for (uint32_t i = 0; i < channels->count; i++) {
        rft_link_channel *place = &channels->list[i];
        rft_shard_link *link = rft_shard_links_find(&session->links, i);
        match(channels, place, session, link);
        if (place->channel == NULL) continue;
        hear_failure(place, session, link);
        (void)rft_send_queue_flush(&link->send_queue, place->channel);
        channels->open[++channels->open_count] = place->channel;
    }
    if (channels->open != NULL) channels->open[0] = channels->own;
}

/* ---- Waiting and receiving */

void rft_link_channels_poll(const rft_link_channels *channels, int wake_fd, int timeout_ms)
{
    if (channels->open_count == 0)
        rft_channel_poll(channels->own, wake_fd, timeout_ms);
    else
        rft_channels_poll(channels->open, channels->open_count + 1, wake_fd, timeout_ms);
}

static void hear(rft_session *session, rft_shard_link *link, refit_status status,
                 const rft_envelope *envelope, refit_error *why)
{
    rft_message message;
    if (status == REFIT_OK)
        status = rft_message_decode(envelope->message, &session->limits, &message, why);
    if (status == REFIT_OK)
        rft_session_link_message(session, link, &message, envelope->payload, rft_now());
    else
        rft_session_link_failed(session, link, why, rft_now());
}

/* One message of a link. False: none is there. What the session's links are changes with no message
 * of a rank, but they may end. */
static bool receive_one(rft_link_channels *channels, rft_session *session, uint32_t rank)
{
    rft_envelope envelope;
    refit_error why;
    rft_link_channel *place = &channels->list[rank];
    rft_shard_link *link = rft_shard_links_find(&session->links, rank);
    bool ours = place->channel != NULL && link != NULL && link->serial == place->serial;
    if (!ours) return false;
    refit_status status = rft_channel_receive(place->channel, &envelope, &why);
    if (status == REFIT_ERR_TIMEOUT) return false;
    hear(session, link, status, &envelope, &why);
    link = rft_shard_links_find(&session->links, rank);
    if (link != NULL && link->serial == place->serial)
        (void)rft_send_queue_flush(&link->send_queue, place->channel);
    return true;
}

void rft_link_channels_receive(rft_link_channels *channels, rft_session *session)
{
    uint32_t idle = 0; /* links in a row that had nothing */
    for (uint32_t i = 0; i < MESSAGES_PER_PASS && idle < channels->count;) {
        channels->next = (channels->next + 1) % channels->count;
        bool heard = receive_one(channels, session, channels->next);
        idle = heard ? 0 : idle + 1;
        i += heard;
    }
}
