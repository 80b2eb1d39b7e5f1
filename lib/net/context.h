/*
 * context: the process's one ZeroMQ context, with its one I/O thread. Every channel holds it; the
 * last one to let go ends it. A child of a fork gets a context of its own: its parent's has no
 * thread there.
 */
#ifndef RFT_CONTEXT_H
#define RFT_CONTEXT_H

#include "base/error.h"

/* Gives ZeroMQ's handle. REFIT_ERR_SYSTEM. */
refit_status rft_context_acquire(void **out, refit_error *error);

/* A ROUTER of that context: NULL and errno, as of zmq_socket. The ids that it gives to peers
 * without one begin at random bits instead of a number that all processes share. Other threads that
 * call rand() at this moment get numbers of another series; afterwards all goes on where it was. */
void *rft_context_router(void *context);

/* With the last one, waits for what closed sockets still send: at most their linger time. */
void rft_context_release(void *context);

#endif
