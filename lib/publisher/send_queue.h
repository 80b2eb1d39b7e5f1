/*
 * outbox: encoded messages that wait to be sent, each with whom it is for. State machines put them
 * in, the service thread takes them out: so the former need no socket, and tests read along.
 */
#ifndef RFT_SEND_QUEUE_H
#define RFT_SEND_QUEUE_H

#include "net/channel.h"
#include "publisher/cached_message.h"

/* {0} is empty. */
typedef struct rft_send_queue {
    rft_bytes bytes;   /* records, one behind the other; a notice's bytes are not among them */
    rft_bytes scratch; /* one message being encoded */
    size_t read;       /* how far they have been taken */
    rft_pending *held; /* of the notice taken last */
} rft_send_queue;

typedef struct rft_outgoing {
    rft_peer_id to;
    rft_view message;    /* valid until the next put, take or reset */
    rft_pending *shared; /* the message is lent: raise it for who reads on; NULL: it is not */
} rft_outgoing;

void rft_send_queue_close(rft_send_queue *send_queue);

/* REFIT_ERR_HOST_MEMORY, REFIT_ERR_LIMIT: nothing was put in. */
refit_status rft_send_queue_put(rft_send_queue *send_queue, const rft_peer_id *to,
                                const rft_message *message, const rft_limits *limits,
                                refit_error *error);
/* Only a reference to the notice, which lives on until it is taken and done with.
 * REFIT_ERR_HOST_MEMORY: nothing was put in. */
refit_status rft_send_queue_put_notice(rft_send_queue *send_queue, const rft_peer_id *to,
                                       const rft_cached_message *notice, refit_error *error);
/* The oldest not yet taken; false if there is none. */
bool rft_send_queue_take(rft_send_queue *send_queue, rft_outgoing *out);
bool rft_send_queue_is_empty(const rft_send_queue *send_queue);
void rft_send_queue_reset(rft_send_queue *send_queue);

#endif
