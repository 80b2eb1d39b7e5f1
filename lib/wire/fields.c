/*
 * Structs to msgpack maps and back, and the checks that both directions share.
 *
 * A field's value is looked at as one number (`measure`): an integer's value, a view's units, a
 * shape's rank. That number is held against the table's bounds and the configured limit, so one
 * check serves all types. Packing writes straight into the growing bytes through msgpack's writer
 * callback.
 */
#include "wire/fields.h"

#include <string.h>

#include <msgpack.h>

static uint64_t limit_value(const rft_limits *limits, rft_limit which)
{
    switch (which) {
    case RFT_LIMIT_NONE: return UINT64_MAX;
    case RFT_LIMIT_TENSORS: return limits->tensors;
    case RFT_LIMIT_FRAME: return limits->frame_bytes;
    case RFT_LIMIT_VERSION: return limits->version_bytes;
    case RFT_LIMIT_WINDOW: return limits->window;
    }
    return 0;
}

static const char *limit_key(rft_limit which)
{
    static const char *const keys[] = {
        [RFT_LIMIT_NONE] = "",
        [RFT_LIMIT_TENSORS] = "limits.tensors",
        [RFT_LIMIT_FRAME] = "limits.frame_bytes",
        [RFT_LIMIT_VERSION] = "limits.version_bytes",
        [RFT_LIMIT_WINDOW] = "limits.window",
    };
    return keys[which];
}

static uint64_t type_most(rft_field_type type)
{
    switch (type) {
    case RFT_FIELD_U32: return UINT32_MAX;
    case RFT_FIELD_DIMS: return REFIT_RANK_MAX;
    default: return UINT64_MAX;
    }
}

static uint32_t unit_of(const rft_field *field)
{
    return field->unit == 0 ? 1 : field->unit;
}

static uint64_t field_measure(const rft_field *field, const void *value)
{
    switch (field->type) {
    case RFT_FIELD_U32: return *(const uint32_t *)value;
    case RFT_FIELD_U64: return *(const uint64_t *)value;
    case RFT_FIELD_BOOL: return *(const bool *)value;
    case RFT_FIELD_TEXT:
    case RFT_FIELD_BYTES: return ((const rft_view *)value)->count / unit_of(field);
    case RFT_FIELD_DIGEST: return 1;
    case RFT_FIELD_DIMS: return ((const rft_dims *)value)->rank;
    }
    return 0;
}

static bool has_odd_bytes(const rft_field *field, const void *value)
{
    bool is_view = field->type == RFT_FIELD_TEXT || field->type == RFT_FIELD_BYTES;
    return is_view && ((const rft_view *)value)->count % unit_of(field) != 0;
}

/* What a measure counts, for an error's sentence. */
static const char *measured_in(const rft_field *field)
{
    switch (field->type) {
    case RFT_FIELD_TEXT:
    case RFT_FIELD_BYTES: return unit_of(field) == 1 ? " bytes" : " entries";
    case RFT_FIELD_DIMS: return " dimensions";
    default: return "";
    }
}

static refit_status field_check(const rft_fields *fields, const rft_field *field, const void *value,
                                const rft_limits *limits, refit_status refusal, refit_error *error)
{
    uint64_t measure = field_measure(field, value);
    if (field->optional && measure == 0 && !has_odd_bytes(field, value)) return REFIT_OK;
    uint64_t limit = limit_value(limits, field->limit);
    uint64_t most = field->most == 0 ? type_most(field->type) : field->most;
    RFT_REFUSE_IF(measure > limit, error, REFIT_ERR_LIMIT, "%s: %s is %llu%s; %s allows %llu",
                  fields->name, field->key, (unsigned long long)measure, measured_in(field),
                  limit_key(field->limit), (unsigned long long)limit);
    RFT_REFUSE_IF(measure < field->least || measure > most, error, refusal,
                  "%s: %s is %llu%s; it must be %llu to %llu", fields->name, field->key,
                  (unsigned long long)measure, measured_in(field), (unsigned long long)field->least,
                  (unsigned long long)most);
    RFT_REFUSE_IF(has_odd_bytes(field, value), error, refusal,
                  "%s: %s must be whole entries of %u bytes", fields->name, field->key,
                  unit_of(field));
    return REFIT_OK;
}

/* Where a packer writes; the first failure stays. */
typedef struct byte_sink {
    rft_bytes *out;
    uint64_t left; /* bytes that the map may still take */
    refit_status status;
    refit_error *error;
} byte_sink;

static int sink_write(void *user, const char *data, size_t count)
{
    byte_sink *sink = user;
    if (sink->status != REFIT_OK) return -1;
    if (count > sink->left) {
        sink->status = rft_fail(sink->error, REFIT_ERR_LIMIT,
                                "a message would be larger than its limit; raise "
                                "limits.message_bytes or limits.manifest_bytes");
    } else {
        sink->status = rft_bytes_append(sink->out, data, count, sink->error);
        sink->left -= count;
    }
    return sink->status == REFIT_OK ? 0 : -1;
}

static void pack_text(msgpack_packer *packer, rft_view text)
{
    msgpack_pack_str(packer, text.count);
    msgpack_pack_str_body(packer, text.data, text.count);
}

static void pack_bytes(msgpack_packer *packer, rft_view bytes)
{
    msgpack_pack_bin(packer, bytes.count);
    msgpack_pack_bin_body(packer, bytes.data, bytes.count);
}

static void pack_dims(msgpack_packer *packer, const rft_dims *dims)
{
    msgpack_pack_array(packer, dims->rank);
    for (uint32_t i = 0; i < dims->rank; i++)
        msgpack_pack_uint64(packer, dims->at[i]);
}

static void pack_bool(msgpack_packer *packer, bool value)
{
    if (value)
        msgpack_pack_true(packer);
    else
        msgpack_pack_false(packer);
}

/* What fails is kept by the sink. */
static void pack_value(msgpack_packer *packer, const rft_field *field, const void *value)
{
    switch (field->type) {
    case RFT_FIELD_U32:
    case RFT_FIELD_U64: msgpack_pack_uint64(packer, field_measure(field, value)); break;
    case RFT_FIELD_BOOL: pack_bool(packer, *(const bool *)value); break;
    case RFT_FIELD_TEXT: pack_text(packer, *(const rft_view *)value); break;
    case RFT_FIELD_BYTES: pack_bytes(packer, *(const rft_view *)value); break;
    case RFT_FIELD_DIGEST: pack_bytes(packer, (rft_view){value, sizeof(rft_digest128)}); break;
    case RFT_FIELD_DIMS: pack_dims(packer, value); break;
    }
}

static const void *value_of(const void *object, const rft_field *field)
{
    return (const unsigned char *)object + field->offset;
}

static bool is_written(const rft_field *field, const void *object)
{
    return !field->optional || field_measure(field, value_of(object, field)) != 0;
}

static uint32_t count_written(const rft_fields *fields, const void *object)
{
    uint32_t count = fields->tagged ? 1 : 0;
    for (uint32_t i = 0; i < fields->count; i++)
        count += is_written(&fields->list[i], object) ? 1 : 0;
    return count;
}

static void pack_fields(msgpack_packer *packer, const rft_fields *fields, const void *object)
{
    msgpack_pack_map(packer, count_written(fields, object));
    if (fields->tagged) {
        pack_text(packer, rft_view_text(RFT_FIELDS_KIND));
        pack_text(packer, rft_view_text(fields->name));
    }
    for (uint32_t i = 0; i < fields->count; i++) {
        const rft_field *field = &fields->list[i];
        if (!is_written(field, object)) continue;
        pack_text(packer, rft_view_text(field->key));
        pack_value(packer, field, value_of(object, field));
    }
}

refit_status rft_fields_encode(const rft_fields *fields, const void *object,
                               const rft_limits *limits, uint64_t most, rft_bytes *out,
                               refit_error *error)
{
    for (uint32_t i = 0; i < fields->count; i++) {
        const rft_field *field = &fields->list[i];
        RFT_TRY(
            field_check(fields, field, value_of(object, field), limits, REFIT_ERR_INVALID, error));
    }
    size_t before = out->count;
    byte_sink sink = {.out = out, .left = most, .error = error};
    msgpack_packer packer;
    msgpack_packer_init(&packer, &sink, sink_write);
    pack_fields(&packer, fields, object);
    if (sink.status != REFIT_OK) out->count = before;
    return sink.status;
}

/* ---- Maps
 *
 * msgpack maps to structs: reading by table.
 *
 *     bytes ─► rft_validate ─► where each key's value is ─► no key twice ─► per field: type, bounds
 *
 * What the validator has passed is read where it lies, so reading takes no memory; strings and byte
 * strings point into the bytes themselves. Keys that the table does not know are passed over.
 */

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
    return field_check(fields, field, value, limits, REFIT_ERR_PROTOCOL, error);
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
