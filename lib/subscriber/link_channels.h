/*
 * link_channels: the sockets of a worker's links (shard_links.h), one for each.
 *
 * They follow the session's list of links: a link has a channel as long as it is in the list, and
 * one that cannot be opened is tried again each heartbeat. Used by the service thread alone, in
 * each pass of its loop.
 */
#ifndef RFT_LINK_CHANNELS_H
#define RFT_LINK_CHANNELS_H

#include "subscriber/session.h"

typedef struct rft_link_channel {
    rft_channel *channel; /* NULL: it is not open */
    uint64_t serial;      /* of its link */
    int64_t retry_at;     /* when to open it */
} rft_link_channel;

typedef struct rft_link_channels {
    const refit_config *config;        /* borrowed */
    char endpoint[RFT_ENDPOINT_BYTES]; /* of the session: for a link that names none */
    rft_channel *own;                  /* the session's; borrowed */
    rft_link_channel *list;            /* by rank */
    uint32_t count;
    rft_channel **open; /* the session's channel, and those of the list that are open */
    uint32_t open_count;
    uint32_t next; /* whose messages are received first */
} rft_link_channels;

/* `config` and `own` are borrowed until close. */
void rft_link_channels_init(rft_link_channels *channels, const refit_config *config,
                            const char *endpoint, rft_channel *own);
/* Says BYE to each rank. */
void rft_link_channels_close(rft_link_channels *channels);

/* Waits until something is there of the session's channel or any other, as rft_channel_poll. */
void rft_link_channels_poll(const rft_link_channels *channels, int wake_fd, int timeout_ms);
/* Receives some messages, from one link after the other. */
void rft_link_channels_receive(rft_link_channels *channels, rft_session *session);
/* Opens and closes channels as the session's links want it, and sends what these have to say. */
void rft_link_channels_tend(rft_link_channels *channels, rft_session *session);

#endif
