/*
 * refit_config_load: a configuration file and what it includes.
 *
 * A file is read whole, up to a limit, and handed to the YAML reader, which calls back for
 * `include`. The chain of files being read lives on the stack; a file that stands in it already, by
 * device and inode, would include itself. Everything goes into a full copy of the caller's struct,
 * given back when all files were good.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "config/resolve.h"
#include "config/yaml.h"

#define FILE_BYTES_MOST ((size_t)256 << 10)
#define FILES_DEEP      8

typedef struct source_file {
    const struct source_file *includer; /* NULL: the file that the caller named */
    const char *where; /* of the include, before every sentence; empty without one */
    const char *path;
    int descriptor;
    dev_t device;
    ino_t inode;
    size_t caller_size;
} source_file;

/* The end of a long path says more than its beginning, and leaves room for the sentence. */
static const char *shorten(const char *path)
{
    const size_t most = 80;
    size_t length = strlen(path);
    return length <= most ? path : path + length - most;
}

static refit_status refuse_chain(const source_file *file, refit_error *error)
{
    size_t depth = 1;
    for (const source_file *above = file->includer; above != NULL; above = above->includer) {
        RFT_REFUSE_IF(above->device == file->device && above->inode == file->inode, error,
                      REFIT_ERR_CONFIG, "%s%s includes itself: break the circle", file->where,
                      shorten(file->path));
        RFT_REFUSE_IF(++depth > FILES_DEEP, error, REFIT_ERR_CONFIG,
                      "%s%s would be the file number %zu that includes another: at most %d",
                      file->where, shorten(file->path), depth, FILES_DEEP);
    }
    return REFIT_OK;
}

/* Without waiting: at the other end of a FIFO there may never be a writer. */
static refit_status open_file(source_file *file, refit_error *error)
{
    file->descriptor = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file->descriptor < 0) {
        return rft_fail_sub(error, REFIT_ERR_IO, errno, "%scannot open %s: %s", file->where,
                            shorten(file->path), strerror(errno));
    }
    struct stat stat;
    if (fstat(file->descriptor, &stat) != 0) {
        int code = errno;
        (void)close(file->descriptor);
        return rft_fail_sub(error, REFIT_ERR_IO, code, "%scannot look at %s: %s", file->where,
                            shorten(file->path), strerror(code));
    }
    file->device = stat.st_dev;
    file->inode = stat.st_ino;
    refit_status status =
        S_ISREG(stat.st_mode)
            ? refuse_chain(file, error)
            : rft_fail(error, REFIT_ERR_CONFIG,
                       "%s%s is no regular file: write the configuration into one", file->where,
                       shorten(file->path));
    if (status != REFIT_OK) (void)close(file->descriptor);
    return status;
}

/* Reads up to one byte more than is allowed, so that a longer file shows. */
static refit_status read_text(const source_file *file, char *text, size_t *bytes,
                              refit_error *error)
{
    size_t filled = 0;
    while (filled <= FILE_BYTES_MOST) {
        ssize_t got = read(file->descriptor, text + filled, FILE_BYTES_MOST + 1 - filled);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            return rft_fail_sub(error, REFIT_ERR_IO, errno, "%scannot read %s: %s", file->where,
                                shorten(file->path), strerror(errno));
        }
        if (got == 0) break;
        filled += (size_t)got;
    }
    RFT_REFUSE_IF(filled > FILE_BYTES_MOST, error, REFIT_ERR_CONFIG,
                  "%s%s is longer than %zu bytes: is it a configuration file?", file->where,
                  shorten(file->path), FILE_BYTES_MOST);
    *bytes = filled;
    return REFIT_OK;
}

static refit_status include_file(void *user, const char *where, const char *path,
                                 refit_config *full, refit_error *error);

static refit_status read_file(source_file *file, refit_config *full, refit_error *error)
{
    char *text = rft_calloc(FILE_BYTES_MOST + 1, 1);
    RFT_REFUSE_IF(text == NULL, error, REFIT_ERR_HOST_MEMORY, "%sno memory to read %s into",
                  file->where, shorten(file->path));
    rft_yaml_source source = {.name = shorten(file->path),
                              .text = text,
                              .caller_size = file->caller_size,
                              .include = include_file,
                              .user = file};
    refit_status status = read_text(file, text, &source.bytes, error);
    if (status == REFIT_OK) status = rft_yaml_read(&source, full, error);
    rft_free(text);
    return status;
}

static refit_status load_file(source_file *file, refit_config *full, refit_error *error)
{
    RFT_TRY(open_file(file, error));
    refit_status status = read_file(file, full, error);
    (void)close(file->descriptor);
    return status;
}

/* A relative path starts in the folder of the file that names it. */
static refit_status include_file(void *user, const char *where, const char *path,
                                 refit_config *full, refit_error *error)
{
    const source_file *includer = user;
    const char *slash = strrchr(includer->path, '/');
    int folder = path[0] == '/' || slash == NULL ? 0 : (int)(slash + 1 - includer->path);
    char joined[PATH_MAX];
    int length = snprintf(joined, sizeof joined, "%.*s%s", folder, includer->path, path);
    RFT_REFUSE_IF(length < 0 || (size_t)length >= sizeof joined, error, REFIT_ERR_CONFIG,
                  "%sthe path %s is longer than %d bytes", where, shorten(path), PATH_MAX - 1);
    source_file file = {
        .includer = includer, .where = where, .path = joined, .caller_size = includer->caller_size};
    return load_file(&file, full, error);
}

refit_status refit_config_load(refit_config *config, const char *path, refit_error *error)
{
    RFT_REFUSE_IF(path == NULL || path[0] == '\0', error, REFIT_ERR_INVALID,
                  "refit_config_load needs the path of a file");
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    source_file file = {.where = "", .path = path, .caller_size = config->size};
    RFT_TRY(load_file(&file, &full, error));
    rft_config_give(config, &full);
    return REFIT_OK;
}
