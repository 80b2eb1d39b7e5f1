/* safetensors_write: a received version as a file that is there as a whole or not at all. */
#ifndef CLI_SAFETENSORS_WRITE_H
#define CLI_SAFETENSORS_WRITE_H

#include <refit/broadcast.h>

#include "progress.h"

/* A file whose bytes are on the disk, but which has not got its name yet. */
typedef struct cli_output {
    int dir;
    char beside[96]; /* its name until it is kept */
    char name[64];   /* and then */
} cli_output;

/*
 * Writes a version to a file in DIR, beside DIR/<version>.safetensors, and onto the disk. Follow
 * with keep or drop. After a failure nothing of it is left. REFIT_ERR_IO, REFIT_ERR_HOST_MEMORY,
 * and what refit_update_tensor answers.
 */
refit_status cli_output_begin(const refit_update *update, const char *dir, cli_progress *progress,
                              cli_output *out, refit_error *error);

/* Renames it to DIR/<version>.safetensors and points DIR/latest to that. Ends the output; a file
 * that cannot be renamed is removed. REFIT_ERR_IO. */
refit_status cli_output_keep(cli_output *output, refit_error *error);

/* Removes it. Ends the output. */
void cli_output_drop(cli_output *output);

#endif
