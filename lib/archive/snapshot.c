/*
 * Versions read back: one that is rebuilt from the files that it needs, and the outline of single
 * files.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "archive/archive_chain.h"
#include "base/alloc.h"
#include "base/checked.h"
#include "config/config.h"

/* ---- What a file says ---- */

static refit_status list_digests(const rft_archive_reader *reader, uint64_t **out,
                                 refit_error *error)
{
    const rft_manifest *manifest = reader->manifest;
    uint64_t *by_tensor = rft_calloc((size_t)manifest->count + 1, sizeof *by_tensor);
    RFT_REFUSE_IF(by_tensor == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u digests",
                  manifest->count);
    rft_digests_by_tensor(manifest, reader->digests, by_tensor);
    *out = by_tensor;
    return REFIT_OK;
}

/* Takes over what a file's reader has read. */
static refit_status take_lists(refit_snapshot *snapshot, rft_archive_reader *reader,
                               refit_error *error)
{
    uint64_t *by_tensor = NULL;
    RFT_TRY(list_digests(reader, &by_tensor, error));
    rft_manifest_close(snapshot->manifest);
    rft_free(snapshot->digests);
    rft_free(snapshot->by_tensor);
    rft_free(snapshot->changes);
    snapshot->header = reader->header;
    snapshot->manifest = reader->manifest;
    snapshot->digests = reader->digests;
    snapshot->by_tensor = by_tensor;
    snapshot->changes = reader->changes;
    reader->manifest = NULL;
    reader->digests = NULL;
    reader->changes = NULL;
    return REFIT_OK;
}

/* ---- Files, one over the other ---- */

static refit_status take_memory(refit_snapshot *snapshot, const rft_manifest *manifest,
                                refit_error *error)
{
    uint64_t bytes = manifest->store_bytes, room = 0;
    if (snapshot->image != NULL) {
        RFT_REFUSE_IF(bytes != snapshot->room, error, REFIT_ERR_STALE, "its tensors are others");
        return REFIT_OK;
    }
    if (rft_add_u64(bytes, RFT_TENSOR_ALIGNMENT, &room)) {
        snapshot->memory = rft_calloc((size_t)room, 1);
    }
    RFT_REFUSE_IF(snapshot->memory == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for %llu bytes of weights", (unsigned long long)bytes);
    uintptr_t over = (uintptr_t)snapshot->memory % RFT_TENSOR_ALIGNMENT;
    snapshot->image = snapshot->memory + (over == 0 ? 0 : RFT_TENSOR_ALIGNMENT - over);
    return REFIT_OK;
}

refit_status rft_snapshot_apply(const refit_archive *archive, const rft_archive_entry *anchor,
                                const rft_archive_entry *last, refit_snapshot *snapshot,
                                refit_error *error)
{
    rft_archive_chain chain;
    bool done = false;
    RFT_TRY(rft_archive_chain_open(&chain, archive, anchor, last, NULL, error));
    refit_status status = take_memory(snapshot, chain.manifest, error);
    while (status == REFIT_OK && !done)
        status = rft_archive_chain_step(&chain, snapshot->image, &done, error);
    if (status == REFIT_OK) status = take_lists(snapshot, &chain.reader, error);
    if (snapshot->manifest == chain.manifest) (void)rft_archive_chain_take_manifest(&chain);
    rft_archive_entry_name(last, snapshot->name);
    rft_archive_chain_close(&chain);
    return status;
}

/* ---- A version of an archive ---- */

static refit_status refuse_missing(const rft_archive_folder *folder, uint64_t epoch,
                                   uint64_t version, refit_error *error)
{
    const char *of = epoch == 0 ? "" : " of this epoch";
    RFT_REFUSE_IF(folder->count == 0, error, REFIT_ERR_NOT_FOUND,
                  "the archive has no version %llu%s: it is empty", (unsigned long long)version,
                  of);
    return rft_fail(error, REFIT_ERR_NOT_FOUND,
                    "the archive has no version %llu%s; the first of its %u is version %llu, the "
                    "last version %llu",
                    (unsigned long long)version, of, folder->count,
                    (unsigned long long)folder->entries[0].version,
                    (unsigned long long)folder->entries[folder->count - 1].version);
}

static refit_status find_version(const rft_archive_folder *folder, uint64_t epoch, uint64_t version,
                                 const rft_archive_entry **out, refit_error *error)
{
    const rft_archive_entry *found = NULL;
    for (uint32_t i = 0; i < folder->count; i++) {
        const rft_archive_entry *entry = &folder->entries[i];
        if (entry->version != version || (epoch != 0 && entry->epoch != epoch)) continue;
        RFT_REFUSE_IF(found != NULL, error, REFIT_ERR_EXISTS,
                      "several trainers have written version %llu: say which epoch, %016llx or "
                      "%016llx",
                      (unsigned long long)version, (unsigned long long)found->epoch,
                      (unsigned long long)entry->epoch);
        found = entry;
    }
    *out = found;
    return found != NULL ? REFIT_OK : refuse_missing(folder, epoch, version, error);
}

refit_status refit_archive_read(const refit_archive *archive, uint64_t epoch, uint64_t version,
                                refit_snapshot **out, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_archive_read needs an archive and `out`");
    const rft_archive_entry *last = NULL, *anchor = NULL;
    RFT_TRY(find_version(&archive->folder, epoch, version, &last, error));
    RFT_TRY(rft_archive_chain_first(archive, last, NULL, &anchor, error));
    refit_snapshot *snapshot = rft_calloc(1, sizeof *snapshot);
    RFT_REFUSE_IF(snapshot == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a snapshot");
    refit_status status = rft_snapshot_apply(archive, anchor, last, snapshot, error);
    if (status == REFIT_OK)
        *out = snapshot;
    else
        refit_snapshot_close(snapshot);
    return status;
}

void refit_snapshot_close(refit_snapshot *snapshot)
{
    if (snapshot == NULL) return;
    rft_manifest_close(snapshot->manifest);
    rft_free(snapshot->digests);
    rft_free(snapshot->by_tensor);
    rft_free(snapshot->changes);
    rft_free(snapshot->memory);
    rft_free(snapshot);
}

refit_status refit_snapshot_describe(const refit_snapshot *snapshot, refit_archive_info *info,
                                     refit_error *error)
{
    RFT_REFUSE_IF(snapshot == NULL, error, REFIT_ERR_INVALID, "there is no snapshot: it is NULL");
    return rft_archive_header_describe(&snapshot->header, snapshot->name, info, error);
}

uint32_t refit_snapshot_count(const refit_snapshot *snapshot)
{
    return snapshot == NULL ? 0 : snapshot->manifest->count;
}

refit_status refit_snapshot_tensor(const refit_snapshot *snapshot, uint32_t index,
                                   refit_tensor *tensor, const void **bytes, uint64_t *digest,
                                   refit_error *error)
{
    RFT_REFUSE_IF(snapshot == NULL, error, REFIT_ERR_INVALID, "there is no snapshot: it is NULL");
    const rft_manifest *manifest = snapshot->manifest;
    RFT_REFUSE_IF(index >= manifest->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no tensor %u: the version has %u", index, manifest->count);
    RFT_REFUSE_IF(tensor != NULL && tensor->size < sizeof *tensor, error, REFIT_ERR_INVALID,
                  "tensor.size is %zu: set it to sizeof(refit_tensor), %zu", tensor->size,
                  sizeof *tensor);
    if (tensor != NULL) rft_manifest_describe(manifest, index, tensor);
    if (bytes != NULL) {
        bool there = snapshot->image != NULL;
        *bytes = there ? snapshot->image + manifest->tensors[index].offset : NULL;
    }
    if (digest != NULL) *digest = snapshot->by_tensor[index];
    return REFIT_OK;
}

refit_status refit_snapshot_change(const refit_snapshot *snapshot, uint32_t index,
                                   refit_tensor_change *change, refit_error *error)
{
    RFT_REFUSE_IF(snapshot == NULL || change == NULL || change->size < sizeof *change, error,
                  REFIT_ERR_INVALID, "refit_snapshot_change needs a snapshot and change.size set");
    const rft_manifest *manifest = snapshot->manifest;
    RFT_REFUSE_IF(index >= manifest->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no tensor %u: the version has %u", index, manifest->count);
    const uint32_t original = manifest->tensors[index].alias_of;
    if (original != REFIT_NO_ALIAS) index = original;
    const rft_archive_change *from = &snapshot->changes[index];
    *change = (refit_tensor_change){
        .size = change->size,
        .elements = rft_archive_elements(manifest, index),
        .changed = from->changed,
        .blocks_same = from->same,
        .blocks_sparse = from->sparse,
        .blocks_dense = from->dense,
    };
    return REFIT_OK;
}

/* ---- Single files
 *
 * refit_archive_outline and refit_snapshot_open do not need the files that a file builds on, so
 * they have no bytes of tensors. The first reads the lists alone, and keeps the list of tensors
 * from file to file where it is the same; the second reads and checks the whole file.
 */

/* ---- Lists alone ---- */

static refit_status read_lists(rft_archive_reader *reader, const rft_limits *limits,
                               refit_snapshot *out, refit_error *error)
{
    RFT_TRY(rft_archive_reader_lists(reader, limits, error));
    if (reader->header.format == 1) RFT_TRY(rft_archive_reader_frames(reader, error));
    return take_lists(out, reader, error);
}

/* A new snapshot, whose manifest may be that of the one before. */
static refit_status outline(const refit_archive *archive, const rft_archive_entry *entry,
                            refit_snapshot *before, refit_snapshot *out, refit_error *error)
{
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, error));
    bool given = before != NULL && rft_archive_reader_give(&reader, before->manifest);
    rft_archive_entry_name(entry, out->name);
    refit_status status = read_lists(&reader, &archive->limits, out, error);
    if (given && status == REFIT_OK)
        before->manifest = NULL;
    else if (given)
        reader.manifest = NULL; /* the snapshot before keeps it */
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
    if (status == REFIT_OK) status = rft_archive_reader_frames(&reader, error);
    if (status == REFIT_OK) status = take_lists(snapshot, &reader, error);
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
