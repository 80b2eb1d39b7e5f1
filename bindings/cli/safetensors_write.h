/* safetensors_write: a version as a file that exists whole or not at all. */
#ifndef CLI_SAFETENSORS_WRITE_H
#define CLI_SAFETENSORS_WRITE_H

#include <stdbool.h>

#include <refit/broadcast.h>

#include "progress.h"

/* The tensors of a version, from wherever they come. */
typedef struct cli_source {
    uint64_t number;
    uint32_t count;
    const void *of; /* what `tensor` reads */
    refit_status (*tensor)(const void *of, uint32_t index, refit_tensor *tensor, const void **bytes,
                           refit_error *error);
} cli_source;

cli_source cli_source_received(const refit_update *update);

/* A file whose bytes are on the disk, but which has not got its name yet. */
typedef struct cli_output {
    int dir;
    int file;            /* it is locked by this process */
    char temporary[288]; /* its name until it is kept */
    char name[256];      /* and then */
    bool latest;         /* a link of this name points to it */
} cli_output;

/* Removes the unfinished files of killed writers from DIR; what cannot be removed stays. */
void cli_output_sweep(const char *dir);

/*
 * Writes a version to a file in DIR, beside DIR/<version>.safetensors, and onto the disk. Follow
 * with keep or drop. After a failure nothing of it is left; a name that the file cannot get is one.
 * REFIT_ERR_IO, REFIT_ERR_HOST_MEMORY,
 * and what refit_update_tensor answers.
 */
refit_status cli_output_begin(const cli_source *source, const char *dir, cli_progress *progress,
                              cli_output *out, refit_error *error);

/* As cli_output_begin, for a file of any name, without the link. Files that killed writers of this
 * name have left are removed. REFIT_ERR_INVALID: no name. */
refit_status cli_output_begin_file(const cli_source *source, const char *path,
                                   cli_progress *progress, cli_output *out, refit_error *error);

/* Gives it its name, over what has that, and points DIR/latest to it. Ends the output; a file that
 * cannot be renamed is removed. REFIT_ERR_IO. */
refit_status cli_output_keep(cli_output *output, refit_error *error);

/* Removes it. Ends the output. */
void cli_output_drop(cli_output *output);

/* Bytes of all tensors. */
uint64_t cli_source_bytes(const cli_source *source);

#endif
