/*
 * handshake: what becomes of a DEALER's connections. ZeroMQ connects behind our back, and gives up
 * for good on a peer that breaks its rules; this hears of it, says in a sentence why no trainer is
 * there, and knows when to connect anew.
 */
#ifndef RFT_HANDSHAKE_H
#define RFT_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct rft_handshake {
    void *ear;        /* NULL: closed */
    bool keys;        /* this side has keys */
    const char *path; /* of an ipc endpoint whose listener is to be this user or root; or NULL */
    int fresh;        /* a connection whose listener was not looked at; -1: none */
    bool refused;     /* by this side, which has cut the connection until retry_at */
    bool cut;         /* the owner of the socket has yet to do so */
    bool missed;      /* no process listens: ZeroMQ waits for its next try */
    int64_t retry_at; /* INT64_MAX: ZeroMQ is at it */
    refit_error why;  /* of the last failure not yet taken; status REFIT_OK: none */
} rft_handshake;

/* Begins to hear of the socket, which must outlive it, before the socket connects. `path` is
 * borrowed. */
refit_status rft_handshake_open(rft_handshake *handshake, void *context, void *socket, bool keys,
                                const char *path, refit_error *error);
void rft_handshake_close(rft_handshake *handshake, void *socket);

/* Takes what there is to hear. */
void rft_handshake_hear(rft_handshake *handshake, int64_t now);

/* This side refuses the listener: `why` is REFIT_ERR_SECURITY. */
void rft_handshake_refuse(rft_handshake *handshake, const refit_error *why, int64_t now);
/* Whether to disconnect from a listener that was refused; says so once. */
bool rft_handshake_take_cut(rft_handshake *handshake);

/* Whether a try to connect has failed since the last call. */
bool rft_handshake_take_missed(rft_handshake *handshake);

/* Whether it is time to connect anew; says so once. */
bool rft_handshake_is_due(rft_handshake *handshake, int64_t now);

/* Why the last handshake failed, once: REFIT_ERR_SECURITY: this side and the other do not accept
 * each other; REFIT_ERR_PEER: what that was cannot be told. REFIT_OK: none has since the last call.
 */
refit_status rft_handshake_take(rft_handshake *handshake, refit_error *why);

#endif
