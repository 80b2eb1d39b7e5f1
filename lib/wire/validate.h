/*
 * validate: walks msgpack bytes before msgpack sees them.
 *
 * Lengths may lie: five bytes can promise gigabytes. What passes here is read where it lies,
 * without another check. Accepted are nil, booleans, integers, strings, byte strings, arrays, and
 * maps whose keys are strings; refused are floats, extension types, and anything that owes more
 * values than there are bytes left.
 */
#ifndef RFT_VALIDATE_H
#define RFT_VALIDATE_H

#include "wire/bytes.h"

#define RFT_WALK_DEPTH 8u

typedef struct rft_walk_limits {
    uint32_t nodes;      /* values and keys together */
    uint64_t text_bytes; /* of one string */
} rft_walk_limits;

/* Walks one value at the start of `bytes` and says how many it took. REFIT_ERR_PROTOCOL: it is not
 * whole, too deep, or not acceptable; REFIT_ERR_LIMIT: above `limits`. */
refit_status rft_validate(rft_view bytes, const rft_walk_limits *limits, size_t *used,
                          refit_error *error);

/* What a value is; of integers, those below 0 are OTHER, as is nil. */
typedef enum rft_value_class {
    RFT_VALUE_OTHER,
    RFT_VALUE_NUMBER,
    RFT_VALUE_BOOL,
    RFT_VALUE_TEXT,
    RFT_VALUE_BYTES,
    RFT_VALUE_ARRAY,
    RFT_VALUE_MAP,
} rft_value_class;

typedef struct rft_value {
    rft_value_class class;
    uint64_t number; /* a number, 0 or 1, an array's values, a map's pairs */
    rft_view bytes;  /* of a string or byte string */
} rft_value;

/* Reads the value at `*at`, in bytes that rft_validate has passed, and moves behind it; of an array
 * or a map behind its head, to its first value. */
rft_value rft_value_take(const unsigned char **at);
/* Moves behind the value, with all that it holds. */
void rft_value_pass(const unsigned char **at);

#endif
