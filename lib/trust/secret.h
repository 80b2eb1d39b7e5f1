/*
 * secret: memory for a secret key while it is read, written or handed on: pages of its own, between
 * two that cannot be touched, locked so that they are not swapped out, left out of core dumps and
 * of forked children, wiped before they are given back.
 *
 * This holds for the copies of this library. ZeroMQ keeps one of its own for as long as the socket
 * lives, in memory that it takes by malloc and does not show: a core dump of a process with keys
 * has that one, so no such process should write any (`ulimit -c 0`) where others read them.
 */
#ifndef RFT_SECRET_H
#define RFT_SECRET_H

#include <stddef.h>

#include "base/error.h"

/* Zeroed. Where the limit of locked memory (RLIMIT_MEMLOCK) is reached, the log says that it is not
 * locked. REFIT_ERR_HOST_MEMORY. */
refit_status rft_secret_open(size_t bytes, void **out, refit_error *error);

/* `bytes` as they were asked for; NULL is allowed. */
void rft_secret_close(void *secret, size_t bytes);

#endif
