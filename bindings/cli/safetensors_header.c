/*
 * The header of a safetensors file, checked against the data behind it.
 *
 * Each tensor's bytes are held against its type and shape, and the tensors against each other:
 * sorted by offset, each must begin where the one before ended, and the last must end where the
 * file does.
 */
#include "safetensors_header.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

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
        REFUSE_TENSOR(tensor->name, error, "%s", " has a dtype that is no text, such as \"BF16\"");
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
        REFUSE_TENSOR(name, error, "%s", " is no JSON object with dtype, shape and data_offsets");
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

refit_status cli_header_read(json_t *header, uint64_t data, uint64_t bytes, cli_weights *out,
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
