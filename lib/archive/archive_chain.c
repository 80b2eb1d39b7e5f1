/*
 * The files that a version needs, applied one over the other.
 *
 * Each link is checked, when the chain is followed and again when the next file is opened, which
 * may have been replaced since: same trainer, same tensors, and the base's digest. The hash of
 * every frame is checked when it is read, the digests of all tensors at the end.
 */
#include "archive/archive_chain.h"

#define DIGEST_BYTES ((uint64_t)8 << 20) /* of the image, in one step */

/* ---- By headers */

static bool builds_on(const rft_archive_header *header, const rft_archive_base *base)
{
    return base != NULL && header->base == base->id.version && header->epoch == base->id.epoch &&
           rft_digest128_equal(&header->base_digest, &base->id.digest) &&
           rft_digest128_equal(&header->manifest, &base->manifest->digest);
}

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

refit_status rft_archive_chain_first(const refit_archive *archive, const rft_archive_entry *last,
                                     const rft_archive_base *base, const rft_archive_entry **first,
                                     refit_error *error)
{
    rft_archive_header header, next;
    *first = last;
    RFT_TRY(read_header(archive, last, &header, error));
    while (header.base != 0 && !builds_on(&header, base)) {
        const rft_archive_entry *entry =
            rft_archive_folder_at(&archive->folder, last->run, header.base, header.epoch);
        RFT_REFUSE_IF(entry == NULL, error, REFIT_ERR_NOT_FOUND,
                      "version %llu builds on version %llu, and its file is not there",
                      (unsigned long long)header.version, (unsigned long long)header.base);
        refit_status status = read_header(archive, entry, &next, error);
        if (status == REFIT_OK) RFT_TRY(check_link(&header, &next, error));
        *first = entry;
        RFT_TRY(status);
        header = next;
    }
    return REFIT_OK;
}

/* ---- File after file */

/* The reader's, which it may have in common with the chain. */
static void close_reader(rft_archive_chain *chain)
{
    if (chain->reader.manifest == chain->manifest) chain->reader.manifest = NULL;
    rft_archive_reader_close(&chain->reader);
}

static refit_status blame(const rft_archive_entry *entry, refit_status status, refit_error *error)
{
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(entry, name);
    return rft_disk_blame(error, status, name);
}

/* Its lists, with the chain's manifest if that is the file's, too. */
static refit_status read_lists(rft_archive_chain *chain, rft_archive_reader *reader,
                               refit_error *error)
{
    if (rft_archive_reader_give(reader, chain->manifest))
        RFT_TRY(rft_archive_reader_check_given(reader, error));
    return rft_archive_reader_lists(reader, &chain->archive->limits, error);
}

/* Opens the file of chain->entry and reads its lists. It builds on `base`, or else on the file that
 * is open. */
static refit_status open_file(rft_archive_chain *chain, const rft_archive_base *base, bool first,
                              refit_error *error)
{
    rft_archive_reader reader;
    const refit_archive *archive = chain->archive;
    RFT_TRY(
        rft_archive_reader_find(&archive->folder, chain->entry, &archive->limits, &reader, error));
    const rft_archive_header *header = &reader.header;
    refit_status status = REFIT_OK;
    if (!first)
        status = check_link(header, &chain->reader.header, error);
    else if (header->base != 0 && !builds_on(header, base))
        status = rft_fail(error, REFIT_ERR_STALE, "it is an anchor no longer");
    if (status == REFIT_OK) status = read_lists(chain, &reader, error);
    if (status != REFIT_OK) {
        if (reader.manifest == chain->manifest) reader.manifest = NULL;
        rft_archive_reader_close(&reader);
        return blame(chain->entry, status, error);
    }
    if (!first) close_reader(chain);
    chain->reader = reader;
    return REFIT_OK;
}

refit_status rft_archive_chain_open(rft_archive_chain *chain, const refit_archive *archive,
                                    const rft_archive_entry *first, const rft_archive_entry *last,
                                    const rft_archive_base *base, refit_error *error)
{
    *chain = (rft_archive_chain){.archive = archive, .entry = first, .last = last};
    if (base != NULL) {
        chain->manifest = base->manifest;
        chain->base = base->image;
    }
    refit_status status = open_file(chain, base, true, error);
    if (status != REFIT_OK) {
        *chain = (rft_archive_chain){.entry = first};
        return status;
    }
    chain->lent = base != NULL && chain->reader.manifest == base->manifest;
    chain->manifest = chain->reader.manifest;
    return REFIT_OK;
}

void rft_archive_chain_close(rft_archive_chain *chain)
{
    if (chain->manifest == NULL && chain->reader.manifest == NULL) return;
    close_reader(chain);
    if (!chain->lent) rft_manifest_close(chain->manifest);
    *chain = (rft_archive_chain){0};
}

rft_manifest *rft_archive_chain_take_manifest(rft_archive_chain *chain)
{
    if (chain->lent) return NULL;
    chain->lent = true;
    return chain->manifest;
}

/* The versions of a chain follow each other in the list. A file that is gone since the chain was
 * followed cannot be opened. */
static refit_status next_file(rft_archive_chain *chain, refit_error *error)
{
    do {
        chain->entry++;
    } while (chain->entry->epoch != chain->last->epoch);
    RFT_TRY(open_file(chain, NULL, false, error));
    chain->base = NULL;
    return REFIT_OK;
}

static refit_status read_frame(rft_archive_chain *chain, unsigned char *image, refit_error *error)
{
    bool end;
    const unsigned char *base = chain->base == NULL ? image : chain->base;
    const uint64_t from = chain->reader.at;
    RFT_TRY(blame(chain->entry, rft_archive_reader_frame(&chain->reader, base, image, &end, error),
                  error));
    chain->bytes_read += chain->reader.at - from;
    if (!end) return REFIT_OK;
    chain->framed = chain->entry == chain->last;
    return chain->framed ? REFIT_OK : next_file(chain, error);
}

refit_status rft_archive_chain_step(rft_archive_chain *chain, unsigned char *image, bool *done,
                                    refit_error *error)
{
    *done = false;
    if (!chain->framed) return read_frame(chain, image, error);
    RFT_TRY(
        blame(chain->entry,
              rft_archive_reader_verify(&chain->reader, image, DIGEST_BYTES, &chain->cursor, error),
              error));
    *done = chain->cursor.done;
    return REFIT_OK;
}
