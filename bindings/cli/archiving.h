/* archiving: the commands write versions into archives and read them out of archives. */
#ifndef CLI_ARCHIVING_H
#define CLI_ARCHIVING_H

#include <stdbool.h>

#include <refit/advanced/archive.h>

#include "safetensors_write.h"

/* A received version, with its digest, as refit_archive_write takes it. Commit or abort it then. */
refit_status cli_archive_write(refit_archive *archive, const refit_update *update,
                               refit_error *error);

/* A version that was read back, as the source of a file. */
cli_source cli_source_read(const refit_snapshot *snapshot, uint64_t version);

/* Whether the folder of an archive without a version is none: it has other files. One that waits
 * for its first version has only names that begin with a dot. */
bool cli_archive_is_none(const char *folder, const refit_archive *archive);
#define CLI_ARCHIVE_NONE "%s holds no file of an archive (refit subscribe --archive writes them)"

/* "--epoch 9f1c66a04b7de210"; false, with a complaint, if it is no such number. */
bool cli_archive_epoch(const char *text, uint64_t *out);

#endif
