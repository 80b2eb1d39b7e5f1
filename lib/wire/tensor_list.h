/*
 * tensor_list: a manifest's tensors as they travel: one msgpack map for each, one behind the other.
 *
 * Not one array of all: so a list is read one tensor at a time, and what msgpack needs to unpack it
 * does not grow with a peer's claims. Nothing is judged here but the form.
 */
#ifndef RFT_TENSOR_LIST_H
#define RFT_TENSOR_LIST_H

#include "wire/fields.h"

/* One entry. The name lies in the bytes it was read from. */
typedef struct rft_listed_tensor {
    rft_view name;
    uint32_t dtype;
    uint32_t original; /* 1 + the index of the tensor it shares bytes with; 0: its own bytes */
    rft_dims shape;
    uint64_t bytes;
} rft_listed_tensor;

/* Appends one entry; `out` grows to at most limits.manifest_bytes. */
refit_status rft_tensor_list_append(const rft_listed_tensor *tensor, const rft_limits *limits,
                                    rft_bytes *out, refit_error *error);

/* How many entries there are. REFIT_ERR_LIMIT: more than limits.tensors. */
refit_status rft_tensor_list_count(rft_view encoded, const rft_limits *limits, uint32_t *count,
                                   refit_error *error);

/* Reads the first entry of `rest` and moves behind it. */
refit_status rft_tensor_list_take(rft_view *rest, const rft_limits *limits, rft_listed_tensor *out,
                                  refit_error *error);

#endif
