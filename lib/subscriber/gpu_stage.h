/*
 * gpu_stage: a worker's images that lie in the publisher's memory of the GPU that both are on.
 *
 * Each block of the publisher is mapped once and kept from version to version, on its leash
 * (leash.h); it is unmapped when the publisher has given it up or another one needs the place. What
 * is lent to the user is marked on the leash as being read, so that the publisher, should it have
 * turned this worker out, does not write there. The user's own reads, on whatever stream, are over
 * before the update is closed.
 */
#ifndef RFT_GPU_STAGE_H
#define RFT_GPU_STAGE_H

#include "subscriber/images.h"

/* The version's image where `share` says, on the leash `mark`; in use as STAGED. REFIT_ERR_BUSY: as
 * for the other kinds. REFIT_ERR_NOT_FOUND: the publisher has given it up, another offer follows.
 * REFIT_ERR_PROTOCOL: it cannot hold the version. Else it could not be mapped, and the status says
 * why. */
refit_status rft_images_take_gpu(rft_images *images, rft_catalog *catalog, const rft_share *share,
                                 const char *mark, rft_image **out, refit_error *error);

/* Unmaps what nothing uses. */
void rft_images_trim_gpu(rft_images *images);
/* Likewise, but only what the publisher has given up. */
void rft_images_trim_retired(rft_images *images);

/* Says on the leash that the user reads it. REFIT_ERR_STALE: the publisher has turned this worker
 * out, and the bytes are no longer what was verified. */
refit_status rft_gpu_mapping_read(rft_gpu_mapping *mapping, uint64_t generation,
                                  refit_error *error);
void rft_gpu_mapping_unread(rft_gpu_mapping *mapping);

#endif
