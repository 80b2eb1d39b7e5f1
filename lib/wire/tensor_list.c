/*
 * The list of tensors as bytes: the same tables and loops as messages have (fields.h), one map a
 * tensor. Counting walks the bytes without unpacking them, so that the caller can reserve exactly
 * what it needs, after the limit has been checked.
 */
#include "wire/tensor_list.h"

#include "wire/message.h"

/* The map of the MANIFEST message around the list, with room to spare. */
#define MESSAGE_ROOM 256u

#define FIELD(kind, member) .type = RFT_FIELD_##kind, .offset = offsetof(rft_listed_tensor, member)

static const rft_field tensor_fields[] = {
    {"name", FIELD(TEXT, name)},
    {"dtype", FIELD(U32, dtype)},
    {"shape", FIELD(DIMS, shape)},
    {"bytes", FIELD(U64, bytes)},
    {"tied", FIELD(U32, original), .optional = true},
};

static const rft_fields tensor_table = {
    .name = "tensor",
    .count = sizeof tensor_fields / sizeof tensor_fields[0],
    .list = tensor_fields,
};

refit_status rft_tensor_list_append(const rft_listed_tensor *tensor, const rft_limits *limits,
                                    rft_bytes *out, refit_error *error)
{
    uint64_t taken = (uint64_t)out->count + MESSAGE_ROOM;
    uint64_t left = limits->manifest_bytes > taken ? limits->manifest_bytes - taken : 0;
    return rft_fields_encode(&tensor_table, tensor, limits, left, out, error);
}

static rft_view skip(rft_view view, size_t count)
{
    return (rft_view){(const unsigned char *)view.data + count, view.count - count};
}

refit_status rft_tensor_list_count(rft_view encoded, const rft_limits *limits, uint32_t *count,
                                   refit_error *error)
{
    rft_walk_limits walk = rft_fields_walk_limits(limits);
    uint32_t found = 0;
    for (rft_view rest = encoded; rest.count > 0; found++) {
        size_t used;
        RFT_REFUSE_IF(found == limits->tensors, error, REFIT_ERR_LIMIT,
                      "the manifest has more tensors than limits.tensors allows: %u",
                      limits->tensors);
        RFT_TRY(rft_validate(rest, &walk, &used, error));
        rest = skip(rest, used);
    }
    *count = found;
    return REFIT_OK;
}

refit_status rft_tensor_list_take(rft_view *rest, const rft_limits *limits, rft_listed_tensor *out,
                                  refit_error *error)
{
    rft_map map;
    size_t used;
    RFT_TRY(rft_map_open(*rest, limits, &map, &used, error));
    RFT_TRY(rft_map_read(&map, &tensor_table, limits, out, error));
    *rest = skip(*rest, used);
    return REFIT_OK;
}
