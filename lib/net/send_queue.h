/*
 * send_queue: encoded messages that wait to be sent, each with the peer that it is for. The state
 * machines of both ends put messages in and need no socket; the service threads take them out, and
 * tests read them.
 *
 * It has no lock of its own: its owner's guards it.
 */
#ifndef RFT_SEND_QUEUE_H
#define RFT_SEND_QUEUE_H

#include "net/channel.h"
#include "wire/message.h"

/* {0} is empty. */
typedef struct rft_send_queue {
    rft_bytes bytes;   /* records, one after the other; shared messages are not among them */
    rft_bytes scratch; /* one message being encoded */
    size_t read;       /* how far records have been taken */
    uint32_t count;    /* of those that were not taken */
    uint32_t most;     /* how many may wait; 0: any number */
    uint32_t failures; /* puts that have failed */
    rft_pending *held; /* of the shared message taken last */
} rft_send_queue;

typedef struct rft_outgoing {
    rft_peer_id to;
    rft_view message;    /* valid until the next put, take, flush or reset */
    rft_pending *shared; /* counts the readers of a shared message: raise it for a further one;
                            NULL: the message is the queue's own */
} rft_outgoing;

void rft_send_queue_close(rft_send_queue *queue);

/* Encodes a message and puts it in. `to`: NULL for a channel that has one peer.
 *
 * Errors: REFIT_ERR_BUSY (`most` messages wait), REFIT_ERR_HOST_MEMORY, and REFIT_ERR_LIMIT and
 * REFIT_ERR_INVALID of rft_message_encode. Nothing was put in then. */
refit_status rft_send_queue_put(rft_send_queue *queue, const rft_peer_id *to,
                                const rft_message *message, const rft_limits *limits,
                                refit_error *error);
/* Puts in a reference to an encoded message, which stays where it is until `shared` is lowered: by
 * the queue, when the message has been taken and the next one is asked for.
 *
 * Errors: REFIT_ERR_BUSY, REFIT_ERR_HOST_MEMORY. Nothing was put in then. */
refit_status rft_send_queue_put_shared(rft_send_queue *queue, const rft_peer_id *to,
                                       rft_view message, rft_pending *shared, refit_error *error);

/* The oldest message that was not taken; false if there is none. */
bool rft_send_queue_take(rft_send_queue *queue, rft_outgoing *out);
bool rft_send_queue_is_empty(const rft_send_queue *queue);

/* Sends messages of the queue's own, in order, as far as a channel with one peer takes them; the
 * rest stays. True if nothing is left. */
bool rft_send_queue_flush(rft_send_queue *queue, rft_channel *channel);

/* Forgets what is left. */
void rft_send_queue_reset(rft_send_queue *queue);

#endif
