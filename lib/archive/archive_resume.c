/*
 * The image of the version before, read back: after a restart, or after a write that failed.
 *
 * What a version is held against is what the archive itself has, and not what the trainer says: so
 * it is read from the disk, with all checks, or the next version is kept whole. Why it is kept
 * whole is logged, unless that is what was to come anyway.
 */
#include "archive/archive_chain.h"
#include "archive/archive_work.h"
#include "base/alloc.h"
#include "base/log.h"

/* Rebuilds the version into the archive's image. */
static refit_status rebuild(refit_archive *archive, const rft_archive_entry *anchor,
                            const rft_archive_entry *last, refit_error *error)
{
    refit_snapshot *into = rft_calloc(1, sizeof *into);
    RFT_REFUSE_IF(into == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a snapshot");
    into->image = archive->image;
    into->room = archive->manifest->store_bytes;
    refit_status status = rft_archive_chain_apply(archive, anchor, last, into, error);
    if (status == REFIT_OK &&
        !rft_digest128_equal(&into->header.manifest, &archive->manifest->digest)) {
        status = rft_fail(error, REFIT_ERR_STALE, "its tensors are others");
    }
    if (status == REFIT_OK) {
        archive->held = (rft_held){last->epoch, last->version, into->header.digest};
        archive->since = (uint32_t)(last->version - anchor->version + 1);
    }
    refit_snapshot_close(into);
    return status;
}

static refit_status resume(refit_archive *archive, const rft_archive_entry *last,
                           refit_error *error)
{
    const rft_archive_entry *anchor = NULL;
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, last, &archive->limits, &reader, error));
    bool same = rft_digest128_equal(&reader.header.manifest, &archive->manifest->digest);
    rft_archive_reader_close(&reader);
    RFT_REFUSE_IF(!same, error, REFIT_ERR_STALE, "its tensors are others");
    RFT_TRY(rft_archive_chain_anchor(archive, last, &anchor, error));
    if (last->version - anchor->version + 1 >= archive->anchor_every) return REFIT_OK;
    return rebuild(archive, anchor, last, error);
}

/* What stands in the way is logged; but that memory is short now says nothing about the files. */
static refit_status try_resume(refit_archive *archive, const rft_archive_entry *last,
                               refit_error *error)
{
    refit_error why;
    refit_status status = resume(archive, last, &why);
    if (status == REFIT_OK) return REFIT_OK;
    if (status == REFIT_ERR_HOST_MEMORY) return rft_fail(error, status, "%s", why.text);
    rft_log(REFIT_LOG_WARNING,
            "archive: version %llu is kept whole: nothing can build on version %llu: %s",
            (unsigned long long)last->version + 1, (unsigned long long)last->version, why.text);
    return REFIT_OK;
}

refit_status rft_archive_resume(refit_archive *archive, const refit_archive_version *version,
                                refit_error *error)
{
    const uint64_t before = version->version - 1;
    if (archive->held.version == before && archive->held.epoch == version->epoch) return REFIT_OK;
    archive->held = (rft_held){0};
    if (archive->anchor_every == 1 || archive->folder.count == 0 || before == 0) return REFIT_OK;
    const rft_archive_entry *last =
        rft_archive_folder_find(&archive->folder, version->epoch, before);
    if (last != NULL) return try_resume(archive, last, error);
    rft_log(REFIT_LOG_WARNING,
            "archive: version %llu is kept whole: version %llu of epoch %016llx is not there",
            (unsigned long long)version->version, (unsigned long long)before,
            (unsigned long long)version->epoch);
    return REFIT_OK;
}
