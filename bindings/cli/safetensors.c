/*
 * Reading safetensors files: the header found and parsed, the tensors read when they are asked for.
 *
 * Files are read, not mapped: a file that is cut short is an error here, where a map would be a
 * SIGBUS. The header's length is checked against the file and a limit before anything is read. JSON
 * is read by jansson, which bounds its depth and refuses duplicate keys, numbers beyond 64 bits
 * and broken UTF-8. The length of each tensor must follow from its type and shape, and the tensors
 * must cover the data: sorted by offset, each must begin where the one before ended, and the last
 * must end where the file does.
 */
#include "safetensors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "cli.h"
#include "file.h"

#define LENGTH_BYTES 8
#define READ_MOST    ((size_t)1 << 30) /* at once: no system takes less */

/* ---- The tensors of a header ---- */

/* One tensor while the header is read. */
typedef struct header_entry {
    refit_tensor tensor;
    uint64_t begin, end; /* in the data */
    uint32_t place;      /* in the header: orders empty tensors at one offset */
} header_entry;

/* For all refusals of one tensor; the name is cut so that the sentence has room. */
#define REFUSE_TENSOR(name, error, sentence, ...)                                                  \
    return cli_refuse((error), REFIT_ERR_INVALID, 0, "tensor %.512s" sentence, (name), __VA_ARGS__)

/* A JSON integer that is not negative. */
static bool read_size(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static refit_status read_dtype(const json_t *value, refit_tensor *tensor, refit_error *error)
{
    const char *name = json_string_value(value);
    if (value == NULL) REFUSE_TENSOR(tensor->name, error, "%s", " has no dtype");
    if (name == NULL) {
        REFUSE_TENSOR(tensor->name, error, "%s",
                      " has a dtype that is not a text such as \"BF16\"");
    }
    if (refit_dtype_parse(name, &tensor->dtype) != REFIT_OK) {
        REFUSE_TENSOR(tensor->name, error, " has dtype %.32s, which safetensors does not define",
                      name);
    }
    return REFIT_OK;
}

static refit_status read_shape(const json_t *value, refit_tensor *tensor, refit_error *error)
{
    if (!json_is_array(value)) REFUSE_TENSOR(tensor->name, error, "%s", " has no shape");
    const size_t rank = json_array_size(value);
    if (rank > REFIT_RANK_MAX) {
        return cli_refuse(error, REFIT_ERR_UNSUPPORTED, 0,
                          "tensor %.512s has %zu dimensions: refit carries at most %d",
                          tensor->name, rank, REFIT_RANK_MAX);
    }
    tensor->rank = (uint32_t)rank;
    for (size_t i = 0; i < rank; i++) {
        if (!read_size(json_array_get(value, i), &tensor->shape[i])) {
            REFUSE_TENSOR(tensor->name, error, ": dimension %zu is not a whole number", i);
        }
    }
    return REFIT_OK;
}

static refit_status read_offsets(const json_t *value, header_entry *entry, refit_error *error)
{
    if (json_array_size(value) != 2 || !read_size(json_array_get(value, 0), &entry->begin) ||
        !read_size(json_array_get(value, 1), &entry->end) || entry->begin > entry->end) {
        REFUSE_TENSOR(entry->tensor.name, error, "%s",
                      ": data_offsets must be two whole numbers, the smaller first");
    }
    entry->tensor.bytes = entry->end - entry->begin;
    return REFIT_OK;
}

/* Elements times bits must be whole bytes, and as many as the offsets span. */
static refit_status check_bytes(const refit_tensor *tensor, refit_error *error)
{
    uint64_t bits = refit_dtype_bits(tensor->dtype);
    bool empty = false;
    for (uint32_t i = 0; i < tensor->rank; i++)
        empty = empty || tensor->shape[i] == 0;
    for (uint32_t i = 0; i < tensor->rank && !empty; i++) {
        if (__builtin_mul_overflow(bits, tensor->shape[i], &bits)) {
            REFUSE_TENSOR(tensor->name, error, "%s", " has more elements than can be counted");
        }
    }
    if (empty) bits = 0;
    if (bits % 8 != 0) REFUSE_TENSOR(tensor->name, error, "%s", " does not end at a whole byte");
    if (bits / 8 != tensor->bytes) {
        REFUSE_TENSOR(tensor->name, error,
                      " has %" PRIu64 " bytes by its shape, but %" PRIu64 " by its offsets",
                      bits / 8, tensor->bytes);
    }
    return REFIT_OK;
}

static refit_status read_entry(const char *name, const json_t *value, header_entry *entry,
                               refit_error *error)
{
    refit_tensor *tensor = &entry->tensor;
    if (!json_is_object(value)) {
        REFUSE_TENSOR(name, error, "%s",
                      " is not a JSON object with dtype, shape and data_offsets");
    }
    *tensor = (refit_tensor){.size = sizeof *tensor, .name = name, .alias_of = REFIT_NO_ALIAS};
    refit_status status = read_dtype(json_object_get(value, "dtype"), tensor, error);
    if (status == REFIT_OK) status = read_shape(json_object_get(value, "shape"), tensor, error);
    if (status == REFIT_OK) {
        status = read_offsets(json_object_get(value, "data_offsets"), entry, error);
    }
    if (status != REFIT_OK) return status;
    if (json_object_size(value) != 3) {
        REFUSE_TENSOR(name, error, "%s", " says more than dtype, shape and data_offsets");
    }
    return check_bytes(tensor, error);
}

static refit_status check_metadata(json_t *metadata, refit_error *error)
{
    const char *key;
    json_t *value;
    bool good = json_is_object(metadata);
    json_object_foreach(metadata, key, value)
    {
        good = good && json_is_string(value);
    }
    if (good) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_INVALID, 0, "__metadata__ must map texts to texts");
}

static int by_offset(const void *left, const void *right)
{
    const header_entry *a = left, *b = right;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end) return a->end < b->end ? -1 : 1;
    return a->place < b->place ? -1 : a->place > b->place;
}

/* No overlap, no hole, nothing after the last one. */
static refit_status check_layout(const header_entry *entries, uint32_t count, uint64_t data_bytes,
                                 refit_error *error)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        const header_entry *entry = &entries[i];
        if (entry->begin != end) {
            REFUSE_TENSOR(entry->tensor.name, error,
                          " begins at %" PRIu64 ", but the one before it ends at %" PRIu64,
                          entry->begin, end);
        }
        end = entry->end;
        if (end > data_bytes) {
            REFUSE_TENSOR(entry->tensor.name, error,
                          " ends at %" PRIu64 ", but the file has only %" PRIu64 " bytes of data",
                          end, data_bytes);
        }
    }
    if (end != data_bytes) {
        return cli_refuse(error, REFIT_ERR_INVALID, 0,
                          "the tensors end at %" PRIu64 ", but the file has %" PRIu64
                          " bytes of data",
                          end, data_bytes);
    }
    return REFIT_OK;
}

static refit_status read_entries(json_t *header, header_entry *entries, uint32_t *count,
                                 refit_error *error)
{
    const char *name;
    json_t *value;
    uint32_t filled = 0;
    json_object_foreach(header, name, value)
    {
        refit_status status;
        if (strcmp(name, CLI_SAFETENSORS_METADATA) == 0) {
            status = check_metadata(value, error);
        } else {
            entries[filled].place = filled;
            status = read_entry(name, value, &entries[filled], error);
            filled++;
        }
        if (status != REFIT_OK) return status;
    }
    *count = filled;
    return REFIT_OK;
}

/* Takes over what the entries say; `data` is where in the file offset 0 lies. */
static refit_status take_entries(const header_entry *entries, uint32_t count, uint64_t data,
                                 cli_weights *out, refit_error *error)
{
    out->tensors = calloc(count + 1u, sizeof *out->tensors);
    out->offsets = calloc(count + 1u, sizeof *out->offsets);
    if (out->tensors == NULL || out->offsets == NULL) {
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for %u tensors", count);
    }
    for (uint32_t i = 0; i < count; i++) {
        out->tensors[i] = entries[i].tensor;
        out->offsets[i] = data + entries[i].begin;
    }
    out->count = count;
    out->total = count > 0 ? entries[count - 1].end : 0;
    return REFIT_OK;
}

/* Fills in the tensors of `out`, also where it fails; offset 0 of the header lies at byte `data` of
 * a file that has `bytes`. Names stay those of `header`. */
static refit_status read_tensors(json_t *header, uint64_t data, uint64_t bytes, cli_weights *out,
                                 refit_error *error)
{
    header_entry *entries = calloc(json_object_size(header) + 1, sizeof *entries);
    if (entries == NULL) {
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the header");
    }
    uint32_t count;
    refit_status status = read_entries(header, entries, &count, error);
    if (status == REFIT_OK) {
        qsort(entries, count, sizeof *entries, by_offset);
        status = check_layout(entries, count, bytes - data, error);
    }
    if (status == REFIT_OK) status = take_entries(entries, count, data, out, error);
    free(entries);
    return status;
}

/* ---- The file ---- */

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
    refit_status status = read_tensors(header, LENGTH_BYTES + length, bytes, &weights, error);
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
