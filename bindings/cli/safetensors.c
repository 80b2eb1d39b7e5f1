/*
 * Reading safetensors files: the header found and parsed, the tensors read when they are asked for.
 *
 * Files are read, not mapped: one that somebody cuts short is an error here, where a map would be a
 * SIGBUS. The header's length is checked against the file and a limit before anything is read. JSON
 * is jansson's business, which bounds its depth and refuses duplicate keys, numbers beyond 64 bits
 * and broken UTF-8; what the JSON says is checked by safetensors_header.c.
 */
#include "safetensors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "cli.h"
#include "file.h"
#include "safetensors_header.h"

#define LENGTH_BYTES 8
#define READ_MOST    ((size_t)1 << 30) /* at once: no system takes less */

/* `prefix` is what the file begins with, LENGTH_BYTES or all that it has. */
static refit_status find_header(const unsigned char *prefix, uint64_t bytes, uint64_t *length,
                                refit_error *error)
{
    if (bytes < LENGTH_BYTES) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0,
                          "it has %" PRIu64 " bytes: too short for a header", bytes);
    }
    uint64_t said = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        said = said << 8 | prefix[i];
    if (said > CLI_SAFETENSORS_HEADER_MOST) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0,
                          "is it a safetensors file? its header says it has %" PRIu64
                          " bytes: at most %" PRIu64 " are taken",
                          said, CLI_SAFETENSORS_HEADER_MOST);
    }
    if (said > bytes - LENGTH_BYTES) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0,
                          "its header says it has %" PRIu64 " bytes, but only %" PRIu64 " follow",
                          said, bytes - LENGTH_BYTES);
    }
    *length = said;
    return REFIT_OK;
}

/* `length` bytes of JSON, of a file of `bytes`. The weights have no file yet. */
static refit_status parse_header(const char *text, uint64_t length, uint64_t bytes,
                                 cli_weights *out, refit_error *error)
{
    json_error_t problem;
    json_t *header = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(header)) {
        json_decref(header);
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "its header is not a JSON object: %s",
                          header == NULL ? problem.text : "it is an array");
    }
    cli_weights weights = {.header = header, .file = -1};
    refit_status status = cli_header_read(header, LENGTH_BYTES + length, bytes, &weights, error);
    if (status != REFIT_OK) {
        cli_weights_close(&weights);
        return status;
    }
    *out = weights;
    return REFIT_OK;
}

refit_status cli_weights_read(const void *memory, uint64_t bytes, cli_weights *out,
                              refit_error *error)
{
    uint64_t length = 0;
    refit_status status = find_header(memory, bytes, &length, error);
    if (status != REFIT_OK) return status;
    return parse_header((const char *)memory + LENGTH_BYTES, length, bytes, out, error);
}

/* All `count` bytes, however little each read gives. */
static refit_status read_all(int file, void *memory, uint64_t count, uint64_t offset,
                             refit_error *error)
{
    unsigned char *at = memory;
    while (count > 0) {
        const size_t most = count < READ_MOST ? (size_t)count : READ_MOST;
        const ssize_t got = pread(file, at, most, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            int code = errno;
            return cli_refuse(error, REFIT_ERR_IO, code, "cannot read it: %s", strerror(code));
        }
        if (got == 0) {
            return cli_refuse(error, REFIT_ERR_IO, 0,
                              "%" PRIu64 " bytes are missing at byte %" PRIu64
                              ": it was cut short after it was opened",
                              count, offset);
        }
        at += got;
        offset += (uint64_t)got;
        count -= (uint64_t)got;
    }
    return REFIT_OK;
}

static refit_status read_text(int file, uint64_t length, uint64_t bytes, cli_weights *out,
                              refit_error *error)
{
    char *text = malloc((size_t)length + 1);
    if (text == NULL) {
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0,
                          "no memory for its header of %" PRIu64 " bytes", length);
    }
    refit_status status = read_all(file, text, length, LENGTH_BYTES, error);
    if (status == REFIT_OK) status = parse_header(text, length, bytes, out, error);
    free(text);
    return status;
}

static refit_status read_header(int file, uint64_t bytes, cli_weights *out, refit_error *error)
{
    unsigned char prefix[LENGTH_BYTES];
    uint64_t length = 0;
    refit_status status =
        read_all(file, prefix, bytes < LENGTH_BYTES ? bytes : LENGTH_BYTES, 0, error);
    if (status == REFIT_OK) status = find_header(prefix, bytes, &length, error);
    if (status == REFIT_OK) status = read_text(file, length, bytes, out, error);
    return status;
}

refit_status cli_weights_open(const char *path, cli_weights *out, refit_error *error)
{
    int file = -1;
    uint64_t bytes = 0;
    refit_status status = cli_file_open(path, &file, &bytes, error);
    if (status != REFIT_OK) return status;
    status = read_header(file, bytes, out, error);
    if (status != REFIT_OK) {
        (void)close(file);
        return status;
    }
    out->file = file;
    return REFIT_OK;
}

refit_status cli_weights_load(const cli_weights *weights, uint32_t index, void *memory,
                              refit_error *error)
{
    return read_all(weights->file, memory, weights->tensors[index].bytes, weights->offsets[index],
                    error);
}

void cli_weights_close(cli_weights *weights)
{
    if (weights->header != NULL && weights->file >= 0) (void)close(weights->file);
    free(weights->tensors);
    free(weights->offsets);
    json_decref(weights->header);
    *weights = (cli_weights){.file = -1};
}

int cli_weights_alike(const cli_weights *a, const cli_weights *b)
{
    if (a->count != b->count) return 0;
    for (uint32_t i = 0; i < a->count; i++) {
        const refit_tensor *left = &a->tensors[i], *right = &b->tensors[i];
        if (strcmp(left->name, right->name) != 0 || left->dtype != right->dtype ||
            left->rank != right->rank ||
            memcmp(left->shape, right->shape, left->rank * sizeof left->shape[0]) != 0) {
            return 0;
        }
    }
    return 1;
}
