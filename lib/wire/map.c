/*
 * msgpack maps to structs: reading by table.
 *
 *     bytes ─► rft_validate ─► where each key's value is ─► no key twice ─► per field: type, bounds
 *
 * What the validator has passed is read where it lies, so reading takes no memory; strings and byte
 * strings point into the bytes themselves. Keys that the table does not know are passed over.
 */
#include <string.h>

#include "wire/field_check.h"
#include "wire/fields.h"

#define VALUES_MOST 512u  /* of one map, whatever nests in unknown keys included */
#define TEXT_MOST   4096u /* bytes of one string, unless names may be longer */

static bool views_equal(rft_view a, rft_view b)
{
    return a.count == b.count && (a.count == 0 || memcmp(a.data, b.data, a.count) == 0);
}

static refit_status check_keys(const rft_map *map, refit_error *error)
{
    for (uint32_t i = 0; i < map->count; i++) {
        for (uint32_t j = 0; j < i; j++) {
            RFT_REFUSE_IF(views_equal(map->pairs[i].key, map->pairs[j].key), error,
                          REFIT_ERR_PROTOCOL, "a message has the same key twice");
        }
    }
    return REFIT_OK;
}

/* Of validated bytes. */
static refit_status index_pairs(const unsigned char *at, rft_map *map, refit_error *error)
{
    rft_value head = rft_value_take(&at);
    RFT_REFUSE_IF(head.class != RFT_VALUE_MAP, error, REFIT_ERR_PROTOCOL,
                  "a message is not a msgpack map");
    RFT_REFUSE_IF(head.number > RFT_FIELDS_KEYS_MOST, error, REFIT_ERR_PROTOCOL,
                  "a message has %llu keys; at most %u are allowed",
                  (unsigned long long)head.number, RFT_FIELDS_KEYS_MOST);
    map->count = (uint32_t)head.number;
    for (uint32_t i = 0; i < map->count; i++) {
        map->pairs[i].key = rft_value_take(&at).bytes;
        map->pairs[i].value = at;
        rft_value_pass(&at);
    }
    return check_keys(map, error);
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
    RFT_TRY(index_pairs(bytes.data, map, error));
    *used = length;
    return REFIT_OK;
}

/* NULL if there is no such key. */
static const unsigned char *find(const rft_map *map, const char *key)
{
    for (uint32_t i = 0; i < map->count; i++) {
        if (views_equal(map->pairs[i].key, rft_view_text(key))) return map->pairs[i].value;
    }
    return NULL;
}

rft_view rft_map_text(const rft_map *map, const char *key)
{
    const unsigned char *at = find(map, key);
    rft_value value = at == NULL ? (rft_value){0} : rft_value_take(&at);
    return value.class == RFT_VALUE_TEXT ? value.bytes : (rft_view){0};
}

static bool take_integer(const unsigned char **at, uint64_t most, uint64_t *out)
{
    rft_value value = rft_value_take(at);
    if (value.class != RFT_VALUE_NUMBER || value.number > most) return false;
    *out = value.number;
    return true;
}

static bool take_u32(const unsigned char *at, uint32_t *out)
{
    uint64_t value;
    if (!take_integer(&at, UINT32_MAX, &value)) return false;
    *out = (uint32_t)value;
    return true;
}

static bool take_bool(const unsigned char *at, bool *out)
{
    rft_value value = rft_value_take(&at);
    if (value.class != RFT_VALUE_BOOL) return false;
    *out = value.number != 0;
    return true;
}

static bool take_view(const unsigned char *at, rft_value_class class, rft_view *out)
{
    rft_value value = rft_value_take(&at);
    if (value.class != class) return false;
    *out = value.bytes;
    return true;
}

static bool take_digest(const unsigned char *at, rft_digest128 *out)
{
    rft_view bytes;
    if (!take_view(at, RFT_VALUE_BYTES, &bytes) || bytes.count != sizeof out->bytes) return false;
    memcpy(out->bytes, bytes.data, sizeof out->bytes);
    return true;
}

static bool take_dims(const unsigned char *at, rft_dims *out)
{
    rft_value head = rft_value_take(&at);
    if (head.class != RFT_VALUE_ARRAY || head.number > REFIT_RANK_MAX) return false;
    out->rank = (uint32_t)head.number;
    for (uint32_t i = 0; i < out->rank; i++) {
        if (!take_integer(&at, UINT64_MAX, &out->at[i])) return false;
    }
    return true;
}

static bool take_value(const unsigned char *at, const rft_field *field, void *value)
{
    switch (field->type) {
    case RFT_FIELD_U32: return take_u32(at, value);
    case RFT_FIELD_U64: return take_integer(&at, UINT64_MAX, value);
    case RFT_FIELD_BOOL: return take_bool(at, value);
    case RFT_FIELD_TEXT: return take_view(at, RFT_VALUE_TEXT, value);
    case RFT_FIELD_BYTES: return take_view(at, RFT_VALUE_BYTES, value);
    case RFT_FIELD_DIGEST: return take_digest(at, value);
    case RFT_FIELD_DIMS: return take_dims(at, value);
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
    const unsigned char *at = find(map, field->key);
    if (at == NULL && field->optional) {
        memset(value, 0, type_size(field->type));
        return REFIT_OK;
    }
    RFT_REFUSE_IF(at == NULL, error, REFIT_ERR_PROTOCOL, "%s: %s is missing", fields->name,
                  field->key);
    RFT_REFUSE_IF(!take_value(at, field, value), error, REFIT_ERR_PROTOCOL,
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
