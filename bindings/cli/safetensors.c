/*
 * Reading safetensors files.
 *
 * Everything a header says is checked against what the file really holds before it is used: the
 * header's length against the file and a limit, each tensor's bytes against its type and shape, and
 * the tensors against each other: sorted by offset, each must begin where the one before ended.
 * JSON is jansson's business, which bounds its depth and refuses duplicate keys, numbers beyond 64
 * bits and broken UTF-8.
 */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "cli.h"

#define LENGTH_BYTES 8

/* One tensor while the header is read. */
typedef struct header_entry {
    refit_tensor tensor;
    uint64_t begin, end; /* in the data */
    uint32_t place;      /* in the header: orders empty tensors at one offset */
} header_entry;

/* For all refusals of one tensor; the name is cut so that the sentence has room. */
#define REFUSE_TENSOR(name, error, sentence, ...)                                                  \
    return cli_refuse((error), REFIT_ERR_INVALID, 0, "tensor %.64s" sentence, (name), __VA_ARGS__)

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
    if (name == NULL || refit_dtype_parse(name, &tensor->dtype) != REFIT_OK) {
        REFUSE_TENSOR(tensor->name, error, " has dtype %.32s, which safetensors does not define",
                      name == NULL ? "missing" : name);
    }
    return REFIT_OK;
}

static refit_status read_shape(const json_t *value, refit_tensor *tensor, refit_error *error)
{
    if (!json_is_array(value)) REFUSE_TENSOR(tensor->name, error, "%s", " has no shape");
    const size_t rank = json_array_size(value);
    if (rank > REFIT_RANK_MAX) {
        return cli_refuse(error, REFIT_ERR_UNSUPPORTED, 0,
                          "tensor %.64s has %zu dimensions: refit carries at most %d", tensor->name,
                          rank, REFIT_RANK_MAX);
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

/* No overlap, no hole, nothing behind the last one. */
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

/* Takes over what the entries say; `data` is where offset 0 lies. */
static refit_status take_entries(const header_entry *entries, uint32_t count,
                                 const unsigned char *data, cli_weights *out, refit_error *error)
{
    out->tensors = calloc(count + 1u, sizeof *out->tensors);
    out->bytes = calloc(count + 1u, sizeof *out->bytes);
    if (out->tensors == NULL || out->bytes == NULL) {
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for %u tensors", count);
    }
    for (uint32_t i = 0; i < count; i++) {
        out->tensors[i] = entries[i].tensor;
        out->bytes[i] = data + entries[i].begin;
    }
    out->count = count;
    out->total = count > 0 ? entries[count - 1].end : 0;
    return REFIT_OK;
}

static refit_status read_header(json_t *header, const unsigned char *data, uint64_t data_bytes,
                                cli_weights *out, refit_error *error)
{
    header_entry *entries = calloc(json_object_size(header) + 1, sizeof *entries);
    if (entries == NULL) {
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the header");
    }
    uint32_t count;
    refit_status status = read_entries(header, entries, &count, error);
    if (status == REFIT_OK) {
        qsort(entries, count, sizeof *entries, by_offset);
        status = check_layout(entries, count, data_bytes, error);
    }
    if (status == REFIT_OK) status = take_entries(entries, count, data, out, error);
    free(entries);
    return status;
}

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
    status = read_header(header, (const unsigned char *)text + length,
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
