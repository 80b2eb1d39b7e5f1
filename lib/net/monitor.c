/* A PAIR by inproc, under a name that is used once: names of closed sockets stay taken for a while.
 */
#include "net/monitor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <zmq.h>

#include "base/random.h"

refit_status rft_monitor_open(void *context, void *socket, int events, void **out,
                              refit_error *error)
{
    const int none = 0;
    char name[64];
    uint64_t unique;
    RFT_TRY(rft_random_u64(&unique, error));
    snprintf(name, sizeof name, "inproc://refit-events-%016" PRIx64, unique);
    void *monitor = zmq_socket(context, ZMQ_PAIR);
    /* No limit: where the queue is full, ZeroMQ's thread would wait for us. */
    if (monitor != NULL && zmq_setsockopt(monitor, ZMQ_RCVHWM, &none, sizeof none) == 0 &&
        zmq_setsockopt(monitor, ZMQ_LINGER, &none, sizeof none) == 0 &&
        zmq_socket_monitor(socket, name, events) == 0 && zmq_connect(monitor, name) == 0) {
        *out = monitor;
        return REFIT_OK;
    }
    int code = zmq_errno();
    rft_monitor_close(monitor, socket);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "connections cannot be watched: %s",
                        zmq_strerror(code));
}

void rft_monitor_close(void *monitor, void *socket)
{
    if (monitor == NULL) return;
    (void)zmq_socket_monitor(socket, NULL, 0);
    zmq_close(monitor);
}

/* The first frame has a number of 16 bits and one of 32, as the machine has them; the second is an
 * address. */
bool rft_monitor_read(void *monitor, uint16_t *event, uint32_t *value)
{
    unsigned char head[6];
    char address[256];
    int more = 0;
    size_t room = sizeof more;
    if (zmq_recv(monitor, head, sizeof head, ZMQ_DONTWAIT) != (int)sizeof head) return false;
    memcpy(event, head, sizeof *event);
    memcpy(value, head + sizeof *event, sizeof *value);
    (void)zmq_getsockopt(monitor, ZMQ_RCVMORE, &more, &room);
    if (more != 0) (void)zmq_recv(monitor, address, sizeof address, ZMQ_DONTWAIT);
    return true;
}
