/*
 * Socket files outlive their processes, and ZeroMQ would unlink any file at its path, a living
 * publisher's socket too. So a publisher owns the path while it holds a lock on PATH.lock, makes
 * the socket itself with mode 0600, and hands ZeroMQ the descriptor.
 *
 * In a folder in which other users make files, such as /tmp, one of them could hold PATH.lock
 * first. There the lock lies in the folder of this user's own. Its name says which folder PATH is
 * in by the folder's number, so that all ways to write PATH lead to one lock. Processes of other
 * users have other locks; they cannot replace the socket of this one, because such a folder is
 * sticky.
 *
 * A listening socket of this kind takes no filter and always a connection more, so new connections
 * can only be refused by taking the name of its file away (rft_ipc_hide).
 *
 * The lock file is unlinked on close, with the socket. Not where its name leads to another file:
 * the folder was removed meanwhile, and another publisher has made both again. A process that
 * locks it afterwards checks that it still has its name, or starts over with the new one.
 */
#include "net/ipc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/forks.h"
#include "base/user.h"
#include "trust/trusted_path.h"

#define BACKLOG     32 /* fewer than the descriptors that connections.c keeps free */
#define HIDDEN      ".held"
#define LOCK_SUFFIX ".lock"

/* ---- The folder ---- */

static const char *name_in(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* Of the path's folder, with "/" at its end: that way the folder is one of those on the way. */
static void folder_of(const char *path, char folder[RFT_IPC_PATH_BYTES + 2])
{
    const char *name = name_in(path);
    (void)snprintf(folder, RFT_IPC_PATH_BYTES + 2, "%s%.*s", name == path ? "./" : "",
                   (int)(name - path), path);
}

refit_status rft_ipc_check_folder(const char *path, refit_error *error)
{
    char folder[RFT_IPC_PATH_BYTES + 2];
    refit_error why;
    int fd = -1;
    folder_of(path, folder);
    refit_status status =
        rft_trusted_open(AT_FDCWD, folder, "socket in", O_PATH | O_DIRECTORY, &fd, &why);
    if (fd >= 0) close(fd);
    RFT_REFUSE_IF(status == REFIT_ERR_SECURITY, error, status,
                  "%s: set XDG_RUNTIME_DIR to a folder of yours (mode 0700), or name ipc://PATH in "
                  "one",
                  why.text);
    return status == REFIT_OK ? status : rft_fail_sub(error, status, why.subsystem, "%s", why.text);
}

static refit_status lock_place(rft_ipc *ipc, refit_error *error)
{
    char folder[RFT_IPC_PATH_BYTES + 2], own[RFT_OWN_FOLDER_BYTES];
    struct stat found;
    folder_of(ipc->path, folder);
    if (stat(folder, &found) != 0)
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno,
                            "the folder of ipc://%s cannot be used: %s", ipc->path,
                            strerror(errno));
    if ((found.st_mode & (S_IWGRP | S_IWOTH)) == 0) {
        (void)snprintf(ipc->lock, sizeof ipc->lock, "%s" LOCK_SUFFIX, ipc->path);
        return REFIT_OK;
    }
    RFT_TRY(rft_own_folder_find(0, own, error));
    (void)snprintf(ipc->lock, sizeof ipc->lock, "%s/.%" PRIx64 "-%" PRIx64 "-%s" LOCK_SUFFIX, own,
                   (uint64_t)found.st_dev, (uint64_t)found.st_ino, name_in(ipc->path));
    return REFIT_OK;
}

/* ---- The lock ---- */

static struct sockaddr_un socket_address(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    return address;
}

static bool same_file(int fd, const char *path)
{
    struct stat open_one, named_one;
    return fstat(fd, &open_one) == 0 && stat(path, &named_one) == 0 &&
           open_one.st_ino == named_one.st_ino && open_one.st_dev == named_one.st_dev;
}

static refit_status lock_take(rft_ipc *ipc, refit_error *error)
{
    const char *path = ipc->lock;
    RFT_TRY(lock_place(ipc, error));
    for (;;) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0) {
            return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno,
                                "lock file %s could not be opened: %s", path, strerror(errno));
        }
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            close(fd);
            return rft_fail(error, REFIT_ERR_BUSY,
                            "another publisher has the endpoint ipc://%s: close it, or use another",
                            ipc->path);
        }
        ipc->lock_fd = fd;
        rft_forks_keep(fd);
        if (same_file(fd, path)) return REFIT_OK;
        rft_forks_close(fd);
        ipc->lock_fd = -1;
    }
}

/* ---- The socket ---- */

bool rft_ipc_is_listening(const char *path)
{
    struct sockaddr_un address = socket_address(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    bool alive = connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN;
    close(fd);
    return alive;
}

/* A process that does not know the lock may listen there. */
static refit_status path_clear(const char *path, refit_error *error)
{
    struct stat found;
    if (lstat(path, &found) != 0) return REFIT_OK;
    RFT_REFUSE_IF(!S_ISSOCK(found.st_mode), error, REFIT_ERR_EXISTS,
                  "%s is not a socket: remove it, or use another endpoint", path);
    RFT_REFUSE_IF(
        !rft_user_is_own(found.st_uid), error, REFIT_ERR_BUSY,
        "the socket %s belongs to user %u, not to user %u%s: have it removed, or use another "
        "endpoint",
        path, (unsigned)found.st_uid, (unsigned)geteuid(), rft_user_doubt(found.st_uid));
    RFT_REFUSE_IF(rft_ipc_is_listening(path), error, REFIT_ERR_BUSY,
                  "another process listens at ipc://%s: close it, or use another endpoint", path);
    (void)unlink(path);
    return REFIT_OK;
}

/* No process can connect before listen(), so the mode is in force from the first moment. */
static refit_status socket_listen(rft_ipc *ipc, int *out, refit_error *error)
{
    const char *path = ipc->path;
    struct sockaddr_un address = socket_address(path);
    struct stat made;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        chmod(path, 0600) == 0 && lstat(path, &made) == 0 && listen(fd, BACKLOG) == 0) {
        rft_forks_keep(fd);
        ipc->device = made.st_dev;
        ipc->inode = made.st_ino;
        *out = fd;
        return REFIT_OK;
    }
    int code = errno;
    rft_forks_close(fd);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "cannot listen at ipc://%s: %s", path,
                        strerror(code));
}

/* ---- Its second name */

typedef struct hidden_path {
    char text[RFT_IPC_PATH_BYTES + sizeof HIDDEN];
} hidden_path;

static hidden_path hidden_of(const rft_ipc *ipc)
{
    hidden_path hidden;
    (void)snprintf(hidden.text, sizeof hidden.text, "%s" HIDDEN, ipc->path);
    return hidden;
}

/* Removes the file of a process that died while its socket was hidden. */
static refit_status hidden_clear(const rft_ipc *ipc, refit_error *error)
{
    hidden_path hidden = hidden_of(ipc);
    return path_clear(hidden.text, error);
}

static bool is_socket_of(const rft_ipc *ipc, const char *path)
{
    struct stat found;
    if (lstat(path, &found) != 0) return false;
    errno = EEXIST;
    return found.st_dev == ipc->device && found.st_ino == ipc->inode;
}

static void hidden_remove(const rft_ipc *ipc)
{
    hidden_path hidden = hidden_of(ipc);
    if (is_socket_of(ipc, hidden.text)) (void)unlink(hidden.text);
}

/* A file that has the other name stays. Not every file system can promise that in one step. */
static bool rename_own(const rft_ipc *ipc, const char *from, const char *to)
{
    struct stat other;
    if (!is_socket_of(ipc, from)) return false;
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return true;
    if (errno != EINVAL && errno != ENOSYS) return false;
    if (lstat(to, &other) == 0) {
        errno = EEXIST;
        return false;
    }
    return rename(from, to) == 0;
}

bool rft_ipc_hide(const rft_ipc *ipc)
{
    hidden_path hidden = hidden_of(ipc);
    return rename_own(ipc, ipc->path, hidden.text);
}

bool rft_ipc_show(const rft_ipc *ipc)
{
    hidden_path hidden = hidden_of(ipc);
    return rename_own(ipc, hidden.text, ipc->path);
}

/* ---- Opening and closing */

refit_status rft_ipc_open(rft_ipc *ipc, const char *path, int *listen_fd, refit_error *error)
{
    refit_status status;
    ipc->lock_fd = -1;
    snprintf(ipc->path, sizeof ipc->path, "%s", path);
    RFT_TRY(lock_take(ipc, error));
    RFT_TRY_GOTO(path_clear(path, error), undo_lock);
    RFT_TRY_GOTO(hidden_clear(ipc, error), undo_lock);
    RFT_TRY_GOTO(socket_listen(ipc, listen_fd, error), undo_lock);
    return REFIT_OK;

undo_lock:
    (void)unlink(ipc->lock);
    rft_forks_close(ipc->lock_fd);
    ipc->lock_fd = -1;
    return status;
}

void rft_ipc_close(rft_ipc *ipc)
{
    if (ipc->lock_fd < 0) return;
    if (same_file(ipc->lock_fd, ipc->lock)) { /* else the files are another publisher's by now */
        hidden_remove(ipc);
        (void)unlink(ipc->path);
        (void)unlink(ipc->lock);
    }
    rft_forks_close(ipc->lock_fd);
    ipc->lock_fd = -1;
}

bool rft_ipc_is_named(const rft_ipc *ipc)
{
    hidden_path hidden = hidden_of(ipc);
    return is_socket_of(ipc, ipc->path) || is_socket_of(ipc, hidden.text);
}

/* ---- Files of dead processes ---- */

/* A socket is made after its lock was taken. So a socket whose lock is free belongs to a process
 * that has ended; a lock without a socket may be one that a process is about to take. */
static void sweep_one(int folder, const char *socket)
{
    char lock[NAME_MAX + sizeof LOCK_SUFFIX];
    struct stat open_one, named_one;
    size_t length = strlen(socket), more = strlen(HIDDEN);
    if (length > more && strcmp(socket + length - more, HIDDEN) == 0) length -= more;
    (void)snprintf(lock, sizeof lock, "%.*s" LOCK_SUFFIX, (int)length, socket);
    int fd = openat(folder, lock, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &open_one) == 0 &&
        fstatat(folder, lock, &named_one, AT_SYMLINK_NOFOLLOW) == 0 &&
        open_one.st_ino == named_one.st_ino) {
        (void)unlinkat(folder, socket, 0);
        (void)unlinkat(folder, lock, 0);
    }
    close(fd);
}

void rft_ipc_sweep(const char *folder, const char *prefix)
{
    DIR *listing = opendir(folder);
    if (listing == NULL) return;
    for (const struct dirent *found = readdir(listing); found != NULL; found = readdir(listing)) {
        struct stat file;
        if (strncmp(found->d_name, prefix, strlen(prefix)) == 0 &&
            fstatat(dirfd(listing), found->d_name, &file, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISSOCK(file.st_mode))
            sweep_one(dirfd(listing), found->d_name);
    }
    closedir(listing);
}

/* ---- The listener's user ---- */

static bool is_trusted(uid_t user)
{
    return rft_user_is_own(user) || user == 0;
}

refit_status rft_ipc_check_socket(const char *path, refit_error *error)
{
    struct stat found;
    if (lstat(path, &found) != 0) return REFIT_OK;
    RFT_REFUSE_IF(
        !is_trusted(found.st_uid), error, REFIT_ERR_SECURITY,
        "%s belongs to user %u, not to user %u%s: run both ends as one user, use a path in a "
        "folder of your own (user://NAME), or keys (security.key)",
        path, (unsigned)found.st_uid, (unsigned)geteuid(), rft_user_doubt(found.st_uid));
    return REFIT_OK;
}

static refit_status check_listener(const char *path, uid_t listener, refit_error *error)
{
    RFT_REFUSE_IF(
        !is_trusted(listener), error, REFIT_ERR_SECURITY,
        "user %u listens at ipc://%s, not user %u%s: run both ends as one user, use a path "
        "in a folder of your own (user://NAME), or keys (security.key)",
        (unsigned)listener, path, (unsigned)geteuid(), rft_user_doubt(listener));
    return REFIT_OK;
}

/* ZeroMQ may have closed the descriptor, and another file may have got its number: one that is no
 * connected socket has no user. A peer in another PID namespace has a user, but no process id. */
refit_status rft_ipc_check_connection(const char *path, int fd, refit_error *error)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid == (uid_t)-1)
        return REFIT_OK;
    return check_listener(path, peer.uid, error);
}

refit_status rft_ipc_check_peer(const char *path, const char *peer, refit_error *error)
{
    const char *colon = peer == NULL ? NULL : strchr(peer, ':');
    char *end = NULL;
    unsigned long user = colon == NULL ? 0 : strtoul(colon + 1, &end, 10);
    RFT_REFUSE_IF(end == NULL || end == colon + 1 || *end != ':' || user > UINT32_MAX, error,
                  REFIT_ERR_SECURITY,
                  "this libzmq does not tell which user listens at ipc://%s: use keys "
                  "(security.key)",
                  path);
    return check_listener(path, (uid_t)user, error);
}
