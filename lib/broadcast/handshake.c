/*
 * A monitor of ZeroMQ's, read on the thread that owns the socket.
 *
 * Where a connection breaks, ZeroMQ says so and tries again by itself; where the other side broke
 * the protocol, it says that the connection is gone, and nothing more comes. So every end of a
 * connection sets a moment to connect anew, and every try of ZeroMQ's own takes it back.
 */
#include "broadcast/handshake.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <zmq.h>

#include "base/clock.h"
#include "base/random.h"

#define RETRY_MS 250

#define FAILURES                                                                                   \
    (ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |                  \
     ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)
#define TRIES (ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CONNECT_DELAYED | ZMQ_EVENT_CONNECT_RETRIED)

refit_status rft_handshake_open(rft_handshake *handshake, void *context, void *socket, bool keys,
                                refit_error *error)
{
    const int none = 0;
    char name[64];
    uint64_t unique;
    RFT_TRY(rft_random_u64(&unique, error));
    snprintf(name, sizeof name, "inproc://refit-connects-%016" PRIx64, unique);
    *handshake = (rft_handshake){.keys = keys, .retry_at = INT64_MAX};
    handshake->ear = zmq_socket(context, ZMQ_PAIR);
    /* No limit: where the queue is full, ZeroMQ's thread would wait for us. */
    if (handshake->ear != NULL &&
        zmq_setsockopt(handshake->ear, ZMQ_RCVHWM, &none, sizeof none) == 0 &&
        zmq_setsockopt(handshake->ear, ZMQ_LINGER, &none, sizeof none) == 0 &&
        zmq_socket_monitor(socket, name, FAILURES | TRIES | ZMQ_EVENT_DISCONNECTED) == 0 &&
        zmq_connect(handshake->ear, name) == 0) {
        return REFIT_OK;
    }
    int code = zmq_errno();
    rft_handshake_close(handshake, socket);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "a connection cannot be watched: %s",
                        zmq_strerror(code));
}

void rft_handshake_close(rft_handshake *handshake, void *socket)
{
    if (handshake->ear == NULL) return;
    (void)zmq_socket_monitor(socket, NULL, 0);
    zmq_close(handshake->ear);
    handshake->ear = NULL;
}

/* ---- What it heard */

static void note(rft_handshake *handshake, refit_status status, const char *sentence)
{
    (void)rft_fail(&handshake->why, status, "%s", sentence);
}

static void note_mismatch(rft_handshake *handshake)
{
    note(handshake, REFIT_ERR_SECURITY,
         handshake->keys ? "the handshake failed: what answers there uses no keys; is it the "
                           "trainer, and has it security.key?"
                         : "the handshake failed: the trainer asks for keys; set security.key and "
                           "security.server_key");
}

static void note_failure(rft_handshake *handshake, uint16_t event, uint32_t value)
{
    if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
        note(handshake, REFIT_ERR_SECURITY,
             "the handshake failed: the trainer does not allow this worker's key; put its .public "
             "file into the trainer's security.allow folder");
    } else if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH &&
               event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) {
        note_mismatch(handshake);
    } else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) {
        note(handshake, REFIT_ERR_PEER,
             "the handshake failed: what answers there is no trainer, or the line is bad");
    } else if (handshake->keys) {
        note(handshake, REFIT_ERR_PEER,
             "the handshake failed: the other side ended it; is security.server_key the trainer's "
             "public key?");
    }
}

/* The first frame of what a monitor says: a number of 16 bits and one of 32, as the machine has
 * them. The second frame is an address. */
static bool hear_one(rft_handshake *handshake, uint16_t *event, uint32_t *value)
{
    unsigned char head[6];
    char address[256];
    int more = 0;
    size_t room = sizeof more;
    if (zmq_recv(handshake->ear, head, sizeof head, ZMQ_DONTWAIT) != (int)sizeof head) return false;
    memcpy(event, head, sizeof *event);
    memcpy(value, head + sizeof *event, sizeof *value);
    (void)zmq_getsockopt(handshake->ear, ZMQ_RCVMORE, &more, &room);
    if (more != 0) (void)zmq_recv(handshake->ear, address, sizeof address, ZMQ_DONTWAIT);
    return true;
}

void rft_handshake_hear(rft_handshake *handshake, int64_t now)
{
    uint16_t event;
    uint32_t value;
    if (handshake->ear == NULL) return;
    while (hear_one(handshake, &event, &value)) {
        if ((event & FAILURES) != 0) note_failure(handshake, event, value);
        if ((event & TRIES) != 0) {
            handshake->retry_at = INT64_MAX;
        } else if (handshake->retry_at == INT64_MAX) {
            handshake->retry_at = rft_after_ms(now, RETRY_MS);
        }
    }
}

bool rft_handshake_is_due(rft_handshake *handshake, int64_t now)
{
    if (now < handshake->retry_at) return false;
    handshake->retry_at = INT64_MAX;
    return true;
}

refit_status rft_handshake_take(rft_handshake *handshake, refit_error *why)
{
    refit_status status = (refit_status)handshake->why.status;
    if (status != REFIT_OK) *why = handshake->why;
    handshake->why.status = REFIT_OK;
    return status;
}
