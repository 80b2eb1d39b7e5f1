/*
 * The archive as an object: opening, closing, and what it tells about its files.
 */
#include <unistd.h>

#include "archive/archive_disk.h"
#include "archive/archive_reader.h"
#include "archive/archive_state.h"
#include "base/alloc.h"
#include "config/resolve.h"

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
    return rft_packer_open(own.broadcast_compress_level, &archive->packer, error);
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
        rft_packer_close(archive->packer);
        rft_free(archive);
    }
    return status;
}

void rft_archive_forget(refit_archive *archive)
{
    rft_manifest_close(archive->manifest);
    rft_free(archive->image);
    rft_free(archive->frame);
    rft_free(archive->same);
    rft_free(archive->changes);
    rft_free(archive->sums);
    rft_free(archive->digests);
    archive->manifest = NULL;
    archive->image = NULL;
    archive->frame = NULL;
    archive->same = NULL;
    archive->changes = NULL;
    archive->sums = NULL;
    archive->digests = NULL;
    archive->held = (rft_held){0};
}

void refit_archive_close(refit_archive *archive)
{
    if (archive == NULL) return;
    if (archive->written) (void)!refit_archive_abort(archive, NULL);
    rft_archive_forget(archive);
    rft_archive_folder_close(&archive->folder);
    rft_bytes_close(&archive->modes);
    rft_bytes_close(&archive->scratch);
    rft_packer_close(archive->packer);
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
