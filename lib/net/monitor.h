/*
 * monitor: what ZeroMQ tells about the connections of one socket, read by the thread that owns the
 * socket.
 */
#ifndef RFT_MONITOR_H
#define RFT_MONITOR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

/* Begins to watch the socket: the socket from which rft_monitor_read reads these events. The
 * watched socket must outlive it, and has one monitor at most. REFIT_ERR_SYSTEM. */
refit_status rft_monitor_open(void *context, void *socket, int events, void **out,
                              refit_error *error);

/* Harmless on NULL. */
void rft_monitor_close(void *monitor, void *socket);

/* The next event and its value (zmq_socket_monitor); false: there is none. Does not block. */
bool rft_monitor_read(void *monitor, uint16_t *event, uint32_t *value);

#endif
