/*
 * ipc: the listening socket of an ipc endpoint, and the lock file that keeps a second publisher
 * out. Both files are removed here; ZeroMQ only takes the descriptor. Also tells whether the
 * process that listens at such a path can be trusted: if it is this user's or root's, at a path
 * that no other user could have led elsewhere.
 */
#ifndef RFT_IPC_H
#define RFT_IPC_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/error.h"

#define RFT_IPC_PATH_BYTES 108 /* of a socket address */
#define RFT_IPC_LOCK_BYTES 512

typedef struct rft_ipc {
    char path[RFT_IPC_PATH_BYTES];
    char lock[RFT_IPC_LOCK_BYTES]; /* its path */
    int lock_fd;                   /* -1: not open */
    dev_t device;                  /* with `inode`: the socket's file */
    ino_t inode;
} rft_ipc;

/* Takes the path and listens there; the caller owns `*listen_fd`. The files of a dead process
 * of this user are replaced. REFIT_ERR_BUSY (a living process has it, or another user's socket lies
 * there), REFIT_ERR_EXISTS (there is a file that is not a socket), REFIT_ERR_SYSTEM; what
 * rft_own_folder_find answers, where the lock lies there. */
refit_status rft_ipc_open(rft_ipc *ipc, const char *path, int *listen_fd, refit_error *error);

/* Removes both files. Harmless on a closed one. */
void rft_ipc_close(rft_ipc *ipc);

/* Renames the socket's file, so that no process can connect, or gives its name back. Connections
 * that stand, and those that wait to be accepted, stay. False sets errno: the file could not be
 * renamed, or another one has its name. */
bool rft_ipc_hide(const rft_ipc *ipc);
bool rft_ipc_show(const rft_ipc *ipc);

/* Whether the path, or the name that it has while it is hidden, still leads to the socket: not
 * after the system has removed the folder of a user that logged out, for example. A connection that
 * stands is not touched by that. */
bool rft_ipc_is_named(const rft_ipc *ipc);

/* Whether a process listens there: by a connection, which is closed at once. */
bool rft_ipc_is_listening(const char *path);

/* Removes the sockets whose names begin with `prefix`, and their locks, from a folder that is this
 * user's alone, where the processes that made them have ended. The names are never used again. */
void rft_ipc_sweep(const char *folder, const char *prefix);

/* Whether only this user and root can put something at the path, or, in a sticky folder, take away
 * what lies there. REFIT_ERR_SECURITY names the folder; REFIT_ERR_IO: there is no such folder. */
refit_status rft_ipc_check_folder(const char *path, refit_error *error);

/* Whether the socket there, if there is one, belongs to this user or root. REFIT_ERR_SECURITY. */
refit_status rft_ipc_check_socket(const char *path, refit_error *error);

/* Whether this user or root listens there, by a connection to it, or by what ZeroMQ notes of the
 * connection of a message ("Peer-Address", here "localhost:UID:GID:PID"; NULL: it noted nothing,
 * which is refused). REFIT_ERR_SECURITY names the user. */
refit_status rft_ipc_check_connection(const char *path, int fd, refit_error *error);
refit_status rft_ipc_check_peer(const char *path, const char *peer, refit_error *error);

#endif
