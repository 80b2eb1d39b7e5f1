/*
 * outbox: messages on their way to a socket that may be full.
 *
 * Encoded at once, sent in order as far as the socket takes them; the rest waits here, up to a
 * fixed number. Used slots keep their room, so a steady connection allocates nothing.
 */
#ifndef RFT_OUTBOX_H
#define RFT_OUTBOX_H

#include "broadcast/channel.h"
#include "wire/message.h"

#define RFT_OUTBOX_MESSAGES 32u

typedef struct rft_outbox {
    rft_bytes slots[RFT_OUTBOX_MESSAGES];
    uint32_t first;
    uint32_t count;
} rft_outbox;

/* {0} is an empty one. */
void rft_outbox_close(rft_outbox *outbox);

/* REFIT_ERR_BUSY: it is full, the peer has taken nothing for long. REFIT_ERR_HOST_MEMORY, _LIMIT,
 * _INVALID: the message could not be encoded, and is not in. */
refit_status rft_outbox_put(rft_outbox *outbox, const rft_message *message,
                            const rft_limits *limits, refit_error *error);

/* Sends what the channel (a subscriber's) takes. True if nothing is left. */
bool rft_outbox_flush(rft_outbox *outbox, rft_channel *channel);

/* Forgets what is left. */
void rft_outbox_clear(rft_outbox *outbox);

#endif
