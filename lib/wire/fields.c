/*
 * Structs to msgpack maps: writing, and the checks that both directions share.
 *
 * A field's value is looked at as one number (`measure`): an integer's value, a view's units, a
 * shape's rank. That number is held against the table's bounds and the configured limit, so one
 * check serves all types. Packing writes straight into the growing bytes through msgpack's writer
 * callback. Reading is in map.c.
 */
#include "wire/fields.h"

#include <string.h>

#include <msgpack.h>

#include "wire/field_check.h"

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

uint64_t rft_field_measure(const rft_field *field, const void *value)
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

refit_status rft_field_check(const rft_fields *fields, const rft_field *field, const void *value,
                             const rft_limits *limits, refit_status refusal, refit_error *error)
{
    uint64_t measure = rft_field_measure(field, value);
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
    case RFT_FIELD_U64: msgpack_pack_uint64(packer, rft_field_measure(field, value)); break;
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
    return !field->optional || rft_field_measure(field, value_of(object, field)) != 0;
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
        RFT_TRY(rft_field_check(fields, field, value_of(object, field), limits, REFIT_ERR_INVALID,
                                error));
    }
    size_t before = out->count;
    byte_sink sink = {.out = out, .left = most, .error = error};
    msgpack_packer packer;
    msgpack_packer_init(&packer, &sink, sink_write);
    pack_fields(&packer, fields, object);
    if (sink.status != REFIT_OK) out->count = before;
    return sink.status;
}
