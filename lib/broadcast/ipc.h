/*
 * ipc: the listening socket of an ipc endpoint, and the lock file beside it that keeps a second
 * publisher out. Both files are ours to remove; ZeroMQ only takes the descriptor.
 */
#ifndef RFT_IPC_H
#define RFT_IPC_H

#include "base/error.h"

#define RFT_IPC_PATH_BYTES 128

typedef struct rft_ipc {
    char path[RFT_IPC_PATH_BYTES];
    int lock_fd; /* -1: not open */
} rft_ipc;

/* Takes the path and listens there; the caller owns `*listen_fd`. What a dead process left is
 * replaced. REFIT_ERR_BUSY (a living process has it), REFIT_ERR_EXISTS (there is a file that is no
 * socket), REFIT_ERR_SYSTEM. */
refit_status rft_ipc_open(rft_ipc *ipc, const char *path, int *listen_fd, refit_error *error);

/* Removes both files. Harmless on a closed one. */
void rft_ipc_close(rft_ipc *ipc);

#endif
