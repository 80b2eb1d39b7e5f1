/*
 * forks: descriptors that a forked child must not keep: listening sockets, connections, locks and
 * shared memory. A copy of one keeps the port, the other end, the lock or the memory taken after
 * this process has closed its own, or was killed. O_CLOEXEC does not help where no exec follows.
 */
#ifndef RFT_FORKS_H
#define RFT_FORKS_H

/* From here on a child of fork(2) starts without it. It may be closed by others, a transport for
 * example: a file that gets its number later is not touched. -1 is allowed. */
void rft_forks_keep(int fd);

/* Closes a descriptor that was given to rft_forks_keep, and gives up its lock (flock; others are
 * the caller's), whoever has a copy. -1 is allowed. */
void rft_forks_close(int fd);

/* Between the two no other thread of this process forks: no child has what is opened there and
 * closed again, or kept from children. Nothing that can wait may be done between them, nor may
 * descriptors be given to the two functions above. Only fork(2) is held up. */
void rft_forks_lock(void);
void rft_forks_unlock(void);

#endif
