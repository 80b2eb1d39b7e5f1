/*
 * Versions into an archive and out of one, from the updates, files and command-line words that the
 * commands have.
 */
#include "archiving.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* The lists that refit_archive_write wants. */
typedef struct version_lists {
    refit_tensor *tensors;
    refit_weight *weights;
    uint32_t weight_count;
} version_lists;

static refit_status fill_lists(const refit_update *update, version_lists *lists, refit_error *error)
{
    for (uint32_t i = 0; i < refit_update_count(update); i++) {
        const void *bytes;
        refit_tensor *tensor = &lists->tensors[i];
        tensor->size = sizeof *tensor;
        refit_status status = refit_update_tensor(update, i, tensor, &bytes, error);
        if (status != REFIT_OK) return status;
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        lists->weights[lists->weight_count++] = (refit_weight){i, bytes, tensor->bytes};
    }
    return REFIT_OK;
}

static refit_status write_lists(refit_archive *archive, const refit_update *update,
                                version_lists *lists, refit_error *error)
{
    unsigned char digest[16];
    refit_status status = fill_lists(update, lists, error);
    if (status == REFIT_OK) status = refit_update_digest(update, digest, error);
    if (status != REFIT_OK) return status;
    const refit_archive_version version = {
        .size = sizeof version,
        .epoch = refit_update_epoch(update),
        .version = refit_update_version(update),
        .digest = digest,
        .tensors = lists->tensors,
        .weights = lists->weights,
        .count = refit_update_count(update),
        .weight_count = lists->weight_count,
    };
    return refit_archive_write(archive, &version, error);
}

refit_status cli_archive_write(refit_archive *archive, const refit_update *update,
                               refit_error *error)
{
    const size_t count = (size_t)refit_update_count(update) + 1;
    version_lists lists = {calloc(count, sizeof *lists.tensors),
                           calloc(count, sizeof *lists.weights), 0};
    refit_status status =
        lists.tensors != NULL && lists.weights != NULL
            ? write_lists(archive, update, &lists, error)
            : cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for %zu tensors", count);
    free(lists.tensors);
    free(lists.weights);
    return status;
}

static refit_status read_tensor(const void *of, uint32_t index, refit_tensor *tensor,
                                const void **bytes, refit_error *error)
{
    return refit_snapshot_tensor(of, index, tensor, bytes, NULL, error);
}

cli_source cli_source_read(const refit_snapshot *snapshot, uint64_t version)
{
    return (cli_source){.number = version,
                        .count = refit_snapshot_count(snapshot),
                        .of = snapshot,
                        .tensor = read_tensor};
}

bool cli_archive_is_none(const char *folder, const refit_archive *archive)
{
    bool others = false;
    if (refit_archive_count(archive) > 0) return false;
    DIR *listing = opendir(folder);
    if (listing == NULL) return false;
    for (const struct dirent *each; !others && (each = readdir(listing)) != NULL;)
        others = each->d_name[0] != '.';
    (void)closedir(listing);
    return others;
}

bool cli_archive_epoch(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 16);
    if (strspn(text, "0123456789abcdefABCDEF") == strlen(text) && text[0] != '\0' && errno == 0 &&
        *out != 0) {
        return true;
    }
    (void)cli_complain(CLI_USAGE,
                       "--epoch cannot be %s: refit inspect shows it, 16 hexadecimal digits", text);
    return false;
}
