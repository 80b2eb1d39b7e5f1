/*
 * Writing a version as a safetensors file.
 *
 *     begin  .7.safetensors.PID with its bytes, fsync
 *     keep   -> renamed 7.safetensors, latest -> it (where versions follow), fsync of DIR
 *     drop   -> nothing
 *
 * The header is written by jansson in the form of the reference implementation (compact, in the
 * order of the bytes, filled up with spaces to a multiple of eight), so that a file without
 * __metadata__ comes out as it went in. Whoever reads DIR sees whole files only.
 */
#include "safetensors_write.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "cli.h"

#define WRITE_MOST ((size_t)16 << 20) /* at once, so that progress is seen */

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

/* A file of this name can only be what a killed process with our id has left. */
static refit_status open_beside(const cli_output *output, int *file, refit_error *error)
{
    (void)unlinkat(output->dir, output->beside, 0);
    *file = openat(output->dir, output->beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return *file >= 0 ? REFIT_OK : refuse_io(error, "create", output->beside);
}

/* Bytes on the disk, and an error that only close knows. */
static refit_status close_file(output_file *output, refit_error *error)
{
    int code = fsync(output->file) == 0 ? 0 : errno;
    if (close(output->file) != 0 && code == 0) code = errno;
    if (code == 0) return REFIT_OK;
    errno = code;
    return refuse_io(error, "write", output->name);
}

static refit_status write_file(const cli_output *output, const cli_source *source,
                               cli_progress *progress, refit_error *error)
{
    output_file target = {.name = output->name, .progress = progress};
    refit_status status = open_beside(output, &target.file, error);
    if (status != REFIT_OK) return status;
    status = write_header(&target, source, error);
    if (status == REFIT_OK) status = write_tensors(&target, source, error);
    if (status == REFIT_OK) return close_file(&target, error);
    (void)close(target.file);
    return status;
}

/* `output` has its name and its folder, which it closes if it fails. */
static refit_status begin(const cli_source *source, cli_progress *progress, cli_output *output,
                          refit_error *error)
{
    (void)snprintf(output->beside, sizeof output->beside, ".%s.%ld", output->name, (long)getpid());
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
    (void)snprintf(output.name, sizeof output.name, "%" PRIu64 ".safetensors", source->number);
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
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "%.120s is no name for a file", path);
    }
    (void)snprintf(dir, sizeof dir, "%.*s", length, slash == NULL ? "." : path);
    (void)snprintf(output.name, sizeof output.name, "%s", name);
    refit_status status = open_folder(&output, dir, error);
    if (status == REFIT_OK) status = begin(source, progress, &output, error);
    if (status == REFIT_OK) *out = output;
    return status;
}

/* A symbolic link cannot be changed, but another can be renamed over it. */
static refit_status point_latest(const cli_output *output, refit_error *error)
{
    char link[64];
    (void)snprintf(link, sizeof link, ".latest.%ld", (long)getpid());
    (void)unlinkat(output->dir, link, 0);
    if (symlinkat(output->name, output->dir, link) != 0) return refuse_io(error, "link", "latest");
    if (renameat(output->dir, link, output->dir, "latest") != 0) {
        refit_status status = refuse_io(error, "link", "latest");
        (void)unlinkat(output->dir, link, 0);
        return status;
    }
    return REFIT_OK;
}

refit_status cli_output_keep(cli_output *output, refit_error *error)
{
    if (renameat(output->dir, output->beside, output->dir, output->name) != 0) {
        refit_status status = refuse_io(error, "name", output->name);
        cli_output_drop(output);
        return status;
    }
    refit_status status = output->latest ? point_latest(output, error) : REFIT_OK;
    if (status == REFIT_OK && fsync(output->dir) != 0) {
        status = refuse_io(error, "write", "the folder");
    }
    (void)close(output->dir);
    return status;
}

void cli_output_drop(cli_output *output)
{
    (void)unlinkat(output->dir, output->beside, 0);
    (void)close(output->dir);
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
