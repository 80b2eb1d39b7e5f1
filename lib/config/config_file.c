/*
 * refit_config_load: a configuration file and what it includes; and options from the environment.
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
#include "config/options.h"
#include "config/resolve.h"
#include "config/yaml.h"

/* ---- Files -------------------------------------------------------------------------------- */

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

/* ---- Variables -------------------------------------------------------------------------------
 * Options from the environment.
 *
 * The name of a variable is made from the key by one rule (REFIT_, then the key in capitals with
 * '_' for '.'), so the table maps both ways and a variable that no key makes is a mistake worth
 * refusing: a misspelt one would otherwise change nothing, silently.
 */

#define PREFIX    "REFIT_"
#define PACKAGE   PREFIX "LIBRARY" /* no option: which library the Python package opens */
#define NAME_ROOM 64               /* the longest key fits; a test reads them all */

static void make_name(const rft_option *option, char name[NAME_ROOM])
{
    size_t length = sizeof PREFIX - 1;
    memcpy(name, PREFIX, length);
    for (const char *from = option->key; *from != '\0' && length + 1 < NAME_ROOM; from++) {
        char letter = *from == '.' ? '_' : *from;
        name[length++] = letter >= 'a' && letter <= 'z' ? (char)(letter - 'a' + 'A') : letter;
    }
    name[length] = '\0';
}

static bool is_name(const char *text, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(name, text, length) == 0;
}

static const rft_option *find_by_name(const char *name, size_t length)
{
    char candidate[NAME_ROOM];
    for (size_t i = 0; i < rft_option_count; i++) {
        make_name(&rft_options[i], candidate);
        if (is_name(name, length, candidate)) return &rft_options[i];
    }
    return NULL;
}

static refit_status refuse_name(const char *name, size_t length, refit_error *error)
{
    char candidate[NAME_ROOM];
    size_t nearest = 0, best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        make_name(&rft_options[i], candidate);
        size_t distance = rft_edit_distance(name, length, candidate, strlen(candidate));
        if (distance < best) {
            best = distance;
            nearest = i;
        }
    }
    make_name(&rft_options[nearest], candidate);
    return rft_fail(error, REFIT_ERR_CONFIG,
                    "environment: %.*s names no option: the nearest is %s; unset it or correct it",
                    (int)(length < 80 ? length : 80), name, candidate);
}

static refit_status take_variable(const char *variable, refit_config *full, size_t caller_size,
                                  refit_error *error)
{
    size_t length = strcspn(variable, "=");
    if (variable[length] == '\0') return REFIT_OK; /* no assignment at all */
    const rft_option *option = find_by_name(variable, length);
    if (option == NULL && is_name(variable, length, PACKAGE)) return REFIT_OK;
    if (option == NULL) return refuse_name(variable, length, error);
    refit_error inner;
    refit_status status = rft_config_assign(full, caller_size, option, variable + length + 1,
                                            REFIT_CONFIG_ENVIRONMENT, &inner);
    if (status == REFIT_OK) return REFIT_OK;
    return rft_fail(error, status, "environment: %.*s: %s", (int)length, variable, inner.text);
}

refit_status refit_config_load_env(refit_config *config, refit_error *error)
{
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    for (char **variable = environ; variable != NULL && *variable != NULL; variable++) {
        if (strncmp(*variable, PREFIX, sizeof PREFIX - 1) != 0) continue;
        RFT_TRY(take_variable(*variable, &full, config->size, error));
    }
    rft_config_give(config, &full);
    return REFIT_OK;
}
