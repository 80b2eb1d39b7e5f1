/*
 * socket: what every ZeroMQ socket needs before it is a channel: the process's one context, keys
 * (CURVE) as options, and a monitor of its connections.
 */
#ifndef RFT_SOCKET_H
#define RFT_SOCKET_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/config.h>

#include "base/error.h"
#include "trust/key.h"

/* ---- The context, which has one I/O thread. Every channel holds it, and the last release ends it.
 * A child of a fork gets a context of its own: its parent's has no thread there. */

/* Gives ZeroMQ's handle. REFIT_ERR_SYSTEM. */
refit_status rft_context_acquire(void **out, refit_error *error);

/* A ROUTER of that context: NULL and errno, as of zmq_socket. The ids that it gives to peers
 * without one begin at random bits instead of a number that all processes share. Other threads that
 * call rand() at this moment get numbers of another series; afterwards the series goes on where it
 * was. */
void *rft_context_router(void *context);

/* With the last one, waits for what closed sockets still send: at most their linger time. */
void rft_context_release(void *context);

/* ---- Keys. CURVE encrypts a connection and shows each end the other's key. */

/* Gives a socket that will bind its secret key. A peer that connects then shows a key of its own,
 * and the ZAP handler is asked about that key under this domain; where no handler answers, no peer
 * is admitted. `key`: the public half of its own.
 * REFIT_ERR_UNSUPPORTED (ZeroMQ was built without CURVE), REFIT_ERR_SYSTEM, and what
 * rft_key_file_read answers. */
refit_status rft_curve_serve(void *socket, const refit_config *config, const char *domain,
                             char key[RFT_KEY_TEXT], refit_error *error);

/* Gives a socket that will connect its own pair and the only key that it talks to. The same errors.
 */
refit_status rft_curve_join(void *socket, const refit_config *config, refit_error *error);

/* ---- A monitor: what ZeroMQ tells about the connections of one socket, read by the thread that
 * owns the socket. */

/* Begins to watch the socket: the socket from which rft_monitor_read reads these events. The
 * watched socket must outlive it, and has one monitor at most. REFIT_ERR_SYSTEM. */
refit_status rft_monitor_open(void *context, void *socket, int events, void **out,
                              refit_error *error);

/* Harmless on NULL. */
void rft_monitor_close(void *monitor, void *socket);

/* The next event and its value (zmq_socket_monitor); false: there is none. Does not block. */
bool rft_monitor_read(void *monitor, uint16_t *event, uint32_t *value);

#endif
