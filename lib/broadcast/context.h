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

/* With the last one, waits for what closed sockets still send: at most their linger time. */
void rft_context_release(void *context);

#endif
