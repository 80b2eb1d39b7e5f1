/*
 * What single files say: refit_archive_outline, refit_snapshot_open.
 *
 * Neither needs the files that a file builds on, so neither has the bytes of tensors. The first
 * reads lists alone, and keeps the list of tensors from file to file where that is the same; the
 * second reads and checks all there is.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "archive/archive_chain.h"
#include "archive/archive_disk.h"
#include "base/alloc.h"
#include "config/resolve.h"

/* ---- Lists alone ---- */

static refit_status read_lists(rft_archive_reader *reader, const rft_limits *limits,
                               refit_snapshot *out, refit_error *error)
{
    RFT_TRY(rft_archive_reader_lists(reader, limits, error));
    if (reader->header.format == 1) RFT_TRY(rft_archive_reader_frames(reader, NULL, error));
    return rft_snapshot_take_lists(out, reader, error);
}

/* A new snapshot, whose manifest may be that of the one before. */
static refit_status outline(const refit_archive *archive, const rft_archive_entry *entry,
                            refit_snapshot *before, refit_snapshot *out, refit_error *error)
{
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, error));
    bool given = before != NULL &&
                 rft_archive_reader_give(&reader, before->manifest, before->header.frame_bytes);
    rft_archive_entry_name(entry, out->name);
    refit_status status = read_lists(&reader, &archive->limits, out, error);
    if (given && status == REFIT_OK)
        before->manifest = NULL;
    else if (given)
        reader.manifest = NULL; /* it stays whose it was */
    rft_archive_reader_close(&reader);
    return rft_disk_blame(error, status, out->name);
}

refit_status refit_archive_outline(const refit_archive *archive, uint32_t index,
                                   refit_snapshot **snapshot, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL || snapshot == NULL, error, REFIT_ERR_INVALID,
                  "refit_archive_outline needs an archive and `snapshot`");
    RFT_REFUSE_IF(index >= archive->folder.count, error, REFIT_ERR_NOT_FOUND,
                  "there is no file %u: the archive has %u", index, archive->folder.count);
    refit_snapshot *made = rft_calloc(1, sizeof *made);
    RFT_REFUSE_IF(made == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a snapshot");
    refit_status status = outline(archive, &archive->folder.entries[index], *snapshot, made, error);
    if (status != REFIT_OK) {
        refit_snapshot_close(made);
        return status;
    }
    refit_snapshot_close(*snapshot);
    *snapshot = made;
    return REFIT_OK;
}

/* ---- One file ---- */

static refit_status check_file(int file, uint64_t bytes, const rft_limits *limits,
                               refit_snapshot *snapshot, refit_error *error)
{
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_open(file, bytes, limits, &reader, error));
    refit_status status = rft_archive_reader_lists(&reader, limits, error);
    if (status == REFIT_OK) status = rft_archive_reader_frames(&reader, NULL, error);
    if (status == REFIT_OK) status = rft_snapshot_take_lists(snapshot, &reader, error);
    rft_archive_reader_close(&reader);
    return status;
}

static refit_status open_file(const char *path, const rft_limits *limits, refit_snapshot *snapshot,
                              refit_error *error)
{
    int file;
    uint64_t bytes;
    const char *name = strrchr(path, '/');
    name = name == NULL ? path : name + 1;
    (void)snprintf(snapshot->name, sizeof snapshot->name, "%s", name);
    RFT_TRY(rft_disk_open(AT_FDCWD, path, &file, &bytes, error));
    return rft_disk_blame(error, check_file(file, bytes, limits, snapshot, error), name);
}

refit_status refit_snapshot_open(const char *path, const refit_config *config, refit_snapshot **out,
                                 refit_error *error)
{
    RFT_REFUSE_IF(path == NULL || path[0] == '\0' || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_snapshot_open needs a path and `out`");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    const rft_limits limits = rft_limits_from(&own);
    refit_snapshot *snapshot = rft_calloc(1, sizeof *snapshot);
    RFT_REFUSE_IF(snapshot == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a snapshot");
    refit_status status = open_file(path, &limits, snapshot, error);
    if (status == REFIT_OK)
        *out = snapshot;
    else
        refit_snapshot_close(snapshot);
    return status;
}
