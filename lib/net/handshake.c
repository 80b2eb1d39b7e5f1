/*
 * A monitor of ZeroMQ's, read on the thread that owns the socket.
 *
 * Where a connection breaks, ZeroMQ says so and connects again by itself; where the other side
 * broke the protocol, it says that the connection is gone, and does nothing more. So every end of a
 * connection sets a time at which the channel connects again, and every attempt of ZeroMQ's own
 * clears it.
 *
 * At an ipc path it checks which user listens, as soon as a connection stands. That gives the
 * sentence, and ends the connection; but messages may have come meanwhile, or the connection may be
 * gone already. So the channel looks at each message, too.
 */
#include "net/handshake.h"

#include <zmq.h>

#include "base/clock.h"
#include "base/forks.h"
#include "net/ipc.h"
#include "net/socket.h"

#define RETRY_MS 250

#define FAILURES                                                                                   \
    (ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |                  \
     ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)
#define TRIES (ZMQ_EVENT_CONNECTED | ZMQ_EVENT_CONNECT_DELAYED | ZMQ_EVENT_CONNECT_RETRIED)

refit_status rft_handshake_open(rft_handshake *handshake, void *context, void *socket, bool keys,
                                const char *path, refit_error *error)
{
    *handshake = (rft_handshake){.keys = keys, .path = path, .fresh = -1, .retry_at = INT64_MAX};
    return rft_monitor_open(context, socket, FAILURES | TRIES | ZMQ_EVENT_DISCONNECTED,
                            &handshake->monitor, error);
}

void rft_handshake_close(rft_handshake *handshake, void *socket)
{
    rft_monitor_close(handshake->monitor, socket);
    handshake->monitor = NULL;
}

/* ---- Events */

static void note(rft_handshake *handshake, refit_status status, const char *sentence)
{
    (void)rft_fail(&handshake->why, status, "%s", sentence);
}

static void note_mismatch(rft_handshake *handshake)
{
    note(handshake, REFIT_ERR_SECURITY,
         handshake->keys ? "the handshake failed: the other side uses no keys; is it the "
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
             "the handshake failed: the other side is not a trainer, or the connection changes "
             "bytes");
    } else if (handshake->keys) {
        note(handshake, REFIT_ERR_PEER,
             "the handshake failed: the other side ended it; is security.server_key the trainer's "
             "public key?");
    } else {
        handshake->ended = true; /* no failure of its own: a trainer that restarts does so, too */
    }
}

void rft_handshake_refuse(rft_handshake *handshake, const refit_error *why, int64_t now)
{
    handshake->why = *why;
    handshake->refused = true;
    handshake->cut = true;
    handshake->retry_at = rft_after_ms(now, RETRY_MS);
}

bool rft_handshake_take_cut(rft_handshake *handshake)
{
    bool cut = handshake->cut;
    handshake->cut = false;
    return cut;
}

/* A folder that is gone again belongs to no user. */
static void check_listener(rft_handshake *handshake, int64_t now)
{
    refit_error why;
    int fd = handshake->fresh;
    handshake->fresh = -1;
    if (handshake->path == NULL || fd < 0 || handshake->refused) return;
    refit_status status = rft_ipc_check_connection(handshake->path, fd, &why);
    if (status == REFIT_OK) status = rft_ipc_check_folder(handshake->path, &why);
    if (status == REFIT_OK) status = rft_ipc_check_socket(handshake->path, &why);
    if (status == REFIT_ERR_SECURITY) rft_handshake_refuse(handshake, &why, now);
}

void rft_handshake_receive(rft_handshake *handshake, int64_t now)
{
    uint16_t event;
    uint32_t value;
    if (handshake->monitor == NULL) return;
    while (rft_monitor_read(handshake->monitor, &event, &value)) {
        if ((event & FAILURES) != 0) note_failure(handshake, event, value);
        if (event == ZMQ_EVENT_CONNECT_RETRIED) handshake->missed = true;
        if (event == ZMQ_EVENT_CONNECTED) handshake->missed = false;
        handshake->fresh = event == ZMQ_EVENT_CONNECTED ? (int)value : -1;
        if (handshake->refused)
            continue; /* ZeroMQ makes no more attempts, though an earlier event may say so */
        if ((event & TRIES) != 0) {
            handshake->retry_at = INT64_MAX;
        } else if (handshake->retry_at == INT64_MAX) {
            handshake->retry_at = rft_after_ms(now, RETRY_MS);
        }
    }
    rft_forks_keep(handshake->fresh); /* not one that has gone since: its number may be a file's */
    check_listener(handshake, now);
}

bool rft_handshake_take_missed(rft_handshake *handshake)
{
    bool missed = handshake->missed;
    handshake->missed = false;
    return missed;
}

bool rft_handshake_is_due(rft_handshake *handshake, int64_t now)
{
    if (now < handshake->retry_at) return false;
    handshake->retry_at = INT64_MAX;
    handshake->refused = false;
    return true;
}

refit_status rft_handshake_take(rft_handshake *handshake, refit_error *why)
{
    refit_status status = (refit_status)handshake->why.status;
    if (status != REFIT_OK) *why = handshake->why;
    handshake->why.status = REFIT_OK;
    return status;
}
