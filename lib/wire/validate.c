/*
 * The validator: one loop over the bytes, one small stack, no recursion and no memory.
 *
 * Every open array or map is a level with the number of values it still expects (a map: keys and
 * values). `due` is their sum over all levels. A value takes at least one byte, so as soon as more
 * values are due than bytes are left the message lies, and that is seen before anybody reserves
 * memory for it. Values that have passed are read by the same heads. Knows nothing of messages.
 */
#include "wire/validate.h"

#include "base/checked.h"

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

/* ---- Reading what has passed */

/* The two's complement of `width` bytes; below 0 it is no number for us. */
static rft_value signed_value(uint64_t bits, unsigned width)
{
    bool negative = bits >> (8 * width - 1) != 0;
    return (rft_value){negative ? RFT_VALUE_OTHER : RFT_VALUE_NUMBER, bits, {0}};
}

/* A value without a body: `first` is its format, `bits` the number behind it. */
static rft_value plain_value(unsigned char first, uint64_t bits)
{
    if (first < 0x80) return (rft_value){RFT_VALUE_NUMBER, first, {0}};
    if (first == 0xc2 || first == 0xc3) return (rft_value){RFT_VALUE_BOOL, first & 1, {0}};
    if (first >= 0xcc && first <= 0xcf) return (rft_value){RFT_VALUE_NUMBER, bits, {0}};
    if (first >= 0xd0 && first <= 0xd3) return signed_value(bits, 1u << (first - 0xd0));
    return (rft_value){RFT_VALUE_OTHER, 0, {0}};
}

static rft_value_class class_of(format_class class)
{
    switch (class) {
    case TEXT: return RFT_VALUE_TEXT;
    case BLOB: return RFT_VALUE_BYTES;
    case ARRAY: return RFT_VALUE_ARRAY;
    case MAP: return RFT_VALUE_MAP;
    case VALUE:
    case REFUSED: break;
    }
    return RFT_VALUE_OTHER;
}

rft_value rft_value_take(const unsigned char **at)
{
    unsigned char first = **at;
    byte_walk walk = {.at = *at, .left = SIZE_MAX}; /* all of it is there: it has passed */
    value_head head;
    (void)read_head(&walk, &head);
    rft_value value = {class_of(head.class), head.count, {0}};
    if (head.class == VALUE) value = plain_value(first, read_length(walk.at, (unsigned)head.count));
    if (head.class == TEXT || head.class == BLOB) value.bytes = (rft_view){walk.at, head.count};
    bool holds = head.class == ARRAY || head.class == MAP;
    *at = holds ? walk.at : walk.at + head.count;
    return value;
}

void rft_value_pass(const unsigned char **at)
{
    for (uint64_t due = 1; due > 0; due--) {
        rft_value value = rft_value_take(at);
        if (value.class == RFT_VALUE_ARRAY) due += value.number;
        if (value.class == RFT_VALUE_MAP) due += 2 * value.number;
    }
}
