/*
 * Structs to msgpack maps and back, and the checks that both directions share.
 *
 *     struct ─► per field: bounds ─► msgpack's packer ─► bytes
 *     bytes ─► validator ─► where each key's value is ─► no key twice ─► per field: type, bounds
 *
 * Lengths in received bytes may be false, so the validator walks the bytes before any is read.
 *
 * A field's value is looked at as one number (`measure`): an integer's value, a view's units, a
 * shape's rank. That number is held against the table's bounds and the configured limit, so one
 * check serves all types. Packing writes straight into the growing bytes through msgpack's writer
 * callback. Knows nothing of messages.
 */
#include "wire/fields.h"

#include <string.h>

#include <msgpack.h>

#include "base/checked.h"

/* ---- The validator
 *
 * One loop over the bytes, one small stack, no recursion and no memory. Every open array or map is
 * a level with the number of values it still expects (a map: keys and values). `due` is their sum
 * over all levels. A value takes at least one byte, so a message is false as soon as more values
 * are due than bytes are left, and that is found before memory is reserved for it.
 */

typedef enum format_class {
    REFUSED = 0, /* floats, extension types, and the byte that msgpack never uses */
    VALUE,
    TEXT,
    BLOB,
    ARRAY,
    MAP,
} format_class;

/* The formats 0xc0 to 0xdf; `width` is the bytes of a number, or of the length that follows. */
static const struct {
    unsigned char class;
    unsigned char width;
} long_formats[32] = {
    [0x00] = {VALUE, 0}, [0x02] = {VALUE, 0}, [0x03] = {VALUE, 0}, /* nil, false, true */
    [0x04] = {BLOB, 1},  [0x05] = {BLOB, 2},  [0x06] = {BLOB, 4},  [0x0c] = {VALUE, 1},
    [0x0d] = {VALUE, 2}, [0x0e] = {VALUE, 4}, [0x0f] = {VALUE, 8}, [0x10] = {VALUE, 1},
    [0x11] = {VALUE, 2}, [0x12] = {VALUE, 4}, [0x13] = {VALUE, 8}, [0x19] = {TEXT, 1},
    [0x1a] = {TEXT, 2},  [0x1b] = {TEXT, 4},  [0x1c] = {ARRAY, 2}, [0x1d] = {ARRAY, 4},
    [0x1e] = {MAP, 2},   [0x1f] = {MAP, 4},
};

/* One value's head. `count`: the bytes of its body, or an array's values, or a map's pairs. */
typedef struct value_head {
    format_class class;
    uint64_t count;
} value_head;

typedef struct walk_level {
    uint64_t expected; /* values still to come; even in a map when a key is next */
    bool map;
} walk_level;

typedef struct byte_walk {
    const unsigned char *at;
    size_t left;
    uint64_t due;
    uint32_t nodes;
    uint32_t open; /* arrays and maps; levels[open] is the innermost, levels[0] the whole */
    walk_level levels[RFT_WALK_DEPTH + 1];
} byte_walk;

static void skip(byte_walk *walk, size_t count)
{
    walk->at += count;
    walk->left -= count;
}

/* Big-endian, as msgpack has it. */
static uint64_t read_length(const unsigned char *at, unsigned width)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < width; i++)
        value = value << 8 | at[i];
    return value;
}

static bool read_long_head(byte_walk *walk, unsigned char first, value_head *out)
{
    unsigned width = long_formats[first - 0xc0].width;
    out->class = (format_class)long_formats[first - 0xc0].class;
    if (out->class == VALUE) {
        out->count = width;
        return true;
    }
    if (width > walk->left) return false;
    out->count = read_length(walk->at, width);
    skip(walk, width);
    return true;
}

/* False if the bytes end inside the head. */
static bool read_head(byte_walk *walk, value_head *out)
{
    if (walk->left == 0) return false;
    unsigned char first = walk->at[0];
    skip(walk, 1);
    if (first >= 0xc0 && first < 0xe0) return read_long_head(walk, first, out);
    if (first < 0x80 || first >= 0xe0)
        *out = (value_head){VALUE, 0};
    else if (first < 0x90)
        *out = (value_head){MAP, first & 0x0f};
    else if (first < 0xa0)
        *out = (value_head){ARRAY, first & 0x0f};
    else
        *out = (value_head){TEXT, first & 0x1f};
    return true;
}

static refit_status enter(byte_walk *walk, const value_head *head, refit_error *error)
{
    uint64_t values = head->class == MAP ? 2 * head->count : head->count;
    RFT_REFUSE_IF(walk->open == RFT_WALK_DEPTH, error, REFIT_ERR_PROTOCOL,
                  "the message nests deeper than %u levels", RFT_WALK_DEPTH);
    walk->due += values;
    RFT_REFUSE_IF(walk->due > walk->left, error, REFIT_ERR_PROTOCOL,
                  "the message promises %llu more values and has %zu bytes left",
                  (unsigned long long)walk->due, walk->left);
    walk->levels[++walk->open] = (walk_level){values, head->class == MAP};
    return REFIT_OK;
}

static refit_status pass_body(byte_walk *walk, const value_head *head,
                              const rft_walk_limits *limits, refit_error *error)
{
    RFT_REFUSE_IF(head->count > walk->left, error, REFIT_ERR_PROTOCOL,
                  "the message ends inside a value of %llu bytes; %zu are left",
                  (unsigned long long)head->count, walk->left);
    RFT_REFUSE_IF(head->class == TEXT && head->count > limits->text_bytes, error, REFIT_ERR_LIMIT,
                  "the message has a string of %llu bytes; at most %llu are allowed",
                  (unsigned long long)head->count, (unsigned long long)limits->text_bytes);
    skip(walk, (size_t)head->count);
    return REFIT_OK;
}

/* Counts one value as arrived. */
static refit_status arrive(byte_walk *walk, const value_head *head, const rft_walk_limits *limits,
                           refit_error *error)
{
    walk_level *inner = &walk->levels[walk->open];
    bool is_key = inner->map && inner->expected % 2 == 0;
    RFT_REFUSE_IF(head->class == REFUSED, error, REFIT_ERR_PROTOCOL,
                  "the message has a float, an extension or an unused format: byte 0x%02x",
                  walk->at[-1]);
    RFT_REFUSE_IF(is_key && head->class != TEXT, error, REFIT_ERR_PROTOCOL,
                  "the message has a map key that is not a string");
    RFT_REFUSE_IF(walk->nodes == limits->nodes, error, REFIT_ERR_LIMIT,
                  "the message has more than %u values", limits->nodes);
    walk->nodes++;
    walk->due--;
    inner->expected--;
    return REFIT_OK;
}

static void leave_finished(byte_walk *walk)
{
    while (walk->open > 0 && walk->levels[walk->open].expected == 0)
        walk->open--;
}

static refit_status step(byte_walk *walk, const rft_walk_limits *limits, refit_error *error)
{
    value_head head;
    RFT_REFUSE_IF(!read_head(walk, &head), error, REFIT_ERR_PROTOCOL,
                  "the message ends where %llu more values should be",
                  (unsigned long long)walk->due);
    RFT_TRY(arrive(walk, &head, limits, error));
    if (head.class == ARRAY || head.class == MAP)
        RFT_TRY(enter(walk, &head, error));
    else
        RFT_TRY(pass_body(walk, &head, limits, error));
    leave_finished(walk);
    return REFIT_OK;
}

refit_status rft_validate(rft_view bytes, const rft_walk_limits *limits, size_t *used,
                          refit_error *error)
{
    byte_walk walk = {.at = bytes.data, .left = bytes.count, .due = 1, .levels = {{.expected = 1}}};
    while (walk.due > 0)
        RFT_TRY(step(&walk, limits, error));
    *used = bytes.count - walk.left;
    return REFIT_OK;
}

/* ---- Values
 *
 * Bytes that have passed are read where they lie, by the same heads and without another check.
 */

/* The class of a value; integers below 0 are OTHER, as is nil. */
typedef enum value_class {
    VALUE_OTHER,
    VALUE_NUMBER,
    VALUE_BOOL,
    VALUE_TEXT,
    VALUE_BYTES,
    VALUE_ARRAY,
    VALUE_MAP,
} value_class;

typedef struct wire_value {
    value_class class;
    uint64_t number; /* a number, 0 or 1, an array's values, a map's pairs */
    rft_view bytes;  /* of a string or byte string */
} wire_value;

/* The two's complement of `width` bytes; below 0 it is not a number for us. */
static wire_value signed_value(uint64_t bits, unsigned width)
{
    bool negative = bits >> (8 * width - 1) != 0;
    return (wire_value){negative ? VALUE_OTHER : VALUE_NUMBER, bits, {0}};
}

/* A value without a body: `first` is its format, `bits` the number after it. */
static wire_value plain_value(unsigned char first, uint64_t bits)
{
    if (first < 0x80) return (wire_value){VALUE_NUMBER, first, {0}};
    if (first == 0xc2 || first == 0xc3) return (wire_value){VALUE_BOOL, first & 1, {0}};
    if (first >= 0xcc && first <= 0xcf) return (wire_value){VALUE_NUMBER, bits, {0}};
    if (first >= 0xd0 && first <= 0xd3) return signed_value(bits, 1u << (first - 0xd0));
    return (wire_value){VALUE_OTHER, 0, {0}};
}

static value_class class_of(format_class class)
{
    switch (class) {
    case TEXT: return VALUE_TEXT;
    case BLOB: return VALUE_BYTES;
    case ARRAY: return VALUE_ARRAY;
    case MAP: return VALUE_MAP;
    case VALUE:
    case REFUSED: break;
    }
    return VALUE_OTHER;
}

/* Reads the value at `*at`, in bytes that rft_validate has passed, and moves after it; of an array
 * or a map after its head, to its first value. */
static wire_value take_value_at(const unsigned char **at)
{
    unsigned char first = **at;
    byte_walk walk = {.at = *at, .left = SIZE_MAX}; /* all of it is there: it has passed */
    value_head head;
    (void)read_head(&walk, &head);
    wire_value value = {class_of(head.class), head.count, {0}};
    if (head.class == VALUE) value = plain_value(first, read_length(walk.at, (unsigned)head.count));
    if (head.class == TEXT || head.class == BLOB) value.bytes = (rft_view){walk.at, head.count};
    bool holds = head.class == ARRAY || head.class == MAP;
    *at = holds ? walk.at : walk.at + head.count;
    return value;
}

/* Moves after the value, with all that it holds. */
static void pass_value(const unsigned char **at)
{
    for (uint64_t due = 1; due > 0; due--) {
        wire_value value = take_value_at(at);
        if (value.class == VALUE_ARRAY) due += value.number;
        if (value.class == VALUE_MAP) due += 2 * value.number;
    }
}

/* ---- Fields: their bounds, and packing ---- */

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

/* The sink keeps the first failure. */
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
 * Validated bytes are read where they lie, so reading takes no memory; strings and byte strings
 * point into the bytes themselves. Keys that the table does not know are passed over.
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
    wire_value head = take_value_at(&at);
    RFT_REFUSE_IF(head.class != VALUE_MAP, error, REFIT_ERR_PROTOCOL,
                  "a message is not a msgpack map");
    RFT_REFUSE_IF(head.number > RFT_FIELDS_KEYS_MOST, error, REFIT_ERR_PROTOCOL,
                  "a message has %llu keys; at most %u are allowed",
                  (unsigned long long)head.number, RFT_FIELDS_KEYS_MOST);
    map->count = (uint32_t)head.number;
    for (uint32_t i = 0; i < map->count; i++) {
        map->pairs[i].key = take_value_at(&at).bytes;
        map->pairs[i].value = at;
        pass_value(&at);
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
    wire_value value = at == NULL ? (wire_value){0} : take_value_at(&at);
    return value.class == VALUE_TEXT ? value.bytes : (rft_view){0};
}

static bool take_integer(const unsigned char **at, uint64_t most, uint64_t *out)
{
    wire_value value = take_value_at(at);
    if (value.class != VALUE_NUMBER || value.number > most) return false;
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
    wire_value value = take_value_at(&at);
    if (value.class != VALUE_BOOL) return false;
    *out = value.number != 0;
    return true;
}

static bool take_view(const unsigned char *at, value_class class, rft_view *out)
{
    wire_value value = take_value_at(&at);
    if (value.class != class) return false;
    *out = value.bytes;
    return true;
}

static bool take_digest(const unsigned char *at, rft_digest128 *out)
{
    rft_view bytes;
    if (!take_view(at, VALUE_BYTES, &bytes) || bytes.count != sizeof out->bytes) return false;
    memcpy(out->bytes, bytes.data, sizeof out->bytes);
    return true;
}

static bool take_dims(const unsigned char *at, rft_dims *out)
{
    wire_value head = take_value_at(&at);
    if (head.class != VALUE_ARRAY || head.number > REFIT_RANK_MAX) return false;
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
    case RFT_FIELD_TEXT: return take_view(at, VALUE_TEXT, value);
    case RFT_FIELD_BYTES: return take_view(at, VALUE_BYTES, value);
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
