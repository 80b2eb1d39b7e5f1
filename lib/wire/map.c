/*
 * msgpack maps to structs: reading by table.
 *
 *     bytes ─► rft_validate ─► msgpack_unpack_next ─► no key twice ─► per field: type, bounds, copy
 *
 * msgpack's objects live in a zone that rft_map_close frees; strings and byte strings point into
 * the bytes themselves. Keys that the table does not know are passed over.
 */
#include <string.h>

#include "wire/field_check.h"
#include "wire/fields.h"

#define VALUES_MOST 512u  /* of one map, whatever nests in unknown keys included */
#define TEXT_MOST   4096u /* bytes of one string, unless names may be longer */

static const msgpack_object_map *pairs_of(const rft_map *map)
{
    return &map->unpacked.data.via.map;
}

static rft_view text_of(const msgpack_object *object)
{
    if (object->type != MSGPACK_OBJECT_STR) return (rft_view){0};
    return (rft_view){object->via.str.ptr, object->via.str.size};
}

static bool views_equal(rft_view a, rft_view b)
{
    return a.count == b.count && (a.count == 0 || memcmp(a.data, b.data, a.count) == 0);
}

static refit_status check_keys(const msgpack_object_map *pairs, refit_error *error)
{
    RFT_REFUSE_IF(pairs->size > RFT_FIELDS_KEYS_MOST, error, REFIT_ERR_PROTOCOL,
                  "a message has %u keys; at most %u are allowed", pairs->size,
                  RFT_FIELDS_KEYS_MOST);
    for (uint32_t i = 0; i < pairs->size; i++) {
        for (uint32_t j = 0; j < i; j++) {
            RFT_REFUSE_IF(views_equal(text_of(&pairs->ptr[i].key), text_of(&pairs->ptr[j].key)),
                          error, REFIT_ERR_PROTOCOL, "a message has the same key twice");
        }
    }
    return REFIT_OK;
}

static refit_status unpack(rft_view bytes, rft_map *map, refit_error *error)
{
    size_t offset = 0;
    msgpack_unpack_return result =
        msgpack_unpack_next(&map->unpacked, bytes.data, bytes.count, &offset);
    RFT_REFUSE_IF(result == MSGPACK_UNPACK_NOMEM_ERROR, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to unpack a message of %zu bytes", bytes.count);
    RFT_REFUSE_IF(result != MSGPACK_UNPACK_SUCCESS || map->unpacked.data.type != MSGPACK_OBJECT_MAP,
                  error, REFIT_ERR_PROTOCOL, "a message is not a msgpack map");
    return check_keys(pairs_of(map), error);
}

rft_walk_limits rft_fields_walk_limits(const rft_limits *limits)
{
    uint64_t text = limits->name_bytes > TEXT_MOST ? limits->name_bytes : TEXT_MOST;
    return (rft_walk_limits){.nodes = VALUES_MOST, .text_bytes = text};
}

refit_status rft_map_open(rft_view bytes, const rft_limits *limits, rft_map *map, size_t *used,
                          refit_error *error)
{
    rft_walk_limits walk = rft_fields_walk_limits(limits);
    size_t length;
    RFT_TRY(rft_validate(bytes, &walk, &length, error));
    msgpack_unpacked_init(&map->unpacked);
    refit_status status = unpack((rft_view){bytes.data, length}, map, error);
    if (status == REFIT_OK)
        *used = length;
    else
        rft_map_close(map);
    return status;
}

void rft_map_close(rft_map *map)
{
    msgpack_unpacked_destroy(&map->unpacked);
}

/* NULL if there is no such key. */
static const msgpack_object *find(const rft_map *map, const char *key)
{
    const msgpack_object_map *pairs = pairs_of(map);
    for (uint32_t i = 0; i < pairs->size; i++) {
        if (views_equal(text_of(&pairs->ptr[i].key), rft_view_text(key))) return &pairs->ptr[i].val;
    }
    return NULL;
}

rft_view rft_map_text(const rft_map *map, const char *key)
{
    const msgpack_object *object = find(map, key);
    return object == NULL ? (rft_view){0} : text_of(object);
}

static bool take_integer(const msgpack_object *object, uint64_t most, uint64_t *out)
{
    if (object->type != MSGPACK_OBJECT_POSITIVE_INTEGER || object->via.u64 > most) return false;
    *out = object->via.u64;
    return true;
}

static bool take_u32(const msgpack_object *object, uint32_t *out)
{
    uint64_t value;
    if (!take_integer(object, UINT32_MAX, &value)) return false;
    *out = (uint32_t)value;
    return true;
}

static bool take_bool(const msgpack_object *object, bool *out)
{
    if (object->type != MSGPACK_OBJECT_BOOLEAN) return false;
    *out = object->via.boolean;
    return true;
}

static bool take_text(const msgpack_object *object, rft_view *out)
{
    if (object->type != MSGPACK_OBJECT_STR) return false;
    *out = text_of(object);
    return true;
}

static bool take_bytes(const msgpack_object *object, rft_view *out)
{
    if (object->type != MSGPACK_OBJECT_BIN) return false;
    *out = (rft_view){object->via.bin.ptr, object->via.bin.size};
    return true;
}

static bool take_digest(const msgpack_object *object, rft_digest128 *out)
{
    rft_view bytes;
    if (!take_bytes(object, &bytes) || bytes.count != sizeof out->bytes) return false;
    memcpy(out->bytes, bytes.data, sizeof out->bytes);
    return true;
}

static bool take_dims(const msgpack_object *object, rft_dims *out)
{
    if (object->type != MSGPACK_OBJECT_ARRAY || object->via.array.size > REFIT_RANK_MAX)
        return false;
    out->rank = object->via.array.size;
    for (uint32_t i = 0; i < out->rank; i++) {
        if (!take_integer(&object->via.array.ptr[i], UINT64_MAX, &out->at[i])) return false;
    }
    return true;
}

static bool take_value(const msgpack_object *object, const rft_field *field, void *value)
{
    switch (field->type) {
    case RFT_FIELD_U32: return take_u32(object, value);
    case RFT_FIELD_U64: return take_integer(object, UINT64_MAX, value);
    case RFT_FIELD_BOOL: return take_bool(object, value);
    case RFT_FIELD_TEXT: return take_text(object, value);
    case RFT_FIELD_BYTES: return take_bytes(object, value);
    case RFT_FIELD_DIGEST: return take_digest(object, value);
    case RFT_FIELD_DIMS: return take_dims(object, value);
    }
    return false;
}

static size_t type_size(rft_field_type type)
{
    static const size_t sizes[] = {
        [RFT_FIELD_U32] = sizeof(uint32_t),   [RFT_FIELD_U64] = sizeof(uint64_t),
        [RFT_FIELD_BOOL] = sizeof(bool),      [RFT_FIELD_TEXT] = sizeof(rft_view),
        [RFT_FIELD_BYTES] = sizeof(rft_view), [RFT_FIELD_DIGEST] = sizeof(rft_digest128),
        [RFT_FIELD_DIMS] = sizeof(rft_dims),
    };
    return sizes[type];
}

static refit_status read_field(const rft_map *map, const rft_fields *fields, const rft_field *field,
                               const rft_limits *limits, void *value, refit_error *error)
{
    const msgpack_object *object = find(map, field->key);
    if (object == NULL && field->optional) {
        memset(value, 0, type_size(field->type));
        return REFIT_OK;
    }
    RFT_REFUSE_IF(object == NULL, error, REFIT_ERR_PROTOCOL, "%s: %s is missing", fields->name,
                  field->key);
    RFT_REFUSE_IF(!take_value(object, field, value), error, REFIT_ERR_PROTOCOL,
                  "%s: %s has the wrong type or size", fields->name, field->key);
    return rft_field_check(fields, field, value, limits, REFIT_ERR_PROTOCOL, error);
}

refit_status rft_map_read(const rft_map *map, const rft_fields *fields, const rft_limits *limits,
                          void *object, refit_error *error)
{
    for (uint32_t i = 0; i < fields->count; i++) {
        const rft_field *field = &fields->list[i];
        void *value = (unsigned char *)object + field->offset;
        RFT_TRY(read_field(map, fields, field, limits, value, error));
    }
    return REFIT_OK;
}
