/*
 * Writing one version.
 *
 *     .next   header left out ─► manifest ─► frame, frame, … ─► digests, changes ─► header ─► fsync
 *     commit  .next renamed to its name ─► fsync of the folder; where that fails, removed again
 *     abort   .next removed
 *
 * The header, which says that the file is whole, is written when all else is there.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "archive/archive_disk.h"
#include "archive/archive_reader.h"
#include "archive/archive_work.h"
#include "base/alloc.h"
#include "kernels/digest.h"

/* ---- Sections ---- */

/* From the sums of all parts. */
static void finish_digests(refit_archive *archive)
{
    const rft_manifest *manifest = archive->manifest;
    unsigned char *to = archive->digests;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        rft_put_u64(to, rft_digest_finish(archive->sums[i], manifest->tensors[i].bytes));
        to += 8;
    }
}

static refit_status check_digest(const refit_archive *archive, const refit_archive_version *version,
                                 rft_digest128 *out, refit_error *error)
{
    rft_view digests = {archive->digests, (size_t)archive->manifest->originals * 8};
    *out = rft_version_digest_encoded(archive->manifest, digests);
    RFT_REFUSE_IF(
        version->digest != NULL && memcmp(out->bytes, version->digest, sizeof out->bytes) != 0,
        error, REFIT_ERR_CORRUPT, "the weights of version %llu are not what its digest says",
        (unsigned long long)version->version);
    return REFIT_OK;
}

/* Those of the tensors that are not tied, and their hash. */
static refit_status write_changes(rft_archive_work *work, uint64_t at)
{
    const refit_archive *archive = work->archive;
    const size_t count = (size_t)rft_archive_changes_bytes(work->header);
    rft_bytes *encoded = &work->archive->scratch;
    rft_bytes_reset(encoded);
    RFT_TRY(rft_bytes_reserve(encoded, count, work->error));
    unsigned char *to = encoded->data;
    for (uint32_t i = 0; i < archive->manifest->count; i++) {
        if (archive->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        rft_archive_change_encode(&archive->changes[i], to);
        to += RFT_ARCHIVE_CHANGE_BYTES;
    }
    rft_put_u64(to, XXH3_64bits(encoded->data, count - RFT_ARCHIVE_HASH_BYTES));
    return rft_disk_write(work->file, encoded->data, count, at, work->error);
}

static refit_status write_header(rft_archive_work *work)
{
    unsigned char bytes[RFT_ARCHIVE_HEADER_BYTES];
    work->header->file_bytes = work->at;
    rft_archive_header_encode(work->header, bytes);
    return rft_disk_write(work->file, bytes, sizeof bytes, 0, work->error);
}

static refit_status write_sections(rft_archive_work *work, const refit_archive_version *version)
{
    refit_archive *archive = work->archive;
    const rft_bytes *encoded = &archive->manifest->encoded;
    work->at = RFT_ARCHIVE_HEADER_BYTES;
    RFT_TRY(rft_archive_write_at_end(work, encoded->data, encoded->count));
    const uint64_t digests_at = work->at, changes_at = digests_at + work->header->digest_bytes;
    work->at = changes_at + rft_archive_changes_bytes(work->header);
    for (uint32_t i = 0; i < archive->manifest->frame_count; i++)
        RFT_TRY(rft_archive_write_frame(work, i));
    finish_digests(archive);
    RFT_TRY(check_digest(archive, version, &work->header->digest, work->error));
    RFT_TRY(rft_disk_write(work->file, archive->digests, (size_t)work->header->digest_bytes,
                           digests_at, work->error));
    RFT_TRY(write_changes(work, changes_at));
    return write_header(work);
}

static rft_archive_header make_header(const refit_archive *archive,
                                      const refit_archive_version *version, bool delta)
{
    const rft_manifest *manifest = archive->manifest;
    rft_archive_header header = {
        .format = RFT_ARCHIVE_FORMAT,
        .tensors = manifest->count,
        .frames = manifest->frame_count,
        .epoch = version->epoch,
        .version = version->version,
        .frame_bytes = archive->frame_bytes,
        .weight_bytes = manifest->payload_bytes,
        .manifest_bytes = manifest->encoded.count,
        .digest_bytes = (uint64_t)manifest->originals * 8,
        .manifest = manifest->digest,
    };
    if (delta) {
        header.base = archive->held.version;
        header.base_digest = archive->held.digest;
    }
    return header;
}

/* Whether it may build on the one before. */
static bool may_be_delta(const refit_archive *archive, const refit_archive_version *version)
{
    return archive->held.version != 0 && archive->held.epoch == version->epoch &&
           archive->held.version + 1 == version->version && archive->since < archive->anchor_every;
}

static refit_status write_next(rft_archive_work *work, const refit_archive_version *version)
{
    refit_archive *archive = work->archive;
    archive->held = (rft_held){0};
    memset(archive->sums, 0, archive->manifest->count * sizeof *archive->sums);
    memset(archive->changes, 0, archive->manifest->count * sizeof *archive->changes);
    int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW;
    work->file = openat(archive->folder.dir, RFT_ARCHIVE_NEXT, flags, 0666);
    if (work->file < 0) return rft_disk_fail(work->error, "create", RFT_ARCHIVE_NEXT);
    refit_status status = write_sections(work, version);
    if (status == REFIT_OK) {
        status = rft_disk_close(work->file, work->error);
    } else {
        (void)close(work->file);
    }
    if (status != REFIT_OK) (void)unlinkat(archive->folder.dir, RFT_ARCHIVE_NEXT, 0);
    return status;
}

/* ---- A version that is there already ---- */

static void digest_weights(rft_archive_work *work)
{
    refit_archive *archive = work->archive;
    memset(archive->sums, 0, archive->manifest->count * sizeof *archive->sums);
    for (uint32_t i = 0; i < archive->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &archive->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0) continue;
        archive->sums[i] = rft_digest_part(work->memory[i], (size_t)tensor->bytes, 0);
    }
    finish_digests(archive);
}

/* Compares; then there is nothing to write. */
static refit_status check_present(rft_archive_work *work, const refit_archive_version *version,
                                  const rft_archive_entry *entry)
{
    refit_archive *archive = work->archive;
    rft_archive_reader reader;
    rft_digest128 digest;
    RFT_TRY(
        rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, work->error));
    *work->header = reader.header;
    rft_archive_reader_close(&reader);
    digest_weights(work);
    RFT_TRY(check_digest(archive, version, &digest, work->error));
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &work->header->digest), work->error,
                  REFIT_ERR_EXISTS,
                  "the archive has version %llu of this trainer, with other weights",
                  (unsigned long long)version->version);
    archive->entry = *entry;
    archive->present = true;
    return REFIT_OK;
}

/* ---- The door ---- */

static refit_status write_version(rft_archive_work *work, const refit_archive_version *version)
{
    refit_archive *archive = work->archive;
    const rft_archive_entry *entry =
        rft_archive_folder_find(&archive->folder, version->epoch, version->version);
    if (entry != NULL) {
        archive->held = (rft_held){0};
        return check_present(work, version, entry);
    }
    archive->present = false;
    archive->entry = (rft_archive_entry){.version = version->version, .epoch = version->epoch};
    RFT_TRY(
        rft_archive_folder_run(&archive->folder, version->epoch, &archive->entry.run, work->error));
    RFT_TRY(rft_archive_folder_reserve(&archive->folder, work->error));
    RFT_TRY(rft_archive_resume(archive, version, work->error));
    *work->header = make_header(archive, version, may_be_delta(archive, version));
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(&archive->entry, name);
    return rft_disk_blame(work->error, write_next(work, version), name);
}

static refit_status open_manifest(refit_archive *archive, const refit_archive_version *version,
                                  refit_error *error)
{
    rft_manifest *manifest;
    RFT_TRY(rft_manifest_open(version->tensors, version->count, archive->frame_bytes,
                              &archive->limits, &manifest, error));
    return rft_archive_use_manifest(archive, manifest, error);
}

refit_status refit_archive_write(refit_archive *archive, const refit_archive_version *version,
                                 refit_error *error)
{
    RFT_TRY(rft_archive_check_version(archive, version, error));
    RFT_TRY(open_manifest(archive, version, error));
    rft_archive_work work = {.archive = archive, .header = &archive->header, .error = error};
    work.memory = rft_calloc(archive->manifest->count, sizeof *work.memory);
    RFT_REFUSE_IF(work.memory == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u tensors",
                  archive->manifest->count);
    refit_status status = rft_archive_take_weights(archive->manifest, version, work.memory, error);
    if (status == REFIT_OK) status = write_version(&work, version);
    rft_free(work.memory);
    archive->written = status == REFIT_OK;
    return status;
}

static refit_status check_written(refit_archive *archive, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL, error, REFIT_ERR_INVALID, "there is no archive: it is NULL");
    RFT_REFUSE_IF(!archive->written, error, REFIT_ERR_STATE,
                  "there is no version that was written and not yet committed or aborted");
    archive->written = false;
    return REFIT_OK;
}

static void list_written(refit_archive *archive)
{
    archive->entry.kind = archive->header.base == 0 ? RFT_ARCHIVE_ANCHOR : RFT_ARCHIVE_DELTA;
    rft_archive_folder_add(&archive->folder, &archive->entry);
}

/* A name that may not last is taken away again; one that cannot be is in the list, as in the
 * folder. Without it there, files that build on nothing would be left by a prune. */
static refit_status put_in_place(refit_archive *archive, refit_error *error)
{
    char name[RFT_ARCHIVE_NAME];
    const rft_archive_folder *folder = &archive->folder;
    rft_archive_entry_name(&archive->entry, name);
    if (renameat(folder->dir, RFT_ARCHIVE_NEXT, folder->dir, name) != 0) {
        refit_status status = rft_disk_fail(error, "name", name);
        (void)unlinkat(folder->dir, RFT_ARCHIVE_NEXT, 0);
        return status;
    }
    if (fsync(folder->dir) == 0) return REFIT_OK;
    refit_status status = rft_disk_fail(error, "write the folder of", name);
    if (unlinkat(folder->dir, name, 0) != 0) list_written(archive);
    return status;
}

static void note_committed(refit_archive *archive)
{
    const rft_archive_header *header = &archive->header;
    list_written(archive);
    archive->held = (rft_held){header->epoch, header->version, header->digest};
    archive->since = header->base == 0 ? 1 : archive->since + 1;
}

refit_status refit_archive_commit(refit_archive *archive, refit_archive_info *info,
                                  refit_error *error)
{
    RFT_REFUSE_IF(info != NULL && info->size < sizeof *info, error, REFIT_ERR_INVALID,
                  "set info.size to sizeof(refit_archive_info)");
    RFT_TRY(check_written(archive, error));
    if (!archive->present) {
        RFT_TRY(put_in_place(archive, error));
        note_committed(archive);
    }
    if (info == NULL) return REFIT_OK;
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(&archive->entry, name);
    return rft_archive_header_describe(&archive->header, name, info, error);
}

refit_status refit_archive_abort(refit_archive *archive, refit_error *error)
{
    RFT_TRY(check_written(archive, error));
    if (archive->present) return REFIT_OK;
    if (unlinkat(archive->folder.dir, RFT_ARCHIVE_NEXT, 0) == 0 || errno == ENOENT) return REFIT_OK;
    return rft_disk_fail(error, "remove", RFT_ARCHIVE_NEXT);
}
