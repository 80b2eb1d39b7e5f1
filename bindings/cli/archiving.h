/* archiving: what the commands do with archives: versions into one and out of one. */
#ifndef CLI_ARCHIVING_H
#define CLI_ARCHIVING_H

#include <stdbool.h>

#include <refit/archive.h>

#include "safetensors_write.h"

/* A received version, with its digest, as refit_archive_write takes it. Commit or abort it then. */
refit_status cli_archive_write(refit_archive *archive, const refit_update *update,
                               refit_error *error);

/* What was read back, to be written as a file. */
cli_source cli_source_read(const refit_snapshot *snapshot, uint64_t version);

/* "--epoch 9f1c66a04b7de210"; false, with a complaint, if it is no such number. */
bool cli_archive_epoch(const char *text, uint64_t *out);

#endif
