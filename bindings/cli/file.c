/* Files that the user named: regular ones only. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

refit_status cli_file_open(const char *path, int *out, uint64_t *bytes, refit_error *error)
{
    struct stat stat;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0 || fstat(file, &stat) != 0) {
        int code = errno;
        if (file >= 0) (void)close(file);
        return cli_refuse(error, REFIT_ERR_IO, code, "cannot open it: %s", strerror(code));
    }
    if (!S_ISREG(stat.st_mode) || stat.st_size == 0) {
        (void)close(file);
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "it is empty or not a regular file");
    }
    *out = file;
    *bytes = (uint64_t)stat.st_size;
    return REFIT_OK;
}
