/*
 * handshake: the result of a DEALER's connections. ZeroMQ reconnects internally, but not after a
 * protocol error. This reads ZeroMQ's monitor, says in a sentence why there is no trainer, and
 * tells when to connect again.
 */
#ifndef RFT_HANDSHAKE_H
#define RFT_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct rft_handshake {
    void *monitor;    /* NULL: closed */
    bool keys;        /* this side has keys */
    const char *path; /* of an ipc endpoint whose listener is to be this user or root; or NULL */
    int fresh;        /* a connection whose listener was not looked at; -1: none */
    bool refused;     /* by this side, which has cut the connection until retry_at */
    bool cut;         /* the owner of the socket has yet to do so */
    bool ended;       /* without keys: a peer has ended a handshake and did not say why */
    bool missed;      /* no process listens: ZeroMQ waits before its next attempt */
    int64_t retry_at; /* when to connect again; INT64_MAX: ZeroMQ does it */
    refit_error why;  /* of the last failure not yet taken; status REFIT_OK: none */
} rft_handshake;

/* Begins to watch the socket, which must outlive it, before the socket connects. `path` is
 * borrowed. */
refit_status rft_handshake_open(rft_handshake *handshake, void *context, void *socket, bool keys,
                                const char *path, refit_error *error);
void rft_handshake_close(rft_handshake *handshake, void *socket);

/* Reads the events that are there. */
void rft_handshake_receive(rft_handshake *handshake, int64_t now);

/* This side refuses the listener: `why` is REFIT_ERR_SECURITY. */
void rft_handshake_refuse(rft_handshake *handshake, const refit_error *why, int64_t now);
/* Whether to disconnect from a listener that was refused; true once. */
bool rft_handshake_take_cut(rft_handshake *handshake);

/* Whether an attempt to connect has failed since the last call. */
bool rft_handshake_take_missed(rft_handshake *handshake);

/* Whether it is time to connect again; true once. */
bool rft_handshake_is_due(rft_handshake *handshake, int64_t now);

/* Why the last handshake failed, once: REFIT_ERR_SECURITY: this side and the other do not accept
 * each other; REFIT_ERR_PEER: the cause cannot be told. REFIT_OK: none has since the last call.
 */
refit_status rft_handshake_take(rft_handshake *handshake, refit_error *why);

#endif
