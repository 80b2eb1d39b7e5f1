/*
 * validate: walks msgpack bytes before msgpack sees them.
 *
 * msgpack-c believes lengths: five lying bytes make it reserve gigabytes. What passes here can be
 * unpacked with memory in proportion to its nodes. Accepted are nil, booleans, integers, strings,
 * byte strings, arrays, and maps whose keys are strings; refused are floats, extension types, and
 * anything that owes more values than there are bytes left.
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

#endif
