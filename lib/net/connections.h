/*
 * connections: those that a publisher's socket has accepted, and above all those that belong to no
 * worker: half open, finished but silent, or of workers that were evicted. How many there may
 * be, how long, and how many handshakes may succeed in a time is bounded here.
 *
 * It belongs to the thread that owns the socket, and blocks nowhere.
 */
#ifndef RFT_CONNECTIONS_H
#define RFT_CONNECTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/config.h>

#include "base/error.h"
#include "net/ipc.h"

typedef struct rft_connections rft_connections;

/* For the statistics. */
typedef struct rft_connection_counts {
    uint64_t unclaimed; /* connections that belong to no worker now */
    uint64_t ended;     /* connections that belonged to no worker and were ended */
    uint64_t refused;   /* connections refused: no descriptor was left */
    uint64_t pauses;    /* times that new connections were held off */
} rft_connection_counts;

/* Begins to watch the socket, before it is bound. `ipc` is the file that it will listen at, which
 * may be opened later and must outlive this; NULL where it will listen over TCP.
 * REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM. */
refit_status rft_connections_open(void *context, void *socket, const rft_ipc *ipc,
                                  const refit_config *config, rft_connections **out,
                                  refit_error *error);

/* Before the socket is closed. NULL is allowed. */
void rft_connections_close(rft_connections *connections);

/* The ZeroMQ socket that is readable when there is something to tend. */
void *rft_connections_monitor(const rft_connections *connections);

/* A descriptor of the listening socket, which the caller owns; -1: there is none. */
int rft_connections_copy_listener(const rft_connections *connections);

/* Reads what ZeroMQ tells, ends connections that are too many or too old, and holds off new ones.
 */
void rft_connections_tend(rft_connections *connections, int64_t now);
/* When it has something to do at the latest. */
int64_t rft_connections_tend_at(const rft_connections *connections);

/* A worker's message came through the connection with this descriptor (any number is allowed). */
void rft_connections_claim(rft_connections *connections, int fd, int64_t now);

/* Any message came through it whole. */
void rft_connections_receive(rft_connections *connections, int fd);

rft_connection_counts rft_connections_count(const rft_connections *connections);

#endif
