/*
 * backlog: messages on their way to a socket that may be full.
 *
 * Encoded at once, sent in order as far as the socket takes them; the rest waits here, up to a
 * fixed number. Used slots keep their room, so a steady connection allocates nothing.
 */
#ifndef RFT_WAITING_MESSAGES_H
#define RFT_WAITING_MESSAGES_H

#include "net/channel.h"
#include "wire/message.h"

#define RFT_BACKLOG_MESSAGES 32u

typedef struct rft_backlog {
    rft_bytes slots[RFT_BACKLOG_MESSAGES];
    uint32_t first;
    uint32_t count;
} rft_backlog;

/* {0} is an empty one. */
void rft_backlog_close(rft_backlog *backlog);

/* REFIT_ERR_BUSY: it is full, the peer has taken nothing for long. REFIT_ERR_HOST_MEMORY, _LIMIT,
 * _INVALID: the message could not be encoded, and is not in. */
refit_status rft_backlog_put(rft_backlog *backlog, const rft_message *message,
                             const rft_limits *limits, refit_error *error);

/* Sends what the channel (a subscriber's) takes. True if nothing is left. */
bool rft_backlog_flush(rft_backlog *backlog, rft_channel *channel);

/* Forgets what is left. */
void rft_backlog_clear(rft_backlog *backlog);

#endif
