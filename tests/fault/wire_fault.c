/*
 * ZeroMQ's calls, with a fault before the n-th message.
 *
 * A message's parts are sent, and received, one after another by one thread, so what becomes of the
 * parts after the first is kept per thread. A refusal hits the first part, as ZeroMQ's do: it
 * never refuses the rest of a message. A damaged payload is damaged in a copy, since the bytes of
 * the message may be the trainer's own.
 */
#include "tests/fault/wire_fault.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include <zmq.h>

static _Atomic(wire_fault) fault;
static atomic_uint_fast64_t left; /* until the fault; 0: it was met */

static _Thread_local bool inside_sent;     /* the part before had more after it */
static _Thread_local bool inside_received; /* the same for received parts */
static _Thread_local bool swallows;        /* the rest of the message that is being sent */

const char *wire_fault_name(wire_fault which)
{
    static const char *const names[WIRE_FAULTS] = {"none", "full",    "gone",   "no memory",
                                                   "lost", "unheard", "damaged"};
    return names[which];
}

void wire_fail(wire_fault which, uint64_t nth)
{
    atomic_store(&left, nth);
    atomic_store(&fault, which);
}

bool wire_stop(void)
{
    return atomic_exchange(&fault, WIRE_NONE) != WIRE_NONE && atomic_load(&left) == 0;
}

/* Whether this is the one. */
static bool is_due(wire_fault which)
{
    if (atomic_load(&fault) != which) return false;
    uint64_t before = atomic_load(&left);
    while (before > 0 && !atomic_compare_exchange_weak(&left, &before, before - 1))
        continue;
    return before == 1;
}

/* ---- Sending */

int __real_zmq_msg_init_size(zmq_msg_t *part, size_t bytes);
int __wrap_zmq_msg_init_size(zmq_msg_t *part, size_t bytes);

int __wrap_zmq_msg_init_size(zmq_msg_t *part, size_t bytes)
{
    if (is_due(WIRE_NO_MEMORY)) {
        errno = ENOMEM;
        return -1;
    }
    return __real_zmq_msg_init_size(part, bytes);
}

int __real_zmq_msg_send(zmq_msg_t *part, void *socket, int flags);
int __wrap_zmq_msg_send(zmq_msg_t *part, void *socket, int flags);

/* As ZeroMQ leaves a part that it has taken. */
static int swallow(zmq_msg_t *part)
{
    int bytes = (int)zmq_msg_size(part);
    zmq_msg_close(part);
    zmq_msg_init(part);
    return bytes;
}

int __wrap_zmq_msg_send(zmq_msg_t *part, void *socket, int flags)
{
    bool first = !inside_sent;
    inside_sent = (flags & ZMQ_SNDMORE) != 0;
    if (first && (is_due(WIRE_FULL) || is_due(WIRE_GONE))) {
        errno = atomic_load(&fault) == WIRE_FULL ? EAGAIN : EHOSTUNREACH;
        inside_sent = false;
        return -1;
    }
    if (first) swallows = is_due(WIRE_LOST);
    if (swallows) return swallow(part);
    int sent = __real_zmq_msg_send(part, socket, flags);
    if (sent < 0) inside_sent = false;
    return sent;
}

/* ---- Receiving */

int __real_zmq_msg_recv(zmq_msg_t *part, void *socket, int flags);
int __wrap_zmq_msg_recv(zmq_msg_t *part, void *socket, int flags);

/* Reads to the end of the message whose first part is there. */
static void drop_rest(zmq_msg_t *part, void *socket, int flags)
{
    while (zmq_msg_more(part) && __real_zmq_msg_recv(part, socket, flags) >= 0)
        continue;
}

/* Only a trainer sends two parts to a worker, and the second is a payload. A trainer receives two
 * as well, the sender's id and the message: it is told apart by its kind of socket. */
static bool is_payload(const zmq_msg_t *part, void *socket)
{
    int kind = 0;
    size_t bytes = sizeof kind;
    return inside_received && !zmq_msg_more(part) && zmq_msg_size(part) > 0 &&
           zmq_getsockopt(socket, ZMQ_TYPE, &kind, &bytes) == 0 && kind == ZMQ_DEALER;
}

static void damage(zmq_msg_t *part)
{
    zmq_msg_t copy;
    size_t bytes = zmq_msg_size(part);
    if (__real_zmq_msg_init_size(&copy, bytes) != 0) return;
    memcpy(zmq_msg_data(&copy), zmq_msg_data(part), bytes);
    ((unsigned char *)zmq_msg_data(&copy))[bytes / 2] ^= 4;
    zmq_msg_move(part, &copy);
    zmq_msg_close(&copy);
}

int __wrap_zmq_msg_recv(zmq_msg_t *part, void *socket, int flags)
{
    int got = __real_zmq_msg_recv(part, socket, flags);
    if (got < 0) return got;
    if (!inside_received && is_due(WIRE_UNHEARD)) {
        drop_rest(part, socket, flags);
        return __wrap_zmq_msg_recv(part, socket, flags);
    }
    if (is_payload(part, socket) && is_due(WIRE_DAMAGED)) damage(part);
    inside_received = zmq_msg_more(part) != 0;
    return (int)zmq_msg_size(part);
}
