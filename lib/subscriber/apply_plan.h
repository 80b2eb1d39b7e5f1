/*
 * apply_plan: which tensor of a version goes into which destination. All that can be said against
 * it is said here, before the first byte is written: names, sizes and types are the manifest's, and
 * two tensors which are one memory here are tied at the trainer's end, too, or have equal bytes in
 * this version, which are compared.
 */
#ifndef RFT_APPLY_PLAN_H
#define RFT_APPLY_PLAN_H

#include "subscriber/in_place.h"

#define RFT_NO_TENSOR UINT32_MAX

/* What is to be written, and what is left over. */
typedef struct rft_apply_plan {
    const rft_manifest *manifest;
    uint64_t blocks;
    uint64_t bytes;
    uint32_t left; /* tensors without a destination */
    uint32_t first_left;
    const char *absent;     /* a destination without a tensor; NULL: there is none */
    unsigned char *covered; /* per tensor, while it is made */
} rft_apply_plan;

/* Fills place->tensors as well: RFT_NO_TENSOR where nothing is to be written. `strict`: what is
 * left over is REFIT_ERR_NOT_FOUND. REFIT_ERR_INVALID (it does not fit), REFIT_ERR_HOST_MEMORY, and
 * what the source's device says of a copy. */
refit_status rft_apply_plan_make(rft_in_place *place, const rft_in_place_source *source,
                                 bool strict, rft_apply_plan *plan, refit_error *error);

#endif
