/*
 * outbox: encoded messages that wait to be sent, each with whom it is for. State machines put them
 * in, the service thread takes them out: so the former need no socket, and tests read along.
 */
#ifndef RFT_OUTBOX_H
#define RFT_OUTBOX_H

#include "broadcast/channel.h"
#include "broadcast/notice.h"

/* {0} is empty. */
typedef struct rft_outbox {
    rft_bytes bytes;   /* records, one behind the other; a notice's bytes are not among them */
    rft_bytes scratch; /* one message being encoded */
    size_t read;       /* how far they have been taken */
    rft_pending *held; /* of the notice taken last */
} rft_outbox;

typedef struct rft_outgoing {
    rft_peer_id to;
    rft_view message;    /* valid until the next put, take or reset */
    rft_pending *shared; /* the message is lent: raise it for who reads on; NULL: it is not */
} rft_outgoing;

void rft_outbox_close(rft_outbox *outbox);

/* REFIT_ERR_HOST_MEMORY, REFIT_ERR_LIMIT: nothing was put in. */
refit_status rft_outbox_put(rft_outbox *outbox, const rft_peer_id *to, const rft_message *message,
                            const rft_limits *limits, refit_error *error);
/* Only a reference to the notice, which lives on until it is taken and done with.
 * REFIT_ERR_HOST_MEMORY: nothing was put in. */
refit_status rft_outbox_put_notice(rft_outbox *outbox, const rft_peer_id *to,
                                   const rft_notice *notice, refit_error *error);
/* The oldest not yet taken; false if there is none. */
bool rft_outbox_take(rft_outbox *outbox, rft_outgoing *out);
bool rft_outbox_is_empty(const rft_outbox *outbox);
void rft_outbox_reset(rft_outbox *outbox);

#endif
