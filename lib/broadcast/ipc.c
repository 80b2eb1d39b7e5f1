/*
 * Socket files outlive their processes, and ZeroMQ would unlink whatever it finds at a path, a
 * living publisher's socket too. So the path is ours while we hold a lock on PATH.lock, the socket
 * is made here with mode 0600, and ZeroMQ is handed the descriptor.
 *
 * The lock file is unlinked on close: whoever locks it afterwards checks that it still has its
 * name, or starts over with the new one.
 */
#include "broadcast/ipc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG   128
#define LOCK_PATH (RFT_IPC_PATH_BYTES + 8)

static void lock_path(const rft_ipc *ipc, char path[LOCK_PATH])
{
    snprintf(path, LOCK_PATH, "%s.lock", ipc->path);
}

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
    char path[LOCK_PATH];
    lock_path(ipc, path);
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
        if (same_file(fd, path)) return REFIT_OK;
        close(fd);
        ipc->lock_fd = -1;
    }
}

/* Somebody who does not know our lock may listen there. */
static bool somebody_listens(const char *path)
{
    struct sockaddr_un address = socket_address(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    bool alive = connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN;
    close(fd);
    return alive;
}

static refit_status path_clear(const char *path, refit_error *error)
{
    struct stat found;
    if (lstat(path, &found) != 0) return REFIT_OK;
    RFT_REFUSE_IF(!S_ISSOCK(found.st_mode), error, REFIT_ERR_EXISTS,
                  "%s is not a socket: remove it, or use another endpoint", path);
    RFT_REFUSE_IF(somebody_listens(path), error, REFIT_ERR_BUSY,
                  "another process listens at ipc://%s: close it, or use another endpoint", path);
    (void)unlink(path);
    return REFIT_OK;
}

/* Nobody can connect before listen(), so the mode is in force from the first moment. */
static refit_status socket_listen(const char *path, int *out, refit_error *error)
{
    struct sockaddr_un address = socket_address(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        chmod(path, 0600) == 0 && listen(fd, BACKLOG) == 0) {
        *out = fd;
        return REFIT_OK;
    }
    int code = errno;
    if (fd >= 0) close(fd);
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "cannot listen at ipc://%s: %s", path,
                        strerror(code));
}

refit_status rft_ipc_open(rft_ipc *ipc, const char *path, int *listen_fd, refit_error *error)
{
    refit_status status;
    ipc->lock_fd = -1;
    snprintf(ipc->path, sizeof ipc->path, "%s", path);
    RFT_TRY(lock_take(ipc, error));
    RFT_TRY_GOTO(path_clear(path, error), undo_lock);
    RFT_TRY_GOTO(socket_listen(path, listen_fd, error), undo_lock);
    return REFIT_OK;

undo_lock : {
    char lock[LOCK_PATH];
    lock_path(ipc, lock);
    (void)unlink(lock);
    close(ipc->lock_fd);
    ipc->lock_fd = -1;
}
    return status;
}

void rft_ipc_close(rft_ipc *ipc)
{
    if (ipc->lock_fd < 0) return;
    char lock[LOCK_PATH];
    lock_path(ipc, lock);
    (void)unlink(ipc->path);
    (void)unlink(lock);
    close(ipc->lock_fd);
    ipc->lock_fd = -1;
}
