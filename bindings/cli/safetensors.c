/*
 * Reading safetensors files: the file in memory, its header found and parsed.
 *
 * The header's length is checked against the file and a limit before anything is read. JSON is
 * jansson's business, which bounds its depth and refuses duplicate keys, numbers beyond 64 bits and
 * broken UTF-8; what the JSON says is checked by safetensors_header.c.
 */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "cli.h"
#include "safetensors_header.h"

#define LENGTH_BYTES 8

static refit_status find_header(const unsigned char *memory, uint64_t bytes, uint64_t *length,
                                refit_error *error)
{
    if (bytes < LENGTH_BYTES) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0,
                          "it has %" PRIu64 " bytes: too short for a header", bytes);
    }
    uint64_t said = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        said = said << 8 | memory[i];
    if (said > CLI_SAFETENSORS_HEADER_MOST) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0,
                          "its header says it has %" PRIu64 " bytes: at most %" PRIu64 " are taken",
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

refit_status cli_weights_read(const void *memory, uint64_t bytes, cli_weights *out,
                              refit_error *error)
{
    uint64_t length = 0;
    refit_status status = find_header(memory, bytes, &length, error);
    if (status != REFIT_OK) return status;
    const char *text = (const char *)memory + LENGTH_BYTES;
    json_error_t problem;
    json_t *header = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &problem);
    if (!json_is_object(header)) {
        json_decref(header);
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "its header is not a JSON object: %s",
                          header == NULL ? problem.text : "something else");
    }
    cli_weights weights = {.header = header};
    status = cli_header_read(header, (const unsigned char *)text + length,
                             bytes - LENGTH_BYTES - length, &weights, error);
    if (status != REFIT_OK) {
        cli_weights_close(&weights);
        return status;
    }
    *out = weights;
    return REFIT_OK;
}

static refit_status map_file(const char *path, void **map, uint64_t *bytes, refit_error *error)
{
    struct stat stat;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &stat) != 0) {
        int code = errno;
        if (file >= 0) (void)close(file);
        return cli_refuse(error, REFIT_ERR_IO, code, "cannot open it: %s", strerror(code));
    }
    if (!S_ISREG(stat.st_mode) || stat.st_size == 0) {
        (void)close(file);
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "it is empty or not a regular file");
    }
    void *memory = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    int code = errno;
    (void)close(file);
    if (memory == MAP_FAILED) {
        return cli_refuse(error, REFIT_ERR_IO, code, "cannot map it: %s", strerror(code));
    }
    *map = memory;
    *bytes = (uint64_t)stat.st_size;
    return REFIT_OK;
}

refit_status cli_weights_open(const char *path, cli_weights *out, refit_error *error)
{
    void *map = NULL;
    uint64_t bytes = 0;
    refit_status status = map_file(path, &map, &bytes, error);
    if (status != REFIT_OK) return status;
    (void)madvise(map, (size_t)bytes, MADV_SEQUENTIAL);
    status = cli_weights_read(map, bytes, out, error);
    if (status != REFIT_OK) {
        (void)munmap(map, (size_t)bytes);
        return status;
    }
    out->map = map;
    out->map_bytes = bytes;
    return REFIT_OK;
}

void cli_weights_close(cli_weights *weights)
{
    free(weights->tensors);
    free(weights->bytes);
    json_decref(weights->header);
    if (weights->map != NULL) (void)munmap(weights->map, (size_t)weights->map_bytes);
    *weights = (cli_weights){0};
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
