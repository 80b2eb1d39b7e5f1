/*
 * fields: a C struct as a msgpack map and back, by a table of its fields.
 *
 * The table says what the wire calls a field, where it lies in the struct and what it may hold; one
 * loop writes any struct and one reads it. The same bounds hold both ways: what would be refused
 * when it is read is not written (REFIT_ERR_INVALID).
 */
#ifndef RFT_FIELDS_H
#define RFT_FIELDS_H

#include <refit/broadcast.h>

#include "wire/message.h"

/* ---- The validator
 *
 * Walks msgpack bytes before they are read. Lengths may lie: five bytes can promise gigabytes.
 * Accepted are nil, booleans, integers, strings, byte strings, arrays, and maps whose keys are
 * strings; refused are floats, extension types, and anything that owes more values than there are
 * bytes left.
 */

#define RFT_WALK_DEPTH 8u

typedef struct rft_walk_limits {
    uint32_t nodes;      /* values and keys together */
    uint64_t text_bytes; /* of one string */
} rft_walk_limits;

/* Walks one value at the start of `bytes` and says how many it took. REFIT_ERR_PROTOCOL: it is not
 * whole, too deep, or not acceptable; REFIT_ERR_LIMIT: above `limits`. */
refit_status rft_validate(rft_view bytes, const rft_walk_limits *limits, size_t *used,
                          refit_error *error);

/* The limits of a walk that follow from those of the configuration. */
rft_walk_limits rft_fields_walk_limits(const rft_limits *limits);

/* ---- Fields and maps ---- */

typedef enum rft_field_type {
    RFT_FIELD_U32,
    RFT_FIELD_U64,
    RFT_FIELD_BOOL,
    RFT_FIELD_TEXT,   /* rft_view, as a msgpack string */
    RFT_FIELD_BYTES,  /* rft_view, as a msgpack byte string */
    RFT_FIELD_DIGEST, /* rft_digest128 */
    RFT_FIELD_DIMS,   /* rft_dims, as an array of integers */
} rft_field_type;

/* Which configured limit holds for a field, besides its own bounds. */
typedef enum rft_limit {
    RFT_LIMIT_NONE = 0,
    RFT_LIMIT_TENSORS,
    RFT_LIMIT_FRAME,
    RFT_LIMIT_VERSION,
    RFT_LIMIT_WINDOW,
} rft_limit;

typedef struct rft_dims {
    uint32_t rank;
    uint64_t at[REFIT_RANK_MAX];
} rft_dims;

/* Bounds hold for a number's value, a view's units, and a shape's rank. */
typedef struct rft_field {
    const char *key;
    rft_field_type type;
    size_t offset; /* in the struct */
    bool optional; /* absent means zero or empty, and zero is not written */
    uint32_t unit; /* a view's bytes are a multiple of it; 0 is 1 */
    uint64_t least;
    uint64_t most; /* 0: whatever the type holds */
    rft_limit limit;
} rft_field;

typedef struct rft_fields {
    const char *name; /* of the struct: what errors call it */
    bool tagged;      /* the map starts with {"k": name} */
    uint32_t count;
    const rft_field *list;
} rft_fields;

#define RFT_FIELDS_KIND      "k"
#define RFT_FIELDS_KEYS_MOST 64u /* of one map, unknown ones included */

/* Appends `object`; the map takes at most `most` bytes. On failure `out` is as before.
 * REFIT_ERR_INVALID, REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY. */
refit_status rft_fields_encode(const rft_fields *fields, const void *object,
                               const rft_limits *limits, uint64_t most, rft_bytes *out,
                               refit_error *error);

/* A map that was validated; all of it lies in the bytes it came from. */
typedef struct rft_map {
    uint32_t count;
    struct {
        rft_view key;
        const unsigned char *value;
    } pairs[RFT_FIELDS_KEYS_MOST];
} rft_map;

/* Opens the map at the start of `bytes`, which must outlive it, and says how many it took. Takes no
 * memory. REFIT_ERR_PROTOCOL (also for a key that is there twice), REFIT_ERR_LIMIT. */
refit_status rft_map_open(rft_view bytes, const rft_limits *limits, rft_map *map, size_t *used,
                          refit_error *error);

/* The string under `key`, or an empty view. */
rft_view rft_map_text(const rft_map *map, const char *key);

/* Fills the fields of `object`; what is absent and optional becomes zero. REFIT_ERR_PROTOCOL,
 * REFIT_ERR_LIMIT. */
refit_status rft_map_read(const rft_map *map, const rft_fields *fields, const rft_limits *limits,
                          void *object, refit_error *error);

#endif
