/*
 * Writing a version as a safetensors file.
 *
 *     begin  .7.safetensors.PID with its bytes, locked, fsync; 7.safetensors can be replaced
 *     keep   -> renamed 7.safetensors, latest -> it (where versions follow), fsync of DIR
 *     drop   -> nothing
 *     sweep  files without a lock are removed: their writers were killed
 *
 * The kernel releases the lock when its process ends, so a reused process number does no
 * harm. Locks hold on one host: processes of several hosts need a folder each.
 *
 * The header is written by jansson in the form of the reference implementation (compact, in the
 * order of the bytes, filled up with spaces to a multiple of eight), so that a file without
 * __metadata__ comes out as it went in. Readers of DIR see whole files only.
 */
#include "safetensors_write.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "cli.h"

#define WRITE_MOST ((size_t)16 << 20) /* at once, so that progress is seen */
#define TRIES_MOST 100                /* a sweep of another process interferes once, if ever */

#define SUFFIX ".safetensors"

/* The file while its bytes are written. */
typedef struct output_file {
    int file;
    const char *name; /* in sentences */
    cli_progress *progress;
} output_file;

static refit_status refuse_io(refit_error *error, const char *what, const char *name)
{
    int code = errno;
    return cli_refuse(error, REFIT_ERR_IO, code, "cannot %s %.80s: %s", what, name, strerror(code));
}

/* Everything, however little each write takes. */
static refit_status write_all(output_file *output, const void *bytes, uint64_t count,
                              refit_error *error)
{
    const unsigned char *at = bytes;
    while (count > 0) {
        const size_t most = count < WRITE_MOST ? (size_t)count : WRITE_MOST;
        const ssize_t taken = write(output->file, at, most);
        if (taken < 0 && errno == EINTR) continue;
        if (taken == 0) errno = ENOSPC; /* no progress and no reason */
        if (taken <= 0) return refuse_io(error, "write", output->name);
        at += taken;
        count -= (uint64_t)taken;
        cli_progress_add(output->progress, (uint64_t)taken);
    }
    return REFIT_OK;
}

/* NULL for what the format has no words for: a dimension beyond its integers, a name it reserves.
 */
static json_t *describe_tensor(const refit_tensor *tensor, uint64_t begin)
{
    if (strcmp(tensor->name, "__metadata__") == 0) return NULL;
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] > INT64_MAX) {
            json_decref(shape);
            return NULL;
        }
        (void)json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", refit_dtype_name(tensor->dtype), "shape",
                     shape, "data_offsets", (json_int_t)begin, (json_int_t)(begin + tensor->bytes));
}

static refit_status describe_version(const cli_source *source, json_t *header, refit_error *error)
{
    uint64_t begin = 0;
    for (uint32_t i = 0; i < source->count; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        refit_status status = source->tensor(source->of, i, &tensor, &bytes, error);
        if (status != REFIT_OK) return status;
        json_t *entry = describe_tensor(&tensor, begin);
        if (json_object_set_new(header, tensor.name, entry) != 0) {
            return cli_refuse(error, REFIT_ERR_UNSUPPORTED, 0,
                              "tensor %.80s cannot be described in a safetensors header",
                              tensor.name);
        }
        begin += tensor.bytes;
    }
    return REFIT_OK;
}

/* Length, JSON, spaces. `text` is json_dumps's. */
static refit_status write_header_text(output_file *output, const char *text, refit_error *error)
{
    static const char spaces[] = "       ";
    const uint64_t length = strlen(text), padding = (8 - length % 8) % 8;
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++)
        prefix[i] = (unsigned char)((length + padding) >> (8 * i));
    refit_status status = write_all(output, prefix, sizeof prefix, error);
    if (status == REFIT_OK) status = write_all(output, text, length, error);
    if (status == REFIT_OK) status = write_all(output, spaces, padding, error);
    return status;
}

static refit_status write_header(output_file *output, const cli_source *source, refit_error *error)
{
    json_t *header = json_object();
    refit_status status = describe_version(source, header, error);
    if (status == REFIT_OK) {
        char *text = json_dumps(header, JSON_COMPACT);
        status = text != NULL
                     ? write_header_text(output, text, error)
                     : cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the header");
        free(text);
    }
    json_decref(header);
    return status;
}

static refit_status write_tensors(output_file *output, const cli_source *source, refit_error *error)
{
    for (uint32_t i = 0; i < source->count; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        refit_status status = source->tensor(source->of, i, &tensor, &bytes, error);
        if (status == REFIT_OK) status = write_all(output, bytes, tensor.bytes, error);
        if (status != REFIT_OK) return status;
    }
    return REFIT_OK;
}

/* ---- What killed writers have left ---- */

/* ".NAME.PID", of any version if `name` is NULL. */
static bool is_temporary(const char *entry, const char *name)
{
    const char *pid = strrchr(entry, '.');
    if (entry[0] != '.' || pid <= entry + 1) return false;
    if (pid[1] == '\0' || strspn(pid + 1, "0123456789") != strlen(pid + 1)) return false;
    const char *middle = entry + 1;
    const size_t length = (size_t)(pid - middle), digits = strspn(middle, "0123456789");
    if (name != NULL) return length == strlen(name) && memcmp(middle, name, length) == 0;
    return (digits > 0 && length == digits + strlen(SUFFIX) &&
            memcmp(middle + digits, SUFFIX, strlen(SUFFIX)) == 0) ||
           (length == strlen("latest") && memcmp(middle, "latest", length) == 0);
}

/* Whether no process has it locked, so that it may be removed. One that cannot be locked here for
 * another reason stays. */
static bool is_abandoned(int dir, const char *name, int *file)
{
    struct stat opened, named;
    *file = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    /* A link has nothing to lock; its writer makes it again. */
    if (*file < 0) return errno == ELOOP;
    return fstat(*file, &opened) == 0 && S_ISREG(opened.st_mode) &&
           flock(*file, LOCK_EX | LOCK_NB) == 0 &&
           fstatat(dir, name, &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_ino == opened.st_ino;
}

/* Removes the file of a writer that was killed; false if another process writes it. */
static bool remove_abandoned(int dir, const char *name)
{
    int file = -1;
    const bool abandoned = is_abandoned(dir, name, &file);
    if (abandoned) (void)unlinkat(dir, name, 0);
    if (file >= 0) (void)close(file);
    return abandoned;
}

static void sweep(int dir, const char *name)
{
    const int again = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = again < 0 ? NULL : fdopendir(again);
    if (listing == NULL) {
        if (again >= 0) (void)close(again);
        return;
    }
    for (const struct dirent *each; (each = readdir(listing)) != NULL;) {
        if (is_temporary(each->d_name, name)) (void)remove_abandoned(dir, each->d_name);
    }
    (void)closedir(listing);
}

void cli_output_sweep(const char *dir)
{
    const int folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return;
    sweep(folder, NULL);
    (void)close(folder);
}

/* ---- The file ---- */

/* Locks the file and returns whether it still has its name: before the lock, the sweep of another
 * process may take it for abandoned. Without locks in the file system no file counts as abandoned.
 */
static bool is_ours(int file)
{
    struct stat found;
    while (flock(file, LOCK_EX) != 0 && errno == EINTR)
        continue;
    return fstat(file, &found) == 0 && found.st_nlink > 0;
}

/* The n-th name to try. Another process can have our number in a namespace of its own, so a name
 * may be taken. */
static void name_temporary(cli_output *output, int n)
{
    char suffix[12] = ""; /* of any int */
    if (n > 0) (void)snprintf(suffix, sizeof suffix, "%03d", n);
    (void)snprintf(output->temporary, sizeof output->temporary, ".%s.%ld%s", output->name,
                   (long)getpid(), suffix);
}

/* Creates the file and locks it. */
static refit_status open_temporary(cli_output *output, refit_error *error)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    for (int i = 0, n = 0; i < TRIES_MOST; i++) {
        name_temporary(output, n);
        output->file = openat(output->dir, output->temporary, flags, 0666);
        if (output->file < 0 && errno != EEXIST)
            return refuse_io(error, "create", output->temporary);
        if (output->file < 0) {
            if (!remove_abandoned(output->dir, output->temporary)) n++;
            continue;
        }
        if (is_ours(output->file)) return REFIT_OK;
        (void)close(output->file);
        output->file = -1;
    }
    errno = EBUSY;
    return refuse_io(error, "create", output->temporary);
}

/* Bytes on the disk, and an error that only close knows; the lock stays with the descriptor. */
static refit_status write_out(output_file *output, refit_error *error)
{
    int code = fsync(output->file) == 0 ? 0 : errno;
    const int copy = dup(output->file);
    if ((copy < 0 || close(copy) != 0) && code == 0) code = errno;
    if (code == 0) return REFIT_OK;
    errno = code;
    return refuse_io(error, "write", output->name);
}

/* In a sticky folder only its owner may replace a file. */
static bool is_kept_by_sticky(const struct stat *folder, const struct stat *found)
{
    const uid_t me = geteuid();
    return (folder->st_mode & S_ISVTX) != 0 && me != 0 && folder->st_uid != me &&
           found->st_uid != me;
}

/* The error of a rename over this name, as far as it is known before the rename. */
static refit_status check_replaceable(const cli_output *output, const char *name, const char *what,
                                      refit_error *error)
{
    struct stat folder, found;
    if (fstat(output->dir, &folder) != 0) return refuse_io(error, what, name);
    if (fstatat(output->dir, name, &found, AT_SYMLINK_NOFOLLOW) != 0) {
        return errno == ENOENT ? REFIT_OK : refuse_io(error, what, name);
    }
    errno = S_ISDIR(found.st_mode) ? EISDIR : is_kept_by_sticky(&folder, &found) ? EPERM : 0;
    return errno == 0 ? REFIT_OK : refuse_io(error, what, name);
}

static refit_status write_file(cli_output *output, const cli_source *source, cli_progress *progress,
                               refit_error *error)
{
    refit_status status = open_temporary(output, error);
    if (status != REFIT_OK) return status;
    output_file target = {.file = output->file, .name = output->name, .progress = progress};
    status = write_header(&target, source, error);
    if (status == REFIT_OK) status = write_tensors(&target, source, error);
    if (status == REFIT_OK) status = write_out(&target, error);
    if (status == REFIT_OK) status = check_replaceable(output, output->name, "name", error);
    if (status == REFIT_OK && output->latest)
        status = check_replaceable(output, "latest", "link", error);
    return status;
}

/* `output` has its name and its folder, which it closes if it fails. */
static refit_status begin(const cli_source *source, cli_progress *progress, cli_output *output,
                          refit_error *error)
{
    output->file = -1;
    refit_status status = write_file(output, source, progress, error);
    if (status != REFIT_OK) cli_output_drop(output);
    return status;
}

static refit_status open_folder(cli_output *output, const char *dir, refit_error *error)
{
    output->dir = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return output->dir >= 0 ? REFIT_OK : refuse_io(error, "open the folder", dir);
}

refit_status cli_output_begin(const cli_source *source, const char *dir, cli_progress *progress,
                              cli_output *out, refit_error *error)
{
    cli_output output = {.latest = true};
    (void)snprintf(output.name, sizeof output.name, "%" PRIu64 SUFFIX, source->number);
    refit_status status = open_folder(&output, dir, error);
    if (status == REFIT_OK) status = begin(source, progress, &output, error);
    if (status == REFIT_OK) *out = output;
    return status;
}

refit_status cli_output_begin_file(const cli_source *source, const char *path,
                                   cli_progress *progress, cli_output *out, refit_error *error)
{
    char dir[4096];
    cli_output output = {.latest = false};
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    const int length = slash == NULL ? 1 : slash == path ? 1 : (int)(slash - path);
    if (name[0] == '\0' || strlen(name) >= sizeof output.name || length >= (int)sizeof dir) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "%.120s is not a name for a file", path);
    }
    (void)snprintf(dir, sizeof dir, "%.*s", length, slash == NULL ? "." : path);
    (void)snprintf(output.name, sizeof output.name, "%s", name);
    refit_status status = open_folder(&output, dir, error);
    if (status == REFIT_OK) {
        sweep(output.dir, output.name);
        status = begin(source, progress, &output, error);
    }
    if (status == REFIT_OK) *out = output;
    return status;
}

/* A symbolic link cannot be changed, but another can be renamed over it. The sweep of another
 * process may remove that one meanwhile. */
static refit_status point_latest(const cli_output *output, refit_error *error)
{
    char link[64];
    (void)snprintf(link, sizeof link, ".latest.%ld", (long)getpid());
    for (int i = 0; i < TRIES_MOST; i++) {
        (void)unlinkat(output->dir, link, 0);
        if (symlinkat(output->name, output->dir, link) != 0) break;
        if (renameat(output->dir, link, output->dir, "latest") == 0) return REFIT_OK;
        if (errno != ENOENT) break;
    }
    refit_status status = refuse_io(error, "link", "latest");
    (void)unlinkat(output->dir, link, 0);
    return status;
}

static void close_output(cli_output *output)
{
    if (output->file >= 0) (void)close(output->file);
    (void)close(output->dir);
}

refit_status cli_output_keep(cli_output *output, refit_error *error)
{
    if (renameat(output->dir, output->temporary, output->dir, output->name) != 0) {
        refit_status status = refuse_io(error, "name", output->name);
        cli_output_drop(output);
        return status;
    }
    refit_status status = output->latest ? point_latest(output, error) : REFIT_OK;
    if (status == REFIT_OK && fsync(output->dir) != 0) {
        status = refuse_io(error, "write", "the folder");
    }
    close_output(output);
    return status;
}

void cli_output_drop(cli_output *output)
{
    if (output->file >= 0) (void)unlinkat(output->dir, output->temporary, 0);
    close_output(output);
}

/* ---- Where versions come from ---- */

static refit_status received_tensor(const void *of, uint32_t index, refit_tensor *tensor,
                                    const void **bytes, refit_error *error)
{
    return refit_update_tensor(of, index, tensor, bytes, error);
}

cli_source cli_source_received(const refit_update *update)
{
    return (cli_source){.number = refit_update_version(update),
                        .count = refit_update_count(update),
                        .of = update,
                        .tensor = received_tensor};
}

uint64_t cli_source_bytes(const cli_source *source)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < source->count; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        refit_error error;
        if (source->tensor(source->of, i, &tensor, &bytes, &error) == REFIT_OK) {
            total += tensor.bytes;
        }
    }
    return total;
}
