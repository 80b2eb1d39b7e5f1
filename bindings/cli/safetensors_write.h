/* safetensors_write: a received version as a file that is there as a whole or not at all. */
#ifndef CLI_SAFETENSORS_WRITE_H
#define CLI_SAFETENSORS_WRITE_H

#include <refit/broadcast.h>

#include "progress.h"

/*
 * Writes DIR/<version>.safetensors and points DIR/latest to it. The bytes go to a file beside it,
 * onto the disk, and are renamed then; after a failure neither it nor a part of it is left.
 * REFIT_ERR_IO, REFIT_ERR_HOST_MEMORY, and what refit_update_tensor answers.
 */
refit_status cli_update_write(const refit_update *update, const char *dir, cli_progress *progress,
                              refit_error *error);

#endif
