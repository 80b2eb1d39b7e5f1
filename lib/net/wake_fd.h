/*
 * wake_fd: an eventfd that polls readable while it is set. How another thread, or a signal handler,
 * ends a service thread's poll, and how a caller's event loop learns that something is there.
 */
#ifndef RFT_WAKE_FD_H
#define RFT_WAKE_FD_H

#include "base/error.h"

/* Not set at first. */
refit_status rft_wake_fd_open(int *fd, refit_error *error);
/* -1 is allowed. */
void rft_wake_fd_close(int fd);

/* Any thread, and safe in a signal handler. Setting twice is setting once. */
void rft_wake_fd_set(int fd);
void rft_wake_fd_clear(int fd);

#endif
