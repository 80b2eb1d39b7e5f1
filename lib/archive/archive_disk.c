/*
 * What the archive asks of the file system.
 *
 * Bytes are read and written at given places, so that a file's header can be written last and no
 * call depends on the one before. Files are read, not mapped: one that somebody cuts short is an
 * error here, where a map would be a signal. Knows nothing of archives.
 */
#include "archive/archive_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST ((size_t)1 << 30) /* at once: no system takes less */

refit_status rft_disk_fail(refit_error *error, const char *what, const char *name)
{
    int code = errno;
    return rft_fail_sub(error, code == ENOENT ? REFIT_ERR_NOT_FOUND : REFIT_ERR_IO, code,
                        "cannot %s %.120s: %s", what, name, strerror(code));
}

static refit_status fail_here(refit_error *error, const char *what)
{
    int code = errno;
    return rft_fail_sub(error, REFIT_ERR_IO, code, "it cannot be %s: %s", what, strerror(code));
}

refit_status rft_disk_write(int file, const void *bytes, size_t count, uint64_t at,
                            refit_error *error)
{
    const unsigned char *from = bytes;
    while (count > 0) {
        ssize_t taken = pwrite(file, from, count < MOST ? count : MOST, (off_t)at);
        if (taken < 0 && errno == EINTR) continue;
        if (taken == 0) errno = ENOSPC; /* no progress and no reason */
        if (taken <= 0) return fail_here(error, "written");
        from += taken;
        at += (uint64_t)taken;
        count -= (size_t)taken;
    }
    return REFIT_OK;
}

refit_status rft_disk_read(int file, void *bytes, size_t count, uint64_t at, refit_error *error)
{
    unsigned char *to = bytes;
    while (count > 0) {
        ssize_t got = pread(file, to, count < MOST ? count : MOST, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail_here(error, "read");
        RFT_REFUSE_IF(got == 0, error, REFIT_ERR_CORRUPT,
                      "it ends at byte %llu, where %zu more should be", (unsigned long long)at,
                      count);
        to += got;
        at += (uint64_t)got;
        count -= (size_t)got;
    }
    return REFIT_OK;
}

refit_status rft_disk_close(int file, refit_error *error)
{
    int code = fsync(file) == 0 ? 0 : errno;
    if (close(file) != 0 && code == 0) code = errno;
    if (code == 0) return REFIT_OK;
    errno = code;
    return fail_here(error, "written");
}

refit_status rft_disk_open(int folder, const char *name, int *file, uint64_t *bytes,
                           refit_error *error)
{
    struct stat found;
    int opened = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0) return rft_disk_fail(error, "open", name);
    if (fstat(opened, &found) != 0 || !S_ISREG(found.st_mode)) {
        (void)close(opened);
        return rft_fail(error, REFIT_ERR_INVALID, "%.120s is not a regular file", name);
    }
    *file = opened;
    *bytes = (uint64_t)found.st_size;
    return REFIT_OK;
}

refit_status rft_disk_blame(refit_error *error, refit_status status, const char *name)
{
    if (status == REFIT_OK) return REFIT_OK;
    if (status == REFIT_ERR_PROTOCOL) status = REFIT_ERR_CORRUPT;
    if (error == NULL) return status;
    return rft_fail_sub(error, status, error->subsystem, "%s: %s", name, error->text);
}
