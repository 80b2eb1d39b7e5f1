/*
 * waker: an eventfd that polls readable while it is set. How another thread, or a signal handler,
 * ends a service thread's poll, and how a caller's event loop learns that something is there.
 */
#ifndef RFT_WAKER_H
#define RFT_WAKER_H

#include "base/error.h"

/* Not set at first. */
refit_status rft_waker_open(int *fd, refit_error *error);
/* -1 is allowed. */
void rft_waker_close(int fd);

/* Any thread, and safe in a signal handler. Setting twice is setting once. */
void rft_waker_set(int fd);
void rft_waker_clear(int fd);

#endif
