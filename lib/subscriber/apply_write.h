/*
 * apply_write: a tensor's bytes into a destination, run by run. A run is as many blocks as a window
 * of a device's memory holds; what differs in a block is noted and written at once.
 */
#ifndef RFT_APPLY_WRITE_H
#define RFT_APPLY_WRITE_H

#include "subscriber/in_place.h"

/* From the elements of a tensor to those of its destination. */
typedef struct rft_apply_cast {
    refit_dtype from;
    refit_dtype to;
    uint32_t from_width; /* bytes of an element; 1 where nothing is converted, and of both */
    uint32_t to_width;
} rft_apply_cast;

rft_apply_cast rft_apply_cast_of(const rft_destination *one, const rft_manifest_tensor *tensor);
bool rft_apply_casts(rft_apply_cast cast);

/* A run of blocks of one tensor, on its way. */
typedef struct rft_apply_run {
    const rft_block *blocks;
    rft_apply_cast cast;
    uint32_t count;
    uint64_t offset; /* in the tensor */
    uint64_t bytes;
} rft_apply_run;

/* As many blocks, from the first on, as a window holds before and after they are converted, and
 * `most` at most. */
rft_apply_run rft_apply_run_of(const rft_block *blocks, uint32_t most, rft_apply_cast cast);
/* Bytes of the tensor, or an offset in it, as those of the destination. */
uint64_t rft_apply_there(rft_apply_cast cast, uint64_t bytes);
/* Where the run is for the CPU, as the destination is to have it, until the next call. */
refit_status rft_apply_read_run(const rft_in_place *place, const rft_in_place_source *source,
                                const rft_apply_run *run, const unsigned char **out,
                                refit_error *error);
/* Where bytes of the image are for the CPU: what lies on a device is fetched into `window`. */
refit_status rft_apply_read(const rft_in_place_source *source, uint64_t offset, uint64_t bytes,
                            unsigned char *window, const unsigned char **out, refit_error *error);

/* What goes into destination `index` by place->tensors. Done when rft_destinations_flush says so;
 * on failure the notes say what was changed. */
refit_status rft_apply_write(rft_in_place *place, uint32_t index, const rft_in_place_source *source,
                             refit_error *error);

#endif
