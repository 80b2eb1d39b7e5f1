/*
 * An eventfd, level-triggered. Both ends are non-blocking: a write can fail only when the counter
 * is full, and then it is set; a read only when it is zero, and then it is clear.
 */
#include "net/wake_fd.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

refit_status rft_wake_fd_open(int *fd, refit_error *error)
{
    int made = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made < 0) {
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno, "an eventfd could not be made: %s",
                            strerror(errno));
    }
    *fd = made;
    return REFIT_OK;
}

void rft_wake_fd_close(int fd)
{
    if (fd >= 0) close(fd);
}

void rft_wake_fd_set(int fd)
{
    int before = errno; /* a signal handler must not change it */
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
    errno = before;
}

void rft_wake_fd_clear(int fd)
{
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}
