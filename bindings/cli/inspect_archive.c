/*
 * Shows an archive, or one of its files.
 *
 * Of an archive only the lists in its files are read, which give the change of each tensor. There
 * is a line for each version, then a line for each tensor with its changes in all deltas together.
 * Where the tensors change from one version to the next, only the tensors of the last version and
 * their changes since then are shown.
 */
#include "inspect_archive.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "archiving.h"
#include "cli.h"
#include "progress.h"

/* ---- A file of an archive ---- */

int cli_inspect_snapshot(const inspect_job *job, const refit_snapshot *snapshot)
{
    refit_archive_info info = {.size = sizeof info};
    refit_error error;
    if (refit_snapshot_describe(snapshot, &info, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    const cli_columns columns = info.base == 0 ? CLI_COLUMNS_BYTES : CLI_COLUMNS_CHANGE;
    json_t *tensors = job->json ? json_array() : NULL;
    if (!job->json) {
        cli_inspect_print_file(&info);
        cli_inspect_print_table(columns);
    }
    for (uint32_t i = 0; i < refit_snapshot_count(snapshot); i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        refit_tensor_change change = {.size = sizeof change};
        uint64_t digest = 0;
        (void)!refit_snapshot_tensor(snapshot, i, &tensor, NULL, &digest, NULL);
        (void)!refit_snapshot_change(snapshot, i, &change, NULL);
        if (job->json)
            (void)json_array_append_new(tensors,
                                        cli_inspect_json_tensor(&tensor, &digest, &change));
        else
            cli_inspect_print_tensor(columns, &tensor, &digest, &change);
    }
    if (!job->json) return CLI_DONE;
    json_t *object = cli_inspect_json_file(&info);
    (void)json_object_set_new(object, "tensors", tensors);
    return cli_inspect_print_json(object);
}

/* ---- A folder ---- */

typedef struct folder_sums {
    uint64_t weight_bytes, file_bytes, changed, elements;
    uint32_t blocks[3];           /* of all deltas: same, sparse, dense */
    uint32_t shown;               /* versions */
    refit_tensor_change *tensors; /* owned; in deltas of versions with these tensors: */
    unsigned char manifest[16];
    uint32_t deltas;
    json_t *files; /* NULL: in words */
    int status;
} folder_sums;

/* Starts over where the tensors are others than before. */
static refit_status follow_tensors(folder_sums *sums, const refit_archive_info *info,
                                   refit_error *error)
{
    if (sums->tensors != NULL && memcmp(sums->manifest, info->manifest, 16) == 0) return REFIT_OK;
    free(sums->tensors);
    sums->deltas = 0;
    sums->tensors = calloc((size_t)info->tensors + 1, sizeof *sums->tensors);
    memcpy(sums->manifest, info->manifest, 16);
    if (sums->tensors != NULL) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for %u tensors", info->tensors);
}

static void add_change(refit_tensor_change *sum, const refit_tensor_change *change)
{
    sum->elements += change->elements;
    sum->blocks_same += change->blocks_same;
    sum->blocks_sparse += change->blocks_sparse;
    sum->blocks_dense += change->blocks_dense;
    if (change->changed == REFIT_CHANGED_UNKNOWN || sum->changed == REFIT_CHANGED_UNKNOWN)
        sum->changed = REFIT_CHANGED_UNKNOWN;
    else
        sum->changed += change->changed;
}

static void add_delta(folder_sums *sums, const refit_archive_info *info,
                      const refit_snapshot *outline)
{
    sums->deltas++;
    sums->changed += info->changed;
    sums->elements += info->elements;
    sums->blocks[0] += info->blocks_same;
    sums->blocks[1] += info->blocks_sparse;
    sums->blocks[2] += info->blocks_dense;
    for (uint32_t i = 0; i < info->tensors; i++) {
        refit_tensor_change change = {.size = sizeof change};
        (void)!refit_snapshot_change(outline, i, &change, NULL);
        add_change(&sums->tensors[i], &change);
    }
}

static refit_status add_file(folder_sums *sums, const refit_snapshot *outline, refit_error *error)
{
    refit_archive_info info = {.size = sizeof info};
    refit_status status = refit_snapshot_describe(outline, &info, error);
    if (status == REFIT_OK) status = follow_tensors(sums, &info, error);
    if (status != REFIT_OK) return status;
    if (info.base != 0) add_delta(sums, &info, outline);
    sums->weight_bytes += info.weight_bytes;
    sums->file_bytes += info.file_bytes;
    sums->shown++;
    if (sums->files != NULL)
        (void)json_array_append_new(sums->files, cli_inspect_json_file(&info));
    else
        cli_inspect_print_line(&info);
    return REFIT_OK;
}

/* A file that cannot be used is complained about; the others are shown. `*last` is the last one. */
static void add_files(const refit_archive *archive, folder_sums *sums, refit_snapshot **last)
{
    refit_error error;
    for (uint32_t i = 0; i < refit_archive_count(archive); i++) {
        if (refit_archive_outline(archive, i, last, &error) != REFIT_OK ||
            add_file(sums, *last, &error) != REFIT_OK)
            sums->status = cli_complain_file(&error);
    }
}

static void print_sums(const folder_sums *sums)
{
    char size[CLI_SIZE_TEXT], kept[CLI_SIZE_TEXT];
    (void)printf("%u version%s, %s as %s", sums->shown, sums->shown == 1 ? "" : "s",
                 cli_size_text(sums->weight_bytes, size), cli_size_text(sums->file_bytes, kept));
    if (sums->elements > 0)
        (void)printf("; deltas: %.4g %% changed, blocks %u same, %u sparse, %u dense",
                     100 * (double)sums->changed / (double)sums->elements, sums->blocks[0],
                     sums->blocks[1], sums->blocks[2]);
    (void)putchar('\n');
}

/* Of the last version; in JSON an array. */
static json_t *show_tensors(const folder_sums *sums, const refit_snapshot *last)
{
    const cli_columns columns = sums->deltas == 0 ? CLI_COLUMNS_BYTES : CLI_COLUMNS_CHANGES;
    json_t *tensors = json_array();
    if (sums->files == NULL && last != NULL) cli_inspect_print_table(columns);
    for (uint32_t i = 0; i < refit_snapshot_count(last); i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        uint64_t digest = 0;
        const refit_tensor_change *change = sums->deltas == 0 ? NULL : &sums->tensors[i];
        (void)!refit_snapshot_tensor(last, i, &tensor, NULL, &digest, NULL);
        if (sums->files != NULL)
            (void)json_array_append_new(tensors, cli_inspect_json_tensor(&tensor, &digest, change));
        else
            cli_inspect_print_tensor(columns, &tensor, &digest, change);
    }
    return tensors;
}

static int show_folder(const folder_sums *sums, const refit_snapshot *last)
{
    if (sums->files == NULL) print_sums(sums);
    json_t *tensors = show_tensors(sums, last);
    if (sums->files == NULL) {
        json_decref(tensors);
        return CLI_DONE;
    }
    return cli_inspect_print_json(json_pack(
        "{s:s, s:I, s:I, s:O, s:i, s:o}", "kind", "archive", "file_bytes",
        (json_int_t)sums->file_bytes, "weight_bytes", (json_int_t)sums->weight_bytes, "versions",
        sums->files, "deltas_with_these_tensors", (int)sums->deltas, "tensors", tensors));
}

int cli_inspect_folder(const inspect_job *job)
{
    refit_error error;
    refit_archive *archive;
    refit_snapshot *last = NULL;
    if (refit_archive_open(job->path, REFIT_ARCHIVE_READ, &job->config, &archive, &error) !=
        REFIT_OK) {
        return cli_complain_file(&error);
    }
    if (cli_archive_is_none(job->path, archive)) {
        refit_archive_close(archive);
        return cli_complain(CLI_FILE, CLI_ARCHIVE_NONE, job->path);
    }
    folder_sums sums = {.files = job->json ? json_array() : NULL, .status = CLI_DONE};
    if (!job->json && refit_archive_count(archive) > 0) cli_inspect_print_columns();
    add_files(archive, &sums, &last);
    refit_archive_close(archive);
    int status = show_folder(&sums, last);
    refit_snapshot_close(last);
    free(sums.tensors);
    json_decref(sums.files);
    return sums.status != CLI_DONE ? sums.status : status;
}
