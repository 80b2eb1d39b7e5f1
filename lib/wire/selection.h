/*
 * selection: the parts of each version that a worker's user has asked for, by the names of tensors.
 * Which bytes those are follows from a manifest.
 *
 * Immutable once it is open.
 */
#ifndef RFT_SELECTION_H
#define RFT_SELECTION_H

#include <refit/broadcast.h>

#include "wire/want.h"

typedef struct rft_selection {
    refit_selection *list; /* owned */
    uint32_t count;
    char *names; /* owned */
    bool bound;  /* to versions of this manifest: of others it is everything */
    rft_digest128 manifest;
} rft_selection;

/* Copies the list. REFIT_ERR_INVALID names the mistake in it; REFIT_ERR_HOST_MEMORY. */
refit_status rft_selection_open(const refit_selection *list, uint32_t count, rft_selection **out,
                                refit_error *error);
/* NULL is allowed. */
void rft_selection_close(rft_selection *selection);

/* What the selection is of this manifest. Names that it does not have are passed over; the first of
 * them is told in `missing`, or NULL. REFIT_ERR_INVALID: a box that is not within its tensor;
 * REFIT_ERR_HOST_MEMORY. */
refit_status rft_selection_resolve(const rft_selection *selection, const rft_manifest *manifest,
                                   rft_want **out, const char **missing, refit_error *error);

#endif
