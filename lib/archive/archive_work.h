/* archive_work: one version on its way into an archive. */
#ifndef RFT_ARCHIVE_WORK_H
#define RFT_ARCHIVE_WORK_H

#include "archive/archive_state.h"

typedef struct rft_archive_work {
    refit_archive *archive;
    const void **memory; /* owned; a tensor: its bytes */
    int file;
    uint64_t at; /* where the next bytes go */
    rft_archive_header *header;
    refit_error *error;
} rft_archive_work;

/* Everything but the tensors and their bytes. */
refit_status rft_archive_check_version(const refit_archive *archive,
                                       const refit_archive_version *version, refit_error *error);

/* Each tensor that is not tied once; `memory` has a place for each tensor. */
refit_status rft_archive_take_weights(const rft_manifest *manifest,
                                      const refit_archive_version *version, const void **memory,
                                      refit_error *error);

/* Takes over the manifest, also where it fails, and all memory that a version of it needs. Keeps
 * the image where the tensors are the same as before. */
refit_status rft_archive_use_manifest(refit_archive *archive, rft_manifest *manifest,
                                      refit_error *error);

/* Sees to it that the image is the version before this one, if the archive has that and may go on
 * from it; else it is nothing. REFIT_ERR_HOST_MEMORY. */
refit_status rft_archive_resume(refit_archive *archive, const refit_archive_version *version,
                                refit_error *error);

refit_status rft_archive_write_at_end(rft_archive_work *work, const void *bytes, size_t count);

/* The frame's bytes into the file, the image, and the sums. */
refit_status rft_archive_write_frame(rft_archive_work *work, uint32_t sequence);

#endif
