/*
 * apply_write: a tensor's bytes into a destination, run by run. A run is as many blocks as a window
 * of a device's memory holds; what differs in a block is noted and written at once.
 */
#ifndef RFT_APPLY_WRITE_H
#define RFT_APPLY_WRITE_H

#include "broadcast/in_place.h"

/* A run of blocks of one tensor, on its way. */
typedef struct rft_apply_run {
    const rft_block *blocks;
    uint32_t count;
    uint64_t offset; /* in the tensor */
    uint64_t bytes;
} rft_apply_run;

/* As many blocks, from the first on, as a window holds, and `most` at most. */
rft_apply_run rft_apply_run_of(const rft_block *blocks, uint32_t most);
/* Where bytes of the image are for the CPU: what lies on a device is fetched into `window`. */
refit_status rft_apply_read(const rft_in_place_source *source, uint64_t offset, uint64_t bytes,
                            unsigned char *window, const unsigned char **out, refit_error *error);

/* What goes into destination `index` by place->tensors. Done when rft_destinations_flush says so;
 * on failure the notes say what was changed. */
refit_status rft_apply_write(rft_in_place *place, uint32_t index, const rft_in_place_source *source,
                             refit_error *error);

#endif
