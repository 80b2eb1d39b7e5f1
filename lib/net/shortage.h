/*
 * shortage: what ZeroMQ needs of the system, where ZeroMQ would abort the process if it did not get
 * it.
 */
#ifndef RFT_SHORTAGE_H
#define RFT_SHORTAGE_H

#include <ifaddrs.h>
#include <sys/socket.h>

#include "base/error.h"

/* From here on ZeroMQ's calls lead to the functions below, where that can be arranged. Not for two
 * threads at once. */
void rft_shortage_guard(void);

/* Whether the process may open the descriptors and start the threads that a context begins with.
 * REFIT_ERR_SYSTEM says which it lacks. */
refit_status rft_shortage_probe(refit_error *error);

/* A bundled libzmq is compiled to call these (lib/package/parts). */

/* accept4(2), which fails with no other errors than EAGAIN, EINTR, ECONNABORTED and ENFILE, except
 * for what a caller's mistake makes. */
int rft_shortage_accept(int listener, struct sockaddr *address, socklen_t *room, int flags);
/* getifaddrs(3), which fails with no other errors than ECONNREFUSED and EOPNOTSUPP. */
int rft_shortage_interfaces(struct ifaddrs **list);

#endif
