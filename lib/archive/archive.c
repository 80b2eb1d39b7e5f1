/*
 * The archive as an object: opening, closing, describing its files, and removing old versions.
 */
#include <errno.h>
#include <unistd.h>

#include "archive/archive.h"
#include "base/alloc.h"
#include "config/config.h"

static refit_status read_config(const refit_config *config, refit_archive_mode mode,
                                refit_archive *archive, refit_error *error)
{
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    archive->limits = rft_limits_from(&own);
    archive->frame_bytes = own.broadcast_frame_bytes;
    archive->anchor_every = own.archive_anchor_every;
    if (mode != REFIT_ARCHIVE_WRITE || own.broadcast_compress == REFIT_COMPRESS_NONE)
        return REFIT_OK;
    return rft_frame_codec_open(own.broadcast_compress_level, &archive->codec, error);
}

refit_status refit_archive_open(const char *folder, refit_archive_mode mode,
                                const refit_config *config, refit_archive **out, refit_error *error)
{
    RFT_REFUSE_IF(folder == NULL || folder[0] == '\0' || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_archive_open needs the name of a folder and `out`");
    RFT_REFUSE_IF(mode != REFIT_ARCHIVE_READ && mode != REFIT_ARCHIVE_WRITE, error,
                  REFIT_ERR_INVALID, "an archive is opened to read or to write, not %d", (int)mode);
    refit_archive *archive = rft_calloc(1, sizeof *archive);
    RFT_REFUSE_IF(archive == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for an archive");
    refit_status status = read_config(config, mode, archive, error);
    if (status == REFIT_OK) {
        status =
            rft_archive_folder_open(folder, mode == REFIT_ARCHIVE_WRITE, &archive->folder, error);
    }
    if (status == REFIT_OK) {
        *out = archive;
    } else {
        rft_frame_codec_close(archive->codec);
        rft_free(archive);
    }
    return status;
}

void refit_archive_close(refit_archive *archive)
{
    if (archive == NULL) return;
    if (archive->written) (void)!refit_archive_abort(archive, NULL);
    rft_archive_forget(archive);
    rft_archive_folder_close(&archive->folder);
    rft_bytes_close(&archive->modes);
    rft_bytes_close(&archive->scratch);
    rft_frame_codec_close(archive->codec);
    rft_free(archive->slice);
    rft_free(archive);
}

uint32_t refit_archive_count(const refit_archive *archive)
{
    return archive == NULL ? 0 : archive->folder.count;
}

refit_status refit_archive_describe(const refit_archive *archive, uint32_t index,
                                    refit_archive_info *info, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL || info == NULL || info->size < sizeof *info, error,
                  REFIT_ERR_INVALID, "refit_archive_describe needs an archive and info.size set");
    RFT_REFUSE_IF(index >= archive->folder.count, error, REFIT_ERR_NOT_FOUND,
                  "there is no file %u: the archive has %u", index, archive->folder.count);
    char name[RFT_ARCHIVE_NAME];
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, &archive->folder.entries[index],
                                    &archive->limits, &reader, error));
    rft_archive_entry_name(&archive->folder.entries[index], name);
    refit_status status = rft_archive_header_describe(&reader.header, name, info, error);
    rft_archive_reader_close(&reader);
    return status;
}

/* ---- Removing old versions
 *
 *     [anchor delta delta][anchor delta][anchor delta delta]      with two anchors kept:
 *      3rd    2nd   1st                                            removed in this order
 *
 * Chain by chain, the oldest first, and each from its last file to its anchor, which is removed
 * when the removal of the others is on the disk. So wherever a prune ends, killed or refused, every
 * file that is left has all the files that it builds on.
 */

/* Reads the file's header, once. A file that cannot be read begins no chain: it is removed with the
 * chain before it. */
static bool is_anchor(refit_archive *archive, rft_archive_entry *entry)
{
    rft_archive_reader reader;
    if (entry->kind == RFT_ARCHIVE_UNSEEN) {
        entry->kind = RFT_ARCHIVE_DELTA;
        if (rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, NULL) ==
            REFIT_OK) {
            if (reader.header.base == 0) entry->kind = RFT_ARCHIVE_ANCHOR;
            rft_archive_reader_close(&reader);
        }
    }
    return entry->kind == RFT_ARCHIVE_ANCHOR;
}

/* Where the last so many chains begin; 0 if there are no more than that. */
static uint32_t find_cut(refit_archive *archive, uint32_t anchors)
{
    for (uint32_t i = archive->folder.count; i-- > 0;) {
        if (is_anchor(archive, &archive->folder.entries[i]) && --anchors == 0) return i;
    }
    return 0;
}

static refit_status sync_folder(const refit_archive *archive, refit_error *error)
{
    return fsync(archive->folder.dir) == 0 ? REFIT_OK : rft_disk_fail(error, "write", "the folder");
}

static refit_status remove_file(refit_archive *archive, rft_archive_entry *entry,
                                refit_error *error)
{
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(entry, name);
    if (unlinkat(archive->folder.dir, name, 0) != 0 && errno != ENOENT) {
        return rft_disk_fail(error, "remove", name);
    }
    const rft_version_id *held = &archive->held;
    if (held->version == entry->version && held->epoch == entry->epoch)
        archive->held = (rft_version_id){0};
    entry->kind = RFT_ARCHIVE_REMOVED;
    return REFIT_OK;
}

/* The files from `first` on, before `end`: an anchor with its deltas, or deltas without an anchor.
 */
static refit_status remove_chain(refit_archive *archive, uint32_t first, uint32_t end,
                                 refit_error *error)
{
    rft_archive_entry *entries = archive->folder.entries;
    for (uint32_t i = end; i-- > first + 1;)
        RFT_TRY(remove_file(archive, &entries[i], error));
    if (end - first > 1) RFT_TRY(sync_folder(archive, error));
    return remove_file(archive, &entries[first], error);
}

static refit_status remove_before(refit_archive *archive, uint32_t cut, refit_error *error)
{
    for (uint32_t first = 0, end; first < cut; first = end) {
        end = first + 1;
        while (end < cut && !is_anchor(archive, &archive->folder.entries[end]))
            end++;
        RFT_TRY(remove_chain(archive, first, end, error));
    }
    return sync_folder(archive, error);
}

refit_status refit_archive_prune(refit_archive *archive, uint32_t anchors, uint32_t *removed,
                                 refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL || anchors == 0, error, REFIT_ERR_INVALID,
                  "refit_archive_prune needs an archive, and at least one anchor to keep");
    RFT_REFUSE_IF(archive->folder.lock < 0 || archive->written, error, REFIT_ERR_STATE,
                  "files are removed from an archive that is open for writing, between versions");
    const uint32_t before = archive->folder.count, cut = find_cut(archive, anchors);
    refit_status status = cut == 0 ? REFIT_OK : remove_before(archive, cut, error);
    rft_archive_folder_drop(&archive->folder);
    if (removed != NULL) *removed = before - archive->folder.count;
    return status;
}
