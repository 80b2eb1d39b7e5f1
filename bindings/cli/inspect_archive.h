/* inspect_archive: archives and their files, as refit inspect shows them. */
#ifndef CLI_INSPECT_ARCHIVE_H
#define CLI_INSPECT_ARCHIVE_H

#include <stdbool.h>

#include "inspect.h"
#include "settings.h"

typedef struct inspect_job {
    cli_settings settings;
    refit_config config;
    const char *path;
    uint32_t timeout_s;
    bool json;
} inspect_job;

/* A file that was read and checked. An exit status. */
int cli_inspect_snapshot(const inspect_job *job, const refit_snapshot *snapshot);

/* The archive in folder job->path. An exit status. */
int cli_inspect_folder(const inspect_job *job);

#endif
