/*
 * channel: the one place that opens ZeroMQ sockets. A publisher's channel binds a ROUTER, a
 * subscriber's connects a DEALER; every option that bounds a wait or a size is set here, so no
 * other file includes <zmq.h>.
 *
 * A channel belongs to one thread. Nothing here blocks but rft_channel_poll, and that has a
 * timeout.
 */
#ifndef RFT_CHANNEL_H
#define RFT_CHANNEL_H

#include <stdbool.h>

#include <refit/config.h>

#include "base/thread.h"
#include "net/connections.h"
#include "trust/allow_list.h"
#include "wire/bytes.h"

typedef struct rft_channel rft_channel;

#define RFT_PEER_ID_BYTES 8

/* The peer that a ROUTER's message came from or goes to: ZeroMQ's routing id, at most 8 bytes of
 * it, and the public key that its connection was opened with. */
typedef struct rft_peer_id {
    unsigned char bytes[RFT_PEER_ID_BYTES];
    uint8_t count;
    char key[RFT_KEY_TEXT]; /* empty: the channel uses no keys */
} rft_peer_id;

/* A payload sent without copying. `pending` is raised by the send, and lowered by a thread of the
 * transport when the bytes are no longer needed. Both must live until then. */
typedef struct rft_payload {
    rft_view bytes;
    rft_pending *pending;
} rft_payload;

/* A received message; its views stay valid until the next receive or close of the channel. */
typedef struct rft_envelope {
    rft_peer_id from; /* on a ROUTER */
    int connection;   /* on a ROUTER: its descriptor, for rft_channel_claim */
    rft_view message;
    rft_view payload; /* no bytes if there was none */
} rft_envelope;

/* Binds or connects, with keys if security.key is set. Without them addresses beyond this host are
 * refused, unless broadcast.insecure; binding, an ipc path that a living process holds.
 * REFIT_ERR_BUSY, _INVALID, _SECURITY, _EXISTS (a file that is not a socket), _HOST_MEMORY,
 * _SYSTEM; with keys _CONFIG, _IO, _UNSUPPORTED. */
refit_status rft_channel_bind(const char *endpoint, const refit_config *config, rft_channel **out,
                              refit_error *error);
refit_status rft_channel_connect(const char *endpoint, const refit_config *config,
                                 rft_channel **out, refit_error *error);

/* Instead of broadcast.linger_ms. */
void rft_channel_set_linger(rft_channel *channel, uint32_t linger_ms);

/* Tries to send what is queued for at most broadcast.linger_ms (in the background), then frees it.
 */
void rft_channel_close(rft_channel *channel);

/* Of a ROUTER as bound, with the port that was found; of a DEALER a text for sentences. Borrowed.
 */
const char *rft_channel_endpoint(const rft_channel *channel);

/* Whether the endpoint cannot be reached from another host. */
bool rft_channel_is_local(const rft_channel *channel);

/* Of a ROUTER with keys, the public half of its own; else empty. Borrowed. */
const char *rft_channel_key(const rft_channel *channel);

/* The keys that may connect; NULL: the channel uses none (nor does any by inproc). Borrowed. */
rft_allow_list *rft_channel_allow_list(const rft_channel *channel);
/* This wake descriptor is set whenever that list has another edition. */
void rft_channel_watch_keys(rft_channel *channel, int wake);

/* On a DEALER: why the last handshake failed, once (see handshake.h); REFIT_OK: none has. */
refit_status rft_channel_take_failure(rft_channel *channel, refit_error *why);
/* On a DEALER without keys: whether a peer has ever ended a handshake and did not say why. A
 * trainer that asks for keys may do so, but so may one that has no descriptor left, or that
 * restarts. */
bool rft_channel_handshake_ended(const rft_channel *channel);

/* Waits until a message is there, `wake_fd` is readable, a DEALER whose last send was BUSY has room
 * again or whose handshake failed, or the timeout (0 or more) passed. A DEALER connects again here
 * where ZeroMQ has given up. */
void rft_channel_poll(rft_channel *channel, int wake_fd, int timeout_ms);
/* The same for several channels, until there is something of any of them. */
void rft_channels_poll(rft_channel *const *channels, uint32_t count, int wake_fd, int timeout_ms);

/* REFIT_OK, REFIT_ERR_TIMEOUT (none there, nothing is written), or REFIT_ERR_PROTOCOL for one with
 * a wrong number of parts or too long an id (`from` is filled in, empty for the latter). */
refit_status rft_channel_receive(rft_channel *channel, rft_envelope *out, refit_error *error);

/* On a ROUTER: the message was a worker's, so its connection is one. Connections without are ended
 * when they are too many or have lasted too long (connections.h). */
void rft_channel_claim(rft_channel *channel, int connection);
rft_connection_counts rft_channel_count_connections(const rft_channel *channel);

/* Whether they are the same connection: ZeroMQ may give the id of one that has ended to another,
 * but not its key. */
bool rft_peer_id_equal(const rft_peer_id *a, const rft_peer_id *b);

/* `to` is NULL on a DEALER; `payload` may be NULL. REFIT_ERR_BUSY: its queue is full, try later.
 * REFIT_ERR_PEER: there is no peer of that id. */
refit_status rft_channel_send(rft_channel *channel, const rft_peer_id *to, rft_view message,
                              const rft_payload *payload, refit_error *error);
/* The same, of a message that is not copied itself. */
refit_status rft_channel_send_lent(rft_channel *channel, const rft_peer_id *to,
                                   const rft_payload *message, refit_error *error);

#endif
