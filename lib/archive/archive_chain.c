/*
 * A chain of files, and the version that comes of it.
 *
 * The chain is followed first, down to its anchor, and each link checked: same trainer, same
 * tensors, and the base's digest. So a file that is missing or that belongs to another chain is
 * known before memory is taken. Every frame is hashed on the way; the digests of all tensors are
 * taken at the end.
 */
#include "archive/archive_chain.h"

#include "base/alloc.h"
#include "base/checked.h"

/* ---- By headers ---- */

static refit_status check_link(const rft_archive_header *header, const rft_archive_header *base,
                               refit_error *error)
{
    RFT_REFUSE_IF(!rft_digest128_equal(&header->base_digest, &base->digest) ||
                      !rft_digest128_equal(&header->manifest, &base->manifest),
                  error, REFIT_ERR_STALE,
                  "version %llu builds on another version %llu than the one that is there",
                  (unsigned long long)header->version, (unsigned long long)base->version);
    return REFIT_OK;
}

static refit_status read_header(const refit_archive *archive, const rft_archive_entry *entry,
                                rft_archive_header *out, refit_error *error)
{
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, error));
    *out = reader.header;
    rft_archive_reader_close(&reader);
    return REFIT_OK;
}

/* One step towards the anchor. */
static refit_status follow(const refit_archive *archive, const rft_archive_entry **entry,
                           rft_archive_header *header, refit_error *error)
{
    rft_archive_header base;
    const rft_archive_entry *next =
        rft_archive_folder_at(&archive->folder, (*entry)->run, header->base, header->epoch);
    RFT_REFUSE_IF(next == NULL, error, REFIT_ERR_NOT_FOUND,
                  "version %llu builds on version %llu, and its file is not there",
                  (unsigned long long)header->version, (unsigned long long)header->base);
    RFT_TRY(read_header(archive, next, &base, error));
    RFT_TRY(check_link(header, &base, error));
    *header = base;
    *entry = next;
    return REFIT_OK;
}

refit_status rft_archive_chain_anchor(const refit_archive *archive, const rft_archive_entry *entry,
                                      const rft_archive_entry **anchor, refit_error *error)
{
    rft_archive_header header;
    RFT_TRY(read_header(archive, entry, &header, error));
    while (header.base != 0)
        RFT_TRY(follow(archive, &entry, &header, error));
    *anchor = entry;
    return REFIT_OK;
}

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

refit_status rft_snapshot_take_lists(refit_snapshot *snapshot, rft_archive_reader *reader,
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

static refit_status take_memory(refit_snapshot *snapshot, refit_error *error)
{
    uint64_t bytes = snapshot->manifest->store_bytes, room = 0;
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

/* A file that was replaced since the chain was followed is seen here. */
static refit_status check_continues(const refit_snapshot *snapshot, const rft_archive_header *next,
                                    refit_error *error)
{
    if (snapshot->manifest == NULL) {
        RFT_REFUSE_IF(next->base != 0, error, REFIT_ERR_STALE, "it is an anchor no longer");
        return REFIT_OK;
    }
    return check_link(next, &snapshot->header, error);
}

static refit_status apply_reader(refit_snapshot *snapshot, rft_archive_reader *reader, bool last,
                                 const rft_limits *limits, refit_error *error)
{
    RFT_TRY(check_continues(snapshot, &reader->header, error));
    RFT_TRY(rft_archive_reader_lists(reader, limits, error));
    bool first = snapshot->manifest == NULL;
    if (first) {
        snapshot->manifest = reader->manifest;
        refit_status status = take_memory(snapshot, error);
        snapshot->manifest = NULL;
        RFT_TRY(status);
    }
    RFT_TRY(rft_archive_reader_frames(reader, snapshot->image, error));
    if (last) RFT_TRY(rft_archive_reader_verify(reader, snapshot->image, error));
    return rft_snapshot_take_lists(snapshot, reader, error);
}

static refit_status apply_file(const refit_archive *archive, const rft_archive_entry *entry,
                               bool last, refit_snapshot *snapshot, refit_error *error)
{
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, error));
    rft_archive_entry_name(entry, snapshot->name);
    refit_status status = apply_reader(snapshot, &reader, last, &archive->limits, error);
    rft_archive_reader_close(&reader);
    return rft_disk_blame(error, status, snapshot->name);
}

/* The versions of a chain follow each other in the list. A file that is gone since the chain was
 * followed cannot be opened. */
refit_status rft_archive_chain_apply(const refit_archive *archive, const rft_archive_entry *anchor,
                                     const rft_archive_entry *last, refit_snapshot *snapshot,
                                     refit_error *error)
{
    for (const rft_archive_entry *entry = anchor; entry <= last; entry++) {
        if (entry->epoch == last->epoch)
            RFT_TRY(apply_file(archive, entry, entry == last, snapshot, error));
    }
    return REFIT_OK;
}
